# %% [markdown]
# # 18. Your own kernel, forward and backward
#
# You have read a Triton forward (lesson 11) and the formulas of the backward (lesson 13). Now write them. The exercise
# is a skeleton of six functions, each a few lines; the checker runs them in Triton's interpreter, on a CPU, one step
# after the other, and says where the first wrong one is and what is probably wrong with it.
#
# Three kernels make an attention that trains. Every number that they write has one owner, so that no program waits
# for another:
#
# | kernel | a program owns | walks over | writes |
# |---|---|---|---|
# | `forward` | a block of queries | the keys they see | $O_i$, $L_i$ |
# | `backward_keys` | a block of keys | the queries that see them | $dK_j$, $dV_j$ |
# | `backward_queries` | a block of queries | the keys they see | $dQ_i$ |
#
# Here they are in Python, program by program, with slices where Triton has pointers. Each body is what one program
# does: this is what you translate.

# %% [markdown] lang="zh"
# # 18. 自己写 kernel：前向与反向
#
# 你读过一个 Triton 前向（第 11 课），也见过反向的公式（第 13 课）。现在动手写。练习是一个有六个函数的骨架，每个只要几行；批改程序在 CPU 上用 Triton 的解释器一步一步地运行它们，告诉你第一个错在哪里、多半错在什么地方。
#
# 三个 kernel 就能组成一个可以训练的注意力。每个写出的数只由一个程序负责，所以程序之间不用互相等待：
#
# | kernel | 一个程序负责 | 走过 | 写出 |
# |---|---|---|---|
# | `forward` | 一块查询 | 它们看得到的键 | $O_i$, $L_i$ |
# | `backward_keys` | 一块键 | 看得到它们的查询 | $dK_j$, $dV_j$ |
# | `backward_queries` | 一块查询 | 它们看得到的键 | $dQ_i$ |
#
# 下面用 Python 写出来，一个程序一个程序地看，Triton 里的指针在这里是切片。每个函数体就是一个程序要做的事：你要翻译的就是它。

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import torch

import tilewise
from tilewise_lab.learn import has_triton, picture, say, show

BLOCK_M, BLOCK_N = 4, 8


def blocks(first, end, size):
    return [slice(at, at + size) for at in range(first, end, size)]


def masked(s, i, j, causal):
    """Scores of the queries i and keys j (slices), -inf where a query comes
    before the key."""
    at = (
        torch.arange(i.start, i.start + s.shape[0])[:, None],
        torch.arange(j.start, j.start + s.shape[1]),
    )
    return s.masked_fill(at[1] > at[0], -torch.inf) if causal else s


