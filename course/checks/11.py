import torch
from tilewise_lab.learn import expect


def check(answer):
    for n_q, n_k, rows, block in (
        (8, 8, 2, 2),
        (16, 16, 4, 8),
        (6, 12, 2, 4),
        (12, 6, 4, 2),
        (5, 7, 5, 3),
    ):
        seen = torch.arange(n_k) <= torch.arange(n_q)[:, None] + n_k - n_q
        for first in range(0, n_q - rows + 1, rows):
            tiles = seen[first : first + rows].split(block, 1)
            exact = (
                sum(bool(t.all()) and t.shape[1] == block for t in tiles),
                sum(bool(t.any()) for t in tiles),
            )
            got = tuple(answer.span(first, rows, n_q, n_k, block))
            place_zh = f"{n_q} 个查询中的第 {first} 到 {first + rows} 行，{n_k} 个键，每块 {block} 个"
            where = f"rows {first} to {first + rows} of {n_q}, {n_k} keys in blocks of {block}"
            expect(
                got[1] == exact[1],
                f"{where}: {exact[1]} blocks are visited, not {got[1]}; the *last* row sees the most",
                f"{place_zh}：要访问 {exact[1]} 块，而不是 {got[1]}；*最后*一行看到的最多",
            )
            expect(
                got[0] == exact[0],
                f"{where}: {exact[0]} blocks need no mask, not {got[0]}; the *first* row sees the fewest",
                f"{place_zh}：有 {exact[0]} 块不需要掩码，而不是 {got[0]}；*第一*行看到的最少",
            )
