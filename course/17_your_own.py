# %% [markdown]
# # 17. An attention of your own
#
# The papers keep inventing attentions: windows, documents, biases by distance, tokens that everyone sees. Almost all
# of them change one of two things of a pair (query $i$, key $j$): what its score is worth, or whether it is seen at
# all.
#
# $$S_{ij} \leftarrow f(S_{ij}, b, h, i, j) \quad \text{or} \quad S_{ij} \leftarrow -\infty \text{ unless } g(b, h, i, j)$$
#
# In tilewise these are two plain Python functions, a **score mod** $f$ and a **mask mod** $g$, of the batch row $b$,
# the head $h$ and the two places. The CPU reference runs them in torch, the kernels compile them, and the derivative
# is worked out from their text. In this lesson you write both, check them against ten lines that you can trust, and
# measure what they cost.
#
# First the ten lines: the whole matrix of scores, and your functions on whole matrices of indices.

# %% [markdown] lang="zh"
# # 17. 写你自己的注意力
#
# 论文里不断冒出新的注意力：滑动窗口、按文档隔开、按距离加偏置、人人可见的 token。几乎所有这些都只改动一对（查询 $i$，键 $j$）的两样东西之一：它的分数是多少，或者它到底看不看得见。
#
# $$S_{ij} \leftarrow f(S_{ij}, b, h, i, j) \quad \text{or} \quad S_{ij} \leftarrow -\infty \text{ unless } g(b, h, i, j)$$
#
# 在 tilewise 里，这就是两个普通的 Python 函数：**score mod** $f$ 和 **mask mod** $g$，参数是 batch 行 $b$、头 $h$ 和两个位置。CPU 参考实现用 torch 运行它们，kernel 把它们编译进去，导数由它们的源码推出来。这一课里你两样都要写，与十行可以信赖的代码核对，再量一量代价。
#
# 先写这十行：完整的分数矩阵，以及作用在整个下标矩阵上的你的函数。

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math
import time

import torch

import tilewise
from tilewise_lab.learn import has_triton, picture, say, show


def trusted(q, k, v, score=None, mask=None):
    """q, k, v (B, N, H, D). Everything is in memory at once: slow, and easy
    to believe."""
    batch, n, heads, d = q.shape
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(d)
    b, h = (
        torch.arange(batch)[:, None, None, None],
        torch.arange(heads)[:, None, None],
    )
    i, j = torch.arange(n)[:, None], torch.arange(n)
    if score is not None:
        s = score(s, b, h, i, j)
    if mask is not None:
        s = s.masked_fill(~mask(b, h, i, j), -torch.inf)
    return torch.einsum(
        "bhij,bjhd->bihd", torch.softmax(s, -1).nan_to_num(0.0), v
    )


# %% [markdown]
# ## A score mod: a bias that fades with distance, and learns
#
# Each head gets a number, its slope, and a score loses that much for every token of distance. The function's own
# arguments come after the five that are given; tensors among them get gradients.

# %% [markdown] lang="zh"
# ## score mod：随距离衰减、可以学习的偏置
#
# 每个头有一个数，叫斜率；每隔一个 token，分数就减去这么多。前五个参数是给定的，后面是函数自己的参数；其中的张量会得到梯度。


# %%
@tilewise.score_mod
def fading(score, b, h, q_idx, kv_idx, slopes):
    return score - slopes[h] * abs(q_idx - kv_idx)


torch.manual_seed(0)
q, k, v = (torch.randn(2, 40, 3, 16) for _ in range(3))
slopes = torch.tensor([0.0, 0.1, 1.0], requires_grad=True)
out = tilewise.attention(q, k, v, score_mod=fading(slopes))
expected = trusted(
    q, k, v, score=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
)
print(
    say(
        "largest difference from the ten lines: "
        f"{(out - expected).abs().max():.1e}",
        f"与那十行的最大差别：{(out - expected).abs().max():.1e}",
    )
)
(found,) = torch.autograd.grad(out.square().sum(), slopes)
(wanted,) = torch.autograd.grad(expected.square().sum(), slopes)
print(
    say("gradient of the slopes:", "斜率的梯度："),
    [round(x, 3) for x in found.tolist()],
)

