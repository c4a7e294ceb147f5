# %% [markdown]
# # 11. The Triton forward, line by line
#
# Everything so far fits into one kernel of thirty lines. A program owns a block of queries; it walks over the blocks
# of keys they see; it keeps $(m, l, O)$ in registers. Here it is, for one head whose rows lie one after the other.
# Change a line, and the checks below fail.

# %% [markdown] lang="zh"
# # 11. 逐行读 Triton 前向 kernel
#
# 到目前为止的一切，装得进一个三十行的 kernel。一个程序负责一块查询；它走过这些查询看得到的每一块键；$(m, l, O)$ 一直放在寄存器里。下面就是它，处理一个头，各行连续存放。改动任何一行，后面的检查都会失败。

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import inspect
import math

import torch

import tilewise
from tilewise.backends.common import tiles
from tilewise_lab.costs.devices import DEVICES
from tilewise_lab.learn import has_triton, measured, picture, say, show

HERE = has_triton("running the kernels")
if HERE:
    import triton
    import triton.language as tl

    @triton.jit
    def forward(
        q, k, v, o, lse, n_q, n_k, scale,
        D: tl.constexpr, CAUSAL: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0) * BLOCK_M
        i = first + tl.arange(0, BLOCK_M)  # my queries
        c = tl.arange(0, D)
        # stays for the whole loop
        q_tile = tl.load(
            q + i[:, None] * D + c, mask=i[:, None] < n_q, other=0.0
        )
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        hi = n_k
        if CAUSAL:  # keys after the last query of this block are hidden
            hi = tl.minimum(n_k, first + BLOCK_M + n_k - n_q)
        for start in range(0, hi, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            k_tile = tl.load(
                k + j[:, None] * D + c, mask=j[:, None] < n_k, other=0.0
            )
            v_tile = tl.load(
                v + j[:, None] * D + c, mask=j[:, None] < n_k, other=0.0
            )
            s = (
                tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                * scale
            )
            hidden = j[None, :] >= n_k
            if CAUSAL:
                hidden = hidden | (j[None, :] > i[:, None] + n_k - n_q)
            s = tl.where(hidden, float("-inf"), s)
            m_new = tl.maximum(m, tl.max(s, 1))
            # a row that has seen nothing
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp(s - pivot[:, None])
            alpha = tl.exp(m - pivot)
            l = l * alpha + tl.sum(p, 1)
            acc = tl.dot(
                p, v_tile, acc * alpha[:, None], input_precision="ieee"
            )
            m = m_new
        some = tl.where(l == 0.0, 1.0, l)
        tl.store(
            o + i[:, None] * D + c, acc / some[:, None], mask=i[:, None] < n_q
        )
        tl.store(
            lse + i,
            tl.where(l == 0.0, float("-inf"), m + tl.log(some)),
            mask=i < n_q,
        )

    torch.manual_seed(0)
    apart = []
    for n_q, n_k, causal in (
        (40, 40, False),
        (40, 40, True),
        (20, 50, True),
        (50, 20, True),
    ):
        q, k, v = (
            torch.randn(n_q, 16),
            torch.randn(n_k, 16),
            torch.randn(n_k, 16),
        )
        o, lse = torch.empty(n_q, 16), torch.empty(n_q)
        forward[(-(-n_q // 16),)](
            q,
            k,
            v,
            o,
            lse,
            n_q,
            n_k,
            0.25,
            D=16,
            CAUSAL=causal,
            BLOCK_M=16,
            BLOCK_N=16,
        )
        exact, exact_lse = tilewise.attention(
            *(x.double()[None, :, None] for x in (q, k, v)),
            causal=causal,
            return_lse=True,
        )
        print(
            say(
                f"{n_q} queries, {n_k} keys, causal {causal}: "
                f"{(o - exact[0, :, 0]).abs().max():.1e} from float64",
                f"{n_q} 个查询，{n_k} 个键，causal {causal}：与 float64 "
                f"相差 {(o - exact[0, :, 0]).abs().max():.1e}",
            )
        )
        apart += [
            (o - exact[0, :, 0]).abs().max(),
            (lse - exact_lse[0, 0]).nan_to_num(0.0).abs().max(),
        ]

# %% tags=["check"]

if HERE:
    assert max(apart) < 2e-5

# %% [markdown]
# tilewise's own kernel has the same heart; around it are strides, heads, packed sequences, mods. Here is that heart,
# as it runs:

# %% [markdown] lang="zh"
# tilewise 自己的 kernel 有同样的核心，外面多了步长、多头、变长序列打包、自定义的 mod。下面是这个核心，原样运行的就是它：

# %%
if HERE:
    from tilewise.backends.common.device.attend import stream_keys
    from tilewise.backends.common.device.softmax import softmax_step

    print(inspect.getsource(softmax_step.fn))
    print(inspect.getsource(stream_keys.fn))

# %% [markdown]
# Line by line, beside the names that other kernels use:
#
# | here | elsewhere | what |
# |---|---|---|
# | `m_new = max(m, max(s)·qk_scale)` | m_ij | the new running maximum |
# | `p = exp2(s·qk_scale - pivot)` | P_block = exp(QK·scale - m_ij) | weights; exp2 is one instruction, so the logarithm's base is folded into `qk_scale` |
# | `alpha = exp2(m - pivot)` | alpha = exp(m_i - m_ij) | lesson 3's correction factor |
# | `l·alpha + sum(p)` | l_i = l_i·alpha + l_ij | the denominator |
# | `dot(p, v, acc·alpha)` | O_block = O_block·alpha + P V | the numerator |
# | `acc / l`, `logsumexp(m, l)` | O /= l_i; m_i += log(l_i) | the epilogue |
#
# The last line deserves care: what is stored for the backward is the **logsumexp** $L = m + \log l$, though its
# variable is often still called m. And `q_tile` stays where it is for the whole loop; the tile of $K$ is read as it
# lies and transposed on the way (`tl.trans`), where older kernels used block pointers with swapped strides.
#
# ## Watched
#
# Below, `softmax_step` itself, run by Triton's interpreter on scores in blocks of 16 columns. After every step its
# $m$, $l$, $\alpha$ and $P$ are those of the reference.

# %% [markdown] lang="zh"
# 逐行对照，旁边是其他 kernel 里常用的名字：
#
# | 这里 | 别处 | 含义 |
# |---|---|---|
# | `m_new = max(m, max(s)·qk_scale)` | m_ij | 新的最大值 |
# | `p = exp2(s·qk_scale - pivot)` | P_block = exp(QK·scale - m_ij) | 权重；exp2 是一条指令，所以把换底的系数并进了 `qk_scale` |
# | `alpha = exp2(m - pivot)` | alpha = exp(m_i - m_ij) | 第 3 课的修正因子 |
# | `l·alpha + sum(p)` | l_i = l_i·alpha + l_ij | 分母 |
# | `dot(p, v, acc·alpha)` | O_block = O_block·alpha + P V | 分子 |
# | `acc / l`, `logsumexp(m, l)` | O /= l_i; m_i += log(l_i) | 收尾 |
#
# 最后一行要当心：为反向传播存下来的是 **logsumexp** $L = m + \log l$，虽然那个变量常常还叫 m。另外，`q_tile` 在整个循环里一直留在原处；$K$ 的块按存放的样子读入，途中转置（`tl.trans`），而旧式 kernel 用的是交换了步长的块指针。
#
# ## 盯着它看
#
# 下面让 Triton 的解释器在分数上运行 `softmax_step` 本身，每 16 列一块。每一步之后，它的 $m$、$l$、$\alpha$ 和 $P$ 都与参考实现一致。

# %%
torch.manual_seed(0)
s = torch.randn(16, 64) * 3
if HERE:
    from tilewise_lab.learn.kernels import watch_softmax

    m, l, alpha = torch.empty(4, 16), torch.empty(4, 16), torch.empty(4, 16)
    p = torch.empty(16, 64)
    watch_softmax[(1,)](s, m, l, alpha, p, 64, ROWS=16, COLS=16)

    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    out, lse = tilewise.attention(
        q, k, v, causal=True, backend="triton", return_lse=True
    )
    exact, exact_lse = tilewise.attention(
        q.double(), k.double(), v.double(), causal=True, return_lse=True
    )
    print(
        say(
            "the whole kernel against float64: "
            f"{(out - exact).abs().max():.1e} and "
            f"{(lse - exact_lse).abs().max():.1e}",
            f"整个 kernel 与 float64 相比：{(out - exact).abs().max():.1e} "
            f"和 {(lse - exact_lse).abs().max():.1e}",
        )
    )

# %% tags=["check"]
if HERE:
    assert torch.allclose(out.double(), exact, atol=1e-5)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-5)
if HERE:
    old = torch.full((16,), -torch.inf)
    for step in range(4):
        part = slice(16 * step, 16 * (step + 1))
        seen = s[:, : part.stop]
        weights = torch.exp(seen - m[step][:, None])
        assert torch.allclose(m[step], seen.amax(-1), rtol=1e-6)
        assert torch.allclose(l[step], weights.sum(-1), rtol=1e-5)
        assert torch.allclose(
            alpha[step], torch.exp(old - m[step]), atol=1e-6
        )
        assert torch.allclose(p[:, part], weights[:, part], atol=1e-5)
        old = m[step]
    assert torch.allclose(m[-1] + l[-1].log(), s.logsumexp(-1), atol=1e-5)

# %% [markdown]
# ## Where it starts: l = 0 or l = 1?
#
# Theory says $m = -\infty$, $l = 0$. Many kernels write $l = 1$, and get away with it: the first correction factor is
# $e^{-\infty} = 0$ and wipes it out. Not if there is no first block: with no keys at all, $l = 1$ gives
# $O = 0 / 1 = 0$ and $L = -\infty$, and $l = 0$ gives $0 / 0$. And if $m$ starts at a *finite* value, $l = 1$ stays: a
# silent extra key with score $m$ and value 0, an "attention sink". tilewise starts at 0 and guards the division.

# %% [markdown] lang="zh"
# ## 从哪里开始：l = 0 还是 l = 1？
#
# 理论上是 $m = -\infty$，$l = 0$。许多 kernel 写成 $l = 1$，却也没事：第一个修正因子是 $e^{-\infty} = 0$，把它抹掉了。如果没有第一块就不行了：一个键都没有时，$l = 1$ 得到 $O = 0 / 1 = 0$ 和 $L = -\infty$，而 $l = 0$ 得到 $0 / 0$。如果 $m$ 从一个*有限*的值开始，$l = 1$ 就会留下来：悄悄多出一个分数为 $m$、值为 0 的键，即所谓 “attention sink”。tilewise 从 0 开始，并为除法加了保护。

# %%
o = torch.zeros(1)
none = tilewise.attention(
    torch.randn(1, 3, 1, 8),
    torch.randn(1, 0, 1, 8),
    torch.randn(1, 0, 1, 8),
    return_lse=True,
)
x = torch.tensor([1.0, 2.0])
# m₀ = 0, l₀ = 1
started_finite = torch.exp(x - 2) / (
    1.0 * math.exp(0.0 - 2) + torch.exp(x - 2).sum()
)
with_sink = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1)[1:]

# %% tags=["check"]
assert (o / 1.0).item() == 0.0
assert (o / 0.0).isnan()
assert not none[0].any()
assert (none[1] == -math.inf).all()
assert torch.allclose(started_finite, with_sink)

# %% [markdown]
# ## Masks: minus infinity, and nothing else
#
# Causal attention hides the keys after the query. A tile is then of one of three kinds: seen by all its rows (left of
# the diagonal, no mask needed), by some (on the diagonal), by none (skipped). Kernels often number these cases, "STAGE
# 1, 2, 3", and the same name means another thing in the outer and the inner function; the diagonal tile is not "right
# of the diagonal". tilewise has a *band* of visible keys instead, and one question per tile: does it touch the band's
# edge?
#
# Hidden scores must become $-\infty$. A large negative number such as $-10^6$ looks harmless and is not:

# %% [markdown] lang="zh"
# ## 掩码：负无穷，别的都不行
#
# 因果注意力遮住查询之后的键。于是一块属于三种之一：所有行都看得到（对角线左边，不需要掩码），部分行看得到（对角线上），没有行看得到（跳过）。很多 kernel 给这些情况编号，“STAGE 1、2、3”，而同一个名字在外层和内层函数里意思又不同；对角块也不是“对角线右边”的块。tilewise 用的是一条可见键的*带*，对每块只问一个问题：它碰到带的边缘了吗？
#
# 被遮住的分数必须变成 $-\infty$。像 $-10^6$ 这样很大的负数看起来无害，其实不然：

# %%
v16 = torch.arange(16.0)
hidden_all = torch.full((16,), -1e6)
print(
    say(
        "all 16 keys hidden by -1e6: output "
        f"{torch.softmax(hidden_all, -1) @ v16:.1f} (the mean of V), "
        f"logsumexp {hidden_all.logsumexp(-1):.0f}",
        "16 个键都用 -1e6 遮住：输出 "
        f"{torch.softmax(hidden_all, -1) @ v16:.1f}（V 的平均），logsumexp "
        f"{hidden_all.logsumexp(-1):.0f}",
    )
)
# the second key is hidden
valid_but_low = torch.softmax(torch.tensor([-2e6, -1e6]), -1) @ torch.tensor(
    [1.0, 100.0]
)
print(
    say(
        "a valid score below -1e6 loses to a hidden one: "
        f"{valid_but_low:.0f} instead of 1",
        f"低于 -1e6 的有效分数输给了被遮住的：{valid_but_low:.0f}，而不是 1",
    )
)
q, k, v = (torch.randn(1, n, 1, 8) for n in (4, 2, 2))
# queries 0 and 1 come before both keys
out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)

