"""Usual mistakes in the exercises: the text to replace in a lesson's solution, and the feedback that must follow."""

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
            ("factor * l + p.sum(-1),", "l + p.sum(-1),", "your l equals the result without the rescaling factor"),
            ("factor[:, None] * o + p @ v", "o + p @ v", "your o equals the result without the rescaling factor"),
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
            ("o = factor[:, None] * o", "o = o", "without the rescaling factor exp(m_old - m_new) on o"),
            ("l = factor * l", "l = l", "without the rescaling factor exp(m_old - m_new) on l"),
            ("lse.append(m + l.log())", "lse.append(m)", "add log l"),
            ("out.append(o / l[:, None])", "out.append(o)", "equals the numerator"),
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
    10: {
        "attainable": [
            ("min(peak, flops / moved * rate)", "max(peak, flops / moved * rate)", "the lower one limits"),
            ("flops / moved", "moved / flops", "upside down"),
            ("min(peak, flops / moved * rate)", "flops / moved * rate", "the flat roof is missing"),
        ],
        "best_batch": [
            ("return 1 + busy.index(max(busy))", "return limit", "the largest batch is not the best one"),
            ("-(-tokens // tile) * heads", "tokens // tile * heads", "partial tile of the tokens is left out"),
            ("1 + busy.index(max(busy))", "limit - busy[::-1].index(max(busy))", "not the smallest"),
        ],
        "makespan": [
            ("for one in work:", "for one in sorted(work, reverse=True):", "the blocks were sorted"),
            ("return max(free)", "return -(-sum(work) // slots)", "a block cannot be divided"),
            (
                "    free = ",
                "    return sum(max(work[i : i + slots]) for i in range(0, len(work), slots))\n    free = ",
                "whole wave",
            ),
        ],
    },
    11: {
        "tile_offsets": [
            ("torch.where(i < n, i * d + c, -1)", "i * d + c", "rows past n are not marked"),
            ("torch.where(i < n, i * d", "torch.where(i <= n, i * d", "the last one is n - 1"),
        ],
        "masked_scores": [
            (" | (j >= n_k)", "", "keys past n_k are seen"),
            ("j > i + n_k - n_q", "j > i", "the offset n_k - n_q is missing"),
            ("j > i + n_k - n_q", "j >= i + n_k - n_q", "the key at its own position"),
        ],
        "span": [
            ("first + rows + offset", "first + 1 + offset", "the *last* row sees the most"),
            ("seen_by_all // block,", "-(-seen_by_all // block),", "a block that is seen in part needs the mask"),
            ("first + offset + 1", "first + rows + offset", "the *first* row sees the fewest"),
        ],
    },
    12: {
        "tanh": [
            ("(x, 1 - t * t)", "(x, 1.0)", "it is 1 - tanh²"),
            ("(x, 1 - t * t)", "(x, 1 - x.value**2)", "you squared x"),
        ],
        "maximum": [
            ("((x, larger), (y, 1 - larger))", "((x, 1.0), (y, 1.0))", "only the larger one changes the result"),
            ("x.value >= y.value", "x.value > y.value", "equal inputs: the gradient goes to x"),
        ],
        "linear_backward": [
            ("dy @ w.mT", "dy @ w", "dX = dY Wᵀ"),
            ("x.mT @ dy", "dy.mT @ x", "your dW is transposed"),
            ("dy.sum(0)", "dy.mean(0)", "it is the sum"),
        ],
    },
    13: {
        "weights": [
            (
                "torch.exp(scale * q @ k.mT - lse[:, None])",
                "torch.softmax(scale * q @ k.mT, -1)",
                "the row has other keys",
            ),
            ("torch.exp(scale * q @ k.mT", "torch.exp(q @ k.mT", "without the factor 1/√D"),
        ],
        "block_gradients": [
            ("scale * ds @ k,", "ds @ k,", "your dQ equals the result without the factor 1/√D"),
            ("(do @ v.mT - delta[:, None])", "(do @ v.mT)", "without δ"),
            (
                "(do @ v.mT - delta[:, None])",
                "(do @ v.mT - (p * (do @ v.mT)).sum(-1, keepdim=True))",
                "δ is the sum over this block",
            ),
        ],
        "backward": [
            ("dq[i] += found[0]", "dq[i] = found[0]", "your dQ is that of the last block of keys"),
            ("dk[j] += found[1]", "dk[j] = found[1]", "your dK is that of the last block of queries"),
            ("delta = (do * o).sum(-1)", "delta = torch.zeros_like(lse)", "without δ"),
            (
                "    delta = (do * o).sum(-1)\n",
                "    rows, columns = len(q), len(k)\n    delta = (do * o).sum(-1)\n",
                "a tensor of 80 elements is there",
            ),
        ],
    },
    14: {
        "registers": [
            ("65536 - 128 * producer", "65536", "the producer's registers are missing"),
            (" // 8 * 8", "", "not a multiple of 8"),
        ],
        "phases": [
            ("iteration // buffers % 2", "iteration % 2", "every use of the *same* buffer"),
            ("full, 1 - full", "full, full", "the release *before* this fill"),
        ],
        "ring_time": [
            ("done[i - buffers] if i >= buffers else 0", "0", "the producer never waits"),
            ("max(loaded, free) + load", "max(loaded, done[-1] if done else 0) + load", "nothing overlaps"),
        ],
    },
    15: {
        "bounds": [
            ("blocks * part // parts * block", "length * part // parts", "parts begin at whole blocks"),
            (
                "min(length, blocks * part // parts * block)",
                "blocks * part // parts * block",
                "the end is at most 1000",
            ),
            (
                "min(length, blocks * part // parts * block)",
                "min(length, part * -(-blocks // parts) * block)",
                "are uneven",
            ),
        ],
        "combine": [
            ("weighed.sum(0) / some[:, None]", "o.mean(0)", "that is the mean of the parts"),
            ("pivot + l.log()", "l.log()", "is not added again"),
            ("torch.where(w[..., None] > 0, w[..., None] * o, 0.0)", "w[..., None] * o", "0 · nan is nan"),
        ],
        "best_parts": [
            (" + overhead * (parts > 1)", "", "the overhead is missing"),
            ("waves = -(-heads * parts // processors)", "waves = 1", "the waves are missing"),
        ],
    },
    16: {
        "zigzag": [
            ("chunks[2 * ranks - 1 - r]", "chunks[r + ranks]", "rank r holds chunks r and r + ranks"),
            ("chunks[r] + chunks[2 * ranks - 1 - r]", "chunks[2 * r] + chunks[2 * r + 1]", "the shards are contiguous"),
        ],
        "rank_attention": [
            ("        found = merge(found, attend(q, k, v, none))\n", "", "only seen its own keys"),
            (
                "        k, v = yield k, v\n        found = merge(found, attend(q, k, v, none))",
                "        other = yield k, v\n        found = merge(found, attend(q, *other, none))",
                "pass on what was received",
            ),
            (
                "for _ in range(ranks - 1):",
                "for _ in range(ranks):\n        yield k, v\n    for _ in range(0):",
                "from each rank are enough",
            ),
        ],
        "causal_rank": [
            ("if owner < rank:", "if True:", "shards of later ranks are attended to"),
            ("torch.zeros_like(ahead)", "ahead", "earlier shards are seen completely"),
            (".triu(1)", ".triu(9)", "inside your own shard, tokens see later ones"),
        ],
    },
    17: {
        "mask": [
            ("(kv_idx <= q_idx) & (same | (kv_idx < shared))", "kv_idx <= q_idx", "a token sees another document"),
            (" & (same | (kv_idx < shared))", " & same", "must be visible to all later tokens"),
            ("(kv_idx <= q_idx) & (same | (kv_idx < shared))", "same | (kv_idx < shared)", "j <= i is missing"),
        ],
        "score": [
            ("(kv_idx < shared) & (q_idx >= shared)", "kv_idx < shared", "only where q_idx >= shared"),
            ("score - tax", "score + tax", "the tax is added"),
            ("return torch.where(taxed, score - tax, score)", "return score", "the scores are unchanged"),
        ],
        "tile_kinds": [
            ("tile.any().int() + tile.all().int()", "tile.any().int()", "full tiles are not told apart"),
            ("tile.any().int() + tile.all().int()", "2 * tile.any().int()", "partial tiles count as full"),
            (
                "    rows = []\n",
                "    pad = -len(seen) % block\n"
                "    seen = torch.nn.functional.pad(seen, (0, pad, 0, pad))\n    rows = []\n",
                "filled up with hidden pairs",
            ),
        ],
    },
    18: {
        "online_step": [
            (
                "other=0.0)\n\n\n@triton.jit\ndef online_step",
                "other=1.0)\n\n\n@triton.jit\ndef online_step",
                "step 1 of 6, load_tile: rows past n",
            ),
            ("l = alpha * l + tl.sum(p, 1)", "l = l + tl.sum(p, 1)", "step 2 of 6, online_step: l must be corrected"),
            (
                'tl.where(m_new == float("-inf"), 0.0, m_new)',
                "m_new",
                "step 2 of 6, online_step: a row that has seen only",
            ),
        ],
        "forward": [
            (
                "    hidden = j >= n\n",
                "    hidden = j < 0\n",
                "step 3 of 6, forward: n = 40, all seen: keys past n count",
            ),
            ("m + tl.log(l)", "m", "lse is m + log l"),
        ],
        "backward": [
            ("(dp - delta[:, None])", "dp", "step 4 of 6, block_gradient: δ is missing"),
            (
                'tl.trans(ds), q_tile, input_precision="ieee") * scale',
                "tl.trans(ds), q_tile)",
                "step 5 of 6, backward_keys: n = 40, all seen: dk lacks the scale",
            ),
            (
                "acc += tl.dot(ds, k_tile",
                "acc = tl.dot(ds, k_tile",
                "step 6 of 6, backward_queries: n = 40, all seen: dq is wrong",
            ),
        ],
    },
}
