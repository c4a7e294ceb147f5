# %% [markdown]
# # 6. FlashAttention, 1 and 2
#
# Lesson 5's steps can be run in two orders. FlashAttention (2022) keeps a block of *keys* near and streams the queries past
# it. FlashAttention-2 (2023) keeps a block of *queries* and streams the keys. The arithmetic is the same to the last bit;
# the traffic, and the parallelism, are not.
#
#     FA1   for K_j, V_j:                                  FA2   for Q_i:
#             for Q_i:  load O_i, m_i, l_i                         m, l, O ← -∞, 0, 0
#                       step, divide by l                          for K_j, V_j:  step
#                       store O_i, m_i, l_i                        store O / l and L = m + log l

# %%
# needs: compiler
import math

import torch

import tilewise
from tilewise import AttentionError
from tilewise.costs.cost import Call, traffic
from tilewise.costs.devices import KB, device
from tilewise.reference import attention as rung
from tilewise_lab import trace
from tilewise_lab.learn import has_triton, measured, picture, show
from tilewise_lab.machine import budget

torch.manual_seed(0)

# %% [markdown]
# ## The same result, another bill
#
# In FA1 the output, the maximum and the denominator of every row travel to HBM and back for every block of keys. In FA2
# they stay in registers until the row is done: O is written once, and of m and l only their combination, the
# **logsumexp** L = m + log l. FA2 pays by reading K and V once per block of queries, but those reads hit the cache,
# because all blocks of a head read the same K and V at about the same time.

# %%
q, k, v = (torch.randn(64, 8, dtype=torch.float64) for _ in range(3))
o1, m, l = rung.fa1(q, k, v, rows=16, columns=16)
o2, lse = rung.fa2(q, k, v, rows=16, columns=16)
exact = rung.naive(q, k, v)
assert torch.allclose(o1, exact)
assert torch.allclose(o2, exact)
assert torch.allclose(m + l.log(), lse)
assert torch.allclose(lse, rung.scores(q, k).logsumexp(-1))  # log Σ e^x = x_max + log Σ e^{x - x_max}

told = {order: trace.attention(64, 64, d=8, rows=16, columns=16, order=order)["totals"] for order in ("fa1", "fa2")}
names = ["q", "k", "v", "o", "m", "l", "lse"]
show(
    ["", *names, "all"],
    [
        [f"{order} {way}", *(total[way].get(name, 0) for name in names), sum(total[way].values())]
        for order, total in told.items()
        for way in ("loaded", "stored")
    ],
    "bytes between HBM and SRAM, 64 tokens in blocks of 16",
)
assert told["fa1"]["stored"]["o"] == 4 * told["fa2"]["stored"]["o"]
assert set(told["fa2"]["stored"]) == {"o", "lse"}
assert told["fa1"]["flops"] == told["fa2"]["flops"]

# %% [markdown]
# And FA2's outer loop is over queries, whose blocks do not know of each other: they run on as many processors as there
# are blocks. FA1's outer loop is over keys, which all write the same O: only heads and batch can run in parallel.
#
# ## The tiles of a real call
#
# 4096 tokens, head dim 64, tiles of 64: Q is 64 tiles, rows 0 to 64 up to 4032 to 4096, and K and V the same. A tile of
# scores is 64 × 64. One program owns one *row of tiles* and loops over all its keys (not one program per tile of scores,
# as one sometimes reads: then the programs of a row would have to talk to each other). The tiles cut the sequence, never
# the head dim: a score needs the whole dot product.

# %%
tiles = budget.tiles(4096, 64)
print(tiles[0], tiles[-1])
assert len(tiles) == 64
q, k, v = (torch.randn(4096, 64) for _ in range(3))
assert torch.equal(q[tiles[0].start : tiles[0].stop], q[0:64])
assert torch.equal(q[tiles[-1].start : tiles[-1].stop], q[4032:4096])
s11 = rung.scores(q[:64], k[:64])
assert s11.shape == (64, 64)
assert torch.allclose(s11, q[:64] @ k[:64].T / math.sqrt(64))
out = tilewise.attention(*(x[None, :, None] for x in (q, k, v)))[0, :, 0]
assert out.shape == (4096, 64)
assert torch.allclose(out[:64], rung.naive(q[:64], k, v), atol=1e-5)

# %% [markdown]
# V may have a width of its own, and any head dim up to 512 will do (the kernels pad it to a power of two inside):

# %%
for d, dv in ((64, 64), (40, 72), (1, 3)):
    q, k, v = torch.randn(1, 9, 2, d), torch.randn(1, 11, 2, d), torch.randn(1, 11, 2, dv)
    assert tilewise.attention(q, k, v).shape == (1, 9, 2, dv)
try:
    tilewise.attention(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2, 16))
except AttentionError as error:
    print("a mistake is named:", error)

# %% [markdown]
# ## What must fit where
#
# P for 4096 tokens: 16.8 million numbers, 64 MiB. A tile of it: 16 KiB. Per block a GPU gives 48 KB of shared memory
# without asking, and on request 163 KB on an A100, 227 KB on an H100 or H200. Q, K, V and P tiles of 64 in float16 take
# 32 KiB and fit anywhere. All five, with O, in float32 take 80 KiB and do not fit into 48.

