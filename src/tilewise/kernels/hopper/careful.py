"""The Plan of the repair, a portable kernel, of what Hopper's compute."""

from ..launch import INTERPRETED
from ..shapes import Problem
from ..tile.tuples import Plan

STEP = 16  # rows of the other side that it takes at a time


def careful(size: Problem, rows: int, block_d: int, block_dv: int) -> Plan:
    """By tiles of so many rows."""
    return Plan(
        GROUP=size.heads // size.kv_heads, D=size.d, DV=size.dv, BLOCK_M=rows, BLOCK_N=rows, BLOCK_D=block_d,
        BLOCK_DV=block_dv, FOLD=False, PRECISION="ieee", CHUNK=512, PACKED=size.packed, OVERLAP=not INTERPRETED,
    )  # fmt: skip
