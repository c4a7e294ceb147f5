"""What the cost model needs to know of a kernel. Each backend describes its kernels in `cost.py`. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Shapes(Protocol):
    """What a profile depends on in a call (`tilewise.costs.cost.Call`)."""

    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def n_q(self) -> int: ...
    @property
    def n_k(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def dv(self) -> int: ...
    @property
    def after(self) -> int | None: ...
    @property
    def lengths(self) -> tuple[tuple[int, int], ...] | None: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def heads_are_queries(self) -> bool: ...
    @property
    def has_lists(self) -> bool: ...

    def rows(self, name: str) -> int: ...


class Tile(Protocol):
    """Queries and keys of a tile, warps of a program, stages of loads in flight."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...

    def __hash__(self) -> int: ...


class Profile(NamedTuple):
    """One launch of a call."""

    name: str  # with the bytes of an element, its row in the model's table of efficiencies
    tile: Tile
    width: int  # the head dim in which it computes, its column there
    columns: int  # of the matrix products of a tile, all together
    is_forward: bool = False
    by_key: bool = False  # a program owns keys and streams queries
    shared: int = 0  # bytes of shared memory that a program takes, and registers of a thread; or, of either, 0:
    registers: int = 0  # one program on each processor, which takes tiles until none is left
    is_ordered: bool = False  # it sums in a fixed order, and would be faster if it need not
    beside: int = 0  # bytes moved by small kernels before and after, which overlap with nothing
    heads: int = 1  # that have their queries in one tile
    parts: Callable[[int, int], int] | None = None  # of (programs, processors): how many share the keys of one


def padded(d: int) -> int:
    """The power of two, at least 16, in which a head dim is computed."""
    return max(16, 1 << (d - 1).bit_length())
