"""Lesson 7: the GPU.

---

第 7 课：GPU。
"""


def launch(n: int, block: int) -> tuple[int, int]:
    """Exercise 1. (blocks, idle): a launch for n elements.

    One thread for each element, `block` threads in a block; `idle` threads of
    the last block have no element.

    ---
    练习 1。(blocks, idle)：为 n 个元素启动多少块。

    每个元素一个线程，每块 `block` 个线程；最后一块里有 `idle` 个线程没有元素。
    """
    raise NotImplementedError


def lines(columns: int, itemsize: int, lane_axis: int) -> int:
    """Exercise 2. How many lines of memory a warp touches.

    A row-major matrix starts at address 0. At one instant lane t of the warp,
    t = 0 .. 31, reads element (0, t) if lane_axis is 1, and element (t, 0) if
    it is 0. A line has 128 bytes.

    ---
    练习 2。一个 warp 碰到多少内存行。

    一个行主序矩阵从地址 0 开始。在同一时刻，warp 的第 t 个 lane
    （t = 0 .. 31）读取元素 (0, t)（lane_axis 为 1 时）或 (t, 0)（为 0 时）。
    一行内存是 128 字节。
    """
    raise NotImplementedError


def branch_cycles(taken: list[bool], then: int, other: int) -> int:
    """Exercise 3. Cycles of an `if` with divergent lanes.

    `taken[i]` says which side thread i takes. Warps of 32 threads run one
    after the other. A warp runs each side that at least one of its lanes
    takes: `then` cycles for one side, `other` for the other.

    ---
    练习 3。lane 走向不同的 `if` 要多少周期。

    `taken[i]` 是线程 i 走哪一边。每 32 个线程一个 warp，依次运行。只要有一个
    lane 走某一边，整个 warp 就要运行那一边：一边 `then` 个周期，另一边 `other`
    个周期。
    """
    raise NotImplementedError
