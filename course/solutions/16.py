import math
from collections.abc import Generator

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def zigzag(n: int, ranks: int) -> list[list[int]]:
    size = n // (2 * ranks)
    chunks = [list(range(at, at + size)) for at in range(0, n, size)]
    return [chunks[r] + chunks[2 * ranks - 1 - r] for r in range(ranks)]


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Pair:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.exp(s - lse[:, None]) @ v, lse


def merge(a: Pair, b: Pair) -> Pair:
    lse = torch.logaddexp(a[1], b[1])
    weights = torch.exp(a[1] - lse), torch.exp(b[1] - lse)
    return a[0] * weights[0][:, None] + b[0] * weights[1][:, None], lse


def rank_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: int
) -> Generator[Pair, Pair, Pair]:
    none = torch.zeros(len(q), len(k), dtype=torch.bool)
    found = attend(q, k, v, none)
    for _ in range(ranks - 1):
        k, v = yield k, v
        found = merge(found, attend(q, k, v, none))
    return found


def causal_rank(
    q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int
) -> Generator[Pair, Pair, Pair]:
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    found = attend(q, k, v, ahead)
    for hop in range(1, ranks):
        k, v = yield k, v
        owner = (rank - hop) % ranks
        if owner < rank:
            part = attend(q, k, v, torch.zeros_like(ahead))
            found = merge(found, part)
    return found
