import torch
from torch import Tensor


def fetched(n: int, tile: int) -> int:
    outputs = (n // tile) ** 2
    return outputs * 2 * tile * n


def blocked_matmul(far, blocks: int, tile: int) -> Tensor:
    rows = []
    for i in range(blocks):
        row = []
        for j in range(blocks):
            c = torch.zeros(tile, tile, dtype=torch.float64)
            for k in range(blocks):
                c += far.load("a", i, k) @ far.load("b", k, j)
            row.append(c)
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows, dim=0)


def two_products(far, blocks: int, tile: int) -> Tensor:
    rows = []
    for i in range(blocks):
        q_i = far.load("q", i)
        o_i = torch.zeros(tile, tile, dtype=torch.float64)
        for j in range(blocks):
            o_i += q_i @ far.load("k", j).mT @ far.load("v", j)
        rows.append(o_i)
    return torch.cat(rows)