# %% tags=["check"]
assert torch.isclose(torch.softmax(hidden_all, -1) @ v16, v16.mean())
assert round(float(hidden_all.double().logsumexp(-1))) == -999_997
assert valid_but_low == 100
# and in float16 it is -inf after all
assert torch.tensor(-1e6).half() == -math.inf
assert not out[0, :2].any()
assert (lse[0, 0, :2] == -math.inf).all()

# %% [markdown]
# With $N_q \ne N_k$ there are two conventions. tilewise and flash-attn align the *ends* (bottom-right): the last query
# sees all keys. torch's `is_causal` aligns the *starts* (top-left): query $i$ sees keys 0 to $i$. Ask for it by
# leaving the later keys out:

# %% [markdown] lang="zh"
# 当 $N_q \ne N_k$ 时有两种约定。tilewise 和 flash-attn 对齐*末尾*（右下）：最后一个查询看得到所有键。torch 的 `is_causal` 对齐*开头*（左上）：查询 $i$ 看得到键 0 到 $i$。想要后者，去掉后面的键即可：

# %%
q, k, v = (torch.randn(1, n, 2, 8) for n in (3, 5, 5))
bottom_right = tilewise.attention(q, k, v, causal=True)
top_left = tilewise.attention(q, k[:, :3], v[:, :3], causal=True)
torchs = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
)

