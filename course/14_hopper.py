# %% [markdown]
# # 14. Hopper: warps with different jobs
#
# Lesson 9's pipeline had all warps do everything. On Hopper (H100, H200) copies and matrix products are asynchronous
# machines of their own:
# **TMA** fetches whole tiles, **wgmma** multiplies them, and both only raise a flag (an *mbarrier*) when they are
# done. So one warp fetches, and
# others compute, and while the tensor cores work for one warpgroup, the other one takes its exponentials.

# %% [markdown] lang="zh"
# # 14. Hopper：分工不同的 warp
#
# 第 9 课的流水线里，所有 warp 什么都做。在 Hopper（H100、H200）上，复制和矩阵乘法各有自己的异步引擎：**TMA** 搬来整块数据，**wgmma** 把它们相乘，做完只竖起一面旗（*mbarrier*）。于是一个 warp 专门搬运，其他 warp 计算；tensor core 为一个 warpgroup 干活时，另一个正在算它的指数。

# %%
# needs: compiler
import torch

from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import device
from tilewise_lab.learn import has_triton, picture, say, show

# %% [markdown]
# ## Why two groups
#
# Per tile of 128 × 128 scores at $D = 128$ the tensor cores of an SM need $4 \cdot 128 \cdot 128 \cdot 128$ FLOPs, and
# the special-function units $128 \cdot 128$ exponentials. At $D = 64$ the products halve and the exponentials do not:
# they take *as long as* the products. Whatever is not overlapped is lost.

# %% [markdown] lang="zh"
# ## 为什么要两组
#
# 每块 128 × 128 的分数，$D = 128$ 时，一个 SM 的 tensor core 要做 $4 \cdot 128 \cdot 128 \cdot 128$ 次浮点运算，特殊函数单元要算 $128 \cdot 128$ 个指数。$D = 64$ 时乘法减半，指数却不减：它们和乘法*一样久*。凡是没有重叠的时间，都是损失。

# %%
h200 = device("H200")
rows = []
for d in (64, 128, 256):
    products = (
        4 * 128 * 128 * d / (h200.flops("bfloat16") / h200.sms / h200.clock)
    )
    exponentials = 128 * 128 / h200.exps
    rows.append(
        [
            d,
            f"{products:.0f}",
            f"{exponentials:.0f}",
            f"{products / (products + exponentials):.0%}",
        ]
    )
show(
    say(
        [
            "D",
            "cycles of products",
            "cycles of exponentials",
            "of the peak, if nothing overlaps",
        ],
        ["D", "乘法的周期", "指数的周期", "不重叠时达到峰值的"],
    ),
    rows,
)
full = Call(1, 8192, 8192, 16, 16, 64, 64)

# %% tags=["check"]
assert full.pairs / (
    h200.exps * h200.sms * h200.clock
) > 0.9 * full.flops() / h200.flops("bfloat16")

# %% [markdown]
# ## The flags
#
# A ring of two buffers, a producer that fills and a consumer that empties. Each buffer has two barriers: *full* (the
# copy has arrived) and
# *empty* (it may be overwritten). Take a wait away and the consumer reads what is not there yet. tilewise runs its
# Hopper kernels on a CPU
# in an emulator whose copies arrive late, and which raises on every race and deadlock; here is the whole forward, and
# its timeline.

# %% [markdown] lang="zh"
# ## 旗子
#
# 一个由两个缓冲区组成的环，生产者填，消费者取。每个缓冲区有两个屏障：*full*（数据到了）和 *empty*（可以覆盖了）。少等一次，消费者就会读到还没到的数据。tilewise 在 CPU 上用模拟器运行它的 Hopper kernel，模拟器里的复制会迟到，任何竞争和死锁都会报错；下面是整个前向，以及它的时间线。

# %%
timeline = []
if has_triton("the Hopper forward in the emulator"):
    try:
        from tilewise import attention
        from tilewise.backends.common.launch import DeviceMemory
        from tilewise.backends.hopper.launches import (
            forward_launches,
            new_state,
        )
        from tilewise.request import Request, Spec
        from tilewise_lab.emulator import launch

        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, 256, 1, 64, dtype=torch.bfloat16) for _ in range(3)
        )
        out, lse = torch.empty_like(q), torch.empty(1, 1, 256)
        request = Request(q, k, v, Spec(0.125))
        state = new_state(DeviceMemory(q.device), request)
        forward, *_ = forward_launches(request, out, lse, state, 1)
        timeline = launch(
            forward.kernel,
            forward.programs,
            forward.args,
            forward.options,
            latencies=(1.0,),
        ).timeline
        exact = attention(q.double(), k.double(), v.double())
        print(
            say(
                "emulated Hopper forward against float64: "
                f"{(out - exact).abs().max():.1e}",
                "模拟的 Hopper 前向与 float64 相比："
                f"{(out - exact).abs().max():.1e}",
            )
        )
        units = sorted({span.unit for span in timeline})
        print(say("who is there:", "有谁在场："), ", ".join(units))
    except ImportError as error:
        print(
            say(
                f"(this Triton has no Gluon: {error})",
                f"（这个 Triton 没有 Gluon：{error}）",
            )
        )


