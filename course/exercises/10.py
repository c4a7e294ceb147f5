"""Lesson 10: performance.

---

第 10 课：性能。
"""


def attainable(flops: float, moved: float, peak: float, rate: float) -> float:
    """Exercise 1. FLOP/s under the roofline.

    A kernel does `flops` FLOPs and moves `moved` bytes, on a device of `peak`
    FLOP/s and `rate` bytes/s.

    ---
    练习 1。roofline 之下的 FLOP/s。

    一个 kernel 做 `flops` 次 FLOP，搬运 `moved` 字节；设备有 `peak` FLOP/s 和
    `rate` 字节/秒。
    """
    raise NotImplementedError


def best_batch(
    tokens: int, heads: int, tile: int, slots: int, limit: int
) -> int:
    """Exercise 2. The batch size in 1 .. limit that leaves the least idle.

    Attention runs ⌈tokens / tile⌉ · heads · batch blocks of equal work,
    `slots` at a time. A wave with one block in it lasts as long as a full
    one. Return the batch with the largest busy share of the slots, the
    smallest of several.

    ---
    练习 2。1 .. limit 中空闲最少的 batch 大小。

    注意力要运行 ⌈tokens / tile⌉ · heads · batch 个工作量相同的块，同时运行
    `slots` 个。一波里哪怕只有一个块，耗时也和满的一波一样。返回让 slots 忙碌
    比例最大的 batch；有多个时取最小的。
    """
    raise NotImplementedError


def makespan(work: list[int], slots: int) -> int:
    """Exercise 3. When the last of unequal blocks is done.

    Blocks start in the order of the list, each on the slot that is free
    first. Under a causal mask late blocks have more work: see what happens if
    you sort the list.

    ---
    练习 3。工作量不等的块，最后一个何时完成。

    块按列表的顺序开始，每个都放到最先空闲的 slot 上。因果掩码下，靠后的块工作
    量更大：把列表排一下序，看看会怎样。
    """
    raise NotImplementedError