# %% tags=["check"]
assert torch.allclose(out, expected, atol=1e-5)
assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)

# %% [markdown]
# ## A mask mod: a window, and tokens that all may see
#
# Every token sees the `width` before it and itself, and the first `anchors` tokens of the text besides. `q_pos` is the
# place of the query among the keys: with a cache, where a few queries come last, it is the right one to count from.

# %% [markdown] lang="zh"
# ## mask mod：一个窗口，加上人人可见的 token
#
# 每个 token 看得到自己和前面 `width` 个，外加全文最前面的 `anchors` 个。`q_pos` 是查询在键的序列中的位置：有缓存时，少数几个查询排在最后，用它来数才对。


# %%
@tilewise.mask_mod
def window_and_anchors(b, h, q_idx, kv_idx, width, anchors, *, q_pos):
    return (kv_idx <= q_pos) & (
        (q_pos - kv_idx <= width) | (kv_idx < anchors)
    )


def seen(i, j, width, anchors):
    return (j <= i) & ((i - j <= width) | (j < anchors))


out = tilewise.attention(q, k, v, mask_mod=window_and_anchors(6, 2))
last = tilewise.attention(q[:, -1:], k, v, mask_mod=window_and_anchors(6, 2))

if has_triton("the same mods in a compiled kernel"):
    compiled = tilewise.attention(
        q,
        k,
        v,
        score_mod=fading(slopes),
        mask_mod=window_and_anchors(6, 2),
        backend="triton",
    )
    both = trusted(
        q,
        k,
        v,
        lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        lambda b, h, i, j: seen(i, j, 6, 2),
    )
    print(
        say(
            f"in the Triton kernel: {(compiled - both).abs().max():.1e}",
            f"在 Triton kernel 里：{(compiled - both).abs().max():.1e}",
        )
    )

# %% tags=["check"]
if has_triton():
    assert torch.allclose(compiled, both, atol=1e-5)
assert torch.allclose(
    out, trusted(q, k, v, mask=lambda b, h, i, j: seen(i, j, 6, 2)), atol=1e-5
)
# one token alone gets what it got in company
assert torch.allclose(last, out[:, -1:], atol=1e-5)

# %% [markdown]
# ## A block mask: do not even look
#
# A mask mod alone is asked about every pair, $N^2$ times, though most tiles of this mask are empty. Sort the tiles
# once, into three kinds: nobody sees anything (skip it), all see all (no mask needed), some see some (ask the mod). It
# is lesson 11's diagonal, for a mask of any shape:

# %% [markdown] lang="zh"
# ## 块掩码：连看都不看
#
# 光有 mask mod，每一对都要问一遍，一共 $N^2$ 次，尽管这个掩码的大部分块都是空的。把块分类一次，分成三种：谁也看不到（跳过），全都看得到（不需要掩码），部分看得到（去问 mod）。这就是第 11 课的对角线，只不过适用于任何形状的掩码：


# %%
def kinds(mask, block):
    """0 empty, 1 partial, 2 full, for every tile of an (N, N) matrix of
    bools."""
    n = mask.shape[0] // block
    tiles = mask.view(n, block, n, block).transpose(1, 2).flatten(2)
    return tiles.any(-1).int() + tiles.all(-1).int()


n, block, width, anchors = 1024, 64, 200, 16
i, j = torch.arange(n)[:, None], torch.arange(n)
mine = kinds(seen(i, j, width, anchors), block)
blocks = tilewise.block_mask(
    window_and_anchors(width, anchors), n, n, block=(block, block)
)
print(blocks.tiles[0, 0])
visited = (mine > 0).double().mean()
print(
    say(
        f"{visited:.0%} of the tiles are visited, where the causal triangle "
        f"has {(n // block + 1) / (2 * n // block):.0%}",
        f"走到了 {visited:.0%} 的块，而因果三角形有 "
        f"{(n // block + 1) / (2 * n // block):.0%}",
    )
)


# %% tags=["figure"]
def draw(axes):
    axes.imshow(mine, cmap="Blues", vmin=0, vmax=2)
    axes.set(
        title="empty, partial and full tiles",
        xlabel="block of keys",
        ylabel="block of queries",
    )


