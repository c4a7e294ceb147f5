"""Lesson 5: attention in tiles.

A state is (m, l, o): running maximum (N,), denominator (N,) and numerator
(N, E) of a block of N queries. `s` (N, M) are the scores of the next block of
keys, -inf where a pair is masked, and `v` (M, E) its values.

---

第 5 课：分块的注意力。

状态是 (m, l, o)：一块 N 个查询到目前为止的最大值 (N,)、分母 (N,) 和分子
(N, E)。`s` (N, M) 是下一块键的分数，被遮住的位置是 -inf；`v` (M, E) 是这一块
的值。
"""

import torch  # noqa: F401
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def first_block(s: Tensor, v: Tensor) -> State:
    """Exercise 1. The state after one block, without masked pairs.

    m is the maximum of each row of s, l the sum of exp(s - m) over the row,
    and o = exp(s - m) V. Nothing is divided yet.

    ---
    练习 1。看过一块之后的状态；没有被遮住的位置。

    m 是 s 每一行的最大值，l 是这一行 exp(s - m) 之和，o = exp(s - m) V。
    这时还不做除法。
    """
    raise NotImplementedError


def step(state: State, s: Tensor, v: Tensor) -> State:
    """Exercise 2. The state after one more block.

    A row that has only seen masked keys stays (-inf, 0, 0), without a NaN.

    ---
    练习 2。再看一块之后的状态。

    一行如果只见过被遮住的键，就保持 (-inf, 0, 0)，不能出现 NaN。
    """
    raise NotImplementedError


def lazy_step(state: State, s: Tensor, v: Tensor, threshold: float) -> State:
    """Exercise 3. A step that rescales only when it has to.

    The state is (r, l, o), with any reference r in place of the maximum:
    l = Σ exp(s - r) and o = Σ exp(s - r) v. A row whose maximum in this block
    exceeds r by more than `threshold` takes that maximum as its new r, and
    l and o are rescaled. All other rows keep r, and their weights may exceed
    1. No pair is masked. FlashAttention-4 does this to save rescalings.

    ---
    练习 3。只在必要时才重新缩放的一步。

    状态是 (r, l, o)，用任意的基准 r 代替最大值：l = Σ exp(s - r)，
    o = Σ exp(s - r) v。一行在这一块里的最大值如果比 r 大出 `threshold` 以上，
    就以它为新的 r，并重新缩放 l 和 o。其余的行保持 r 不变，权重可以大于 1。
    没有被遮住的位置。FlashAttention-4 用这个办法减少缩放次数。
    """
    raise NotImplementedError
