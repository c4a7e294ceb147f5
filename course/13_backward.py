# %% [markdown]
# # 13. The backward, by hand and in tiles
#
# The forward is $S = Q K^\top / \sqrt{D}$, $P = \mathrm{softmax}(S)$, $O = P V$. Given $dO$, what are $dQ$, $dK$,
# $dV$? Read the chain from its end, with lesson 12's two rules for products and one new rule for softmax. Then the
# surprise: the tiled backward needs *nothing* that the forward did not already keep, except one number per row.

# %% [markdown] lang="zh"
# # 13. 反向传播：手推一遍，再分块
#
# 前向是 $S = Q K^\top / \sqrt{D}$，$P = \mathrm{softmax}(S)$，$O = P V$。给定 $dO$，$dQ$、$dK$、$dV$ 是什么？从末端往回读这条链，用第 12 课的两条矩阵乘法规则，再加一条 softmax 的新规则。然后会有一个惊喜：分块的反向传播所需要的东西，前向*全都*已经留下了，只差每行一个数。

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import torch

import tilewise
from tilewise_lab import trace
from tilewise_lab.derivation import attention as rung
from tilewise_lab.learn import has_triton, measured, picture, say, show

torch.manual_seed(0)
n, d = 12, 4
q, k, v, do = (torch.randn(n, d, dtype=torch.float64) for _ in range(4))

# %% [markdown]
# ## The Jacobian of softmax
#
# For one row $p = \mathrm{softmax}(s)$:
#
# $$\partial p_j / \partial s_k = p_j (1 - p_j) \text{ if } j = k \text{, else } -p_j p_k \quad \text{that is} \quad J = \mathrm{diag}(p) - p p^\top$$
#
# It is symmetric, and its rows sum to zero: adding a constant to all scores changes nothing (lesson 2). Multiplied
# with a gradient $dP$ it needs no matrix:
#
# $$dS = P \circ (dP - \mathrm{rowsum}(P \circ dP))$$

# %% [markdown] lang="zh"
# ## softmax 的雅可比矩阵
#
# 对一行 $p = \mathrm{softmax}(s)$：
#
# $$\partial p_j / \partial s_k = p_j (1 - p_j) \text{ if } j = k \text{, else } -p_j p_k \quad \text{that is} \quad J = \mathrm{diag}(p) - p p^\top$$
#
# 它是对称的，每行之和为零：所有分数加上同一个常数，什么也不变（第 2 课）。与梯度 $dP$ 相乘并不需要构造矩阵：
#
# $$dS = P \circ (dP - \mathrm{rowsum}(P \circ dP))$$


# %%
def softmax_jacobian(p):
    return torch.diag(p) - torch.outer(p, p)


def softmax_vjp(p, dp):
    return p * (dp - (p * dp).sum(-1, keepdim=True))


s = torch.randn(5, dtype=torch.float64)
p = torch.softmax(s, -1)
jacobian = softmax_jacobian(p)
dp = torch.randn(5, dtype=torch.float64)

# %% tags=["check"]
from tilewise_lab.derivation import gradient

assert torch.allclose(
    jacobian,
    torch.autograd.functional.jacobian(lambda t: torch.softmax(t, -1), s),
)
assert torch.allclose(jacobian, gradient.softmax_jacobian(p))
assert torch.allclose(jacobian, jacobian.T)
assert torch.allclose(
    jacobian.sum(-1), torch.zeros(5, dtype=torch.float64), atol=1e-15
)
assert torch.isclose(jacobian[1, 1], p[1] * (1 - p[1]))
assert torch.isclose(jacobian[0, 2], -p[0] * p[2])
assert torch.allclose(softmax_vjp(p, dp), jacobian @ dp)

# %% [markdown]
# ## By hand
#
# $$\begin{aligned} dV &= P^\top dO \\ dP &= dO V^\top \\ dS &= P \circ (dP - \mathrm{rowsum}(P \circ dP)) \\ dQ &= dS K / \sqrt{D} \\ dK &= dS^\top Q / \sqrt{D} \end{aligned}$$
#
# (The $1 / \sqrt{D}$ belongs to $S$, so it is in $dQ$ and $dK$. It is easily forgotten, and then everything trains,
# only worse.)

