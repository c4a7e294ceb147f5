"""What Triton makes of a kernel, stage by stage: the program as written, on a GPU's layouts, in PTX, in machine code.

ttir    what the kernel says: load, dot, reduce; tiles without a place
ttgir   where tiles live and who moves them: layouts, buffers in shared memory, asynchronous copies, matrix units
ptx     NVIDIA's portable assembly
sass    what the SM executes
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tilewise.costs.compiled import Compiled


class Seen(NamedTuple):
    """An operation that tells something, how often it stands in the text of its stage, and what it tells."""

    stage: str
    operation: str
    times: int
    meaning: str


WORTH_SEEING = (
    ("ttir", r"tt\.load\b", "tt.load", "a tile is read; from where, and by whom, is not said"),
    ("ttir", r"tt\.dot\b", "tt.dot", "a product of tiles"),
    ("ttir", r'"tt\.reduce"', "tt.reduce", "a maximum or a sum along a row"),
    ("ttgir", r"ttg\.local_alloc\b", "local_alloc", "buffers in shared memory: one more than the loop needs at a time"),
    ("ttgir", r"ttg\.async_copy_global_to_local\b", "async_copy", "loads that do not wait: software pipelining"),
    ("ttgir", r"ttg\.async_wait\b", "async_wait", "wait for the copy of this iteration, not for those after it"),
    ("ttgir", r"ttng\.warp_group_dot\b", "warp_group_dot", "Hopper's asynchronous matrix product"),
    ("ttgir", r"ttg\.convert_layout\b", "convert_layout", "elements change threads: a cost worth avoiding"),
    ("ptx", r"cp\.async\.c[ag]\.", "cp.async", "16 bytes from global to shared memory, past the registers"),
    ("ptx", r"wgmma\.mma_async", "wgmma.mma_async", "matrix product of a warpgroup (sm_90)"),
    ("ptx", r"mma\.sync", "mma.sync", "matrix product of a warp (sm_80)"),
    ("ptx", r"ex2\.approx", "ex2.approx", "2^x on the special-function units: why scores are kept in log2 units"),
    ("sass", r"LDGSTS", "LDGSTS", "cp.async, as executed"),
    ("sass", r"HGMMA", "HGMMA", "wgmma, as executed"),
    ("sass", r"HMMA", "HMMA", "mma.sync, as executed"),
    ("sass", r"MUFU", "MUFU", "exponentials and other special functions"),
)


def stages(made: Compiled) -> list[Seen]:
    """The operations worth seeing that are there."""
    found = []
    for stage, pattern, name, meaning in WORTH_SEEING:
        count = made.instructions[name] if stage == "sass" else len(re.findall(pattern, str(made.asm[stage])))
        if count:
            found.append(Seen(stage, name, count, meaning))
    return found


def text(made: Compiled) -> str:
    rows = [f"{seen.stage:6} {seen.operation:16} {seen.times:4}  {seen.meaning}" for seen in stages(made)]
    used = f"{made.registers} registers, {made.shared} bytes of shared memory, {made.spills} bytes spilled"
    return "\n".join([*rows, used])
