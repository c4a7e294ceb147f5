# %% [markdown]
# # 1. Attention, and why it is slow
#
# Every token asks a question (its row of Q), every token offers an answer (its row of V) under a label (its row of K).
# Attention mixes the answers, weighted by how well question and label agree:
#
#     O = softmax(Q Kᵀ / √d) V        Q, K (N, d)   S = Q Kᵀ (N, N)   P = softmax(S) (N, N)   O (N, d)
#
# The matrices Q, K, V, O grow with the length N. The two in the middle grow with N². This lesson measures what that
# costs, and finds that the arithmetic is not the problem.

# %%
import math

import torch

import tilewise
from tilewise.costs.cost import Call, naive_steps, traffic
from tilewise.costs.devices import device
from tilewise.reference import attention as rung
from tilewise_lab.learn import measured, picture, show
from tilewise_lab.machine import budget

torch.manual_seed(0)
q, k, v = (torch.randn(8, 4) for _ in range(3))
s = rung.scores(q, k)
p = torch.softmax(s, -1)
o = p @ v
show(["matrix", "shape"], [["Q", tuple(q.shape)], ["S", tuple(s.shape)], ["P", tuple(p.shape)], ["O", tuple(o.shape)]])
assert s.shape == p.shape == (8, 8)
assert o.shape == q.shape
assert torch.allclose(p.sum(-1), torch.ones(8))  # softmax works row by row: each row of P is a distribution

# %% [markdown]
# ## Many heads, and the part that matters
#
# A transformer layer runs several attentions side by side, on projections of the same tokens:
#
#     head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)        MultiHead(X) = Concat(head_1 .. head_h) W^O
#
# The projections are ordinary matrix products, which GPUs do well. FlashAttention, and tilewise, only touch the
# `Attention(...)` in the middle. Here is the whole layer, with tilewise inside; it agrees with torch's own.


# %%
class MultiHeadAttention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):  # (B, N, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each (B, N, H, d)
        return self.out(tilewise.attention(q, k, v).flatten(2))


theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
ours = MultiHeadAttention(32, 4)
ours.qkv.weight.data, ours.qkv.bias.data = theirs.in_proj_weight.data, theirs.in_proj_bias.data
ours.out = theirs.out_proj
x = torch.randn(2, 10, 32)
x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
a, (b, _) = ours(x_ours), theirs(x_theirs, x_theirs, x_theirs)
a.sum().backward()
b.sum().backward()
assert torch.allclose(a, b, atol=1e-5)
assert torch.allclose(x_ours.grad, x_theirs.grad, atol=1e-4)

# %% [markdown]
# How much of the layer is attention? The projections cost 8·N·width² FLOPs, attention 4·N²·width: the longer the
# sequence, the larger attention's share. At N = 2·width they are equal.

# %%
width = 2048
rows = []
for n in (512, 2048, 8192, 32768):
    call = Call(1, n, n, 16, 16, 128, 128)
    projections = 8 * n * width**2
    rows.append(
        [
            n,
            f"{projections / 1e9:.0f}",
            f"{call.flops() / 1e9:.0f}",
            f"{call.flops() / (call.flops() + projections):.0%}",
        ]
    )
show(["N", "projections (GFLOP)", "attention (GFLOP)", "attention's share"], rows)
half = Call(1, 2 * width, 2 * width, 16, 16, 128, 128).flops()
assert half == 8 * (2 * width) * width**2

layer = measured("layer")
if layer:
    show(
        ["N", "projections (ms)", "attention (ms)"],
        [[n, f"{t['projections_ms']:.2f}", f"{t['attention_ms']:.2f}"] for n, t in layer.items() if n.isdigit()],
        f"one layer on an {layer['device']}",
    )

# %% [markdown]
# ## The bill for memory
#
# A GPU has two memories that matter here. **HBM** is what the box says: 80 GB, and far away. **Shared memory** is next to
# the arithmetic: a hundred times smaller per processor, and an order of magnitude faster. A textbook implementation
# runs one kernel per step, and each kernel reads its inputs from HBM and writes its outputs back. For 4096 tokens P
# alone has 16.8 million entries, 64 MiB in float32, *per head*, and it is read and written several times.

