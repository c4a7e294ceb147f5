# %% [markdown]
# # 12. Derivatives, from a slope to autograd
#
# The backward pass is one idea applied many times: near a point, every smooth function is linear. Its derivative is that linear map,
# and the derivative of a chain is the product of the maps. This lesson builds it up from one number to whole matrices.

# %%
from itertools import pairwise

import torch

from tilewise.reference import matmul
from tilewise_lab.learn import picture, show
from tilewise_lab.trace.command import show_graph
from tilewise_lab.trace.graph import Value, notes_example

torch.manual_seed(0)

# %% [markdown]
# ## One number in, one number out
#
#     f(x + Δ) ≈ f(x) + f'(x)·Δ
#
# The error of this line shrinks with Δ²: halve the step and it falls to a quarter.


# %%
def f(x):
    return x**3 - 2 * x


def slope(x):
    return 3 * x**2 - 2


steps = [2.0**-i for i in range(1, 12)]
errors = [abs(f(1.5 + d) - (f(1.5) + slope(1.5) * d)) for d in steps]
ratios = [a / b for a, b in pairwise(errors)]
print("each halving of the step divides the error by", [round(r, 2) for r in ratios[-3:]])
assert abs(ratios[-1] - 4) < 0.05


def draw(axes):
    axes.loglog(steps, errors, "o-", label="|f(x + Δ) - (f(x) + f'(x)Δ)|")
    axes.loglog(steps, [errors[-1] * (d / steps[-1]) ** 2 for d in steps], "--", label="Δ²")
    axes.set(xlabel="Δ", title="A derivative is right to first order")
    axes.legend()


picture("12_first_order", draw)

# %% [markdown]
# ## A chain
#
# If y = g(x) and z = f(y), a step Δx becomes g'(x)Δx, and that becomes f'(y)g'(x)Δx. Derivatives along a path multiply; where paths
# meet, they add. A program that remembers what it computed can do this by itself, from the end to the start. Ours is a hundred lines
# (`tilewise/trace/graph.py`); here it is at work on φ = (a·w₁ + b₁)², with ∂φ/∂w₁ = 1 · 2y₂ · 1 · a = 2a(aw₁ + b₁):

# %%
graph = notes_example(a=2.0, w1=3.0, b1=1.0)
show_graph(graph)
by_name = {node["name"]: node for node in graph["nodes"]}
assert by_name["φ"]["value"] == 49
assert by_name["w1"]["gradient"] == 2 * 2 * (2 * 3 + 1) == 28

x, y = Value(0.7), Value(-0.3)
z = (x * y).exp() / (x * x + 1.0)
z.backward()
tx, ty = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, -0.3))
tz = (tx * ty).exp() / (tx * tx + 1)
tz.backward()
assert abs(x.gradient - tx.grad.item()) < 1e-12
assert abs(y.gradient - ty.grad.item()) < 1e-12

# %% [markdown]
# ## Many in, one out: the gradient
#
# y_new ≈ y_old + ∇f · Δx. The gradient is the direction in which f grows fastest, so walking against it makes f smaller: gradient
# descent.

# %%
target = torch.tensor([3.0, -1.0])
w = torch.zeros(2)
losses = []
for _ in range(60):
    gradient = 2 * (w - target)  # of |w - target|²
    losses.append(float(((w - target) ** 2).sum()))
    w = w - 0.1 * gradient
print(f"loss {losses[0]:.1f} → {losses[-1]:.1e}; w = {[round(v, 3) for v in w.tolist()]}")
assert torch.allclose(w, target, atol=1e-4)
assert losses == sorted(losses, reverse=True)

# %% [markdown]
# ## Many in, many out: the Jacobian
#
# For f: ℝⁿ → ℝᵐ the linear map is an m × n matrix, Δy ≈ J Δx, one row per output. For tensors it is a tensor with all the axes of the
# output and all of the input, and "times" becomes a contraction over the shared axes.


# %%
def g(x):
    return torch.stack([x[0] * x[1], x[1].sin(), x[0] ** 2])


x = torch.tensor([1.3, 0.4], dtype=torch.float64)
jacobian = torch.autograd.functional.jacobian(g, x)
by_hand = torch.tensor([[x[1], x[0]], [0.0, x[1].cos()], [2 * x[0], 0.0]], dtype=torch.float64)
assert jacobian.shape == (3, 2)
assert torch.allclose(jacobian, by_hand)
small = torch.tensor([1e-6, -2e-6], dtype=torch.float64)
assert torch.allclose(g(x + small) - g(x), jacobian @ small, atol=1e-10)

# %% [markdown]
# ## The Jacobian that is never built
#
# Y = X W with X (N, M) and W (M, D). ∂Y/∂X has N·D·N·M entries. For N = M = 1024 and D = 2048 these are 2.2·10¹² numbers, 8.8 TB in
# float32. Nobody stores that, because nobody needs it: what is asked for is the *product* of the gradient dY with it, and that
# is a matrix product again:
#
#     dX = dY Wᵀ        dW = Xᵀ dY
#
# The shapes alone tell you: dX must be (N, M), and from dY (N, D) and W (M, D) there is one way to get there.

# %%
entries = 1024 * 2048 * 1024 * 1024
print(f"{entries:.1e} entries, {4 * entries / 1e12:.1f} TB")
assert round(4 * entries / 1e12, 1) == 8.8
X, W, dY = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3), (3, 4), (2, 4)))
full = torch.autograd.functional.jacobian(lambda t: t @ W, X)  # (2, 4, 2, 3): tiny, so it can be built
assert full.shape == (2, 4, 2, 3)
contracted = torch.einsum("nd,ndij->ij", dY, full)
dX, dW = matmul.gradients(X, W, dY)
assert torch.allclose(contracted, dX)
assert torch.allclose(dX, dY @ W.T)
full_w = torch.autograd.functional.jacobian(lambda t: X @ t, W)
assert torch.allclose(torch.einsum("nd,ndij->ij", dY, full_w), dW)
assert torch.allclose(dW, X.T @ dY)

row, weights = torch.randn(1, 3), torch.randn(3, 4)  # the worked example: X 1 × 3, W 3 × 4
one = torch.autograd.functional.jacobian(lambda t: t @ weights, row).squeeze()
assert torch.allclose(one, weights.T)
show(
    ["", "shape"],
    [["X", (1, 3)], ["W", (3, 4)], ["dY/dX = Wᵀ", tuple(one.shape)], ["dX = dY Wᵀ", (1, 3)], ["dW = Xᵀ dY", (3, 4)]],
)

# %% [markdown]
# **Exercise.** Add two operations to a small autograd: `tanh` and `maximum` (of two values; the larger one gets the gradient). Return the
# value and the local derivatives.
