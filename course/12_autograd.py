# %% [markdown]
# # 12. Derivatives, from a slope to autograd
#
# The backward pass is one idea applied many times: near a point, every smooth function is linear. Its derivative is
# that linear map, and the derivative of a chain is the product of the maps. This lesson builds it up from one number
# to whole matrices.

# %% [markdown] lang="zh"
# # 12. 导数：从斜率到自动求导
#
# 反向传播是把一个想法用上许多遍：在一点附近，每个光滑函数都是线性的。它的导数就是这个线性映射，而一串函数的导数就是这些映射的乘积。这一课从一个数一直讲到整个矩阵。

# %%
import math
from itertools import pairwise

import torch

from tilewise_lab.derivation import matmul
from tilewise_lab.learn import picture, say, show
from tilewise_lab.trace import graph

torch.manual_seed(0)

# %% [markdown]
# ## One number in, one number out
#
# $$f(x + \Delta) \approx f(x) + f'(x) \cdot \Delta$$
#
# The error of this line shrinks with $\Delta^2$: halve the step and it falls to a quarter.

# %% [markdown] lang="zh"
# ## 一个数进，一个数出
#
# $$f(x + \Delta) \approx f(x) + f'(x) \cdot \Delta$$
#
# 这条直线的误差随 $\Delta^2$ 缩小：步长减半，误差降到四分之一。


# %%
def f(x):
    return x**3 - 2 * x


def slope(x):
    return 3 * x**2 - 2


steps = [2.0**-i for i in range(1, 12)]
errors = [abs(f(1.5 + d) - (f(1.5) + slope(1.5) * d)) for d in steps]
ratios = [a / b for a, b in pairwise(errors)]
print(
    say(
        "each halving of the step divides the error by",
        "步长每减半，误差除以",
    ),
    [round(r, 2) for r in ratios[-3:]],
)


# %% tags=["figure"]
def draw(axes):
    axes.loglog(steps, errors, "o-", label="|f(x + Δ) - (f(x) + f'(x)Δ)|")
    axes.loglog(
        steps,
        [errors[-1] * (d / steps[-1]) ** 2 for d in steps],
        "--",
        label="Δ²",
    )
    axes.set(xlabel="Δ", title="A derivative is right to first order")
    axes.legend()


picture(
    "12_first_order",
    draw,
    alt=say(
        "Error of the first-order approximation over the step, on "
        "two logarithmic axes: it runs parallel to the square of the "
        "step.",
        "一阶近似的误差随步长 Δ 的变化（双对数坐标）：与 Δ² 平行。",
    ),
)

# %% tags=["check"]
assert abs(ratios[-1] - 4) < 0.05

# %% [markdown]
# ## A chain
#
# If $y = g(x)$ and $z = f(y)$, a step $\Delta x$ becomes $g'(x) \Delta x$, and that becomes $f'(y) g'(x) \Delta x$.
# Derivatives along a path multiply; where paths meet, they add. A program that remembers what it computed can do this
# by itself, from the end to the start. Here is one, whole: a number, what it was made from, and its derivative by each
# of those. At work on
#
# $$\varphi = (a w_1 + b_1)^2 \quad y_1 = a w_1 \quad y_2 = y_1 + b_1 \quad \partial \varphi / \partial w_1 = 2 y_2 \cdot 1 \cdot a = 2 a (a w_1 + b_1)$$

# %% [markdown] lang="zh"
# ## 链条
#
# 如果 $y = g(x)$，$z = f(y)$，那么一步 $\Delta x$ 变成 $g'(x) \Delta x$，再变成 $f'(y) g'(x) \Delta x$。沿一条路径，导数相乘；几条路径汇合处，导数相加。一个记得自己算过什么的程序，可以自己从终点往起点做这件事。下面就是一个，完完整整：一个数、它由什么得来、以及对每个来源的导数。用它来算
#
# $$\varphi = (a w_1 + b_1)^2 \quad y_1 = a w_1 \quad y_2 = y_1 + b_1 \quad \partial \varphi / \partial w_1 = 2 y_2 \cdot 1 \cdot a = 2 a (a w_1 + b_1)$$


