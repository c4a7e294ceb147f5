"""What precision="fp8" means: how q, k and v become float8_e4m3fn, and when the mean key is subtracted.

A stored value is x * (448 / m), computed in float32 and rounded to nearest even; times its scale m / 448 it is x. m is
max(abs(x)) of a block of tokens of one sequence and one head: QUERY_BLOCK rows of q, KEY_BLOCK rows of k and of v,
counted from the start of the sequence.

Values that are not finite do not count in the maximum and are stored as NaN. Imports torch alone.
"""

from __future__ import annotations

import torch

from ...request import Request

QUERY_BLOCK = 64
KEY_BLOCK = 128
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
LEAST_MAXIMUM = 2.0**-40  # of a block, so that no scale is 0 and the ratio of two scales is a float32
MEAN_KEYS = 1024  # the mean key is that of every n-th key, n = max(1, keys // MEAN_KEYS)


def is_smoothed(request: Request) -> bool:
    """Whether the mean key (MEAN_KEYS) of a sequence and KV head is subtracted from its keys before they are quantised.

    All scores of a query change by the same scale * q.mean, so out stays and lse gets that number back. This holds
    where the score is scale * q.k and nothing else is compared with it."""
    return request.is_plain and not request.spec.max_logit
