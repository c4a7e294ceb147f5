import tilewise
import torch
from tilewise_lab.learn import expect


def seen(n, ids, shared):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return (j <= i) & ((ids[:, None] == ids) | (j < shared))


def check(answer):
    torch.manual_seed(5)
    for n, block in ((12, 4), (10, 4), (5, 8)):
        some = torch.rand(n, n) < 0.5
        some[:block, :block] = True
        some[:block, block:] = False
        exact = torch.tensor(
            [
                [
                    int(tile.any()) + int(tile.all())
                    for tile in band.split(block, 1)
                ]
                for band in some.split(block)
            ]
        )
        got = torch.as_tensor(answer.tile_kinds(some, block))
        expect(
            got.shape == exact.shape,
            f"tiles of {n} × {n} in blocks of {block}: shape {tuple(got.shape)}, not {tuple(exact.shape)}",
            f"{n} × {n} 以 {block} 为块：形状是 {tuple(got.shape)}，应为 {tuple(exact.shape)}",
        )
        expect(
            torch.equal(got.long(), exact),
            f"{n} × {n} in blocks of {block}: {got.tolist()}, not {exact.tolist()}; the last tile may be smaller, and full",
            f"{n} × {n} 以 {block} 为块：{got.tolist()}，应为 {exact.tolist()}；最后一块可以小一些，也可以是满的",
        )
    n, shared, tax = 20, 3, 1.5
    ids = torch.tensor([0] * 7 + [1] * 8 + [2] * 5)
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for _ in range(3))
    rows = torch.eye(n, dtype=torch.float64)[None, :, None].expand(
        1, n, 2, n
    )  # values that show the weights themselves
    weights = tilewise.attention(
        q, k, rows, mask_mod=answer.mask(ids, shared)
    )[0, :, 0]
    wanted = seen(n, ids, shared)
    found = weights > 0
    expect(
        not (found & ~torch.ones(n, n).tril().bool()).any(),
        "a token sees one that comes after it",
        "有 token 看到了自己之后的 token",
    )
    expect(
        not (found & ~wanted).any(),
        "a token sees another document: compare ids[q_idx] with ids[kv_idx]",
        "有 token 看到了别的文档：请比较 ids[q_idx] 和 ids[kv_idx]",
    )
    expect(
        bool(found[:, :shared][wanted[:, :shared]].all()),
        "the first `shared` tokens must be seen by all who come after",
        "最前面 `shared` 个 token，后面的人人都要看得到",
    )
    expect(
        torch.equal(found, wanted),
        "a token does not see all of its own document",
        "有 token 没有看到自己文档的全部",
    )
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    i, j = torch.arange(n)[:, None], torch.arange(n)
    s = s - tax * ((j < shared) & (i >= shared))
    exact = torch.einsum(
        "bhij,bjhd->bihd",
        torch.softmax(s.masked_fill(~wanted, -torch.inf), -1),
        v,
    )
    both = {
        "mask_mod": answer.mask(ids, shared),
        "score_mod": answer.score(tax, shared),
    }
    out = tilewise.attention(q, k, v, **both)
    inside, outside = (
        float((out - exact)[:, part].abs().max())
        for part in (slice(0, shared), slice(shared, n))
    )
    expect(
        inside < 1e-9,
        "tokens among the shared ones pay no tax",
        "公共部分之内的 token 不用交 `tax`",
    )
    expect(
        outside < 1e-9,
        f"scores of shared tokens, seen from outside, lose {tax}; the outputs are {outside:.1e} off",
        f"从外面看公共 token，分数要减 {tax}；输出相差 {outside:.1e}",
    )
    blocks = tilewise.block_mask(
        answer.mask(ids, shared), n, n, block=(16, 16)
    )
    expect(
        torch.equal(
            blocks.tiles[0, 0].long(),
            torch.as_tensor(answer.tile_kinds(wanted, 16)).long(),
        ),
        "your tiles are not those of tilewise.block_mask",
        "你的分块与 tilewise.block_mask 的不一致",
    )
