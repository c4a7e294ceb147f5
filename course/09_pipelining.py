# %% [markdown]
# # 9. Software pipelining
#
# A loop loads $A$, loads $B$, multiplies, stores. While it loads, the multiplier is idle; while it multiplies, the
# memory is idle. One unit in four is ever busy. But iteration 2's load does not depend on iteration 1's product: start
# it early. Both plans, in a line each:

# %% [markdown] lang="zh"
# # 9. 软件流水线
#
# 一个循环：读 $A$，读 $B$，相乘，写回。读的时候乘法器闲着，乘的时候内存闲着，四个单元里永远只有一个在忙。但第 2 次迭代的读取并不依赖第 1 次迭代的乘积：那就提前开始。两种安排，各一行：

# %%
# needs: compiler
import torch

from tilewise_lab.costs.devices import DEVICES, KB
from tilewise_lab.learn import has_triton, measured, picture, say, show
from tilewise_lab.machine import pipeline
from tilewise_lab.machine.pipeline import Slot


def sequential(iterations, stages=4):
    """Iteration i occupies unit s in slot i · stages + s."""
    return [
        Slot(s, i, i * stages + s)
        for i in range(iterations)
        for s in range(stages)
    ]


def pipelined(iterations, stages=4):
    """The next iteration enters a unit as soon as the one before has left it:
    slot i + s."""
    return [
        Slot(s, i, i + s) for i in range(iterations) for s in range(stages)
    ]


# %% [markdown]
# ## 28 slots, or 10
#
# Four stages and seven iterations, one slot each. One after the other: 28 slots. Overlapped: a **prologue** in which
# the pipe
# fills, a **steady state** in which every unit works (each on another iteration), an **epilogue** in which it drains.

# %% [markdown] lang="zh"
# ## 28 个时隙，还是 10 个
#
# 四个阶段，七次迭代，每个占一个时隙。一个接一个：28 个时隙。重叠起来：先是**序幕**（prologue），流水线逐渐填满；然后是**稳态**，每个单元都在忙（各忙各的迭代）；最后是**尾声**（epilogue），流水线排空。

# %%
one, overlapped = sequential(7), pipelined(7)
print(
    say(
        f"{pipeline.slots(one)} slots at {pipeline.utilisation(one):.0%}; "
        f"{pipeline.slots(overlapped)} at "
        f"{pipeline.utilisation(overlapped):.0%}",
        f"{pipeline.slots(one)} 个时隙，利用率 "
        f"{pipeline.utilisation(one):.0%}；{pipeline.slots(overlapped)} 个，"
        f"{pipeline.utilisation(overlapped):.0%}",
    )
)
busy = [len(list(pipeline.at(overlapped, t))) for t in range(10)]


# %% tags=["figure"]
def draw(top, bottom):
    colors = [f"C{i}" for i in range(7)]
    for axes, plan, title in (
        (top, one, "one at a time"),
        (bottom, overlapped, "pipelined"),
    ):
        for slot in plan:
            axes.barh(
                pipeline.STAGES[slot.unit],
                slot.length,
                left=slot.start,
                color=colors[slot.iteration],
                edgecolor="white",
            )
            axes.text(
                slot.start + 0.5,
                slot.unit,
                slot.iteration + 1,
                ha="center",
                va="center",
                color="white",
                fontsize=7,
            )
        axes.set(title=f"{title}: {pipeline.slots(plan)} slots", xlim=(0, 28))
        axes.invert_yaxis()


picture(
    "09_pipeline",
    draw,
    alt=say(
        "Two timelines of seven iterations on four units. One "
        "iteration at a time takes 28 slots, with one unit busy in "
        "each; pipelined, the iterations form a staircase of 10 "
        "slots.",
        "七次迭代在四个单元上的两条时间线。一次一个迭代要 28 个时隙，"
        "每个时隙只有一个单元忙；流水化之后，迭代排成阶梯，只要 10 个"
        "时隙。",
    ),
    panels=(2, 1),
    size=(9, 5),
)

# %% tags=["check"]
assert (pipeline.slots(one), pipeline.slots(overlapped)) == (28, 10)
assert pipeline.slots(pipeline.pipelined(7)) == 10
assert all(len(list(pipeline.at(one, t))) == 1 for t in range(28))
assert busy == [1, 2, 3, 4, 4, 4, 4, 3, 2, 1]

