"""What precision="fp8" means: how q, k and v become float8_e4m3fn, and when the mean key is subtracted.

A stored value is x * (448 / m), computed in float32 and rounded to nearest even; times its scale m / 448 it is x. m is
max(abs(x)) of a row of q, or of a block of KEY_BLOCK rows of k or of v, counted from the start of the sequence, of one
head. Values that are not finite do not count in the maximum and are stored as NaN.

No key changes the rows that do not see it by more than the rounding of the format. fp8 is a floating-point format: a
large m costs the other rows of a block no precision until they become subnormal. In a call that hides keys, a block
with a row, not all 0, whose largest value is below m * OWN_SCALES has a scale for each row. Imports torch alone.

The mean key of a sequence and KV head is the mean of MEAN_KEYS sampled keys. Samples larger than LARGE_KEY times the
median are left out, so that a few large keys do not move the mean. Where some rows do not see the last keys, as with
causal=True, the first keys are sampled: every row sees them, unless there is a window (`sampled_keys`).
"""

from __future__ import annotations

import torch

from ...request import Request

KEY_BLOCK = 128
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
LEAST_MAXIMUM = 2.0**-40  # of a block, so that no scale is 0 and the ratio of two scales is a float32
OWN_SCALES = 2.0**-10  # normal numbers reach down to 2^-15: values of 1 / 32 of such a row's largest have all 3 bits
MEAN_KEYS = 1024  # every n-th key is a sample, n = max(1, keys // MEAN_KEYS)
FIRST_KEYS = 128  # samples are of at least so many keys: with causal=True the first row sees one
MEDIAN_KEYS = 128  # the median is that of at most so many samples
LARGE_KEY = 4.0  # a key is as large as its largest value


def is_smoothed(request: Request) -> bool:
    """Whether the mean key is subtracted from keys before they are quantised.

    All scores of a query change by the same scale * q.mean, so out stays and lse gets that number back. This holds
    where the score is scale * q.k and nothing else is compared with it."""
    return request.is_plain and not request.spec.max_logit


def sampled_keys(after: int | None, n_q: int, n_k: int) -> int:
    """Of how many of the first keys of a sequence the mean key is.

    >>> sampled_keys(0, 1000, 1000), sampled_keys(0, 100, 1000), sampled_keys(None, 1000, 1000)
    (128, 901, 1000)
    """
    if after is None:
        return n_k
    return min(max(n_k - n_q + min(after, n_q) + 1, FIRST_KEYS), n_k)
