"""Lesson 15: put the parts of a divided cache together, and divide it.

A part is (o, lse): o (H, D) the attention over its keys, lse (H,) their logsumexp. A part without keys has lse -inf, and its
o may hold anything, nan included.

---

第 15 课：把分开的缓存合起来，以及怎样分开。

一份是 (o, lse)：o (H, D) 是对这一份键的注意力，lse (H,) 是它们的 logsumexp。没有键的那一份 lse 为 -inf，它的 o 可以是任何东西，
包括 nan。
"""

import torch  # noqa: F401
from torch import Tensor

Part = tuple[Tensor, Tensor]


def combine(parts: list[Part]) -> Part:
    """(o, lse) over the keys of all parts; of no keys at all: zeros and -inf. --- 所有份合起来的 (o, lse)；一个键也没有时：零和 -inf。"""
    raise NotImplementedError


def bounds(length: int, parts: int, block: int) -> list[tuple[int, int]]:
    """(first, end) of each part, in order: whole blocks but for the last; sizes differ by one block at most. --- 依次给出每份的 (起, 止)：除最后一块外都是整块；各份大小最多相差一块。"""
    raise NotImplementedError
