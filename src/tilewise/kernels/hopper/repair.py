"""The second launch of a call whose rows do not all see the same keys.

A matrix product cannot leave a value out: a weight of 0 times nan is nan, and so is 0 times inf. The forward kernel
raises a flag when a finished row has a nan that its denominator does not explain, which costs it one sum per row; this
kernel, which follows it on the stream, looks at the flag and nearly always goes home. Otherwise it computes every tile
once more, as the portable forward does where it finds a nan: with the product that knows who sees what.

OVERLAP: its programs are placed while the last ones of the forward still run, and wait for them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..portable.forward import attend
from ..tile import band, load_rows, locate, logsumexp, row_pointers, store_rows


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "total", "tiles", "heads", "batch"])
def repair_kernel(
    q, k, v, o, lse, flag, cu_q, cu_k, n_q, n_k, before, after, scale, total, tiles, heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    if tl.load(flag) > 0:
        if tl.atomic_add(flag + 1, 1) == tl.num_programs(0) - 1:  # all have seen it: down with it, for the next launch
            tl.store(flag, 0)
            tl.store(flag + 1, 0)
        for pid in range(tl.program_id(0), total, tl.num_programs(0)):
            w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
            if w.first < w.n_q:
                i = w.first + tl.arange(0, BLOCK_M)
                at = w.first + w.n_k - w.n_q
                span = band(at, at + BLOCK_M - 1, w.n_k, before, after, BLOCK_N)
                q_tile = load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D, False)
                acc, m, l = attend(
                    q_tile, k, v, w, w.h // GROUP, i, span, before, after, scale, terms, SCORE_MOD, MASK_MOD,
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, False, "ieee", True,
                )  # fmt: skip
                out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
                store_rows(o, out, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV)
                tl.store(row_pointers(lse, w.b, w.h, w.q0, i), logsumexp(m, l), mask=i < w.n_q)
