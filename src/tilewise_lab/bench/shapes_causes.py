"""Where the time of a call on the Hopper kernels goes, beside the products of visible pairs: what a slow row lacks.

The shares come from the tiles of the call and their schedule, which are known before it runs, and from the time model
of `tilewise explain`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewise.backends.hopper.support import RowGroups, is_uneven, rows_together
from tilewise.request import Spec
from tilewise_lab.bench.cases import Case
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import Device
from tilewise_lab.costs.predict import MODEL, Kernel, plan, span
from tilewise_lab.costs.waves import schedule

LEAST_SHARE = 0.05  # of the time, to be named


class Cause(NamedTuple):
    """`share`: of the measured time, by estimate. Shares may overlap."""

    name: str
    share: float
    detail: str = ""

    def __str__(self) -> str:
        words = [self.name, f"{self.share:.0%}" if self.share else "", f"({self.detail})" if self.detail else ""]
        return " ".join(filter(None, words))


class Tiles(NamedTuple):
    """The tiles of a kernel in the order in which they start: steps of each, and how many of these need a mask."""

    steps: list[tuple[int, int]]

    @property
    def total(self) -> int:
        return sum(steps for steps, _ in self.steps)


def call_of(case: Case) -> Call:
    lengths = tuple((n, n) for n in case.lengths) or None
    tokens = (sum(case.lengths),) * 2 if case.lengths else (case.n_q, case.seq)
    before, after = case.window, 0 if case.causal else None
    heads = case.heads, case.kv_heads, case.dim, case.dv
    return Call(case.batch, *tokens, *heads, case.dtype, before=before, after=after, lengths=lengths)


def causes(case: Case, which: str, seconds: float, device: Device, spills: int = 0) -> list[Cause]:
    """What takes the time of a call beside visible products, largest share first; a loop that is slow of itself last.

    Args:
        case: the call.
        which: forward or backward.
        seconds: its measured time.
        device: where it was measured.
        spills: bytes of registers that its main kernel spills.

    Returns:
        Causes with a share of at least LEAST_SHARE, and spills of any size.
    """
    call, backward = call_of(case), which == "backward"
    kernels = plan(call, "hopper", device, backward=backward, only_backward=backward)
    if not kernels:
        return []
    main = kernels[0]
    found = [*_of_tiles(call, main, seconds, device), *_of_memory(call, main, seconds, device)]
    named = sorted((x for x in found if x.share >= LEAST_SHARE), key=lambda x: -x.share)
    if spills:
        named.insert(0, Cause("spills", 0.0, f"{spills} bytes"))
    return [*named, _rate(main, seconds, device)]


def _of_tiles(call: Call, kernel: Kernel, seconds: float, device: Device) -> Iterator[Cause]:
    tiles = tiles_in_order(call, kernel, device)
    tile, step = kernel.tile, kernel.step_flops * kernel.slots / kernel.rate
    costs = [MODEL.prologue + step * (steps + MODEL.edge * edges) for steps, edges in tiles.steps]
    busy = schedule(costs, device.sms)
    yield Cause("idle SMs", 1 - busy.efficiency, f"{len(costs)} tiles for {device.sms} SMs")
    computed = tiles.total * tile.block_m * tile.block_n
    yield Cause("hidden pairs", 1 - call.pairs / computed, f"tiles of {tile.block_m} x {tile.block_n}")
    columns = kernel.step_flops / (2 * tile.block_m * tile.block_n)
    needed = call.flops(backward=kernel.name != "hopper forward") / (2 * call.pairs)
    yield Cause("padded columns", 1 - needed / columns, f"{needed:.0f} of {columns:.0f}")
    yield Cause("starts of tiles", min(1.0, len(costs) / device.sms * MODEL.prologue / seconds), f"{len(costs)} tiles")


def _of_memory(call: Call, kernel: Kernel, seconds: float, device: Device) -> Iterator[Cause]:
    bandwidth = device.bandwidth * MODEL.bandwidth
    small = kernel.beside / bandwidth
    if kernel.name != "hopper forward":
        yield Cause("small kernels", min(1.0, small / seconds), f"{1e6 * small:.0f} us of memory traffic")
    moved = kernel.moved / bandwidth
    if moved > 0.5 * seconds:
        yield Cause("memory", moved / seconds, f"{kernel.moved / 1e6:.0f} MB")


def _rate(kernel: Kernel, seconds: float, device: Device) -> Cause:
    """How fast the tiles were computed, of what the device's matrix units can, after all of the above."""
    return Cause("rate of the tiles", kernel.flops / seconds / device.flops("bfloat16"), "of the peak")