# %%
assert budget.weights(4096) == (16_777_216, 64 * 2**20)
gpt2 = Call(batch=64, n_q=1024, n_k=1024, heads=16, kv_heads=16, d=64, dv=64, dtype="float16")
show(
    ["step", "passes over (N, N)", "GB"],
    [
        [step.name, step.passes, f"{(step.passes * gpt2.score_bytes + sum(map(gpt2.rows, step.rows))) / 1e9:.1f}"]
        for step in naive_steps(backward=True)
    ],
    "GPT-2 medium, 64 sequences of 1024 tokens: what the textbook moves, forward and backward",
)
bill = traffic(gpt2, backward=True)
print(f"naive {bill.naive / 1e9:.1f} GB; if the scores never left the chip: {bill.least / 1e9:.1f} GB")
assert bill.naive > 15 * bill.least

# %% [markdown]
# ## Which roof?
#
# Divide the work by the traffic: **arithmetic intensity**, in FLOPs per byte. A device has a ridge, its FLOP/s over its
# bytes/s. Left of it, the arithmetic units wait for memory; right of it, memory waits for them. Naive attention stands
# on the left, on every GPU. If the (N, N) matrices stayed on the chip, it would stand far on the right. *That* is the
# whole idea of FlashAttention: not fewer FLOPs, but fewer bytes.

# %%
call = Call(4, 4096, 4096, 16, 16, 64, 64)
points = {"naive": call.flops() / traffic(call).naive, "tiled": call.flops() / traffic(call).tiled}
for name in ("A100", "H100", "H200"):
    ridge = device(name).ridge("bfloat16")
    print(f"{name}: ridge at {ridge:.0f} FLOP/byte; naive {points['naive']:.0f}, tiled {points['tiled']:.0f}")
    assert points["naive"] < ridge < points["tiled"]

roofs = measured("roofs")


def draw(axes):
    from tilewise.costs.roofline import attainable, curve

    h200 = device("H200")
    line = curve(h200, "bfloat16")
    axes.loglog([x for x, _ in line], [y / 1e12 for _, y in line], color="black", label="H200, by its data sheet")
    if roofs:
        peak, slope = roofs["tflops"], roofs["gbps"] / 1e3
        axes.loglog(
            [x for x, _ in line], [min(peak, x * slope) for x, _ in line], ":", color="gray", label="as measured"
        )
    for name, x in points.items():
        axes.plot(x, attainable(x, h200, "bfloat16") / 1e12, "o", markersize=9, label=f"{name}: {x:.0f} FLOP/byte")
    axes.set(xlabel="FLOPs per byte of HBM traffic", ylabel="TFLOP/s at most", title="Attention under the roofline")
    axes.legend()


picture("01_roofline", draw)

# %% [markdown]
# ## The obstacle
#
# So: cut Q, K, V into blocks that fit into shared memory, compute a piece of O there, write it back, go on to the
# next. Matrix products allow that. Softmax does not, at first sight: the weight of *one* key is divided by a sum over
# *all* keys, which the block has not seen. A weight computed from half of a row is simply wrong:

# %%
half_a_row = torch.softmax(s[:, :4], -1)
print(
    "largest difference between weights from half a row and from all of it:",
    f"{(half_a_row - p[:, :4]).abs().max():.2f}",
)
assert (half_a_row - p[:, :4]).abs().max() > 0.1
assert math.isclose(float(p[0, :4].sum() + p[0, 4:].sum()), 1.0, rel_tol=1e-5)

# %% [markdown]
# The next lessons take softmax apart until it can be computed block by block, exactly.
#
# **Exercise.** Write `intensity(n, d, itemsize)`: FLOPs per byte of one head's naive forward, from scratch. Count the
# two products (2 FLOPs per multiply-add) and every matrix that each of the three kernels reads or writes.
