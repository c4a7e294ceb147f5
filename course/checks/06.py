import math

import torch

from tilewise_lab import trace
from tilewise_lab.learn import compare, expect

FACTOR = "the rescaling factor exp(m_old - m_new)"
FACTOR_ZH = "修正因子 exp(m_old - m_new)"


def hbm_bytes(answer):
    for order in ("fa2", "fa1"):
        for n, d, rows, columns in (
            (16, 4, 4, 4),
            (24, 8, 4, 8),
            (32, 4, 16, 2),
        ):
            total = trace.attention(
                n, n, d=d, rows=rows, columns=columns, order=order
            )["totals"]
            exact = sum(total["loaded"].values()) + sum(
                total["stored"].values()
            )
            matrix, blocks = 4 * n * d, n // columns
            wrong = {
                "fa2": (
                    (
                        4 * matrix + 4 * n,
                        "K and V are counted once: every block of queries reads them again",
                        "K 和 V 只数了一次：每块查询都要重新读它们",
                    ),
                    (
                        exact - 4 * n,
                        "lse is missing: n numbers at the end",
                        "漏了 lse：最后还有 n 个数",
                    ),
                    (
                        exact + 4 * n,
                        "m and l are stored here; of the two only lse leaves the chip",
                        "这里写了 m 和 l；实际上只写它们的组合 lse",
                    ),
                ),
                "fa1": (
                    (
                        exact - blocks * matrix,
                        "o is counted once for each block of keys: it is loaded *and* stored",
                        "每块键只数了一次 o：它要读进来，*也要*写回去",
                    ),
                    (
                        exact - blocks * 8 * n,
                        "m and l are counted once for each block of keys: they are loaded *and* stored",
                        "每块键只数了一次 m 和 l：它们要读进来，*也要*写回去",
                    ),
                    (
                        exact - blocks * 16 * n,
                        "m and l are missing: both are loaded and stored for each block of keys",
                        "漏了 m 和 l：每块键都要读写它们",
                    ),
                    (
                        exact - (blocks - 1) * matrix,
                        "q is counted once: every block of keys reads it again",
                        "q 只数了一次：每块键都要重新读它",
                    ),
                ),
            }
            got = answer.hbm_bytes(n, d, rows, columns, order)
            compare(
                f"hbm_bytes({n}, {d}, {rows}, {columns}, {order!r})",
                got,
                exact,
                *wrong[order],
            )


def fa2(answer):
    torch.manual_seed(0)
    for n, d, rows, columns in ((8, 4, 8, 8), (12, 4, 4, 4), (10, 8, 4, 3)):
        q, k, v = (
            2 * torch.randn(n, d, dtype=torch.float64) for _ in range(3)
        )
        s = q @ k.T / math.sqrt(d)
        what = f"fa2(q, k, v, {rows}, {columns}), n = {n}, d = {d}"
        found = answer.fa2(q, k, v, rows, columns)
        expect(
            isinstance(found, tuple) and len(found) == 2,
            "return (o, lse)",
            "要返回 (o, lse)",
        )
        both, no_l, no_o, bare = (
            online(s, v, columns, *skip)
            for skip in (
                (True, True),
                (False, True),
                (True, False),
                (False, False),
            )
        )
        unscaled = online(q @ k.T, v, columns, True, True)
        compare(
            f"{what}: o",
            found[0],
            both[0],
            (
                no_o[0],
                f"your output equals the result without {FACTOR} on o",
                f"你的输出等于 o 漏掉{FACTOR_ZH}的结果",
            ),
            (
                no_l[0],
                f"your output equals the result without {FACTOR} on l",
                f"你的输出等于 l 漏掉{FACTOR_ZH}的结果",
            ),
            (
                bare[0],
                f"your output equals the result without {FACTOR}, on l and on o",
                f"你的输出等于 l 和 o 都漏掉{FACTOR_ZH}的结果",
            ),
            (
                unscaled[0],
                "your output equals the result without the factor 1/√d in the scores",
                "你的输出等于分数漏掉因子 1/√d 的结果",
            ),
            (
                both[2],
                "your output equals the numerator: divide by l after the last block of keys",
                "你的输出等于分子：最后一块键之后要除以 l",
            ),
            (
                local(s, v, columns),
                "your output equals a softmax of each block alone, added up: the blocks need a common maximum",
                "你的输出等于每块各做 softmax 再相加：各块要有共同的最大值",
            ),
            (
                torch.softmax(s[:, -(n % columns or columns) :], -1)
                @ v[-(n % columns or columns) :],
                "your output equals attention over the last block of keys alone: keep the state between blocks",
                "你的输出等于只对最后一块键做注意力：块与块之间要保留状态",
            ),
        )
        compare(
            f"{what}: lse",
            found[1],
            both[1],
            (
                both[3],
                "your lse is the maximum m: add log l",
                "你的 lse 是最大值 m：要加上 log l",
            ),
            (
                both[1] - both[3],
                "your lse is log l: add m",
                "你的 lse 是 log l：要加上 m",
            ),
        )


