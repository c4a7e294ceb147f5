"""Lesson 10: the batch that leaves no tail.

Attention runs ⌈tokens / tile⌉ · heads · batch blocks of equal work, `slots` at a time. A wave with one block in it lasts as
long as a full one.

---

第 10 课：不留尾巴的 batch。

注意力要运行 ⌈tokens / tile⌉ · heads · batch 个工作量相同的块，同时运行 `slots` 个。一波里哪怕只有一个块，耗时也和满的一波一样。
"""


def best_batch(
    tokens: int, heads: int, tile: int, slots: int, limit: int
) -> int:
    """The batch size in 1 .. limit with the largest busy share of the slots; the smallest of several. --- 1 .. limit 中让 slots 忙碌比例最大的 batch；有多个时取最小的。"""
    raise NotImplementedError