# %% [markdown] lang="zh"
# ## 手推
#
# $$\begin{aligned} dV &= P^\top dO \\ dP &= dO V^\top \\ dS &= P \circ (dP - \mathrm{rowsum}(P \circ dP)) \\ dQ &= dS K / \sqrt{D} \\ dK &= dS^\top Q / \sqrt{D} \end{aligned}$$
#
# （$1 / \sqrt{D}$ 属于 $S$，所以 $dQ$ 和 $dK$ 里都有它。它很容易被忘掉，忘了以后一切照样能训练，只是效果变差。）


# %%
def by_hand(q, k, v, do):
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(q @ k.T * scale, -1)
    dv = p.T @ do
    dp = do @ v.T
    ds = softmax_vjp(p, dp) * scale
    return ds @ k, ds.T @ q, dv


leaves = [x.clone().requires_grad_() for x in (q, k, v)]
expected = torch.autograd.grad(rung.naive(*leaves), leaves, do)
found = by_hand(q, k, v, do)
for name, a, b in zip(("dQ", "dK", "dV"), found, expected, strict=True):
    print(name, f"{(a - b).abs().max():.1e}")

# %% tags=["check"]
for a, b, c in zip(found, expected, gradient.naive(q, k, v, do), strict=True):
    assert torch.allclose(a, b)
    assert torch.allclose(a, c)

# %% [markdown]
# ## In tiles
#
# Two things stand in the way of doing this block by block: $P$, which was never stored, and
# $\mathrm{rowsum}(P \circ dP)$, which needs the whole row.
#
# *$P$ is one exponential away.* The forward kept the logsumexp $L$, so $P_{ij} = \exp(S_{ij} - L_i)$, any block of it,
# in any order, exact.
#
# *The row sum is known beforehand:*
#
# $$\delta_i = \sum_j P_{ij} dP_{ij} = \sum_j P_{ij} (dO_i \cdot V_j) = dO_i \cdot \sum_j P_{ij} V_j = dO_i \cdot O_i$$
#
# So $\delta = \mathrm{rowsum}(dO \circ O)$, one number per row (`delta` in code). That is the whole backward:

# %% [markdown] lang="zh"
# ## 分块
#
# 要一块一块地做，有两个障碍：从未存下来的 $P$，以及需要整行的 $\mathrm{rowsum}(P \circ dP)$。
#
# *$P$ 只差一个指数。* 前向留下了 logsumexp $L$，所以 $P_{ij} = \exp(S_{ij} - L_i)$：任何一块，任何顺序，都是精确的。
#
# *行和事先就知道：*
#
# $$\delta_i = \sum_j P_{ij} dP_{ij} = \sum_j P_{ij} (dO_i \cdot V_j) = dO_i \cdot \sum_j P_{ij} V_j = dO_i \cdot O_i$$
#
# 所以 $\delta = \mathrm{rowsum}(dO \circ O)$，每行一个数（代码里叫 `delta`）。这就是整个反向传播：