picture(
    "17_tiles",
    draw,
    alt=say(
        "Grid of blocks of queries by blocks of keys in three "
        "shades: a band along the diagonal of full tiles between "
        "partial ones, and a first column of partial tiles for the "
        "anchors; all other tiles are empty.",
        "查询块 × 键块的网格，三种深浅：沿对角线的一条带，满的块夹在"
        "部分的块之间；第一列是部分的块，即锚点；其余的块都是空的。",
    ),
    size=(4.5, 4.5),
)

# %% tags=["check"]
assert torch.equal(blocks.tiles[0, 0].int(), mine)
assert abs(blocks.density() - float(visited)) < 1e-9

# %% [markdown]
# ## Measure it
#
# An idea is worth what it saves. Below: the same attention as the ten lines have it, with the mod alone, and with the
# block mask, on this CPU. (The times are this machine's, at this moment. On a GPU take `tilewise bench`, and the block
# mask matters more, for there tiles are all that counts.)

# %% [markdown] lang="zh"
# ## 量一量
#
# 一个想法值多少，要看它省下多少。下面是同一个注意力：十行代码的写法、只用 mod、用块掩码，都在这台机器的 CPU 上。（时间是这台机器此刻的。在 GPU 上请用 `tilewise bench`，那里块掩码更要紧，因为算的就是块数。）

# %%
q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))
ways = {
    say("the ten lines", "那十行"): lambda: trusted(
        q, k, v, mask=lambda b, h, i, j: seen(i, j, width, anchors)
    ),
    say("mask mod", "掩码函数"): lambda: tilewise.attention(
        q,
        k,
        v,
        mask_mod=window_and_anchors(width, anchors),
        backend="reference",
    ),
    say("block mask", "块掩码"): lambda: tilewise.attention(
        q, k, v, mask_mod=blocks, backend="reference"
    ),
}
rows, results = [], []
for name, work in ways.items():
    results.append(work())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    rows.append([name, f"{min(times) * 1e3:.1f}"])
show(
    ["", "ms"],
    rows,
    say(
        f"{n} tokens, 2 heads, {visited:.0%} of the tiles",
        f"{n} 个 token，2 个头，{visited:.0%} 的块",
    ),
)

# %% tags=["check"]
for one in results[1:]:
    assert torch.allclose(one, results[0], atol=1e-5)

# %% [markdown]
# Then let it find its mistakes: a length that no block divides, one token, a row that sees nothing (its output is 0,
# its $L$ is $-\infty$), gradients against finite differences. `tilewise show-mask FILE.py:NAME` draws a mod of yours.

# %% [markdown] lang="zh"
# 然后让它自己暴露错误：不被块大小整除的长度、只有一个 token、什么都看不到的行（输出为 0，$L$ 为 $-\infty$）、与有限差分核对的梯度。`tilewise show-mask FILE.py:NAME` 可以把你的 mod 画出来。


# %%
@tilewise.mask_mod
def even_keys(b, h, q_idx, kv_idx):
    return (kv_idx % 2 == 0) & (q_idx != 3)


x = torch.randn(1, 7, 1, 4, dtype=torch.float64, requires_grad=True)
out, lse = tilewise.attention(x, x, x, mask_mod=even_keys(), return_lse=True)

# %% tags=["check"]
assert not out[0, 3].any()
assert lse[0, 0, 3] == -math.inf
assert torch.autograd.gradcheck(
    lambda x: tilewise.attention(x, x, x, mask_mod=even_keys()), x
)

# %% [markdown]
# **Exercises.** Three, of rising difficulty: a text of several documents with instructions in front. Write the mask
# mod `mask`, in which a token sees the tokens before it *of its own document* and the first `shared` tokens; the score
# mod `score`, which takes `tax` from the score of each shared token seen from outside of it; and
# `tile_kinds(seen, block)` for a mask whose size the block does not divide. Get them with
# `tilewise learn 17 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：一篇文本由几个文档组成，最前面有一段公共的指令。写出 mask mod `mask`，让一个 token 看得到*自己那个文档里*它之前的 token，以及最前面 `shared` 个 token；写出 score mod `score`，公共部分之外的 token 看公共 token 时，分数要减去 `tax`；再写出 `tile_kinds(seen, block)`，掩码的大小不必被块大小整除。用 `tilewise learn 17 --exercise` 取得它们。
