import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton
import triton.language as tl

from tilewise_lab.learn import expect, step

D, BLOCK_M, BLOCK_N = 16, 16, 32
NAN = math.nan


@triton.jit
def probe_load(
    x, out, first, n, LOAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    tile = LOAD(x, first, n, D, BLOCK)
    tl.store(
        out + tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :],
        tile,
    )


@triton.jit
def probe_step(
    s, v, m_out, l_out, acc_out, columns, STEP: tl.constexpr, D: tl.constexpr
):
    i, j, c = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, D)
    m = tl.full([16], float("-inf"), tl.float32)
    l = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for first in range(0, columns, 16):
        s_tile = tl.load(s + i[:, None] * columns + first + j[None, :])
        v_tile = tl.load(v + (first + j[:, None]) * D + c[None, :])
        m, l, acc = STEP(m, l, acc, s_tile, v_tile)
    tl.store(m_out + i, m)
    tl.store(l_out + i, l)
    tl.store(acc_out + i[:, None] * D + c[None, :], acc)


@triton.jit
def probe_gradient(
    s,
    lse,
    do,
    v,
    delta,
    p_out,
    ds_out,
    GRADIENT: tl.constexpr,
    D: tl.constexpr,
):
    i, j, c = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, D)
    at, square = i[:, None] * D + c[None, :], i[:, None] * 16 + j[None, :]
    p, ds = GRADIENT(
        tl.load(s + square),
        tl.load(lse + i),
        tl.load(do + at),
        tl.load(v + at),
        tl.load(delta + i),
    )
    tl.store(p_out + square, p)
    tl.store(ds_out + square, ds)


def close(a, b):
    return torch.allclose(a.double(), b.double(), atol=1e-4)


PROBLEMS = ((40, False), (40, True), (7, True))


def online_step(answer):
    torch.manual_seed(6)
    with step(1, 6, "load_tile"):
        load(answer)
    with step(2, 6, "online_step"):
        online(answer)


def forward(answer):
    torch.manual_seed(7)
    with step(3, 6, "forward"):
        for n, causal in PROBLEMS:
            forward_of(answer, n, causal)


def backward(answer):
    torch.manual_seed(8)
    with step(4, 6, "block_gradient"):
        gradient(answer)
    with step(5, 6, "backward_keys"):
        for n, causal in PROBLEMS:
            backward_of(
                answer, n, causal, "backward_keys", ("dk", "dv"), BLOCK_N
            )
    with step(6, 6, "backward_queries"):
        for n, causal in PROBLEMS:
            backward_of(
                answer, n, causal, "backward_queries", ("dq",), BLOCK_M
            )


def load(answer):
    x = torch.randn(40, D)
    for first, n in ((0, 40), (16, 40), (32, 40), (0, 5)):
        out = torch.full((16, D), NAN)
        probe_load[(1,)](
            x, out, first, n, LOAD=answer.load_tile, D=D, BLOCK=16
        )
        inside = max(0, min(16, n - first))
        expect(
            torch.equal(out[:inside], x[first : first + inside]),
            f"rows {first} to {first + inside} are not those of x: row i begins at x + i · D",
            f"第 {first} 到 {first + inside} 行与 x 不符：第 i 行从 x + i · D 开始",
        )
        expect(
            not out[inside:].any(),
            f"rows past n = {n} must be zeros: mask=, other=0.0",
            f"超出 n = {n} 的行必须是零：mask=，other=0.0",
        )


def online(answer):
    s, v = torch.randn(16, 48) * 10, torch.randn(48, D)
    for hidden in (0, 1):
        if hidden:
            s = s.masked_fill(torch.rand(16, 48) < 0.5, -torch.inf)
            s[3], s[5, :16] = -torch.inf, -torch.inf
        m, l, acc = (
            torch.full((16,), NAN),
            torch.full((16,), NAN),
            torch.full((16, D), NAN),
        )
        probe_step[(1,)](s, v, m, l, acc, 48, STEP=answer.online_step, D=D)
        expect(
            close(m.nan_to_num(9e9), s.amax(-1)) or hidden,
            "m must be the maximum so far",
            "m 必须是到目前为止的最大值",
        )
        expect(
            not (l.isnan().any() or acc.isnan().any()),
            "a row that has seen only -inf gives nan: -inf - (-inf); subtract 0 there",
            "只见过 -inf 的行得到 nan：-inf - (-inf)；那里应改为减 0",
        )
        most = m.masked_fill(m == -torch.inf, 0.0)
        weights = torch.exp(s - most[:, None])
        expect(
            close(l, weights.sum(-1)),
            "l must be corrected by α = exp(m_old - m_new) before the new weights are added",
            "加上新的权重之前，l 要先乘修正因子 α = exp(m_old - m_new)",
        )
        expect(
            not close(acc, torch.softmax(s, -1).nan_to_num(0.0) @ v),
            "do not divide by l yet: that is done once, at the end",
            "先不要除以 l：最后才除一次",
        )
        expect(
            close(acc, weights @ v),
            "acc must be corrected by the same α, then P V is added",
            "acc 也要乘同一个 α，然后加上 P V",
        )


