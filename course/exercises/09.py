"""Lesson 9: pipelines.

---

第 9 课：流水线。
"""


def slots(iterations: int, stages: int) -> int:
    """Exercise 1. The time of a pipeline whose stages take one slot each.

    An iteration enters the first stage in the slot after the one before.

    ---
    练习 1。每个阶段都占一个时隙的流水线，一共要多少时隙。

    后一个迭代比前一个晚一个时隙进入第一个阶段。
    """
    raise NotImplementedError


def most_stages(tile: int, kept: int, shared: int) -> int:
    """Exercise 2. The largest num_stages that fits, 0 if none does.

    A stage holds one tile of K and one of V, `tile` bytes each. `kept` bytes
    (the tile of Q) stay for the whole loop. `shared` bytes are there.

    ---
    练习 2。放得下的最大 num_stages；一个也放不下时为 0。

    一个阶段放 K 和 V 各一块，每块 `tile` 字节。`kept` 字节（Q 的一块）在整个
    循环里都留着。一共有 `shared` 字节。
    """
    raise NotImplementedError


def finish(iterations: int, durations: list[int]) -> int:
    """Exercise 3. When the last iteration leaves the last stage.

    `durations[s]` is the time of stage s. A stage serves one iteration at a
    time, in order. An iteration enters a stage as soon as it has left the one
    before and the stage is free. All iterations are ready at time 0.

    ---
    练习 3。最后一个迭代离开最后一个阶段的时刻。

    `durations[s]` 是阶段 s 的耗时。一个阶段一次只服务一个迭代，按顺序来。一个
    迭代离开前一阶段、且这一阶段空闲时，立刻进入。所有迭代在时刻 0 都已就绪。
    """
    raise NotImplementedError
