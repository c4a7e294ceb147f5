# %% [markdown]
# # 3. Online softmax, and why it is right
#
# Three passes are one too many: can the maximum and the denominator be found in the same loop? The denominator needs
# the maximum, and the maximum is not known before the end. So use the maximum *so far*, and when a larger one turns
# up, repair what has been summed. The repair is one multiplication, by `correction` below. Everything in this lesson
# is built from these three functions; change one and run on.

# %% [markdown] lang="zh"
# # 3. 在线 softmax，以及它为什么对
#
# 三遍扫描还是多了一遍：能不能在同一个循环里同时求出最大值和分母？分母需要最大值，而最大值要到最后才知道。那就先用*到目前为止*的最大值，一旦出现更大的，再把已经累加的部分修正过来。修正只是一次乘法，也就是下面的 `correction`。这一课的一切都由这三个函数搭成；你可以改动其中一个，再往下运行。

# %%
import itertools
import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.merging import union
from tilewise_lab import trace
from tilewise_lab.learn import picture, say
from tilewise_lab.trace.command import show_softmax


class State(NamedTuple):
    m: Tensor  # the maximum of the elements seen
    l: Tensor  # the sum of exp(x - m) over them


def correction(old, new):
    """exp(old - new), and 0 where nothing has been seen yet (-inf - (-inf)
    would be no number)."""
    return torch.exp(old - new.masked_fill(new == -torch.inf, 0.0))


def merge(a, b):
    """The state of all elements of a and b together."""
    m = torch.maximum(a.m, b.m)
    return State(m, a.l * correction(a.m, m) + b.l * correction(b.m, m))


def online_states(x):
    """The state after each element: one pass."""
    zero = x.new_zeros(())
    state = State(zero - torch.inf, zero)
    for x_i in x:
        state = merge(state, State(x_i, torch.ones_like(zero)))
        yield state


x = [3, 2, 5, 1]
# the same steps, as the library's tracer records them
told = trace.softmax(x)
show_softmax(told)

# %% tags=["check"]
assert [
    float(l) for _, l in online_states(torch.tensor(x, dtype=torch.float64))
] == [step["l"] for step in told["right"]["steps"]]

# %% [markdown]
# Look at element 3. Until then the maximum was 3, and $l_2 = e^{3-3} + e^{2-3}$ was right for it. Now 5 arrives.
# Without a correction the sum mixes terms taken under 3 with one taken under 5:
#
# $$\begin{aligned} \text{wrong:} \quad l_3 &= l_2 + e^{5-5} &= e^0 + e^{-1} + e^0 &= 2.367879 \\ \text{right:} \quad l_3 &= l_2 \cdot e^{3-5} + e^{5-5} &= (e^0 + e^{-1}) \cdot e^{-2} + e^0 &= 1.185122 \end{aligned}$$
#
# The factor $e^{m_{i-1} - m_i}$ turns every old $e^{x - m_{i-1}}$ into $e^{x - m_i}$, all at once. Where the maximum
# stays the factor is $e^0 = 1$. At the first element it is $e^{-\infty} = 0$, and multiplies $l_0 = 0$. (An index is
# not a power: it is $l_2$ that is corrected, the second $l$, not a square.)

# %% [markdown] lang="zh"
# 看第 3 个元素。在它之前最大值是 3，$l_2 = e^{3-3} + e^{2-3}$ 对这个最大值来说是对的。现在来了 5。不修正的话，和里就混进了两种项：以 3 为基准的和以 5 为基准的：
#
# $$\begin{aligned} \text{wrong:} \quad l_3 &= l_2 + e^{5-5} &= e^0 + e^{-1} + e^0 &= 2.367879 \\ \text{right:} \quad l_3 &= l_2 \cdot e^{3-5} + e^{5-5} &= (e^0 + e^{-1}) \cdot e^{-2} + e^0 &= 1.185122 \end{aligned}$$
#
# 因子 $e^{m_{i-1} - m_i}$ 一次就把所有旧的 $e^{x - m_{i-1}}$ 变成 $e^{x - m_i}$。最大值不变时，因子是 $e^0 = 1$；在第一个元素处，因子是 $e^{-\infty} = 0$，乘的是 $l_0 = 0$。（下标不是幂：被修正的是 $l_2$，第二个 $l$，不是平方。）

# %%
right, wrong = told["right"]["steps"], told["wrong"]["steps"]