def inputs(n):
    return (torch.randn(n, D) for _ in range(4))


def exact(q, k, v, causal):
    s = q.double() @ k.double().T / math.sqrt(D)
    if causal:
        s = s.masked_fill(
            torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf
        )
    return torch.softmax(s, -1) @ v.double(), s.logsumexp(-1)


def named(n, causal):
    return (
        f"n = {n}, {'causal' if causal else 'all seen'}",
        f"n = {n}，{'因果' if causal else '全部可见'}",
    )


def forward_of(answer, n, causal):
    q, k, v, _ = inputs(n)
    o, lse = (
        torch.full((n + 4, D), NAN),
        torch.full((n + 4,), NAN),
    )  # with some rows behind, which are nobody's
    sizes = {"CAUSAL": causal, "D": D, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    answer.forward[(-(-n // BLOCK_M),)](
        q, k, v, o, lse, n, 1 / math.sqrt(D), **sizes
    )
    (en, zh), (want, want_lse) = named(n, causal), exact(q, k, v, causal)
    expect(
        o[n:].isnan().all() and lse[n:].isnan().all(),
        f"{en}: rows past n were written: store with a mask",
        f"{zh}：写到了第 n 行之后：store 要带 mask",
    )
    padded = torch.cat(
        [exact_scores(q, k), torch.zeros(n, -n % BLOCK_N).double()], 1
    )
    leaking = torch.softmax(padded, -1)[:, :n] @ v.double()
    expect(
        causal or n % BLOCK_N == 0 or not close(o[:n], leaking),
        f"{en}: keys past n count, with a score of 0: give them -inf",
        f"{zh}：超出 n 的键以分数 0 参与了：要给它们 -inf",
    )
    expect(
        not causal or n == 1 or not close(o[:n], exact(q, k, v, False)[0]),
        f"{en}: queries see later keys: -inf where j > i",
        f"{zh}：查询看到了后面的键：j > i 处应为 -inf",
    )
    expect(close(o[:n], want), f"{en}: o is wrong", f"{zh}：o 不对")
    expect(
        close(lse[:n], want_lse),
        f"{en}: lse is m + log l",
        f"{zh}：lse 应为 m + log l",
    )


def exact_scores(q, k):
    return q.double() @ k.double().T / math.sqrt(D)


def gradient(answer):
    s, do, v = torch.randn(16, 16), torch.randn(16, D), torch.randn(16, D)
    s[2, 4:] = -torch.inf
    lse, delta = (
        s.logsumexp(-1) + 0.7,
        torch.randn(16),
    )  # as if the row had more keys than these
    p, ds = torch.full((16, 16), NAN), torch.full((16, 16), NAN)
    probe_gradient[(1,)](
        s, lse, do, v, delta, p, ds, GRADIENT=answer.block_gradient, D=D
    )
    want = torch.exp(s - lse[:, None])
    expect(
        not close(p, torch.softmax(s, -1)),
        "P is not softmax over the block: the row has other keys; exp(S - L)",
        "P 不是这一块的 softmax：这一行还有别的键；应为 exp(S - L)",
    )
    expect(close(p, want), "P = exp(S - L)", "P = exp(S - L)，每行减自己的 L")
    dp = do @ v.T
    expect(
        not close(ds, want * dp),
        "δ is missing: dS = P ∘ (dP - δ)",
        "漏了 δ：dS = P ∘ (dP - δ)",
    )
    expect(
        close(ds, want * (dp - delta[:, None])),
        "dS = P ∘ (dO Vᵀ - δ)",
        "dS = P ∘ (dO Vᵀ - δ)，逐元素相乘",
    )


def backward_of(answer, n, causal, kernel, names, block):
    q, k, v, do = inputs(n)
    o, lse = exact(q, k, v, causal)
    delta = (do * o).sum(-1).float()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(
        exact(*leaves, causal)[0], leaves, do.double()
    )
    want = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    found = {name: torch.full((n + 4, D), NAN) for name in names}
    sizes = {"CAUSAL": causal, "D": D, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    scale = 1 / math.sqrt(D)
    args = (q, k, v, do, lse.float(), delta, *found.values(), n, scale)
    getattr(answer, kernel)[(-(-n // block),)](*args, **sizes)
    en, zh = named(n, causal)
    for name, got in found.items():
        expect(
            got[n:].isnan().all(),
            f"{en}: rows of {name} past n were written",
            f"{zh}：{name} 写到了第 n 行之后",
        )
        expect(
            not got[:n].isnan().any(),
            f"{en}: {name} has nan, or rows that nobody wrote: what do you load for rows past n?",
            f"{zh}：{name} 里有 nan，或者有没人写的行：超出 n 的行你读到了什么？",
        )
        expect(
            name == "dv" or not close(got[:n] * scale, want[name]),
            f"{en}: {name} lacks the scale, which belongs to S",
            f"{zh}：{name} 漏了缩放系数，它属于 S",
        )
        expect(
            close(got[:n], want[name]),
            f"{en}: {name} is wrong",
            f"{zh}：{name} 不对",
        )


EXERCISES = (online_step, forward, backward)
