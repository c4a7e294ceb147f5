# %% [markdown]
# # 4. Matrices in blocks
#
# One fact is enough for this lesson: a matrix product can be done on blocks as if they were numbers.
#
# $$C_{ij} = \sum_k A_{ik} B_{kj}$$
#
# It is why a GPU with a few hundred processors can multiply matrices with millions of entries, and why each number
# fetched from memory can be used many times. This lesson is about both. As code:

# %% [markdown] lang="zh"
# # 4. 分块的矩阵
#
# 这一课只需要一个事实：矩阵乘法可以在块上进行，就像块是数一样。
#
# $$C_{ij} = \sum_k A_{ik} B_{kj}$$
#
# 正因为如此，只有几百个处理器的 GPU 才能计算有上百万个元素的矩阵乘法；也正因为如此，从内存取来的每个数才能用上许多次。这一课讲的就是这两点。写成代码：

# %%
# needs: interpreter
import math
import os
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tilewise_lab.derivation import attention as reference
from tilewise_lab.learn import has_triton, measured, picture, say, show


def split(a, rows, columns):
    """A matrix as a grid of blocks, `rows` high and `columns` wide."""
    return [band.split(columns, dim=1) for band in a.split(rows, dim=0)]


def join(grid):
    return torch.cat([torch.cat(list(row), dim=1) for row in grid])


def blocked(a, b):
    """C_ij = Σ_k A_ik B_kj, for two grids of blocks."""
    return [
        [
            sum(a_i[k] @ b[k][j] for k in range(len(b)))
            for j in range(len(b[0]))
        ]
        for a_i in a
    ]


# %% [markdown]
# ## One core per output, or one core per block
#
# $(M, K)$ times $(K, N)$ is $(M, N)$: each output is a dot product of its own. Full parallelism needs $M N$ cores, 10,000 for two 100 × 100 matrices. With 8 cores, give each of them a block. Take $A$ (8, 4) in blocks of (4, 2) and $B$ (4, 8) in blocks of (2, 2): as block matrices they are 2 × 2 and 2 × 4, so $C$ is 2 × 4 blocks of (4, 2). Eight blocks, eight cores, and $C_{11} = A_{11} B_{11} + A_{12} B_{21}$.

# %% [markdown] lang="zh"
# ## 一个核算一个输出，还是一个核算一块
#
# $(M, K)$ 乘 $(K, N)$ 得 $(M, N)$：每个输出是一个独立的点积。完全并行需要 $M N$ 个核，两个 100 × 100 的矩阵就要 10,000 个。如果只有 8 个核，就让每个核算一块。把 $A$ (8, 4) 切成 (4, 2) 的块，$B$ (4, 8) 切成 (2, 2) 的块：作为块矩阵，它们分别是 2 × 2 和 2 × 4，于是 $C$ 是 2 × 4 个 (4, 2) 的块。八块，八个核，并且 $C_{11} = A_{11} B_{11} + A_{12} B_{21}$。

# %%
torch.manual_seed(0)
a, b = torch.randn(8, 4), torch.randn(4, 8)
a_grid, b_grid = split(a, [4, 4], [2, 2]), split(b, [2, 2], [2, 2, 2, 2])


def core(ij):
    i, j = ij
    return ij, sum(a_grid[i][k] @ b_grid[k][j] for k in range(2))


with ThreadPoolExecutor(8) as cores:
    blocks = dict(
        cores.map(core, [(i, j) for i in range(2) for j in range(4)])
    )
show(
    say(
        ["core", "block", "shape", "= sum of"], ["核", "块", "形状", "= 求和"]
    ),
    [
        [
            n,
            f"C{i + 1}{j + 1}",
            tuple(block.shape),
            f"A{i + 1}1 B1{j + 1} + A{i + 1}2 B2{j + 1}",
        ]
        for n, ((i, j), block) in enumerate(blocks.items())
    ],
)

# %% tags=["check"]
assert 100 * 100 == 10_000
assert len(blocks) == 8
assert sum(block.numel() for block in blocks.values()) == 64
assert torch.allclose(
    blocks[0, 0], a_grid[0][0] @ b_grid[0][0] + a_grid[0][1] @ b_grid[1][0]
)
assert torch.allclose(
    join([[blocks[i, j] for j in range(4)] for i in range(2)]),
    a @ b,
    atol=1e-6,
)

# %% [markdown]
# Any partition works, regular or not, as long as $A$ is cut along its columns where $B$ is cut along its rows.

# %% [markdown] lang="zh"
# 怎么切都行，整齐不整齐都可以，只要 $A$ 的列切在 $B$ 的行所切的地方。

