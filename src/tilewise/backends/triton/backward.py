"""The kernels of the portable backward, without atomics: one computes dQ, each program for a tile of queries; the other
dK and dV, each program for a tile of keys. The gradients of a tile are in `common/device/gradients.py`.
"""

import triton
import triton.language as tl

from ..common.device.gradients import key_gradients, query_gradient, store_key_gradients
from ..common.device.matmul import raise_flag
from ..common.device.structs import ANY_SIZE, Law, Rows
from ..common.device.tile_io import store_rows
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait


@triton.jit(**ANY_SIZE)
def query_kernel(
    saved, dq, flags, cu_q, cu_k, n_q, n_k, before, after, scale, rate, tiles, heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """dQ; flags[program] = 1 where it has a nan, which `repair_backward_kernel` looks into."""
    if PLAN.OVERLAP:
        gdc_launch_dependents()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if flags is not None:
        tl.store(flags + pid, 0)
    w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M)
    if w.first < w.n_q:
        acc = query_gradient(saved, w, Law(before, after, scale, terms, SCORE_MOD, MASK_MOD), PLAN, False)
        if flags is not None:
            raise_flag(flags + pid, acc)
        store_rows(Rows(dq, w.b, w.h, w.q0, w.first, w.n_q), acc * rate, PLAN.D)
    if PLAN.OVERLAP:
        gdc_wait()


@triton.jit(**ANY_SIZE)
def key_kernel(
    saved, dk, dv, flags, cu_q, cu_k, n_q, n_k, before, after, scale, rate, tiles, heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """dK, dV, or both; flags as those of `query_kernel`. `heads` counts KV heads; each program sums over the GROUP
    query heads that share its own.

    OVERLAP: the next kernel, which needs nothing of this one, starts where this one's last programs leave room, and
    ends after it; so does this one beside the kernel before, unless that is `prepare_kernel`, whose sums it waits for
    and lets nobody start before.
    """
    if PLAN.OVERLAP:
        if PLAN.SUM_K:
            gdc_wait()
        gdc_launch_dependents()
    if flags is not None:
        tl.store(flags + tl.program_id(0), 0)
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_k, PLAN.BLOCK_N)
    if w.first < w.n_k:
        dk_acc, dv_acc = key_gradients(
            saved, w, heads, Law(before, after, scale, terms, SCORE_MOD, MASK_MOD), PLAN, False
        )  # fmt: skip
        pid = tl.program_id(0) * tl.num_programs(1)  # times 1: found again, not kept in registers since
        if PLAN.GROUP > 1 or PLAN.PACKED:
            w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_k, PLAN.BLOCK_N)
        if flags is not None:
            if PLAN.SUM_K:
                raise_flag(flags + pid, dk_acc)
            if PLAN.SUM_V:
                raise_flag(flags + pid, dv_acc)
        store_key_gradients(dk, dv, dk_acc, dv_acc, w, rate, PLAN)
    if PLAN.OVERLAP and not PLAN.SUM_K:
        gdc_wait()