def forward(program, q, k, v, o, lse, scale, causal):
    i = slice(program * BLOCK_M, (program + 1) * BLOCK_M)
    m = q.new_full((len(q[i]),), -torch.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(q[i])
    for j in blocks(0, min(len(k), i.stop) if causal else len(k), BLOCK_N):
        s = masked(q[i] @ k[j].T * scale, i, j, causal)
        m_new = torch.maximum(m, s.amax(-1))
        p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
        m, l, acc = (
            m_new,
            alpha * l + p.sum(-1),
            alpha[:, None] * acc + p @ v[j],
        )
    o[i], lse[i] = acc / l[:, None], m + l.log()


def backward_keys(program, q, k, v, do, lse, delta, dk, dv, scale, causal):
    j = slice(program * BLOCK_N, (program + 1) * BLOCK_N)
    for i in blocks(
        j.start // BLOCK_M * BLOCK_M if causal else 0, len(q), BLOCK_M
    ):
        p = torch.exp(
            masked(q[i] @ k[j].T * scale, i, j, causal) - lse[i, None]
        )
        ds = p * (do[i] @ v[j].T - delta[i, None])
        dv[j] += p.T @ do[i]
        dk[j] += ds.T @ q[i] * scale


def backward_queries(program, q, k, v, do, lse, delta, dq, scale, causal):
    i = slice(program * BLOCK_M, (program + 1) * BLOCK_M)
    for j in blocks(0, min(len(k), i.stop) if causal else len(k), BLOCK_N):
        p = torch.exp(
            masked(q[i] @ k[j].T * scale, i, j, causal) - lse[i, None]
        )
        ds = p * (do[i] @ v[j].T - delta[i, None])
        dq[i] += ds @ k[j] * scale


# %% [markdown]
# ## Around the kernels
#
# torch learns of the kernels through an `autograd.Function`: what the forward keeps, and what the backward makes of
# it. Note what is kept ($Q$, $K$, $V$, $O$, $L$: nothing $N \times N$), and that
# $\delta = \mathrm{rowsum}(dO \circ O)$ is computed once, outside. With your kernels in place of the Python ones, this
# class is the whole of a FlashAttention.

# %% [markdown] lang="zh"
# ## kernel 的外面
#
# torch 通过 `autograd.Function` 认识这些 kernel：前向留下什么，反向用它做什么。注意留下的东西（$Q$、$K$、$V$、$O$、$L$：没有任何 $N \times N$ 的），也注意 $\delta = \mathrm{rowsum}(dO \circ O)$ 只在外面算一次。把 Python 的换成你的 kernel，这个类就是一个完整的 FlashAttention。


# %%
class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        scale = 1 / math.sqrt(q.shape[-1])
        o, lse = torch.empty_like(q), q.new_empty(len(q))
        for program in range(
            -(-len(q) // BLOCK_M)
        ):  # on a GPU: forward[(programs,)](...)
            forward(program, q, k, v, o, lse, scale, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        delta = (do * o).sum(-1)
        dq, dk, dv = (
            torch.zeros_like(q),
            torch.zeros_like(k),
            torch.zeros_like(v),
        )
        for program in range(-(-len(k) // BLOCK_N)):
            backward_keys(
                program,
                q,
                k,
                v,
                do,
                lse,
                delta,
                dk,
                dv,
                ctx.scale,
                ctx.causal,
            )
        for program in range(-(-len(q) // BLOCK_M)):
            backward_queries(
                program, q, k, v, do, lse, delta, dq, ctx.scale, ctx.causal
            )
        return dq, dk, dv, None


torch.manual_seed(0)
for n, causal in ((9, True), (5, False)):  # no block divides these lengths
    leaves = [
        torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    ours = Attention.apply(*leaves, causal)
    theirs = tilewise.attention(
        *(x[None, :, None] for x in leaves), causal=causal
    )[0, :, 0]
    print(
        say(
            f"{n} tokens, causal {causal}: "
            f"{(ours - theirs).abs().max():.1e} from tilewise",
            f"{n} 个 token，causal {causal}：与 tilewise 相差 "
            f"{(ours - theirs).abs().max():.1e}",
        )
    )

# %% tags=["check"]
for n, causal in ((9, True), (5, False)):
    leaves = [
        torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    assert torch.autograd.gradcheck(
        lambda *x, causal=causal: Attention.apply(*x, causal), leaves
    )
    theirs = tilewise.attention(
        *(x[None, :, None] for x in leaves), causal=causal
    )[0, :, 0]
    assert torch.allclose(Attention.apply(*leaves, causal), theirs)

# %% [markdown]
# ## From slices to pointers
#
# A kernel gets the address of a matrix, and a tile of addresses is a small matrix of numbers: row $i$, column $c$ of a
# contiguous $(n, D)$ matrix lies at $i D + c$. In Triton `i[:, None] * D + c[None, :]` makes all of them at once. Rows
# past the end have addresses too, of something else: hence `mask=`, and `other=` for what to put in their place.

# %% [markdown] lang="zh"
# ## 从切片到指针
#
# kernel 得到的是矩阵的地址，一块的地址就是一个小小的数字矩阵：连续的 $(n, D)$ 矩阵里，第 $i$ 行第 $c$ 列位于 $i D + c$。在 Triton 里，`i[:, None] * D + c[None, :]` 一次就得到全部。末尾之后的行也有地址，只不过是别人的：所以要有 `mask=`，以及用来顶替的 `other=`。

# %%
n, width, first = 6, 4, 4
i, c = first + torch.arange(4), torch.arange(width)
addresses = i[:, None] * width + c[None, :]
inside = i[:, None] < n
print(torch.where(inside, addresses, -1))  # -1: not looked at
memory = torch.arange(n * width)  # the matrix, as it lies

# %% tags=["check"]
assert torch.equal(
    memory[addresses[inside.expand(4, 4)]].view(-1, 4),
    memory.view(n, width)[first:],
)

# %% [markdown]
# ## Run one function alone
#
# A function of a kernel cannot be called from Python, but a kernel of three lines can call it: load its inputs, call,
# store what it returns. The checker does exactly that with your steps, and you can do it whenever something is not as
# you think. Triton's interpreter even lets you `print` inside.

# %% [markdown] lang="zh"
# ## 单独运行一个函数
#
# kernel 里的函数不能直接从 Python 调用，但一个三行的 kernel 可以调用它：读入它的输入，调用，写出它返回的东西。批改程序就是这样检查你的每一步，你自己觉得哪里不对时也可以这么做。在 Triton 的解释器里，甚至可以直接 `print`。

# %%
if has_triton("a probe"):
    import triton
    import triton.language as tl

    @triton.jit
    def row_weights(s):
        """The function that is looked at: softmax of every row."""
        e = tl.exp(s - tl.max(s, 1)[:, None])
        return e / tl.sum(e, 1)[:, None]

    @triton.jit
    def probe(
        x, y, ROWS: tl.constexpr, COLS: tl.constexpr, LOOKED_AT: tl.constexpr
    ):
        at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        tl.store(y + at, LOOKED_AT(tl.load(x + at)))

    x = torch.randn(4, 8)
    # what is not written stays nan, and is seen
    y = torch.full_like(x, math.nan)
    probe[(1,)](x, y, ROWS=4, COLS=8, LOOKED_AT=row_weights)

# %% tags=["check"]
if has_triton():
    assert torch.allclose(y, torch.softmax(x, -1), atol=1e-6)

# %% [markdown]
# ## Three mistakes that everyone makes
#
# *Keys past the end.* A tile that was filled up with zeros has scores of 0 there, and $e^0$ is not nothing. They must
# be $-\infty$ before the maximum is taken.
#
# *Rows past the end, in the backward.* Their `lse` is loaded too. If `other` makes it 0, $P = e^0 = 1$ for a row that
# does not exist; harmless only because its $dO$ is 0. With `other=float("inf")` $P$ is 0 and nothing depends on luck.
#
# *The scale.* $S = Q K^\top / \sqrt{D}$: the factor is in $S$, so it must be in $dQ$ and $dK$, and not in $dV$.

# %% [markdown] lang="zh"
# ## 人人都会犯的三个错误
#
# *末尾之后的键。* 用零补齐的块，那里的分数是 0，而 $e^0$ 可不是没有。取最大值之前，必须把它们变成 $-\infty$。
#
# *反向传播里，末尾之后的行。* 它们的 `lse` 也会被读进来。如果 `other` 让它等于 0，一个不存在的行就有了 $P = e^0 = 1$；只因为它的 $dO$ 是 0 才没出事。用 `other=float("inf")`，$P$ 就是 0，不必靠运气。
#
# *缩放系数。* $S = Q K^\top / \sqrt{D}$：系数在 $S$ 里，所以 $dQ$ 和 $dK$ 里要有它，$dV$ 里没有。

# %%
q, k, v = (torch.randn(5, 4, dtype=torch.float64) for _ in range(3))
exact = torch.softmax(q @ k.T / 2, -1) @ v
filled_up = (
    torch.cat([k, torch.zeros(3, 4, dtype=torch.float64)]),
    torch.cat([v, torch.zeros(3, 4, dtype=torch.float64)]),
)
s = q @ filled_up[0].T / 2
leaking = torch.softmax(s, -1) @ filled_up[1]
s[:, 5:] = -torch.inf
right = torch.softmax(s, -1) @ filled_up[1]
show(
    say(["keys past the end", "error"], ["末尾之外的键", "误差"]),
    [
        [say("score 0", "分数为 0"), f"{(leaking - exact).abs().max():.2f}"],
        [
            say("score -inf", "分数为 -inf"),
            f"{(right - exact).abs().max():.1e}",
        ],
    ],
)


# %% tags=["figure"]
def draw(left, right):
    n, visited = 32, {"forward, backward_queries": [], "backward_keys": []}
    for i in range(0, n, BLOCK_M):
        visited["forward, backward_queries"].append(
            [j < min(n, i + BLOCK_M) for j in range(0, n, BLOCK_N)]
        )
        visited["backward_keys"].append(
            [i >= j // BLOCK_M * BLOCK_M for j in range(0, n, BLOCK_N)]
        )
    for axes, (name, tiles) in zip(
        (left, right), visited.items(), strict=True
    ):
        axes.imshow(tiles, cmap="Greens", vmin=0, vmax=1.5, aspect="auto")
        axes.set(
            title=f"{name}: along a {'column' if 'keys' in name else 'row'}",
            xlabel="block of keys",
        )
        axes.set_ylabel("block of queries")


picture(
    "18_who_walks_where",
    draw,
    alt=say(
        "Two grids of tiles, queries by keys, with the visited lower "
        "triangle in green. Left: a program of forward or "
        "backward_queries walks along a row. Right: one of "
        "backward_keys walks down a column.",
        "两个块网格，行是查询，列是键，绿色是被访问的下三角。左：forward "
        "或 backward_queries 的程序沿一行走。右：backward_keys 的程序"
        "沿一列走。",
    ),
    panels=(1, 2),
    size=(10, 4),
)

# %% tags=["check"]
assert (leaking - exact).abs().max() > 0.05
assert torch.allclose(torch.softmax(s, -1) @ filled_up[1], exact)

# %% [markdown]
# When all six steps are right you have what the first FlashAttention paper described, and more. What tilewise adds
# (in `tilewise.backends.triton`): strides and heads, any mask, exponentials to the base 2, tiles chosen by
# measurement. You can read all of it now.
#
# **Exercises.** Three, of rising difficulty: the six functions of the skeleton. Exercise 1 is `load_tile` and
# `online_step`, exercise 2 `forward`, exercise 3 `block_gradient`, `backward_keys` and `backward_queries`. Grade them
# after each step. Get them with `tilewise learn 18 --exercise`.

# %% [markdown] lang="zh"
# 六步全对之后，你手上的就是第一篇 FlashAttention 论文所描述的东西，而且更多。tilewise 另外加上的（在 `tilewise.backends.triton` 里）：步长与多头、任意的掩码、以 2 为底的指数、用测量选出的块大小。现在你全都读得懂了。
#
# **练习。** 三道，由易到难：骨架里的六个函数。练习 1 是 `load_tile` 和 `online_step`，练习 2 是 `forward`，练习 3 是 `block_gradient`、`backward_keys` 和 `backward_queries`。每写完一步就批改一次。用 `tilewise learn 18 --exercise` 取得它们。
