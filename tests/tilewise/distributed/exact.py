"""Attention over plans in several processes: every strategy, layout and feature, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tilewise
from tests.tilewise.distributed.cases import CASES, Case, Inputs, along_queries, faults, make, planned, run
from tilewise import AttentionError
from tilewise.distributed import Plan, attention, check, plan
from tilewise.distributed.layout import LAYOUTS

WAYS = [(s, layout) for s in ("ring", "allgather", "halo", "ulysses", "two-level") for layout in LAYOUTS]


def sharded(case: Case, made: Plan, inputs: Inputs) -> list[torch.Tensor]:
    """The whole results, from what each rank computes of its shard."""
    dim = 0 if case.packed else 1

    def part(x: torch.Tensor, of: int = dim) -> torch.Tensor:
        return made.shard(x, dim=of)

    terms = dict(inputs.terms)
    if along_queries(case):
        terms["bias"] = part(terms["bias"], 2)
    own = Inputs(*(part(x) for x in inputs[:4]), part(inputs.dlse, dim + 1), terms, inputs.cu)
    out, lse, *grads = run(case, own, lambda q, k, v, **o: attention(q, k, v, plan=made, **o))
    whole = [made.unshard(out, dim), made.unshard(lse, dim + 1), *(made.unshard(x, dim) for x in grads[:3])]
    for x in grads[3:]:
        if along_queries(case):
            whole.append(made.unshard(x, 2))
        else:
            dist.all_reduce(x)
            whole.append(x)
    return whole


def compare(
    rank: int, name: str, mesh: Any, tokens: int = 37, dtype: torch.dtype = torch.float32, **words: Any
) -> list[str]:
    case = CASES[name]
    inputs = make(case, tokens, dtype)
    made = planned(case, mesh, tokens, **words)
    ours = sharded(case, made, inputs)
    return [f"{name}, {made}: {x}" for x in faults(ours, case, inputs)] if rank == 0 else []


def a_few(rank: int, ranks: int) -> list[str]:
    """Each case once, each way at least once."""
    found = []
    for n, name in enumerate(CASES):
        strategy, layout = WAYS[7 * n % len(WAYS)]
        strategy = "ring" if along_queries(CASES[name]) else strategy
        found += compare(rank, name, None, strategy=strategy, layout=layout, node=2)
    return found


def all_ways(rank: int, ranks: int) -> list[str]:
    found = []
    for name in CASES:
        for strategy, layout in WAYS:
            if not (along_queries(CASES[name]) and strategy in ("ulysses", "two-level")):
                found += compare(rank, name, None, strategy=strategy, layout=layout, node=2)
    return found


def odd_sizes(rank: int, ranks: int) -> list[str]:
    """Fewer tokens than ranks, none at all, and half precision."""
    found = []
    for strategy in ("ring", "allgather", "halo", "ulysses", "two-level"):
        for tokens in (0, 1, 3, 5):
            found += compare(rank, "causal", None, tokens, strategy=strategy, node=2)
        found += compare(rank, "causal", None, 120, torch.bfloat16, strategy=strategy, node=2)
    return found


def two_axes(rank: int, ranks: int) -> list[str]:
    """A mesh of nodes and their GPUs; the default layout and strategy of everything."""
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("node", "gpu"))
    found = compare(rank, "groups across", mesh, strategy="two-level")
    found += compare(rank, "documents", mesh)
    line = dist.init_device_mesh("cpu", (ranks,))
    return found + compare(rank, "causal", line) + compare(rank, "window", line)


def max_logit(rank: int, ranks: int) -> list[str]:
    """The largest score of each head is the maximum over all ranks, also in a compiled function."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 41, heads, 8) for heads in (4, 2, 2))
    _, expected = tilewise.attention(q, k, v, causal=True, return_max_logit=True)
    found = []
    for strategy in ("ring", "ulysses"):
        made = plan(seqlen=41, causal=True, strategy=strategy)
        own = [made.shard(x).requires_grad_() for x in (q, k, v)]
        for f in (attention, torch.compile(attention, backend="aot_eager")):
            out, _, ours = f(*own, plan=made, return_lse=True, return_max_logit=True)
            out.sum().backward()
            if not torch.allclose(ours, expected) or ours.requires_grad:
                found.append(f"{strategy} on rank {rank}: {ours}, not {expected}")
    return found


def probe(rank: int, ranks: int) -> list[str]:
    """Clean plans pass; a model that looks at its neighbours does not."""
    cu = [0, 9, 30, 41]
    for words in ({"seqlen": 41, "causal": True}, {"seqlen": 41, "window": (5, 0)}, {"cu_seqlens": cu, "causal": True}):
        report = check(plan(**words), softcap=20.0)
        if report.error > 1e-5 or len(report.perturbed) != 3:
            return [f"{words}: {report}"]

    def leaks(made: Plan, x: torch.Tensor) -> torch.Tensor:
        q = x[..., None, :]
        return attention(q, q, q).squeeze(2) + made.unshard(x).sum(1, keepdim=True)

    try:
        check(plan(seqlen=41, causal=True), leaks, torch.randn(1, 41, 8, generator=torch.Generator().manual_seed(0)))
    except AttentionError as error:
        return [] if "outputs that change with token" in str(error) else [str(error)]
    return ["a leak was not found"]
