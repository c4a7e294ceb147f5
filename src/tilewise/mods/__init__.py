"""Mods: plain Python functions that change a score or hide a pair, on every backend.

`score_mod` and `mask_mod` decorate a function; the others are built-in mods.
"""

import torch

from . import composed  # noqa: F401  # registers its functions
from .blocks import BlockMask, block_mask, block_mask_varlen, restored_block_mask
from .builtin import (
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
from .modifier import mask_mod, score_mod
from .program import PROGRAMS, Mod, Program, restored_mod
from .trees import prefix_tree, tree_positions

torch.serialization.add_safe_globals([restored_mod, restored_block_mask])  # for torch.load(..., weights_only=True)

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
    "prefix_tree",
    "score_mod",
    "softcap",
    "strided_sparse",
    "t5_relative",
    "tree_positions",
    "window_with_globals",
]
