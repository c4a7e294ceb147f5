# %% [markdown]
# # 10. What makes a kernel fast
#
# Six tricks and two mysteries. The tricks: keep the matrix units fed (roofline), use fewer bits, fuse, recompute,
# coalesce (lesson 7), tile (lesson 4). The mysteries: why is a matrix of 1793 so much slower than one of 1792, and why did
# making a vocabulary *larger* make a model faster?

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import tilewise
from tilewise.costs.cost import Call, traffic
from tilewise.costs.devices import DEVICES, device
from tilewise.costs.roofline import attainable
from tilewise.costs.waves import cliffs, matmul_blocks, waves
from tilewise_lab.learn import has_triton, measured, picture, show
from tilewise_lab.machine import budget

# %% [markdown]
# ## Roofline
#
# FLOP/s ≤ min(peak, intensity · bandwidth). The slope is memory, the flat part is arithmetic, the ridge is where they meet.

# %%
h200 = device("H200")
ridge = h200.ridge("bfloat16")
assert attainable(ridge / 2, h200, "bfloat16") == h200.flops("bfloat16") / 2
assert attainable(2 * ridge, h200, "bfloat16") == h200.flops("bfloat16")
decode = Call(64, 1, 8192, 32, 32, 128, 128)
for name, call in (("training, 4096 tokens", Call(4, 4096, 4096, 16, 16, 128, 128)), ("decoding one token", decode)):
    intensity = call.flops() / traffic(call).tiled
    bound = "arithmetic" if intensity > ridge else "memory"
    print(f"{name}: {intensity:.0f} FLOP/byte against a ridge of {ridge:.0f}: bound by {bound}")
assert (
    decode.flops() / traffic(decode).tiled < 2
)  # every K and V byte is used for one token: nothing to be saved by tiling

# %% [markdown]
# ## Fewer bits
#
# Half the bits, half the traffic; and the matrix units multiply 16-bit numbers many times faster than 32-bit ones. They
# *add* in 32 bits, and so must everything that accumulates: a sum of many small terms in float16 stops growing when the
# terms fall below its last bit.

# %%
ones = torch.full((1, 10_000), 0.01, dtype=torch.float16)
in_half = torch.zeros((), dtype=torch.float16)
for x in ones[0]:
    in_half = in_half + x  # rounded to float16 after every addition
in_float = ones.float().sum()
print(f"10,000 times 0.01: {in_half:.1f} when summed in float16, {in_float:.1f} in float32")
assert abs(in_half - 100) > 20 * abs(in_float - 100)
out, lse = tilewise.attention(*(torch.randn(1, 8, 1, 16, dtype=torch.float16) for _ in range(3)), return_lse=True)
assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)  # m, l and O are float32 inside, and L stays so
rates = measured("precision")
if rates:
    show(["dtype", "TFLOP/s"], [[t, f"{rates[t]:.0f}"] for t in ("float32", "tf32", "bfloat16", "float16")])

# %% [markdown]
# ## Fusion
#
# y = relu(2x + 1)² - 3 as four or five operations reads and writes memory four or five times. As one kernel it reads x and
# writes y. The arithmetic is the same and costs nothing next to the traffic: eager takes five times the time of a copy,
# fused takes one. `torch.compile` does this for elementwise chains by itself.


# %%
def eager_bytes(n, operations=5):
    return operations * 2 * n * 4


def fused_bytes(n):
    return 2 * n * 4


assert eager_bytes(1000) == 5 * fused_bytes(1000)
if has_triton("the fused kernel"):
    import inspect

    from tilewise_lab.learn.kernels import chain

    print(inspect.getsource(chain.fn))
    x, y = torch.randn(1000), torch.empty(1000)
    chain[(4,)](x, y, 1000, BLOCK=256)
    assert torch.allclose(y, (2 * x + 1).relu().square() - 3, atol=1e-5)
times = measured("fusion")
if times:
    print({name: round(t, 2) for name, t in times.items() if isinstance(t, float)})
    assert times["triton_ms"] < times["eager_ms"] / 3

# %% [markdown]
# ## Recomputation
#
# The backward needs P again. Keep it (N² numbers, written and read back), or compute it again from Q, K and L? Computing it
# again costs one more matrix product and *saves* time, because the numbers would have travelled to HBM and back. In a
# whole model the same trade is called activation checkpointing; here it is exact and free of extra memory.

# %%
call = Call(1, 4096, 4096, 16, 16, 64, 64)
kept, recomputed = traffic(call, backward=True).naive, traffic(call, backward=True).tiled
print(
    f"keep P: {kept / 1e9:.1f} GB moved, {budget.weights(4096, 2, 16).bytes / 2**20:.0f} MiB held; compute it again: {recomputed / 1e9:.2f} GB, 0 MiB"
)
extra = 2 * call.pairs * call.d / h200.flops("bfloat16")
saved = (kept - recomputed) / h200.bandwidth
print(f"the extra product costs {extra * 1e6:.0f} us, the traffic saved {saved * 1e6:.0f} us on an H200")
assert extra < saved / 5

