# %% [markdown]
# # 5. Tiled attention: wrong first, then right
#
# Lesson 4 computed $(Q K^\top) V$ block by block, lesson 3 found softmax's denominator block by block. Put together
# they make exact attention that never holds a row of weights. But first the obvious way, because it is wrong in an
# instructive way, and because several explanations of FlashAttention print exactly that.

# %% [markdown] lang="zh"
# # 5. 分块注意力：先错一次，再做对
#
# 第 4 课一块一块地算出了 $(Q K^\top) V$，第 3 课一块一块地求出了 softmax 的分母。合在一起，就是从不持有一整行权重的精确注意力。不过先看最容易想到的做法：它错得很有启发，而且好几篇讲 FlashAttention 的文章印的正是它。

# %%
import math

import torch

from tilewise_lab import trace
from tilewise_lab.derivation import attention as rung
from tilewise_lab.learn import picture, say, show

torch.manual_seed(0)
q, k, v = (torch.randn(8, 4, dtype=torch.float64) for _ in range(3))


def scores(q, k):
    return q @ k.T / math.sqrt(q.shape[-1])


# what every other way is measured against
exact = torch.softmax(scores(q, k), -1) @ v

# %% [markdown]
# ## softmax without its division
#
# Call it $\mathrm{softmax}^\ast$: the exponentials, shifted by the maximum *of the block*.
#
# $$\mathrm{softmax}^\ast(S_{ij}) = \exp(S_{ij} - \mathrm{rowmax}(S_{ij}))$$
#
# For a block whose rows have their maxima at $a$ and $d$ there is a one in every row:
#
# $$\begin{pmatrix} a & b \\ c & d \end{pmatrix} \to \begin{pmatrix} e^{a-a} & e^{b-a} \\ e^{c-d} & e^{d-d} \end{pmatrix}$$

# %% [markdown] lang="zh"
# ## 不做除法的 softmax
#
# 记作 $\mathrm{softmax}^\ast$：只取指数，减去的是*这一块*的行最大值。
#
# $$\mathrm{softmax}^\ast(S_{ij}) = \exp(S_{ij} - \mathrm{rowmax}(S_{ij}))$$
#
# 如果一块的两行最大值分别在 $a$ 和 $d$，那么每一行里都有一个 1：
#
# $$\begin{pmatrix} a & b \\ c & d \end{pmatrix} \to \begin{pmatrix} e^{a-a} & e^{b-a} \\ e^{c-d} & e^{d-d} \end{pmatrix}$$


# %%
def softmax_star(s):
    return torch.exp(s - s.amax(-1, keepdim=True))


a, b, c, d = 2.0, 1.0, 0.0, 3.0
star = softmax_star(torch.tensor([[a, b], [c, d]], dtype=torch.float64))
by_hand = [
    [math.exp(a - a), math.exp(b - a)],
    [math.exp(c - d), math.exp(d - d)],
]
print(star)

# %% tags=["check"]
assert torch.allclose(star, torch.tensor(by_hand, dtype=torch.float64))

# %% [markdown]
# ## Wrong
#
# $P_{ij} = \mathrm{softmax}(S_{ij})$ for each block, and $O_i = \sum_j P_{ij} V_j$. Every block normalises by its own sum, so with four blocks of keys the weights of a row add up to four. (Using $\mathrm{softmax}^\ast$ without any correction is no better: each block is then shifted by a different maximum, and their sums cannot be added.)

# %% [markdown] lang="zh"
# ## 错误的做法
#
# 每一块各自取 $P_{ij} = \mathrm{softmax}(S_{ij})$，再令 $O_i = \sum_j P_{ij} V_j$。每一块都用自己的和来归一化，于是键有四块时，一行的权重加起来等于四。（直接用 $\mathrm{softmax}^\ast$ 而不修正也不行：每块减去的最大值各不相同，它们的和不能相加。）


# %%
def wrong_local_softmax(q, k, v, rows, columns):
    o = []
    for q_i in q.split(rows):
        o_i = 0
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            p = softmax_star(scores(q_i, k_j))
            # each block by its own sum: WRONG
            o_i = o_i + (p / p.sum(-1, keepdim=True)) @ v_j
        o.append(o_i)
    return torch.cat(o)


wrong = wrong_local_softmax(q, k, v, rows=2, columns=2)
weight = wrong_local_softmax(
    q, k, torch.ones(8, 1, dtype=torch.float64), rows=2, columns=2
)
print(
    say(
        f"weights of a row add up to {weight.mean():.4f}; largest error of "
        f"the output {(wrong - exact).abs().max():.2f}",
        f"一行的权重加起来是 {weight.mean():.4f}；输出的最大误差 "
        f"{(wrong - exact).abs().max():.2f}",
    )
)

