import torch
from tilewise_lab.learn import expect


class Far:
    def __init__(self, a, b, tile):
        self.matrices, self.tile, self.loads = {"a": a, "b": b}, tile, 0

    def load(self, name, i, j):
        self.loads += 1
        t = self.tile
        return self.matrices[name][
            i * t : (i + 1) * t, j * t : (j + 1) * t
        ].clone()


def check(answer):
    for blocks, tile in ((1, 4), (3, 2), (4, 8)):
        a, b = torch.randn(
            2, blocks * tile, blocks * tile, dtype=torch.float64
        )
        far = Far(a, b, tile)
        c = answer.blocked_matmul(far, blocks, tile)
        expect(
            c.shape == a.shape,
            f"the result is {tuple(c.shape)}, A and B are {tuple(a.shape)}",
            f"结果是 {tuple(c.shape)}，而 A 和 B 是 {tuple(a.shape)}",
        )
        expect(
            not torch.allclose(c, a * b),
            "that is the elementwise product",
            "这是逐元素的乘积",
        )
        expect(
            torch.allclose(c, a @ b),
            f"wrong for {blocks} × {blocks} blocks of {tile}: C_ij = Σ_k A_ik B_kj",
            f"{blocks} × {blocks} 个大小为 {tile} 的块时不对：C_ij = Σ_k A_ik B_kj",
        )
        expect(
            far.loads <= 2 * blocks**3,
            f"{far.loads} loads; 2 · {blocks}³ = {2 * blocks**3} are enough",
            f"读了 {far.loads} 次；2 · {blocks}³ = {2 * blocks**3} 次就够了",
        )