def tiles_in_order(call: Call, kernel: Kernel, device: Device) -> Tiles:
    """The tiles of a kernel as its scheduler hands them out: groups of rows, the longest tiles of a group first."""
    by_key = kernel.name != "hopper forward"
    parts, groups = _backward_order(call, device) if by_key else (1, _forward_groups(call))
    group = call.heads // call.kv_heads
    rows = (call.kv_heads * parts if by_key else call.heads) * (1 if call.lengths else call.batch)
    each = _tiles_of_row(call, kernel, group if by_key else 1, by_key)
    each = [(-(-steps // parts), -(-edges // parts)) for steps, edges in each]
    found: list[tuple[int, int]] = []
    for size in groups.sizes(rows):
        found += [tile for tile in each for _ in range(size)]
    return Tiles(found)


def _tiles_of_row(call: Call, kernel: Kernel, group: int, by_key: bool) -> list[tuple[int, int]]:
    own, streamed = kernel.tile.block_m, kernel.tile.block_n
    before, after = call.before, call.after
    if by_key:
        own, streamed, before, after = streamed, own, after, before
    found = []
    for n_q, n_k in call.lengths or [(call.n_q, call.n_k)]:
        n, others = (n_k, n_q) if by_key else (n_q, n_k)
        spans = [span(i, min(i + own, n), n, others, before, after, streamed) for i in range(0, n, own)]
        found += [(group * steps, group * edges) for steps, edges in (spans if by_key else spans[::-1])]
    return found


def _forward_groups(call: Call) -> RowGroups:
    """Rows that the forward schedules together."""
    from tilewise.backends.hopper.launches import L2_BYTES

    group, uneven = call.heads // call.kv_heads, is_uneven(_spec(call))
    rows = call.kv_heads * (1 if call.lengths else call.batch)
    size = rows_together(rows, L2_BYTES // (call.n_k * (call.d + call.dv) * 2) if uneven else 1)
    return RowGroups(group * size, group * (rows // size * size))


def _backward_order(call: Call, device: Device) -> tuple[int, RowGroups]:
    """Parts of a tile of keys, and rows that the backward schedules together."""
    from tilewise.backends.common.kernel_call import CallShape
    from tilewise.backends.hopper.backward_schedule import _fastest_split, column_widths, tile_schedule
    from tilewise.backends.hopper.support import backward_tile

    batch = len(call.lengths) if call.lengths else call.batch
    size = CallShape(batch, call.n_q, call.n_k, call.heads, call.kv_heads, call.d, call.dv, bool(call.lengths))
    tile = backward_tile(*column_widths(size).columns, plain=True, deterministic=False)
    split = _fastest_split(size, _spec(call), tile, device.sms)
    return split.parts, tile_schedule(size, _spec(call), split.parts, tile.block_n, device.sms).groups


def _spec(call: Call) -> Spec:
    return Spec.of(head_dim=call.d, causal=call.after == 0, window=None if call.before is None else (call.before, 0))


def sentence(found: Sequence[Cause]) -> str:
    """
    >>> sentence([Cause("idle SMs", 0.31, "96 tiles for 132 SMs"), Cause("rate of the tiles", 0.4, "of the peak")])
    'idle SMs 31% (96 tiles for 132 SMs); rate of the tiles 40% (of the peak)'
    >>> sentence([Cause("spills", 0.0, "24 bytes")])
    'spills (24 bytes)'
    """
    return "; ".join(map(str, found))