# %%
class Value:
    def __init__(self, value, made_from=()):
        self.value, self.made_from, self.gradient = value, made_from, 0.0

    def __add__(self, other):
        return Value(self.value + other.value, ((self, 1.0), (other, 1.0)))

    def __mul__(self, other):
        return Value(
            self.value * other.value,
            ((self, other.value), (other, self.value)),
        )

    def __pow__(self, n):
        return Value(self.value**n, ((self, n * self.value ** (n - 1)),))

    def exp(self):
        return Value(math.exp(self.value), ((self, math.exp(self.value)),))

    def order(self, seen=None):
        """Everything this was made from, each value after its own sources."""
        seen = {} if seen is None else seen
        if self not in seen:
            for source, _ in self.made_from:
                source.order(seen)
            seen[self] = None
        return list(seen)

    def backward(self):
        self.gradient = 1.0
        for value in reversed(self.order()):
            for source, local in value.made_from:
                # along a path: times; where paths meet: plus
                source.gradient += value.gradient * local


a, w1, b1 = Value(2.0), Value(3.0), Value(1.0)
y1 = a * w1
y2 = y1 + b1
phi = y2**2
phi.backward()
names = {"a": a, "w₁": w1, "b₁": b1, "y₁": y1, "y₂": y2, "φ": phi}
show(
    say(["", "value", "∂φ/∂"], ["", "值", "∂φ/∂"]),
    [[name, x.value, x.gradient] for name, x in names.items()],
)

x, y = Value(0.7), Value(-0.3)
z = (x * y).exp() * (x * x + Value(1.0)) ** -1
z.backward()
tx, ty = (
    torch.tensor(v, dtype=torch.float64, requires_grad=True)
    for v in (0.7, -0.3)
)
tz = (tx * ty).exp() / (tx * tx + 1)
tz.backward()
# the library's own, which draws its graph on the page
gx, gy = (graph.Value(0.7), graph.Value(-0.3))
((gx * gy).exp() / (gx * gx + 1.0)).backward()

# %% tags=["check"]
assert phi.value == 49
assert w1.gradient == 2 * 2 * (2 * 3 + 1) == 28
assert abs(x.gradient - tx.grad.item()) < 1e-12
assert abs(y.gradient - ty.grad.item()) < 1e-12
assert (
    abs(gx.gradient - tx.grad.item()) + abs(gy.gradient - ty.grad.item())
    < 1e-12
)

# %% [markdown]
# ## Many in, one out: the gradient
#
# $$f(x + \Delta x) \approx f(x) + \nabla f \cdot \Delta x$$
#
# The gradient is the direction in which $f$ grows fastest, so walking against it makes $f$ smaller: gradient descent.

# %% [markdown] lang="zh"
# ## 多进一出：梯度
#
# $$f(x + \Delta x) \approx f(x) + \nabla f \cdot \Delta x$$
#
# 梯度是 $f$ 增长最快的方向，所以逆着它走，$f$ 就变小：梯度下降。

# %%
target = torch.tensor([3.0, -1.0])
w = torch.zeros(2)
losses = []
for _ in range(60):
    gradient = 2 * (w - target)  # of |w - target|²
    losses.append(float(((w - target) ** 2).sum()))
    w = w - 0.1 * gradient
print(
    say(
        f"loss {losses[0]:.1f} → {losses[-1]:.1e}; w = "
        f"{[round(v, 3) for v in w.tolist()]}",
        f"损失 {losses[0]:.1f} → {losses[-1]:.1e}；w = "
        f"{[round(v, 3) for v in w.tolist()]}",
    )
)

# %% tags=["check"]
assert torch.allclose(w, target, atol=1e-4)
assert losses == sorted(losses, reverse=True)

# %% [markdown]
# ## Many in, many out: the Jacobian
#
# For $f: \mathbb{R}^n \to \mathbb{R}^m$ the linear map is an $m \times n$ matrix, $\Delta y \approx J \Delta x$, one
# row per output. For tensors it is a tensor with all the axes of the output and all of the input, and "times" becomes
# a contraction over the shared axes.

# %% [markdown] lang="zh"
# ## 多进多出：雅可比矩阵
#
# 对 $f: \mathbb{R}^n \to \mathbb{R}^m$，线性映射是一个 $m \times n$ 矩阵，$\Delta y \approx J \Delta x$，每个输出一行。对张量来说，它是一个拥有输出的全部轴和输入的全部轴的张量，“乘”就变成了对公共轴的缩并。


# %%
def g(x):
    return torch.stack([x[0] * x[1], x[1].sin(), x[0] ** 2])


