"""Lesson 2: log softmax that neither overflows nor underflows.

log softmax(x)_i = x_i - log Σ_j exp(x_j). Use what the lesson did to the exponents. Only torch.exp, torch.log, sums and
maxima, please: no torch.softmax, log_softmax or logsumexp.

---

第 2 课：既不上溢也不下溢的 log softmax。

log softmax(x)_i = x_i - log Σ_j exp(x_j)。像课文那样处理指数。只许用 torch.exp、torch.log、求和与取最大值，
不许用 torch.softmax、log_softmax 或 logsumexp。
"""

import torch  # noqa: F401
from torch import Tensor


def log_softmax(x: Tensor) -> Tensor:
    """Along the last dim. --- 沿最后一维。"""
    raise NotImplementedError
