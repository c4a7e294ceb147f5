# %% [markdown]
# # 7. The GPU: threads, warps, blocks, memory
#
# A CPU core is built to finish *one* thing soon: large caches, branch prediction, a few fast threads. A GPU is built
# to
# finish *all* things soon: thousands of slow threads, and when one waits for memory another runs. This lesson is a
# tour
# of that machine, with models small enough to watch.

# %% [markdown] lang="zh"
# # 7. GPU：线程、warp、线程块与内存
#
# CPU 的核是为了尽快做完*一件*事而造的：大缓存、分支预测、少数几个快线程。GPU 是为了尽快做完*所有*事而造的：成千上万个慢线程，一个在等内存，另一个就上。这一课带你参观这台机器，用的模型都小到可以看着它运行。

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tilewise_lab.costs.devices import DEVICES, KB
from tilewise_lab.learn import has_triton, measured, picture, say, show
from tilewise_lab.machine import coalesce, warps

# %% [markdown]
# ## Latency or throughput
#
# Four tasks, each computing for 2 ticks and then waiting 4 for memory, twice. A core that stays with a task finishes
# the
# first one soonest. A core that switches whenever a task waits finishes all four in less than half the time.

# %% [markdown] lang="zh"
# ## 延迟，还是吞吐
#
# 四个任务，每个先计算 2 个节拍，再等内存 4 个节拍，如此两次。守着一个任务不放的核，最早完成第一个任务。一等就切换的核，完成全部四个任务的时间不到前者的一半。

# %%
alone, together = (
    f(4, compute=2, wait=4)
    for f in (warps.run_to_completion, warps.switch_on_wait)
)
print(
    say(
        f"one after the other: {warps.finish(alone)} ticks; switching: "
        f"{warps.finish(together)} ticks",
        f"一个接一个：{warps.finish(alone)} 拍；轮换着来："
        f"{warps.finish(together)} 拍",
    )
)


# %% tags=["figure"]
def draw(left, right):
    for axes, title, plan in (
        (left, "CPU: latency", alone),
        (right, "GPU: throughput", together),
    ):
        for segment in plan:
            color = "tab:blue" if segment.doing == "compute" else "lightgray"
            axes.barh(
                f"T{segment.task + 1}",
                segment.stop - segment.start,
                left=segment.start,
                color=color,
            )
        axes.set(title=title, xlabel="ticks", xlim=(0, 50))
        axes.invert_yaxis()


picture(
    "07_latency_throughput",
    draw,
    alt=say(
        "Two timelines of four tasks that compute (blue) and wait "
        "(gray). The CPU finishes each task early, one after the "
        "other; the GPU switches while a task waits and finishes all "
        "four sooner.",
        "四个任务的两条时间线，蓝色是计算，灰色是等待。CPU 一个接一个，"
        "让每个任务尽早完成；GPU 在一个任务等待时换到另一个，四个任务"
        "全部完成得更早。",
    ),
    panels=(1, 2),
)

# %% tags=["check"]
assert (warps.finish(alone), warps.finish(together)) == (48, 20)

# %% [markdown]
# ## Threads come in warps
#
# A kernel is written for one thread; the hardware runs them 32 at a time, as a **warp** with one program counter
# (SIMT). Adding two vectors of 8 numbers therefore starts 32 threads. The guard `if (i < n)` switches 24 of them off:
# they are *predicated*, they do not loop and wait. In Triton the guard is the `mask`:

# %% [markdown] lang="zh"
# ## 线程以 warp 为单位
#
# kernel 是为一个线程写的；硬件一次运行 32 个，称为一个 **warp**，共用一个程序计数器（SIMT）。所以两个 8 维向量相加也要启动 32 个线程。条件 `if (i < n)` 关掉其中 24 个：它们被*谓词屏蔽*，并不是在循环里空等。在 Triton 里，这个条件就是 `mask`：

# %%
(warp,) = warps.warps(8)
print(
    say("lanes:", "各 lane："),
    "█" * warp.active + "░" * warp.masked,
    say(
        f"{warp.active} active, {warp.masked} masked",
        f"{warp.active} 个在工作，{warp.masked} 个被屏蔽",
    ),
)

