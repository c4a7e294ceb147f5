# %% [markdown]
# # 7. The GPU: threads, warps, blocks, memory
#
# A CPU core is built to finish *one* thing soon: large caches, branch prediction, a few fast threads. A GPU is built to
# finish *all* things soon: thousands of slow threads, and when one waits for memory another runs. This lesson is a tour
# of that machine, with models small enough to watch.

# %%
# needs: interpreter
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tilewise.costs.devices import DEVICES, KB
from tilewise_lab.learn import has_triton, measured, picture, show
from tilewise_lab.machine import coalesce, warps

# %% [markdown]
# ## Latency or throughput
#
# Four tasks, each computing for 2 ticks and then waiting 4 for memory, twice. A core that stays with a task finishes the
# first one soonest. A core that switches whenever a task waits finishes all four in less than half the time.

# %%
alone, together = (f(4, compute=2, wait=4) for f in (warps.run_to_completion, warps.switch_on_wait))
print(f"one after the other: {warps.finish(alone)} ticks; switching: {warps.finish(together)} ticks")
assert (warps.finish(alone), warps.finish(together)) == (48, 20)


def draw(left, right):
    for axes, title, plan in ((left, "CPU: latency", alone), (right, "GPU: throughput", together)):
        for segment in plan:
            color = "tab:blue" if segment.doing == "compute" else "lightgray"
            axes.barh(f"T{segment.task + 1}", segment.stop - segment.start, left=segment.start, color=color)
        axes.set(title=title, xlabel="ticks", xlim=(0, 50))
        axes.invert_yaxis()


picture("07_latency_throughput", draw, panels=(1, 2))

# %% [markdown]
# ## Threads come in warps
#
# A kernel is written for one thread; the hardware runs them 32 at a time, as a **warp** with one program counter (SIMT).
# Adding two vectors of 8 numbers therefore starts 32 threads. The guard `if (i < n)` switches 24 of them off: they are
# *predicated*, they do not loop and wait.

# %%
(warp,) = warps.warps(8)
print("lanes:", "█" * warp.active + "░" * warp.masked, f"{warp.active} active, {warp.masked} masked")
assert (warp.active, warp.masked) == (8, 24)

if has_triton("adding vectors and matrices in Triton"):
    import inspect

    from tilewise_lab.learn.kernels import matrix_add, softmax_rows, vector_add

    print(inspect.getsource(vector_add.fn))
    a, b = torch.tensor([1, 4, 3, 9, 5, 11, 7, 2]), torch.tensor([3, 2, 6, 1, 2, 5, 6, 9])
    c = torch.zeros(32, dtype=torch.int64)
    vector_add[(1,)](a, b, c, 8, BLOCK=32)
    print(c.tolist())
    assert c[:8].tolist() == [4, 6, 9, 10, 7, 16, 13, 11]
    assert not c[8:].any()  # the masked lanes wrote nothing

# %% [markdown]
# ## More elements than threads: blocks
#
# A million elements do not fit one block of threads. So a grid of **blocks** is started, and a thread finds its element
# from both numbers: i = block_id · block_size + thread_id. With 8 elements and blocks of 2 that is 4 blocks; with a million
# and blocks of 32 it is 31,250. Each block runs on one processor (SM) from start to end; if there are more blocks than
# room, they wait their turn.

# %%
assert warps.grid(8, block=2) == 4
print([[warps.element(block, 2, thread) for thread in range(2)] for block in range(4)])
assert [warps.element(block, 2, thread) for block in range(4) for thread in range(2)] == list(range(8))
assert warps.grid(1_000_000, block=32) == 31_250

if has_triton("the same on a grid"):
    c = torch.zeros(8, dtype=torch.int64)
    vector_add[(4,)](a, b, c, 8, BLOCK=2)
    assert c.tolist() == [4, 6, 9, 10, 7, 16, 13, 11]
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    z = torch.empty(5, 7)
    matrix_add[(3, 2)](x, y, z, 5, 7, BLOCK_M=2, BLOCK_N=4)
    assert torch.equal(z, x + y)
    softmax_rows[(5,)](x, z, 7, BLOCK=8)  # one program per row: lesson 2's three passes, one trip to memory
    assert torch.allclose(z, torch.softmax(x, -1), atol=1e-6)

# %% [markdown]
# ## When lanes disagree
#
# One program counter for 32 lanes: at an `if` on which they disagree, the warp runs *both* sides, each with the other
# lanes switched off. The time is the sum. If whole warps agree, it is not: data sorted by the condition runs faster.

