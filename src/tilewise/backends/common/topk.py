"""Attention of each query over the keys that it names, forward and backward.

A program computes one query of one KV head: the rows of its tile are the query heads of the group, which share their
keys. It gathers BLOCK_N keys at a time. In the backward it adds the gradients of these keys with atomics.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import Gpu, padded
from .device.softmax import logsumexp, softmax_step
from .device.structs import ANY_SIZE, LOG2E
from .kernel_call import view
from .kernel_config import precision
from .launch import INTERPRETED, Launch


class TopkTensors(NamedTuple):
    """Views of q, k, v and o; lse (batch, heads, queries) and indices (batch, queries, KV heads, count), contiguous."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    o: tl.tuple
    lse: tl.tensor
    indices: tl.tensor


class TopkGradients(NamedTuple):
    """Views of do, dq, and of dk and dv, which are float32 and start from 0; dlse, or None."""

    do: tl.tuple
    dq: tl.tuple
    dk: tl.tuple
    dv: tl.tuple
    dlse: tl.tensor


class Inputs(NamedTuple):
    """`indices` (B, Sq, Hk, K) is contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    scale: float


class TopkConfig(NamedTuple):
    """The columns of q and k are CHUNKS tiles of WIDTH, and one of REST if REST is not 0; those of v and o V_CHUNKS of
    V_WIDTH. SHARED: v is the first columns of k in memory; SUMMED: its gradient is added to that of k."""

    GROUP: int
    D: int
    DV: int
    WIDTH: int
    CHUNKS: int
    REST: int
    V_WIDTH: int
    V_CHUNKS: int
    BLOCK_M: int
    BLOCK_N: int
    SHARED: bool
    SUMMED: bool
    PRECISION: str


class TopkRows(NamedTuple):
    """The query of a program: batch row, query, KV head, query heads of its rows, and whether they exist."""

    b: tl.tensor
    i: tl.tensor
    h_kv: tl.tensor
    h: tl.tensor
    exists: tl.tensor


@triton.jit
def topk_rows(n_q, kv_heads, CONFIG: tl.constexpr):
    TILES: tl.constexpr = (CONFIG.GROUP + CONFIG.BLOCK_M - 1) // CONFIG.BLOCK_M
    pid = tl.program_id(0).to(tl.int64)
    r = (pid % TILES).to(tl.int32) * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M)
    line = pid // TILES
    h_kv = line % kv_heads
    i = line // kv_heads % n_q
    return TopkRows(line // kv_heads // n_q, i, h_kv, h_kv * CONFIG.GROUP + r, r < CONFIG.GROUP)


@triton.jit
def head_rows(x, at, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the columns from FIRST on of the rows of a tile, and which of them exist."""
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    base = x.ptr + at.b * x.strides[0] + at.i * x.strides[1]
    return base + at.h[:, None] * x.strides[2] + d * x.strides[3], at.exists[:, None] & (d < END)


