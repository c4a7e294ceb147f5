"""Lesson 2: softmax that does not overflow.

Only torch.exp, torch.log, torch.where, sums and maxima, please: no
torch.softmax, log_softmax or logsumexp. All three work along the last dim.

---

第 2 课：不会溢出的 softmax。

只许用 torch.exp、torch.log、torch.where、求和与取最大值，不许用
torch.softmax、log_softmax 或 logsumexp。三道题都沿最后一维。
"""

import torch  # noqa: F401
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    """Exercise 1. exp(x_i) / Σ_j exp(x_j), for x = [1000, 0] too.

    ---
    练习 1。exp(x_i) / Σ_j exp(x_j)，x = [1000, 0] 时也要对。
    """
    raise NotImplementedError


def log_softmax(x: Tensor) -> Tensor:
    """Exercise 2. x_i - log Σ_j exp(x_j), for x = [0, -1000] too.

    The softmax of -1000 is 0 in every float format, but its logarithm is
    -1000.

    ---
    练习 2。x_i - log Σ_j exp(x_j)，x = [0, -1000] 时也要对。

    -1000 的 softmax 在任何浮点格式里都是 0，但它的对数是 -1000。
    """
    raise NotImplementedError


def masked_softmax(x: Tensor, seen: Tensor) -> Tensor:
    """Exercise 3. Softmax over the elements where `seen` is True.

    The others get weight 0, whatever they hold. A row in which nothing is
    seen gets zeros.

    ---
    练习 3。只对 `seen` 为 True 的元素做 softmax。

    其余元素不论是什么，权重都为 0。一个元素也看不到的行，权重全为 0。
    """
    raise NotImplementedError
