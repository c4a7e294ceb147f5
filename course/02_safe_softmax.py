# %% [markdown]
# # 2. Safe softmax
#
# Softmax turns scores into weights: positive, at most one, adding up to one.
#
# $$\mathrm{softmax}(x)_i = \frac{\exp(x_i)}{\sum_j \exp(x_j)}$$
#
# Written like that, it breaks. The exponential $e^{100}$ is $2.7 \cdot 10^{43}$, and float32 ends at
# $3.4 \cdot 10^{38}$. The repair is one line of algebra, and it is the line that everything later hangs on. Both
# versions, the second as three loops, because the loops are what later lessons remove:

# %% [markdown] lang="zh"
# # 2. 安全的 softmax
#
# softmax 把分数变成权重：都是正数，都不超过 1，加起来等于 1。
#
# $$\mathrm{softmax}(x)_i = \frac{\exp(x_i)}{\sum_j \exp(x_j)}$$
#
# 照这样写会出问题。$e^{100}$ 约为 $2.7 \cdot 10^{43}$，而 float32 最大只到 $3.4 \cdot 10^{38}$。补救只需要一行代数，后面的一切都建立在这一行上。下面是两个版本；第二个写成三个循环，因为后面的课要消掉的正是这些循环：

# %%
import math

import torch

from tilewise_lab.learn import picture, say, show