layer = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
x = torch.randn(8, 64, requires_grad=True)
(plain,) = torch.autograd.grad(layer(x).sum(), x)
(checkpointed,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum(), x)
assert torch.equal(plain, checkpointed)

# %% [markdown]
# ## Mystery 1: waves
#
# A GPU runs blocks in *waves*: as many at once as it has SMs (if one block fills an SM). In 256 × 128 tiles a matrix of
# 1792 × 1792 is 7 × 14 = 98 blocks: one wave on the 108 SMs of an A100, 91 % busy. One row and column more make 8 × 15 = 120
# blocks: a full wave and a second one with 12 blocks in it. Twice the time for a thousandth more work.
#
# The cliff belongs to the *device and the tile*, not to the number. On the 132 SMs of an H100 or H200 1793 is harmless,
# and the cliffs are at 2049 and 2817.

# %%
rows = []
for sms, n in ((108, 1792), (108, 1793), (132, 1793), (132, 2048), (132, 2049)):
    w = waves(matmul_blocks(n, n, (256, 128)), sms)
    rows.append([sms, n, w.blocks, w.waves, f"{w.efficiency:.1%}"])
show(["SMs", "n", "blocks", "waves", "busy"], rows)
assert rows[0][2:] == [98, 1, "90.7%"]
assert rows[1][2:] == [120, 2, "55.6%"]
assert rows[2][3] == 1
assert [n for n, _, _ in cliffs(range(1500, 2900), (256, 128), 132)] == [2049, 2817]
timed = measured("waves")


def draw(axes):
    ns = [*range(1024, 3073, 8), 1793, 2049, 2817]
    for name, color in (("A100", "tab:orange"), ("H200", "tab:green")):
        sms = DEVICES[name].sms
        axes.plot(
            sorted(ns),
            [waves(matmul_blocks(n, n, (256, 128)), sms).efficiency for n in sorted(ns)],
            color=color,
            label=f"{name}, {sms} SMs",
        )
    if timed:
        best = max(v for k, v in timed.items() if k.isdigit())
        kept = [int(k) for k in timed if k.isdigit()]
        axes.plot(
            kept, [timed[str(n)] / best for n in kept], "k.", label=f"measured on an {timed['device']}, of its best"
        )
    axes.set(
        xlabel="n of an n × n product",
        ylabel="busy share of the SMs",
        ylim=(0, 1.05),
        title="Wave quantisation, 256 × 128 tiles",
    )
    axes.legend()


picture("10_waves", draw)

# %% [markdown]
# Attention has the same tails: its blocks are (tokens / tile) · heads · batch. `tilewise explain` counts them.

# %%
told = tilewise.explain((1, 2049, 16, 100), (1, 2049, 16, 100), (1, 2049, 16, 100), device="H200")
assert any("2049" in advice.text for advice in told.advice)
assert any("pad D 100 to 128" in advice.text for advice in told.advice)

# %% [markdown]
# ## Mystery 2: alignment
#
# Plot the speed of matrix products against their size and the points fall into bands: the more often 2 divides the size, the
# faster. Rows then start at addresses that the hardware can load 16 bytes at a time, and tiles come out whole. It is why
# padding GPT-2's vocabulary from 50257 to 50304 = 64 · 786 = 128 · 393 made training faster (25 % in Karpathy's words).

# %%
assert budget.pad_to_multiple(50257, 64) == 50304 == 64 * 786 == 128 * 393
words = measured("vocabulary")
if words:
    print(f"last layer: {words['50257']:.2f} ms with 50257 words, {words['50304']:.2f} ms with 50304")
bands = measured("alignment")
if bands:

    def draw_bands(axes):
        sizes = [int(n) for n in bands if n.isdigit()]
        dots = axes.scatter(
            sizes,
            [bands[str(n)] for n in sizes],
            c=[budget.alignment(n).bit_length() - 1 for n in sizes],
            cmap="viridis",
        )
        axes.figure.colorbar(dots, label="n is divisible by 2 to the power of")
        axes.set(
            xlabel="n", ylabel="TFLOP/s", ylim=(0, None), title=f"torch's n × n × n product on an {bands['device']}"
        )

    picture("10_alignment", draw_bands)

# %% [markdown]
# ## A riddle for the road
#
# The same matrix product is *faster on zeros*. Nothing is skipped: but transistors that do not switch use no power, and
# a GPU at its power limit turns what it saves into clock rate. So benchmark on random data.

# %%
power = measured("zeros")
if power:
    print(f"{power['random']:.0f} TFLOP/s on random data, {power['zeros']:.0f} on zeros")

# %% [markdown]
# **Exercise.** Write `best_batch(tokens, heads, tile, slots, limit)`: the batch size up to `limit` for which attention's grid
# keeps the largest share of the slots busy (the smallest such batch).