@triton.jit
def key_rows(x, at, j, seen, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """The same of the keys j, as (keys, columns)."""
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    base = x.ptr + at.b * x.strides[0] + at.h_kv * x.strides[2]
    return base + j[:, None] * x.strides[1] + d * x.strides[3], seen[:, None] & (d < END)


@triton.jit
def named_keys(tensors, at, n_q, kv_heads, first, count, n_k, N: tl.constexpr):
    """(keys, whether each is one): a negative index, or one past the end, names none."""
    n = first + tl.arange(0, N)
    line = (at.b * n_q + at.i) * kv_heads + at.h_kv
    j = tl.load(tensors.indices + line * count + n, mask=n < count, other=-1).to(tl.int64)
    seen = (j >= 0) & (j < n_k)
    return tl.where(seen, j, 0), seen


@triton.jit
def load_heads(x, at, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    pointers, mask = head_rows(x, at, FIRST, END, WIDTH)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_named(x, at, j, seen, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    pointers, mask = key_rows(x, at, j, seen, FIRST, END, WIDTH)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def head_chunks(x, at, END: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """The first WIDTH * COUNT columns of the rows of a tile, as COUNT tiles."""
    tiles = ()
    for c in tl.static_range(COUNT):
        tiles = tiles + (load_heads(x, at, c * WIDTH, END, WIDTH),)  # noqa: RUF005 (Triton has no starred tuples)
    return tiles


@triton.jit
def key_chunks(x, at, j, seen, END: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """The same of the keys j."""
    tiles = ()
    for c in tl.static_range(COUNT):
        tiles = tiles + (load_named(x, at, j, seen, c * WIDTH, END, WIDTH),)  # noqa: RUF005
    return tiles


@triton.jit
def zero_chunks(ROWS: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.full([ROWS, WIDTH], 0.0, tl.float32),)  # noqa: RUF005
    return tiles


@triton.jit
def load_query_columns(x, at, CONFIG: tl.constexpr):
    """The first columns of the queries as chunks, and the REST (the first chunk once more if there is none)."""
    main = head_chunks(x, at, CONFIG.D, CONFIG.WIDTH, CONFIG.CHUNKS)
    rest = main[0]
    if CONFIG.REST > 0:
        rest = load_heads(x, at, CONFIG.WIDTH * CONFIG.CHUNKS, CONFIG.D, CONFIG.REST)
    return main, rest


@triton.jit
def load_key_columns(x, at, j, seen, CONFIG: tl.constexpr):
    """The same of the keys j."""
    main = key_chunks(x, at, j, seen, CONFIG.D, CONFIG.WIDTH, CONFIG.CHUNKS)
    rest = main[0]
    if CONFIG.REST > 0:
        rest = load_named(x, at, j, seen, CONFIG.WIDTH * CONFIG.CHUNKS, CONFIG.D, CONFIG.REST)
    return main, rest


@triton.jit
def chunk_products(rows, keys, COUNT: tl.constexpr, CONFIG: tl.constexpr):
    """rows @ keys^T, summed over the chunks."""
    s = tl.dot(rows[0], tl.trans(keys[0]), input_precision=CONFIG.PRECISION)
    for c in tl.static_range(1, COUNT):
        s = tl.dot(rows[c], tl.trans(keys[c]), s, input_precision=CONFIG.PRECISION)
    return s


@triton.jit
def named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG: tl.constexpr):
    s = chunk_products(q_main, k_main, CONFIG.CHUNKS, CONFIG)
    if CONFIG.REST > 0:
        s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=CONFIG.PRECISION)
    return tl.where(seen[None, :], s * scale, float("-inf"))


@triton.jit
def load_values(tensors, at, j, seen, k_main, CONFIG: tl.constexpr):
    """The values of the keys j as chunks; SHARED: they are the first columns of the keys."""
    v_tiles = k_main
    if not CONFIG.SHARED:
        v_tiles = key_chunks(tensors.v, at, j, seen, CONFIG.DV, CONFIG.V_WIDTH, CONFIG.V_CHUNKS)
    return v_tiles


@triton.jit(**ANY_SIZE)
def topk_forward_kernel(tensors, n_q, n_k, kv_heads, count, scale, CONFIG: tl.constexpr):
    at = topk_rows(n_q, kv_heads, CONFIG)
    q_main, q_rest = load_query_columns(tensors.q, at, CONFIG)
    m = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([CONFIG.BLOCK_M, CONFIG.V_WIDTH], 0.0, tl.float32)
    j, seen = named_keys(tensors, at, n_q, kv_heads, 0, count, n_k, CONFIG.BLOCK_N)
    for first in tl.range(0, count, CONFIG.BLOCK_N):
        # indices are loaded an iteration ahead: else the loads of keys, which need them, begin after the products
        j_next, seen_next = named_keys(tensors, at, n_q, kv_heads, first + CONFIG.BLOCK_N, count, n_k, CONFIG.BLOCK_N)
        k_main, k_rest = load_key_columns(tensors.k, at, j, seen, CONFIG)
        s = named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG)
        p, alpha, m, l = softmax_step(m, l, s, LOG2E, 1, False)  # 1: m is a score, not in log2 units
        v_tile = load_values(tensors, at, j, seen, k_main, CONFIG)[0]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=CONFIG.PRECISION)
        j, seen = j_next, seen_next
    pointers, mask = head_rows(tensors.o, at, 0, CONFIG.DV, CONFIG.V_WIDTH)
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(pointers, out.to(tensors.o.ptr.dtype.element_ty), mask=mask)
    heads = kv_heads * CONFIG.GROUP
    tl.store(tensors.lse + (at.b * heads + at.h) * n_q + at.i, m + logsumexp(0.0, l), mask=at.exists)


@triton.jit
def add_rows(x, at, j, seen, tile, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    pointers, mask = key_rows(x, at, j, seen, FIRST, END, WIDTH)
    tl.atomic_add(pointers, tile, mask=mask, sem="relaxed")


@triton.jit(**ANY_SIZE)
def topk_backward_kernel(tensors, gradients, n_q, n_k, kv_heads, count, scale, CONFIG: tl.constexpr):
    """dS = P * (dO V^T - rowsum(dO * O) + dlse);  dQ = scale * dS K;  dK += scale * dS^T Q;  dV += P^T dO

    With SUMMED, dV is added to dK."""
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    V_CHUNKS: tl.constexpr = CONFIG.V_CHUNKS
    at = topk_rows(n_q, kv_heads, CONFIG)
    q_main, q_rest = load_query_columns(tensors.q, at, CONFIG)
    do_tiles = head_chunks(gradients.do, at, CONFIG.DV, CONFIG.V_WIDTH, V_CHUNKS)
    delta = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    for c in tl.static_range(V_CHUNKS):
        o_tile = load_heads(tensors.o, at, c * CONFIG.V_WIDTH, CONFIG.DV, CONFIG.V_WIDTH)
        delta += tl.sum(do_tiles[c].to(tl.float32) * o_tile.to(tl.float32), 1)
    row = (at.b * (kv_heads * CONFIG.GROUP) + at.h) * n_q + at.i
    lse = tl.load(tensors.lse + row, mask=at.exists, other=float("-inf"))
    if gradients.dlse is not None:
        delta -= tl.load(gradients.dlse + row, mask=at.exists, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a row without keys: p = 0
    dq_main = zero_chunks(CONFIG.BLOCK_M, CONFIG.WIDTH, CHUNKS)
    dq_rest = tl.full([CONFIG.BLOCK_M, CONFIG.REST if CONFIG.REST > 0 else 16], 0.0, tl.float32)
    for first in tl.range(0, count, CONFIG.BLOCK_N):
        j, seen = named_keys(tensors, at, n_q, kv_heads, first, count, n_k, CONFIG.BLOCK_N)
        k_main, k_rest = load_key_columns(tensors.k, at, j, seen, CONFIG)
        s = named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG)
        p = tl.exp2((s - lse[:, None]) * LOG2E)
        v_tiles = load_values(tensors, at, j, seen, k_main, CONFIG)
        dp = chunk_products(do_tiles, v_tiles, V_CHUNKS, CONFIG)
        ds = tl.where(seen[None, :], p * (dp - delta[:, None]) * scale, 0.0).to(q_rest.dtype)
        p = p.to(q_rest.dtype)
        if not CONFIG.SUMMED:
            for c in tl.static_range(V_CHUNKS):
                dv_tile = tl.dot(tl.trans(do_tiles[c]), p, input_precision=CONFIG.PRECISION)
                add_rows(gradients.dv, at, j, seen, tl.trans(dv_tile), c * CONFIG.V_WIDTH, CONFIG.DV, CONFIG.V_WIDTH)
        sums = ()
        for c in tl.static_range(CHUNKS):
            dk_tile = tl.dot(tl.trans(q_main[c]), ds, input_precision=CONFIG.PRECISION)
            if CONFIG.SUMMED:
                dk_tile = tl.dot(tl.trans(do_tiles[c]), p, dk_tile, input_precision=CONFIG.PRECISION)
            add_rows(gradients.dk, at, j, seen, tl.trans(dk_tile), c * CONFIG.WIDTH, CONFIG.D, CONFIG.WIDTH)
            dq_tile = tl.dot(ds, k_main[c], dq_main[c], input_precision=CONFIG.PRECISION)
            sums = sums + (dq_tile,)  # noqa: RUF005
        dq_main = sums
        if CONFIG.REST > 0:
            dk_tile = tl.dot(tl.trans(q_rest), ds, input_precision=CONFIG.PRECISION)
            add_rows(gradients.dk, at, j, seen, tl.trans(dk_tile), CONFIG.WIDTH * CONFIG.CHUNKS, CONFIG.D, CONFIG.REST)
            dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision=CONFIG.PRECISION)
    dtype = gradients.dq.ptr.dtype.element_ty
    for c in tl.static_range(CHUNKS):
        pointers, mask = head_rows(gradients.dq, at, c * CONFIG.WIDTH, CONFIG.D, CONFIG.WIDTH)
        tl.store(pointers, dq_main[c].to(dtype), mask=mask)
    if CONFIG.REST > 0:
        pointers, mask = head_rows(gradients.dq, at, CONFIG.WIDTH * CONFIG.CHUNKS, CONFIG.D, CONFIG.REST)
        tl.store(pointers, dq_rest.to(dtype), mask=mask)


def _config(q: Tensor, k: Tensor, v: Tensor, backward: bool, summed: bool, gpu: Gpu) -> tuple[TopkConfig, int, int]:
    """(configuration, num_warps, num_stages)"""
    d, dv, group = q.shape[3], v.shape[3], q.shape[2] // k.shape[2]
    main = d if d == padded(d) else max(16, padded(d) // 2)
    rest = padded(d - main) if d > main else 0
    if main + rest >= padded(d):
        main, rest = padded(d), 0
    shared = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and main == padded(dv)
    bits = 8 * q.element_size()
    wide = (main + rest) * q.element_size() > 512
    rows, warps, stages = min(32 if wide else 64, padded(group)), 8 if wide else 4, 1 if wide or bits > 16 else 2
    columns = 16 if INTERPRETED else 16 if wide and backward else 32 if wide or backward else 64
    width, v_width = main, padded(dv)
    if wide and group > 32 and bits == 16 and gpu == Gpu("cuda", 90) and (shared or not backward):  # wgmma: 64 rows
        rows, columns, stages = 64, 64 if shared else 32, 2
        if backward:  # chunks: the results of dK are converted one after another in less shared memory
            columns, stages, width, v_width = 32, 1, min(128, width), min(128, v_width)
    chunks = main // width, padded(dv) // v_width
    sizes = width, chunks[0], rest, v_width, chunks[1], rows, columns
    return TopkConfig(group, d, dv, *sizes, shared, summed and shared, precision(q, gpu)), warps, stages


def _launch(kernel: Any, tensors: tuple[Any, ...], inputs: Inputs, gpu: Gpu, summed: bool = False) -> Launch:
    q, k, v, indices, scale = inputs
    config, warps, stages = _config(q, k, v, kernel is topk_backward_kernel, summed, gpu)
    programs = q.shape[0] * q.shape[1] * k.shape[2] * -(-config.GROUP // config.BLOCK_M)
    options = {"CONFIG": config, "num_warps": warps, "num_stages": stages}
    return Launch(kernel, programs, (*tensors, q.shape[1], k.shape[1], k.shape[2], indices.shape[3], scale), options)


def forward(inputs: Inputs, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """(out, lse): (B, Sq, H, Dv) and (B, H, Sq)."""
    q, k, v, indices, _ = inputs
    batch, n_q, heads, _ = q.shape
    out = torch.empty((batch, n_q, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
    tensors = TopkTensors(view(q), view(k), view(v), view(out), lse, indices)
    _launch(topk_forward_kernel, (tensors,), inputs, gpu)()
    return out, lse


def backward(inputs: Inputs, saved: tuple[Any, ...], gpu: Gpu, summed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `saved`: out, lse, dout, and dlse or None; lse and dlse are contiguous. `summed`: v is the first
    columns of k, and dk holds the sum of both gradients; dv has no columns."""
    q, k, v, indices, _ = inputs
    out, lse, dout, dlse = saved
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    tensors = TopkTensors(view(q), view(k), view(v), view(out), lse, indices)
    gradients = TopkGradients(view(dout), view(dq), view(dk), view(dv), dlse)
    launch = _launch(topk_backward_kernel, (tensors, gradients), inputs, gpu, summed)
    launch()
    if summed and not launch.options["CONFIG"].SUMMED:
        dk[..., : v.shape[3]] += dv
    return dq, dk.to(k.dtype), dv[..., :0].to(v.dtype) if summed else dv.to(v.dtype)