# %% tags=["check"]
assert torch.allclose(weight, torch.full((8, 1), 4.0, dtype=torch.float64))
assert (wrong - exact).abs().max() > 1

# %% [markdown]
# ## Right
#
# A block of rows $Q_i$ keeps three things: $m$ (the maximum of each row so far), $l$ (its denominator so far), $O$
# (its numerator so far). At the start $m = -\infty$, $l = 0$, $O = 0$. For every block of keys:
#
# $$\begin{aligned} S &= Q_i K_j^\top / \sqrt{D} \\ m' &= \max(m, \mathrm{rowmax}(S)) \\ P &= \exp(S - m') \\ \alpha &= \exp(m - m') \\ l &\leftarrow \alpha l + \mathrm{rowsum}(P) \\ O &\leftarrow \mathrm{diag}(\alpha) O + P V_j \\ m &\leftarrow m' \end{aligned}$$
#
# and after the last block $O \leftarrow \mathrm{diag}(l)^{-1} O$. The correction $\alpha$ is lesson 3's, applied to the
# numerator too. $\mathrm{diag}(\alpha) O$ scales each row by its own number; its inverse divides.
#
# This is the whole algorithm. Read it line by line beside the formulas, and change it: leave out an $\alpha$, and the
# checks below fail.

# %% [markdown] lang="zh"
# ## 正确的做法
#
# 一块查询 $Q_i$ 记住三样东西：$m$（每行到目前为止的最大值）、$l$（到目前为止的分母）、$O$（到目前为止的分子）。开始时 $m = -\infty$，$l = 0$，$O = 0$。对每一块键：
#
# $$\begin{aligned} S &= Q_i K_j^\top / \sqrt{D} \\ m' &= \max(m, \mathrm{rowmax}(S)) \\ P &= \exp(S - m') \\ \alpha &= \exp(m - m') \\ l &\leftarrow \alpha l + \mathrm{rowsum}(P) \\ O &\leftarrow \mathrm{diag}(\alpha) O + P V_j \\ m &\leftarrow m' \end{aligned}$$
#
# 最后一块之后，$O \leftarrow \mathrm{diag}(l)^{-1} O$。修正因子 $\alpha$ 就是第 3 课的那个，只是现在也用到分子上。$\mathrm{diag}(\alpha) O$ 让每一行乘上自己的数；取逆就是除。
#
# 这就是整个算法。请对照公式逐行阅读，也请动手改：漏掉一个 $\alpha$，下面的检查就会失败。


# %%
def nothing(q_i, v):
    zero = q_i.new_zeros(q_i.shape[0])
    return zero - torch.inf, zero, q_i.new_zeros(q_i.shape[0], v.shape[1])


def step(state, q_i, k_j, v_j):
    m_old, l, o = state
    s = scores(q_i, k_j)
    m = torch.maximum(m_old, s.amax(-1))
    p = torch.exp(s - m[:, None])
    alpha = torch.exp(m_old - m)
    return m, alpha * l + p.sum(-1), alpha[:, None] * o + p @ v_j


def tiled_attention(q, k, v, rows, columns):
    out = []
    for q_i in q.split(rows):
        state = nothing(q_i, v)
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            state = step(state, q_i, k_j, v_j)
        _, l, o = state
        out.append(o / l[:, None])
    return torch.cat(out)


state = nothing(q[:2], v)
rows, apart = [], []
for j in range(1, 5):
    state = m, l, o = step(
        state, q[:2], k[2 * j - 2 : 2 * j], v[2 * j - 2 : 2 * j]
    )
    seen = rung.naive(q[:2], k[: 2 * j], v[: 2 * j])
    so_far = o / l[:, None]
    # O / l is attention over the keys seen so far
    apart.append((so_far - seen).abs().max())
    rows.append(
        [
            j,
            *(f"{value:.3f}" for value in (*m, *l)),
            f"{(so_far - exact[:2]).abs().max():.3f}",
        ]
    )
show(
    say(
        ["block", "m₁", "m₂", "l₁", "l₂", "distance to the final output"],
        ["块", "m₁", "m₂", "l₁", "l₂", "与最终输出的距离"],
    ),
    rows,
)

# %% tags=["check"]
m_0, l_0, o_0 = nothing(q[:2], v)
assert m_0.tolist() == [-math.inf] * 2
assert l_0.tolist() == [0, 0]
assert o_0.abs().sum() == 0
x = torch.rand(2, dtype=torch.float64) + 0.5
assert torch.allclose(torch.diag(x) @ o, x[:, None] * o)
assert max(apart) < 1e-6
assert torch.allclose(tiled_attention(q, k, v, rows=2, columns=2), exact)
assert torch.allclose(
    tiled_attention(q, k, v, rows=3, columns=5),
    rung.fa2(q, k, v, rows=4, columns=2)[0],
)
assert torch.allclose(torch.linalg.inv(torch.diag(x)), torch.diag(1 / x))
assert torch.allclose(so_far, exact[:2])

