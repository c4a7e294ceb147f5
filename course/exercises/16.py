"""Lesson 16: attention over several ranks.

---

第 16 课：多个 rank 上的注意力。
"""

import math  # noqa: F401
from collections.abc import Generator

import torch  # noqa: F401
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def zigzag(n: int, ranks: int) -> list[list[int]]:
    """Exercise 1. The positions of the tokens of each rank.

    n tokens are cut into 2 · ranks chunks of equal length; rank r holds chunk
    r and chunk 2 · ranks - 1 - r, in this order. Under a causal mask every
    rank then has the same work.

    ---
    练习 1。每个 rank 的 token 的位置。

    n 个 token 切成 2 · ranks 段，长度相等；rank r 依次拿第 r 段和第
    2 · ranks - 1 - r 段。这样在因果掩码下，各 rank 的工作量相同。
    """
    raise NotImplementedError


def rank_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: int
) -> Generator[Pair, Pair, Pair]:
    """Exercise 2. One rank of the ring, without a mask.

    q (n, D), k (n, D), v (n, E) are this rank's shards. `received = yield k,
    v` sends (k, v) to the next rank and gives what the one before has sent.
    At the end `return o, lse`: the rows of O that belong to q, and their
    logsumexp. ranks - 1 messages are enough.

    ---
    练习 2。环上的一个 rank，没有掩码。

    q (n, D)、k (n, D)、v (n, E) 是这个 rank 的分片。`received = yield k, v`
    把 (k, v) 发给下一个 rank，得到的是上一个 rank 发来的。最后
    `return o, lse`：q 所对应的 O 的各行，以及它们的 logsumexp。发 ranks - 1 条
    消息就够了。
    """
    raise NotImplementedError


def causal_rank(
    q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int
) -> Generator[Pair, Pair, Pair]:
    """Exercise 3. The same with a causal mask; shards are contiguous.

    Rank r holds tokens r · n .. (r + 1) · n - 1; a token sees itself and the
    tokens before it. Shards that come after yours are passed on and not
    attended to.

    ---
    练习 3。同样的，但有因果掩码；分片是连续的。

    rank r 拿第 r · n .. (r + 1) · n - 1 个 token；一个 token 看得到自己和之前的
    token。排在你后面的分片只传下去，不做注意力。
    """
    raise NotImplementedError
