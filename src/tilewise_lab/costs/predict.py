"""The time model: how long a call takes, from a few efficiencies that were fitted to measurements on an H200.

The numbers are in model.json; they were fitted to the benchmark of 2026-11-15.

A kernel is a list of programs; a program is a prologue and so many steps over tiles. One step costs

    step = FLOPs of its tile / (rate of one SM · efficiency)

where the efficiency is the share of the matrix units that the kernel reaches between its start and its end. The
programs are scheduled on the SMs in launch order, as by the hardware (`waves.schedule`), which gives the tail; memory
can bind instead; and a call takes at least the time the host needs to launch it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.backends.common.tiles import Tile
from tilewise.errors import AttentionError
from tilewise_lab.costs.cost import Call, ScoreTerms, traffic
from tilewise_lab.costs.devices import Device
from tilewise_lab.costs.profiles import Profile, profiles
from tilewise_lab.costs.waves import Schedule, Waves, schedule, waves

Programs = tuple[int, int, int]  # how many, their steps, and how many of these with a mask
MAX_TILES = 1 << 22  # of one kernel: some seconds of prediction
UNKNOWN = 0.5  # efficiency of a kernel that was not measured
Table = Mapping[tuple[str, int], Mapping[int, float]]
FITTED = Path(__file__).with_name("model.json")


@dataclass(frozen=True)
class Model:
    """The fitted numbers: seconds, and shares of the device's rates."""

    prologue: float  # of a program: its first loads, its last stores
    edge: float  # extra cost of a step with a mask, as a share of a step
    gap: float  # between kernels
    host: float  # one eager forward call, from Python to the launch
    host_backward: float  # the backward's launches, and autograd around them
    bandwidth: float  # of the vendor's number
    reference: float  # of a matrix product in torch: the reference backend
    ordered: float  # speed of a backward that sums dQ in a fixed order, as a share of one that does not
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


MODEL = Model.load()


@dataclass(frozen=True)
class Kernel:
    """One launch: `work` lists its programs in the order in which they start."""

    name: str
    tile: Tile
    work: tuple[Programs, ...]
    step_flops: int  # of a step, on average
    moved: int  # bytes to and from memory
    blocks_per_sm: int
    slots: int
    rate: float  # FLOP/s that all slots together reach
    model: Model
    beside: int = 0  # bytes moved by small kernels before and after, which overlap with nothing
    term_seconds: float = 0.0  # of a step: score terms, one SM's share of the ordinary units
    profile: Profile | None = None

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


