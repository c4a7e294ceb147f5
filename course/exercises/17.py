"""Lesson 17: a mask mod, a score mod, and the tiles of a mask.

`ids` (N,) says of every token to which document it belongs. Use & | ~ and
arithmetic in mods; they run on numbers, on whole tensors and in a kernel.

---

第 17 课：一个 mask mod、一个 score mod，以及掩码的分块。

`ids` (N,) 给出每个 token 属于哪个文档。mod 里请用 & | ~ 和算术：它们对数字、
对整个张量、在 kernel 里都能运行。
"""

import torch  # noqa: F401
from torch import Tensor

import tilewise


@tilewise.mask_mod
def mask(b, h, q_idx, kv_idx, ids, shared):
    """Exercise 1. Token i sees token j if j <= i, and if both are of the same
    document or j is among the first `shared` tokens.

    ---
    练习 1。token i 看得到 token j 的条件是：j <= i，并且两者属于同一个文档，
    或者 j 是最前面 `shared` 个 token 之一。
    """
    return kv_idx <= q_idx  # and more


@tilewise.score_mod
def score(score, b, h, q_idx, kv_idx, tax, shared):
    """Exercise 2. The score of a pair loses `tax` where j is among the first
    `shared` tokens and i is not.

    ---
    练习 2。如果 j 在最前面 `shared` 个之中而 i 不在，这一对的分数减去
    `tax`。
    """
    return score  # but not always


def tile_kinds(seen: Tensor, block: int) -> Tensor:
    """Exercise 3. (⌈N / block⌉, ⌈M / block⌉) integers of an (N, M) mask.

    0 if no pair of the tile is visible, 1 if some are, 2 if all are that the
    tile has: the last one of a row or column may be smaller.

    ---
    练习 3。(N, M) 掩码的 (⌈N / block⌉, ⌈M / block⌉) 个整数。

    这一块里没有一对可见时为 0，部分可见为 1，全部可见为 2；一行或一列的最后
    一块可以小一些。
    """
    raise NotImplementedError
