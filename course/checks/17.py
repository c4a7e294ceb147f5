import torch

import tilewise
from tilewise_lab.learn import compare, say

N, SHARED, TAX = 20, 3, 1.5
IDS = torch.tensor([0] * 7 + [1] * 8 + [2] * 5)
I, J = torch.arange(N)[:, None], torch.arange(N)
SAME, BEFORE = IDS[:, None] == IDS, J <= I
SEEN = BEFORE & (SAME | (J < SHARED))


def inputs():
    torch.manual_seed(5)
    return (torch.randn(1, N, 2, 8, dtype=torch.float64) for _ in range(3))


def mask(answer):
    q, k, _ = inputs()
    # values that show the weights themselves
    rows = torch.eye(N, dtype=torch.float64)[None, :, None].expand(1, N, 2, N)
    weights = tilewise.attention(
        q, k, rows, mask_mod=answer.mask(IDS, SHARED)
    )[0, :, 0]
    compare(
        "mask(ids, shared)",
        weights > 0,
        SEEN,
        (
            BEFORE,
            "a token sees another document: compare ids[q_idx] with ids[kv_idx]",
            "有 token 看到了别的文档：请比较 ids[q_idx] 和 ids[kv_idx]",
        ),
        (
            BEFORE & SAME,
            "the first `shared` tokens must be visible to all later tokens: | (kv_idx < shared)",
            "最前面 `shared` 个 token，之后的 token 都要看得到：| (kv_idx < shared)",
        ),
        (
            SAME | (J < SHARED),
            "a token sees one that comes after it: j <= i is missing",
            "有 token 看到了自己之后的 token：漏了 j <= i",
        ),
        (
            (BEFORE & SAME) | (J < SHARED),
            "shared tokens see one that comes after them: j <= i holds for them too",
            "公共 token 看到了自己之后的 token：j <= i 对它们也成立",
        ),
        (
            BEFORE & SAME & (J < SHARED),
            "and in place of or: the same document *or* a shared token",
            "把“或”写成了“与”：同一个文档，*或者*公共 token",
        ),
        (
            BEFORE & (SAME | (J <= SHARED)),
            "one token too many is shared: the first `shared` ones are 0 .. shared - 1",
            "多了一个公共 token：最前面 `shared` 个是 0 .. shared - 1",
        ),
    )


def score(answer):
    q, k, v = inputs()
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5

    def attend(tax):
        return torch.einsum("bhij,bjhd->bihd", torch.softmax(s - tax, -1), v)

    shared, outside = J < SHARED, I >= SHARED
    compare(
        "attention(q, k, v, score_mod=score(tax, shared))",
        tilewise.attention(q, k, v, score_mod=answer.score(TAX, SHARED)),
        attend(TAX * (shared & outside)),
        (
            attend(0.0 * I),
            "the scores are unchanged: subtract `tax` where kv_idx < shared and q_idx >= shared",
            "分数没有变：在 kv_idx < shared 且 q_idx >= shared 处减去 `tax`",
        ),
        (
            attend(TAX * shared),
            "tokens among the shared ones pay the tax too: only where q_idx >= shared",
            "公共 token 自己也减了 `tax`：只在 q_idx >= shared 处减",
        ),
        (
            attend(TAX * outside),
            "the tax is taken from all keys, which changes nothing: only where kv_idx < shared",
            "所有键都减了 `tax`，等于没有变：只在 kv_idx < shared 处减",
        ),
        (
            attend(-TAX * (shared & outside)),
            "the tax is added: subtract it",
            "`tax` 加上去了：应减去",
        ),
    )


def kinds(seen, block):
    return torch.tensor(
        [
            [
                int(tile.any()) + int(tile.all())
                for tile in band.split(block, 1)
            ]
            for band in seen.split(block)
        ]
    )


def tile_kinds(answer):
    torch.manual_seed(6)
    for n, block in ((12, 4), (10, 4), (5, 8)):
        some = torch.rand(n, n) < 0.5
        some[:block, :block], some[:block, block:] = True, False
        some[-(n % block) or n :, -(n % block) or n :] = True
        exact = kinds(some, block)
        padded = torch.zeros(
            -(-n // block) * block, -(-n // block) * block, dtype=torch.bool
        )
        padded[:n, :n] = some
        compare(
            f"tile_kinds(seen, {block}), {n} × {n}",
            torch.as_tensor(answer.tile_kinds(some, block)).long(),
            exact,
            (
                (exact > 0).long(),
                "full tiles are not told apart: 2 where all pairs are visible",
                "没有区分满的块：全部可见时为 2",
            ),
            (
                2 * (exact > 0),
                "partial tiles count as full: 1 where only some pairs are visible",
                "部分可见的块算成了满的：只有部分可见时为 1",
            ),
            (
                (exact == 2).long(),
                "partial tiles count as empty, full ones as 1: 0, 1, 2",
                "部分可见的块算成了空的，满的算成了 1：应为 0、1、2",
            ),
            (
                kinds(padded, block),
                "the last tile was filled up with hidden pairs: it may be smaller, and full",
                "最后一块用看不到的位置补齐了：它可以小一些，也可以是满的",
            ),
            (
                exact[: n // block, : n // block],
                "the last, smaller tiles are missing: ⌈N / block⌉",
                "漏了最后较小的块：⌈N / block⌉",
            ),
        )
    blocks = tilewise.block_mask(causal(), N, N, block=(16, 16))
    compare(
        say(
            "tile_kinds of a causal mask, against tilewise.block_mask",
            "因果掩码的 tile_kinds，对照 tilewise.block_mask",
        ),
        torch.as_tensor(answer.tile_kinds(BEFORE, 16)).long(),
        blocks.tiles[0, 0].long(),
    )


@tilewise.mask_mod
def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


EXERCISES = (mask, score, tile_kinds)
