"""Attention over plans in several processes: every strategy, layout and feature, forward and backward."""

from __future__ import annotations

import re
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


def disagreement(rank: int, ranks: int) -> list[str]:
    """Ranks with different arguments: each raises an error that names the argument and the others, and all go on."""
    group, last = dist.new_group(), rank == ranks - 1
    found = []

    def fails(expected: str, call: Any) -> None:
        try:
            call()
        except AttentionError as error:
            others = ", ".join(map(str, range(ranks - 1))) if last else str(ranks - 1)
            who = f" on rank {rank}, and something else on rank {others}; expected the same on all ranks"
            if not re.match(expected, str(error)) or who not in str(error):
                found.append(f"{expected}: {error}")
        else:
            found.append(f"{expected}: no error")

    mask = tilewise.mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    for name, usual, other in (
        ("seqlen or cu_seqlens", {"seqlen": 50}, {"seqlen": 64}),
        ("seqlen or cu_seqlens", {"cu_seqlens": [0, 20, 50]}, {"cu_seqlens": [0, 21, 50]}),
        ("causal and window", {"seqlen": 50}, {"seqlen": 50, "causal": True}),
        ("mask", {"seqlen": 50}, {"seqlen": 50, "mask": mask()}),
        ("strategy", {"seqlen": 50, "strategy": "ring"}, {"seqlen": 50, "strategy": "allgather"}),
        ("layout", {"seqlen": 50}, {"seqlen": 50, "layout": "striped"}),
        ("node", {"seqlen": 50}, {"seqlen": 50, "node": 1}),
    ):
        plan(group, **usual)  # is kept, so that one rank makes no new plan
        fails(f"{name}.* of a plan: ", lambda usual=usual, other=other: plan(group, **(other if last else usual)))
    try:
        plan(group, seqlen=-1 if last else 50)
        found.append("seqlen=-1 on one rank: no error")
    except AttentionError as error:
        expected = "seqlen: found -1" if last else f"arguments of a plan: found an error on rank {ranks - 1}"
        found += [] if expected in str(error) else [str(error)]

    made = plan(group, seqlen=50, causal=True)
    q, k, v = (made.shard(torch.randn(2, 50, n, 8)) for n in (4, 2, 2))
    for name, options in (
        ("scale", {"scale": 0.3}),
        ("score_mod", {"softcap": 3.0}),
        ("score_mod", {"alibi_slopes": torch.rand(4)}),
        ("mask_mod", {"mask_mod": mask()}),
        ("dropout_p", {"dropout_p": 0.5}),
        ("return_max_logit", {"return_max_logit": True}),
        ("bias", {"bias": torch.randn(1, 1, 50)}),
        ("sinks", {"sinks": torch.randn(4)}),
    ):
        attention(q, k, v, plan=made, **options)
        expected = f"{name} of a call of distributed.attention: "
        fails(expected, lambda options=options: attention(q, k, v, plan=made, **(options if last else {})))
    fails("batch, heads and dim of", lambda: attention(*(x[:1] if last else x for x in (q, k, v)), plan=made))
    fails("dtype of", lambda: attention(*(x.double() if last else x for x in (q, k, v)), plan=made))
    fails("causal and window.* of a call", lambda: attention(q, k, v, plan=made.banded() if last else made))
    dist.barrier(group)
    attention(q, k, v, plan=made)
    return found