# %% [markdown]
# ## What it takes
#
# Two things. The operations must be **asynchronous**: a load is started here and waited for elsewhere (it has nothing
# to do with out-of-order execution, which GPUs do not have). And every iteration in flight needs a buffer of its own:
# here four instead of one. On a GPU the buffers are tiles in shared memory, so `num_stages` is bounded by
#
# $$\text{kept} + \text{num\_stages} \cdot \text{streamed} \le \text{shared memory}$$

# %% [markdown] lang="zh"
# ## 需要什么
#
# 两样东西。操作必须是**异步**的：在这里发起读取，在别处等它完成（这与乱序执行无关，GPU 没有乱序执行）。另外，每个在途的迭代都要有自己的缓冲区：这里是四个而不是一个。在 GPU 上，缓冲区就是共享内存里的块，所以 `num_stages` 受限于
#
# $$\text{kept} + \text{num\_stages} \cdot \text{streamed} \le \text{shared memory}$$

# %%
# bf16, D 128: a Q tile is kept, K and V tiles stream
q_tile, kv_tiles = (128 * 128 * 2, 2 * 128 * 128 * 2)
show(
    say(
        [
            "device",
            "shared memory",
            "stages of 128-row K and V tiles that fit",
        ],
        ["设备", "共享内存", "放得下几级 128 行的 K、V 块"],
    ),
    [
        [
            d.name,
            f"{d.shared // KB} KB",
            pipeline.stages_that_fit(d.shared, q_tile, kv_tiles),
        ]
        for d in DEVICES.values()
    ],
)

if has_triton("a kernel with more stages than fit"):
    from tilewise.backends.triton import launches as launch
    from tilewise.request import Gpu, Request, Spec
    from tilewise_lab.costs.compiled import compile_for

    q = torch.empty(1, 512, 4, 128, dtype=torch.bfloat16, device="meta")
    request, lse = (
        Request(q, q, q, Spec(0.1)),
        torch.empty(1, 4, 512, device="meta"),
    )
    forward = launch.forward_launch(request, q, lse, Gpu("cuda", 90))
    for stages in (1, 3, 9):
        made = compile_for(
            90,
            forward.kernel,
            forward.args,
            forward.options | {"num_stages": stages},
        )
        fits = made.shared <= DEVICES["H200"].shared
        print(
            f"num_stages {stages}:",
            say(
                f"{made.shared // KB} KB of shared memory",
                f"共享内存 {made.shared // KB} KB",
            ),
            ""
            if fits
            else say(
                "(more than an H200 has: it would not launch)",
                "（比 H200 有的还多：启动不了）",
            ),
        )

times = measured("stages")
if times:
    print(
        say("forward, by num_stages (ms):", "前向，按 num_stages（ms）："),
        {n: t and round(t, 2) for n, t in times.items() if n.isdigit()},
    )

# %% tags=["check"]
if has_triton():
    assert made.shared > DEVICES["H200"].shared
assert pipeline.in_flight(one) == 1
assert pipeline.in_flight(overlapped) == 4
assert pipeline.stages_that_fit(DEVICES["H200"].shared, q_tile, kv_tiles) == 3

# %% [markdown]
# ## What Triton does with a loop
#
# You write `tl.load` and `tl.dot` in a `for`; Triton makes the prologue, the copies that do not wait, the buffers and
# the
# waits. It also chooses which thread holds which element (layouts), uses the matrix units, and widens loads. All of
# that
# can be read, stage by stage: the program as written (ttir), on layouts and buffers (ttgir), in assembly (ptx, sass).
# `tilewise explain --kernel --device H200` prints this for any shape.

# %% [markdown] lang="zh"
# ## Triton 怎样处理一个循环
#
# 你在 `for` 里写 `tl.load` 和 `tl.dot`；序幕、不等待的复制、缓冲区和等待，都由 Triton 生成。它还决定哪个线程持有哪个元素（布局），启用矩阵单元，加宽读取。这一切都可以逐级读到：写下的程序（ttir），有了布局和缓冲区的程序（ttgir），汇编（ptx、sass）。`tilewise explain --kernel --device H200` 可以对任何形状打印出来。

# %%
if has_triton("the compiler's stages"):
    from tilewise_lab.explain.stages import stages, text

    found = {}
    for capability in (80, 90):
        one_kernel = launch.forward_launch(
            request, q, lse, Gpu("cuda", capability)
        )
        made = compile_for(
            capability, one_kernel.kernel, one_kernel.args, one_kernel.options
        )
        print(f"\nsm_{capability}\n{text(made)}")
        found[capability] = {s.operation for s in stages(made)}

