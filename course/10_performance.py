# %% [markdown]
# # 10. What makes a kernel fast
#
# Six tricks and two mysteries. The tricks: keep the matrix units fed (roofline), use fewer bits, fuse, recompute,
# coalesce (lesson 7), tile (lesson 4). The mysteries: why is a matrix of 1793 so much slower than one of 1792, and why
# did
# making a vocabulary *larger* make a model faster?

# %% [markdown] lang="zh"
# # 10. 什么让 kernel 跑得快
#
# 六个技巧，两个谜。技巧：喂饱矩阵单元（屋顶线模型）、少用几位、融合、重计算、合并访存（第 7 课）、分块（第 4 课）。谜：为什么 1793 的矩阵比 1792 的慢那么多？为什么把词表*加大*，模型反而更快？

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import tilewise
from tilewise_lab.costs.cost import Call, traffic
from tilewise_lab.costs.devices import DEVICES, device
from tilewise_lab.costs.waves import matmul_blocks, waves
from tilewise_lab.learn import has_triton, measured, picture, say, show
from tilewise_lab.machine import budget

# %% [markdown]
# ## Roofline
#
# $$\text{FLOP/s} \le \min(\text{peak}, \text{intensity} \cdot \text{bandwidth})$$
#
# The slope is memory, the flat part is arithmetic, the ridge is where they meet.

# %% [markdown] lang="zh"
# ## 屋顶线
#
# $$\text{FLOP/s} \le \min(\text{peak}, \text{intensity} \cdot \text{bandwidth})$$
#
# 斜坡是内存，平顶是算术，两者相交处是屋脊。


# %%
def roof(intensity, device, dtype="bfloat16"):
    return min(device.flops(dtype), intensity * device.bandwidth)


h200 = device("H200")
ridge = h200.ridge("bfloat16")
decode = Call(64, 1, 8192, 32, 32, 128, 128)
for name, call in (
    (
        say("training, 4096 tokens", "训练，4096 个 token"),
        Call(4, 4096, 4096, 16, 16, 128, 128),
    ),
    (say("decoding one token", "解码一个 token"), decode),
):
    intensity = call.flops() / traffic(call).tiled
    bound = (
        say("arithmetic", "算术")
        if intensity > ridge
        else say("memory", "内存")
    )
    print(
        say(
            f"{name}: {intensity:.0f} FLOP/byte against a ridge of "
            f"{ridge:.0f}: bound by {bound}",
            f"{name}：{intensity:.0f} FLOP/字节，屋脊在 {ridge:.0f}："
            f"受限于{bound}",
        )
    )

# %% tags=["check"]
from tilewise_lab.costs.roofline import attainable

assert roof(ridge / 2, h200) == h200.flops("bfloat16") / 2
assert roof(2 * ridge, h200) == h200.flops("bfloat16")
for intensity in (1, ridge, 1000):
    assert roof(intensity, h200) == attainable(intensity, h200, "bfloat16")
# every K and V byte is used for one token: nothing to be saved by tiling
assert decode.flops() / traffic(decode).tiled < 2

# %% [markdown]
# ## Fewer bits
#
# Half the bits, half the traffic; and the matrix units multiply 16-bit numbers many times faster than 32-bit ones.
# They
# *add* in 32 bits, and so must everything that accumulates: a sum of many small terms in float16 stops growing when
# the
# terms fall below its last bit.

# %% [markdown] lang="zh"
# ## 少用几位
#
# 位数减半，搬运量减半；而且矩阵单元做 16 位乘法比 32 位快许多倍。但它们用 32 位来*加*，凡是累加的都必须如此：在 float16 里累加许多小项，一旦小项低于末位，和就不再增长。

# %%
ones = torch.full((1, 10_000), 0.01, dtype=torch.float16)
in_half = torch.zeros((), dtype=torch.float16)
for x in ones[0]:
    in_half = in_half + x  # rounded to float16 after every addition
in_float = ones.float().sum()
print(
    say(
        f"10,000 times 0.01: {in_half:.1f} when summed in float16, "
        f"{in_float:.1f} in float32",
        f"10,000 个 0.01 相加：用 float16 得 {in_half:.1f}，用 float32 得 "
        f"{in_float:.1f}",
    )
)
out, lse = tilewise.attention(
    *(torch.randn(1, 8, 1, 16, dtype=torch.float16) for _ in range(3)),
    return_lse=True,
)
rates = measured("precision")
if rates:
    show(
        ["dtype", "TFLOP/s"],
        [
            [t, f"{rates[t]:.0f}"]
            for t in ("float32", "tf32", "bfloat16", "float16")
        ],
    )

