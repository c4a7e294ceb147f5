"""Attention of each query over the keys that it names, forward and backward.

A program computes one query of one KV head: the rows of its tile are the query heads of the group, which share their
keys. It gathers BLOCK_N keys at a time. In the backward it adds the gradients of these keys with atomics.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device.softmax import logsumexp, softmax_step
from .device.structs import ANY_SIZE, LOG2E
from .gpu import Gpu
from .kernel_config import precision
from .launch import INTERPRETED, Launch
from .shapes import padded, view


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


class TopkConfig(NamedTuple):
    """D is the sum of a power of two, MAIN, and of what a second product of REST columns holds, if REST is not 0."""

    GROUP: int
    D: int
    DV: int
    MAIN: int
    REST: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_DV: int
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
def load_query_columns(x, at, CONFIG: tl.constexpr):
    """The first MAIN columns of the queries, and the REST (the first once more if there is none)."""
    main = load_heads(x, at, 0, CONFIG.D, CONFIG.MAIN)
    rest = main
    if CONFIG.REST > 0:
        rest = load_heads(x, at, CONFIG.MAIN, CONFIG.D, CONFIG.REST)
    return main, rest


@triton.jit
def load_key_columns(x, at, j, seen, CONFIG: tl.constexpr):
    """The same of the keys j."""
    main = load_named(x, at, j, seen, 0, CONFIG.D, CONFIG.MAIN)
    rest = main
    if CONFIG.REST > 0:
        rest = load_named(x, at, j, seen, CONFIG.MAIN, CONFIG.D, CONFIG.REST)
    return main, rest


@triton.jit
def named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG: tl.constexpr):
    s = tl.dot(q_main, tl.trans(k_main), input_precision=CONFIG.PRECISION)
    if CONFIG.REST > 0:
        s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=CONFIG.PRECISION)
    return tl.where(seen[None, :], s * scale, float("-inf"))


@triton.jit(**ANY_SIZE)
def topk_forward_kernel(tensors, n_q, n_k, kv_heads, count, scale, CONFIG: tl.constexpr):
    at = topk_rows(n_q, kv_heads, CONFIG)
    q_main, q_rest = load_query_columns(tensors.q, at, CONFIG)
    m = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_DV], 0.0, tl.float32)
    for first in tl.range(0, count, CONFIG.BLOCK_N):
        j, seen = named_keys(tensors, at, n_q, kv_heads, first, count, n_k, CONFIG.BLOCK_N)
        k_main, k_rest = load_key_columns(tensors.k, at, j, seen, CONFIG)
        s = named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG)
        p, alpha, m, l = softmax_step(m, l, s, LOG2E, 1, False)  # 1: m is a score, not in log2 units
        v_tile = load_named(tensors.v, at, j, seen, 0, CONFIG.DV, CONFIG.BLOCK_DV)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=CONFIG.PRECISION)
    pointers, mask = head_rows(tensors.o, at, 0, CONFIG.DV, CONFIG.BLOCK_DV)
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
    """dS = P * (dO V^T - rowsum(dO * O) + dlse);  dQ = scale * dS K;  dK += scale * dS^T Q;  dV += P^T dO"""
    at = topk_rows(n_q, kv_heads, CONFIG)
    q_main, q_rest = load_query_columns(tensors.q, at, CONFIG)
    do_tile = load_heads(gradients.do, at, 0, CONFIG.DV, CONFIG.BLOCK_DV)
    o_tile = load_heads(tensors.o, at, 0, CONFIG.DV, CONFIG.BLOCK_DV)
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    row = (at.b * (kv_heads * CONFIG.GROUP) + at.h) * n_q + at.i
    lse = tl.load(tensors.lse + row, mask=at.exists, other=float("-inf"))
    if gradients.dlse is not None:
        delta -= tl.load(gradients.dlse + row, mask=at.exists, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a row without keys: p = 0
    dq_main = tl.full([CONFIG.BLOCK_M, CONFIG.MAIN], 0.0, tl.float32)
    dq_rest = tl.full([CONFIG.BLOCK_M, CONFIG.REST if CONFIG.REST > 0 else 16], 0.0, tl.float32)
    for first in tl.range(0, count, CONFIG.BLOCK_N):
        j, seen = named_keys(tensors, at, n_q, kv_heads, first, count, n_k, CONFIG.BLOCK_N)
        k_main, k_rest = load_key_columns(tensors.k, at, j, seen, CONFIG)
        s = named_scores(q_main, q_rest, k_main, k_rest, scale, seen, CONFIG)
        p = tl.exp2((s - lse[:, None]) * LOG2E)
        v_tile = load_named(tensors.v, at, j, seen, 0, CONFIG.DV, CONFIG.BLOCK_DV)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=CONFIG.PRECISION)
        ds = tl.where(seen[None, :], p * (dp - delta[:, None]) * scale, 0.0).to(q_main.dtype)
        dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision=CONFIG.PRECISION)
        add_rows(gradients.dv, at, j, seen, dv_tile, 0, CONFIG.DV, CONFIG.BLOCK_DV)
        dk_tile = tl.dot(tl.trans(ds), q_main, input_precision=CONFIG.PRECISION)
        add_rows(gradients.dk, at, j, seen, dk_tile, 0, CONFIG.D, CONFIG.MAIN)
        dq_main = tl.dot(ds, k_main, dq_main, input_precision=CONFIG.PRECISION)
        if CONFIG.REST > 0:
            dk_tile = tl.dot(tl.trans(ds), q_rest, input_precision=CONFIG.PRECISION)
            add_rows(gradients.dk, at, j, seen, dk_tile, CONFIG.MAIN, CONFIG.D, CONFIG.REST)
            dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision=CONFIG.PRECISION)
    dtype = gradients.dq.ptr.dtype.element_ty
    pointers, mask = head_rows(gradients.dq, at, 0, CONFIG.D, CONFIG.MAIN)
    tl.store(pointers, dq_main.to(dtype), mask=mask)
    if CONFIG.REST > 0:
        pointers, mask = head_rows(gradients.dq, at, CONFIG.MAIN, CONFIG.D, CONFIG.REST)
        tl.store(pointers, dq_rest.to(dtype), mask=mask)


def _launch(
    kernel: Any, tensors: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, count: int, scale: float, gpu: Gpu
) -> Launch:
    batch, n_q, heads, d = q.shape
    kv_heads, dv, group = k.shape[2], v.shape[3], heads // k.shape[2]
    main = d if d == padded(d) else max(16, padded(d) // 2)
    rest = padded(d - main) if d > main else 0
    if main + rest >= padded(d):
        main, rest = padded(d), 0
    wide = (main + rest) * q.element_size() > 512
    backward = kernel is topk_backward_kernel
    rows = min(32 if wide else 64, padded(group))  # 64 rows of 512 columns spill
    columns = 16 if INTERPRETED else 16 if wide and backward else 32 if wide or backward else 64
    config = TopkConfig(group, d, dv, main, rest, rows, columns, padded(dv), precision(q, gpu))
    programs = batch * n_q * kv_heads * -(-group // rows)
    options = {"CONFIG": config, "num_warps": 8 if wide else 4, "num_stages": 1 if wide or q.element_size() > 2 else 2}
    return Launch(kernel, programs, (*tensors, n_q, k.shape[1], kv_heads, count, scale), options)


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """(out, lse): (B, Sq, H, Dv) and (B, H, Sq). `indices` (B, Sq, Hk, K) is contiguous."""
    batch, n_q, heads, _ = q.shape
    out = torch.empty((batch, n_q, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
    tensors = TopkTensors(view(q), view(k), view(v), view(out), lse, indices)
    _launch(topk_forward_kernel, (tensors,), q, k, v, indices.shape[3], scale, gpu)()
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, saved: tuple[Any, ...], gpu: Gpu
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `saved`: out, lse, dout, and dlse or None; lse and dlse are contiguous."""
    out, lse, dout, dlse = saved
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    tensors = TopkTensors(view(q), view(k), view(v), view(out), lse, indices)
    gradients = TopkGradients(view(dout), view(dq), view(dk), view(dv), dlse)
    _launch(topk_backward_kernel, (tensors, gradients), q, k, v, indices.shape[3], scale, gpu)()
    return dq, dk.to(k.dtype), dv.to(v.dtype)
