"""The tile of the decode kernel: rows (queries times the heads of a group) by keys. Imports torch alone.

TILEWISE_KV_TILE=MxNxWARPSxSTAGESxPROGRAMS[xPREFETCH[xREGISTERS[xSPLITS]]] overrides the table, for measurements.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ....kv_request import KV_TILE
from ..tiles import Arch


class KvTile(NamedTuple):
    """`prefetch_pages`: page numbers are loaded one iteration before their keys, 1 or 0. `max_registers` of a thread; 0
    for no limit. `splits` of sequences of different lengths, for each program that runs at once."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    prefetch_pages: int = 1
    max_registers: int = 0
    splits: int = 2


def tile(arch: Arch, itemsize: int, padded_dim: int, rows: int, quantised: str | None = None) -> KvTile:
    """The tile for sequences with at most so many rows (0 if unknown). `quantised`: None if K and V are not; "token" if
    they have 8 bits with scales by token, "one" if one of them is a 16-bit float, "both" otherwise.

    >>> tile(90, 2, 128, 4)
    KvTile(block_m=64, block_n=64, warps=4, stages=3, programs_per_sm=2, prefetch_pages=1, max_registers=0, splits=3)
    """
    override = os.environ.get(KV_TILE)
    if override:
        return KvTile(*map(int, override.split("x")))
    fits_16 = 0 < rows <= 16  # the smallest tile of tl.dot has 16 rows
    large = arch in (90, 100, 103)
    if quantised is not None and itemsize == 2:
        return _quantised(quantised, large, padded_dim, fits_16)
    if large:
        return _large(itemsize, padded_dim, fits_16)
    return _small(itemsize, padded_dim, fits_16)


def _large(itemsize: int, dim: int, fits_16: bool) -> KvTile:
    """wgmma needs 64 rows; most of them are padding in decode, which is bound by memory."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 128 else KvTile(16, 16, 4, 1, 1)
    splits = 3 if fits_16 else 2  # lengths of a normal distribution: 270 us with 3, 278 with 2, 291 with 1 (H200)
    if dim <= 64:
        return KvTile(64, 128, 4, 3, 2, splits=splits)
    if dim <= 128:
        # 32 heads on 8, 4096 keys of 64: 254 us; 16x64x4x3x3x1x168 292 (but 23.9 instead of 25.0 for 8192 of one)
        return KvTile(64, 64, 4, 3, 2, splits=splits)
    if dim <= 256:
        return KvTile(64, 64, 8, 2, 1)
    return KvTile(16, 32, 8, 2, 1)


def _quantised(kind: str, large: bool, dim: int, fits_16: bool) -> KvTile:
    """With 16 rows the matrix product takes both operands from registers, where numbers are unpacked. The operands of
    wgmma go back to shared memory first: one query of 32 heads on 8, 8192 keys of 128 in e4m3: 509 us with 16 rows, 982
    with 64 (H200)."""
    if dim <= 128 and fits_16 and large:
        # 3 programs on an SM take 509 us, 2 take 571; with scales by token 168 registers do not suffice
        programs, registers = (3, 168) if kind == "both" else (2, 0)
        return KvTile(16, 128, 4, 2 if kind == "one" else 3, programs, max_registers=registers)
    if dim <= 128:
        return KvTile(16, 64, 4, 2, 2) if fits_16 else KvTile(64, 32, 4, 3 if large else 2, 2)
    if dim <= 256:
        return KvTile(16, 64, 4, 2, 2) if large else KvTile(16, 32, 4, 2, 1)
    return KvTile(16, 32, 4, 2, 1) if large else KvTile(16, 16, 4, 2, 1)


def _small(itemsize: int, dim: int, fits_16: bool) -> KvTile:
    """For 100 KB of shared memory and matrix products with operands in registers."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 64 else KvTile(16, 16, 4, 1, 2)
    if dim <= 64:
        return KvTile(16 if fits_16 else 64, 64, 4, 3, 2)
    if dim <= 128:
        return KvTile(16 if fits_16 else 64, 64 if fits_16 else 32, 4, 2, 2)
    if dim <= 256:
        return KvTile(16 if fits_16 else 32, 32, 4, 2, 1)
    return KvTile(16, 16, 8, 1, 1)


INTERPRETER = KvTile(16, 16, 4, 1, 1)
INTERPRETED_PROCESSORS = 5
