"""The launch of the NaN repair pass, which follows kernels that set flags."""

from typing import Any

from .launch import Launch, Target


def repair(kernel: Any, total: int, args: tuple[Any, ...], target: Target, *of: Launch) -> Launch:
    """The repair of `total` tiles of the launches `of`, by as many programs as the GPU runs at once."""
    names = ("SCORE_MOD", "MASK_MOD", "PLAN")
    options: dict[str, Any] = {name: of[0].options[name] for name in names if name in of[0].options}
    warps = max(x.options["num_warps"] for x in of)
    options |= {"EACH": True, "num_warps": warps, "num_stages": 1}
    if of[0].options["PLAN"].OVERLAP:
        options["launch_pdl"] = True
    return Launch(kernel, min(total, target.processors), args, options)