def online(s, v, columns, on_l, on_o):
    """(o, lse, numerator, m), with the rescaling of l or of o left out where asked for."""
    m, l, o = s.new_full((len(s),), -torch.inf), 0, 0
    for s_j, v_j in zip(s.split(columns, 1), v.split(columns), strict=True):
        new = torch.maximum(m, s_j.amax(-1))
        p, factor = torch.exp(s_j - new[:, None]), torch.exp(m - new)
        l = (factor if on_l else 1) * l + p.sum(-1)
        o = (factor[:, None] if on_o else 1) * o + p @ v_j
        m = new
    return o / l[:, None], m + l.log(), o, m


def local(s, v, columns):
    return sum(
        torch.softmax(a, -1) @ b
        for a, b in zip(s.split(columns, 1), v.split(columns), strict=True)
    )


def fa2_causal(answer):
    torch.manual_seed(1)
    for n, rows, columns in ((8, 4, 4), (10, 4, 3), (9, 2, 4)):
        q, k, v = (torch.randn(n, 4, dtype=torch.float64) for _ in range(3))
        s, i = q @ k.T / 2, torch.arange(n)
        attend = {
            name: torch.softmax(s.masked_fill(hidden, -torch.inf), -1) @ v
            for name, hidden in (
                ("right", i > i[:, None]),
                ("before", i >= i[:, None]),
                ("after", i < i[:, None]),
            )
        }
        what = f"fa2_causal(q, k, v, {rows}, {columns}), n = {n}"
        o, visited = answer.fa2_causal(q, k, v, rows, columns)
        compare(
            f"{what}: o",
            o,
            attend["right"],
            (
                torch.softmax(s, -1) @ v,
                "your output equals attention without a mask: -inf where j > i",
                "你的输出等于没有掩码的注意力：j > i 处应为 -inf",
            ),
            (
                visited_only(s, v, rows, columns, rows - 1, masked=False),
                "your output equals attention without a mask: -inf where j > i",
                "你的输出等于没有掩码的注意力：j > i 处应为 -inf",
            ),
            (
                attend["before"],
                "a query does not see its own key: hide j > i, not j >= i",
                "查询看不到自己的键：应遮住 j > i，而不是 j >= i",
            ),
            (
                attend["after"],
                "the mask is the wrong way round: hide the keys after the query, j > i",
                "掩码反了：应遮住查询之后的键，j > i",
            ),
            (
                within(s, v, rows, columns),
                "i and j count inside their blocks: add where each block begins",
                "i 和 j 是块内的序号：要加上各块的起点",
            ),
            (
                visited_only(s, v, rows, columns, 0, masked=True),
                "the loop ends at the first query of the block: its last query sees further keys",
                "循环在这一块的第一个查询处就结束了：最后一个查询还能看到更多的键",
            ),
        )
        exact = sum(
            -(-min(first + rows, n) // columns) for first in range(0, n, rows)
        )
        everything = -(-n // rows) * -(-n // columns)
        compare(
            f"{what}: visited",
            visited,
            exact,
            (
                everything,
                "all blocks are visited: end the loop over keys after the last query of the block",
                "所有块都访问了：键的循环应在这一块最后一个查询处结束",
            ),
        )


def within(s, v, rows, columns):
    i, j = (
        torch.arange(len(s))[:, None] % rows,
        torch.arange(len(s)) % columns,
    )
    return torch.softmax(s.masked_fill(j > i, -torch.inf), -1) @ v


def visited_only(s, v, rows, columns, last, masked):
    """Attention to the blocks of keys up to the one of query first + last of each block of queries."""
    i, j = torch.arange(len(s))[:, None], torch.arange(len(s))
    end = (
        (i // rows * rows + last).clamp(max=len(s) - 1) // columns + 1
    ) * columns
    return (
        torch.softmax(
            s.masked_fill((j >= end) | ((j > i) & masked), -torch.inf), -1
        )
        @ v
    )


EXERCISES = (hbm_bytes, fa2, fa2_causal)
