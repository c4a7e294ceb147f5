"""Context parallelism on a cluster, simulated: compute, traffic, exposed time and memory of every rank.

    plan = tilewise.distributed.plan(256, seqlen=1_000_000, causal=True)
    print(plan.simulate("8xH200+400G", heads=32, kv_heads=8, dim=128))

Compute comes from the time model of one GPU, which was fitted to measurements; links come from links.json. A rank
computes one tile at a time. A message starts when both its ends have posted it and runs at the speed of the slower
link. Trust the ranking of plans, not the milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.layout import cacheable
from tilewise.distributed.partition import GATHERING, Partition
from tilewise.errors import AttentionError
from tilewise_lab.costs.devices import ITEMSIZE, device
from tilewise_lab.costs.explain import explain
from tilewise_lab.costs.predict import Model

LINKS = Path(__file__).with_name("links.json")
LARGE = 16384  # tokens of a call that keeps the matrix units busy
ACCUMULATIONS = 3  # times that the float32 out is read or written to merge a tile into it
TOLERANCE = 1.03  # estimates that differ by less count as equal
MEMORY_SHARE = 0.5  # of a GPU's memory, for keys, values and accumulators


class Machine(NamedTuple):
    """Nodes of `node` GPUs. Rates are FLOP/s, bandwidths bytes/s; a link is (bytes/s, seconds of latency)."""

    name: str
    node: int
    rate: float  # of the forward
    backward_rate: float
    bandwidth: float  # of the GPU's memory
    launch: float  # seconds
    inside: tuple[float, float]  # between GPUs of a node
    between: tuple[float, float]  # between nodes


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    batch: int
    itemsize: int

    def kv(self, rows: Any, width: int) -> Any:
        """Bytes of the keys and values of so many rows, for one of `width` ranks that divide the heads."""
        heads = max(self.kv_heads / width, 1 if self.heads >= width else 0)
        return rows * 2 * self.dim * heads * self.batch * self.itemsize

    def q(self, rows: Any, width: int) -> Any:
        return rows * self.dim * self.heads / width * self.batch * self.itemsize


@dataclass(frozen=True)
class Simulation:
    """Seconds and bytes. Tensors have an entry for each ring rank: a node of a two-level plan, else a rank. `start` and
    `finish` (steps, ring ranks) are when each computes the keys of its t-th source."""

    plan: Partition
    machine: Machine
    backward: bool
    time: float
    ideal: float  # the work alone, divided evenly among all ranks
    compute: Tensor  # of the busiest rank of a ring rank
    sent: Tensor  # by one rank of a ring rank
    exposed: Tensor
    memory: Tensor
    start: Tensor
    finish: Tensor

    @property
    def efficiency(self) -> float:
        return self.ideal / self.time if self.time else 1.0

    def to_dict(self, ranks: int = 16) -> dict[str, Any]:
        """For JSON: the totals, and the timeline of the first so many ring ranks."""
        first = slice(0, ranks)
        bars = [
            {"station": s, "step": t, "start": a, "end": b}
            for s in range(min(ranks, self.start.shape[1]))
            for t, (a, b) in enumerate(zip(self.start[:, s].tolist(), self.finish[:, s].tolist(), strict=True))
            if b > a
        ]
        return {
            "plan": repr(self.plan),
            "strategy": self.plan.strategy,
            "layout": self.plan.layout,
            "ranks": self.plan.ranks,
            "machine": self.machine.name,
            "backward": self.backward,
            "time": self.time,
            "efficiency": self.efficiency,
            "compute": self.compute[first].tolist(),
            "sent": self.sent[first].tolist(),
            "exposed": self.exposed[first].tolist(),
            "memory": self.memory[first].tolist(),
            "bars": bars,
        }

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


class Estimate(NamedTuple):
    """A plan, the simulations of its passes, and why it cannot run, or None."""

    plan: Partition
    passes: list[Simulation]
    refusal: str | None

    @property
    def time(self) -> float:
        return float(sum(x.time for x in self.passes))

    @property
    def memory(self) -> float:
        return max(float(x.memory.max()) for x in self.passes)

    @property
    def efficiency(self) -> float:
        return sum(x.ideal for x in self.passes) / self.time if self.time else 1.0

    @property
    def sent(self) -> float:
        return sum(float(x.sent.max()) for x in self.passes)

    @property
    def exposed(self) -> float:
        return sum(float(x.exposed.max()) for x in self.passes)


def advised(estimates: Iterable[Estimate]) -> Estimate:
    """The plan to use, among those that can run: of the plans that take at most TOLERANCE times the shortest time, and
    at most TOLERANCE times the least memory of these, the fastest."""
    estimates = list(estimates)
    able = [x for x in estimates if x.refusal is None] or estimates
    least = min(x.time for x in able)
    fast = [x for x in able if x.time <= TOLERANCE * least]
    smallest = min(x.memory for x in fast)
    return min((x for x in fast if x.memory <= TOLERANCE * smallest), key=lambda x: x.time)


def machine_of(name: str, dim: int, dtype: str, links: Mapping[str, Any]) -> Machine:
    """
    >>> links = json.loads(LINKS.read_text())
    >>> machine_of("8xH200+400G", 128, "bfloat16", links).node
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
    forward, both = (explain(shape, shape, shape, device=found[2], dtype=dtype, backward=b) for b in (False, True))
    backward = both.prediction.device - forward.prediction.device
    return Machine(
        name=name,
        node=int(found[1] or 1),
        rate=forward.flops / forward.prediction.device / cut["forward"],
        backward_rate=(both.flops - forward.flops) / backward / cut["backward"],
        bandwidth=gpu.bandwidth * model.bandwidth,
        launch=model.gap,
        inside=(inside["bandwidth"] * 1e9, inside["latency"] * 1e-6),
        between=(between["bandwidth"] * 1e9, between["latency"] * 1e-6),
    )


