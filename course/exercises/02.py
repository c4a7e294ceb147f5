"""Lesson 2: log softmax that neither overflows nor underflows.

log softmax(x)_i = x_i - log Σ_j exp(x_j). Use what the lesson did to the exponents. Only torch.exp, torch.log, sums and
maxima, please: no torch.softmax, log_softmax or logsumexp.
"""

import torch  # noqa: F401
from torch import Tensor


def log_softmax(x: Tensor) -> Tensor:
    """Along the last dim."""
    raise NotImplementedError