# %% tags=["figure"]
def draw(axes):
    for name, color in (("right", "green"), ("wrong", "red")):
        axes.plot(
            range(1, 5),
            [step["l"] for step in told[name]["steps"]],
            "o-",
            color=color,
            label=name,
        )
    exact = [
        sum(math.exp(v - max(x[:n])) for v in x[:n]) for n in range(1, 5)
    ]
    axes.plot(range(1, 5), exact, "k_", markersize=18, label="exact")
    axes.set(
        xticks=range(1, 5),
        xticklabels=[f"x = {v}" for v in x],
        ylabel="denominator so far",
        title="One multiplication apart",
    )
    axes.legend()


picture(
    "03_online",
    draw,
    alt=say(
        "The denominator after each of the numbers 3, 2, 5, 1: with "
        "the correction it equals the exact one at every step, "
        "without it the line leaves at the third number.",
        "依次读入 3、2、5、1 之后的分母：有修正时每一步都等于精确值；"
        "没有修正时从第三个数起偏离。",
    ),
)

# %% tags=["check"]
assert [step["m"] for step in right] == [3, 3, 5, 5]
assert [round(step["factor"], 6) for step in right] == [
    0,
    1,
    round(math.exp(-2), 6),
    1,
]
assert round(wrong[2]["l"], 6) == 2.367879
assert round(right[2]["l"], 6) == 1.185122
assert round(right[3]["l"], 6) == 1.203438
assert [step["ok"] for step in wrong] == [True, True, False, False]
# one pass for (m, l), one for the outputs
assert told["loads"] == {"safe": 3, "online": 2}

# %% [markdown]
# ## The proof, and its execution
#
# Claim: after $n$ elements, $m_n = \max(x_1, \ldots, x_n)$ and $l_n = \sum_{j \le n} e^{x_j - m_n}$.
#
# *$n = 1$.* $m_1 = \max(-\infty, x_1) = x_1$ and $l_1 = 0 \cdot e^{-\infty} + e^{x_1 - x_1} = 1$. ✓
#
# *From $n$ to $n + 1$.* The maximum of maxima is the maximum. And
#
# $$\begin{aligned} l_{n+1} &= \left(\sum_{j \le n} e^{x_j - m_n}\right) \cdot e^{m_n - m_{n+1}} + e^{x_{n+1} - m_{n+1}} \\ &= \sum_{j \le n} e^{x_j - m_{n+1}} + e^{x_{n+1} - m_{n+1}} \\ &= \sum_{j \le n+1} e^{x_j - m_{n+1}} \checkmark \end{aligned}$$
#
# The middle step, once with symbols, then on three hundred random vectors after *every* prefix:

# %% [markdown] lang="zh"
# ## 证明，以及把证明跑一遍
#
# 命题：处理完 $n$ 个元素之后，$m_n = \max(x_1, \ldots, x_n)$，且 $l_n = \sum_{j \le n} e^{x_j - m_n}$。
#
# *$n = 1$ 时。* $m_1 = \max(-\infty, x_1) = x_1$，$l_1 = 0 \cdot e^{-\infty} + e^{x_1 - x_1} = 1$。✓
#
# *从 $n$ 到 $n + 1$。* 最大值的最大值还是最大值。并且
#
# $$\begin{aligned} l_{n+1} &= \left(\sum_{j \le n} e^{x_j - m_n}\right) \cdot e^{m_n - m_{n+1}} + e^{x_{n+1} - m_{n+1}} \\ &= \sum_{j \le n} e^{x_j - m_{n+1}} + e^{x_{n+1} - m_{n+1}} \\ &= \sum_{j \le n+1} e^{x_j - m_{n+1}} \checkmark \end{aligned}$$
#
# 中间那一步，先用符号验证一次，再在三百个随机向量上、对*每一个*前缀验证：

# %%
try:
    import sympy

    x_j, m_n, m_next = sympy.symbols("x_j m_n m_next", real=True)
    corrected = sympy.exp(x_j - m_n) * sympy.exp(m_n - m_next)
    difference = sympy.simplify(corrected - sympy.exp(x_j - m_next))
    print("e^(x - m_n) · e^(m_n - m_{n+1}) - e^(x - m_{n+1}) =", difference)
except ModuleNotFoundError:
    print(
        say(
            "(sympy is not installed: take the exponents' sum on trust)",
            "（没有安装 sympy：指数相加这一步请先相信）",
        )
    )

random.seed(0)
print(
    say(
        "invariant held after every prefix of 300 vectors",
        "300 个向量的每一个前缀之后，不变式都成立",
    )
)

# %% tags=["check"]
for _ in range(300):
    y = torch.tensor(
        [random.uniform(-50, 50) for _ in range(random.randint(1, 8))],
        dtype=torch.float64,
    )
    for n, (m, l) in enumerate(online_states(y), 1):
        assert m == y[:n].max()
        assert torch.isclose(l, torch.exp(y[:n] - m).sum(), rtol=1e-12)


