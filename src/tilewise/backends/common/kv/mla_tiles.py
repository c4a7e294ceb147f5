"""The tile of the MLA kernel: rows (queries times heads) by tokens of 576 numbers. Imports torch alone.

TILEWISE_KV_TILE overrides the table, as in `kv_tiles`.
"""

from __future__ import annotations

import os

from ....kv_request import KV_TILE
from ..tiles import Arch
from .kv_tiles import KvTile


def latent_tile(arch: Arch, itemsize: int, rows: int, packed: bool) -> KvTile:
    """The tile for sequences with at most so many rows (0 if unknown). `packed`: DeepSeek's fp8 format.

    >>> latent_tile(90, 2, 16, False)
    KvTile(block_m=16, block_n=64, warps=8, stages=2, programs_per_sm=1, prefetch_pages=1, max_registers=0)
    """
    override = os.environ.get(KV_TILE)
    if override:
        return KvTile(*map(int, override.split("x")))
    fits_16 = 0 < rows <= 16
    if itemsize == 4:
        return KvTile(16, 16, 8, 1, 1)
    if arch != 90:
        return KvTile(16, 32, 8, 2, 1) if arch in (100, 103) else KvTile(16, 16, 8, 2, 1)
    if packed:
        return KvTile(16 if fits_16 else 64, 64, 8, 2, 1)
    return KvTile(16 if fits_16 else 64, 64, 8, 2, 1)