if has_triton("adding vectors and matrices in Triton"):
    import triton
    import triton.language as tl

    from tilewise_lab.learn.kernels import matrix_add, softmax_rows

    @triton.jit
    def vector_add(a, b, c, n, BLOCK: tl.constexpr):
        """c = a + b: program p owns the elements p · BLOCK .. (p + 1) ·
        BLOCK, and leaves those past n alone."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        total = tl.load(a + i, mask=inside) + tl.load(b + i, mask=inside)
        tl.store(c + i, total, mask=inside)

    a, b = (
        torch.tensor([1, 4, 3, 9, 5, 11, 7, 2]),
        torch.tensor([3, 2, 6, 1, 2, 5, 6, 9]),
    )
    c = torch.zeros(32, dtype=torch.int64)
    vector_add[(1,)](a, b, c, 8, BLOCK=32)
    print(c.tolist())

# %% tags=["check"]
if has_triton():
    assert c[:8].tolist() == [4, 6, 9, 10, 7, 16, 13, 11]
    assert not c[8:].any()  # the masked lanes wrote nothing
assert (warp.active, warp.masked) == (8, 24)

# %% [markdown]
# ## More elements than threads: blocks
#
# A million elements do not fit one block of threads. So a grid of **blocks** is started, and a thread finds its
# element from both numbers:
#
# $$i = \text{block id} \cdot \text{block size} + \text{thread id}$$
#
# With 8 elements and blocks of 2 that is 4 blocks; with a million and blocks of 32 it is 31,250. Each block runs on
# one processor (SM) from start to end; if there are more blocks than room, they wait their turn.

# %% [markdown] lang="zh"
# ## 元素比线程多：线程块
#
# 一百万个元素装不进一个线程块。于是启动由许多**线程块**组成的网格，线程由两个编号找到自己的元素：
#
# $$i = \text{block id} \cdot \text{block size} + \text{thread id}$$
#
# 8 个元素、每块 2 个，就是 4 块；一百万个元素、每块 32 个，就是 31,250 块。每个线程块从头到尾在一个处理器（SM）上运行；块比位置多时，就排队等着。

# %%
print(
    [
        [warps.element(block, 2, thread) for thread in range(2)]
        for block in range(4)
    ]
)

if has_triton("the same on a grid"):
    c = torch.zeros(8, dtype=torch.int64)
    vector_add[(4,)](a, b, c, 8, BLOCK=2)
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    z, w = torch.empty(5, 7), torch.empty(5, 7)
    matrix_add[(3, 2)](x, y, z, 5, 7, BLOCK_M=2, BLOCK_N=4)
    # one program per row: lesson 2's three passes, one trip to memory
    softmax_rows[(5,)](x, w, 7, BLOCK=8)

# %% tags=["check"]
if has_triton():
    assert c.tolist() == [4, 6, 9, 10, 7, 16, 13, 11]
    assert torch.equal(z, x + y)
    assert torch.allclose(w, torch.softmax(x, -1), atol=1e-6)
assert warps.grid(8, block=2) == 4
assert [
    warps.element(block, 2, thread)
    for block in range(4)
    for thread in range(2)
] == list(range(8))
assert warps.grid(1_000_000, block=32) == 31_250

# %% [markdown]
# ## When lanes disagree
#
# One program counter for 32 lanes: at an `if` on which they disagree, the warp runs *both* sides, each with the other
# lanes switched off. The time is the sum. If whole warps agree, it is not: data sorted by the condition runs faster.

# %% [markdown] lang="zh"
# ## lane 之间意见不一
#
# 32 个 lane 只有一个程序计数器：碰到一个各 lane 结果不同的 `if`，warp 就把*两边*都跑一遍，跑一边时关掉另一边的 lane。耗时是两者之和。如果整个 warp 一致，就不必如此：按条件排过序的数据跑得更快。


# %%
def branch(condition, then, otherwise):
    """Cycles of one warp: the sides that any of its lanes takes, one after
    the other."""
    return then * any(condition) + otherwise * (not all(condition))


def branches(condition, then, otherwise):
    return sum(
        branch(condition[i : i + 32], then, otherwise)
        for i in range(0, len(condition), 32)
    )


mixed = [lane % 2 == 0 for lane in range(128)]
print(
    say("if 10, else 7 cycles:", "if 要 10 个周期，else 要 7 个："),
    branch(mixed[:32], 10, 7),
)
print(
    say(
        f"128 mixed lanes: {branches(mixed, 10, 7)} cycles; sorted: "
        f"{branches(sorted(mixed), 10, 7)}",
        f"128 个混杂的 lane：{branches(mixed, 10, 7)} 个周期；排好序："
        f"{branches(sorted(mixed), 10, 7)}",
    )
)

# %% tags=["check"]
assert (
    branch(mixed[:32], 10, 7) == warps.branch(mixed[:32], 10, 7).taken == 17
)
assert branch([True] * 32, 10, 7) == 10
assert (
    branches(sorted(mixed), 10, 7)
    == branches(mixed, 10, 7) / 2
    == warps.branches(sorted(mixed), 10, 7)
)

# %% [markdown]
# On a real GPU: the same arithmetic on either side of an `if`, in CUDA. When every other *warp* goes right the time is
# the mean of the two sides; when every other *lane* does, it is close to their sum.

# %% [markdown] lang="zh"
# 在真实的 GPU 上：`if` 两边做同样多的算术，用 CUDA 写成。每隔一个 *warp* 走右边时，耗时是两边的平均；每隔一个 *lane* 走右边时，耗时接近两边之和。

# %%
times = measured("divergence")
if times:
    sides = {
        "left": say("no threads", "没有线程"),
        "right": say("all threads", "全部线程"),
        "by warp": say("every other warp", "每隔一个 warp"),
        "by lane": say("every other lane", "每隔一个 lane"),
    }
    show(
        say(["threads that go right", "ms"], ["走右边的线程", "ms"]),
        [[who, f"{times[side]:.2f}"] for side, who in sides.items()],
    )

# %% tags=["check"]
if times:
    assert times["by lane"] > 1.3 * max(times["right"], times["by warp"])

# %% [markdown]
# ## The machine in numbers
#
# An SM holds the arithmetic: ordinary units, tensor cores for matrices, registers, and shared memory. How many SMs?
# Take
# it from the device, never from a blog: the A100's *die* has 128, the product 108.

# %% [markdown] lang="zh"
# ## 用数字描述这台机器
#
# SM 里有运算单元：普通单元、做矩阵的 tensor core、寄存器和共享内存。有多少个 SM？要以设备为准，别信博客：A100 的*芯片*上有 128 个，产品里启用了 108 个。

# %%
show(
    say(
        [
            "",
            "SMs",
            "HBM",
            "GB/s",
            "L2",
            "shared memory per block",
            "16-bit TFLOP/s",
        ],
        ["", "SM 数", "HBM", "GB/s", "L2", "每块的共享内存", "16 位 TFLOP/s"],
    ),
    [
        [
            d.name,
            d.sms,
            f"{d.memory >> 30} GB",
            f"{d.bandwidth / 1e9:.0f}",
            f"{d.l2 >> 20} MB",
            f"{d.shared // KB} KB",
            f"{d.flops('bfloat16') / 1e12:.0f}",
        ]
        for d in DEVICES.values()
    ],
)

# %% tags=["check"]
assert DEVICES["A100"].sms == 108
assert DEVICES["H200"].sms == 132

# %% [markdown]
# ## Far is slow
#
# The farther from the arithmetic, the slower: registers (a cycle), shared memory and L1 (20 to 30), L2 (about 200),
# HBM
# (several hundred). Registers belong to a thread, shared memory to a block, HBM to everyone. Two blocks that want to
# talk
# must do so through HBM (or L2): which is why tilewise's portable backward gives every sum a single owner (lesson 13).

# %% [markdown] lang="zh"
# ## 远就是慢
#
# 离运算单元越远越慢：寄存器（一个周期），共享内存和 L1（20 到 30），L2（约 200），HBM（几百）。寄存器属于一个线程，共享内存属于一个线程块，HBM 属于所有人。两个线程块要交流，只能通过 HBM（或 L2）：这就是为什么 tilewise 的通用反向 kernel 让每个和只有一个主人（第 13 课）。

# %%
show(
    say(
        ["memory", "whose", "cycles (rule of thumb)"],
        ["存储", "属于谁", "周期（经验值）"],
    ),
    [
        say(["registers", "one thread", "1"], ["寄存器", "一个线程", "1"]),
        say(
            ["shared memory, L1", "one block", "20-30"],
            ["共享内存、L1", "一个块", "20-30"],
        ),
        say(["L2", "all", "~200"], ["L2", "所有", "~200"]),
        say(["HBM", "all", "300+"], ["HBM", "所有", "300+"]),
    ],
)
chased = measured("latency")
if chased:
    print(
        say(
            "nanoseconds per dependent load:",
            "每次依赖前一次的读取要几纳秒：",
        ),
        {name: round(chased[name]) for name in ("L1", "L2", "HBM")},
    )

# %% tags=["check"]
if chased:
    assert chased["L1"] < chased["L2"] < chased["HBM"]

# %% [markdown]
# ## One instruction, 32 addresses
#
# Memory answers in lines of 128 bytes. When the 32 lanes of a warp read 32 neighbouring floats, that is one line. When
# they read a column of a wide matrix, it is 32 lines (of which 32 bytes each are fetched), and
# seven eighths of what is fetched is thrown away. What counts is what
# *neighbouring lanes do at one instant*. "Threads move along rows" can be read two ways, and one of them is the slow
# one:

# %% [markdown] lang="zh"
# ## 一条指令，32 个地址
#
# 内存以 128 字节为一行来应答。warp 的 32 个 lane 读 32 个相邻的浮点数，就是一行。读一个宽矩阵的一列，就是 32 行（每行取 32 字节），取来的八分之七都扔掉了。要紧的是*相邻的 lane 在同一时刻做什么*。“线程沿着行移动”可以有两种理解，其中一种恰恰是慢的：

# %%
for name, pattern in (
    (say("lanes share a row", "各 lane 同读一行"), coalesce.row_per_warp),
    (
        say("each lane walks its own row", "每个 lane 沿自己的一行走"),
        coalesce.row_per_thread,
    ),
):
    found = coalesce.touched(pattern(4096, 0), itemsize=4)
    print(
        say(
            f"{name}: {found.lines} line(s), {found.efficiency:.0%} of the "
            "bytes used",
            f"{name}：{found.lines} 行，用上的字节 {found.efficiency:.0%}",
        )
    )

strides = [1, 2, 4, 8, 16, 32, 64]
rates = measured("coalescing")


# %% tags=["figure"]
def draw(axes):
    axes.plot(
        strides,
        [
            coalesce.touched(coalesce.strided(s), 4).efficiency
            for s in strides
        ],
        "o-",
        label="bytes used / fetched",
    )
    if rates:
        best = rates["1"]
        kept = [int(s) for s in rates if s.isdigit() and int(s) <= 64]
        axes.plot(
            kept,
            [rates[str(s)] / best for s in kept],
            "s--",
            label=f"bandwidth on an {rates['device']}, of its best",
        )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="distance between the elements of neighbouring lanes",
        ylim=(0, 1.05),
        title="Coalescing",
    )
    axes.legend()


picture(
    "07_coalescing",
    draw,
    alt=say(
        "Share of the fetched bytes that is used, over the distance "
        "between the elements of neighbouring lanes: 1 for "
        "neighbours, half at distance 2, an eighth from distance 8 "
        "on; the measured bandwidth falls with it.",
        "读取的字节中用到的比例，随相邻 lane 的元素间距的变化：相邻时"
        "为 1，间距 2 时为一半，间距 8 起为八分之一；实测带宽随之下降。",
    ),
)

# %% tags=["check"]
assert coalesce.touched(coalesce.contiguous(), 4).lines == 1
assert coalesce.touched(coalesce.strided(4096), 4).lines == 32
assert coalesce.touched(coalesce.row_per_thread(4096, 0), 4).lines == 32
if rates:
    assert rates["1"] > 3 * rates["32"]

# %% [markdown]
# Some history: transistor counts double about every *two* years. Until about 2005 smaller transistors also ran faster
# at the same power (Dennard scaling); since then speed comes from doing more at once. That is why this machine looks
# the way it does.
#
# **Exercises.** Three, of rising difficulty: write `launch(n, block)`, the blocks and the idle threads of a launch;
# `lines(columns, itemsize, lane_axis)`, the memory lines that one warp touches along a row or a column; and
# `branch_cycles(taken, then, other)`, the cost of an `if` whose lanes disagree. Get them with
# `tilewise learn 7 --exercise`.

# %% [markdown] lang="zh"
# 一点历史：晶体管数量大约每*两*年翻一番。2005 年前后为止，更小的晶体管在同样功耗下也跑得更快（Dennard 缩放）；此后，速度只能来自同时做更多的事。这台机器长成这个样子，原因就在这里。
#
# **练习。** 三道，由易到难：写出 `launch(n, block)`，即一次启动的块数和空闲线程数；写出 `lines(columns, itemsize, lane_axis)`，即一个 warp 沿着行或列读取时碰到多少内存行；再写出 `branch_cycles(taken, then, other)`，即 lane 走向不一致的 `if` 的代价。用 `tilewise learn 7 --exercise` 取得它们。
