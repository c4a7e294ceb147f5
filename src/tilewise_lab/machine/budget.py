"""What fits where: the matrix of weights that must not be written, the tiles that may.

>>> one_head = weights(4096)  # in float32: 64 MiB
>>> one_head.elements, one_head.bytes // 2**20
(16777216, 64)
>>> tile_bytes(64, 64) // 1024  # one tile of it: 16 KiB
16
"""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    elements: int
    bytes: int


def weights(n: int, itemsize: int = 4, heads: int = 1) -> Size:
    """P (N, N): quadratic in the length."""
    return Size(heads * n * n, heads * n * n * itemsize)


def jacobian(n: int, m: int, d: int, itemsize: int = 4) -> Size:
    """∂Y/∂X of Y (N, D) = X (N, M) W (M, D): every entry of Y by every entry of X. It is never built.

    >>> f"{jacobian(1024, 1024, 2048).bytes / 1e12:.1f} TB"
    '8.8 TB'
    """
    return Size(n * d * n * m, n * d * n * m * itemsize)


def tile_bytes(rows: int, columns: int, itemsize: int = 4) -> int:
    return rows * columns * itemsize


class Tile(NamedTuple):
    """Rows `start` to `stop - 1` of Q (or K, V): tiles divide the sequence, never the head dim."""

    number: int
    start: int
    stop: int


def tiles(n: int, size: int) -> list[Tile]:
    """
    >>> tiles(4096, 64)[0], tiles(4096, 64)[-1]
    (Tile(number=1, start=0, stop=64), Tile(number=64, start=4032, stop=4096))
    """
    return [Tile(i // size + 1, i, min(i + size, n)) for i in range(0, n, size)]


def shared_bytes(
    rows: int, columns: int, d: int, *, itemsize: int, with_scores: bool = True, with_output: bool = False
) -> int:
    """Q and K, V tiles, the tile of weights, and the output's, if they all lie in shared memory.

    >>> shared_bytes(64, 64, 64, itemsize=2) // 1024
    32
    >>> shared_bytes(64, 64, 64, itemsize=4, with_output=True) // 1024
    80
    """
    elements = rows * d + 2 * columns * d + rows * columns * with_scores + rows * d * with_output
    return elements * itemsize


def largest_square_tile(shared: int, d: int, *, itemsize: int, with_output: bool = False) -> int:
    """The largest power of two that fits.

    >>> [largest_square_tile(kb * 1024, 128, itemsize=2) for kb in (48, 163, 227)]
    [32, 128, 128]
    """
    size = 1
    while shared_bytes(2 * size, 2 * size, d, itemsize=itemsize, with_output=with_output) <= shared:
        size *= 2
    return size


def pad_to_multiple(n: int, multiple: int) -> int:
    """
    >>> pad_to_multiple(50257, 64), 50304 == 64 * 786 == 128 * 393
    (50304, True)
    """
    return -(-n // multiple) * multiple


def alignment(n: int, limit: int = 128) -> int:
    """The largest power of two that divides n, up to a limit. In a plot of speed against size, it tells the bands
    apart.

    >>> [alignment(n) for n in (1792, 1793, 50257, 50304)]
    [128, 1, 1, 128]
    """
    return min(n & -n, limit)