@cacheable
def simulate(
    plan: Partition,
    machine: str = "8xH200+400G",
    *,
    heads: int = 32,
    kv_heads: int | None = None,
    dim: int = 128,
    batch: int = 1,
    dtype: str = "bfloat16",
    backward: bool = False,
    links: Mapping[str, Any] | None = None,
) -> Simulation:
    """One pass of attention on the ranks of the plan: the forward, or with `backward` the backward."""
    on = machine_of(machine, dim, dtype, links or json.loads(LINKS.read_text(encoding="utf-8")))
    kv_heads = heads if kv_heads is None else kv_heads
    if min(heads, kv_heads, dim, batch) < 1 or heads % kv_heads:
        found = f"{heads} on {kv_heads} of {dim}, batch {batch}"
        raise AttentionError("heads", found, "at least 1 of each, query heads a multiple of KV heads")
    shape = Shape(heads, kv_heads, dim, batch, ITEMSIZE[dtype])
    n, width = plan.ring_size, plan.ulysses_size
    rows = torch.tensor([float(plan.rows(s)) for s in range(n)], device="cpu")
    share = -(-shape.heads // width) / shape.heads  # of the heads, on the rank with most of them
    flops = 4 * plan.pairs.double() * shape.batch * shape.heads * share * shape.dim * (2.5 if backward else 1.0)
    queries = torch.full_like(rows, plan.queries) if plan.queries else rows
    merge = ACCUMULATIONS * shape.q(queries, 1) * share * 4 / shape.itemsize / on.bandwidth * (not backward)
    tiles = flops / (on.backward_rate if backward else on.rate)
    tiles = torch.maximum(tiles, shape.kv(rows, width).double() / on.bandwidth * (plan.pairs > 0))
    ideal = float(tiles.sum()) / share / plan.ranks
    tiles = torch.where(plan.pairs > 0, tiles + on.launch + merge[:, None], 0.0)
    run = _ring if plan.strategy in ("ring", "two-level", "ulysses") else _gather
    start, finish, sent, held = run(plan, on, shape, tiles, rows, backward)
    exchange, exchanged = _all_to_all(plan, on, shape, rows / width, backward)
    start, finish = start + exchange, finish + exchange
    compute = tiles.sum(1)
    return Simulation(
        plan=plan,
        machine=on,
        backward=backward,
        time=float(finish.max()) + exchange if finish.numel() else 0.0,
        ideal=ideal,
        compute=compute,
        sent=sent + exchanged,
        exposed=(finish.amax(0) - exchange - compute + 2 * exchange).clamp(min=0),
        # q, k, v and out in their dtype; accumulators in float32
        memory=2 * shape.q(rows, width) * (2 if backward else 1) + shape.q(rows, width) * 4 / shape.itemsize + held,
        start=start,
        finish=finish,
    )


def estimate(
    plan: Partition,
    machine: str = "8xH200+400G",
    *,
    heads: int = 32,
    kv_heads: int | None = None,
    forward: bool = False,
    **shape: Any,
) -> Estimate:
    """A training step, or its `forward` alone; `shape` as in `simulate`.

    >>> from tilewise.distributed import plan
    >>> plans = (
    ...     plan(64, seqlen=1 << 17, causal=True, strategy=strategy)
    ...     for strategy in ("ring", "two-level", "allgather")
    ... )
    >>> advised(map(estimate, plans)).plan
    <plan: 131072 tokens on 64 ranks, causal, two-level of 8 x 8, zigzag>
    """
    if kv_heads is None:
        kv_heads = heads // 4 if heads % 4 == 0 else heads
    passes = [
        simulate(plan, machine, heads=heads, kv_heads=kv_heads, backward=backward, **shape)
        for backward in ((False,) if forward else (False, True))
    ]
    gpu = device(machine.partition("x")[2].partition("+")[0] or machine)
    found, refusal = Estimate(plan, passes, None), None
    if plan.ulysses_size > heads:
        refusal = f"{plan.ulysses_size} ranks for {heads} heads"
    elif found.memory > MEMORY_SHARE * gpu.memory:
        refusal = f"{found.memory / 1e9:.0f} GB of keys and sums"
    return found._replace(refusal=refusal)


def _ring(plan: Partition, machine: Machine, shape: Shape, tiles: Tensor, rows: Tensor, backward: bool) -> Any:
    """(start, finish, bytes sent, bytes held), step by step for all ring ranks at once. `tiles` (ring ranks, sources):
    seconds of computing with the keys of each source."""
    n, width = plan.ring_size, plan.ulysses_size
    reach = torch.tensor(plan.hops, device="cpu")
    ring_rank = torch.arange(n, device="cpu")

    def link(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        crosses = (source * width // machine.node) != (target * width // machine.node)
        inside, between = machine.inside, machine.between
        return torch.where(crosses, between[0], inside[0]), torch.where(crosses, between[1], inside[1])

    speed, delay = link(ring_rank, (ring_rank - 1) % n)  # from the one before
    free = torch.zeros(n, dtype=torch.float64, device="cpu")  # when each has finished its last tile
    arrived, summed, sent = free.clone(), free.clone(), free.clone()
    starts, finishes = [], []
    for t in range(int(reach.max()) + 1 if n else 0):
        source = (ring_rank - t) % n
        start = torch.maximum(free, arrived)
        finish = start + torch.where(t <= reach[source], tiles[ring_rank, source], 0.0)
        coming = (ring_rank - t - 1) % n
        moves = t < reach[coming]
        size = torch.where(moves, shape.kv(rows[coming], width), 0.0).double()
        arrived = torch.maximum(start, start.roll(1)) + torch.where(moves, size / speed + delay, 0.0)
        sent += size.roll(-1)
        if backward:  # the float32 gradients of the keys follow, and must arrive before the next tile is done
            finish = torch.maximum(finish, summed)
            gradients = size * 4 / shape.itemsize
            summed = torch.where(moves, finish.roll(1) + gradients / speed + delay, 0.0)
            sent += gradients.roll(-1)
        free = finish
        starts.append(start)
        finishes.append(finish)
    if backward and n > 1:  # the gradients return from the last ring rank that saw the keys
        end = (ring_rank + reach) % n
        speed, delay = link(ring_rank, end)
        gradients = shape.kv(rows, width).double() * 4 / shape.itemsize * (reach > 0)
        returned = torch.where(reach > 0, torch.stack(finishes)[reach, end] + (gradients / speed + delay), 0.0)
        finishes[-1] = torch.maximum(finishes[-1], returned)
        sent.index_add_(0, end, gradients)
    held = shape.kv(rows, width) + 2 * shape.kv(rows.max().expand(n), width) * (n > 1)
    return torch.stack(starts), torch.stack(finishes), sent, held * (3 if backward else 1)


def _gather(plan: Partition, machine: Machine, shape: Shape, tiles: Tensor, rows: Tensor, backward: bool) -> Any:
    """As `_ring`, for keys that are sent all at once (halo, allgather), or results that are merged in a tree."""
    n = plan.ring_size
    wanted = torch.zeros(n, n, dtype=torch.float64, device="cpu")  # rows of column s that row g is sent
    if plan.strategy == "halo":
        wanted += halo_rows(plan)
    elif plan.strategy in GATHERING:
        wanted += rows
    wanted.fill_diagonal_(0)
    size = shape.kv(wanted, 1)
    node = torch.arange(n, device="cpu") // machine.node
    near = node == node[:, None]
    own = tiles.diagonal()

    def duration(size: Tensor) -> Tensor:
        each = []
        for pairs, (speed, delay) in ((near, machine.inside), (~near, machine.between)):
            most = torch.stack([(size * pairs).sum(1), (size * pairs).sum(0)]).amax(0)
            each.append(most / speed + delay * (most > 0))
        return torch.stack(each).amax(0)

    arrived = torch.maximum(own, duration(size))
    finish = arrived + tiles.sum(1) - own
    if backward:
        finish = torch.maximum(finish, finish.max() if n > 1 else finish) + duration(size * 4 / shape.itemsize)
    starts, finishes = (
        torch.stack([torch.zeros(n, dtype=torch.float64, device="cpu"), arrived]),
        torch.stack([own, finish]),
    )
    sent = size.sum(0) + size.sum(1) * 4 / shape.itemsize * backward
    if plan.strategy == "tree":
        partial = plan.queries * shape.heads * (shape.dim + 1) * 4 * shape.batch
        steps = max(1, (plan.ranks - 1).bit_length())
        finishes[1] = own + steps * (partial / machine.between[0] + machine.between[1])
        sent = torch.full((n,), float(partial * steps), device="cpu")
    return starts, finishes, sent, (shape.kv(rows, 1) + size.sum(1)) * (3 if backward else 1)


def halo_rows(plan: Partition) -> Tensor:
    """(ring ranks, ring ranks): how many rows of column s row g sees, as in `Partition.rows_sent`."""
    n, (before, after) = plan.ring_size, plan.band
    found = torch.zeros(n, n, dtype=torch.int64, device="cpu")
    if before is not None and after is not None:  # the rows may be several ranges
        for g, s in (plan.pairs > 0).nonzero().tolist():
            found[g, s] = sum(b - a for a, b in plan.rows_sent(g, s))
        return found
    runs: dict[int, list[tuple[int, int, int, int]]] = {}
    for ring_rank, held in enumerate(plan.ring_shards):
        for run in held:
            runs.setdefault(run.document, []).append((ring_rank, run.start, run.size, run.step))
    for of in runs.values():  # a ring rank sees the first keys of each run, or the last: as many as its best query
        ring_ranks, start, size, step = torch.tensor(of, device="cpu").unbind(1)
        distance = start[:, None] - start
        if after is not None:
            visible = (distance + after).div(step, rounding_mode="floor") + size[:, None]
        elif before is not None:
            visible = size + (before - distance).div(step, rounding_mode="floor")
        else:
            visible = size.expand_as(distance)
        visible = torch.minimum(visible.clamp(min=0), size)
        most = torch.zeros(n, len(of), dtype=torch.int64, device="cpu")
        most.scatter_reduce_(0, ring_ranks[:, None].expand_as(visible), visible, "amax")
        found.index_add_(1, ring_ranks, most)
    return found


def _all_to_all(plan: Partition, machine: Machine, shape: Shape, rows: Tensor, backward: bool) -> tuple[float, Tensor]:
    """Seconds of exchanging heads for tokens, before and again after the ring; and the bytes that a rank sends."""
    width = plan.ulysses_size
    if width == 1:
        return 0.0, torch.zeros(plan.ring_size, dtype=torch.float64, device="cpu")
    size = (shape.q(rows, 1) * 2 + shape.kv(rows, 1) * (2 if backward else 1)).double() * (width - 1) / width
    far = 0.0 if width <= machine.node else (width - machine.node) / (width - 1)  # share of the bytes
    once = size.max().item() / 2
    seconds = max(once * (1 - far) / machine.inside[0], once * far / machine.between[0])
    return seconds + machine.inside[1] + (far > 0) * machine.between[1], size