@cache
def work_of(call: Call, tile: Tile, *, by_key: bool = False, shared: int = 1) -> tuple[Programs, ...]:
    """The programs of a kernel. Each owns queries, of `shared` heads in one tile; or, with `by_key`, keys."""
    if by_key:
        own, streamed, heads, group = tile.block_n, tile.block_m, call.kv_heads, call.heads // call.kv_heads
        before, after = call.after, call.before
    else:
        own, streamed, heads, group = tile.block_m, tile.block_n, call.heads // shared, 1
        before, after = call.before, call.after
    work: list[Programs] = []
    tiles = sum(count * heads * -(-(n_k if by_key else n_q) * shared // own) for count, n_q, n_k in call.sequences)
    if tiles > MAX_TILES:
        raise AttentionError(
            "tiles of the call", f"{tiles:,}", f"at most {MAX_TILES:,}: the time of every tile is predicted"
        )
    for count, n_q, n_k in call.sequences:
        mine, others = (n_k, n_q) if by_key else (n_q, n_k)
        spans = [
            span(r // shared, min((r + own - 1) // shared + 1, mine), mine, others, before, after, streamed)
            for r in range(0, mine * shared, own)
        ]
        if not by_key:
            spans.reverse()  # the last tiles of a causal head see the most keys, and start first
        work += _runs([(group * steps, group * edges) for steps, edges in spans], count * heads)
    return tuple(work)


def _runs(tiles: list[tuple[int, int]], repeats: int) -> list[Programs]:
    """The tiles of one head, for every head; equal tiles are counted instead of listed."""
    if len(set(tiles)) <= 1:
        return [(repeats * len(tiles), *tile) for tile in tiles[:1]]
    return [(1, *tile) for tile in tiles] * repeats


def span(
    first: int, last: int, n: int, others: int, before: int | None, after: int | None, block: int
) -> tuple[int, int]:
    """Steps of rows [first, last) over the columns they see, and how many of these need a mask.

    >>> # causal: 8 tiles that all rows see, 2 on the diagonal
    >>> span(512, 640, 4096, 4096, None, 0, 64)
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
    """The kernels of a call, in order; [] for a backend without kernels of its own."""
    forward = [] if only_backward else profiles(backend, call, device.gpu, False)
    after = profiles(backend, call, device.gpu, True) if backward else []
    return [
        *(_kernel(call, profile, device, model) for profile in forward),
        *(_kernel(call, profile, device, model, is_last=profile is after[-1]) for profile in after),
    ]


def _kernel(call: Call, profile: Profile, device: Device, model: Model, is_last: bool = False) -> Kernel:
    """`is_last`: the last kernel of a backward, after which the gradients of terms are written."""
    tile, fit = profile.tile, profile.programs
    if profile.shared:
        shared = min(profile.shared, device.shared)
        fit = max(1, device.blocks_per_sm(shared=shared, registers=profile.registers, warps=tile.warps))
    efficiency = model.efficiency.get((profile.name, call.itemsize), {}).get(profile.width, UNKNOWN)
    if profile.is_ordered:
        efficiency *= model.ordered
    slots = device.sms * fit
    work, splits = work_of(call, tile, by_key=profile.by_key, shared=profile.heads), 1
    if profile.splits is not None:
        splits = profile.splits(sum(n for n, *_ in work), device.sms)
        work = tuple((n * splits, -(-steps // splits), -(-edges // splits)) for n, steps, edges in work)
    terms = call.terms or ScoreTerms(())
    operations = terms.forward if profile.is_forward else terms.backward
    beside = profile.beside + (terms.written if is_last else 0)
    if splits > 1:  # O of every split is stored and read in float32
        beside += 2 * splits * 4 * call.rows("o") // call.itemsize
    return Kernel(
        name=profile.name,
        tile=tile,
        work=work,
        step_flops=round(2 * tile.block_m * tile.block_n * profile.columns * terms.visited),
        moved=_moved(call, profile, device) + terms.read,
        blocks_per_sm=fit,
        slots=slots,
        rate=device.flops(call.dtype) * efficiency,
        model=model,
        beside=beside,
        term_seconds=terms.visited * tile.block_m * tile.block_n * operations * slots / (device.lanes * model.lanes),
        profile=profile,
    )


def _moved(call: Call, profile: Profile, device: Device) -> int:
    q, k, v, o = map(call.rows, "qkvo")
    again = rereads(call, device, profile.tile, queries=profile.by_key)
    if profile.is_forward:
        return round(q + o + call.statistic_bytes + again * (k + v))
    if profile.by_key:
        return round(2 * (k + v) + again * (q + o))
    return round(2 * q + o + again * (k + v))


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
    """Predicted seconds: of each kernel, of all kernels on the device, and of the call as its caller sees it."""

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

    >>> from tilewise_lab.costs.devices import device
    >>> call = Call(1, 8192, 8192, 16, 16, 128, 128)
    >>> full = predict(call, "triton", device("H200"))
    >>> 400e12 < call.flops() / full.call < 700e12
    True
    """
    backward = backward or only_backward
    flops = call.flops() * (not only_backward) + call.flops(backward=True) * backward
    kernels = plan(call, backend, device, backward=backward, only_backward=only_backward, model=model)
    if not kernels:
        moved = traffic(call, backward=backward).tiled
        seconds = flops / (device.flops(call.dtype) * model.reference) + moved / device.bandwidth
        return Prediction({}, seconds, seconds)
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
