"""The time and memory of a pass of attention on the ranks of a plan, estimated.

A rank computes one tile at a time. A message starts when both its ends have posted it and runs at the speed of the
slower link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.distributed.layout import cacheable
from tilewise.distributed.partition import GATHERING, Partition

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
class Pass:
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


class Estimate(NamedTuple):
    """A plan, its passes, and why it cannot run, or None."""

    plan: Partition
    passes: list[Any]  # Pass, or a class that extends it
    refusal: str | None

    @property
    def time(self) -> float:
        return float(sum(x.time for x in self.passes))

    @property
    def memory(self) -> float:
        return max(float(x.memory.max()) for x in self.passes)


AnyEstimate = TypeVar("AnyEstimate", bound=Estimate)


def default_kv_heads(heads: int) -> int:
    return heads // 4 if heads % 4 == 0 else heads


def refusal(estimate: Estimate, heads: int, gpu_memory: int) -> str | None:
    """Why a plan cannot run, or None."""
    if estimate.plan.ulysses_size > heads:
        return f"{estimate.plan.ulysses_size} ranks for {heads} heads"
    if estimate.memory > MEMORY_SHARE * gpu_memory:
        return f"{estimate.memory / 1e9:.0f} GB of keys and sums"
    return None


def advised(estimates: Iterable[AnyEstimate]) -> AnyEstimate:
    """The plan to use, among those that can run: of the plans that take at most TOLERANCE times the shortest time, and
    at most TOLERANCE times the least memory of these, the fastest."""
    estimates = list(estimates)
    able = [x for x in estimates if x.refusal is None] or estimates
    least = min(x.time for x in able)
    fast = [x for x in able if x.time <= TOLERANCE * least]
    smallest = min(x.memory for x in fast)
    return min((x for x in fast if x.memory <= TOLERANCE * smallest), key=lambda x: x.time)


@cacheable
def simulate_pass(plan: Partition, machine: Machine, shape: Shape, backward: bool) -> Pass:
    """One pass of attention on the ranks of a plan: the forward, or the backward."""
    n, width = plan.ring_size, plan.ulysses_size
    rows = torch.tensor([float(plan.rows(s)) for s in range(n)], device="cpu")
    share = -(-shape.heads // width) / shape.heads  # of the heads, on the rank with most of them
    flops = 4 * plan.pairs.double() * shape.batch * shape.heads * share * shape.dim * (2.5 if backward else 1.0)
    queries = torch.full_like(rows, plan.queries) if plan.queries else rows
    merge = ACCUMULATIONS * shape.q(queries, 1) * share * 4 / shape.itemsize / machine.bandwidth * (not backward)
    tiles = flops / (machine.backward_rate if backward else machine.rate)
    tiles = torch.maximum(tiles, shape.kv(rows, width).double() / machine.bandwidth * (plan.pairs > 0))
    ideal = float(tiles.sum()) / share / plan.ranks
    tiles = torch.where(plan.pairs > 0, tiles + machine.launch + merge[:, None], 0.0)
    run = _ring if plan.strategy in ("ring", "two-level", "ulysses") else _gather
    start, finish, sent, held = run(plan, machine, shape, tiles, rows, backward)
    exchange, exchanged = _all_to_all(plan, machine, shape, rows / width, backward)
    start, finish = start + exchange, finish + exchange
    compute = tiles.sum(1)
    return Pass(
        plan=plan,
        machine=machine,
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
