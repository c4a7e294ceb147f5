"""What a plan would take on a cluster that is not here: compute, traffic, exposed time and memory of every rank.

    plan = tilewise.distributed.plan(256, seqlen=1_000_000, causal=True)
    print(plan.simulate("8xH200+400G", heads=32, kv_heads=8, dim=128))

Compute comes from what the kernels reach on one GPU (tilewise.costs, fitted to measurements), links from a file,
links.json. A rank computes one tile at a time; a message goes when both its ends have posted it, as fast as the slower
of their links. What it tells is which plan is better than which, not milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..costs.devices import ITEMSIZE, device
from ..costs.explain import explain as explain_call
from ..costs.predict import Model
from ..errors import AttentionError
from .layout import cacheable
from .partition import GATHERING, Partition

LINKS = Path(__file__).with_name("links.json")
LARGE = 16384  # tokens of a call in which nothing but the matrix units counts
MERGES = 3  # times that the float32 out is read or written to merge a tile into it


@dataclass(frozen=True)
class Machine:
    """So many GPUs to a node: what they compute and what they send, in bytes and seconds."""

    name: str
    node: int
    rate: float  # FLOP/s of the forward
    backward_rate: float
    bandwidth: float  # of the GPU's memory
    launch: float
    inside: tuple[float, float]  # bytes/s and seconds, between GPUs of a node
    between: tuple[float, float]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    batch: int
    itemsize: int

    def kv(self, rows: Any, width: int) -> Any:
        """Bytes of the keys and values of so many rows, for a member's part of the heads."""
        return (
            rows
            * 2
            * self.dim
            * max(self.kv_heads / width, 1 if self.heads >= width else 0)
            * self.batch
            * self.itemsize
        )

    def q(self, rows: Any, width: int) -> Any:
        return rows * self.dim * self.heads / width * self.batch * self.itemsize


@dataclass(frozen=True)
class Simulation:
    """Seconds and bytes. Tensors have an entry for each station (of a two-level plan: a node; else a rank); `start` and
    `finish` (steps, stations) are when each computes the keys of its t-th source."""

    plan: Partition
    machine: Machine
    backward: bool
    time: float
    ideal: float  # the work alone, spread over all ranks
    compute: Tensor  # of the busiest member
    sent: Tensor  # by one rank of the station
    exposed: Tensor
    memory: Tensor
    start: Tensor
    finish: Tensor

    @property
    def efficiency(self) -> float:
        return self.ideal / self.time if self.time else 1.0

    def to_dict(self, ranks: int = 16) -> dict[str, Any]:
        """For JSON: the totals, and the timeline of the first so many stations."""
        few = slice(0, ranks)
        bars = [
            {"station": s, "step": t, "start": a, "end": b}
            for s in range(min(ranks, self.start.shape[1]))
            for t, (a, b) in enumerate(zip(self.start[:, s].tolist(), self.finish[:, s].tolist(), strict=True))
            if b > a
        ]
        return {
            "plan": repr(self.plan), "strategy": self.plan.strategy, "layout": self.plan.layout,
            "ranks": self.plan.ranks, "machine": self.machine.name, "backward": self.backward, "time": self.time,
            "efficiency": self.efficiency, "compute": self.compute[few].tolist(), "sent": self.sent[few].tolist(),
            "exposed": self.exposed[few].tolist(), "memory": self.memory[few].tolist(), "bars": bars,
        }  # fmt: skip

    def to_json(self, ranks: int = 16) -> str:
        return json.dumps(self.to_dict(ranks))

    def __str__(self) -> str:
        busiest = self.compute.max().item()
        return (
            f"{self.plan!r} on {self.machine.name}\n"
            f"  {self.time * 1e3:.2f} ms, {self.efficiency:.0%} of what the work alone would take;"
            f" computing {busiest * 1e3:.2f} ms, exposed {self.exposed.max().item() * 1e3:.2f} ms\n"
            f"  {self.sent.max().item() / 1e9:.2f} GB sent by a rank, {self.memory.max().item() / 1e9:.2f} GB held"
        )