# %% [markdown]
# After every block the state holds the *exact* attention over the keys it has seen. Nothing is approximated, and the
# last division only happens once.
#
# ## Where everything lives
#
# Below, the same computation through a far memory (HBM) and a near one (SRAM). Blocks of $Q$, $K$, $V$ go in, blocks
# of $O$ come out; $S$ and $P$ exist for one step, near the processor, and are never stored. Try it yourself with
# `tilewise trace attention --sq 8 --sk 8 --block 2`.

# %% [markdown] lang="zh"
# 每一块之后，状态里就是对已见过的键的*精确*注意力。没有任何近似，最后的除法只做一次。
#
# ## 东西都放在哪里
#
# 下面让同样的计算经过远处的内存（HBM）和近处的内存（SRAM，即共享内存）。$Q$、$K$、$V$ 的块进来，$O$ 的块出去；$S$ 和 $P$ 只在处理器旁边存在一步，从不写出。可以自己试试 `tilewise trace attention --sq 8 --sk 8 --block 2`。

# %%
told = trace.attention(8, 8, d=4, rows=2, columns=2)
moved = {**told["totals"]["loaded"], **told["totals"]["stored"]}
print(say("bytes moved:", "搬运的字节："), moved)
print(
    say("most bytes in SRAM at once:", "SRAM 里同时最多有几个字节："),
    told["totals"]["peak"],
)
longer = trace.attention(64, 64, d=4, rows=2, columns=2)


# %% tags=["figure"]
def draw(left, right):
    for axes, title, values in (
        (left, "wrong: local softmax", (wrong - exact).abs()),
        (
            right,
            "right: online softmax",
            (tiled_attention(q, k, v, 2, 2) - exact).abs(),
        ),
    ):
        image = axes.imshow(
            values.log10().clamp(-17, 1),
            vmin=-17,
            vmax=1,
            cmap="RdYlGn_r",
            aspect="auto",
        )
        axes.set(title=title, xlabel="column of O", ylabel="token")
        axes.figure.colorbar(image, ax=axes, label="log₁₀ error")


picture(
    "05_wrong_and_right",
    draw,
    alt=say(
        "Two maps of the error of O, token by column: a softmax of "
        "each block alone is wrong everywhere, by about 1; the "
        "online softmax is exact to about 1e-16.",
        "O 的误差的两张图，行是 token，列是 O 的列：每块各自做 softmax "
        "时处处都错，误差约为 1；在线 softmax 精确到约 1e-16。",
    ),
    panels=(1, 2),
)

# %% tags=["check"]
assert told["error"] < 1e-12
assert not {"s", "p"} & set(moved)
# eight times the length, the same SRAM
assert longer["totals"]["peak"] == told["totals"]["peak"]

# %% [markdown]
# ## Who can work at the same time?
#
# Rows of $Q$ do not know of each other: each block of rows is an independent job, one per processor. *Within* a row
# the blocks of keys come one after the other (or are merged at the end, as lesson 3 allows).

# %% [markdown] lang="zh"
# ## 谁可以同时工作？
#
# $Q$ 的各行互不相识：每块行都是一件独立的工作，一个处理器做一件。*同一*行之内，键的各块一个接一个地来（或者像第 3 课允许的那样，最后再合并）。

# %%
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as processors:
    parts = list(
        processors.map(
            lambda q_i: tiled_attention(q_i, k, v, rows=2, columns=2),
            q.split(2),
        )
    )
o, lse = rung.split_keys(q, k, v, rows=2, columns=2, chunk=4)

# %% tags=["check"]
assert torch.allclose(torch.cat(parts), exact)
assert torch.allclose(o, exact)

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `first_block(s, v)`, the state after one block;
# `step(state, s, v)`, one block of the loop above, where scores may be $-\infty$ and a row that has seen nothing but
# masked keys must stay $(-\infty, 0, 0)$; and `lazy_step(state, s, v, threshold)`, which rescales only when the
# maximum grows by more than a threshold. Get them with `tilewise learn 5 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `first_block(s, v)`，即看过一块之后的状态；写出 `step(state, s, v)`，即上面循环中的一块，分数可能是 $-\infty$，一行如果只见过被遮住的键，必须保持 $(-\infty, 0, 0)$；再写出 `lazy_step(state, s, v, threshold)`，只有最大值的增长超过阈值时才重新缩放。用 `tilewise learn 5 --exercise` 取得它们。
