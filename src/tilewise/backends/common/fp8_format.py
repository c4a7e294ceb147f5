"""What precision="fp8" means: how q, k and v become float8_e4m3fn, and when the mean key is subtracted.

A stored value times its scale is the value, scale = max(abs(x)) / 448 of a block of one sequence and one head:

    q: QUERY_BLOCK queries;  k: KEY_BLOCK keys;  v: each column, over all keys of the sequence

Values that are not finite do not count in the maximum and are stored as NaN. Imports torch alone.
"""

from __future__ import annotations

from ...request import Request

QUERY_BLOCK = 64
KEY_BLOCK = 128
LARGEST_FP8 = 448.0
LEAST_MAXIMUM = 2.0**-100  # of a block, so that the scale of zeros is not 0


def is_smoothed(request: Request) -> bool:
    """Whether the mean key of each sequence and KV head is subtracted from its keys before they are quantised.

    All scores of a query change by the same scale * q.mean, so out stays and lse gets that number back. This holds
    where the score is scale * q.k and nothing else is compared with it."""
    return request.is_plain and not request.spec.max_logit
