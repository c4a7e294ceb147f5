# %% [markdown]
# # 1. Attention, and why it is slow
#
# Every token asks a question (its row of $Q$), every token offers an answer (its row of $V$) under a label (its row of
# $K$). Attention mixes the answers, weighted by how well question and label agree:
#
# $$O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{D}}\right) V$$
#
# The symbols are the same in every lesson, in the library and on the page:
#
# | symbol | shape | what |
# |---|---|---|
# | $Q$, $K$, $V$ | $(N, D)$ | queries, keys, values of $N$ tokens, $D$ numbers each (the head dim) |
# | $S = Q K^\top / \sqrt{D}$ | $(N, N)$ | scores |
# | $P = \mathrm{softmax}(S)$ | $(N, N)$ | weights, row by row |
# | $O = P V$ | $(N, D)$ | output |
# | $m$, $l$, $L$ | $(N)$ | of each row of $S$: its maximum, its denominator, its logsumexp $L = m + \log l$ (`lse` in code) |
#
# $Q$, $K$, $V$, $O$ grow with the length $N$. The two in the middle grow with $N^2$. This lesson measures what that costs, and finds that the arithmetic is not the problem. First the whole of attention, in the three lines that it takes:

# %% [markdown] lang="zh"
# # 1. 注意力，以及它为什么慢
#
# 每个 token 都提出一个问题（它在 $Q$ 中的那一行），每个 token 也都带着一个标签（它在 $K$ 中的那一行）给出一个答案（它在 $V$ 中的那一行）。注意力按照问题与标签的契合程度，把所有答案加权混合：
#
# $$O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{D}}\right) V$$
#
# 整个课程、代码库和演示页面使用同一套符号：
#
# | 符号 | 形状 | 含义 |
# |---|---|---|
# | $Q$, $K$, $V$ | $(N, D)$ | $N$ 个 token 的查询、键、值，每个 $D$ 维（头维度） |
# | $S = Q K^\top / \sqrt{D}$ | $(N, N)$ | 分数 |
# | $P = \mathrm{softmax}(S)$ | $(N, N)$ | 权重，逐行归一化 |
# | $O = P V$ | $(N, D)$ | 输出 |
# | $m$, $l$, $L$ | $(N)$ | $S$ 每一行的最大值、分母，以及 logsumexp $L = m + \log l$（代码里叫 `lse`） |
#
# $Q$、$K$、$V$、$O$ 随长度 $N$ 增长，中间的两个矩阵随 $N^2$ 增长。这一课量一量这要付出什么代价，并且会发现：问题不在算术运算。先看完整的注意力，只要三行：

# %%
import math

import torch

import tilewise
from tilewise_lab.costs.cost import Call, naive_steps, traffic
from tilewise_lab.costs.devices import device
from tilewise_lab.learn import measured, picture, say, show


def attention(q, k, v):
    # (N, N): every question with every label
    s = q @ k.T / math.sqrt(q.shape[-1])
    p = torch.softmax(s, -1)  # (N, N): each row is a distribution
    return s, p, p @ v  # (N, D): the answers, mixed


torch.manual_seed(0)
q, k, v = (torch.randn(8, 4) for _ in range(3))
s, p, o = attention(q, k, v)
show(
    say(["matrix", "shape"], ["矩阵", "形状"]),
    [
        ["Q", tuple(q.shape)],
        ["S", tuple(s.shape)],
        ["P", tuple(p.shape)],
        ["O", tuple(o.shape)],
    ],
)

# %% tags=["check"]
assert s.shape == p.shape == (8, 8)
assert o.shape == q.shape
# softmax works row by row: each row of P is a distribution
assert torch.allclose(p.sum(-1), torch.ones(8))
assert torch.allclose(
    o,
    tilewise.attention(*(x[None, :, None] for x in (q, k, v)))[0, :, 0],
    atol=1e-6,
)

# %% [markdown]
# ## Many heads, and the part that matters
#
# A transformer layer runs several attentions side by side, on projections of the same tokens $X$:
#
# $$\begin{aligned} \mathrm{head}_i &= \mathrm{Attention}(X W_i^Q, X W_i^K, X W_i^V) \\ \mathrm{MultiHead}(X) &= \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_H) W^O \end{aligned}$$
#
# The projections are ordinary matrix products, which GPUs do well. FlashAttention, and tilewise, only touch the
# `Attention(...)` in the middle. Here is the whole layer, with tilewise inside; it agrees with torch's own.

# %% [markdown] lang="zh"
# ## 多头，以及真正要紧的那一部分
#
# Transformer 的一层会并排运行好几个注意力，各自作用在同一批 token $X$ 的不同投影上：
#
# $$\begin{aligned} \mathrm{head}_i &= \mathrm{Attention}(X W_i^Q, X W_i^K, X W_i^V) \\ \mathrm{MultiHead}(X) &= \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_H) W^O \end{aligned}$$
#
# 投影是普通的矩阵乘法，GPU 本来就擅长。FlashAttention（以及 tilewise）只管中间的 `Attention(...)`。下面是完整的一层，里面用的是 tilewise；结果与 torch 自带的一致。


