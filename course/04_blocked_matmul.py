# %% [markdown]
# # 4. Matrices in blocks
#
# One fact is enough for this lesson: a matrix product can be done on blocks as if they were numbers.
#
#     C_ij = Σ_k A_ik B_kj
#
# It is why a GPU with a few hundred processors can multiply matrices with millions of entries, and why each number
# fetched from memory can be used many times. This lesson is about both.

# %%
# needs: interpreter
import os
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tilewise import AttentionError
from tilewise.reference import attention
from tilewise.reference.matmul import blocked, join, split
from tilewise_lab.learn import has_triton, measured, picture, show

# %% [markdown]
# ## One core per output, or one core per block
#
# (M, K) times (K, N) is (M, N): each output is a dot product of its own. Full parallelism needs M·N cores, 10,000 for
# two 100 × 100 matrices. With 8 cores, give each of them a block. Take A (8, 4) in blocks of (4, 2) and B (4, 8) in blocks
# of (2, 2): as block matrices they are 2 × 2 and 2 × 4, so C is 2 × 4 blocks of (4, 2). Eight blocks, eight cores,
# and C₁₁ = A₁₁B₁₁ + A₁₂B₂₁.

# %%
assert 100 * 100 == 10_000
torch.manual_seed(0)
a, b = torch.randn(8, 4), torch.randn(4, 8)
a_grid, b_grid = split(a, [4, 4], [2, 2]), split(b, [2, 2], [2, 2, 2, 2])


def core(ij):
    i, j = ij
    return ij, sum(a_grid[i][k] @ b_grid[k][j] for k in range(2))


with ThreadPoolExecutor(8) as cores:
    blocks = dict(cores.map(core, [(i, j) for i in range(2) for j in range(4)]))
show(
    ["core", "block", "shape", "= sum of"],
    [
        [n, f"C{i + 1}{j + 1}", tuple(block.shape), f"A{i + 1}1 B1{j + 1} + A{i + 1}2 B2{j + 1}"]
        for n, ((i, j), block) in enumerate(blocks.items())
    ],
)
assert len(blocks) == 8
assert sum(block.numel() for block in blocks.values()) == 64
assert torch.allclose(blocks[0, 0], a_grid[0][0] @ b_grid[0][0] + a_grid[0][1] @ b_grid[1][0])
assert torch.allclose(join([[blocks[i, j] for j in range(4)] for i in range(2)]), a @ b, atol=1e-6)

# %% [markdown]
# Any partition works, regular or not, as long as A is cut along its columns where B is cut along its rows.

# %%
for rows, inner, columns in (([8], [4], [8]), ([3, 5], [1, 3], [2, 2, 4]), ([1] * 8, [4], [8])):
    c = blocked(split(a, rows, inner), split(b, inner, columns))
    assert torch.allclose(join(c), a @ b, atol=1e-6)
try:
    blocked(split(a, [8], [1, 3]), split(b, [2, 2], [8]))
except AttentionError as error:
    print("refused:", error)

# %% [markdown]
# ## Attention without its softmax
#
# Leave softmax out for a moment: O = (Q Kᵀ) V. With 8 tokens of 128 numbers in blocks of 2 rows, Q is four blocks (2, 128),
# Kᵀ four blocks (128, 2), S a 4 × 4 grid of (2, 2), and a block of O is a sum over blocks of keys:
#
#     for each block Q_i:
#         O_i = zeros(2, 128)
#         for each block K_j:  O_i ← O_i + (Q_i K_jᵀ) V_j
#
# Two loops. A block of S is made, used, and forgotten: S as a whole never exists. Were it not for softmax, we would be
# done.

# %%
q, k, v = (torch.randn(8, 128, dtype=torch.float64) for _ in range(3))
assert [tuple(x.shape) for x in q.split(2)] == [(2, 128)] * 4
assert [tuple(x.shape) for x in k.mT.split(2, dim=1)] == [(128, 2)] * 4
s_grid = split(attention.scores(q, k), [2] * 4, [2] * 4)
assert (len(s_grid), len(s_grid[0]), tuple(s_grid[0][0].shape)) == (4, 4, (2, 2))
assert torch.allclose(attention.without_softmax(q, k, v, rows=2, columns=2), attention.scores(q, k) @ v)

# %% [markdown]
# ## Why blocks save traffic
#
# If every output is computed alone, each element of A is fetched once for each of N columns. If a (T, T) block of C is
# computed together, a fetched element serves T outputs, so it is fetched N / T times: the traffic falls as 1 / T. How
# large may T be? As large as fits into the fast memory beside the processor.


# %%
def fetched(n, tile):
    """Elements of A and B that come from far memory for an n × n product in tiles: (n / tile)² · 2 · tile · n."""
    return (n // tile) ** 2 * 2 * tile * n


n = 1024
tiles = [1, 2, 4, 8, 16, 32, 64, 128]
show(["tile", "fetches of each element"], [[t, fetched(n, t) // (2 * n * n)] for t in tiles])
assert [fetched(n, t) / fetched(n, 1) for t in tiles] == [1 / t for t in tiles]


def draw(axes):
    axes.loglog(tiles, [fetched(n, t) * 4 / 1e6 for t in tiles], "o-", base=2)
    axes.set(xlabel="tile", ylabel="MB fetched", title="A 1024 × 1024 product: traffic falls as 1 / tile")


picture("04_traffic", draw)

# %% [markdown]
# ## The same, as GPU programs
#
# Triton is Python for one *block* of a GPU's threads. Here are both versions, as the course runs them: one program per
# output, and one program per tile in four steps (load a tile of A and B, multiply, accumulate, next). On this machine
# they are interpreted, so the numbers are what counts, not the time.

# %%
if has_triton("the two matrix products in Triton"):
    import inspect

    from tilewise_lab.learn.kernels import matmul_naive, matmul_tiled

    print(inspect.getsource(matmul_tiled.fn))
    m, n, k_ = 10, 12, 40
    a, b = torch.randn(m, k_), torch.randn(k_, n)
    one, two = torch.empty(m, n), torch.empty(m, n)
    matmul_naive[(m, n)](a, b, one, m, n, k_, BLOCK_K=16)
    grid = -(-m // 16), -(-n // 16)
    matmul_tiled[grid](
        a, b, two, m, n, k_, a.stride(0), b.stride(0), two.stride(0), BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
    )  # fmt: skip
    assert torch.allclose(one, a @ b, atol=1e-4)
    assert torch.allclose(two, a @ b, atol=1e-4)
    print(f"programs: {m * n} for one output each, {grid[0] * grid[1]} for a tile each")

times = measured("tiling")
if times:
    print(
        f"2048 × 2048: one output per program {times['naive_ms']:.1f} ms, tiled {times['tiled_ms']:.3f} ms, torch {times['torch_ms']:.3f} ms"
    )
    assert times["tiled_ms"] < times["naive_ms"] / 10

# %% [markdown]
# **Exercise.** Write `blocked_matmul(a, b, tile)` with a far memory that counts: `far.load(name, i, j)` returns a block and
# is all you may read with. Use each loaded block of A for every block of B you can, and stay under the checker's budget.
