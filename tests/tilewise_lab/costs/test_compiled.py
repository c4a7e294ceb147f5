"""Reading a compiler's log: on logs and listings of our own, without a compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilewise_lab.costs import compiled


def test_search_tells_what_is_missing() -> None:
    assert compiled._search(r"Used (\d+) registers", "ptxas info: Used 168 registers, 400 bytes cmem[0]") == "168"
    with pytest.raises(RuntimeError, match="the assembler's log has no"):
        compiled._search(r"Used (\d+) registers", "ptxas fatal")


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 x)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [x];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd2];
    add.s32 %r3, %r2, 1;
    st.global.u32 [%rd2], %r3;
    ret;
}
"""


def test_an_assembler_tells_registers_spills_and_instructions() -> None:
    """A kernel small enough to count: what ptxas and nvdisasm say of it, and what Triton knows of its memory."""
    pytest.importorskip("triton")
    metadata = SimpleNamespace(shared=4096, num_warps=4)
    found = compiled.inspect(SimpleNamespace(asm={"ptx": PTX}, metadata=metadata), 80)
    assert 1 <= found.registers <= 16
    assert (found.spills, found.shared, found.warps) == (0, 4096, 4)
    assert (found.instructions["LDG"], found.instructions["STG"], found.instructions["EXIT"]) == (1, 1, 1)


def test_spilled_bytes_are_stores_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    log = "ptxas info: 8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nUsed 255 registers"
    monkeypatch.setattr(compiled, "_tool", lambda *_: log)
    metadata = SimpleNamespace(shared=0, num_warps=4)
    assert compiled.inspect(SimpleNamespace(asm={"ptx": ""}, metadata=metadata), 90).spills == 32
