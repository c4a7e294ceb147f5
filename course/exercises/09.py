"""Lesson 9: a pipeline whose stages take different times.

`durations[s]` is the time of stage s. Every stage is one unit: it serves one iteration at a time, in order. An iteration
enters a stage as soon as it has left the one before and the unit is free. All iterations are ready at time 0.

---

第 9 课：各阶段耗时不同的流水线。

`durations[s]` 是阶段 s 的耗时。每个阶段是一个单元：一次只服务一个迭代，按顺序来。一个迭代离开前一阶段、且单元空闲时，
立刻进入下一阶段。所有迭代在时刻 0 都已就绪。
"""


def finish(iterations: int, durations: list[int]) -> int:
    """When the last iteration leaves the last stage. --- 最后一个迭代离开最后一个阶段的时刻。"""
    raise NotImplementedError
