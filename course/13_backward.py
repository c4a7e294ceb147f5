# %% [markdown]
# # 13. The backward, by hand and in tiles
#
# The forward is S = QKᵀ/√d, P = softmax(S), O = PV. Given dO, what are dQ, dK, dV? Read the chain from its end, with lesson 12's two rules
# for products and one new rule for softmax. Then the surprise: the tiled backward needs *nothing* that the forward did not already
# keep, except one number per row.

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import torch

import tilewise
from tilewise.reference import attention as rung
from tilewise.reference import gradient
from tilewise_lab import trace
from tilewise_lab.learn import has_triton, measured, picture, show

torch.manual_seed(0)
n, d = 12, 4
q, k, v, do = (torch.randn(n, d, dtype=torch.float64) for _ in range(4))

# %% [markdown]
# ## Softmax's Jacobian
#
# For one row p = softmax(s):
#
#     ∂p_j/∂s_k = p_j (1 - p_j) if j = k, else -p_j p_k        that is  J = diag(p) - p pᵀ
#
# It is symmetric, and its rows sum to zero: adding a constant to all scores changes nothing (lesson 2). Multiplied with a
# gradient dP it needs no matrix: dS = P ∘ (dP - rowsum(P ∘ dP)).

# %%
s = torch.randn(5, dtype=torch.float64)
p = torch.softmax(s, -1)
jacobian = gradient.softmax_jacobian(p)
assert torch.allclose(jacobian, torch.autograd.functional.jacobian(lambda t: torch.softmax(t, -1), s))
assert torch.allclose(jacobian, jacobian.T)
assert torch.allclose(jacobian.sum(-1), torch.zeros(5, dtype=torch.float64), atol=1e-15)
assert torch.isclose(jacobian[1, 1], p[1] * (1 - p[1]))
assert torch.isclose(jacobian[0, 2], -p[0] * p[2])
dp = torch.randn(5, dtype=torch.float64)
assert torch.allclose(gradient.softmax_vjp(p, dp), jacobian @ dp)

# %% [markdown]
# ## By hand
#
#     dV = Pᵀ dO          dP = dO Vᵀ          dS = P ∘ (dP - rowsum(P ∘ dP))          dQ = dS K/√d          dK = dSᵀ Q/√d
#
# (The 1/√d belongs to S, so it is in dQ and dK. It is easily forgotten, and then everything trains, only worse.)

# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
expected = torch.autograd.grad(rung.naive(*leaves), leaves, do)
found = gradient.naive(q, k, v, do)
for name, a, b in zip(("dQ", "dK", "dV"), found, expected, strict=True):
    print(name, f"{(a - b).abs().max():.1e}")
    assert torch.allclose(a, b)

# %% [markdown]
# ## In tiles
#
# Two things stand in the way of doing this block by block: P, which was never stored, and rowsum(P ∘ dP), which needs the whole row.
#
# *P is one exponential away.* The forward kept the logsumexp L, so P_ij = exp(S_ij - L_i), any block of it, in any order, exact.
#
# *The row sum is known beforehand.* Σ_j P_ij dP_ij = Σ_j P_ij (dO_i · V_j) = dO_i · Σ_j P_ij V_j = dO_i · O_i. So D = rowsum(dO ∘ O), one number per row.

# %%
o, lse = rung.fa2(q, k, v, rows=4, columns=4)
P = torch.softmax(rung.scores(q, k), -1)
assert torch.allclose(torch.exp(rung.scores(q, k) - lse[:, None]), P)
D = (do * o).sum(-1)
assert torch.allclose(D, (P * (do @ v.T)).sum(-1))
for a, b in zip(gradient.tiled(q, k, v, o, lse, do, rows=4, columns=4), expected, strict=True):
    assert torch.allclose(a, b)