# %%
def tiled_backward(q, k, v, o, lse, do, rows, columns):
    scale = 1 / math.sqrt(q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (do * o).sum(-1)
    for first_j in range(0, len(k), columns):
        j = slice(first_j, first_j + columns)
        for first_i in range(0, len(q), rows):
            i = slice(first_i, first_i + rows)
            # computed again
            p = torch.exp(q[i] @ k[j].T * scale - lse[i, None])
            ds = p * (do[i] @ v[j].T - delta[i, None]) * scale
            dv[j] += p.T @ do[i]
            dk[j] += ds.T @ q[i]
            dq[i] += ds @ k[j]
    return dq, dk, dv


o, lse = rung.fa2(q, k, v, rows=4, columns=4)
P = torch.softmax(rung.scores(q, k), -1)
delta = (do * o).sum(-1)

# %% tags=["check"]
assert torch.allclose(torch.exp(rung.scores(q, k) - lse[:, None]), P)
assert torch.allclose(delta, (P * (do @ v.T)).sum(-1))
for a, b in zip(
    tiled_backward(q, k, v, o, lse, do, rows=4, columns=4),
    expected,
    strict=True,
):
    assert torch.allclose(a, b)
for a, b in zip(
    gradient.tiled(q, k, v, o, lse, do, rows=4, columns=4),
    expected,
    strict=True,
):
    assert torch.allclose(a, b)

# %% [markdown]
# ## Who owns a sum?
#
# $dK_j$ and $dV_j$ are sums over queries, $dQ_i$ a sum over keys. In a single loop over key blocks every program wants to add to every $dQ_i$: through HBM, with atomic additions whose order changes from run to run. tilewise's portable backward makes *two* passes instead: the owners of keys sum $dK$ and $dV$, then the owners of queries sum $dQ$. Seven products instead of five, but every sum has one owner and one order: two runs agree bit for bit.

# %% [markdown] lang="zh"
# ## 和归谁所有？
#
# $dK_j$ 和 $dV_j$ 是对查询求和，$dQ_i$ 是对键求和。如果只对键块做一个循环，每个程序都要往每个 $dQ_i$ 里加：得经过 HBM，用原子加法，而原子加法的顺序每次运行都不同。tilewise 的通用反向 kernel 改为走*两*遍：键的主人累加 $dK$ 和 $dV$，然后查询的主人累加 $dQ$。七次乘法而不是五次，但每个和只有一个主人、一种顺序：两次运行逐位相同。

# %%
totals = {
    owners: trace.attention(
        32, 32, d=4, rows=8, columns=8, backward=True, owners=owners
    )["totals"]
    for owners in ("one", "two")
}
words = {
    "one": say("one loop", "一个循环"),
    "two": say("two owners", "两个所有者"),
}
show(
    say(
        ["", "dQ written", "dQ read back", "FLOPs"],
        ["", "写出的 dQ", "读回的 dQ", "FLOP"],
    ),
    [
        [words[o], t["stored"]["dq"], t["loaded"].get("dq", 0), t["flops"]]
        for o, t in totals.items()
    ],
    say(
        "one loop, or two owners (32 tokens in blocks of 8)",
        "一个循环，或两个所有者（32 个 token，每块 8 个）",
    ),
)

# %% tags=["check"]
assert totals["one"]["stored"]["dq"] == 4 * totals["two"]["stored"]["dq"]
assert "dq" not in totals["two"]["loaded"]
assert (
    trace.attention(32, 32, rows=8, columns=8, backward=True, causal=True)[
        "error"
    ]
    < 1e-12
)

# %% [markdown]
# On Hopper there is a third way: a single loop, five products, and $dQ$ summed in HBM after all, by wide atomic
# additions or, with `deterministic=True`, in a fixed order for which the programs wait. There the two products saved
# are worth more than the traffic.

# %% [markdown] lang="zh"
# 在 Hopper 上还有第三种办法：一个循环，五次乘法，$dQ$ 还是在 HBM 里累加，用宽的原子加法；或者在 `deterministic=True` 时按固定的顺序来，程序之间互相等待。在那里，省下的两次乘法比搬运更值钱。

# %%
times = measured("sums")
if times:
    ways = {
        "two kernels": say(
            "two owners, seven products", "两个所有者，七次乘法"
        ),
        "atomic": say("one loop, atomic", "一个循环，原子加法"),
        "in order": say("one loop, in order", "一个循环，按固定顺序"),
    }
    show(
        say(
            ["dQ is summed by", "ms of the backward"],
            ["dQ 怎样累加", "反向的 ms"],
        ),
        [[words, f"{times[way]:.2f}"] for way, words in ways.items()],
    )

# %% [markdown]
# ## In Triton, as a node of autograd
#
# `tilewise.attention` is one node: $Q, K, V \to O$, with this backward. Checked against finite differences in float64,
# and the Triton kernels against float64 in the interpreter; through the logsumexp as well, which takes one term, $dL$,
# from $\delta$.

# %% [markdown] lang="zh"
# ## 在 Triton 里，作为自动求导的一个节点
#
# `tilewise.attention` 是一个节点：$Q, K, V \to O$，反向就是上面这样。它在 float64 下与有限差分核对过；Triton kernel 在解释器里与 float64 核对过；经过 logsumexp 的梯度也一样，它从 $\delta$ 里减去一项 $dL$。

# %%
small = [
    torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(3)
]

if has_triton("the Triton backward"):
    tensors = [
        torch.randn(1, 24, 2, 16, requires_grad=True) for _ in range(3)
    ]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    grads = []
    for inputs, backend in ((tensors, "triton"), (exact, "reference")):
        out, lse = tilewise.attention(
            *inputs, causal=True, backend=backend, return_lse=True
        )
        grads.append(
            torch.autograd.grad((out.sum() + (2 * lse).sum()), inputs)
        )
    for name, a, b in zip(("dQ", "dK", "dV"), *grads, strict=True):
        print(f"Triton {name}: {(a - b).abs().max():.1e}")
    again, more = (
        torch.autograd.grad(
            tilewise.attention(*tensors, causal=True, backend="triton").sum(),
            tensors,
        )
        for _ in range(2)
    )
    equal = all(torch.equal(a, b) for a, b in zip(again, more, strict=True))
    print(
        say(
            f"two runs are equal bit for bit: {equal}",
            f"两次运行逐位相同：{equal}",
        )
    )

# %% tags=["check"]
if has_triton():
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-4)
    assert equal
