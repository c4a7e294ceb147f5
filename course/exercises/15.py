"""Lesson 15: a cache divided into parts.

A part is (o, lse): o (H, D) the attention over its keys, lse (H,) their
logsumexp. A part without keys has lse -inf, and its o may hold anything, nan
included.

---

第 15 课：把缓存分成几份。

一份是 (o, lse)：o (H, D) 是对这一份键的注意力，lse (H,) 是它们的 logsumexp。
没有键的那一份 lse 为 -inf，它的 o 可以是任何东西，包括 nan。
"""

from itertools import pairwise  # noqa: F401

import torch  # noqa: F401
from torch import Tensor

Part = tuple[Tensor, Tensor]


def bounds(length: int, parts: int, block: int) -> list[tuple[int, int]]:
    """Exercise 1. (first, end) of each part, in order.

    Parts are whole blocks but for the end of the last; their numbers of
    blocks differ by one at most. A part may be empty.

    ---
    练习 1。依次给出每一份的 (起, 止)。

    除了最后一份的末尾，都是整块；各份的块数最多相差一。一份可以是空的。
    """
    raise NotImplementedError


def combine(parts: list[Part]) -> Part:
    """Exercise 2. (o, lse) over the keys of all parts.

    Of no keys at all: zeros and -inf.

    ---
    练习 2。所有份的键合起来的 (o, lse)。

    一个键也没有时：零和 -inf。
    """
    raise NotImplementedError


def best_parts(
    heads: int, blocks: int, processors: int, overhead: int, limit: int
) -> int:
    """Exercise 3. The number of parts in 1 .. limit that is fastest.

    heads · parts programs run, `processors` at a time: a wave lasts as long
    as its longest program. A program reads ⌈blocks / parts⌉ blocks, one unit
    of time each, and with more than one part `overhead` units more, to write
    its part. Return the smallest of several.

    ---
    练习 3。1 .. limit 中最快的份数。

    一共运行 heads · parts 个程序，同时运行 `processors` 个：一波的时间等于其中
    最长的程序。一个程序读 ⌈blocks / parts⌉ 块，每块一个单位时间；份数大于 1
    时，还要 `overhead` 个单位来写出这一份。有多个时返回最小的。
    """
    raise NotImplementedError
