# %% [markdown]
# # 2. Safe softmax
#
# Softmax turns scores into weights: positive, at most one, adding up to one.
#
#     softmax(x)_i = exp(x_i) / Σ_j exp(x_j)
#
# Written like that, it breaks. The exponential of 100 is 2.7·10⁴³, and float32 ends at 3.4·10³⁸. The repair is one line
# of algebra, and it is the line that everything later hangs on.

# %%
import math

import torch

from tilewise.reference import softmax as rung
from tilewise_lab.learn import picture, show
from tilewise_lab.trace.softmax import loads

x = torch.tensor([3.0, 2.0, 5.0, 1.0])
p = rung.naive(x)
print(p)
assert bool((p > 0).all())
assert bool((p <= 1).all())
assert math.isclose(float(p.sum()), 1.0, rel_tol=1e-6)

# %% [markdown]
# ## Where it breaks
#
# exp overflows where x passes log(largest number): 88.72 in float32, 11.09 in float16. Then inf / inf is no number.

# %%
rows = []
for dtype in (torch.float32, torch.float16):
    limit = math.log(torch.finfo(dtype).max)
    for value in (limit - 0.1, limit + 0.1, 100.0):
        y = torch.tensor([1.0, value], dtype=dtype)
        rows.append([str(dtype)[6:], f"{value:.2f}", rung.naive(y).tolist()[1], round(rung.safe(y).tolist()[1], 4)])
show(["dtype", "x", "naive", "safe"], rows)
assert [round(math.log(torch.finfo(t).max), 2) for t in (torch.float32, torch.float16)] == [88.72, 11.09]
assert rung.naive(torch.tensor([1.0, 100.0])).isnan().any()
assert rung.safe(torch.tensor([1.0, 100.0])).isfinite().all()

# %% [markdown]
# ## The repair
#
# Multiply numerator and denominator by the same c and nothing changes. Take c inside the exponent, as k = -log c:
#
#     exp(x_i) / Σ exp(x_j)  =  c·exp(x_i) / Σ c·exp(x_j)  =  exp(x_i - k) / Σ exp(x_j - k)
#
# Any k will do, in exact arithmetic. With k = max x no exponent is above 0, so every exponential lies in (0, 1], and the
# largest is exactly 1: the denominator can be neither infinite nor zero. (The shift makes the numbers smaller, not the
# work: there are as many exponentials as before.)

# %%
exact = torch.softmax(x.double(), -1)
ks = torch.linspace(-150, 150, 301)


def shifted(k):
    e = torch.exp(x - k)
    return e / e.sum()


errors = [float((shifted(k) - exact).abs().max()) for k in ks]
assert float((shifted(x.max()) - exact).abs().max()) < 1e-7
e = torch.exp(x - x.max())
assert bool(((e > 0) & (e <= 1)).all())
assert float(e.max()) == 1.0
for k in (-30.0, 7.0, 30.0):  # in float64 there is room for any of these shifts
    y = torch.exp(x.double() - k)
    assert torch.allclose(y / y.sum(), exact, rtol=1e-12)


def draw(axes):
    axes.semilogy(ks, [max(err, 1e-9) if err == err else 1.0 for err in errors], ".")
    axes.axvline(float(x.max()), color="green", label="k = max x")
    axes.set(
        xlabel="k", ylabel="error in float32 (1 = not a number)", title="Any shift is right, until the numbers run out"
    )
    axes.legend()


picture("02_shift", draw)

# %% [markdown]
# ## Three passes
#
# As an algorithm, with m for the maximum and l for the denominator:
#
#     m ← -∞;  for i: m ← max(m, x_i)
#     l ← 0;   for i: l ← l + exp(x_i - m)
#              for i: y_i ← exp(x_i - m) / l
#
# The second loop needs the first one's m, the third the second one's l: they cannot be swapped. Each loop is O(N) time
# and reads every element once: O(N) memory *accesses* (the extra storage is two numbers). In total each element is
# loaded three times. `loads` below wraps the reference's own code and counts.

# %%
assert loads(rung.safe, torch.randn(100)) == 3
y = rung.safe(x)
print(y)
assert torch.allclose(y, torch.tensor([0.112457, 0.041371, 0.830953, 0.015219]), atol=1e-6)
m, l = x.double().max(), torch.exp(x.double() - x.max()).sum()
print(f"m = {m:.0f}, l = e⁻² + e⁻³ + e⁰ + e⁻⁴ = {l:.6f}, m + log l = {m + l.log():.6f}")
assert math.isclose(l, math.exp(-2) + math.exp(-3) + 1 + math.exp(-4), rel_tol=1e-6)
assert round(float(l), 6) == 1.203438
assert round(float(m + l.log()), 6) == 5.185182

# %% [markdown]
# And the order matters: run the second loop before the first has finished, with whatever maximum is known, and the
# denominator is wrong. (Why that mistake is worth making is the next lesson.)

# %%
too_early = [float(state.l) for state in rung.wrong_local_max_states(x)][-1]
print(f"with the maximum of the moment: l = {too_early:.6f} instead of {l:.6f}")
assert not math.isclose(too_early, float(l), rel_tol=0.1)

# %% [markdown]
# ## Row by row
#
# For a matrix, every row is its own softmax: nothing is shared, so all rows can run at once.

# %%
matrix = torch.randn(5, 7)
assert torch.allclose(rung.safe(matrix), torch.softmax(matrix, -1), atol=1e-6)
assert torch.equal(rung.safe(matrix)[2], rung.safe(matrix[2]))

# %% [markdown]
# **Exercise.** Write `log_softmax(x)`, the logarithm of softmax, so that it survives x = [0, -1000]: the softmax of the
# second element is 0 in any float, but its logarithm is -1000.