# %% tags=["check"]
assert torch.allclose(
    bottom_right[:, -1], tilewise.attention(q, k, v)[:, -1], atol=1e-6
)
assert torch.allclose(top_left, torchs.transpose(1, 2), atol=1e-5)
assert not torch.allclose(top_left, bottom_right, atol=1e-2)

# %% [markdown]
# ## Scale before max
#
# `max(QK)·scale` saves a multiplication, and is wrong for a negative scale: the largest product then has the
# *smallest* score. The exponents are no longer at most 0 and overflow.

# %% [markdown] lang="zh"
# ## 先缩放，再取最大值
#
# `max(QK)·scale` 能省一次乘法，但缩放系数为负时就错了：最大的乘积这时对应*最小*的分数。指数不再不超过 0，于是溢出。

# %%
products, scale = torch.tensor([-100.0, 100.0]), -1.0
careless = torch.exp(products * scale - products.max() * scale)
q, k, v = (torch.randn(1, 6, 1, 8) for _ in range(3))

# %% tags=["check"]
assert (careless / careless.sum()).isnan().any()
assert torch.allclose(
    tilewise.attention(q, k, v, scale=-0.5),
    tilewise.attention(-q, k, v, scale=0.5),
    atol=1e-6,
)

# %% [markdown]
# ## Skipping pays
#
# A causal head of $T \times T$ tiles has $T (T + 1) / 2$ that are seen at all: half the work as $T$ grows.

