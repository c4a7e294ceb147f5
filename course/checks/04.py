import torch

from tilewise_lab.learn import compare, expect


class Far:
    def __init__(self, tile, **matrices):
        self.matrices, self.tile, self.loads = matrices, tile, 0

    def load(self, name, i, j=0):
        self.loads += 1
        t = self.tile
        return self.matrices[name][
            i * t : (i + 1) * t, j * t : (j + 1) * t
        ].clone()


def fetched(answer):
    for n, tile in ((1024, 1), (1024, 32), (48, 16)):
        compare(
            f"fetched({n}, {tile})",
            answer.fetched(n, tile),
            2 * n**3 // tile,
            (
                2 * n * n,
                "each element is read once here; every output tile reads its blocks again",
                "这里每个元素只读一次；实际上每个输出块都要重新读它的块",
            ),
            (
                2 * n**3,
                "this is the count for tile = 1: a loaded block serves tile rows or columns",
                "这是 tile = 1 时的数：读入的一块可供 tile 行或列使用",
            ),
            (
                n**3 // tile,
                "only one of A and B is counted",
                "A 和 B 只数了一个",
            ),
            (
                (n // tile) ** 3 * 2,
                "this counts blocks: a block has tile² elements",
                "这是块数：一块有 tile² 个元素",
            ),
        )


def blocked_matmul(answer):
    torch.manual_seed(0)
    for blocks, tile in ((1, 4), (3, 2), (4, 8)):
        a, b = torch.randn(
            2, blocks * tile, blocks * tile, dtype=torch.float64
        )
        far = Far(tile, a=a, b=b)
        c = answer.blocked_matmul(far, blocks, tile)
        last = a[:, -tile:] @ b[-tile:]
        transposed = torch.cat(
            [
                torch.cat(
                    [
                        sum(
                            far.load("a", i, k) @ far.load("b", j, k)
                            for k in range(blocks)
                        )
                        for j in range(blocks)
                    ],
                    1,
                )
                for i in range(blocks)
            ]
        )
        far.loads -= 2 * blocks**3
        compare(
            f"blocked_matmul(far, {blocks}, {tile})",
            c,
            a @ b,
            (a * b, "that is the elementwise product", "这是逐元素的乘积"),
            (
                last,
                "your output equals the last term, A_ik B_kj of the last k: add the others, Σ_k",
                "你的输出只等于最后一项，即最后一个 k 的 A_ik B_kj：其余各项也要相加，Σ_k",
            ),
            (
                transposed,
                'your output equals Σ_k A_ik B_jk: the block of B is B_kj, load("b", k, j)',
                '你的输出等于 Σ_k A_ik B_jk：B 的块应为 B_kj，即 load("b", k, j)',
            ),
        )
        expect(
            far.loads <= 2 * blocks**3,
            f"{far.loads} loads; 2 · {blocks}³ = {2 * blocks**3} are enough: each block of A and of B once for each output block",
            f"读了 {far.loads} 次；2 · {blocks}³ = {2 * blocks**3} 次就够了：每个输出块，A 和 B 的每块各读一次",
        )


def two_products(answer):
    torch.manual_seed(1)
    for blocks, tile in ((1, 3), (3, 4)):
        q, k, v = torch.randn(3, blocks * tile, tile, dtype=torch.float64)
        far = Far(tile, q=q, k=k, v=v)
        got = answer.two_products(far, blocks, tile)
        straight = sum(
            k_j @ v_j
            for k_j, v_j in zip(k.split(tile), v.split(tile), strict=True)
        )
        compare(
            f"two_products(far, {blocks}, {tile})",
            got,
            q @ k.T @ v,
            (
                q @ straight,
                "your output equals Σ_j (Q_i K_j) V_j: K_j must be transposed",
                "你的输出等于 Σ_j (Q_i K_j) V_j：K_j 要转置",
            ),
            (
                q @ k[-tile:].T @ v[-tile:],
                "your output equals the term of the last block of keys: O_i += (Q_i K_jᵀ) V_j",
                "你的输出只等于最后一块键的那一项：应为 O_i += (Q_i K_jᵀ) V_j",
            ),
        )
        most = blocks + 2 * blocks**2
        expect(
            far.loads <= most,
            f"{far.loads} loads, {most} are enough: Q_i is needed once for all blocks of keys, load it outside the inner loop",
            f"读了 {far.loads} 次，{most} 次就够了：Q_i 对所有键块只需读一次，放到内层循环外面",
        )


EXERCISES = (fetched, blocked_matmul, two_products)
