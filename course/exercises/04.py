"""Lesson 4: a blocked product that does not waste its loads.

`far` holds two n × n matrices in `tile` × `tile` blocks. `far.load("a", i, k)` returns a block of A, and every call is
counted. Each output block may be kept near while you sum into it, and so may one block of A and one of B; nothing else.

---

第 4 课：不浪费读取的分块矩阵乘法。

`far` 里有两个 n × n 矩阵，分成 `tile` × `tile` 的块。`far.load("a", i, k)` 返回 A 的一块，每次调用都会计数。累加期间，近处可以
放一块输出、一块 A 和一块 B，别的都不行。
"""

import torch  # noqa: F401
from torch import Tensor


def blocked_matmul(far, blocks: int, tile: int) -> Tensor:
    """A @ B, with at most 2 · blocks³ loads. A is blocks × blocks blocks of (tile, tile), and so is B. --- A @ B，最多读 2 · blocks³ 次。A 有 blocks × blocks 块，每块 (tile, tile)；B 也一样。"""
    raise NotImplementedError
