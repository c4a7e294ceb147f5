"""What Triton makes of a kernel, stage by stage: the program as written, on a GPU's layouts, in PTX, in machine code.

ttir    what the kernel says: load, dot, reduce; tiles without a place
ttgir   where tiles live and who moves them: layouts, buffers in shared memory, asynchronous copies, matrix units
ptx     NVIDIA's portable assembly
sass    what the SM executes
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tilewise_lab.costs.compiled import Compiled
from tilewise_lab.language import say


class Seen(NamedTuple):
    """An operation that tells something, how often it stands in the text of its stage, and what it tells."""

    stage: str
    operation: str
    times: int
    meaning: str


WORTH_SEEING = (
    (
        "ttir",
        r"tt\.load\b",
        "tt.load",
        "a tile is read; from where, and by whom, is not said",
        "读一块；从哪里读、由谁读，没有说",
    ),
    ("ttir", r"tt\.dot\b", "tt.dot", "a product of tiles", "块与块的乘积"),
    ("ttir", r'"tt\.reduce"', "tt.reduce", "a maximum or a sum along a row", "沿一行求最大值或求和"),
    (
        "ttgir",
        r"ttg\.local_alloc\b",
        "local_alloc",
        "buffers in shared memory: one more than the loop needs at a time",
        "共享内存里的缓冲区：比循环同时需要的多一个",
    ),
    (
        "ttgir",
        r"ttg\.async_copy_global_to_local\b",
        "async_copy",
        "loads that do not wait: software pipelining",
        "不等待的读取：软件流水线",
    ),
    (
        "ttgir",
        r"ttg\.async_wait\b",
        "async_wait",
        "wait for the copy of this iteration, not for those after it",
        "等这一轮的复制，不等后面的",
    ),
    (
        "ttgir",
        r"ttng\.warp_group_dot\b",
        "warp_group_dot",
        "Hopper's asynchronous matrix product",
        "Hopper 的异步矩阵乘法",
    ),
    (
        "ttgir",
        r"ttg\.convert_layout\b",
        "convert_layout",
        "elements change threads: a cost worth avoiding",
        "元素换线程：值得避免的开销",
    ),
    (
        "ptx",
        r"cp\.async\.c[ag]\.",
        "cp.async",
        "16 bytes from global to shared memory, past the registers",
        "16 字节从显存到共享内存，不经过寄存器",
    ),
    (
        "ptx",
        r"wgmma\.mma_async",
        "wgmma.mma_async",
        "matrix product of a warpgroup (sm_90)",
        "一个 warpgroup 的矩阵乘法（sm_90）",
    ),
    ("ptx", r"mma\.sync", "mma.sync", "matrix product of a warp (sm_80)", "一个 warp 的矩阵乘法（sm_80）"),
    (
        "ptx",
        r"ex2\.approx",
        "ex2.approx",
        "2^x on the special-function units: why scores are kept in log2 units",
        "特殊函数单元上的 2^x：分数因此以 log2 为单位",
    ),
    ("sass", r"LDGSTS", "LDGSTS", "cp.async, as executed", "实际执行的 cp.async"),
    ("sass", r"HGMMA", "HGMMA", "wgmma, as executed", "实际执行的 wgmma"),
    ("sass", r"HMMA", "HMMA", "mma.sync, as executed", "实际执行的 mma.sync"),
    ("sass", r"MUFU", "MUFU", "exponentials and other special functions", "指数和其他特殊函数"),
)


def stages(made: Compiled) -> list[Seen]:
    """The operations worth seeing that are there."""
    found = []
    for stage, pattern, name, *meaning in WORTH_SEEING:
        count = made.instructions[name] if stage == "sass" else len(re.findall(pattern, str(made.asm[stage])))
        if count:
            found.append(Seen(stage, name, count, say(*meaning)))
    return found


def text(made: Compiled) -> str:
    rows = [f"{seen.stage:6} {seen.operation:16} {seen.times:4}  {seen.meaning}" for seen in stages(made)]
    used = say(
        f"{made.registers} registers, {made.shared} bytes of shared memory, {made.spills} bytes spilled",
        f"{made.registers} 个寄存器，共享内存 {made.shared} 字节，溢出 {made.spills} 字节",
    )
    return "\n".join([*rows, used])
