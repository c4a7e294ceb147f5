"""Exact attention for PyTorch, computed tile by tile."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import mods
from .api import attention, attention_varlen, check
from .merge import merge
from .mods import block_mask, block_mask_varlen, mask_mod, score_mod
from .mods.dropout import dropout_mask
from .spec import AttentionError

if TYPE_CHECKING:
    from .costs.explanation import Explanation

__all__ = [
    "AttentionError",
    "attention",
    "attention_varlen",
    "block_mask",
    "block_mask_varlen",
    "check",
    "dropout_mask",
    "explain",
    "mask_mod",
    "merge",
    "mods",
    "score_mod",
]
__version__ = "0.1.0"
LATER = ("distributed",)


def __getattr__(name: str) -> Any:
    """Parts of the library that are imported when they are first asked for."""
    if name in LATER:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def explain(*args: Any, show: bool = True, **options: Any) -> "Explanation":
    """What a call would run, what it costs and what would make it faster; printed (unless show=False) and returned.

        tilewise.explain(q, k, v, causal=True)                                          where the tensors are
        tilewise.explain((4, 4096, 16, 128), (4, 4096, 4, 128), (4, 4096, 4, 128), device="H200")   shapes will do

    The arguments are those of `attention` or `attention_varlen`, and `device`, `backward`, `dtype`, `compiled`:
    see `tilewise.costs.explain.explain`. Nothing is launched.
    """
    from .costs.explain import explain as told_by

    told = told_by(*args, **options)
    if show:
        print(told)
    return told
