"""The launch that follows portable kernels which raise flags (`repair`)."""

from typing import Any

from torch import Tensor

from ..launch import Launch, multiprocessors
from . import tiles


def repair(kernel: Any, total: int, args: tuple[Any, ...], *of: Launch) -> Launch:
    """Of so many tiles of the launches `of`, by as many programs as the GPU runs at once."""
    options = {name: of[0].options[name] for name in ("SCORE_MOD", "MASK_MOD", "PLAN") if name in of[0].options}
    warps = max(x.options["num_warps"] for x in of)
    options |= {"EACH": True, "num_warps": warps, "num_stages": 1}
    if of[0].options["PLAN"].OVERLAP:
        options["launch_pdl"] = True
    return Launch(kernel, min(total, _processors(args)), args, options)


def _processors(args: tuple[Any, ...]) -> int:
    """Of the device where a launch's first tensor lies."""
    first = args[0]
    while not isinstance(first, Tensor):
        first = first[0]
    return multiprocessors(first.device) if first.is_cuda else tiles.INTERPRETED_PROCESSORS
