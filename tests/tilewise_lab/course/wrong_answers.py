"""Usual mistakes in the exercises: what to replace in the lesson's solution, and what the learner is told then."""

from __future__ import annotations

Mistakes = dict[str, list[tuple[str, str, str]]]  # exercise: (text of the solution, its replacement, part of the hint)

WRONG: dict[int, Mistakes] = {
    1: {
        "attention": [
            (" / q.shape[-1] ** 0.5", "", "without the factor 1/√d"),
            ("torch.softmax(s, -1)", "torch.softmax(s, 0)", "runs along the queries"),
            ("torch.softmax(s, -1)", "s", "the softmax is missing"),
        ],
        "intensity": [
            ("2 * (n * n * d) + 2 * (n * n * d)", "2 * n * n * d", "a multiply-add is 2 FLOPs"),
            ('"P = softmax(S)": n * n + n * n,', "", "two passes over (n, n) are missing"),
            ("itemsize * sum", "sum", "FLOPs per element"),
        ],
        "seconds": [
            ("2 * max(product) + softmax", "max(2 * product[0], 2 * product[1] + softmax)", "maximum of the totals"),
            ("max(product)", "sum(product)", "they overlap: take the longer"),
            ("2 * max(product) + softmax", "2 * max(product)", "the softmax kernel is missing"),
        ],
    },
    2: {
        "softmax": [
            ("torch.exp(x - x.amax(-1, keepdim=True))\n", "torch.exp(x)\n", "exp overflows; subtract the maximum"),
            ("torch.exp(x - x.amax(-1, keepdim=True))\n", "torch.exp(x - x.max())\n", "each row needs its own maximum"),
            ("e / e.sum(-1, keepdim=True)", "e / e.sum()", "sum over the whole matrix"),
        ],
        "log_softmax": [
            ("return shifted - ", "return x - ", "inside the sum and not outside"),
            (
                "shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))",
                "torch.log(torch.exp(shifted) / torch.exp(shifted).sum(-1, keepdim=True))",
                "keep x_i outside the log",
            ),
        ],
        "masked_softmax": [
            ("torch.where(seen, x, -torch.inf)", "torch.where(seen, x, 0.0)", "they must be -inf"),
            ("torch.where(seen, x, -torch.inf)", "torch.where(seen, x, -1e6)", "-1e6 is not -inf"),
            ("torch.where(m == -torch.inf, 0.0, m)", "m", "-inf - (-inf)"),
            ("x = torch.where(seen, x, -torch.inf)", "return torch.softmax(x, -1) * seen", "you masked after softmax"),
        ],
    },
    3: {
        "merge": [
            ("a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m)", "a[1] + b[1]", "under different maxima"),
            (" + b[1] * math.exp(b[0] - m)", " + b[1]", "only the first l was corrected"),
            ("    if m == -math.inf:\n        return m, 0.0\n", "", "two empty states give nan"),
        ],
        "denominator": [
            ("l = l * math.exp(m - m_new) + ", "l = l + ", "without the factor exp(m_old - m_new)"),
            ("m, l = -math.inf, 0.0", "m, l = 0.0, 0.0", "start at m = -inf"),
            ("for x in xs:", "m = max(xs)\n    for x in xs:", "did you read the numbers twice"),
        ],
        "weighted_mean": [
            ("o * factor + weight * v", "o + weight * v", "o must be corrected as l is"),
            ("return o / l", "return o", "the division by l at the end is missing"),
        ],
    },
    4: {
        "fetched": [
            ("outputs * 2 * tile * n", "2 * n * n", "each element is read once here"),
            ("2 * tile * n", "tile * n", "only one of A and B"),
        ],
        "blocked_matmul": [
            ("c += far", "c = far", "equals the last term"),
            ('far.load("b", k, j)', 'far.load("b", j, k)', "Σ_k A_ik B_jk"),
            (
                "c += far",
                'far.load("a", i, k)\n                c += far',
                "loads; 2 · 1³ = 2 are enough",
            ),
        ],
        "two_products": [
            (".mT @ far", " @ far", "K_j must be transposed"),
            ("o_i += q_i", "o_i = q_i", "the term of the last block of keys"),
            ('+= q_i @ far.load("k"', '+= far.load("q", i) @ far.load("k"', "outside the inner loop"),
        ],
    },
}
