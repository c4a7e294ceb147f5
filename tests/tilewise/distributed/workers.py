"""What runs in several gloo processes: spawned once for all tests of a size, since torch takes seconds to import."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.tilewise.distributed.cases import CASES, Case, Inputs, along_queries, faults, make, planned, run
from tilewise.distributed import Plan, attention
from tilewise.distributed.layout import LAYOUTS

Job = Callable[[int, int], list[str]]
JOBS: dict[str, Job] = {}
WAYS = [(s, layout) for s in ("ring", "allgather", "halo", "ulysses", "two-level") for layout in LAYOUTS]


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


def spawn(ranks: int, names: list[str], folder: Path) -> dict[str, list[str]]:
    """The faults that all ranks found, by job."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_process, (ranks, port, names, folder), nprocs=ranks)
    found: dict[str, list[str]] = {name: [] for name in names}
    for rank in range(ranks):
        for name, faults_ in json.loads((folder / f"{rank}.json").read_text()).items():
            found[name] += [f"rank {rank}: {x}" for x in faults_]
    return found


def _process(rank: int, ranks: int, port: int, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            found[name] = JOBS[name](rank, ranks)
        except Exception:
            found[name] = [traceback.format_exc()]
            (folder / f"{rank}.json").write_text(json.dumps({n: found.get(n, ["not run"]) for n in names}))
            raise  # others may wait for this one
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@cache
def inputs_of(name: str, tokens: int, dtype: torch.dtype) -> Inputs:
    return make(CASES[name], tokens, dtype)


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
    inputs = inputs_of(name, tokens, dtype)
    made = planned(case, mesh, tokens, **words)
    ours = sharded(case, made, inputs)
    return [f"{name}, {made}: {x}" for x in faults(ours, case, inputs)] if rank == 0 else []


@job
def a_few(rank: int, ranks: int) -> list[str]:
    """Each case once, each way at least once."""
    found = []
    for n, name in enumerate(CASES):
        strategy, layout = WAYS[7 * n % len(WAYS)]
        strategy = "ring" if along_queries(CASES[name]) else strategy
        found += compare(rank, name, None, strategy=strategy, layout=layout, node=2)
    return found


@job
def all_ways(rank: int, ranks: int) -> list[str]:
    found = []
    for name in CASES:
        for strategy, layout in WAYS:
            if not (along_queries(CASES[name]) and strategy in ("ulysses", "two-level")):
                found += compare(rank, name, None, strategy=strategy, layout=layout, node=2)
    return found


@job
def odd_sizes(rank: int, ranks: int) -> list[str]:
    """Fewer tokens than ranks, none at all, and half precision."""
    found = []
    for strategy in ("ring", "allgather", "halo", "ulysses", "two-level"):
        for tokens in (0, 1, 3, 5):
            found += compare(rank, "causal", None, tokens, strategy=strategy, node=2)
        found += compare(rank, "causal", None, 120, torch.bfloat16, strategy=strategy, node=2)
    return found
