"""What is worth seeing in a compiled kernel is found in each of its stages, and counted."""

from __future__ import annotations

from collections import Counter

from tilewise_lab.costs.compiled import Compiled
from tilewise_lab.explain.stages import stages, text

ASM = {
    "ttir": """%1 = tt.load %0\n%2 = tt.load %0\n%3 = tt.dot %1, %2\n%4 = "tt.reduce"(%3)""",
    "ttgir": "%1 = ttg.local_alloc\n%2 = ttg.async_copy_global_to_local %0, %1\nttg.async_wait %2\nttng.warp_group_dot",
    "ptx": "cp.async.cg.shared.global [%r1], [%rd1];\nwgmma.mma_async.sync.aligned\nex2.approx.ftz.f32 %f1, %f2;",
}
MADE = Compiled(168, 0, 49152, 4, Counter(LDGSTS=16, HGMMA=8, MUFU=64, FADD=100), asm=ASM)


def test_every_stage_is_shown_with_what_the_compiler_did_there():
    """As written; on layouts, with buffers and copies that do not wait; in assembly; as the SM executes it."""
    assert [(seen.stage, seen.operation, seen.times) for seen in stages(MADE)] == [
        ("ttir", "tt.load", 2), ("ttir", "tt.dot", 1), ("ttir", "tt.reduce", 1),
        ("ttgir", "local_alloc", 1), ("ttgir", "async_copy", 1), ("ttgir", "async_wait", 1),
        ("ttgir", "warp_group_dot", 1),
        ("ptx", "cp.async", 1), ("ptx", "wgmma.mma_async", 1), ("ptx", "ex2.approx", 1),
        ("sass", "LDGSTS", 16), ("sass", "HGMMA", 8), ("sass", "MUFU", 64),
    ]  # fmt: skip
    *lines, used = text(MADE).splitlines()
    assert len(lines) == 13
    assert "software pipelining" in lines[4]
    assert used == "168 registers, 49152 bytes of shared memory, 0 bytes spilled"