# %% tags=["figure"]
def draw(axes):
    units = sorted({span.unit for span in timeline})
    palette = {
        "load": "tab:blue",
        "wait": "lightgray",
        "compute": "tab:green",
        "store": "tab:purple",
    }
    for span in timeline:
        color = next(
            (c for key, c in palette.items() if span.what.startswith(key)),
            "tab:red",
        )
        axes.barh(
            units.index(span.unit),
            span.end - span.start,
            left=span.start,
            color=color,
        )
    axes.set(
        yticks=range(len(units)),
        yticklabels=units,
        xlabel="cycles of the emulator",
        title="Who does what, when: loads blue, products red, waits gray",
    )


if timeline:
    picture(
        "14_timeline",
        draw,
        alt=say(
            "Timeline of the emulated Hopper forward, a row for each "
            "unit: copies (loads blue, stores purple), tensor cores "
            "(products red) and three consumers that compute (green) or "
            "wait (gray). Copies, products and exponentials overlap.",
            "模拟的 Hopper 前向的时间线，每个单元一行：拷贝（读取为蓝色，"
            "写回为紫色）、张量核心（矩阵乘法为红色），以及三个消费者，计"
            "算为绿色，等待为灰色。拷贝、乘法和指数运算互相重叠。",
        ),
        size=(11, 4),
    )

# %% tags=["check"]
if "timeline" in globals():
    assert torch.allclose(out.double(), exact, atol=2e-2)

# %% [markdown]
# ## A wait too few
#
# The emulator's word on a missing barrier is worth more than a lucky run on a GPU. A ring buffer in ten lines, right
# and wrong:

# %% [markdown] lang="zh"
# ## 少等了一次
#
# 漏掉一个屏障时，模拟器的一句话比在 GPU 上侥幸跑通更有价值。十行的环形缓冲区，对的和错的：


# %%
def ring(iterations, buffers, wait_for_empty):
    """A producer is never late, a consumer takes twice as long. Returns what
    the consumer read."""
    slots, read, produced, consumed = [None] * buffers, [], 0, 0
    for tick in range(4 * iterations):
        may_fill = produced < iterations and (
            not wait_for_empty or produced - consumed < buffers
        )
        if may_fill:
            slots[produced % buffers] = produced
            produced += 1
        if tick % 2 and consumed < produced:
            read.append(slots[consumed % buffers])
            consumed += 1
        if consumed == iterations:
            break
    return read


print(
    say("with the empty barrier:   ", "有“空”屏障："),
    ring(8, 2, wait_for_empty=True),
)
print(
    say("without the empty barrier:", "没有“空”屏障："),
    ring(8, 2, wait_for_empty=False),
)

# %% tags=["check"]
assert ring(8, 2, wait_for_empty=True) == list(range(8))
assert ring(8, 2, wait_for_empty=False) != list(range(8))

# %% [markdown]
# That is the whole way from a softmax that overflows to a kernel that keeps a GPU busy. The next lessons go on from
# the merge of lesson 3: to decoding, to many GPUs, to an attention of your own, and to a kernel that you write
# yourself. `docs/` tells the rest: what was measured, what was tried, what failed.
#
# **Exercises.** Three, of rising difficulty: write `registers(consumers, producer)`, how the registers of a processor
# are divided; `phases(iteration, buffers)`, which buffer an iteration uses, and the phase (0 or 1) in which the
# consumer waits for it to be full and the producer for it to be empty; and `ring_time(n, buffers, load, compute)`, the
# time of the whole ring. Get them with `tilewise learn 14 --exercise`.

# %% [markdown] lang="zh"
# 从会溢出的 softmax，到让 GPU 一直忙碌的 kernel，整条路就是这样。后面几课从第 3 课的合并继续往前走：走向解码，走向多个 GPU，走向你自己的注意力，最后是你自己写的 kernel。其余的在 `docs/` 里：测了什么，试了什么，哪些失败了。
#
# **练习。** 三道，由易到难：写出 `registers(consumers, producer)`，即一个处理器的寄存器怎样分配；写出 `phases(iteration, buffers)`，即某次迭代用哪个缓冲区，以及消费者等它变满、生产者等它变空时的相位（0 或 1）；再写出 `ring_time(n, buffers, load, compute)`，即整个环的耗时。用 `tilewise learn 14 --exercise` 取得它们。