# %% [markdown]
# ## Who owns a sum?
#
# dK_j and dV_j are sums over queries, dQ_i a sum over keys. In a single loop over key blocks every program wants to add to every dQ_i: through
# HBM, with atomic additions whose order changes from run to run. tilewise's portable backward makes *two* passes instead: the owners of
# keys sum dK and dV, then the owners of queries sum dQ. Seven products instead of five, but every sum has one owner and one order: two
# runs agree bit for bit.

# %%
totals = {
    owners: trace.attention(32, 32, d=4, rows=8, columns=8, backward=True, owners=owners)["totals"]
    for owners in ("one", "two")
}
show(
    ["", "dQ written", "dQ read back", "FLOPs"],
    [[o, t["stored"]["dq"], t["loaded"].get("dq", 0), t["flops"]] for o, t in totals.items()],
    "one loop, or two owners (32 tokens in blocks of 8)",
)
assert totals["one"]["stored"]["dq"] == 4 * totals["two"]["stored"]["dq"]
assert "dq" not in totals["two"]["loaded"]
assert trace.attention(32, 32, rows=8, columns=8, backward=True, causal=True)["error"] < 1e-12

# %% [markdown]
# On Hopper there is a third way: a single loop, five products, and dQ summed in HBM after all, by wide atomic additions or, with
# `deterministic=True`, in a fixed order for which the programs wait. There the two products saved are worth more than the traffic.

# %%
times = measured("sums")
if times:
    ways = {"two kernels": "two owners, seven products", "atomic": "one loop, atomic", "in order": "one loop, in order"}
    show(["dQ is summed by", "ms of the backward"], [[words, f"{times[way]:.2f}"] for way, words in ways.items()])

# %% [markdown]
# ## In Triton, as a node of autograd
#
# `tilewise.attention` is one node: Q, K, V → O, with this backward. Checked against finite differences in float64, and the Triton kernels
# against float64 in the interpreter; through the logsumexp as well, which adds one term, dL, to D.

# %%
small = [torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
assert torch.autograd.gradcheck(lambda *x: tilewise.attention(*x, causal=True, return_lse=True), small)

if has_triton("the Triton backward"):
    tensors = [torch.randn(1, 24, 2, 16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    grads = []
    for inputs, backend in ((tensors, "triton"), (exact, "reference")):
        out, lse = tilewise.attention(*inputs, causal=True, backend=backend, return_lse=True)
        grads.append(torch.autograd.grad((out.sum() + (2 * lse).sum()), inputs))
    for name, a, b in zip(("dQ", "dK", "dV"), *grads, strict=True):
        print(f"Triton {name}: {(a - b).abs().max():.1e}")
        assert torch.allclose(a.double(), b, atol=1e-4)
    again = torch.autograd.grad(
        sum(tilewise.attention(*tensors, causal=True, backend="triton", return_lse=True)[0].sum().reshape(1)), tensors
    )
    more = torch.autograd.grad(
        sum(tilewise.attention(*tensors, causal=True, backend="triton", return_lse=True)[0].sum().reshape(1)), tensors
    )
    assert all(torch.equal(a, b) for a, b in zip(again, more, strict=True))  # bit for bit

# %% [markdown]
# ## What is kept
#
# Nothing N × N, forward or backward. The gradient costs Q, K, V, O and one logsumexp per row.

# %%
lengths = [256, 1024, 4096, 16384]
kept = [4 * m * 64 * 2 + 4 * m for m in lengths]
stored_p = [m * m * 2 for m in lengths]


def draw(axes):
    axes.loglog(lengths, [b / 2**20 for b in stored_p], "o-", base=2, label="keep P")
    axes.loglog(lengths, [b / 2**20 for b in kept], "o-", base=2, label="keep Q, K, V, O and L")
    axes.set(xlabel="tokens", ylabel="MiB per head (D = 64, 16 bit)", title="What the backward needs")
    axes.legend()


picture("13_kept", draw)
assert math.isclose(kept[3] / kept[2], 4)
assert stored_p[3] / stored_p[2] == 16

# %% [markdown]
# **Exercise.** Write `block_gradients(q, k, v, do, lse, delta)` for one block: its contributions to dQ, dK and dV, from its own rows alone.
