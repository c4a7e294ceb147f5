import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise_lab.learn import compare, expect


def inputs(n=8, m=10, d=4, e=3):
    torch.manual_seed(2)
    q, k, v, do = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((n, d), (m, d), (m, e), (n, e))
    )
    s = q @ k.T / d**0.5
    return q, k, v, do, s, torch.softmax(s, -1) @ v, s.logsumexp(-1)


def weights(answer):
    q, k, *_, s, _, lse = inputs()
    some = slice(0, 4)
    compare(
        "weights(q, k[:4], lse)",
        answer.weights(q, k[some], lse),
        torch.exp(s - lse[:, None])[:, some],
        (
            torch.softmax(s[:, some], -1),
            "your P is a softmax over this block: the row has other keys, exp(S - lse)",
            "你的 P 是这一块的 softmax：这一行还有别的键，应为 exp(S - lse)",
        ),
        (
            torch.exp(2 * s - lse[:, None])[:, some],
            "your P equals the result without the factor 1/√D in S",
            "你的 P 等于 S 漏掉因子 1/√D 的结果",
        ),
        (
            torch.exp(s)[:, some],
            "lse is missing: P = exp(S - lse)",
            "漏了 lse：P = exp(S - lse)",
        ),
        (
            (torch.exp(s) / lse[:, None])[:, some],
            "you divided by lse: it is a logarithm, subtract it before exp",
            "你除以了 lse：它是对数，应在 exp 之前减去",
        ),
    )


def gradients(q, k, do, p, dp, delta):
    """(dQ, dK, dV) of a block."""
    ds = p * (dp - delta)
    return ds @ k / 2, ds.T @ q / 2, p.T @ do


def block_gradients(answer):
    q, k, v, do, s, o, lse = inputs()
    j = slice(3, 8)
    p, dp = torch.exp(s - lse[:, None])[:, j], do @ v[j].T
    delta = (do * o).sum(-1, keepdim=True)
    found = answer.block_gradients(q, k[j], v[j], do, lse, delta[:, 0])
    exact = gradients(q, k[j], do, p, dp, delta)
    for name, got, want, shape in zip(
        ("dQ", "dK", "dV"), found, exact, (q, k[j], v[j]), strict=True
    ):
        expect(
            got.shape == want.shape,
            f"{name} has shape {tuple(got.shape)}; it must be that of its input, {tuple(shape.shape)}",
            f"{name} 的形状是 {tuple(got.shape)}；应与输入相同，{tuple(shape.shape)}",
        )
    told(
        found,
        exact,
        gradients(q, k[j], do, p, dp, 0),
        gradients(q, k[j], do, p, dp, (p * dp).sum(-1, keepdim=True)),
        dp.T,
    )


def told(found, exact, no_delta, block_delta, dp_t):
    compare(
        "dV",
        found[2],
        exact[2],
        (
            dp_t,
            "your dV is V dOᵀ: it is Pᵀ dO",
            "你的 dV 是 V dOᵀ：应为 Pᵀ dO",
        ),
    )
    for n, name in enumerate(("dQ", "dK")):
        compare(
            name,
            found[n],
            exact[n],
            (
                2 * exact[n],
                f"your {name} equals the result without the factor 1/√D: S has it, so its gradients have it",
                f"你的 {name} 等于漏掉因子 1/√D 的结果：S 里有它，梯度里也要有",
            ),
            (
                no_delta[n],
                f"your {name} equals the result without δ: dS = P ∘ (dP - δ)",
                f"你的 {name} 等于漏掉 δ 的结果：dS = P ∘ (dP - δ)",
            ),
            (
                2 * no_delta[n],
                f"your {name} equals the result without δ and without 1/√D: dS = P ∘ (dP - δ)",
                f"你的 {name} 等于漏掉 δ 和 1/√D 的结果：dS = P ∘ (dP - δ)",
            ),
            (
                block_delta[n],
                "δ is the sum over this block: it belongs to the whole row, rowsum(dO ∘ O)",
                "δ 只是这一块的和：它属于整行，rowsum(dO ∘ O)",
            ),
            (
                -exact[n],
                "the sign is wrong: dS = P ∘ (dP - δ)",
                "符号反了：dS = P ∘ (dP - δ)",
            ),
        )


def backward(answer):
    q, k, v, do, s, o, lse = inputs()
    p, dp = torch.exp(s - lse[:, None]), do @ v.T
    delta = (do * o).sum(-1, keepdim=True)
    for rows, columns in ((8, 10), (4, 5), (3, 4)):
        with Sizes() as sizes:
            found = answer.backward(q, k, v, o, lse, do, rows, columns)
        exact = gradients(q, k, do, p, dp, delta)
        last = (
            slice(-(10 % columns or columns), None),
            slice(-(8 % rows or rows), None),
        )
        block = gradients(
            q, k[last[0]], do, p[:, last[0]], dp[:, last[0]], delta
        )[0]
        compare(
            f"backward(..., {rows}, {columns}): dQ",
            found[0],
            exact[0],
            (
                block,
                "your dQ is that of the last block of keys: add up over the blocks, dQ_i +=",
                "你的 dQ 只是最后一块键的：要对各块求和，dQ_i +=",
            ),
        ) if columns < 10 else None
        rest = gradients(
            q[last[1]],
            k,
            do[last[1]],
            p[last[1]],
            dp[last[1]],
            delta[last[1]],
        )
        for n, name in ((1, "dK"), (2, "dV")):
            compare(
                f"backward(..., {rows}, {columns}): {name}",
                found[n],
                exact[n],
                (
                    rest[n],
                    f"your {name} is that of the last block of queries: add up over the blocks, {name}_j +=",
                    f"你的 {name} 只是最后一块查询的：要对各块求和，{name}_j +=",
                ),
                *mistakes(n, q, k, do, p, dp, columns),
            )
        told(
            found,
            exact,
            gradients(q, k, do, p, dp, 0),
            summed(q, k, do, p, dp, columns),
            dp.T,
        )
        expect(
            rows == 8 or sizes.most < 8 * 10,
            f"a tensor of {sizes.most} elements is there: blocks of {rows} × {columns} only",
            f"出现了 {sizes.most} 个元素的张量：只许有 {rows} × {columns} 的块",
        )


def mistakes(n, q, k, do, p, dp, columns):
    if n == 2:
        return ()
    wrong = summed(q, k, do, p, dp, columns)[n]
    none = gradients(q, k, do, p, dp, 0)[n]
    return (
        (
            none,
            "your dK equals the result without δ: dS = P ∘ (dP - δ), δ = rowsum(dO ∘ O)",
            "你的 dK 等于漏掉 δ 的结果：dS = P ∘ (dP - δ)，δ = rowsum(dO ∘ O)",
        ),
        (
            wrong,
            "δ is the sum over each block: it belongs to the whole row, rowsum(dO ∘ O)",
            "δ 只是每一块的和：它属于整行，rowsum(dO ∘ O)",
        ),
    )


def summed(q, k, do, p, dp, columns):
    """(dQ, dK, dV) with a δ for each block of keys in place of the row's."""
    delta = torch.cat(
        [
            x.sum(-1, keepdim=True).expand_as(x)
            for x in (p * dp).split(columns, 1)
        ],
        1,
    )
    return gradients(q, k, do, p, dp, delta)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.most = max(self.most, out.numel())
        return out


EXERCISES = (weights, block_gradients, backward)
