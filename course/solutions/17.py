import torch
from torch import Tensor

import tilewise


@tilewise.mask_mod
def mask(b, h, q_idx, kv_idx, ids, shared):
    same = ids[q_idx] == ids[kv_idx]
    return (kv_idx <= q_idx) & (same | (kv_idx < shared))


@tilewise.score_mod
def score(score, b, h, q_idx, kv_idx, tax, shared):
    taxed = (kv_idx < shared) & (q_idx >= shared)
    return torch.where(taxed, score - tax, score)


def tile_kinds(seen: Tensor, block: int) -> Tensor:
    rows = []
    for band in seen.split(block):
        kinds = [
            tile.any().int() + tile.all().int()
            for tile in band.split(block, 1)
        ]
        rows.append(torch.stack(kinds))
    return torch.stack(rows)
