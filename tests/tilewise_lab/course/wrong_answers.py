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
    5: {
        "first_block": [
            ("m = s.amax(-1)\n", "m = s.max().expand(len(s))\n", "the maximum of the whole block"),
            ("return m, p.sum(-1), p @ v", "return m, p.sum(-1), p @ v / p.sum(-1)[:, None]", "keep the numerator"),
        ],
        "step": [
            (
                "factor * l + p.sum(-1), factor[:, None] * o + p @ v\n\n\ndef lazy",
                "l + p.sum(-1), factor[:, None] * o + p @ v\n\n\ndef lazy",
                "your l equals the result without the rescaling factor",
            ),
            (
                "factor * l + p.sum(-1), factor[:, None] * o + p @ v\n\n\ndef lazy",
                "factor * l + p.sum(-1), o + p @ v\n\n\ndef lazy",
                "your o equals the result without the rescaling factor",
            ),
            ("m.masked_fill(m == -torch.inf, 0.0)", "m", "only masked keys gives nan"),
        ],
        "lazy_step": [
            ("most > r_old + threshold", "most > r_old", "r is the maximum at every step"),
            ("torch.exp(r_old - r)", "torch.ones_like(r)", "without the rescaling factor exp(r_old - r_new)"),
            ("torch.exp(s - r[:, None])", "torch.exp(s - most[:, None])", "they must be exp(s - r)"),
        ],
    },
    6: {
        "hbm_bytes": [
            ("n // rows * 2 * matrix", "2 * matrix", "every block of queries reads them again"),
            ("matrix + 2 * matrix + 2 * 2", "matrix + matrix + 2 * 2", "it is loaded *and* stored"),
            (" + matrix + statistic\n", " + matrix\n", "lse is missing"),
        ],
        "fa2": [
            (
                "o = factor[:, None] * o + p @ v_j\n            m = m_new\n        out.append(o / l[:, None])\n        lse",
                "o = o + p @ v_j\n            m = m_new\n        out.append(o / l[:, None])\n        lse",
                "without the rescaling factor exp(m_old - m_new) on o",
            ),
            (
                "l = factor * l + p.sum(-1)\n            o = factor[:, None] * o + p @ v_j\n            m = m_new\n        out.append(o / l[:, None])\n        lse",
                "l = l + p.sum(-1)\n            o = factor[:, None] * o + p @ v_j\n            m = m_new\n        out.append(o / l[:, None])\n        lse",
                "without the rescaling factor exp(m_old - m_new) on l",
            ),
            ("lse.append(m + l.log())", "lse.append(m)", "add log l"),
            ("out.append(o / l[:, None])\n        lse", "out.append(o)\n        lse", "equals the numerator"),
        ],
        "fa2_causal": [
            ("j > i[:, None]", "j > len(k)", "attention without a mask"),
            ("j > i[:, None]", "j >= i[:, None]", "hide j > i, not j >= i"),
            ("range(0, first + len(q_i), columns)", "range(0, len(k), columns)", "all blocks are visited"),
            ("range(0, first + len(q_i), columns)", "range(0, first + 1, columns)", "its last query sees further keys"),
        ],
    },
    7: {
        "launch": [
            ("-(-n // block)", "n // block + 1", "one block too many where block divides n"),
            ("blocks * block - n", "n % block", "that *have* an element"),
        ],
        "lines": [
            ("lane_axis == 1", "lane_axis == 0", "the axes are exchanged"),
            (
                "    return len(touched)",
                "    return 32 if lane_axis == 0 else 1",
                "with short rows several lanes share a line",
            ),
        ],
        "branch_cycles": [
            (
                "then * any(warp) + other * (not all(warp))",
                "max(then * any(warp), other * (not all(warp)))",
                "it runs both sides",
            ),
            ("then * any(warp) + other * (not all(warp))", "then + other", "one whose lanes agree"),
            ("range(0, len(taken), 32)", "range(0, len(taken), 10**6)", "all threads count as one warp"),
        ],
    },
    8: {
        "swap": [
            ("    strides[a], strides[b] = strides[b], strides[a]\n", "", "exchange both"),
            ("    shape[a], shape[b] = shape[b], shape[a]\n", "", "exchange both"),
        ],
        "split_heads": [
            ("[*steps, d * step, step]", "[*steps, d, 1]", "taken for 1"),
            ("[*steps, d * step, step]", "[*steps, step, heads * step]", "interleaves the heads"),
        ],
        "merge_axes": [
            (" if x[0] != 1", "", "axes of length 1 do not count"),
            ("            return None\n", "            return step\n", "it needs a copy"),
            ("    return step\n", "    return 1\n", "the elements are not neighbours"),
        ],
    },
    9: {
        "slots": [
            ("stages + iterations - 1", "stages * iterations", "nothing overlaps"),
            ("stages + iterations - 1", "stages + iterations", "one slot too many"),
        ],
        "most_stages": [
            ("(shared - kept)", "shared", "the tile of Q is missing"),
            ("(2 * tile)", "tile", "a stage holds two tiles"),
            ("max(0, (shared - kept) // (2 * tile))", "(shared - kept) // (2 * tile)", "a negative number of stages"),
        ],
        "finish": [
            ("    return free[-1]", "    return iterations * sum(durations)", "nothing overlaps"),
            ("    return free[-1]", "    return iterations * max(durations)", "the slowest stage alone"),
            ("max(now, free[stage])", "now", "a stage serves one at a time"),
        ],
    },
}
