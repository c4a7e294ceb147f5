"""Which strategy: each is simulated, and the fastest that fits is advised.

found = [estimate(plan(256, seqlen=1_000_000, strategy=s)) for s in ("ring", "two-level")]
advised(found).plan
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..costs.devices import device
from .partition import Partition
from .simulate import Simulation, simulate

CLOSE = 1.03  # as fast as the fastest: the simulator knows no better
ROOM = 0.5  # of a GPU's memory may be keys and sums


class Estimate(NamedTuple):
    """A plan, its passes on the machine, and why it would not do, if so."""

    plan: Partition
    passes: list[Simulation]
    refusal: str | None

    @property
    def time(self) -> float:
        return sum(x.time for x in self.passes)

    @property
    def efficiency(self) -> float:
        return sum(x.ideal for x in self.passes) / self.time if self.time else 1.0

    @property
    def memory(self) -> float:
        return max(float(x.memory.max()) for x in self.passes)

    @property
    def sent(self) -> float:
        return sum(float(x.sent.max()) for x in self.passes)

    @property
    def exposed(self) -> float:
        return sum(float(x.exposed.max()) for x in self.passes)


def estimate(
    plan: Partition, machine: str = "8xH200+400G", *, heads: int = 32, kv_heads: int | None = None,
    forward: bool = False, **shape: Any,
) -> Estimate:  # fmt: skip
    """A step of training, or its `forward` alone; `shape` as `simulate` takes it."""
    kv_heads = (heads // 4 if heads % 4 == 0 else heads) if kv_heads is None else kv_heads
    passes = [
        simulate(plan, machine, heads=heads, kv_heads=kv_heads, backward=backward, **shape)
        for backward in ((False,) if forward else (False, True))
    ]
    found = Estimate(plan, passes, None)
    refusal = None
    if plan.ulysses_size > heads:
        refusal = f"{plan.ulysses_size} ranks for {heads} heads"
    elif found.memory > ROOM * device(machine.partition("x")[2].partition("+")[0] or machine).memory:
        refusal = f"{found.memory / 1e9:.0f} GB of keys and sums"
    return found._replace(refusal=refusal)


def advised(found: Iterable[Estimate]) -> Estimate:
    """The fastest that fits; of those as fast, the one that holds the least.

    >>> from tilewise.distributed import plan
    >>> strategies = "ring", "two-level", "allgather"
    >>> advised(estimate(plan(64, seqlen=1 << 17, causal=True, strategy=s)) for s in strategies).plan
    <plan: 131072 tokens on 64 ranks, causal, two-level of 8 x 8, zigzag>
    """
    found = list(found)
    able = [x for x in found if x.refusal is None] or found
    fastest = min(x.time for x in able)
    return min((x for x in able if x.time <= CLOSE * fastest), key=lambda x: x.memory)