# %%
assert budget.weights(4096).bytes == 64 * 2**20
assert budget.tile_bytes(64, 64) == 16 * KB
half, full = budget.shared_bytes(64, 64, 64, itemsize=2), budget.shared_bytes(64, 64, 64, itemsize=4, with_output=True)
print(f"four tiles in float16: {half // KB} KiB; five in float32: {full // KB} KiB")
assert (half, full) == (32 * KB, 80 * KB)
show(
    ["device", "without asking", "on request", "largest square tile, D 128, 16 bit"],
    [
        [
            name,
            f"{d.shared_static // KB} KB",
            f"{d.shared // KB} KB",
            budget.largest_square_tile(d.shared, 128, itemsize=2),
        ]
        for name, d in ((n, device(n)) for n in ("A100", "H100", "H200", "RTX 4090"))
    ],
)
try:
    trace.attention(256, 256, d=64, rows=64, columns=64, sram=48 * KB)
except AttentionError as error:
    print("too much for 48 KB in float32:", error)
assert trace.attention(256, 256, d=64, rows=64, columns=64, itemsize=2, sram=48 * KB)["error"] < 1e-12

# %% [markdown]
# In a real kernel the compiler decides where things live: the running m, l and O in registers, the tiles of Q, K, V in
# shared memory. It can be asked without a GPU:

# %%
if has_triton("the compiler's report"):
    told_h200 = tilewise.explain(
        (4, 4096, 16, 64), (4, 4096, 16, 64), (4, 4096, 16, 64), device="H200", backend="triton", compiled=True
    )
    used = told_h200.resources["forward"]
    assert used.spills == 0
    assert used.shared <= device("H200").shared

# %% [markdown]
# ## 40 GB become 4
#
# The FlashAttention paper measured, for GPT-2 medium (64 sequences of 1024 tokens, 16 heads of 64, float16, forward and
# backward) on an A100: 40.3 GB of HBM traffic with a standard implementation, 4.4 GB with FlashAttention; 41.7 ms against
# 7.3 ms. The traffic follows from the shape. One pass over all scores is 2.147 GB. The eleven passes that no naive
# implementation can avoid make 25 GB; with the masking and dropout kernels of the time 45 GB. FA1 with blocks of 256
# keys makes 4.6 GB of rows, and 0.1 of statistics.

# %%
gpt2 = Call(batch=64, n_q=1024, n_k=1024, heads=16, kv_heads=16, d=64, dv=64, dtype="float16")
least, most = traffic(gpt2, backward=True), traffic(gpt2, backward=True, masked=True, dropout=True)
show(
    ["", "GB", "the paper"],
    [
        ["one pass over the scores", f"{gpt2.score_bytes / 1e9:.3f}", ""],
        ["naive, least", f"{least.naive / 1e9:.1f}", ""],
        ["naive, with mask and dropout", f"{most.naive / 1e9:.1f}", "40.3"],
        ["FA1 order, blocks of 256", f"{most.fa1 / 1e9:.2f}", "4.4"],
        ["FA2 order (tilewise)", f"{most.tiled / 1e9:.2f}", ""],
    ],
)
assert abs(most.naive / 40.3e9 - 1) < 0.15
assert abs(most.fa1 / 4.4e9 - 1) < 0.15
print(
    f"9.2 times less traffic ({40.3 / 4.4:.1f}), 5.7 times faster ({41.7 / 7.3:.1f}): the rest of the time is arithmetic"
)
here = measured("gpt2")
if here:
    print(f"on an {here['device']}: naive {here['naive_ms']:.1f} ms, tilewise {here['tilewise_ms']:.1f} ms")


def draw(left, right):
    bars = {"naive": most.naive, "FA1": most.fa1, "FA2": most.tiled, "least": most.least}
    left.bar(list(bars), [b / 1e9 for b in bars.values()], color=["tab:red", "tab:orange", "tab:green", "gray"])
    left.set(ylabel="GB", title="HBM traffic, GPT-2 medium, forward + backward")
    ns = [2**i for i in range(9, 16)]
    grown = measured("memory")
    right.loglog(
        ns, [budget.weights(n, 2, heads=16).bytes / 2**20 for n in ns], "--", base=2, label="P alone (16 heads, 16 bit)"
    )
    for name in ("naive", "tilewise") if grown else ():
        right.loglog(
            [int(n) for n in grown[name]], list(grown[name].values()), "o-", base=2, label=f"{name}, measured peak"
        )
    right.set(xlabel="tokens", ylabel="MiB", title="Quadratic, or linear")
    right.legend()


picture("06_traffic", draw, panels=(1, 2), size=(11, 4.5))

# %% [markdown]
# ## And it does not overflow
#
# The running maximum is a maximum: scores of ±10,000 are as harmless as any, in half precision too.

# %%
for dtype in (torch.float16, torch.bfloat16):
    q = torch.full((1, 4, 1, 16), 50.0, dtype=dtype)
    k = torch.cat([q, -q], 1)
    out, lse = tilewise.attention(q, k, k, scale=0.25, return_lse=True)
    assert lse.max() >= 9_900
    assert out.isfinite().all()

# %% [markdown]
# **Exercise.** Write `hbm_bytes(n, d, rows, columns, order, itemsize)`: the bytes that the forward loads and stores for one
# head, for both orders, as the traces above count them (statistics are itemsize bytes each too).