assert torch.autograd.gradcheck(
    lambda *x: tilewise.attention(*x, causal=True, return_lse=True), small
)

# %% [markdown]
# ## What is kept
#
# Nothing $N \times N$, forward or backward. The gradient costs $Q$, $K$, $V$, $O$ and one logsumexp per row.

# %% [markdown] lang="zh"
# ## 要留下什么
#
# 没有任何 $N \times N$ 的东西，前向和反向都没有。梯度的代价只是 $Q$、$K$、$V$、$O$，以及每行一个 logsumexp。

# %%
lengths = [256, 1024, 4096, 16384]
kept = [4 * m * 64 * 2 + 4 * m for m in lengths]
stored_p = [m * m * 2 for m in lengths]


# %% tags=["figure"]
def draw(axes):
    axes.loglog(
        lengths, [b / 2**20 for b in stored_p], "o-", base=2, label="keep P"
    )
    axes.loglog(
        lengths,
        [b / 2**20 for b in kept],
        "o-",
        base=2,
        label="keep Q, K, V, O and L",
    )
    axes.set(
        xlabel="tokens",
        ylabel="MiB per head (D = 64, 16 bit)",
        title="What the backward needs",
    )
    axes.legend()


picture(
    "13_kept",
    draw,
    alt=say(
        "MiB a head that are kept for the backward, over tokens, on "
        "two logarithmic axes: P grows with the square of the "
        "length; Q, K, V, O and L grow linearly and stay far below.",
        "为反向保存的内存（每个头多少 MiB）随 token 数的变化（双对数"
        "坐标）：P 按长度的平方增长；Q、K、V、O 和 L 按线性增长，少得"
        "多。",
    ),
)

# %% tags=["check"]
assert math.isclose(kept[3] / kept[2], 4)
assert stored_p[3] / stored_p[2] == 16

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `weights(q, k, lse)`, a block of $P$, computed again;
# `block_gradients(q, k, v, do, lse, delta)`, what one block adds to $dQ$, $dK$ and $dV$; and
# `backward(q, k, v, o, lse, do, rows, columns)`, FlashAttention's whole backward. Get them with
# `tilewise learn 13 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `weights(q, k, lse)`，即重新算出 $P$ 的一块；写出 `block_gradients(q, k, v, do, lse, delta)`，即一块对 $dQ$、$dK$ 和 $dV$ 的贡献；再写出 `backward(q, k, v, o, lse, do, rows, columns)`，即 FlashAttention 的整个反向。用 `tilewise learn 13 --exercise` 取得它们。
