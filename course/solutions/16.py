import math
from collections.abc import Generator

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    lse = s.logsumexp(-1)
    return torch.exp(s - lse[:, None]) @ v, lse


def rank_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: int
) -> Generator[Pair, Pair, Pair]:
    o, lse = attend(q, k, v)
    for _ in range(ranks - 1):
        k, v = yield k, v
        o_a, lse_a = attend(q, k, v)
        total = torch.logaddexp(lse, lse_a)
        o = (
            o * torch.exp(lse - total)[:, None]
            + o_a * torch.exp(lse_a - total)[:, None]
        )
        lse = total
    return o, lse