# %%
class MultiHeadAttention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):  # (B, N, width)
        # each (B, N, H, d)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(tilewise.attention(q, k, v).flatten(2))


theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
ours = MultiHeadAttention(32, 4)
ours.qkv.weight.data, ours.qkv.bias.data = (
    theirs.in_proj_weight.data,
    theirs.in_proj_bias.data,
)
ours.out = theirs.out_proj
x = torch.randn(2, 10, 32)
x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
a, (b, _) = ours(x_ours), theirs(x_theirs, x_theirs, x_theirs)
a.sum().backward()
b.sum().backward()

# %% tags=["check"]
assert torch.allclose(a, b, atol=1e-5)
assert torch.allclose(x_ours.grad, x_theirs.grad, atol=1e-4)

# %% [markdown]
# How much of the layer is attention? The projections cost $8 N W^2$ FLOPs for a model of width $W$, attention
# $4 N^2 W$: the longer the sequence, the larger attention's share. At $N = 2 W$ they are equal.

# %% [markdown] lang="zh"
# 一层里注意力占多大比例？模型宽度为 $W$ 时，投影需要 $8 N W^2$ 次浮点运算，注意力需要 $4 N^2 W$ 次：序列越长，注意力的占比越大；$N = 2 W$ 时两者相等。

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
show(
    say(
        [
            "N",
            "projections (GFLOP)",
            "attention (GFLOP)",
            "attention's share",
        ],
        ["N", "投影 (GFLOP)", "注意力 (GFLOP)", "注意力的占比"],
    ),
    rows,
)
half = Call(1, 2 * width, 2 * width, 16, 16, 128, 128).flops()

layer = measured("layer")
if layer:
    show(
        say(
            ["N", "projections (ms)", "attention (ms)"],
            ["N", "投影 (ms)", "注意力 (ms)"],
        ),
        [
            [n, f"{t['projections_ms']:.2f}", f"{t['attention_ms']:.2f}"]
            for n, t in layer.items()
            if n.isdigit()
        ],
        say(
            f"one layer on an {layer['device']}",
            f"一层在 {layer['device']} 上",
        ),
    )

# %% tags=["check"]
assert half == 8 * (2 * width) * width**2

# %% [markdown]
# ## The bill for memory
#
# A GPU has two memories that matter here. **HBM** is what the box says: 80 GB, and far away. **Shared memory** is next
# to the arithmetic: a hundred times smaller per processor, and an order of magnitude faster. A textbook implementation
# runs one kernel per step, and each kernel reads its inputs from HBM and writes its outputs back. For 4096 tokens $P$
# alone has 16.8 million entries, 64 MiB in float32, *per head*, and it is read and written several times.

# %% [markdown] lang="zh"
# ## 内存的账单
#
# 这里要紧的是 GPU 的两种存储。**HBM**（显存）就是包装盒上写的那个：80 GB，但离得远。**共享内存**紧挨着运算单元：每个处理器分到的容量小得多，速度却快一个数量级。教科书式的实现每一步启动一个 kernel，每个 kernel 都从 HBM 读入、再写回 HBM。4096 个 token 时，光 $P$ 就有 1680 万个元素，float32 下 64 MiB，而且是*每个头*这么多，还要来回读写好几遍。

# %%
gpt2 = Call(
    batch=64,
    n_q=1024,
    n_k=1024,
    heads=16,
    kv_heads=16,
    d=64,
    dv=64,
    dtype="float16",
)
rows = []
for step in naive_steps(backward=True):
    moved = step.passes * gpt2.score_bytes + sum(map(gpt2.rows, step.rows))
    rows.append([step.name, step.passes, f"{moved / 1e9:.1f}"])
show(
    say(
        ["step", "passes over (N, N)", "GB"],
        ["步骤", "遍历 (N, N) 的次数", "GB"],
    ),
    rows,
    say(
        "GPT-2 medium, 64 sequences of 1024 tokens: what the textbook "
        "moves, forward and backward",
        "GPT-2 medium，64 条 1024 token 的序列："
        "教科书式实现在前向和反向中搬运多少",
    ),
)
bill = traffic(gpt2, backward=True)
print(
    say(
        f"naive {bill.naive / 1e9:.1f} GB; if the scores never left the "
        f"chip: {bill.least / 1e9:.1f} GB",
        f"朴素实现 {bill.naive / 1e9:.1f} GB；如果分数从不离开芯片："
        f"{bill.least / 1e9:.1f} GB",
    )
)

# %% tags=["check"]
from tilewise_lab.machine import budget

assert budget.weights(4096) == (16_777_216, 64 * 2**20)
assert bill.naive > 15 * bill.least

# %% [markdown]
# ## Which roof?
#
# Divide the work by the traffic: **arithmetic intensity**, in FLOPs per byte. A device has a ridge, its FLOP/s over
# its bytes/s. Left of it, the arithmetic units wait for memory; right of it, memory waits for them. Naive attention
# stands on the left, on every GPU. If the $(N, N)$ matrices stayed on the chip, it would stand far on the right.
# *That* is the whole idea of FlashAttention: not fewer FLOPs, but fewer bytes.

