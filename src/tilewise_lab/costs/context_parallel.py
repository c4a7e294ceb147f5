"""Context parallelism on a cluster, simulated: compute, traffic, exposed time and memory of every rank.

    plan = tilewise.distributed.plan(256, seqlen=1_000_000, causal=True)
    print(plan.simulate("8xH200+400G", heads=32, kv_heads=8, dim=128))

Compute comes from the time model of one GPU, which was fitted to measurements; links come from links.json. Trust the
ranking of plans, not the milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.distributed.layout import cacheable
from tilewise.distributed.partition import Partition
from tilewise.errors import AttentionError
from tilewise_lab.costs import pass_time
from tilewise_lab.costs.devices import ITEMSIZE, device
from tilewise_lab.costs.explain import explain
from tilewise_lab.costs.pass_time import Machine, Pass, Shape, advised, default_kv_heads, refusal, simulate_pass
from tilewise_lab.costs.predict import Model

__all__ = ["LINKS", "Estimate", "Simulation", "advised", "estimate", "machine_of", "simulate"]
LINKS = Path(__file__).with_name("links.json")
LARGE = 16384  # tokens of a call that keeps the matrix units busy


@dataclass(frozen=True)
class Simulation(Pass):
    """A simulated pass, as text and JSON."""

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


class Estimate(pass_time.Estimate):
    """The simulations of a plan on a machine."""

    __slots__ = ()

    @property
    def efficiency(self) -> float:
        return sum(x.ideal for x in self.passes) / self.time if self.time else 1.0

    @property
    def sent(self) -> float:
        return sum(float(x.sent.max()) for x in self.passes)

    @property
    def exposed(self) -> float:
        return sum(float(x.exposed.max()) for x in self.passes)


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
    return Simulation(**vars(simulate_pass(plan, on, Shape(heads, kv_heads, dim, batch, ITEMSIZE[dtype]), backward)))


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
    kv_heads = default_kv_heads(heads) if kv_heads is None else kv_heads
    passes = [
        simulate(plan, machine, heads=heads, kv_heads=kv_heads, backward=backward, **shape)
        for backward in ((False,) if forward else (False, True))
    ]
    found = Estimate(plan, passes, None)
    gpu = device(machine.partition("x")[2].partition("+")[0] or machine)
    return found._replace(refusal=refusal(found, heads, gpu.memory))
