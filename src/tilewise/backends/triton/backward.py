"""The kernels of the portable backward, without atomics: a program of `query_kernel` computes dQ of a tile of queries,
a program of `key_kernel` dK and dV of a tile of keys (`common/device/gradients.py`)."""

import triton
import triton.language as tl

from ..common.device.gradients import key_gradients, query_gradient, store_key_gradients, store_query_gradient
from ..common.device.matmul import raise_flag_of_pieces
from ..common.device.structs import ANY_SIZE, Grid, ScoreParams, Sequences
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait


@triton.jit(**ANY_SIZE)
def query_kernel(
    tensors,  # BackwardTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    rate,
    tiles,
    heads,
    batch,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """dQ; flags[program] = 1 if it has a nan, for `repair_backward_kernel`."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if tensors.flags is not None:
        tl.store(tensors.flags + pid, 0)
    w = locate(pid, Grid(tiles, heads, batch), Sequences(cu_q, cu_k, n_q, n_k), cu_q, CONFIG.BLOCK_M)
    if w.first < w.n_q:
        acc = query_gradient(tensors, w, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG, False)
        if tensors.flags is not None:
            raise_flag_of_pieces(tensors.flags + pid, acc)
        store_query_gradient(tensors, acc, w, rate, CONFIG)
    if CONFIG.OVERLAP:
        gdc_wait()


@triton.jit(**ANY_SIZE)
def key_kernel(
    tensors,  # BackwardTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    rate,
    tiles,
    heads,
    batch,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """dK, dV, or both; flags as in `query_kernel`. `heads` counts KV heads; a program sums over the GROUP query heads
    that share its KV head.

    OVERLAP: the next kernel reads nothing that this one writes, so it may start when the last programs of this one
    leave processors idle. It ends after this one. The kernel that follows `preprocess_kernel` (SUM_K) waits for it.
    """
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    if CONFIG.OVERLAP:
        if CONFIG.SUM_K:
            gdc_wait()
        gdc_launch_dependents()
    if tensors.flags is not None:
        tl.store(tensors.flags + tl.program_id(0), 0)
    w = locate(tl.program_id(0), grid, seqs, cu_k, CONFIG.BLOCK_N)
    if w.first < w.n_k:
        dk_acc, dv_acc = key_gradients(
            tensors, w, heads, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG, False
        )
        # num_programs(1) is 1, which the compiler does not know: the tile is located again, not kept in registers
        pid = tl.program_id(0) * tl.num_programs(1)
        if CONFIG.GROUP > 1 or CONFIG.PACKED:
            w = locate(pid, grid, seqs, cu_k, CONFIG.BLOCK_N)
        if tensors.flags is not None:
            if CONFIG.SUM_K:
                raise_flag_of_pieces(tensors.flags + pid, dk_acc)
            if CONFIG.SUM_V:
                raise_flag_of_pieces(tensors.flags + pid, dv_acc)
        store_key_gradients(tensors, dk_acc, dv_acc, w, rate, CONFIG)
    if CONFIG.OVERLAP and not CONFIG.SUM_K:
        gdc_wait()
