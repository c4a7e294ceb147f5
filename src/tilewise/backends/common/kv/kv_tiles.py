"""Which tile serves a KV cache: rows (queries times the heads of a group) by keys. Imports torch alone.

TILEWISE_KV_TILE=MxNxWARPSxSTAGESxPROGRAMS[xCARRY[xREGISTERS]] overrides the table, to measure others.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ..tiles import Arch


class KvTile(NamedTuple):
    """`per`: programs for each processor. `carry`: pages are known a tile ahead of their keys (else they are loaded
    ahead like these). `registers`: of a thread, at most; 0 for what the compiler takes."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    per: int
    carry: int = 1
    registers: int = 0


def asked() -> str | None:
    """The tile that the environment names."""
    return os.environ.get("TILEWISE_KV_TILE")


def tile(arch: Arch, itemsize: int, padded_dim: int, rows: int) -> KvTile:
    """Of at most so many rows (0: nobody knows).

    >>> tile(90, 2, 128, 4)
    KvTile(block_m=64, block_n=64, warps=4, stages=3, per=2, carry=1, registers=0)
    """
    given = asked()
    if given:
        return KvTile(*map(int, given.split("x")))
    few = 0 < rows <= 16
    if arch in (90, 100, 103):
        return _large(itemsize, padded_dim, few)
    return _small(itemsize, padded_dim, few)


def _large(itemsize: int, dim: int, few: bool) -> KvTile:
    """Products of 64 rows are the least that the matrix units of a warpgroup take, and decoding waits for memory."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 128 else KvTile(16, 16, 4, 1, 1)
    if dim <= 64:
        # one query of 64 heads on 8, 8192 keys of 64 sequences: 266 us; 64x128x4x3x2 273, 16x128x8x3x2 277 (H200)
        return KvTile(16, 128, 4, 3, 3, registers=168) if few else KvTile(64, 128, 4, 3, 2)
    if dim <= 128:
        # 32 heads on 8, 4096 keys of 64: 265 us; 16x64x4x3x3x1x168 269 (but 24.6 instead of 26.4 for 8192 of one)
        return KvTile(64, 64, 4, 3, 2)
    if dim <= 256:
        return KvTile(64, 64, 8, 2, 1)
    return KvTile(16, 32, 8, 2, 1)


def _small(itemsize: int, dim: int, few: bool) -> KvTile:
    """A hundred KB of shared memory, operands in registers."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 64 else KvTile(16, 16, 4, 1, 2)
    if dim <= 64:
        return KvTile(16 if few else 64, 64, 4, 3, 2)
    if dim <= 128:
        return KvTile(16 if few else 64, 64 if few else 32, 4, 2, 2)
    if dim <= 256:
        return KvTile(16 if few else 32, 32, 4, 2, 1)
    return KvTile(16, 16, 8, 1, 1)


INTERPRETER = KvTile(16, 16, 4, 1, 1)
INTERPRETED_PROCESSORS = 5