# %%
errors = []
for rows, inner, columns in (
    ([8], [4], [8]),
    ([3, 5], [1, 3], [2, 2, 4]),
    ([1] * 8, [4], [8]),
):
    c = blocked(split(a, rows, inner), split(b, inner, columns))
    errors.append((join(c) - a @ b).abs().max())
    print(rows, inner, columns, f"{errors[-1]:.1e}")
try:
    blocked(split(a, [8], [1, 3]), split(b, [2, 2], [8]))
except RuntimeError as error:
    misfit = str(error)
    print(say("blocks that do not fit:", "切得不合的块："), misfit)

# %% tags=["check"]
assert max(errors) < 1e-5
assert misfit

# %% [markdown]
# ## Attention without its softmax
#
# Leave softmax out for a moment: $O = S V$ with $S = Q K^\top / \sqrt{D}$. With 8 tokens of 128 numbers in blocks of 2
# rows, $Q$ is four blocks (2, 128), $K^\top$ four blocks (128, 2), $S$ a 4 × 4 grid of (2, 2), and a block of $O$ is a
# sum over blocks of keys:
#
# $$O_i = \sum_j S_{ij} V_j \quad S_{ij} = Q_i K_j^\top / \sqrt{D}$$
#
# Two loops. A block of $S$ is made, used, and forgotten: $S$ as a whole never exists. Were it not for softmax, we
# would be done.

# %% [markdown] lang="zh"
# ## 没有 softmax 的注意力
#
# 先把 softmax 放到一边：$O = S V$，其中 $S = Q K^\top / \sqrt{D}$。8 个 token，每个 128 维，每块 2 行：$Q$ 是四块 (2, 128)，$K^\top$ 是四块 (128, 2)，$S$ 是 4 × 4 个 (2, 2) 的块，而 $O$ 的一块是对键的各块求和：
#
# $$O_i = \sum_j S_{ij} V_j \quad S_{ij} = Q_i K_j^\top / \sqrt{D}$$
#
# 两层循环。$S$ 的一块算出来、用掉、忘掉：完整的 $S$ 从来不存在。要是没有 softmax，我们这就完工了。


# %%
def without_softmax(q, k, v, rows, columns):
    o = []
    for q_i in q.split(rows):
        o_i = torch.zeros(q_i.shape[0], v.shape[1], dtype=v.dtype)
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            s_ij = q_i @ k_j.T / math.sqrt(q.shape[1])  # made,
            o_i = o_i + s_ij @ v_j  # used, and forgotten
        o.append(o_i)
    return torch.cat(o)


q, k, v = (torch.randn(8, 128, dtype=torch.float64) for _ in range(3))
s_grid = split(reference.scores(q, k), [2] * 4, [2] * 4)

# %% tags=["check"]
assert [tuple(x.shape) for x in q.split(2)] == [(2, 128)] * 4
assert [tuple(x.shape) for x in k.mT.split(2, dim=1)] == [(128, 2)] * 4
assert (len(s_grid), len(s_grid[0]), tuple(s_grid[0][0].shape)) == (
    4,
    4,
    (2, 2),
)
assert torch.allclose(
    without_softmax(q, k, v, rows=2, columns=2), reference.scores(q, k) @ v
)
assert torch.allclose(
    without_softmax(q, k, v, rows=2, columns=4),
    reference.without_softmax(q, k, v, rows=4, columns=2),
)

# %% [markdown]
# ## Why blocks save traffic
#
# If every output is computed alone, each element of $A$ is fetched once for each of $N$ columns. If a $(T, T)$ block
# of $C$ is computed together, a fetched element serves $T$ outputs, so it is fetched $N / T$ times: the traffic falls
# as $1 / T$. How large may $T$ be? As large as fits into the fast memory beside the processor.

# %% [markdown] lang="zh"
# ## 分块为什么省数据搬运
#
# 如果每个输出单独计算，$A$ 的每个元素要为 $N$ 列各取一次。如果把 $C$ 的一个 $(T, T)$ 块放在一起算，取来的一个元素可以服务 $T$ 个输出，于是只需取 $N / T$ 次：搬运量按 $1 / T$ 下降。$T$ 能有多大？处理器旁边的快速存储放得下多大，就有多大。


