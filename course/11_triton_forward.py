# %% [markdown]
# # 11. The Triton forward, line by line
#
# Everything so far fits into one kernel of fifty lines. A program owns a block of queries; it walks over the blocks of keys they
# see; it keeps (m, l, acc) in registers. Here is the heart of tilewise's kernel, as it runs:

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import inspect
import math

import torch

import tilewise
from tilewise.costs.devices import DEVICES
from tilewise.kernels.portable import tiles
from tilewise_lab.learn import has_triton, measured, picture, show

HERE = has_triton("running the kernels")
if HERE:
    from tilewise.kernels.portable.forward import stream_keys
    from tilewise.kernels.tile import softmax_step

    print(inspect.getsource(softmax_step.fn))
    print(inspect.getsource(stream_keys.fn))

# %% [markdown]
# Line by line, beside the names that other kernels (and the notes) use:
#
# | here | elsewhere | what |
# |---|---|---|
# | `m_new = max(m, max(s)·unit)` | m_ij | the new running maximum |
# | `p = exp2(s·unit - pivot)` | P_block = exp(QK·scale - m_ij) | weights; exp2 is one instruction, so log₂e is folded into `unit` |
# | `alpha = exp2(m - pivot)` | alpha = exp(m_i - m_ij) | lesson 3's correction factor |
# | `l·alpha + sum(p)` | l_i = l_i·alpha + l_ij | the denominator |
# | `dot(p, v, acc·alpha)` | O_block = O_block·alpha + P V | the numerator |
# | `acc / l`, `logsumexp(m, l)` | O /= l_i; m_i += log(l_i) | the epilogue |
#
# The last line deserves care: what is stored for the backward is the **logsumexp** m + log l, though its variable is often still
# called m. And q_tile stays where it is for the whole loop; K's tile is read as it lies and transposed on the way
# (`tl.trans`), where older kernels used block pointers with swapped strides.
#
# ## Watched
#
# Below, `softmax_step` itself, run by Triton's interpreter on scores in blocks of 16 columns. After every step its m, l, alpha and p
# are those of the reference rung.

# %%
torch.manual_seed(0)
s = torch.randn(16, 64) * 3
if HERE:
    from tilewise_lab.learn.kernels import watch_softmax

    m, l, alpha = torch.empty(4, 16), torch.empty(4, 16), torch.empty(4, 16)
    p = torch.empty(16, 64)
    watch_softmax[(1,)](s, m, l, alpha, p, 64, ROWS=16, COLS=16)
    old = torch.full((16,), -torch.inf)
    for step in range(4):
        seen = s[:, : 16 * (step + 1)]
        assert torch.allclose(m[step], seen.amax(-1), rtol=1e-6)
        assert torch.allclose(l[step], torch.exp(seen - m[step][:, None]).sum(-1), rtol=1e-5)
        assert torch.allclose(alpha[step], torch.exp(old - m[step]), atol=1e-6)
        assert torch.allclose(
            p[:, 16 * step : 16 * (step + 1)],
            torch.exp(s[:, 16 * step : 16 * (step + 1)] - m[step][:, None]),
            atol=1e-5,
        )
        old = m[step]
    assert torch.allclose(m[-1] + l[-1].log(), s.logsumexp(-1), atol=1e-5)

    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    out, lse = tilewise.attention(q, k, v, causal=True, backend="triton", return_lse=True)
    exact, exact_lse = tilewise.attention(q.double(), k.double(), v.double(), causal=True, return_lse=True)
    print(f"the whole kernel against float64: {(out - exact).abs().max():.1e} and {(lse - exact_lse).abs().max():.1e}")
    assert torch.allclose(out.double(), exact, atol=1e-5)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-5)

# %% [markdown]
# ## Where it starts: l = 0 or l = 1?
#
# Theory says m = -∞, l = 0. Many kernels write l = 1, and get away with it: the first correction factor is e^{-∞} = 0 and wipes it out.
# Not if there is no first block: with no keys at all, l = 1 gives O = 0 / 1 = 0 and L = -∞, and l = 0 gives 0 / 0. And if m starts
# at a *finite* value, l = 1 stays: a silent extra key with score m and value 0, an "attention sink". tilewise starts at 0 and
# guards the division.

# %%
o = torch.zeros(1)
assert (o / 1.0).item() == 0.0
assert (o / 0.0).isnan()
none = tilewise.attention(torch.randn(1, 3, 1, 8), torch.randn(1, 0, 1, 8), torch.randn(1, 0, 1, 8), return_lse=True)
assert not none[0].any()
assert (none[1] == -math.inf).all()
x = torch.tensor([1.0, 2.0])
started_finite = torch.exp(x - 2) / (1.0 * math.exp(0.0 - 2) + torch.exp(x - 2).sum())  # m₀ = 0, l₀ = 1
with_sink = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1)[1:]
assert torch.allclose(started_finite, with_sink)

# %% [markdown]
# ## Masks: -∞, and nothing else
#
# Causal attention hides the keys after the query. A tile is then of one of three kinds: seen by all its rows (left of the diagonal, no
# mask needed), by some (on the diagonal), by none (skipped). Kernels often number these cases, "STAGE 1, 2, 3", and the same name means
# another thing in the outer and the inner function; the diagonal tile is not "right of the diagonal". tilewise has a *band* of
# visible keys instead, and one question per tile: does it touch the band's edge?
#
# Hidden scores must become -∞. A large negative number such as -10⁶ looks harmless and is not:

# %%
v16 = torch.arange(16.0)
hidden_all = torch.full((16,), -1e6)
print(
    f"all 16 keys hidden by -1e6: output {torch.softmax(hidden_all, -1) @ v16:.1f} (the mean of V), logsumexp {hidden_all.logsumexp(-1):.0f}"
)
assert torch.isclose(torch.softmax(hidden_all, -1) @ v16, v16.mean())
assert round(float(hidden_all.double().logsumexp(-1))) == -999_997
valid_but_low = torch.softmax(torch.tensor([-2e6, -1e6]), -1) @ torch.tensor([1.0, 100.0])  # the second key is hidden
print(f"a valid score below -1e6 loses to a hidden one: {valid_but_low:.0f} instead of 1")
assert valid_but_low == 100
assert torch.tensor(-1e6).half() == -math.inf  # and in float16 it is -inf after all
q, k, v = (torch.randn(1, n, 1, 8) for n in (4, 2, 2))
out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)  # queries 0 and 1 come before both keys
assert not out[0, :2].any()
assert (lse[0, 0, :2] == -math.inf).all()

# %% [markdown]
# With Sq ≠ Sk there are two conventions. tilewise and flash-attn align the *ends* (bottom-right): the last query sees all keys. torch's
# `is_causal` aligns the *starts* (top-left): query i sees keys 0 to i. Ask for it by leaving the later keys out:

# %%
q, k, v = (torch.randn(1, n, 2, 8) for n in (3, 5, 5))
bottom_right = tilewise.attention(q, k, v, causal=True)
assert torch.allclose(bottom_right[:, -1], tilewise.attention(q, k, v)[:, -1], atol=1e-6)
top_left = tilewise.attention(q, k[:, :3], v[:, :3], causal=True)
torchs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
assert torch.allclose(top_left, torchs.transpose(1, 2), atol=1e-5)
assert not torch.allclose(top_left, bottom_right, atol=1e-2)

# %% [markdown]
# ## Scale before max
#
# `max(QK)·scale` saves a multiplication, and is wrong for a negative scale: the largest product then has the *smallest* score. The
# exponents are no longer ≤ 0 and overflow.

# %%
products, scale = torch.tensor([-100.0, 100.0]), -1.0
careless = torch.exp(products * scale - products.max() * scale)
assert (careless / careless.sum()).isnan().any()
q, k, v = (torch.randn(1, 6, 1, 8) for _ in range(3))
assert torch.allclose(tilewise.attention(q, k, v, scale=-0.5), tilewise.attention(-q, k, v, scale=0.5), atol=1e-6)

# %% [markdown]
# ## Skipping pays
#
# A causal head of T × T tiles has T(T + 1)/2 that are seen at all: half the work as T grows.

# %%
from tilewise.costs.cost import Call
from tilewise.costs.predict import work_of

causal = Call(1, 4096, 4096, 1, 1, 128, 128, after=0)
steps = [n for _, n, _ in work_of(causal, tiles.Tile(128, 128, 8, 2), is_forward=True)]
print(f"{sum(steps)} of {32 * 32} tiles visited")
assert sum(steps) == 32 * 33 // 2
times = measured("causal")
if times:
    print(f"8192 tokens: full {times['full_ms']:.2f} ms, causal {times['causal_ms']:.2f} ms")
    assert times["full_ms"] > 1.6 * times["causal_ms"]

# %% [markdown]
# ## Which tile?
#
# Many kernels try a grid of tiles when they first run (`@triton.autotune`); the notes' kernel tries block_q in {64, 128}, block_kv in
# {32, 64}, stages in {3, 4, 7}, warps in {2, 4}: 24 kernels compiled and timed for every new shape. tilewise measures once, writes the
# winner into a table with the reason beside it, and never tunes at run time.

# %%
candidates = [
    tiles.Tile(bq, bkv, warps, stages)
    for bq in (64, 128)
    for bkv in (32, 64)
    for stages in (3, 4, 7)
    for warps in (2, 4)
]
assert len(candidates) == 24


def shared(tile, d=128, itemsize=2):
    """Bytes: the tile of Q, and as many of K and V as there are stages."""
    return itemsize * (tile.block_m * d + tile.stages * tile.block_n * (d + d))


fit = {name: sum(shared(tile) <= device.shared for tile in candidates) for name, device in DEVICES.items()}
print("of the 24, fit into shared memory at D = 128:", fit)
show(
    ["head dim", "tilewise's tile on Hopper", "on Ampere"],
    [[d, tiles.tile("forward", 90, 2, d), tiles.tile("forward", 80, 2, d)] for d in (64, 128, 256)],
)


def draw(axes):
    seen = [[n, 32 - n] for n in sorted(steps)]
    axes.bar(range(32), [a for a, _ in seen], label="visited")
    axes.bar(range(32), [b for _, b in seen], bottom=[a for a, _ in seen], color="lightgray", label="skipped")
    axes.set(xlabel="block of queries", ylabel="blocks of keys", title="Causal: a triangle of tiles")
    axes.legend()


picture("11_triangle", draw)

# %% [markdown]
# One more trap: `tl.dot` on float32 inputs uses TF32 by default, ten bits of mantissa. Someone who asks for float32 gets it from
# tilewise: the products are exact ("ieee") unless torch itself was told that TF32 is fine.

# %%
if HERE:
    from tilewise.kernels.gpu import Gpu
    from tilewise.kernels.portable import launch
    from tilewise.spec import Request, Spec

    q = torch.randn(1, 16, 1, 16)
    request, lse = Request(q, q, q, Spec(0.25)), torch.empty(1, 1, 16)
    made = launch.forward_launch(request, torch.empty_like(q), lse, Gpu("cuda", 90))
    assert made.options["PLAN"].PRECISION != "tf32"

# %% [markdown]
# **Exercise.** Write `span(first, rows, n_q, n_k, block)`: for a causal (bottom-right) block of queries, which keys are visited (lo, hi) and
# from where on a mask is needed (full_hi), as the kernel's `band` does it.