def naive(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def safe(x):
    n = x.shape[-1]
    m = x.new_full(x.shape[:-1], -torch.inf)
    l = torch.zeros_like(m)
    for i in range(n):
        m = torch.maximum(m, x[..., i])  # first pass: the maximum
    for i in range(n):
        l = l + torch.exp(x[..., i] - m)  # second pass: the denominator
    # third pass: the weights
    return torch.stack([torch.exp(x[..., i] - m) / l for i in range(n)], -1)


x = torch.tensor([3.0, 2.0, 5.0, 1.0])
p = naive(x)
print(p)

# %% tags=["check"]
from tilewise_lab.derivation import softmax as reference

assert bool((p > 0).all())
assert bool((p <= 1).all())
assert math.isclose(float(p.sum()), 1.0, rel_tol=1e-6)
# the library's reference, against which its kernels are tested
assert torch.equal(safe(x), reference.safe(x))

# %% [markdown]
# ## Where it breaks
#
# $\exp$ overflows where $x$ passes the logarithm of the largest number: 88.72 in float32, 11.09 in float16. Then $\infty / \infty$ is no number.

# %% [markdown] lang="zh"
# ## 在哪里出问题
#
# 当 $x$ 超过最大浮点数的对数时，$\exp$ 就溢出：float32 是 88.72，float16 是 11.09。接着 $\infty / \infty$ 得到的不是数。

# %%
rows = []
for dtype in (torch.float32, torch.float16):
    limit = math.log(torch.finfo(dtype).max)
    for value in (limit - 0.1, limit + 0.1, 100.0):
        y = torch.tensor([1.0, value], dtype=dtype)
        rows.append(
            [
                str(dtype)[6:],
                f"{value:.2f}",
                naive(y).tolist()[1],
                round(safe(y).tolist()[1], 4),
            ]
        )
show(
    say(["dtype", "x", "naive", "safe"], ["dtype", "x", "朴素", "安全"]), rows
)

# %% tags=["check"]
assert [
    round(math.log(torch.finfo(t).max), 2)
    for t in (torch.float32, torch.float16)
] == [88.72, 11.09]
assert naive(torch.tensor([1.0, 100.0])).isnan().any()
assert safe(torch.tensor([1.0, 100.0])).isfinite().all()

# %% [markdown]
# ## The repair
#
# Multiply numerator and denominator by the same $c$ and nothing changes. Take $c$ inside the exponent, as
# $k = -\log c$:
#
# $$\frac{\exp(x_i)}{\sum_j \exp(x_j)} = \frac{c \cdot \exp(x_i)}{\sum_j c \cdot \exp(x_j)} = \frac{\exp(x_i - k)}{\sum_j \exp(x_j - k)}$$
#
# Any $k$ will do, in exact arithmetic. With $k = \max(x)$ no exponent is above 0, so every exponential lies in
# $(0, 1]$, and the largest is exactly 1: the denominator can be neither infinite nor zero. (The shift makes the
# numbers smaller, not the work: there are as many exponentials as before.)

# %% [markdown] lang="zh"
# ## 补救
#
# 分子和分母同乘一个 $c$，结果不变。把 $c$ 放进指数里，记 $k = -\log c$：
#
# $$\frac{\exp(x_i)}{\sum_j \exp(x_j)} = \frac{c \cdot \exp(x_i)}{\sum_j c \cdot \exp(x_j)} = \frac{\exp(x_i - k)}{\sum_j \exp(x_j - k)}$$
#
# 在精确算术里，任何 $k$ 都行。取 $k = \max(x)$，则没有一个指数大于 0，每一项都落在 $(0, 1]$，最大的一项恰好是 1：分母既不会是无穷，也不会是零。（平移变小的是数值，不是计算量：要算的指数一个也没少。）

# %%
exact = torch.softmax(x.double(), -1)
ks = torch.linspace(-150, 150, 301)


def shifted(k):
    e = torch.exp(x - k)
    return e / e.sum()


errors = [float((shifted(k) - exact).abs().max()) for k in ks]
e = torch.exp(x - x.max())


# %% tags=["figure"]
def draw(axes):
    axes.semilogy(
        ks, [max(err, 1e-9) if err == err else 1.0 for err in errors], "."
    )
    axes.axvline(float(x.max()), color="green", label="k = max x")
    axes.set(
        xlabel="k",
        ylabel="error in float32 (1 = not a number)",
        title="Any shift is right, until the numbers run out",
    )
    axes.legend()


picture(
    "02_shift",
    draw,
    alt=say(
        "Error of softmax in float32 over the shift k: small in a "
        "wide range around the maximum, where a green line stands, "
        "and 1, for not a number, where exp overflows or every exp "
        "underflows.",
        "float32 下 softmax 的误差随平移量 k 的变化：绿线标出最大值，"
        "在它周围很宽的范围内误差都很小；exp 上溢或全部下溢时误差记为 "
        "1，即不是数。",
    ),
)

# %% tags=["check"]
for k in (
    -30.0,
    7.0,
    30.0,
):  # in float64 there is room for any of these shifts
    y = torch.exp(x.double() - k)
    assert torch.allclose(y / y.sum(), exact, rtol=1e-12)
assert float((shifted(x.max()) - exact).abs().max()) < 1e-7
assert bool(((e > 0) & (e <= 1)).all())
assert float(e.max()) == 1.0

# %% [markdown]
# ## Three passes
#
# As an algorithm, with $m$ for the maximum and $l$ for the denominator:
#
# $$\begin{aligned} m &\leftarrow -\infty; \quad \text{for every } i: \quad m \leftarrow \max(m, x_i) \\ l &\leftarrow 0; \quad \text{for every } i: \quad l \leftarrow l + \exp(x_i - m) \\ & \quad \text{for every } i: \quad y_i \leftarrow \exp(x_i - m) / l \end{aligned}$$
#
# The second loop needs the first one's $m$, the third the second one's $l$: they cannot be swapped. Each loop is
# $O(N)$ time and reads every element once: $O(N)$ memory *accesses* (the extra storage is two numbers). In total each
# element is loaded three times. `loads` below watches our own `safe` and counts.

# %% [markdown] lang="zh"
# ## 三遍扫描
#
# 写成算法，用 $m$ 表示最大值，$l$ 表示分母：
#
# $$\begin{aligned} m &\leftarrow -\infty; \quad \text{for every } i: \quad m \leftarrow \max(m, x_i) \\ l &\leftarrow 0; \quad \text{for every } i: \quad l \leftarrow l + \exp(x_i - m) \\ & \quad \text{for every } i: \quad y_i \leftarrow \exp(x_i - m) / l \end{aligned}$$
#
# 第二个循环需要第一个循环得到的 $m$，第三个需要第二个的 $l$：顺序不能换。每个循环的时间是 $O(N)$，每个元素读一次：访存*次数*是 $O(N)$（额外的存储只有两个数）。加起来每个元素要读三遍。下面的 `loads` 盯着我们自己写的 `safe` 来数。

# %%
y = safe(x)
print(y)
m, l = x.double().max(), torch.exp(x.double() - x.max()).sum()
print(
    f"m = {m:.0f}, l = e⁻² + e⁻³ + e⁰ + e⁻⁴ = {l:.6f}, m + log l = "
    f"{m + l.log():.6f}"
)

# %% tags=["check"]
from tilewise_lab.trace.softmax import loads

assert loads(safe, torch.randn(100)) == 3
assert torch.allclose(
    y, torch.tensor([0.112457, 0.041371, 0.830953, 0.015219]), atol=1e-6
)
assert math.isclose(
    l, math.exp(-2) + math.exp(-3) + 1 + math.exp(-4), rel_tol=1e-6
)
assert round(float(l), 6) == 1.203438
assert round(float(m + l.log()), 6) == 5.185182

# %% [markdown]
# And the order matters: run the second loop before the first has finished, with whatever maximum is known, and the
# denominator is wrong. (Why that mistake is worth making is the next lesson.)

# %% [markdown] lang="zh"
# 顺序确实要紧：如果第一个循环还没跑完，就用当时已知的最大值去跑第二个循环，分母就错了。（为什么这个错误值得一犯，下一课再说。）

# %%
m, l_early = torch.tensor(-torch.inf), torch.tensor(0.0)
for x_i in x:
    m = torch.maximum(m, x_i)
    l_early = l_early + torch.exp(x_i - m)
print(
    say(
        f"with the maximum of the moment: l = {l_early:.6f} instead of "
        f"{l:.6f}",
        f"用当时的最大值：l = {l_early:.6f}，而不是 {l:.6f}",
    )
)

# %% tags=["check"]
assert not math.isclose(l_early, float(l), rel_tol=0.1)

# %% [markdown]
# ## Row by row
#
# For a matrix, every row is its own softmax: nothing is shared, so all rows can run at once.

# %% [markdown] lang="zh"
# ## 逐行进行
#
# 对矩阵来说，每一行都是独立的 softmax：行与行之间什么也不共享，所以所有行可以同时进行。

# %%
matrix = torch.randn(5, 7)

# %% tags=["check"]
assert torch.allclose(safe(matrix), torch.softmax(matrix, -1), atol=1e-6)
assert torch.equal(safe(matrix)[2], safe(matrix[2]))

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `softmax(x)`, safe for $x = [1000, 0]$; `log_softmax(x)`, so that
# it survives $x = [0, -1000]$: the softmax of the second element is 0 in any float, but its logarithm is $-1000$; and
# `masked_softmax(x, seen)`, in which a row may see nothing at all. Get them with `tilewise learn 2 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `softmax(x)`，$x = [1000, 0]$ 时也安全；写出 `log_softmax(x)`，要经得起 $x = [0, -1000]$ 的考验：第二个元素的 softmax 在任何浮点格式里都是 0，但它的对数是 $-1000$；再写出 `masked_softmax(x, seen)`，其中一行可能一个元素也看不到。用 `tilewise learn 2 --exercise` 取得它们。
