"""How long a call takes: a model with a few efficiencies, each with a meaning, fitted to measurements on an H200.

The numbers are in model.json; `tilewise explain --fit FILE` fits them to a result of `tilewise bench`, and writes it.

A kernel is a list of programs; a program is a prologue and so many steps over tiles. One step costs

    step = FLOPs of its tile / (rate of one SM · efficiency)

where the efficiency is what the kernel reaches of the matrix units when it never waits to start or stop. The programs
are dealt to the SMs as the hardware does it (`waves.schedule`), which gives the tail; memory can bind instead; and a
call takes at least the time the host needs to launch it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.costs.cost import Call, traffic
from tilewise.costs.devices import Device
from tilewise.costs.waves import Schedule, Waves, schedule, waves
from tilewise.kernels.hopper.limits import has_backward as has_hopper_backward
from tilewise.kernels.hopper.tiles import forward_tile, widths
from tilewise.kernels.portable import tiles
from tilewise.kernels.portable.tiles import Tile

Table = Mapping[tuple[str, int], Mapping[int, float]]
FITTED = Path(__file__).with_name("model.json")


@dataclass(frozen=True)
class Model:
    """What the shapes do not tell. Seconds, and shares of what the device could do."""

    prologue: float  # of a program: its first loads, its last stores
    edge: float  # a step with a mask costs so much more than one without
    gap: float  # between kernels
    host: float  # one eager forward call, from Python to the launch
    host_backward: float  # the backward's launches, and autograd around them
    bandwidth: float  # of the vendor's number
    reference: float  # of a matrix product in torch: the reference backend
    ordered: float  # of the Hopper backward's speed, when it sums dQ in a fixed order
    lanes: float  # of the ordinary units, while they work on score terms
    efficiency: Table  # (kernel, bytes per element) -> {padded head dim: share of the matrix units}

    @staticmethod
    def load(path: Path = FITTED) -> Model:
        fields = json.loads(path.read_text(encoding="utf-8"))
        table = {
            (row["kernel"], row["itemsize"]): {int(d): share for d, share in row["share"].items()}
            for row in fields.pop("efficiency")
        }
        return Model(**fields, efficiency=table)

    def save(self, path: Path = FITTED) -> None:
        fields = {name: float(f"{x:.3g}") for name, x in asdict(self).items() if name != "efficiency"}
        rows = [
            json.dumps({"kernel": kernel, "itemsize": size, "share": {d: round(e, 3) for d, e in row.items()}})
            for (kernel, size), row in self.efficiency.items()
        ]
        body = json.dumps(fields, indent=1).removesuffix("\n}")
        path.write_text(body + ',\n "efficiency": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n", encoding="utf-8")


MODEL = Model.load()


@dataclass(frozen=True)
class Kernel:
    """One launch: `work` lists (programs, steps, steps with a mask) in the order in which the programs start."""

    name: str
    tile: Tile
    work: tuple[tuple[int, int, int], ...]
    step_flops: int  # of a step, on average
    moved: int  # bytes to and from memory
    blocks_per_sm: int
    slots: int
    rate: float  # FLOP/s that all slots together reach
    model: Model
    beside: int = 0  # bytes moved by small kernels before and after, which overlap with nothing
    term_seconds: float = 0.0  # of a step: score terms, one SM's share of the ordinary units

    @cached_property
    def programs(self) -> int:
        return sum(count for count, _, _ in self.work)

    @cached_property
    def steps(self) -> int:
        return sum(count * steps for count, steps, _ in self.work)

    @property
    def flops(self) -> int:
        """What is computed: whole tiles, hidden pairs and padding included."""
        return self.steps * self.step_flops

    @cached_property
    def waves(self) -> Waves:
        return waves(self.programs, self.slots)

    @cached_property
    def schedule(self) -> Schedule:
        step = self.step_flops * self.slots / self.rate + self.term_seconds
        costs = [(n, self.model.prologue + step * (s + self.model.edge * e)) for n, s, e in self.work]
        if self.programs > 20_000:  # the tail no longer matters: half a block on average
            total = sum(n * cost for n, cost in costs)
            finish = total / self.slots + max(cost for _, cost in costs) / 2
            return Schedule(finish, total / (self.slots * finish))
        return schedule([cost for n, cost in costs for _ in range(n)], self.slots)

    def seconds(self, device: Device) -> float:
        bandwidth = device.bandwidth * self.model.bandwidth
        return max(self.schedule.finish, self.moved / bandwidth) + self.beside / bandwidth


def padded(d: int) -> int:
    """The power of two, at least 16, in which a head dim is computed."""
    return max(16, 1 << (d - 1).bit_length())


def shared_estimate(name: str, tile: Tile, d: int, dv: int, itemsize: int) -> int:
    """Bytes of the tiles a program keeps (its own) and streams (one per stage); the compiler has the last word."""
    own, streamed = (tile.block_n, tile.block_m) if name == "key" else (tile.block_m, tile.block_n)
    kept = own * d if name == "forward" else own * (d + dv)
    return itemsize * (kept + tile.stages * streamed * (d + dv))


@cache
def work_of(call: Call, name: str, tile: Tile) -> tuple[tuple[int, int, int], ...]:
    """(programs, steps, masked steps) of the query side ("forward", "query") or the key side ("key")."""
    if name in ("key", "hopper backward"):
        own, streamed, heads, group = tile.block_n, tile.block_m, call.kv_heads, call.heads // call.kv_heads
        before, after = call.after, call.before
    else:
        own, streamed, heads, group = tile.block_m, tile.block_n, call.heads, 1
        before, after = call.before, call.after
        if name.endswith("forward") and call.heads_are_queries:
            heads = call.kv_heads
    work: list[tuple[int, int, int]] = []
    for count, n_q, n_k in call.sequences:
        mine, others = (n_k, n_q) if name in ("key", "hopper backward") else (n_q, n_k)
        spans = [span(i, min(i + own, mine), mine, others, before, after, streamed) for i in range(0, mine, own)]
        if name not in ("key", "hopper backward"):
            spans.reverse()  # the last tiles of a causal head see the most keys, and start first
        work += _runs([(group * steps, group * edges) for steps, edges in spans], count * heads)
    return tuple(work)


def _runs(tiles: list[tuple[int, int]], repeats: int) -> list[tuple[int, int, int]]:
    """The tiles of one head, for every head; neighbours alike are counted instead of listed."""
    if len(set(tiles)) <= 1:
        return [(repeats * len(tiles), *tile) for tile in tiles[:1]]
    return [(1, *tile) for tile in tiles] * repeats


def span(
    first: int, last: int, n: int, others: int, before: int | None, after: int | None, block: int
) -> tuple[int, int]:
    """Steps of rows [first, last) over the columns they see, and how many of these need a mask.

    >>> span(512, 640, 4096, 4096, None, 0, 64)  # causal: 8 tiles seen by all, 2 on the diagonal
    (10, 2)
    """
    a, b = first + others - n, last - 1 + others - n
    lo = 0 if before is None else max(a - before, 0) // block * block
    hi = others if after is None else min(b + after + 1, others)
    if hi <= lo:
        return 0, 0
    full_lo = 0 if before is None else max(b - before, 0)
    full_hi = others if after is None else min(a + after + 1, others)
    full = max(0, full_hi // block - max(-(-full_lo // block), lo // block))
    steps = -(-(hi - lo) // block)
    return steps, steps - min(full, steps)


def plan(
    call: Call, backend: str, device: Device, *, backward: bool, only_backward: bool = False, model: Model = MODEL
) -> list[Kernel]:
    """The kernels of a call, in order. The reference backend launches none of its own: []."""
    if backend == "reference":
        return []
    forward, after = "forward", ["key", "query"]
    if backend == "hopper":
        forward = "hopper forward"
        if has_hopper_backward(call.d, call.dv):
            after = ["hopper backward"]
    names = [forward] * (not only_backward) + after * backward
    return [_kernel(call, name, device, model) for name in names]


def _kernel(call: Call, name: str, device: Device, model: Model) -> Kernel:
    d, dv = padded(call.d), padded(call.dv)
    tile = tile_of(call, name, device)
    if name.startswith("hopper"):
        d, dv = max(d, 64), max(dv, 64)
        fit = 1  # one program per SM, which takes tiles until none is left
    else:
        shared = shared_estimate(name, tile, d, dv, call.itemsize)
        registers = 65536 // (32 * tile.warps * 2) if tile.warps <= 4 else 168
        fit = max(1, device.blocks_per_sm(shared=min(shared, device.shared), registers=registers, warps=tile.warps))
    efficiency = model.efficiency[name, call.itemsize][max(d, dv)]
    if name == "hopper backward" and call.deterministic:
        efficiency *= model.ordered
    products = {
        "forward": d + dv,
        "key": 2 * d + 2 * dv,
        "query": 2 * d + dv,
        "hopper forward": sum(widths(call.d)) + sum(widths(call.dv)),
        "hopper backward": 3 * max(d, dv) + 2 * dv,
    }[name]
    slots = device.sms * fit
    work, parts = work_of(call, name, tile), 1
    if name == "forward" and call.lengths is None and call.n_q <= tiles.FEW_QUERIES:
        parts = tiles.parts_of_keys(sum(n for n, *_ in work), call.n_k, tile.block_n, device.sms)
        work = tuple((n * parts, -(-steps // parts), -(-edges // parts)) for n, steps, edges in work)
    visited = 1.0 if call.terms is None else call.terms.visited
    operations = 0 if call.terms is None else getattr(call.terms, "forward" if name.endswith("forward") else "backward")
    return Kernel(
        name=name,
        tile=tile,
        work=work,
        step_flops=round(2 * tile.block_m * tile.block_n * products * visited),
        moved=_moved(call, name, device, tile),
        blocks_per_sm=fit,
        slots=slots,
        rate=device.flops(call.dtype) * efficiency,
        model=model,
        beside=_beside(call, name, parts),
        term_seconds=visited * tile.block_m * tile.block_n * operations * slots / (device.lanes * model.lanes),
    )


def tile_of(call: Call, name: str, device: Device) -> Tile:
    """The tile of a kernel; for the Hopper kernels, whose warps have different jobs, that of the program."""
    d = max(padded(call.d), padded(call.dv))
    if name == "hopper forward":
        row = forward_tile(call.d, call.dv, banded=call.after is not None, keys=call.n_k)
        return Tile(64 * row.warpgroups, row.block_n, 4 * row.warpgroups + 4, row.stages)
    if name == "hopper backward":
        return Tile(64, 128 if d <= 128 else 64, 12, 2)
    return tiles.tile(name, device.capability, call.itemsize, d)


def _moved(call: Call, name: str, device: Device, tile: Tile) -> int:
    q, k, v, o = map(call.rows, "qkvo")
    terms = 0 if call.terms is None else call.terms.read
    if name.endswith("forward"):
        return round(q + o + call.statistic_bytes + rereads(call, device, tile) * (k + v)) + terms
    if name in ("key", "hopper backward"):
        return round(2 * (k + v) + rereads(call, device, tile, queries=True) * (q + o)) + terms
    return round(2 * q + o + rereads(call, device, tile) * (k + v)) + terms


def _beside(call: Call, name: str, parts: int) -> int:
    """Before the portable backward O and dO are read; around Hopper's, also dQ in float32 is cleared, read, stored.
    Where the keys of a forward are divided, O of every part is stored and read in float32."""
    q, o = call.rows("q"), call.rows("o")
    wide = 4 * q // call.itemsize
    if name == "forward":
        return 0 if parts == 1 else 2 * parts * 4 * o // call.itemsize
    written = 0 if call.terms is None else call.terms.written
    return {"query": 2 * o + written, "hopper backward": 2 * o + 2 * wide + q + written}.get(name, 0)


def rereads(call: Call, device: Device, tile: Tile, *, queries: bool = False) -> float:
    """How often the streamed side comes from memory: once, if L2 holds what the running programs share.

    The programs of one head run together and stream the same rows at about the same time, so L2 needs to hold one
    copy per head in flight; what does not fit is read again for every wave of that head's programs.
    """
    n_own, n_streamed, block = (call.n_k, call.n_q, tile.block_n) if queries else (call.n_q, call.n_k, tile.block_m)
    if call.lengths:
        n_own, n_streamed = max(call.lengths)[::-1] if queries else max(call.lengths)
    tiles = -(-n_own // block)
    heads_in_flight = max(1.0, device.sms / max(tiles, 1))
    streamed = heads_in_flight * n_streamed * (call.d + call.dv) * call.itemsize
    return 1.0 if streamed <= device.l2 else max(1.0, tiles / device.sms)


class Prediction(NamedTuple):
    """Seconds: of each kernel, of all of them on the device, and of the call as its caller sees it."""

    kernels: dict[str, float]
    device: float
    call: float


def predict(
    call: Call,
    backend: str,
    device: Device,
    *,
    backward: bool = False,
    only_backward: bool = False,
    model: Model = MODEL,
) -> Prediction:
    """One forward call; with `backward` also the backward; with `only_backward` the latter alone.

    >>> from tilewise.costs.devices import device
    >>> call = Call(1, 8192, 8192, 16, 16, 128, 128)
    >>> full = predict(call, "triton", device("H200"))
    >>> 400e12 < call.flops() / full.call < 700e12
    True
    """
    backward = backward or only_backward
    flops = call.flops() * (not only_backward) + call.flops(backward=True) * backward
    if backend == "reference":
        moved = traffic(call, backward=backward).tiled
        seconds = flops / (device.flops(call.dtype) * model.reference) + moved / device.bandwidth
        return Prediction({}, seconds, seconds)
    kernels = plan(call, backend, device, backward=backward, only_backward=only_backward, model=model)
    each = {kernel.name: kernel.seconds(device) for kernel in kernels}
    on_device = sum(each.values()) + model.gap * (len(each) + backward)
    host = model.host * (not only_backward) + model.host_backward * backward
    return Prediction(each, on_device, max(on_device, host))


def to_dict(kernel: Kernel, seconds: float) -> dict[str, Any]:
    """A kernel for JSON: what it launches, how it fills the device, what it does to memory."""
    tile = kernel.tile
    return {
        "name": kernel.name,
        "tile": {"block_m": tile.block_m, "block_n": tile.block_n, "warps": tile.warps, "stages": tile.stages},
        "programs": kernel.programs,
        "steps": kernel.steps,
        "blocks_per_sm": kernel.blocks_per_sm,
        "slots": kernel.slots,
        "waves": kernel.waves.waves,
        "wave_efficiency": kernel.waves.efficiency,
        "schedule_efficiency": kernel.schedule.efficiency,
        "flops": kernel.flops,
        "bytes": kernel.moved,
        "seconds": seconds,
    }