# %% tags=["check"]
assert abs(in_half - 100) > 20 * abs(in_float - 100)
# m, l and O are float32 inside, and L stays so
assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)

# %% [markdown]
# ## Fusion
#
# $y = \mathrm{relu}(2 x + 1)^2 - 3$ as four or five operations reads and writes memory four or five times. As one kernel it reads $x$ and writes $y$. The arithmetic is the same and costs nothing next to the traffic: eager takes five times the time of a copy, fused takes one. `torch.compile` does this for elementwise chains by itself.

# %% [markdown] lang="zh"
# ## 融合
#
# $y = \mathrm{relu}(2 x + 1)^2 - 3$ 拆成四五个操作，就要读写内存四五遍。写成一个 kernel，就只读 $x$、写 $y$。算术一点没变，和搬运相比不值一提：逐个操作的耗时是一次复制的五倍，融合后只有一倍。逐元素的操作链，`torch.compile` 自己就会融合。


# %%
def eager_bytes(n, operations=5):
    return operations * 2 * n * 4


def fused_bytes(n):
    return 2 * n * 4


if has_triton("the fused kernel"):
    import triton
    import triton.language as tl

    @triton.jit
    def chain(x, y, n, BLOCK: tl.constexpr):
        """Four operations, one trip to memory: y = relu(2x + 1)² - 3."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n)
        v = 2 * v + 1
        v = tl.maximum(v, 0.0)
        v = v * v
        tl.store(y + i, v - 3, mask=i < n)

    x, y = torch.randn(1000), torch.empty(1000)
    chain[(4,)](x, y, 1000, BLOCK=256)
times = measured("fusion")
if times:
    print(
        {
            name: round(t, 2)
            for name, t in times.items()
            if isinstance(t, float)
        }
    )

# %% tags=["check"]
if times:
    assert times["triton_ms"] < times["eager_ms"] / 3
if has_triton():
    assert torch.allclose(y, (2 * x + 1).relu().square() - 3, atol=1e-5)
assert eager_bytes(1000) == 5 * fused_bytes(1000)

# %% [markdown]
# ## Recomputation
#
# The backward needs $P$ again. Keep it ($N^2$ numbers, written and read back), or compute it again from $Q$, $K$ and
# $L$? Computing it again costs one more matrix product and *saves* time, because the numbers would have travelled to
# HBM and back. In a whole model the same trade is called activation checkpointing; here it is exact and free of extra
# memory.

# %% [markdown] lang="zh"
# ## 重计算
#
# 反向传播还要用到 $P$。存下来（$N^2$ 个数，写出去再读回来），还是用 $Q$、$K$、$L$ 重新算？重新算要多做一次矩阵乘法，却*省*时间，因为这些数本来要到 HBM 走一个来回。在整个模型的层面，同样的取舍叫做激活重计算（activation checkpointing）；在这里它是精确的，而且不需要额外的内存。

# %%
call = Call(1, 4096, 4096, 16, 16, 64, 64)
kept, recomputed = (
    traffic(call, backward=True).naive,
    traffic(call, backward=True).tiled,
)
print(
    say(
        f"keep P: {kept / 1e9:.1f} GB moved, "
        f"{budget.weights(4096, 2, 16).bytes / 2**20:.0f} MiB held; compute "
        f"it again: {recomputed / 1e9:.2f} GB, 0 MiB",
        f"保存 P：搬运 {kept / 1e9:.1f} GB，占用 "
        f"{budget.weights(4096, 2, 16).bytes / 2**20:.0f} MiB；重新计算："
        f"{recomputed / 1e9:.2f} GB，0 MiB",
    )
)
extra = 2 * call.pairs * call.d / h200.flops("bfloat16")
saved = (kept - recomputed) / h200.bandwidth
print(
    say(
        f"the extra product costs {extra * 1e6:.0f} us, the traffic saved "
        f"{saved * 1e6:.0f} us on an H200",
        f"在 H200 上，多做的乘法花 {extra * 1e6:.0f} us，省下的搬运值 "
        f"{saved * 1e6:.0f} us",
    )
)

layer = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
)
x = torch.randn(8, 64, requires_grad=True)
(plain,) = torch.autograd.grad(layer(x).sum(), x)
(checkpointed,) = torch.autograd.grad(
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum(), x
)

# %% tags=["check"]
assert extra < saved / 5
assert torch.equal(plain, checkpointed)

# %% [markdown]
# ## Mystery 1: waves
#
# A GPU runs blocks in *waves*: as many at once as it has SMs (if one block fills an SM). In 256 × 128 tiles a matrix
# of
# 1792 × 1792 is 7 × 14 = 98 blocks: one wave on the 108 SMs of an A100, 91 % busy. One row and column more make 8 × 15
# = 120
# blocks: a full wave and a second one with 12 blocks in it. Twice the time for a thousandth more work.
#
# The cliff belongs to the *device and the tile*, not to the number. On the 132 SMs of an H100 or H200 1793 is
# harmless,
# and the cliffs are at 2049 and 2817.

# %% [markdown] lang="zh"
# ## 谜之一：波
#
# GPU 一*波*一波地运行线程块：有多少个 SM，就同时运行多少个（假设一个块占满一个 SM）。用 256 × 128 的块，1792 × 1792 的矩阵有 7 × 14 = 98 块：在 A100 的 108 个 SM 上是一波，91 % 忙碌。行列各多一，就是 8 × 15 = 120 块：满满一波，再加只有 12 块的第二波。工作量多了千分之一，时间却翻了一倍。
#
# 悬崖属于*设备和块的大小*，不属于那个数字。在 H100 或 H200 的 132 个 SM 上，1793 毫无问题，悬崖在 2049 和 2817。


# %%
def blocks_of(n, tile=(256, 128)):
    return -(-n // tile[0]) * -(-n // tile[1])


rows = []
for sms, n in (
    (108, 1792),
    (108, 1793),
    (132, 1793),
    (132, 2048),
    (132, 2049),
):
    blocks = blocks_of(n)
    in_waves = -(-blocks // sms)
    rows.append(
        [sms, n, blocks, in_waves, f"{blocks / (in_waves * sms):.1%}"]
    )
show(
    say(
        ["SMs", "n", "blocks", "waves", "busy"],
        ["SM 数", "n", "块数", "波数", "忙的比例"],
    ),
    rows,
)
timed = measured("waves")


# %% tags=["figure"]
def draw(axes):
    ns = [*range(1024, 3073, 8), 1793, 2049, 2817]
    for name, color in (("A100", "tab:orange"), ("H200", "tab:green")):
        sms = DEVICES[name].sms
        axes.plot(
            sorted(ns),
            [
                waves(matmul_blocks(n, n, (256, 128)), sms).efficiency
                for n in sorted(ns)
            ],
            color=color,
            label=f"{name}, {sms} SMs",
        )
    if timed:
        best = max(v for k, v in timed.items() if k.isdigit())
        kept = [int(k) for k in timed if k.isdigit()]
        axes.plot(
            kept,
            [timed[str(n)] / best for n in kept],
            "k.",
            label=f"measured on an {timed['device']}, of its best",
        )
    axes.set(
        xlabel="n of an n × n product",
        ylabel="busy share of the SMs",
        ylim=(0, 1.05),
        title="Wave quantisation, 256 × 128 tiles",
    )
    axes.legend()


picture(
    "10_waves",
    draw,
    alt=say(
        "Busy share of the SMs over the size n of an n by n product: "
        "it rises in steps to above 0.9 and drops when a new wave "
        "begins, at other sizes for an A100 than for an H200; the "
        "measured points show the drops at the H200's sizes.",
        "SM 的忙碌比例随 n × n 矩阵乘法的 n 的变化：一级一级升到 0.9 "
        "以上，新的一波开始时突然下降；A100 与 H200 下降的位置不同；"
        "实测的点在 H200 的位置下降。",
    ),
)

# %% tags=["check"]
from tilewise_lab.costs.waves import cliffs

for sms, n, blocks, in_waves, _ in rows:
    found = waves(matmul_blocks(n, n, (256, 128)), sms)
    assert (found.blocks, found.waves) == (blocks, in_waves)
assert rows[0][2:] == [98, 1, "90.7%"]
assert rows[1][2:] == [120, 2, "55.6%"]
assert rows[2][3] == 1
assert [n for n, _, _ in cliffs(range(1500, 2900), (256, 128), 132)] == [
    2049,
    2817,
]

# %% [markdown]
# Attention has the same tails: its blocks are (tokens / tile) · heads · batch. `tilewise explain` counts them.

# %% [markdown] lang="zh"
# 注意力也有同样的尾巴：它的块数是（token 数 / 块大小）· 头数 · batch。`tilewise explain` 会替你数。

# %%
told = tilewise.explain(
    (1, 2049, 16, 100), (1, 2049, 16, 100), (1, 2049, 16, 100), device="H200"
)

# %% tags=["check"]
assert any("2049" in advice.text for advice in told.advice)
assert any("pad D 100 to 128" in advice.text for advice in told.advice)

# %% [markdown]
# ## Mystery 2: alignment
#
# Plot the speed of matrix products against their size and the points fall into bands: the more often 2 divides the
# size, the
# faster. Rows then start at addresses that the hardware can load 16 bytes at a time, and tiles come out whole. It is
# why
# padding GPT-2's vocabulary from 50257 to 50304 = 64 · 786 = 128 · 393 made training faster (25 % in Karpathy's
# words).

# %% [markdown] lang="zh"
# ## 谜之二：对齐
#
# 把矩阵乘法的速度对大小作图，点会落成几条带：大小能被 2 整除的次数越多，越快。这样每一行的起始地址才能让硬件一次读 16 字节，块也才会是完整的。GPT-2 的词表从 50257 补到 50304 = 64 · 786 = 128 · 393，训练就变快了（按 Karpathy 的说法是 25 %），原因就在这里。

# %%
words = measured("vocabulary")
if words:
    print(
        say(
            f"last layer: {words['50257']:.2f} ms with 50257 words, "
            f"{words['50304']:.2f} ms with 50304",
            f"最后一层：50257 个词 {words['50257']:.2f} ms，50304 个词 "
            f"{words['50304']:.2f} ms",
        )
    )
bands = measured("alignment")


# %% tags=["figure"]
if bands:

    def draw_bands(axes):
        sizes = [int(n) for n in bands if n.isdigit()]
        dots = axes.scatter(
            sizes,
            [bands[str(n)] for n in sizes],
            c=[budget.alignment(n).bit_length() - 1 for n in sizes],
            cmap="viridis",
        )
        axes.figure.colorbar(
            dots, label="n is divisible by 2 to the power of"
        )
        axes.set(
            xlabel="n",
            ylabel="TFLOP/s",
            ylim=(0, None),
            title=f"torch's n × n × n product on an {bands['device']}",
        )

    picture(
        "10_alignment",
        draw_bands,
        alt=say(
            "TFLOP/s of torch's n by n by n product over n, one dot a "
            "size, coloured by the power of two that divides n: sizes "
            "that are divisible by 8 or more form the upper band, odd "
            "sizes the lowest.",
            "torch 的 n × n × n 矩阵乘法的 TFLOP/s，每个点是一个 n，颜色"
            "表示整除 n 的 2 的幂：能被 8 及以上整除的构成上面的带，奇数"
            "在最下面。",
        ),
    )

# %% tags=["check"]
assert budget.pad_to_multiple(50257, 64) == 50304 == 64 * 786 == 128 * 393

# %% [markdown]
# ## A riddle for the road
#
# The same matrix product is *faster on zeros*. Nothing is skipped: but transistors that do not switch use no power,
# and
# a GPU at its power limit turns what it saves into clock rate. So benchmark on random data.

# %% [markdown] lang="zh"
# ## 留给路上的一个谜
#
# 同样的矩阵乘法，*数据全是零时更快*。什么也没有被跳过：但不翻转的晶体管不耗电，而跑在功耗上限的 GPU 会把省下来的变成时钟频率。所以做基准测试要用随机数据。

# %%
power = measured("zeros")
if power:
    print(
        say(
            f"{power['random']:.0f} TFLOP/s on random data, "
            f"{power['zeros']:.0f} on zeros",
            f"随机数据上 {power['random']:.0f} TFLOP/s，全零数据上 "
            f"{power['zeros']:.0f}",
        )
    )

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `attainable(flops, moved, peak, rate)`, the roofline;
# `best_batch(tokens, heads, tile, slots, limit)`, the batch size for which attention's grid keeps the largest share of
# the slots busy; and `makespan(work, slots)` for blocks of unequal work. Get them with `tilewise learn 10 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `attainable(flops, moved, peak, rate)`，即 roofline；写出 `best_batch(tokens, heads, tile, slots, limit)`，即让注意力的网格最充分占用 slot 的 batch 大小；再写出 `makespan(work, slots)`，块的工作量不等。用 `tilewise learn 10 --exercise` 取得它们。
