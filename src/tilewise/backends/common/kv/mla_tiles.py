"""The tile of the MLA kernel: rows (queries times heads) by tokens of 576 numbers. Imports torch alone.

TILEWISE_KV_TILE overrides the table, as in `kv_tiles`.
"""

from __future__ import annotations

import os

from ....kv_request import KV_TILE
from ..tiles import Arch
from .kv_tiles import KvTile


def latent_tile(arch: Arch, itemsize: int, rows: int, portable: bool) -> KvTile:
    """The tile for sequences with at most so many rows (0 if unknown). `portable`: what the Hopper kernel does not
    read: a token table, or DeepSeek's fp8 format with queries that are not bfloat16 or splits of a fixed size.

    >>> latent_tile(90, 2, 16, False)[:5], latent_tile(90, 2, 16, True)[:5]
    ((64, 64, 8, 2, 1), (16, 64, 8, 2, 1))
    """
    override = os.environ.get(KV_TILE)
    if override:
        return KvTile(*map(int, override.split("x")))
    if itemsize == 4:
        return KvTile(16, 16, 8, 1, 1)
    if arch != 90:
        return KvTile(16, 32, 8, 2, 1) if arch in (100, 103) else KvTile(16, 16, 8, 2, 1)
    # 16 heads, 32768 keys of 64 sequences: 561 us with 64 rows in the Hopper kernel, 904 with 16 in the portable one,
    # which read V a second time then (H200)
    return KvTile(16 if portable and 0 < rows <= 16 else 64, 64, 8, 2, 1)
