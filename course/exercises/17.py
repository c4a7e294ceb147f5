"""Lesson 17: a mask mod, a score mod, and the tiles of a mask.

`ids` (N,) says of every token to which document it belongs. Token i sees token j if j <= i, and if both are of the same document
or j is among the first `shared` tokens. The score of a pair loses `tax` where j is among the first `shared` tokens and i is not.
Use & | ~ and arithmetic; they run on numbers, on whole tensors and in a kernel.

---

第 17 课：一个 mask mod、一个 score mod，以及掩码的分块。

`ids` (N,) 给出每个 token 属于哪个文档。token i 看得到 token j 的条件是：j <= i，并且两者属于同一个文档，或者 j 是最前面 `shared` 个
token 之一。如果 j 在最前面 `shared` 个之中而 i 不在，这一对的分数减去 `tax`。
请用 & | ~ 和算术：它们对数字、对整个张量、在 kernel 里都能运行。
"""

import tilewise
import torch  # noqa: F401
from torch import Tensor


@tilewise.mask_mod
def mask(b, h, q_idx, kv_idx, ids, shared):
    return kv_idx <= q_idx  # and more


@tilewise.score_mod
def score(score, b, h, q_idx, kv_idx, tax, shared):
    return score  # but not always


def tile_kinds(seen: Tensor, block: int) -> Tensor:
    """(⌈N / block⌉, ⌈M / block⌉) ints of an (N, M) mask: 0 nobody sees anything, 1 some, 2 all that there is. --- (N, M) 掩码的 (⌈N / block⌉, ⌈M / block⌉) 个整数：0 谁也看不到，1 部分看得到，2 有的全看得到。"""
    raise NotImplementedError
