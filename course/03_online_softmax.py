# %% [markdown]
# # 3. Online softmax, and why it is right
#
# Three passes are one too many: can the maximum and the denominator be found in the same loop? The denominator needs
# the maximum, and the maximum is not known before the end. So use the maximum *so far*, and when a larger one turns up,
# repair what has been summed. The repair is one multiplication.

# %%
import itertools
import math
import random

import torch

from tilewise.merge import union
from tilewise.reference import softmax as rung
from tilewise_lab import trace
from tilewise_lab.learn import picture
from tilewise_lab.trace.command import show_softmax

x = [3, 2, 5, 1]
told = trace.softmax(x)
show_softmax(told)

# %% [markdown]
# Look at element 3. Until then the maximum was 3, and l₂ = e^{3-3} + e^{2-3} was right for it. Now 5 arrives. Without a
# correction the sum mixes terms taken under 3 with one taken under 5:
#
#     wrong   l₃ = l₂ + e^{5-5}          = e⁰ + e⁻¹ + e⁰           = 2.367879
#     right   l₃ = l₂·e^{3-5} + e^{5-5}  = (e⁰ + e⁻¹)·e⁻² + e⁰     = 1.185122
#
# The factor e^{m_old - m_new} turns every old e^{x - m_old} into e^{x - m_new}, all at once. Where the maximum stays the
# factor is e⁰ = 1. At the first element it is e^{-∞} = 0, and multiplies l₀ = 0. (The notes print l² in this place; it is
# l₂, the second l, not a square.)

# %%
right, wrong = told["right"]["steps"], told["wrong"]["steps"]
assert [step["m"] for step in right] == [3, 3, 5, 5]
assert [round(step["factor"], 6) for step in right] == [0, 1, round(math.exp(-2), 6), 1]
assert round(wrong[2]["l"], 6) == 2.367879
assert round(right[2]["l"], 6) == 1.185122
assert round(right[3]["l"], 6) == 1.203438
assert [step["ok"] for step in wrong] == [True, True, False, False]
assert told["loads"] == {"safe": 3, "online": 2}  # one pass for (m, l), one for the outputs


def draw(axes):
    for name, color in (("right", "green"), ("wrong", "red")):
        axes.plot(range(1, 5), [step["l"] for step in told[name]["steps"]], "o-", color=color, label=name)
    exact = [sum(math.exp(v - max(x[:n])) for v in x[:n]) for n in range(1, 5)]
    axes.plot(range(1, 5), exact, "k_", markersize=18, label="exact")
    axes.set(
        xticks=range(1, 5),
        xticklabels=[f"x = {v}" for v in x],
        ylabel="denominator so far",
        title="One multiplication apart",
    )
    axes.legend()


picture("03_online", draw)

# %% [markdown]
# ## The proof, and its execution
#
# Claim: after n elements, m = max(x₁ .. x_n) and l = Σ_{j≤n} e^{x_j - m}.
#
# *n = 1.* m = max(-∞, x₁) = x₁ and l = 0·e^{-∞} + e^{x₁ - x₁} = 1. ✓
#
# *n → n + 1.* The maximum of maxima is the maximum. And
#
#     l_{n+1} = (Σ_{j≤n} e^{x_j - m_n})·e^{m_n - m_{n+1}} + e^{x_{n+1} - m_{n+1}}
#             =  Σ_{j≤n} e^{x_j - m_{n+1}}                + e^{x_{n+1} - m_{n+1}}  =  Σ_{j≤n+1} e^{x_j - m_{n+1}}   ✓
#
# The middle step, once with symbols, then on a thousand random vectors after *every* prefix:

# %%
try:
    import sympy

    x_j, m_n, m_next = sympy.symbols("x_j m_n m_next", real=True)
    assert sympy.simplify(sympy.exp(x_j - m_n) * sympy.exp(m_n - m_next) - sympy.exp(x_j - m_next)) == 0
    print("e^(x - m_n) · e^(m_n - m_{n+1}) = e^(x - m_{n+1}): sympy agrees")
except ModuleNotFoundError:
    print("(sympy is not installed: take the exponents' sum on trust)")

random.seed(0)
for _ in range(1000):
    y = torch.tensor([random.uniform(-50, 50) for _ in range(random.randint(1, 8))], dtype=torch.float64)
    for n, (m, l) in enumerate(rung.online_states(y), 1):
        assert m == y[:n].max()
        assert torch.isclose(l, torch.exp(y[:n] - m).sum(), rtol=1e-12)
print("invariant held after every prefix of 1000 vectors")

# %% [markdown]
# ## What was really proved
#
# Nothing in the proof needs the second state to be a *single* element. Two states over any two sets of elements merge:
#
#     m = max(m_a, m_b)        l = l_a·e^{m_a - m} + l_b·e^{m_b - m}
#
# and the merge is associative and commutative, with (-∞, 0) as its zero. So the elements may come one by one, block by
# block, from different processors, in any order. Everything fast about attention follows: blocks of keys
# (FlashAttention), chunks of a cache (decoding), keys on different GPUs (context parallelism).

# %%
y = torch.randn(6, dtype=torch.float64)
states = [rung.State(v, torch.ones((), dtype=torch.float64)) for v in y]
results = set()
for order in itertools.permutations(states):
    a, b, c, d, e, f = order
    pairs = rung.merge(rung.merge(rung.merge(a, b), rung.merge(c, d)), rung.merge(e, f))
    results.add((round(float(pairs.m), 12), round(float(pairs.l), 12)))
print(f"720 orders, {len(results)} result: {results.pop()}")
assert not results
nothing = rung.nothing(y)
assert rung.merge(nothing, states[0]) == states[0]

# %% [markdown]
# A state that has seen nothing is (-∞, 0), and merging two of those meets -∞ - (-∞), which is no number. Masked scores
# are exactly such elements, so "x cannot be -∞" (as the notes say) is not an option: the code subtracts 0 instead.

# %%
empty = rung.merge(nothing, nothing)
assert (float(empty.m), float(empty.l)) == (-math.inf, 0.0)
masked = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
assert torch.allclose(rung.online(masked)[[1, 3]], torch.softmax(torch.tensor([1.0, 2.0]), -1))

# %% [markdown]
# `tilewise.merge` is the same fact for outputs: (o, lse) of some keys and (o, lse) of others make (o, lse) of all.

# %%
s, v = torch.randn(3, 10, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)


def part(columns):
    return torch.softmax(s[:, columns], -1) @ v[columns], s[:, columns].logsumexp(-1)


o, lse = union(part(slice(0, 3)), part(slice(3, 10)))
assert torch.allclose(o, torch.softmax(s, -1) @ v)
assert torch.allclose(lse, s.logsumexp(-1))

# %% [markdown]
# **Exercise.** Write `merge(a, b)` for states (m, l) yourself, on plain Python floats, so that it is right for two empty
# states too. Then `denominator(xs)` by folding it over a list in *any* order you like.
