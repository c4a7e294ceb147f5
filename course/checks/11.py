import torch

from tilewise_lab.learn import compare


def tile_offsets(answer):
    for first, rows, n, d in ((0, 4, 8, 3), (4, 4, 6, 4), (8, 4, 6, 2)):
        i, c = first + torch.arange(rows)[:, None], torch.arange(d)
        at = i * d + c
        compare(
            f"tile_offsets({first}, {rows}, {n}, {d})",
            torch.as_tensor(answer.tile_offsets(first, rows, n, d)),
            torch.where(i < n, at, -1),
            (
                at,
                "rows past n are not marked: they belong to other data, put -1",
                "超出 n 的行没有标出：那里是别的数据，应填 -1",
            ),
            (
                torch.where(i <= n, at, -1),
                "row n is taken for one of the matrix: the last one is n - 1",
                "把第 n 行当成了矩阵的行：最后一行是 n - 1",
            ),
            (
                torch.where(i < n, i + c * n, -1),
                "this is column-major: row i begins at i · d",
                "这是列主序：第 i 行从 i · d 开始",
            ),
            (
                torch.where(i < n, (i - first) * d + c, -1),
                "the rows count from the tile: add `first`",
                "行号从块内算起了：要加上 `first`",
            ),
        )


def masked_scores(answer):
    torch.manual_seed(0)
    for first_i, first_j, n_q, n_k in (
        (0, 0, 4, 4),
        (4, 0, 8, 8),
        (0, 4, 4, 7),
        (4, 4, 6, 12),
        (4, 8, 6, 10),
        (0, 0, 6, 2),
    ):
        s = torch.randn(4, 4)
        i, j = first_i + torch.arange(4)[:, None], first_j + torch.arange(4)
        past, offset = j >= n_k, n_k - n_q
        hide = lambda hidden, s=s: s.masked_fill(hidden, -torch.inf)  # noqa: E731
        compare(
            f"masked_scores(s, {first_i}, {first_j}, {n_q}, {n_k})",
            answer.masked_scores(s.clone(), first_i, first_j, n_q, n_k),
            hide((j > i + offset) | past),
            (
                hide(j > i + offset),
                "keys past n_k are seen: they do not exist, -inf",
                "看到了 n_k 之后的键：它们不存在，应为 -inf",
            ),
            (
                hide((j > i) | past),
                "the offset n_k - n_q is missing: query i sits at key position i + n_k - n_q",
                "漏了偏移 n_k - n_q：查询 i 位于键的位置 i + n_k - n_q",
            ),
            (
                hide((j >= i + offset) | past),
                "a query does not see the key at its own position: hide j > i + n_k - n_q",
                "查询看不到自己位置上的键：应遮住 j > i + n_k - n_q",
            ),
            (
                hide((j - first_j > i - first_i + offset) | past),
                "i and j count inside the tile: add first_i and first_j",
                "i 和 j 是块内的序号：要加上 first_i 和 first_j",
            ),
        )


def span(answer):
    for n_q, n_k, rows, block in (
        (16, 16, 4, 8),
        (8, 8, 2, 2),
        (6, 12, 2, 4),
        (12, 6, 4, 2),
        (5, 7, 5, 3),
    ):
        seen = torch.arange(n_k) <= torch.arange(n_q)[:, None] + n_k - n_q
        for first in range(0, n_q - rows + 1, rows):
            tiles = seen[first : first + rows].split(block, 1)
            full = sum(bool(t.all()) and t.shape[1] == block for t in tiles)
            visited = sum(bool(t.any()) for t in tiles)
            got = tuple(answer.span(first, rows, n_q, n_k, block))
            where = f"span({first}, {rows}, {n_q}, {n_k}, {block})"
            clip = lambda x, n_k=n_k: min(max(x, 0), n_k)  # noqa: E731
            compare(
                f"{where}: visited",
                got[1],
                visited,
                (
                    -(-clip(first + n_k - n_q + 1) // block),
                    "this is what the first row sees: the *last* row sees the most",
                    "这是第一行看到的：*最后*一行看到的最多",
                ),
                (
                    clip(first + rows + n_k - n_q) // block,
                    "rounded down: a block that is seen in part is visited",
                    "向下取整了：只看到一部分的块也要访问",
                ),
                (
                    -(-clip(first + rows) // block),
                    "the offset n_k - n_q is missing",
                    "漏了偏移 n_k - n_q",
                ),
                (
                    -(-(first + rows + n_k - n_q) // block),
                    "these queries see no key at all: never fewer than 0 blocks",
                    "这些查询一个键也看不到：块数不能少于 0",
                ),
            )
            compare(
                f"{where}: full",
                got[0],
                full,
                (
                    clip(first + rows + n_k - n_q) // block,
                    "this is what the last row sees: the *first* row sees the fewest",
                    "这是最后一行看到的：*第一*行看到的最少",
                ),
                (
                    clip(first + n_k - n_q) // block,
                    "a query sees its own position too: first + n_k - n_q + 1 keys",
                    "查询也看得到自己的位置：共 first + n_k - n_q + 1 个键",
                ),
                (
                    -(-clip(first + n_k - n_q + 1) // block),
                    "rounded up: a block that is seen in part needs the mask",
                    "向上取整了：只看到一部分的块需要掩码",
                ),
            )


EXERCISES = (tile_offsets, masked_scores, span)
