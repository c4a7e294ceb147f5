"""The launch of the NaN repair pass, which follows kernels that set flags."""

from typing import Any

from .launch import Launch, Target, pdl_option

WHOLE = 512  # no piece of a row: one value that is not finite makes the whole row nan


def repair(kernel: Any, total: int, args: tuple[Any, ...], target: Target, *of: Launch) -> Launch:
    """The repair of `total` tiles of the launches `of`, by as many programs as the GPU runs at once."""
    names = ("SCORE_MOD", "MASK_MOD", "CONFIG")
    options: dict[str, Any] = {name: of[0].options[name] for name in names if name in of[0].options}
    options["CONFIG"] = options["CONFIG"]._replace(PIECE=WHOLE)
    options |= {"num_warps": max(x.options["num_warps"] for x in of), "num_stages": 1}
    return Launch(kernel, min(total, target.num_sms), args, options | pdl_option(of[0].options["CONFIG"].OVERLAP))


def repairs(kernel: Any, of: Launch, target: Target, **options: Any) -> list[Launch]:
    """The repair of all tiles of a launch, if it sets flags."""
    if of.args[0].flags is None:
        return []
    launch = repair(kernel, of.programs, (*of.args, of.programs), target, of)
    return [launch._replace(options=launch.options | options)]
