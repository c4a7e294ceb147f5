import math

import torch

from tilewise_lab.learn import compare, expect, say


def bounds(answer):
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
            edges[-1] <= length,
            f"{where} is {found}: the last block is partial, the end is at most {length}",
            f"{where} 是 {found}：最后一块不满，止不能超过 {length}",
        )
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


def combine(answer):
    torch.manual_seed(3)
    s, v = (
        torch.randn(4, 30, dtype=torch.float64) * 3,
        torch.randn(30, 3, dtype=torch.float64),
    )
    exact, exact_lse = torch.softmax(s, -1) @ v, s.logsumexp(-1)
    sizes = [4, 20, 6]
    parts = [
        (torch.softmax(a, -1) @ b, a.logsumexp(-1))
        for a, b in zip(s.split(sizes, 1), v.split(sizes), strict=True)
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    o, lse = answer.combine(parts)
    by_size = sum(o_a * n for o_a, n in zip(outs, sizes, strict=True)) / 30
    compare(
        "o",
        o,
        exact,
        (
            outs.mean(0),
            "that is the mean of the parts: a part weighs exp(L_a - L)",
            "这是各份的平均：一份的权重是 exp(L_a - L)",
        ),
        (
            by_size,
            "the parts are weighed by their number of keys: a part weighs exp(L_a - L)",
            "你按键数加权了：一份的权重是 exp(L_a - L)",
        ),
        (
            outs.sum(0),
            "that is the sum of the parts: a part weighs exp(L_a - L)",
            "这是各份的和：一份的权重是 exp(L_a - L)",
        ),
        (
            (lses / lses.sum(0))[..., None].mul(outs).sum(0),
            "the weights are proportional to L_a: L_a is a logarithm, take exp(L_a - L)",
            "权重与 L_a 成正比：L_a 是对数，应取 exp(L_a - L)",
        ),
        (
            (torch.exp(lses - lses.amax(0))[..., None] * outs).sum(0),
            "the weights are not divided by their sum",
            "权重没有除以它们的和",
        ),
    )
    compare(
        "lse",
        lse,
        exact_lse,
        (
            lses.sum(0),
            "that is the sum of the L_a: L = log Σ exp(L_a)",
            "这是 L_a 的和：L = log Σ exp(L_a)",
        ),
        (
            lses.amax(0),
            "that is the largest L_a: L = log Σ exp(L_a)",
            "这是最大的 L_a：L = log Σ exp(L_a)",
        ),
        (
            exact_lse - lses.amax(0),
            "the maximum that you subtracted is not added again",
            "减去的最大值没有加回来",
        ),
    )
    o, lse = answer.combine([(o, lse + 2000) for o, lse in parts])
    expect(
        o.isfinite().all() and lse.isfinite().all(),
        "scores of 2000 overflow: subtract the largest L_a before exp",
        "分数到 2000 就溢出了：取 exp 之前先减去最大的 L_a",
    )
    compare(say("o of scores near 2000", "分数在 2000 附近时的 o"), o, exact)
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
        "no keys at all: o is 0 and lse -inf, without a nan; -inf - (-inf) and 0 / 0 are none",
        "一个键也没有时：o 为 0，lse 为 -inf，不能有 nan；-inf - (-inf) 和 0 / 0 都不是数",
    )


def best_parts(answer):
    for heads, blocks, processors, overhead, limit in (
        (8, 512, 132, 2, 64),
        (32, 64, 132, 2, 64),
        (128, 64, 132, 2, 64),
        (1, 100, 132, 10, 64),
    ):

        def time(
            parts,
            overhead=overhead,
            heads=heads,
            blocks=blocks,
            processors=processors,
            whole=True,
        ):
            waves = (
                -(-heads * parts // processors)
                if whole
                else heads * parts / processors
            )
            return waves * (-(-blocks // parts) + overhead * (parts > 1))

        tried = range(1, limit + 1)
        best = min(tried, key=time)
        compare(
            f"best_parts({heads}, {blocks}, {processors}, {overhead}, {limit})",
            answer.best_parts(heads, blocks, processors, overhead, limit),
            best,
            (
                min(tried, key=lambda p: time(p, overhead=0)),
                "the overhead is missing: with it, more parts stop paying",
                "漏了 overhead：算上它，份数再多就不划算了",
            ),
            (
                max(p for p in tried if time(p) == time(best)),
                "this is as fast, but not the smallest number of parts",
                "这个一样快，但不是最小的份数",
            ),
            (
                min(
                    tried, key=lambda p: -(-blocks // p) + overhead * (p > 1)
                ),
                "the waves are missing: more programs than processors run one after the other",
                "漏了波数：程序比处理器多时，要分几波运行",
            ),
            (
                min(tried, key=lambda p: time(p, whole=False)),
                "a wave with one program lasts as long as a full one: round the waves up",
                "一波里哪怕只有一个程序，也和满的一样长：波数要向上取整",
            ),
            (1, "one part leaves processors idle", "只分一份时有处理器空闲"),
        )


EXERCISES = (bounds, combine, best_parts)