# %%
mixed = [lane % 2 == 0 for lane in range(128)]
print("if 10, else 7 cycles:", warps.branch(mixed[:32], 10, 7))
assert warps.branch(mixed[:32], 10, 7).taken == 17
assert warps.branch([True] * 32, 10, 7).taken == 10
print(f"128 mixed lanes: {warps.branches(mixed, 10, 7)} cycles; sorted: {warps.branches(sorted(mixed), 10, 7)}")
assert warps.branches(sorted(mixed), 10, 7) == warps.branches(mixed, 10, 7) / 2

# %% [markdown]
# On a real GPU: the same arithmetic on either side of an `if`, in CUDA. When every other *warp* goes right the time is
# the mean of the two sides; when every other *lane* does, it is close to their sum.

# %%
times = measured("divergence")
if times:
    show(["who goes right", "ms"], [[who, f"{times[who]:.2f}"] for who in ("left", "right", "by warp", "by lane")])
    assert times["by lane"] > 1.3 * max(times["right"], times["by warp"])

# %% [markdown]
# ## The machine in numbers
#
# An SM holds the arithmetic: ordinary units, tensor cores for matrices, registers, and shared memory. How many SMs? Take
# it from the device, never from a blog: the A100's *die* has 128, the product 108.

# %%
show(
    ["", "SMs", "HBM", "GB/s", "L2", "shared memory per block", "16-bit TFLOP/s"],
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
assert DEVICES["A100"].sms == 108
assert DEVICES["H200"].sms == 132

# %% [markdown]
# ## Far is slow
#
# The farther from the arithmetic, the slower: registers (a cycle), shared memory and L1 (20 to 30), L2 (about 200), HBM
# (several hundred). Registers belong to a thread, shared memory to a block, HBM to everyone. Two blocks that want to talk
# must do so through HBM (or L2): which is why tilewise's portable backward gives every sum a single owner (lesson 13).

# %%
show(
    ["memory", "whose", "cycles (rule of thumb)"],
    [
        ["registers", "one thread", "1"],
        ["shared memory, L1", "one block", "20-30"],
        ["L2", "all", "~200"],
        ["HBM", "all", "300+"],
    ],
)
chased = measured("latency")
if chased:
    print("nanoseconds per dependent load:", {name: round(chased[name]) for name in ("L1", "L2", "HBM")})
    assert chased["L1"] < chased["L2"] < chased["HBM"]

# %% [markdown]
# ## One instruction, 32 addresses
#
# Memory answers in lines of 128 bytes. When the 32 lanes of a warp read 32 neighbouring floats, that is one line. When
# they read a column of a wide matrix, it is 32 lines (of which 32 bytes each are fetched), and
# seven eighths of what is fetched is thrown away. What counts is what
# *neighbouring lanes do at one instant*. "Threads move along rows" can be read two ways, and one of them is the slow one:

# %%
for name, pattern in (
    ("lanes share a row", coalesce.row_per_warp),
    ("each lane walks its own row", coalesce.row_per_thread),
):
    found = coalesce.touched(pattern(4096, 0), itemsize=4)
    print(f"{name}: {found.lines} line(s), {found.efficiency:.0%} of the bytes used")
assert coalesce.touched(coalesce.contiguous(), 4).lines == 1
assert coalesce.touched(coalesce.strided(4096), 4).lines == 32
assert coalesce.touched(coalesce.row_per_thread(4096, 0), 4).lines == 32

strides = [1, 2, 4, 8, 16, 32, 64]
rates = measured("coalescing")


def draw(axes):
    axes.plot(
        strides,
        [coalesce.touched(coalesce.strided(s), 4).efficiency for s in strides],
        "o-",
        label="bytes used / fetched",
    )
    if rates:
        best = rates["1"]
        kept = [int(s) for s in rates if s.isdigit() and int(s) <= 64]
        axes.plot(
            kept, [rates[str(s)] / best for s in kept], "s--", label=f"bandwidth on an {rates['device']}, of its best"
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="distance between the elements of neighbouring lanes", ylim=(0, 1.05), title="Coalescing")
    axes.legend()


picture("07_coalescing", draw)
if rates:
    assert rates["1"] > 3 * rates["32"]

# %% [markdown]
# Some history, since the notes tell it: transistor counts double about every *two* years. Until about 2005 smaller
# transistors also ran faster at the same power (Dennard scaling); since then speed comes from doing more at once. That is
# why this machine looks the way it does.
#
# **Exercise.** Write `lines(columns, itemsize, lane_axis)`: the memory lines that one warp touches when its 32 lanes
# read neighbouring elements along a row (`lane_axis=1`) or along a column (`lane_axis=0`) of a row-major matrix.
