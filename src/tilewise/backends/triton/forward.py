"""The forward pass: one program owns BLOCK_M queries of one head and streams the keys they see past them. Queries too
few to fill a tile share it with those of the other heads of their group, which see the same keys (PLAN.HEADS).

Where there are few queries, several programs own them, each streams a part of the keys, and `merge_kernel` puts their
results together: softmax over a union of keys follows from (o, lse) over its parts (tilewise.merge).
"""

import triton
import triton.language as tl

from ..common.device.attend import store_attention, stream_keys
from ..common.device.matmul import raise_flag
from ..common.device.softmax import logsumexp
from ..common.device.structs import ANY_SIZE, LOG2E, Law
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait


@triton.jit(**ANY_SIZE)
def forward_kernel(
    q, k, v, o, lse, flags, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch, parts, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """flags[program] = 1 where the results have a nan, perhaps 0 * nan from a value that its row does not see:
    `repair_forward_kernel` looks at them."""
    if PLAN.OVERLAP:
        gdc_launch_dependents()
    # the last tiles of a causal head see the most keys: they start first
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    flag = pid
    if flags is not None:
        tl.store(flags + flag, 0)
    part = 0
    if parts is not None:
        part = pid % parts
        pid = pid // parts
    w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M, PLAN.HEADS)
    if w.first < w.n_q * PLAN.HEADS:
        acc, m, l = stream_keys(
            q, k, v, w, part, parts, Law(before, after, scale, terms, SCORE_MOD, MASK_MOD), PLAN, False
        )  # fmt: skip
        if flags is not None:
            raise_flag(flags + flag, acc)
        b = w.b
        rows = None
        if parts is not None:
            b += part * batch
            rows = parts * batch
        store_attention(acc, m, l, o, lse, n_q, heads, w, b, rows, terms, PLAN)


@triton.jit(**ANY_SIZE)
def merge_kernel(
    o_parts, lse_parts, o, lse, parts, batch, n_q, heads,
    DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_DV: tl.constexpr, OVERLAP: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """o and lse of one query of one head, over all keys, from those over the parts, which lie one after the other. FAR:
    instead of lse there are m and, after those of all parts, l (`store_attention`)."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)  # of (batch, query, head)
    h = row % heads
    i = row // heads % n_q
    b = row // heads // n_q
    p = tl.arange(0, BLOCK_P)
    at = ((p * batch + b) * heads + h) * n_q + i
    x = tl.load(lse_parts + at, mask=p < parts, other=float("-inf"))
    m = tl.max(x, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((x - m) * LOG2E)
    if FAR:
        weight *= tl.load(lse_parts + (parts * batch * heads * n_q + at), mask=p < parts, other=0.0)
    l = tl.sum(weight, 0)
    d = tl.arange(0, BLOCK_DV)
    tile = o_parts + (p[:, None] * batch * n_q * heads + row) * DV + d[None, :]
    parts_of_o = tl.load(tile, mask=(p[:, None] < parts) & (d[None, :] < DV), other=0.0)
    total = tl.sum(parts_of_o * weight[:, None], 0) / tl.where(l == 0.0, 1.0, l)
    tl.store(o + row * DV + d, total.to(o.dtype.element_ty), mask=d < DV)
    tl.store(lse + (b * heads + h) * n_q + i, m + logsumexp(0.0, l))
