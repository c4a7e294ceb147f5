"""Lesson 14: a ring of buffers and the phases of its barriers.

A barrier starts in phase 0 and flips each time it completes. A wait names a phase and returns once that phase has
completed; waiting for the phase *before* the first (phase 1) returns at once. Iteration i uses a buffer of the ring; `full`
completes once per fill, `empty` once per release. The producer's first wait for `empty` must return at once.

---

第 14 课：环形缓冲区与屏障的相位。

屏障从相位 0 开始，每完成一次就翻转。等待要指明相位，该相位完成后返回；等待第一个相位*之前*的那个（相位 1）会立刻返回。第 i 次迭代
使用环中的一个缓冲区；`full` 每填充一次完成一次，`empty` 每释放一次完成一次。生产者第一次等待 `empty` 必须立刻返回。
"""


def phases(iteration: int, buffers: int) -> tuple[int, int, int]:
    """(buffer, phase of the consumer's wait for full, phase of the producer's wait for empty). --- (缓冲区, 消费者等待 full 的相位, 生产者等待 empty 的相位)。"""
    raise NotImplementedError
