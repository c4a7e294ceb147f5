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

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilewise
from tests.tilewise.distributed.cases import CASES, Case, Inputs, along_queries, faults, make, planned, run
from tilewise import AttentionError
from tilewise.distributed import Plan, attention, check, plan, use
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


@job
def two_axes(rank: int, ranks: int) -> list[str]:
    """A mesh of nodes and their GPUs; the default layout and strategy of everything."""
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("node", "gpu"))
    found = compare(rank, "groups across", mesh, strategy="two-level")
    found += compare(rank, "documents", mesh)
    line = dist.init_device_mesh("cpu", (ranks,))
    return found + compare(rank, "causal", line) + compare(rank, "window", line)


@job
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


class Tiny(torch.nn.Module):
    """Two layers of a transformer whose attention finds the plan in use."""

    def __init__(self, remember: bool = True) -> None:
        super().__init__()
        self.remember = remember
        self.embed = torch.nn.Embedding(17, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.head = torch.nn.Linear(16, 17)

    def layer(self, n: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.layers[n](x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + attention(q, k, v).flatten(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for n in range(2):
            x = self.layer(n, x) if self.remember else checkpoint(self.layer, n, x, use_reentrant=False)
        return self.head(x)


def losses(model: torch.nn.Module, made: Plan, steps: int = 3, average: bool = True) -> list[float]:
    """Training on next tokens: the mean over all tokens, whoever holds them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(17, (2, made.tokens), generator=torch.Generator().manual_seed(1))
    total = 2 * (made.tokens - 1)
    ranks = made.ranks
    found = []
    for _ in range(steps):
        with use(made):
            logits = model(made.shard(tokens))
            loss = cross_entropy(logits.flatten(0, 1), made.labels(tokens).flatten(), reduction="sum") / total
            # FSDP and DDP average gradients over ranks; the loss is a sum over them
            (loss * ranks if average else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
        found.append(float(value))
    return found


def model(remember: bool = True) -> Tiny:
    torch.manual_seed(5)
    return Tiny(remember)


@job
def training(rank: int, ranks: int) -> list[str]:
    """FSDP2, DDP, and layers that are computed again in the backward: the losses of one process."""
    expected = losses(model(), plan(1, seqlen=33, causal=True), average=False)
    found = []
    made = plan(seqlen=33, causal=True)
    sharded_model = model()
    for layer in sharded_model.layers:
        fully_shard(layer)
    ways = {
        "fsdp2": fully_shard(sharded_model),
        "ddp": DistributedDataParallel(model()),
        "checkpoint": DistributedDataParallel(model(remember=False)),
    }
    for name, one in ways.items():
        ours = losses(one, made)
        if max(abs(a - b) for a, b in zip(ours, expected, strict=True)) > 1e-5:
            found.append(f"{name}: {ours}, of one process {expected}")
    return found


@job
def compiled(rank: int, ranks: int) -> list[str]:
    """No graph break; a second plan is another number, not another graph."""
    found = []
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, made: attention(q, q, q, plan=made, causal=True), backend=counter, fullgraph=True)
    for length in (16, 24, 32):
        made = plan(seqlen=length * ranks, causal=True)
        whole = torch.randn(1, length * ranks, 2, 8, generator=torch.Generator().manual_seed(2))
        q = made.shard(whole).requires_grad_()
        out = call(q, made)
        out.sum().backward()
        again = q.detach().clone().requires_grad_()
        attention(again, again, again, plan=made).sum().backward()
        if not torch.allclose(q.grad, again.grad):
            found.append(f"{length}: gradients differ")
    if counter.frame_count > 2:  # once as it is, once for any length and any plan
        found.append(f"compiled {counter.frame_count} times for 3 plans")
    return found


@job
def dtensors(rank: int, ranks: int) -> list[str]:
    """tilewise.attention on DTensors: batch rows and heads stay where they are, and every gradient is there."""
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    q, k, v = torch.randn(ranks, 9, 2 * ranks, 8), torch.randn(ranks, 9, ranks, 8), torch.randn(ranks, 9, ranks, 8)
    sinks, slopes = torch.randn(2 * ranks), torch.rand(2 * ranks)
    by_head, by_row = torch.randn(1, 2 * ranks, 9, 9), torch.randn(ranks, 1, 1, 9)
    heads, rows, everything = Shard(2), Shard(0), Replicate()
    found = []
    for placement, options, terms in (
        (heads, {"causal": True}, {}),
        (rows, {"softcap": 2.0}, {}),
        (everything, {}, {"sinks": (sinks, everything)}),
        (heads, {"softcap": 3.0}, {"sinks": (sinks, rows), "bias": (by_head, Shard(1))}),
        (heads, {"causal": True}, {"sinks": (sinks, everything), "bias": (by_row, everything)}),
        (rows, {"causal": True}, {"sinks": (sinks, everything), "bias": (by_row, rows)}),
        (rows, {"window": (3, 0)}, {"bias": (by_head, everything), "alibi_slopes": (slopes, everything)}),
    ):
        whole = [x.clone().requires_grad_() for x in (q, k, v, *(x for x, _ in terms.values()))]
        places = [placement] * 3 + [place for _, place in terms.values()]
        parts = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, places, strict=True)]
        expected, out = (
            tilewise.attention(*x[:3], **options, **dict(zip(terms, x[3:], strict=True))) for x in (whole, parts)
        )
        expected.square().sum().backward()
        out.square().sum().backward()
        if out.placements != (placement,):
            found.append(f"{placement} became {out.placements}")
        pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(parts, whole, strict=True))]
        wrong = [n for n, (x, y) in enumerate(pairs) if not torch.allclose(x.full_tensor(), y, atol=1e-5)]
        if wrong:
            found.append(f"{placement}, {options}, {list(terms)}: results {wrong} are wrong")
    return found


@job
def hugging_face(rank: int, ranks: int) -> list[str]:
    """Models of transformers, within `use(plan)`."""
    pytest.importorskip("transformers")
    from tests.tilewise.distributed import hugging_face

    return hugging_face.faults()
