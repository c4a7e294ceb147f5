"""Mods: plain Python functions that change a score or hide a pair, understood by every backend.

`score_mod` and `mask_mod` decorate a function; the rest are built-ins, each an ordinary mod.
"""

from tilewise.mods.blocks import BlockMask, block_mask, block_mask_varlen
from tilewise.mods.builtin import (
    alibi,
    block_diagonal,
    dilated_window,
    document,
    neighbourhood_2d,
    prefix_lm,
    softcap,
    strided_sparse,
    t5_relative,
    window_with_globals,
)
from tilewise.mods.program import PROGRAMS, Mod, Program, mask_mod, score_mod

__all__ = [
    "PROGRAMS",
    "BlockMask",
    "Mod",
    "Program",
    "alibi",
    "block_diagonal",
    "block_mask",
    "block_mask_varlen",
    "dilated_window",
    "document",
    "mask_mod",
    "neighbourhood_2d",
    "prefix_lm",
    "score_mod",
    "softcap",
    "strided_sparse",
    "t5_relative",
    "window_with_globals",
]
