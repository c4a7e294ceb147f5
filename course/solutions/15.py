from itertools import pairwise

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]


def combine(parts: list[Part]) -> Part:
    o, lse = (
        torch.stack([o for o, _ in parts]),
        torch.stack([lse for _, lse in parts]),
    )
    most = lse.amax(0)
    pivot = most.masked_fill(most == -torch.inf, 0.0)
    w = torch.exp(lse - pivot)
    l = w.sum(0)
    weighed = torch.where(w[..., None] > 0, w[..., None] * o, 0.0)
    return weighed.sum(0) / l.masked_fill(l == 0, 1.0)[
        :, None
    ], pivot + l.log()


def bounds(length: int, parts: int, block: int) -> list[tuple[int, int]]:
    blocks = -(-length // block)
    edges = [
        min(length, blocks * part // parts * block)
        for part in range(parts + 1)
    ]
    return list(pairwise(edges))