x = torch.tensor([1.3, 0.4], dtype=torch.float64)
jacobian = torch.autograd.functional.jacobian(g, x)
by_hand = torch.tensor(
    [[x[1], x[0]], [0.0, x[1].cos()], [2 * x[0], 0.0]], dtype=torch.float64
)
small = torch.tensor([1e-6, -2e-6], dtype=torch.float64)

# %% tags=["check"]
assert jacobian.shape == (3, 2)
assert torch.allclose(jacobian, by_hand)
assert torch.allclose(g(x + small) - g(x), jacobian @ small, atol=1e-10)

# %% [markdown]
# ## The Jacobian that is never built
#
# $Y = X W$ with $X$ $(N, M)$ and $W$ $(M, D)$. The Jacobian $\partial Y / \partial X$ has $N D N M$ entries. For $N = M = 1024$ and $D = 2048$ these are $2.2 \cdot 10^{12}$ numbers, 8.8 TB in float32. It is never stored, because it is not needed: only the *product* of the gradient $dY$ with it is, and that is a matrix product again:
#
# $$dX = dY W^\top \quad dW = X^\top dY$$
#
# The shapes alone tell you: $dX$ must be $(N, M)$, and from $dY$ and $W$ there is one way to get there.

# %% [markdown] lang="zh"
# ## 从不构造的雅可比矩阵
#
# $Y = X W$，其中 $X$ 是 $(N, M)$，$W$ 是 $(M, D)$。雅可比 $\partial Y / \partial X$ 有 $N D N M$ 个元素。$N = M = 1024$、$D = 2048$ 时就是 $2.2 \cdot 10^{12}$ 个数，float32 下 8.8 TB。它从不存储，因为并不需要它：要的只是梯度 $dY$ 与它的*乘积*，而这又是矩阵乘法：
#
# $$dX = dY W^\top \quad dW = X^\top dY$$
#
# 光看形状就知道：$dX$ 必须是 $(N, M)$，而用 $dY$ 和 $W$ 凑出它只有一种办法。

# %%
entries = 1024 * 2048 * 1024 * 1024
print(
    say(
        f"{entries:.1e} entries, {4 * entries / 1e12:.1f} TB",
        f"{entries:.1e} 个元素，{4 * entries / 1e12:.1f} TB",
    )
)
X, W, dY = (
    torch.randn(*shape, dtype=torch.float64)
    for shape in ((2, 3), (3, 4), (2, 4))
)
# (2, 4, 2, 3): tiny, so it can be built
full = torch.autograd.functional.jacobian(lambda t: t @ W, X)
contracted = torch.einsum("nd,ndij->ij", dY, full)
dX, dW = matmul.gradients(X, W, dY)
full_w = torch.autograd.functional.jacobian(lambda t: X @ t, W)

# the worked example: X 1 × 3, W 3 × 4
row, weights = (torch.randn(1, 3), torch.randn(3, 4))
one = torch.autograd.functional.jacobian(lambda t: t @ weights, row).squeeze()
show(
    say(["", "shape"], ["", "形状"]),
    [
        ["X", (1, 3)],
        ["W", (3, 4)],
        ["dY/dX = Wᵀ", tuple(one.shape)],
        ["dX = dY Wᵀ", (1, 3)],
        ["dW = Xᵀ dY", (3, 4)],
    ],
)

# %% tags=["check"]
assert round(4 * entries / 1e12, 1) == 8.8
assert full.shape == (2, 4, 2, 3)
assert torch.allclose(contracted, dX)
assert torch.allclose(dX, dY @ W.T)
assert torch.allclose(torch.einsum("nd,ndij->ij", dY, full_w), dW)
assert torch.allclose(dW, X.T @ dY)
assert torch.allclose(one, weights.T)

# %% [markdown]
# **Exercises.** Three, of rising difficulty: add two operations to the library's small autograd, `tanh` and `maximum`
# (of two values; the larger one gets the gradient); then write `linear_backward(x, w, dy)`, the gradients of
# $Y = X W + b$. Get them with `tilewise learn 12 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：给库里的微型自动求导加两个运算，`tanh` 和 `maximum`（两个值取较大者，梯度也归较大者）；再写出 `linear_backward(x, w, dy)`，即 $Y = X W + b$ 的梯度。用 `tilewise learn 12 --exercise` 取得它们。