# %% [markdown]
# ## What was really proved
#
# Nothing in the proof needs the second state to be a *single* element. Two states over any two sets of elements merge:
#
# $$m = \max(m_a, m_b) \quad l = l_a \cdot e^{m_a - m} + l_b \cdot e^{m_b - m}$$
#
# and the merge is associative and commutative, with $(-\infty, 0)$ as its zero. So the elements may come one by one,
# block by block, from different processors, in any order. Everything fast about attention follows: blocks of keys
# (FlashAttention), chunks of a cache (lesson 15), keys on different GPUs (lesson 16).

# %% [markdown] lang="zh"
# ## 真正证明了什么
#
# 证明里没有任何一处要求第二个状态只是*单个*元素。任意两组元素的状态都可以合并：
#
# $$m = \max(m_a, m_b) \quad l = l_a \cdot e^{m_a - m} + l_b \cdot e^{m_b - m}$$
#
# 而且合并满足结合律和交换律，零元是 $(-\infty, 0)$。所以元素可以一个一个来，可以一块一块来，可以来自不同的处理器，顺序随意。注意力里所有快的做法都由此而来：键的分块（FlashAttention）、缓存的分段（第 15 课）、分布在不同 GPU 上的键（第 16 课）。

# %%
torch.manual_seed(0)
y = torch.randn(6, dtype=torch.float64)
states = [State(v, torch.ones((), dtype=torch.float64)) for v in y]
results = set()
for order in itertools.permutations(states):
    a, b, c, d, e, f = order
    pairs = merge(merge(merge(a, b), merge(c, d)), merge(e, f))
    results.add((round(float(pairs.m), 12), round(float(pairs.l), 12)))
print(
    say(
        f"720 orders, {len(results)} result:",
        f"720 种顺序，{len(results)} 个结果：",
    ),
    results.pop(),
)
nothing = State(y.new_tensor(-torch.inf), y.new_tensor(0.0))

# %% tags=["check"]
from tilewise_lab.derivation import softmax as reference

assert not results
assert (
    merge(nothing, states[0])
    == states[0]
    == reference.merge(nothing, states[0])
)

# %% [markdown]
# A state that has seen nothing is $(-\infty, 0)$, and merging two of those meets $-\infty - (-\infty)$, which is no
# number. Masked scores are exactly such elements, so to say that $x$ cannot be $-\infty$ is not an option:
# `correction` subtracts 0 instead.

# %% [markdown] lang="zh"
# 什么都没见过的状态是 $(-\infty, 0)$，合并两个这样的状态会碰到 $-\infty - (-\infty)$，结果不是数。被掩码遮住的分数正是这样的元素，所以不能假定 $x$ 不会是 $-\infty$：`correction` 在这种情况下改为减 0。

# %%
empty = merge(nothing, nothing)
masked = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
*_, (m, l) = online_states(masked)
weights = torch.exp(masked - m) / l  # the second pass

# %% tags=["check"]
assert (float(empty.m), float(empty.l)) == (-math.inf, 0.0)
assert torch.allclose(
    weights[[1, 3]], torch.softmax(torch.tensor([1.0, 2.0]), -1)
)
assert not weights[[0, 2]].any()

# %% [markdown]
# `tilewise.merge` is the same fact for outputs: $(O, L)$ of some keys and $(O, L)$ of others make $(O, L)$ of all.

# %% [markdown] lang="zh"
# `tilewise.merge` 是同一个事实在输出上的样子：一些键的 $(O, L)$ 与另一些键的 $(O, L)$ 合起来，就是全部键的 $(O, L)$。

# %%
s, v = (
    torch.randn(3, 10, dtype=torch.float64),
    torch.randn(10, 4, dtype=torch.float64),
)


def part(columns):
    return torch.softmax(s[:, columns], -1) @ v[columns], s[
        :, columns
    ].logsumexp(-1)


o, lse = union(part(slice(0, 3)), part(slice(3, 10)))

# %% tags=["check"]
assert torch.allclose(o, torch.softmax(s, -1) @ v)
assert torch.allclose(lse, s.logsumexp(-1))

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `merge(a, b)` for states $(m, l)$, on plain Python floats, so that
# it is right for two empty states too; `denominator(xs)` of numbers that can be read once; and `weighted_mean(pairs)`,
# which is attention of one query in one pass. Get them with `tilewise learn 3 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：为状态 $(m, l)$ 写出 `merge(a, b)`，用普通的 Python 浮点数，两个空状态也要算对；写出 `denominator(xs)`，这些数只能读一遍；再写出 `weighted_mean(pairs)`，即一个查询的注意力，只扫一遍。用 `tilewise learn 3 --exercise` 取得它们。
