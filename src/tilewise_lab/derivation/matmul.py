"""Matrix products block by block, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.errors import AttentionError

Grid = list[list[Tensor]]


def split(a: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Grid:
    """A matrix as a grid of blocks, `rows` high and `columns` wide.

    >>> grid = split(torch.zeros(8, 4), rows=[4, 4], columns=[2, 2])
    >>> len(grid), len(grid[0]), tuple(grid[0][0].shape)
    (2, 2, (4, 2))
    """
    if (sum(rows), sum(columns)) != tuple(a.shape):
        raise AttentionError("blocks", f"{list(rows)} by {list(columns)}", f"sizes that add up to {tuple(a.shape)}")
    return [list(band.split(list(columns), dim=1)) for band in a.split(list(rows), dim=0)]


def join(grid: Grid) -> Tensor:
    return torch.cat([torch.cat(row, dim=1) for row in grid], dim=0)


def blocked(a: Grid, b: Grid) -> Grid:
    """C_ij = Σ_k A_ik B_kj: blocks multiply as if they were numbers, and each C_ij needs no other.

    Any partition will do, as long as A is cut along its columns where B is cut along its rows.

    >>> a, b = torch.randn(8, 4), torch.randn(4, 8)
    >>> c = blocked(split(a, [4, 4], [2, 2]), split(b, [2, 2], [2, 2, 2, 2]))
    >>> len(c) * len(c[0]), bool(torch.allclose(join(c), a @ b, atol=1e-5))
    (8, True)
    """
    widths, heights = [block.shape[1] for block in a[0]], [row[0].shape[0] for row in b]
    if widths != heights:
        raise AttentionError("rows of the blocks of b", heights, f"the columns of the blocks of a, {widths}")
    c: Grid = []
    for a_i in a:
        c.append([])
        for j in range(len(b[0])):
            c_ij = a_i[0].new_zeros(a_i[0].shape[0], b[0][j].shape[1])
            for a_ik, b_k in zip(a_i, b, strict=True):
                c_ij = c_ij + a_ik @ b_k[j]
            c[-1].append(c_ij)
    return c


def gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dX = dY Wᵀ and dW = Xᵀ dY, for Y = X W: the only products of these matrices whose shapes fit.

    The Jacobians they stand for are never built: for X (1024, 1024) and W (1024, 2048), that of Y by X has 2.2e12
    entries.
    """
    return dy @ w.mT, x.mT @ dy
