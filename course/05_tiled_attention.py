# %% [markdown]
# # 5. Tiled attention: wrong first, then right
#
# Lesson 4 computed (Q Kᵀ) V block by block, lesson 3 found softmax's denominator block by block. Put together they make
# exact attention that never holds a row of weights. But first the obvious way, because it is wrong in an instructive
# way, and because several explanations of FlashAttention print exactly that.

# %%
import math

import torch

from tilewise.reference import attention as rung
from tilewise_lab import trace
from tilewise_lab.learn import picture, show

torch.manual_seed(0)
q, k, v = (torch.randn(8, 4, dtype=torch.float64) for _ in range(3))
exact = rung.naive(q, k, v)

# %% [markdown]
# ## softmax*
#
# Call softmax without its division softmax*: the exponentials, shifted by the maximum *of the block*.
#
#     softmax*(S_ij) = exp(S_ij - rowmax(S_ij))
#
# For a block [a b; c d] whose rows have their maxima at a and d it is [e^{a-a} e^{b-a}; e^{c-d} e^{d-d}]: a one in every row.

# %%
a, b, c, d = 2.0, 1.0, 0.0, 3.0
star = rung.softmax_star(torch.tensor([[a, b], [c, d]], dtype=torch.float64))
by_hand = [[math.exp(a - a), math.exp(b - a)], [math.exp(c - d), math.exp(d - d)]]
print(star)
assert torch.allclose(star, torch.tensor(by_hand, dtype=torch.float64))

# %% [markdown]
# ## Wrong
#
# P_ij = softmax(S_ij) for each block, O_i += P_ij V_j. Every block normalises by its own sum, so with four blocks of
# keys the weights of a row add up to four. (Using softmax* without any correction is no better: each block is then
# shifted by a different maximum, and their sums cannot be added.)

# %%
wrong = rung.wrong_local_softmax(q, k, v, rows=2, columns=2)
weight = rung.wrong_local_softmax(q, k, torch.ones(8, 1, dtype=torch.float64), rows=2, columns=2)
print(f"weights of a row add up to {weight.mean():.4f}; largest error of the output {(wrong - exact).abs().max():.2f}")
assert torch.allclose(weight, torch.full((8, 1), 4.0, dtype=torch.float64))
assert (wrong - exact).abs().max() > 1

# %% [markdown]
# ## Right
#
# A block of rows Q_i keeps three things: m (the maximum of each row so far), l (its denominator so far), O (its numerator
# so far). At the start m = -∞, l = 0, O = 0. For every block of keys:
#
#     S = Q_i K_jᵀ/√d               m' = max(m, rowmax(S))          P = exp(S - m')
#     l ← l·exp(m - m') + rowsum(P)         O ← diag(exp(m - m'))·O + P V_j         m ← m'
#
# and after the last block O ← diag(l)⁻¹ O. The correction is lesson 3's, applied to the numerator too. diag(x)·O scales
# each row by its own number; its inverse divides.

# %%
x, o = torch.rand(2, dtype=torch.float64) + 0.5, torch.randn(2, 4, dtype=torch.float64)
assert torch.allclose(torch.diag(x) @ o, x[:, None] * o)
assert torch.allclose(torch.linalg.inv(torch.diag(x)), torch.diag(1 / x))
assert torch.equal(rung.rescale(x, o), x[:, None] * o)

start = rung.nothing(q[:2], v)
assert start.m.tolist() == [-math.inf] * 2
assert start.l.tolist() == [0, 0]
assert start.o.abs().sum() == 0

rows = []
for j, state in enumerate(rung.states(q[:2], k, v, columns=2), 1):
    seen = rung.naive(q[:2], k[: 2 * j], v[: 2 * j])
    so_far = rung.rescale(1 / state.l, state.o)
    assert torch.allclose(so_far, seen)  # the invariant: O / l is attention over the keys seen so far
    rows.append([j, *(f"{value:.3f}" for value in (*state.m, *state.l)), f"{(so_far - exact[:2]).abs().max():.3f}"])
show(["block", "m₁", "m₂", "l₁", "l₂", "distance to the final output"], rows)
assert torch.allclose(so_far, exact[:2])

# %% [markdown]
# After every block the state holds the *exact* attention over the keys it has seen. Nothing is approximated, and the
# last division only happens once.
#
# ## Where everything lives
#
# Below, the same computation through a far memory (HBM) and a near one (SRAM). Blocks of Q, K, V go in, blocks of O come
# out; S and P exist for one step, near the processor, and are never stored. Try it yourself with
# `tilewise trace attention --sq 8 --sk 8 --block 2`.

# %%
told = trace.attention(8, 8, d=4, rows=2, columns=2)
assert told["error"] < 1e-12
moved = {**told["totals"]["loaded"], **told["totals"]["stored"]}
print("bytes moved:", moved)
print("most bytes in SRAM at once:", told["totals"]["peak"])
assert not {"s", "p"} & set(moved)
longer = trace.attention(64, 64, d=4, rows=2, columns=2)
assert longer["totals"]["peak"] == told["totals"]["peak"]  # eight times the length, the same SRAM


def draw(left, right):
    for axes, title, values in (
        (left, "wrong: local softmax", (wrong - exact).abs()),
        (right, "right: online softmax", (rung.fa2(q, k, v, 2, 2)[0] - exact).abs()),
    ):
        image = axes.imshow(values.log10().clamp(-17, 1), vmin=-17, vmax=1, cmap="RdYlGn_r", aspect="auto")
        axes.set(title=title, xlabel="column of O", ylabel="token")
        axes.figure.colorbar(image, ax=axes, label="log₁₀ error")


picture("05_wrong_and_right", draw, panels=(1, 2))

# %% [markdown]
# ## Who can work at the same time?
#
# Rows of Q do not know of each other: each block of rows is an independent job, one per processor. *Within* a row the
# blocks of keys come one after the other (or are merged at the end, as lesson 3 allows).

# %%
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as processors:
    parts = list(processors.map(lambda q_i: rung.fa2(q_i, k, v, rows=2, columns=2)[0], q.split(2)))
assert torch.allclose(torch.cat(parts), exact)
o, lse = rung.split_keys(q, k, v, rows=2, columns=2, chunk=4)
assert torch.allclose(o, exact)

# %% [markdown]
# **Exercise.** Write `step(state, s, v)`: one block of the loop above. Scores come in as `s` (some of them may be -∞: masked),
# and a row that has seen nothing but masked keys must stay (-∞, 0, 0), without a NaN.