# %% [markdown] lang="zh"
# ## 撞上哪个屋顶？
#
# 用运算量除以数据搬运量，得到**算术强度**，单位是 FLOP/字节。每个设备都有一条屋脊线：它的峰值 FLOP/s 除以带宽。在屋脊左边，运算单元等内存；在右边，内存等运算单元。朴素注意力在任何 GPU 上都站在左边。如果 $(N, N)$ 的矩阵不离开芯片，它就会远远站到右边。FlashAttention 的*全部*想法就是这个：不是少算，而是少搬。

# %%
call = Call(4, 4096, 4096, 16, 16, 64, 64)
points = {
    "naive": call.flops() / traffic(call).naive,
    "tiled": call.flops() / traffic(call).tiled,
}
for name in ("A100", "H100", "H200"):
    ridge = device(name).ridge("bfloat16")
    print(
        say(
            f"{name}: ridge at {ridge:.0f} FLOP/byte; naive "
            f"{points['naive']:.0f}, tiled {points['tiled']:.0f}",
            f"{name}：屋脊在 {ridge:.0f} FLOP/字节；朴素 "
            f"{points['naive']:.0f}，分块 {points['tiled']:.0f}",
        )
    )

roofs = measured("roofs")


# %% tags=["figure"]
def draw(axes):
    from tilewise_lab.costs.roofline import attainable, curve

    h200 = device("H200")
    line = curve(h200, "bfloat16")
    axes.loglog(
        [x for x, _ in line],
        [y / 1e12 for _, y in line],
        color="black",
        label="H200, by its data sheet",
    )
    if roofs:
        peak, slope = roofs["tflops"], roofs["gbps"] / 1e3
        axes.loglog(
            [x for x, _ in line],
            [min(peak, x * slope) for x, _ in line],
            ":",
            color="gray",
            label="as measured",
        )
    for name, x in points.items():
        axes.plot(
            x,
            attainable(x, h200, "bfloat16") / 1e12,
            "o",
            markersize=9,
            label=f"{name}: {x:.0f} FLOP/byte",
        )
    axes.set(
        xlabel="FLOPs per byte of HBM traffic",
        ylabel="TFLOP/s at most",
        title="Attention under the roofline",
    )
    axes.legend()


picture(
    "01_roofline",
    draw,
    alt=say(
        "Attainable TFLOP/s over FLOPs per byte on an H200, on two "
        "logarithmic axes: the naive forward lies on the slope, "
        "limited by memory, the tiled one on the flat roof, limited "
        "by arithmetic.",
        "H200 的 roofline（双对数坐标）：横轴是每字节的 FLOP，纵轴是"
        "可达的 TFLOP/s。朴素前向落在斜坡上，受内存限制；分块的前向落"
        "在平顶上，受计算限制。",
    ),
)

# %% tags=["check"]
for name in ("A100", "H100", "H200"):
    assert points["naive"] < device(name).ridge("bfloat16") < points["tiled"]

# %% [markdown]
# ## The obstacle
#
# So: cut $Q$, $K$, $V$ into blocks that fit into shared memory, compute a piece of $O$ there, write it back, go on to
# the next. Matrix products allow that. Softmax does not, at first sight: the weight of *one* key is divided by a sum
# over *all* keys, which the block has not seen. A weight computed from half of a row is simply wrong:

# %% [markdown] lang="zh"
# ## 障碍
#
# 那么就把 $Q$、$K$、$V$ 切成放得进共享内存的小块，在里面算出 $O$ 的一块，写回去，再算下一块。矩阵乘法允许这样分块。softmax 乍看不行：*一个*键的权重要除以对*所有*键的求和，而这一块并没有看到全部的键。只用半行算出来的权重就是错的：

# %%
half_a_row = torch.softmax(s[:, :4], -1)
print(
    say(
        "largest difference between weights from half a row and from all "
        "of it:",
        "只用半行与用整行算出的权重，最大相差：",
    ),
    f"{(half_a_row - p[:, :4]).abs().max():.2f}",
)

# %% tags=["check"]
assert (half_a_row - p[:, :4]).abs().max() > 0.1
assert math.isclose(float(p[0, :4].sum() + p[0, 4:].sum()), 1.0, rel_tol=1e-5)

# %% [markdown]
# The next lessons take softmax apart until it can be computed block by block, exactly.
#
# **Exercises.** Three, of rising difficulty: write `attention(q, k, v)` in two lines; `intensity(n, d, itemsize)`, the
# FLOPs per byte of the naive forward; and `seconds(n, d, itemsize, peak, rate)`, its time by the roofline, kernel by
# kernel. Get them with `tilewise learn 1 --exercise`.

# %% [markdown] lang="zh"
# 接下来的几课把 softmax 拆开，直到它可以一块一块地、精确地算出来。
#
# **练习。** 三道，由易到难：用两行写出 `attention(q, k, v)`；写出 `intensity(n, d, itemsize)`，即朴素前向每字节的 FLOP；再写出 `seconds(n, d, itemsize, peak, rate)`，用 roofline 逐个 kernel 算出它的时间。用 `tilewise learn 1 --exercise` 取得它们。
