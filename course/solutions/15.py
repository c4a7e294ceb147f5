from itertools import pairwise

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]


def bounds(length: int, parts: int, block: int) -> list[tuple[int, int]]:
    blocks = -(-length // block)
    edges = [
        min(length, blocks * part // parts * block)
        for part in range(parts + 1)
    ]
    return list(pairwise(edges))


def combine(parts: list[Part]) -> Part:
    o = torch.stack([o for o, _ in parts])
    lse = torch.stack([lse for _, lse in parts])
    most = lse.amax(0)
    pivot = most.masked_fill(most == -torch.inf, 0.0)
    w = torch.exp(lse - pivot)
    l = w.sum(0)
    weighed = torch.where(w[..., None] > 0, w[..., None] * o, 0.0)
    some = l.masked_fill(l == 0, 1.0)
    return weighed.sum(0) / some[:, None], pivot + l.log()


def best_parts(
    heads: int, blocks: int, processors: int, overhead: int, limit: int
) -> int:
    times = []
    for parts in range(1, limit + 1):
        waves = -(-heads * parts // processors)
        times.append(waves * (-(-blocks // parts) + overhead * (parts > 1)))
    return 1 + times.index(min(times))
