"""Gluon's names where Triton 3.6 and 3.9 differ, and the PTX instructions that Gluon has no function for.

Kernels import Gluon from here. Each function below is one PTX instruction or one renamed call; the emulator
(tilewise_lab.emulator) replaces each of them by name and never reads the PTX. docs/gotchas.md lists those that only
work around the compiler.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_async = async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# what is imported here for the kernels
__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


@gluon.jit
def arrive(bar):
    """Arrives once at an mbarrier, by one thread of the partition. mbarrier.arrive would add two barriers of the whole
    partition; expecting 0 bytes is an arrival in one instruction. The warps of the caller must be synchronised already,
    as they are after a wgmma wait.
    """
    mbarrier.expect(bar, 0)


@gluon.jit
def arrive_copied(bar):
    """Every thread of the partition arrives at an mbarrier once the `copy_async` that it has issued are complete. Their
    shared memory is then there for wgmma."""
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def bar_sync(ID: gl.constexpr, THREADS: gl.constexpr):
    """Waits at named barrier ID until THREADS threads, these included, have arrived."""
    gl.inline_asm_elementwise(
        f"bar.sync {ID}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive(ID: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at named barrier ID without waiting."""
    gl.inline_asm_elementwise(
        f"bar.arrive {ID}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_sync_dynamic(id, THREADS: gl.constexpr):
    """`bar_sync` with a run-time barrier id."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive_dynamic(id, THREADS: gl.constexpr):
    """`bar_arrive` with a run-time barrier id."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_launch_dependents():
    """Lets the next kernel start once all programs have come here or ended (programmatic dependent launch). That kernel
    calls `gdc_wait` before it reads what this one writes.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_wait():
    """Waits until the previous kernel has ended and its writes are visible (programmatic dependent launch)."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_l2(p):
    """Brings the lines at these addresses into L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tma_stores_done():
    """Waits until the TMA stores of this thread are in memory. (tma.store_wait only says that their shared memory was
    read.)"""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def downcast(x, DTYPE: gl.constexpr):
    """float32 to DTYPE, rounded to nearest even, two values an instruction. As assembly because LLVM moves a plain
    conversion across the loop's back edge, where it holds twice the registers.
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
def pack_fp8(a, b, c, d):
    """Four float32 tensors rounded to float8_e4m3fn, as the bytes of int32 words."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
        " mov.b32 $0, {lo, hi}; }",
        "=r,r,r,r,r",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_fp8(x):
    """int32 words, each four times along the last axis, as the float8_e4m3fn values that their bytes are. Four
    registers with the same word become one register with four values."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def keep_columns(s, COMPARE: gl.constexpr, limit):
    """s[r, c] where c < limit[r] (COMPARE "lt") or c >= limit[r] ("ge"), else -inf.

    One compare and one select per score, kept together: apart, the compiler computes all the predicates first and
    packs them into bits. Bits 1 and 2 of a column come from the lane, the others from the register: the lane's part
    moves to the limit, so that the column becomes a constant.
    """
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    fixed, _ = gl.broadcast((c & -7)[None, :], s)
    operands = [s, fixed, limit[:, None] - (c & 6)[None, :]]
    ptx: gl.constexpr = "{ .reg .pred p; setp." + COMPARE + ".s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }"
    return gl.inline_asm_elementwise(ptx, "=r,r,r,r", operands, dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_column_range(s, lo, hi):
    """s[r, c] where lo[r] <= c < hi[r], else -inf. lo: or None, which is 0. For the accumulator of one warpgroup.

    The columns that a lane holds of a row are bits of one word: the compiler moves seven at a time to predicates (R2P),
    so a score costs one select, where `keep_columns` takes a compare and a select for each limit.
    """
    N: gl.constexpr = s.shape[1] // 2
    bits = columns_before(hi, s)
    if lo is not None:
        bits = bits & ~columns_before(lo, s)
    return gl.inline_asm_elementwise(
        select_by_bits(N), registers(N, 2 * N), [s, bits], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def load_row_words(p, pred, N: gl.constexpr, layout: gl.constexpr):
    """Word l of the four at p + 4 r as [64, 4], in the lanes that hold row r of a [64, N] accumulator: lane l of a row
    holds the columns whose bits 1 and 2 are l."""
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, N, gl.SliceLayout(0, layout))
    offsets = row[:, None] * 4 + ((c & 6) >> 1)[None, :]
    offsets = gl.max(gl.max(offsets.reshape([64, N // 8, 4, 2]), 3), 1)  # all that are compared are equal
    return gl.load(p + offsets, mask=pred)


@gluon.jit
def keep_bits(s, words, shift):
    """s where the bit of its column in `words` (`load_row_words`), after a shift to the right, is set, else -inf."""
    N: gl.constexpr = s.shape[1]
    lanes = gl.expand_dims(gl.expand_dims(words >> shift, 1), 3)
    layout: gl.constexpr = s.type.layout
    whole = gl.zeros([64, N], gl.int32, layout).reshape([64, N // 8, 4, 2])
    bits = gl.convert_layout((whole + lanes).reshape([64, N]), layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        select_by_bits(N // 2), registers(N // 2, N), [s, bits], dtype=gl.float32, is_pure=True, pack=N // 2
    )


@gluon.jit
def columns_before(limit, s):
    """Bit k tells whether the k-th column that a lane holds of row r is less than limit[r]: k = 2 i + e for column
    8 i + (c & 6) + e, where c & 6 tells the lane and e is 0 or 1."""
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    n = limit[:, None] - (c & 6)[None, :]
    count = gl.maximum((n >> 3) * 2 + gl.minimum(n & 7, 2), 0)
    return gl.inline_asm_elementwise("bmsk.clamp.b32 $0, 0, $1;", "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def registers(results, operands):
    """Constraints of inline assembly: all operands are 32-bit registers. &: results are written before all operands are
    read, so that they must not share a register with one."""
    return ",".join(["=&r"] * results + ["r"] * operands)


@gluon.constexpr_function
def select_by_bits(n):
    """PTX with the operands: n results, n scores, n words of bits. A lane's registers are two columns of one row, the
    same two of the other row, the next two columns, and so on. The selects of one row stand together, because there are
    only seven predicates."""
    lines = [
        f"and.b32 t, ${2 * n + 2 * row}, {1 << k}; setp.ne.u32 p, t, 0; selp.f32 ${r}, ${n + r}, 0fFF800000, p;"
        for row in (0, 1)
        for k, r in enumerate(r for r in range(n) if r // 2 % 2 == row)
    ]
    return "{ .reg .pred p; .reg .b32 t; " + " ".join(lines) + " }"


@gluon.jit
def negate_dropped(p, words, threshold):
    """P^T [keys, queries], negated where dropout drops a weight; `words`: `mix` of them is the hash (see `dropout`).

    As one block of assembly for eight registers of a lane, which have two hashes. The compiler would otherwise compute
    all hashes ahead of P, which does not leave registers for them.
    """
    limit = threshold.to(gl.uint32) * 65536
    return gl.inline_asm_elementwise(
        NEGATE_DROPPED, registers(8, 24), [p, words, limit], dtype=gl.float32, is_pure=True, pack=8
    )


def _negate_dropped() -> str:
    """PTX with the operands: eight results, eight weights, eight words, eight limits. A lane's registers are two
    queries of a key, the same two of the key 8 rows below, and the same of the queries 8 columns to the right."""
    lines = ["{ .reg .pred p; .reg .b32 x, y, t; .reg .f32 n;"]
    for e in (0, 1):
        lines.append(f"shr.u32 t, ${16 + e}, 16; xor.b32 x, ${16 + e}, t; mul.lo.u32 x, x, 0x7FEB352D;")
        lines.append(
            "shr.u32 t, x, 15; xor.b32 x, x, t; mul.lo.u32 x, x, 0x846CA68B; shr.u32 t, x, 16; xor.b32 x, x, t;"
        )
        lines.append("mul.lo.u32 y, x, 0x2C1B3C6D; shr.u32 t, y, 16; xor.b32 y, y, t;")
        for bits, register in (("x", e), ("y", e + 4)):
            for upper, r in ((True, register), (False, register + 2)):
                shifted = "" if upper else f"shl.b32 t, {bits}, 16; "
                found = bits if upper else "t"
                lines.append(f"{shifted}setp.ge.u32 p, {found}, ${24 + r};")
                lines.append(f"neg.f32 n, ${8 + r}; selp.f32 ${r}, ${8 + r}, n, p;")
    return " ".join([*lines, "}"])


NEGATE_DROPPED: gl.constexpr = gl.constexpr(_negate_dropped())


@gluon.jit
def downcast_positive(x, DTYPE: gl.constexpr):
    """`downcast` of max(x, 0), with NaNs."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def column_indices(first, s):
    """first, first + 1, .. along the columns of s, as one register to which constants are added. The compiler would
    otherwise add `first` to the column of each register ahead of the loop and keep all the sums."""
    c = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    lane = gl.inline_asm_elementwise(
        "add.s32 $0, $1, $2;", "=r,r,r", [c & 6, first], dtype=gl.int32, is_pure=True, pack=1
    )
    return lane + (c & -7)


@builtin
def tma_reduce_add(desc, where, tile, _semantic=None):
    """global[where] += tile, by TMA. Triton 3.9 calls it tma.async_atomic_add; 3.6 has no name for it."""
    where = _semantic._convert_to_ir_values(where, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, where, tile.handle)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory with another dtype and shape: memory.reinterpret in Triton 3.9, _reinterpret in 3.6."""
    shape = [int(_unwrap_if_constexpr(n)) for n in shape]
    return _semantic.memdesc_reinterpret(memory, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))


@gluon.jit
def opaque(x):
    """x, as a value that the compiler knows nothing about and computes where it is written. Without it, what follows
    from kernel arguments alone is computed before warp specialisation and kept in registers of every warp."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program_id_here():
    """gl.program_id(0), read where this is written. Otherwise it is read once and kept in a register."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque64(x):
    """The same for 64-bit integers."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def semaphore_wait(ptr, value):
    """Spins until *ptr >= value. The writes of its releasers are then visible, to TMA too."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 v; again: ld.acquire.gpu.global.u32 v, [$1]; setp.lt.u32 p, v, $2; @p bra again;"
        " fence.proxy.async; mov.u32 $0, v; }",
        "=r,l,r",
        [ptr.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def semaphore_release(ptr):
    """One lane adds 32 to *ptr once the TMA stores of this warp are in memory (tma.store_wait only says that their
    shared memory was read)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; cp.async.bulk.wait_group 0; bar.warp.sync -1; elect.sync _|p, -1;"
        " @p red.release.gpu.global.add.u32 [$1], 32; mov.u32 $0, 0; }",
        "=r,l",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
