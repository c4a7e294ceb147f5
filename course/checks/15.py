import math

import torch
from tilewise_lab.learn import expect


def attend(s, v):
    return torch.softmax(s, -1) @ v, s.logsumexp(-1)


def check(answer):
    torch.manual_seed(3)
    s, v = (
        torch.randn(4, 30, dtype=torch.float64) * 5,
        torch.randn(30, 3, dtype=torch.float64),
    )
    exact, exact_lse = attend(s, v)
    sizes = [4, 20, 6]
    parts = [
        attend(a, b)
        for a, b in zip(s.split(sizes, 1), v.split(sizes), strict=True)
    ]
    o, lse = answer.combine(parts)
    mean = torch.stack([o for o, _ in parts]).mean(0)
    expect(
        not torch.allclose(o, mean),
        "that is the mean: a part weighs exp(L_a - L)",
        "这是平均：一份的权重是 exp(L_a - L)",
    )
    expect(
        torch.allclose(o, exact),
        "o = Σ exp(L_a - L) o_a",
        "o = Σ exp(L_a - L) o_a，权重之和为 1",
    )
    expect(
        torch.allclose(lse, exact_lse),
        "L = log Σ exp(L_a)",
        "L = log Σ exp(L_a)，不是最大值，也不是和",
    )
    far = [(o, lse + 2000) for o, lse in parts]
    o, lse = answer.combine(far)
    expect(
        o.isfinite().all() and lse.isfinite().all(),
        "scores of 2000 overflow: subtract the largest L_a before exp",
        "分数到 2000 就溢出了：取 exp 之前先减去最大的 L_a",
    )
    expect(
        torch.allclose(o, exact),
        "wrong where scores are large",
        "分数大时不对",
    )
    empty = (
        torch.full((4, 3), math.nan, dtype=torch.float64),
        torch.full((4,), -torch.inf, dtype=torch.float64),
    )
    o, _ = answer.combine([empty, *parts])
    expect(
        torch.allclose(o, exact),
        "a part without keys has weight 0, and 0 · nan is nan: leave its o out",
        "没有键的那一份权重为 0，而 0 · nan 还是 nan：不要让它的 o 进来",
    )
    o, lse = answer.combine([empty, empty])
    expect(
        not o.any() and (lse == -torch.inf).all(),
        "no keys at all: o is 0 and lse -inf, without a nan",
        "一个键也没有时：o 为 0，lse 为 -inf，不能有 nan",
    )
    for length, count, block in (
        (1000, 7, 64),
        (64, 4, 16),
        (10, 4, 16),
        (0, 2, 16),
        (130, 3, 64),
    ):
        found = [tuple(x) for x in answer.bounds(length, count, block)]
        where = f"bounds({length}, {count}, {block})"
        expect(
            len(found) == count,
            f"{where}: {len(found)} parts",
            f"{where}：有 {len(found)} 份",
        )
        edges = [x for pair in found for x in pair]
        expect(
            edges[0] == 0
            and edges[-1] == length
            and edges[1:-1:2] == edges[2::2],
            f"{where} is {found}: parts must follow one another from 0 to {length}",
            f"{where} 是 {found}：各份必须首尾相接，从 0 到 {length}",
        )
        expect(
            all(first % block == 0 or first == length for first, _ in found),
            f"{where} is {found}: parts begin at whole blocks",
            f"{where} 是 {found}：每份都要从整块处开始",
        )
        blocks = [-(-(end - first) // block) for first, end in found]
        expect(
            max(blocks) - min(blocks) <= 1,
            f"{where}: blocks {blocks} are uneven",
            f"{where}：块数 {blocks} 不均匀",
        )
