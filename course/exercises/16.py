"""Lesson 16: one rank of the ring.

q (n, D), k (n, D), v (n, E) are this rank's shards; there are `ranks` of them, and no mask. `received = yield k, v` sends (k, v)
to the next rank and gives what the one before has sent. At the end: `return o, lse`.

---

第 16 课：环上的一个 rank。

q (n, D)、k (n, D)、v (n, E) 是这个 rank 的分片；一共有 `ranks` 个，没有掩码。`received = yield k, v` 把 (k, v) 发给下一个 rank，得到的是
上一个 rank 发来的。最后 `return o, lse`。
"""

from collections.abc import Generator

import torch  # noqa: F401
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def rank_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: int
) -> Generator[Pair, Pair, Pair]:
    """The rows of O that belong to q, and their logsumexp; ranks - 1 messages are enough. --- q 所对应的 O 的各行，以及它们的 logsumexp；发 ranks - 1 条消息就够了。"""
    raise NotImplementedError