# %% [markdown] lang="zh"
# ## 跳过是划算的
#
# 因果掩码下，一个头有 $T \times T$ 块，其中看得到的只有 $T (T + 1) / 2$ 块：$T$ 越大，工作量越接近一半。

# %%
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.predict import work_of

causal = Call(1, 4096, 4096, 1, 1, 128, 128, after=0)
steps = [n for _, n, _ in work_of(causal, tiles.Tile(128, 128, 8, 2))]
print(
    say(
        f"{sum(steps)} of {32 * 32} tiles visited",
        f"共 {32 * 32} 块，走到了 {sum(steps)} 块",
    )
)
times = measured("causal")
if times:
    print(
        say(
            f"8192 tokens: full {times['full_ms']:.2f} ms, causal "
            f"{times['causal_ms']:.2f} ms",
            f"8192 个 token：全部 {times['full_ms']:.2f} ms，因果 "
            f"{times['causal_ms']:.2f} ms",
        )
    )

# %% tags=["check"]
if times:
    assert times["full_ms"] > 1.6 * times["causal_ms"]
assert sum(steps) == 32 * 33 // 2

# %% [markdown]
# ## Which tile?
#
# Many kernels try a grid of tiles when they first run (`@triton.autotune`). A typical one tries blocks of 64 or 128
# queries, 32 or 64 keys, 3, 4 or 7 stages, 2 or 4 warps: 24 kernels compiled and timed for every new shape. tilewise
# measures once, writes the winner into a table with the reason beside it, and never tunes at run time.

