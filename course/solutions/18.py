import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl


@triton.jit
def load_tile(x, first, n, D: tl.constexpr, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)[:, None]
    at = x + i * D + tl.arange(0, D)[None, :]
    return tl.load(at, mask=i < n, other=0.0)


@triton.jit
def online_step(m, l, acc, s, v_tile):
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp(s - pivot[:, None])
    alpha = tl.exp(m - pivot)
    l = alpha * l + tl.sum(p, 1)
    pv = tl.dot(p, v_tile, input_precision="ieee")
    return m_new, l, alpha[:, None] * acc + pv


@triton.jit
def scores(
    q_tile, k_tile, first_i, first_j, n, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i = first_i + tl.arange(0, BLOCK_M)[:, None]
    j = first_j + tl.arange(0, BLOCK_N)[None, :]
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    hidden = j >= n
    if CAUSAL:
        hidden = hidden | (j > i)
    return tl.where(hidden, float("-inf"), s)


@triton.jit
def forward(
    q, k, v, o, lse, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    q_tile = load_tile(q, first, n, D, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    end = n
    if CAUSAL:
        end = tl.minimum(n, first + BLOCK_M)
    for first_j in range(0, end, BLOCK_N):
        k_tile = load_tile(k, first_j, n, D, BLOCK_N)
        s = scores(
            q_tile, k_tile, first, first_j, n, scale, CAUSAL, BLOCK_M, BLOCK_N
        )
        m, l, acc = online_step(
            m, l, acc, s, load_tile(v, first_j, n, D, BLOCK_N)
        )
    i = first + tl.arange(0, BLOCK_M)
    tl.store(
        o + i[:, None] * D + tl.arange(0, D)[None, :],
        acc / l[:, None],
        mask=i[:, None] < n,
    )
    tl.store(lse + i, m + tl.log(l), mask=i < n)


@triton.jit
def block_gradient(s, lse, do_tile, v_tile, delta):
    p = tl.exp(s - lse[:, None])
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    return p, p * (dp - delta[:, None])


@triton.jit
def backward_keys(
    q, k, v, do, lse, delta, dk, dv, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    k_tile = load_tile(k, first, n, D, BLOCK_N)
    v_tile = load_tile(v, first, n, D, BLOCK_N)
    dk_acc = tl.zeros([BLOCK_N, D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, D], tl.float32)
    start = 0
    if CAUSAL:
        start = first // BLOCK_M * BLOCK_M
    for first_i in range(start, n, BLOCK_M):
        i = first_i + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, first_i, n, D, BLOCK_M)
        do_tile = load_tile(do, first_i, n, D, BLOCK_M)
        row_lse = tl.load(lse + i, mask=i < n, other=float("inf"))
        row_delta = tl.load(delta + i, mask=i < n, other=0.0)
        s = scores(
            q_tile, k_tile, first_i, first, n, scale, CAUSAL, BLOCK_M, BLOCK_N
        )
        p, ds = block_gradient(s, row_lse, do_tile, v_tile, row_delta)
        dv_acc += tl.dot(tl.trans(p), do_tile, input_precision="ieee")
        dk_acc += tl.dot(tl.trans(ds), q_tile, input_precision="ieee") * scale
    j = first + tl.arange(0, BLOCK_N)[:, None]
    at = j * D + tl.arange(0, D)[None, :]
    tl.store(dk + at, dk_acc, mask=j < n)
    tl.store(dv + at, dv_acc, mask=j < n)


@triton.jit
def backward_queries(
    q, k, v, do, lse, delta, dq, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q, first, n, D, BLOCK_M)
    do_tile = load_tile(do, first, n, D, BLOCK_M)
    row_lse = tl.load(lse + i, mask=i < n, other=float("inf"))
    row_delta = tl.load(delta + i, mask=i < n, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    end = n
    if CAUSAL:
        end = tl.minimum(n, first + BLOCK_M)
    for first_j in range(0, end, BLOCK_N):
        k_tile = load_tile(k, first_j, n, D, BLOCK_N)
        s = scores(
            q_tile, k_tile, first, first_j, n, scale, CAUSAL, BLOCK_M, BLOCK_N
        )
        _, ds = block_gradient(
            s,
            row_lse,
            do_tile,
            load_tile(v, first_j, n, D, BLOCK_N),
            row_delta,
        )
        acc += tl.dot(ds, k_tile, input_precision="ieee") * scale
    tl.store(
        dq + i[:, None] * D + tl.arange(0, D)[None, :],
        acc,
        mask=i[:, None] < n,
    )