def machine_of(name: str, dim: int, dtype: str, links: Mapping[str, Any]) -> Machine:
    """
    >>> machine_of("8xH200+400G", 128, "bfloat16", json.loads(LINKS.read_text())).node
    8
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\w+)(?:\+(\w+))?", name) if isinstance(name, str) else None
    if found is None or (found[3] or "400G") not in links["network"]:
        raise AttentionError("machine", repr(name), f"like '8xH200+400G', the network one of {list(links['network'])}")
    gpu = device(found[2])
    inside = links["node"].get(gpu.name.split()[-1], links["node"]["other"])
    between = links["network"][found[3] or "400G"]
    model, cut = Model.load(), links["cut"]
    # one large call of full attention, as the model of one GPU predicts it
    shape = (1, LARGE, 8, dim)
    forward, both = (explain_call(shape, shape, shape, device=found[2], dtype=dtype, backward=b) for b in (False, True))
    backward = both.prediction.device - forward.prediction.device
    return Machine(
        name, int(found[1] or 1), forward.flops / forward.prediction.device / cut["forward"],
        (both.flops - forward.flops) / backward / cut["backward"],
        gpu.bandwidth * model.bandwidth, model.gap, (inside["bandwidth"] * 1e9, inside["latency"] * 1e-6),
        (between["bandwidth"] * 1e9, between["latency"] * 1e-6),
    )  # fmt: skip


@cacheable
def simulate(
    plan: Partition, machine: str = "8xH200+400G", *, heads: int = 32, kv_heads: int | None = None, dim: int = 128,
    batch: int = 1, dtype: str = "bfloat16", backward: bool = False, links: Mapping[str, Any] | None = None,
) -> Simulation:  # fmt: skip
    """One pass of attention, forward (or `backward`), on the ranks of the plan."""
    on = machine_of(machine, dim, dtype, links or json.loads(LINKS.read_text(encoding="utf-8")))
    kv_heads = heads if kv_heads is None else kv_heads
    if min(heads, kv_heads, dim, batch) < 1 or heads % kv_heads:
        found = f"{heads} on {kv_heads} of {dim}, batch {batch}"
        raise AttentionError("heads", found, "at least 1 of each, query heads a multiple of KV heads")
    shape = Shape(heads, kv_heads, dim, batch, ITEMSIZE[dtype])
    n, width = plan.ring_size, plan.ulysses_size
    rows = torch.tensor([float(plan.rows(s)) for s in range(n)])
    own = -(-heads // width) / heads  # of the heads, the member with most of them
    flops = 4 * plan.pairs.double() * batch * heads * own * dim * (2.5 if backward else 1.0)
    asked = torch.full_like(rows, plan.queries) if plan.queries else rows
    merge = MERGES * shape.q(asked, 1) * own * 4 / shape.itemsize / on.bandwidth * (0 if backward else 1)
    busy = flops / (on.backward_rate if backward else on.rate)
    busy = torch.maximum(busy, shape.kv(rows, width).double() / on.bandwidth * (plan.pairs > 0))
    ideal = float(busy.sum()) / own / plan.ranks
    busy = torch.where(plan.pairs > 0, busy + on.launch + merge[:, None], 0.0)
    around = {"ring": _ring, "two-level": _ring, "ulysses": _ring}.get(plan.strategy, _gathered)
    start, finish, sent, held = around(plan, on, shape, busy, rows, backward)
    heads_time, heads_sent = _exchange(plan, on, shape, rows / width, backward)
    start, finish = start + heads_time, finish + heads_time
    compute = busy.sum(1)
    time = float(finish.max()) + heads_time if finish.numel() else 0.0
    # q, k, v and out as they are; the sums in float32
    memory = 2 * shape.q(rows, width) * (2 if backward else 1) + shape.q(rows, width) * 4 / shape.itemsize + held
    exposed = finish.amax(0) - heads_time - compute + 2 * heads_time
    sent = sent + heads_sent
    return Simulation(plan, on, backward, time, ideal, compute, sent, exposed.clamp(min=0), memory, start, finish)


def _ring(plan: Partition, on: Machine, shape: Shape, busy: Tensor, rows: Tensor, backward: bool) -> Any:
    """(start, finish, bytes sent, bytes held), step by step for all stations at once."""
    n, width = plan.ring_size, plan.ulysses_size
    reach = torch.tensor(plan.hops)
    station = torch.arange(n)
    crosses = (station * width // on.node) != ((station - 1) % n * width // on.node)  # the link that comes in
    speed = torch.where(crosses, on.between[0], on.inside[0])
    delay = torch.where(crosses, on.between[1], on.inside[1])
    free = torch.zeros(n, dtype=torch.float64)  # when each has finished its last tile, and its messages
    arrived, summed, sent = free.clone(), free.clone(), free.clone()
    starts, finishes = [], []
    for t in range(int(reach.max()) + 1 if n else 0):
        source = (station - t) % n
        start = torch.maximum(free, arrived)
        finish = start + torch.where(t <= reach[source], busy[station, source], 0.0)
        coming = (station - t - 1) % n
        moves = t < reach[coming]
        size = torch.where(moves, shape.kv(rows[coming], width), 0.0).double()
        took = torch.where(moves, size / speed + delay, 0.0)
        arrived = torch.maximum(start, start.roll(1)) + took
        sent += size.roll(-1)
        if backward:  # the gradients follow in float32, and must be there when the next tile is done
            finish = torch.maximum(finish, summed)
            gradients = size * 4 / shape.itemsize
            summed = torch.where(moves, finish.roll(1) + gradients / speed + delay, 0.0)
            sent += gradients.roll(-1)
        free = finish
        starts.append(start)
        finishes.append(finish)
    if backward and n > 1:  # from where the keys have stopped, their gradients go home
        end = (station + reach) % n
        crosses = (station * width // on.node) != (end * width // on.node)
        gradients = shape.kv(rows, width).double() * 4 / shape.itemsize * (reach > 0)
        took = gradients / torch.where(crosses, on.between[0], on.inside[0])
        took += torch.where(crosses, on.between[1], on.inside[1])
        home = torch.where(reach > 0, torch.stack(finishes)[reach, end] + took, 0.0)
        finishes[-1] = torch.maximum(finishes[-1], home)
        sent.index_add_(0, end, gradients)
    held = shape.kv(rows, width) + 2 * shape.kv(rows.max().expand(n), width) * (n > 1)
    return torch.stack(starts), torch.stack(finishes), sent, held * (3 if backward else 1)


def _gathered(plan: Partition, on: Machine, shape: Shape, busy: Tensor, rows: Tensor, backward: bool) -> Any:
    n = plan.ring_size
    wanted = torch.zeros(n, n, dtype=torch.float64)  # rows of column s that row g is sent
    if plan.strategy == "halo":
        wanted += halo_rows(plan)
    elif plan.strategy in GATHERING:
        wanted += rows
    wanted.fill_diagonal_(0)
    size = shape.kv(wanted, 1)
    node = torch.arange(n) // on.node
    near = node == node[:, None]
    own = busy.diagonal()

    def time(size: Tensor) -> Tensor:
        links = ((near, on.inside), (~near, on.between))
        each = []
        for kind, (speed, delay) in links:
            most = torch.stack([(size * kind).sum(1), (size * kind).sum(0)]).amax(0)
            each.append(most / speed + delay * (most > 0))
        return torch.stack(each).amax(0)

    arrive = time(size)
    others = torch.maximum(own, arrive)
    finish = others + busy.sum(1) - own
    if backward:
        back = time(size * 4 / shape.itemsize)
        finish = torch.maximum(finish, finish.max() if n > 1 else finish) + back
    starts, finishes = torch.stack([torch.zeros(n, dtype=torch.float64), others]), torch.stack([own, finish])
    sent = size.sum(0) + size.sum(1) * 4 / shape.itemsize * backward
    if plan.strategy == "tree":
        state = plan.queries * shape.heads * (shape.dim + 1) * 4 * shape.batch
        steps = max(1, (plan.ranks - 1).bit_length())
        finishes[1] = own + steps * (state / on.between[0] + on.between[1])
        sent = torch.full((n,), float(state * steps))
    return starts, finishes, sent, (shape.kv(rows, 1) + size.sum(1)) * (3 if backward else 1)


def halo_rows(plan: Partition) -> Tensor:
    """(stations, stations): the rows of column s that row g sees, as `Partition.rows_sent` has them."""
    n, (before, after) = plan.ring_size, plan.band
    found = torch.zeros(n, n, dtype=torch.int64)
    if before is not None and after is not None:  # few, which may lie apart
        for g, s in (plan.pairs > 0).nonzero().tolist():
            found[g, s] = sum(b - a for a, b in plan.rows_sent(g, s))
        return found
    runs: dict[int, list[tuple[int, int, int, int]]] = {}
    for station, held in enumerate(plan.ring_shards):
        for run in held:
            runs.setdefault(run.document, []).append((station, run.start, run.size, run.step))
    for of in runs.values():  # a station sees the beginning of each run of keys, or its end: the most of its queries
        at, start, size, step = torch.tensor(of).unbind(1)
        away = start[:, None] - start
        if after is not None:
            seen = (away + after).div(step, rounding_mode="floor") + size[:, None]
        elif before is not None:
            seen = size + (before - away).div(step, rounding_mode="floor")
        else:
            seen = size.expand_as(away)
        seen = torch.minimum(seen.clamp(min=0), size)
        most = torch.zeros(n, len(of), dtype=torch.int64)
        most.scatter_reduce_(0, at[:, None].expand_as(seen), seen, "amax")
        found.index_add_(1, at, most)
    return found


def _exchange(plan: Partition, on: Machine, shape: Shape, rows: Tensor, backward: bool) -> tuple[float, Tensor]:
    """Of heads for tokens, once: the time on either side of the ring, and the bytes of a rank."""
    width = plan.ulysses_size
    if width == 1:
        return 0.0, torch.zeros(plan.ring_size, dtype=torch.float64)
    size = (shape.q(rows, 1) * 2 + shape.kv(rows, 1) * (2 if backward else 1)).double() * (width - 1) / width
    away = 0.0 if width <= on.node else (width - on.node) / (width - 1)
    each = size.max().item() / 2
    seconds = (
        max(each * (1 - away) / on.inside[0], each * away / on.between[0]) + on.inside[1] + (away > 0) * on.between[1]
    )
    return seconds, size