# %% [markdown] lang="zh"
# ## 用多大的块？
#
# 许多 kernel 第一次运行时会把一组块大小都试一遍（`@triton.autotune`）。典型的一组是：查询每块 64 或 128，键每块 32 或 64，3、4 或 7 级流水，2 或 4 个 warp：每遇到一个新形状就要编译并计时 24 个 kernel。tilewise 只测一次，把胜者连同理由写进一张表，运行时从不调优。

# %%
candidates = [
    tiles.Tile(bq, bkv, warps, stages)
    for bq in (64, 128)
    for bkv in (32, 64)
    for stages in (3, 4, 7)
    for warps in (2, 4)
]


def shared(tile, d=128, itemsize=2):
    """Bytes: the tile of Q, and as many of K and V as there are stages."""
    return itemsize * (
        tile.block_m * d + tile.stages * tile.block_n * (d + d)
    )


fit = {
    name: sum(shared(tile) <= device.shared for tile in candidates)
    for name, device in DEVICES.items()
}
show(
    say(
        ["GPU", "of the 24, fit at D = 128"],
        ["GPU", "24 种里，D = 128 时放得下的"],
    ),
    list(fit.items()),
)
generations = {"Hopper": 90, "Ampere": 80}
chosen = [
    [d, name, tile.block_m, tile.block_n, tile.warps, tile.stages]
    for d in (64, 128, 256)
    for name, capability in generations.items()
    for tile in [tiles.tile("forward", capability, 2, d)]
]
show(
    say(
        ["head dim", "GPU", "queries", "keys", "warps", "stages"],
        ["头维度", "GPU", "查询", "键", "warp 数", "级数"],
    ),
    chosen,
    say("tilewise's tiles", "tilewise 的块"),
)


# %% tags=["figure"]
def draw(axes):
    seen = [[n, 32 - n] for n in sorted(steps)]
    axes.bar(range(32), [a for a, _ in seen], label="visited")
    axes.bar(
        range(32),
        [b for _, b in seen],
        bottom=[a for a, _ in seen],
        color="lightgray",
        label="skipped",
    )
    axes.set(
        xlabel="block of queries",
        ylabel="blocks of keys",
        title="Causal: a triangle of tiles",
    )
    axes.legend()


picture(
    "11_triangle",
    draw,
    alt=say(
        "For each of 32 blocks of queries a bar of 32 blocks of "
        "keys: block i visits the first i + 1 and skips the others, "
        "so that the visited ones form a triangle.",
        "32 块查询各有一根由 32 块键组成的柱：第 i 块访问前 i + 1 块，"
        "跳过其余的，被访问的构成一个三角形。",
    ),
)

# %% tags=["check"]
assert len(candidates) == 24

# %% [markdown]
# One more trap: `tl.dot` on float32 inputs uses TF32 by default, ten bits of mantissa. tilewise computes
# float32 inputs with exact products ("ieee"), unless torch itself was told that TF32 is fine.

# %% [markdown] lang="zh"
# 还有一个陷阱：`tl.dot` 对 float32 输入默认使用 TF32，尾数只有十位。tilewise 对 float32 输入使用精确的乘积（“ieee”），除非你告诉过 torch 可以用 TF32。

# %%
if HERE:
    from tilewise.backends.triton import launches as launch
    from tilewise.request import Gpu, Request, Spec

    q = torch.randn(1, 16, 1, 16)
    request, lse = Request(q, q, q, Spec(0.25)), torch.empty(1, 1, 16)
    made = launch.forward_launch(
        request, torch.empty_like(q), lse, Gpu("cuda", 90)
    )
    print("PRECISION:", made.options["CONFIG"].PRECISION)

# %% tags=["check"]
if HERE:
    assert made.options["CONFIG"].PRECISION != "tf32"

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `tile_offsets(first, rows, n, d)`, the addresses of a tile;
# `masked_scores(s, first_i, first_j, n_q, n_k)`, the causal (bottom-right) mask of one tile; and
# `span(first, rows, n_q, n_k, block)`, how many blocks of keys need no mask and how many are visited at all, as the
# kernel's `band` does it. Get them with `tilewise learn 11 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `tile_offsets(first, rows, n, d)`，即一块的地址；写出 `masked_scores(s, first_i, first_j, n_q, n_k)`，即一块的因果（右下对齐）掩码；再写出 `span(first, rows, n_q, n_k, block)`，即有多少块键不需要掩码、又有多少块会被访问到，与 kernel 里的 `band` 一致。用 `tilewise learn 11 --exercise` 取得它们。
