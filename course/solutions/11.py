import torch
from torch import Tensor


def tile_offsets(first: int, rows: int, n: int, d: int) -> Tensor:
    i = first + torch.arange(rows)[:, None]
    c = torch.arange(d)
    return torch.where(i < n, i * d + c, -1)


def masked_scores(
    s: Tensor, first_i: int, first_j: int, n_q: int, n_k: int
) -> Tensor:
    i = first_i + torch.arange(s.shape[0])[:, None]
    j = first_j + torch.arange(s.shape[1])
    hidden = (j > i + n_k - n_q) | (j >= n_k)
    return s.masked_fill(hidden, -torch.inf)


def span(
    first: int, rows: int, n_q: int, n_k: int, block: int
) -> tuple[int, int]:
    offset = n_k - n_q
    seen_by_all = min(max(first + offset + 1, 0), n_k)
    seen_by_some = min(max(first + rows + offset, 0), n_k)
    return seen_by_all // block, -(-seen_by_some // block)
