"""Lesson 14: Hopper's producer and consumers.

---

第 14 课：Hopper 的生产者与消费者。
"""


def registers(consumers: int, producer: int) -> int:
    """Exercise 1. Registers for each thread of a consumer warpgroup.

    A processor has 65,536 registers. One producer warpgroup takes `producer`
    registers for each of its 128 threads; `consumers` warpgroups of 128
    threads share the rest evenly, in multiples of 8.

    ---
    练习 1。消费者 warpgroup 的每个线程有多少寄存器。

    一个处理器有 65,536 个寄存器。一个生产者 warpgroup 的 128 个线程各占
    `producer` 个；`consumers` 个 warpgroup（每个 128 线程）平分其余的，取 8 的
    倍数。
    """
    raise NotImplementedError


def phases(iteration: int, buffers: int) -> tuple[int, int, int]:
    """Exercise 2. (buffer, phase of the wait for full, for empty).

    A barrier starts in phase 0 and flips each time it completes. A wait names
    a phase and returns once that phase has completed; a wait for the phase
    *before* the first (phase 1) returns at once. Iteration i uses a buffer of
    the ring. The consumer waits for `full`, which completes once a fill; the
    producer waits for `empty`, which completes once a release. The producer's
    first wait for `empty` must return at once.

    ---
    练习 2。(缓冲区, 等待 full 的相位, 等待 empty 的相位)。

    屏障从相位 0 开始，每完成一次就翻转。等待要指明相位，该相位完成后返回；
    等待第一个相位*之前*的那个（相位 1）会立刻返回。第 i 次迭代使用环中的一个
    缓冲区。消费者等待 `full`，它每填充一次完成一次；生产者等待 `empty`，它每
    释放一次完成一次。生产者第一次等待 `empty` 必须立刻返回。
    """
    raise NotImplementedError


def ring_time(n: int, buffers: int, load: int, compute: int) -> int:
    """Exercise 3. When the consumer has computed the last of n tiles.

    The producer loads tile after tile, `load` cycles each, into the buffers
    in turn. It may load into a buffer once the consumer has computed the tile
    that was there. The consumer computes tile after tile, `compute` cycles
    each, once a tile is loaded.

    ---
    练习 3。消费者算完 n 块中最后一块的时刻。

    生产者依次读入每一块，每块 `load` 个周期，轮流放进各个缓冲区。缓冲区里原来
    那块被消费者算完之后，才能读入新的一块。消费者依次计算每一块，每块
    `compute` 个周期，要等这一块读入之后。
    """
    raise NotImplementedError
