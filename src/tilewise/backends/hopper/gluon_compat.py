"""The Gluon names that moved between triton 3.6 and 3.9, and the few operations Gluon has no word for.

Kernels import Gluon from here. Each function below is one PTX instruction or one renamed call; the emulator
(tilewise_lab.emulator) knows each of them by name and never reads the PTX.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

__all__ = [
    "TensorDescriptor", "add_out", "arrive", "await_previous", "barrier", "columns", "copy_in", "copy_out",
    "fence_async_shared", "gl", "gluon", "here", "hide_from", "hide_until", "let_next_start", "mbarrier", "meet",
    "narrow", "pass_turn", "recast", "semaphore_release", "semaphore_wait", "signal", "tma", "wait_turn",
    "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip


@gluon.jit
def arrive(bar):
    """Arrive once, by one thread of the partition. mbarrier.arrive would be surrounded by two barriers of the whole
    partition; expecting no bytes is an arrival that costs one instruction. The caller's warps must be together already:
    after a wgmma wait they are.
    """
    mbarrier.expect(bar, 0)


@gluon.jit
def wait_turn(ID: gl.constexpr, THREADS: gl.constexpr):
    """Block until THREADS threads, these included, have come to hardware barrier ID."""
    gl.inline_asm_elementwise(
        f"bar.sync {ID}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(ID: gl.constexpr, THREADS: gl.constexpr):
    """Come to hardware barrier ID without waiting."""
    gl.inline_asm_elementwise(
        f"bar.arrive {ID}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_start():
    """Once all programs have come here, or ended, the next kernel's may be placed, if it was launched to overlap: it
    waits by itself for what this one computes.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_previous():
    """Block until the kernel before this one, if they were launched to overlap, has ended and what it wrote is seen."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def narrow(x, DTYPE: gl.constexpr):
    """float32 to DTYPE, rounding to nearest even, two at a time. As assembly because LLVM moves a plain conversion
    across the loop's back edge, where it holds twice the registers.
    """
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def hide_from(s, limit):
    """s[r, c] where c < limit[r], else -inf.

    One compare and one select per score, kept together: apart, the compiler computes all the predicates first and
    packs them into bits. Bits 1 and 2 of a column come from the lane, the others from the register: the lane's part
    moves to the limit, so that the column becomes a constant.
    """
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    fixed, _ = gl.broadcast((c & -7)[None, :], s)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=r,r,r,r", [s, fixed, limit[:, None] - (c & 6)[None, :]], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def hide_until(s, limit):
    """s[r, c] where c >= limit[r], else -inf."""
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    fixed, _ = gl.broadcast((c & -7)[None, :], s)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=r,r,r,r", [s, fixed, limit[:, None] - (c & 6)[None, :]], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def columns(first, s):
    """first, first + 1, .. along the rows of s: one register, to which constants are added. Of first and a lane's
    column the compiler would make a sum for each register, ahead of the loop, and keep them all."""
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    lane = gl.inline_asm_elementwise(
        "add.s32 $0, $1, $2;", "=r,r,r", [c & 6, first], dtype=gl.int32, is_pure=True, pack=1
    )
    return lane + (c & -7)


@builtin
def add_out(desc, where, tile, _semantic=None):
    """global[where] += tile, by the copy engine. Triton 3.9 calls it tma.async_atomic_add; 3.6 has no name for it."""
    where = _semantic._convert_to_ir_values(where, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, where, tile.handle)


@builtin
def recast(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as tiles of another kind: memory.reinterpret in Triton 3.9, memory._reinterpret in 3.6."""
    shape = [int(_unwrap_if_constexpr(n)) for n in shape]
    return _semantic.memdesc_reinterpret(memory, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))


@gluon.jit
def meet(id, THREADS: gl.constexpr):
    """wait_turn at a hardware barrier known only at run time."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal(id, THREADS: gl.constexpr):
    """pass_turn at a hardware barrier known only at run time."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def here(x):
    """x, ints. What follows from the kernel's arguments alone the compiler computes before the warps learn their
    jobs, and keeps for all of them, in registers that the producer has not got; not so what follows from this."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_wait(ptr, value):
    """Spin until *ptr >= value. What its releasers wrote is then visible, to the copy engine too."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 v; again: ld.acquire.gpu.global.u32 v, [$1]; setp.lt.u32 p, v, $2; @p bra again;"
        " fence.proxy.async; mov.u32 $0, v; }",
        "=r,l,r", [ptr.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def semaphore_release(ptr):
    """Once what this warp sent out is in memory (store_wait only says that it has been read), one lane adds 32 to
    *ptr."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; cp.async.bulk.wait_group 0; bar.warp.sync -1; elect.sync _|p, -1;"
        " @p red.release.gpu.global.add.u32 [$1], 32; mov.u32 $0, 0; }",
        "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
