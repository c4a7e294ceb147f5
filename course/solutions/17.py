import tilewise
import torch
from torch import Tensor


@tilewise.mask_mod
def mask(b, h, q_idx, kv_idx, ids, shared):
    return (kv_idx <= q_idx) & (
        (ids[q_idx] == ids[kv_idx]) | (kv_idx < shared)
    )


@tilewise.score_mod
def score(score, b, h, q_idx, kv_idx, tax, shared):
    return torch.where(
        (kv_idx < shared) & (q_idx >= shared), score - tax, score
    )


def tile_kinds(seen: Tensor, block: int) -> Tensor:
    rows = []
    for band in seen.split(block):
        rows.append(
            torch.stack(
                [
                    tile.any().int() + tile.all().int()
                    for tile in band.split(block, 1)
                ]
            )
        )
    return torch.stack(rows)