# %% tags=["check"]

if has_triton():
    for capability, seen in found.items():
        # HBM → SRAM, while the matrix units work
        assert {"async_copy", "async_wait", "cp.async", "LDGSTS"} <= seen
        assert ("warp_group_dot" in seen) == (capability == 90)

# %% [markdown]
# ## The same idea, one level up
#
# Put the layers of a model on several devices and send batches through: while GPU 2 works on batch 1, GPU 1 has batch
# 2 and GPU 3 batch 0. Prologue and epilogue are now called the *bubble*: with $p$ devices and $b$ batches a share of
#
# $$\frac{p - 1}{b + p - 1}$$
#
# of the time is idle. More batches, smaller bubble.

# %% [markdown] lang="zh"
# ## 同样的想法，高一个层次
#
# 把模型的各层放到几个设备上，让一批批数据流过：GPU 2 处理第 1 批时，GPU 1 在处理第 2 批，GPU 3 在处理第 0 批。序幕和尾声现在叫做*气泡*：$p$ 个设备、$b$ 批数据时，空闲时间的比例是
#
# $$\frac{p - 1}{b + p - 1}$$
#
# 批数越多，气泡越小。

# %%
for unit, batch in pipeline.at(pipeline.forward_only(3, 5), 2):
    print(
        say(
            f"at time 2 GPU{unit + 1} has batch {batch}",
            f"时刻 2：GPU{unit + 1} 处理第 {batch} 批",
        )
    )
show(
    say(["batches", "bubble on 4 devices"], ["批数", "4 个设备上的气泡"]),
    [[m, f"{pipeline.bubble(4, m):.0%}"] for m in (1, 4, 16, 64)],
)


# %% tags=["figure"]
def draw_devices(axes):
    for slot in pipeline.forward_backward(3, 4):
        is_forward = slot.iteration < 4
        axes.barh(
            f"GPU{slot.unit + 1}",
            1,
            left=slot.start,
            color="tab:blue" if is_forward else "tab:green",
            edgecolor="white",
        )
        axes.text(
            slot.start + 0.5,
            slot.unit,
            f"{'F' if is_forward else 'B'}{slot.iteration % 4}",
            ha="center",
            va="center",
            color="white",
        )
    axes.set(
        title="4 batches, forward and backward: white is the bubble",
        xlabel="time",
    )
    axes.invert_yaxis()


picture(
    "09_bubble",
    draw_devices,
    alt=say(
        "Timeline of the forwards F0 to F3 and the backwards B0 to "
        "B3 of four batches on three GPUs: a staircase down and one "
        "up, with white gaps, the bubble, at both ends and in the "
        "middle.",
        "四个 batch 的前向 F0 到 F3 和反向 B0 到 B3 在三块 GPU 上的时"
        "间线：先下后上的两段阶梯，两端和中间的空白就是气泡。",
    ),
    size=(8, 2.6),
)

# %% tags=["check"]
for m in (1, 4, 16):
    both = pipeline.forward_backward(4, m)
    assert abs(1 - pipeline.utilisation(both) - pipeline.bubble(4, m)) < 1e-12
assert list(pipeline.at(pipeline.forward_only(3, 5), 2)) == [
    (0, 2),
    (1, 1),
    (2, 0),
]

# %% [markdown]
# FlashAttention's loop is such a pipeline: while block $j$ is multiplied, block $j + 1$ of $K$ and $V$ is already on
# its way from HBM. On Hopper (lesson 14) the stages are even done by different warps.
#
# **Exercises.** Three, of rising difficulty: write `slots(iterations, stages)` for stages of equal length;
# `most_stages(tile, kept, shared)`, the stages that fit in shared memory; and `finish(iterations, durations)` for
# stages that take different times. Get them with `tilewise learn 9 --exercise`.

# %% [markdown] lang="zh"
# FlashAttention 的循环就是这样一条流水线：第 $j$ 块还在相乘，$K$ 和 $V$ 的第 $j + 1$ 块已经在从 HBM 来的路上。在 Hopper 上（第 14 课），各阶段甚至由不同的 warp 来做。
#
# **练习。** 三道，由易到难：写出 `slots(iterations, stages)`，各阶段等长；写出 `most_stages(tile, kept, shared)`，即共享内存放得下几个阶段；再写出 `finish(iterations, durations)`，各阶段耗时不同。用 `tilewise learn 9 --exercise` 取得它们。
