import torch

from tilewise_lab.learn import compare, expect, say

NO_FACTOR = (
    "equals the result without the rescaling factor exp(m_old - m_new)"
)
NO_FACTOR_ZH = "等于漏掉修正因子 exp(m_old - m_new) 的结果"


def run(step, s, v, block, *more):
    n = s.shape[0]
    state = (
        s.new_full((n,), -torch.inf),
        s.new_zeros(n),
        s.new_zeros(n, v.shape[1]),
    )
    for s_j, v_j in zip(s.split(block, 1), v.split(block), strict=True):
        state = step(state, s_j, v_j, *more)
    return state


def numbers():
    torch.manual_seed(1)
    return torch.randn(5, 12, dtype=torch.float64) * 3, torch.randn(
        12, 3, dtype=torch.float64
    )


def first_block(answer):
    s, v = numbers()
    m, l, o = answer.first_block(s, v)
    most = s.amax(-1)
    p = torch.exp(s - most[:, None])
    compare(
        "m",
        m,
        most,
        (
            most[:, None],
            "drop the last dim: m is (N,)",
            "去掉最后一维：m 的形状是 (N,)",
        ),
        (
            s.max().expand(5),
            "that is the maximum of the whole block: each row has its own",
            "这是整块的最大值：每一行有自己的最大值",
        ),
        (
            s.max(),
            "that is the maximum of the whole block: each row has its own",
            "这是整块的最大值：每一行有自己的最大值",
        ),
    )
    compare(
        "l",
        l,
        p.sum(-1),
        (
            torch.exp(s).sum(-1),
            "m is not subtracted before exp",
            "取 exp 之前没有减去 m",
        ),
    )
    compare(
        "o",
        o,
        p @ v,
        (
            torch.softmax(s, -1) @ v,
            "o is divided by l already: keep the numerator, the division comes at the end",
            "o 已经除以 l 了：先保留分子，最后才除",
        ),
        (
            torch.exp(s) @ v,
            "m is not subtracted before exp",
            "取 exp 之前没有减去 m",
        ),
    )


def step(answer):
    s, v = numbers()
    m, l, o = run(answer.step, s, v, 4)
    most = s.amax(-1)
    p = torch.exp(s - most[:, None])
    maxima = torch.stack([b.amax(-1) for b in s.split(4, 1)]).cummax(0).values
    blocks = [
        torch.exp(b - m_j[:, None])
        for b, m_j in zip(s.split(4, 1), maxima, strict=True)
    ]
    compare(
        "m",
        m,
        most,
        (
            s[:, -4:].amax(-1),
            "m is the maximum of the last block only: take the larger of it and the old m",
            "m 只是最后一块的最大值：要与旧的 m 取较大者",
        ),
    )
    compare(
        "l",
        l,
        p.sum(-1),
        (
            sum(b.sum(-1) for b in blocks),
            f"your l {NO_FACTOR}",
            f"你的 l {NO_FACTOR_ZH}",
        ),
    )
    compare(
        "o",
        o,
        p @ v,
        (
            sum(b @ v_j for b, v_j in zip(blocks, v.split(4), strict=True)),
            f"your o {NO_FACTOR}",
            f"你的 o {NO_FACTOR_ZH}",
        ),
        (
            torch.softmax(s, -1) @ v,
            "do not divide inside the step: o is the numerator",
            "不要在步骤里做除法：o 是分子",
        ),
    )
    masked = s.masked_fill(torch.rand(5, 12) < 0.4, -torch.inf)
    masked[2] = -torch.inf
    m, l, o = run(answer.step, masked, v, 4)
    expect(
        not o.isnan().any() and not l.isnan().any(),
        "a row with only masked keys gives nan: exp(-inf - (-inf)); subtract 0 in place of m = -inf",
        "键全部被遮住的行得到 nan：exp(-inf - (-inf))；m = -inf 时改为减 0",
    )
    expect(
        m[2] == -torch.inf and l[2] == 0 and not o[2].any(),
        "a row with only masked keys must stay (-inf, 0, 0)",
        "键全部被遮住的行必须保持 (-inf, 0, 0)",
    )
    others = [0, 1, 3, 4]
    compare(
        say("o / l with masked keys", "有键被遮住时的 o / l"),
        (o / l[:, None])[others],
        torch.softmax(masked[others], -1) @ v,
    )


def lazy_step(answer):
    s, v = numbers()
    s[3] = torch.linspace(0, 6, 12)
    threshold = 2.5
    r = s.new_full((5,), -torch.inf)
    for block in s.split(4, 1):
        r = torch.where(block.amax(-1) > r + threshold, block.amax(-1), r)
    got, l, o = run(answer.lazy_step, s, v, 4, threshold)
    compare(
        "r",
        got,
        r,
        (
            s.amax(-1),
            "r is the maximum at every step: keep r where the maximum exceeds it by less than the threshold",
            "每一步 r 都成了最大值：最大值没有比 r 大出 threshold 时，r 保持不变",
        ),
        (
            s[:, :4].amax(-1),
            "r never moves: it must, where the maximum exceeds it by more than the threshold",
            "r 从不改变：最大值比它大出 threshold 以上时，应该改变",
        ),
    )
    p = torch.exp(s - r[:, None])
    expect(
        torch.allclose(o / l[:, None], torch.softmax(s, -1) @ v)
        or not torch.allclose(l, p.sum(-1)),
        "your o equals the result without the rescaling factor exp(r_old - r_new)",
        "你的 o 等于漏掉修正因子 exp(r_old - r_new) 的结果",
    )
    compare(
        "l",
        l,
        p.sum(-1),
        (
            lazy_sum(s, threshold, factor=False),
            "your l equals the result without the rescaling factor exp(r_old - r_new)",
            "你的 l 等于漏掉修正因子 exp(r_old - r_new) 的结果",
        ),
        (
            lazy_sum(s, threshold, own=True),
            "your weights are exp(s - m), with the maximum of the block: they must be exp(s - r)",
            "你的权重是 exp(s - m)，用的是这一块的最大值：应为 exp(s - r)",
        ),
    )
    compare("o", o, p @ v)


def lazy_sum(s, threshold, factor=True, own=False):
    """l of an answer that leaves out the factor, or that takes each block's own maximum."""
    r, l = s.new_full((len(s),), -torch.inf), 0
    for block in s.split(4, 1):
        most = block.amax(-1)
        new = torch.where(most > r + threshold, most, r)
        l = l * (torch.exp(r - new) if factor else 1) + torch.exp(
            block - (most if own else new)[:, None]
        ).sum(-1)
        r = new
    return l


EXERCISES = (first_block, step, lazy_step)
