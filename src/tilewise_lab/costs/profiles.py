"""The kernels of a call, as the time model sees them: tile, head dim, shared memory, registers. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tilewise.backends.common import tiles
from tilewise.backends.common.tiles import Tile
from tilewise.backends.hopper.support import (
    backward_tile,
    backward_widths,
    forward_tile,
    supports_backward,
    widths,
    window_size,
)
from tilewise.backends.hopper.tile_table import MAX_WHOLE_ROWS
from tilewise.backends.registry import BACKENDS
from tilewise.request import Gpu, padded
from tilewise_lab.costs.cost import Call


class Profile(NamedTuple):
    """One launch of a call. `shared` and `registers` are 0 for a persistent kernel: `programs` on each SM."""

    name: str  # with the bytes of an element, its row in the model's table of efficiencies
    tile: Tile
    width: int  # the padded head dim, its column there
    columns: int  # of the matrix products of a tile, all together
    is_forward: bool = False
    by_key: bool = False  # a program owns keys and streams queries
    shared: int = 0  # bytes of shared memory of a program
    registers: int = 0  # of a thread
    is_ordered: bool = False  # it sums in a fixed order, which is slower
    beside: int = 0  # bytes moved by small kernels before and after, which overlap with nothing
    heads: int = 1  # heads whose queries share a tile
    programs: int = 1  # of a persistent kernel on each SM
    splits: Callable[[int, int], int] | None = None  # of (programs, SMs): how many programs share the keys of one


def profiles(backend: str, call: Call, gpu: Gpu, backward: bool) -> list[Profile]:
    """The kernels of a forward or backward by the named backend, or by the next one that computes it."""
    names = [x.name for x in BACKENDS]
    for name in names[names.index(backend) :]:
        if name in PROFILES and (found := PROFILES[name][backward](call, gpu)):
            return found
    return []


def triton_forward(call: Call, gpu: Gpu) -> list[Profile]:
    d, dv = padded(call.d), padded(call.dv)
    tile = tiles.tile("forward", gpu.arch, call.itemsize, max(d, dv))
    heads = 1
    if not call.has_lists:
        queries = call.n_q if call.lengths is None else -(-call.n_q // max(call.batch, 1))
        heads = tiles.heads_of_a_tile(queries, call.heads // call.kv_heads, tile.block_m)
        if heads > 1:
            tile = tiles.tile("forward", gpu.arch, call.itemsize, max(d, dv), "groups")

    def splits(programs: int, num_sms: int) -> int:
        return tiles.parts_of_keys(programs, call.n_k, tile.block_n, num_sms)

    may_split = call.lengths is None and call.n_q <= tiles.FEW_QUERIES
    return [
        Profile(
            name="forward",
            tile=tile,
            width=max(d, dv),
            columns=d + dv,
            is_forward=True,
            shared=call.itemsize * (tile.block_m * d + tile.stages * tile.block_n * (d + dv)),
            registers=_registers(tile),
            heads=heads,
            splits=splits if may_split else None,
        )
    ]


def triton_backward(call: Call, gpu: Gpu) -> list[Profile]:
    """dK and dV, then dQ; delta reads O and dO before them."""
    d, dv = padded(call.d), padded(call.dv)
    key, query = (tiles.tile(name, gpu.arch, call.itemsize, max(d, dv)) for name in ("key", "query"))
    row = call.itemsize * (d + dv)
    return [
        Profile(
            name="key",
            tile=key,
            width=max(d, dv),
            columns=2 * d + 2 * dv,
            by_key=True,
            shared=row * (key.block_n + key.stages * key.block_m),
            registers=_registers(key),
        ),
        Profile(
            name="query",
            tile=query,
            width=max(d, dv),
            columns=2 * d + dv,
            shared=row * (query.block_m + query.stages * query.block_n),
            registers=_registers(query),
            beside=2 * call.rows("o"),
        ),
    ]


def _registers(tile: Tile) -> int:
    """Registers of a thread before compilation: an estimate."""
    return 65536 // (32 * tile.warps * 2) if tile.warps <= 4 else 168


def hopper_forward(call: Call, gpu: Gpu) -> list[Profile]:
    """The tile is that of a whole program; its warps are those of all consumer warpgroups and of one producer
    warpgroup."""
    keys = call.n_k if call.lengths is None else call.n_k // max(len(call.lengths), 1)
    window, banded = window_size(call.before, call.after), call.after is not None or call.has_lists
    row = forward_tile(call.d, call.dv, banded=banded, keys=keys, window=window)
    return [
        Profile(
            name="hopper forward",
            tile=Tile(64 if _is_split(call) else 64 * row.warpgroups, row.block_n, 4 * row.warpgroups + 4, row.stages),
            width=_width(call),
            columns=sum(widths(call.d)) + sum(widths(call.dv)),
            is_forward=True,
            heads=call.heads // call.kv_heads if call.heads_are_queries else 1,
            programs=row.programs,
        )
    ]


def hopper_backward(call: Call, gpu: Gpu) -> list[Profile]:
    """One kernel. Small kernels around it read O and dO, and clear, read and store dQ in float32. Above head dim 256,
    one kernel for each gradient."""
    if not supports_backward(call.d, call.dv):
        return []  # the next backend computes it
    width = _width(call)
    q, accumulated = call.rows("q"), 4 * call.rows("q") // call.itemsize
    if _is_split(call):
        kinds = (("hopper dq", 3, False), ("hopper dk", 3, True), ("hopper dv", 2, True))
        return [
            Profile(name=name, tile=Tile(64, 32, 12, 1), width=width, columns=products * width, by_key=by_key)
            for name, products, by_key in kinds
        ]
    d, dv = sum(backward_widths(max(call.d, call.dv))), sum(backward_widths(call.dv))
    row = backward_tile(d, dv, plain=True, deterministic=call.deterministic)
    return [
        Profile(
            name="hopper backward",
            tile=Tile(64, row.block_n, 12, 2),
            width=width,
            columns=3 * d + 2 * dv,
            by_key=True,
            is_ordered=call.deterministic,
            beside=2 * call.rows("o") + 2 * accumulated + q,
        )
    ]


def _is_split(call: Call) -> bool:
    """Whether two warpgroups share the columns of their rows."""
    return max(call.d, call.dv) > MAX_WHOLE_ROWS


def _width(call: Call) -> int:
    return max(64, padded(call.d), padded(call.dv))


# (forward, backward) by backend; the reference launches no kernels of its own
PROFILES = {"hopper": (hopper_forward, hopper_backward), "triton": (triton_forward, triton_backward)}