# %%
def fetched(n, tile):
    """Elements of A and B that come from far memory for an n × n product in
    tiles: (n / tile)² · 2 · tile · n."""
    return (n // tile) ** 2 * 2 * tile * n


n = 1024
tiles = [1, 2, 4, 8, 16, 32, 64, 128]
show(
    say(["tile", "fetches of each element"], ["块", "每个元素取几次"]),
    [[t, fetched(n, t) // (2 * n * n)] for t in tiles],
)


# %% tags=["figure"]
def draw(axes):
    axes.loglog(tiles, [fetched(n, t) * 4 / 1e6 for t in tiles], "o-", base=2)
    axes.set(
        xlabel="tile",
        ylabel="MB fetched",
        title="A 1024 × 1024 product: traffic falls as 1 / tile",
    )


picture(
    "04_traffic",
    draw,
    alt=say(
        "Megabytes fetched for a 1024 by 1024 product over the side "
        "of the tile, on two logarithmic axes: a straight line that "
        "falls by half whenever the tile doubles.",
        "1024 × 1024 矩阵乘法读取的 MB 数随块边长的变化（双对数坐标）："
        "一条直线，块每大一倍，读取量减半。",
    ),
)

# %% tags=["check"]
assert [fetched(n, t) / fetched(n, 1) for t in tiles] == [
    1 / t for t in tiles
]

# %% [markdown]
# ## The same, as GPU programs
#
# Triton is Python for one *block* of a GPU's threads. Here are both versions: one program per output, and one program
# per tile in four steps (load a tile of $A$ and $B$, multiply, accumulate, next). On this machine they are
# interpreted, so the numbers are what counts, not the time.

# %% [markdown] lang="zh"
# ## 写成 GPU 程序
#
# Triton 是为 GPU 上一*块*线程编写的 Python。下面是两个版本：一个程序算一个输出；一个程序算一块，分四步（读入 $A$ 和 $B$ 的一块、相乘、累加、下一块）。在这台机器上它们是解释执行的，所以要看的是数值，不是时间。

# %%
if has_triton("the two matrix products in Triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def matmul_naive(a, b, c, M, N, K, BLOCK_K: tl.constexpr):
        """One program, one output: a row of A and a column of B, read for it
        alone."""
        i, j = tl.program_id(0), tl.program_id(1)
        total = 0.0
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            row = tl.load(a + i * K + k, mask=k < K, other=0.0)
            column = tl.load(b + k * N + j, mask=k < K, other=0.0)
            total += tl.sum(row.to(tl.float32) * column.to(tl.float32), 0)
        tl.store(c + i * N + j, total)

    @triton.jit
    def matmul_tiled(
        a, b, c, M, N, K, stride_a, stride_b, stride_c,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        """One program, one tile of C: each element of A it loads meets
        BLOCK_N columns, each of B BLOCK_M rows."""
        i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            a_tile = tl.load(
                a + i * stride_a + k[None, :],
                mask=(i < M) & (k[None, :] < K),
                other=0.0,
            )
            b_tile = tl.load(
                b + k[:, None] * stride_b + j,
                mask=(k[:, None] < K) & (j < N),
                other=0.0,
            )
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        tl.store(
            c + i * stride_c + j,
            acc.to(c.dtype.element_ty),
            mask=(i < M) & (j < N),
        )

    m, n, k_ = 10, 12, 40
    a, b = torch.randn(m, k_), torch.randn(k_, n)
    one, two = torch.empty(m, n), torch.empty(m, n)
    matmul_naive[(m, n)](a, b, one, m, n, k_, BLOCK_K=16)
    grid = -(-m // 16), -(-n // 16)
    matmul_tiled[grid](
        a, b, two, m, n, k_, a.stride(0), b.stride(0), two.stride(0),
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16,
    )  # fmt: skip
    print(
        say(
            f"programs: {m * n} for one output each, {grid[0] * grid[1]} "
            "for a tile each",
            f"程序数：各算一个输出要 {m * n} 个，各算一块要 "
            f"{grid[0] * grid[1]} 个",
        )
    )

times = measured("tiling")
if times:
    print(
        say(
            f"2048 × 2048: one output per program {times['naive_ms']:.1f} "
            f"ms, tiled {times['tiled_ms']:.3f} ms, torch "
            f"{times['torch_ms']:.3f} ms",
            f"2048 × 2048：每个程序算一个输出 {times['naive_ms']:.1f} ms，"
            f"分块 {times['tiled_ms']:.3f} ms，torch "
            f"{times['torch_ms']:.3f} ms",
        )
    )

# %% tags=["check"]
if times:
    assert times["tiled_ms"] < times["naive_ms"] / 10
if has_triton():
    assert torch.allclose(one, a @ b, atol=1e-4)
    assert torch.allclose(two, a @ b, atol=1e-4)

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `fetched(n, tile)`, the elements that a product in tiles reads;
# `blocked_matmul(far, blocks, tile)` with a far memory that counts; and `two_products(far, blocks, tile)`,
# $(Q K^\top) V$ without ever holding $Q K^\top$. Get them with `tilewise learn 4 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `fetched(n, tile)`，即分块矩阵乘法读多少元素；写出 `blocked_matmul(far, blocks, tile)`，远处的内存会计数；再写出 `two_products(far, blocks, tile)`，即 $(Q K^\top) V$，而任何时候都不持有 $Q K^\top$。用 `tilewise learn 4 --exercise` 取得它们。
