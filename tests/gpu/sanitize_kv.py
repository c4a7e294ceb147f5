"""A few calls with a KV cache and one replay of a CUDA graph, for compute-sanitizer (see sanitize.sh).

python -m tests.gpu.sanitize_kv [--check]

Nothing is allocated while the graph records: the sanitizer's runs have no caching allocator, and a recording no other.
"""

from __future__ import annotations

import sys

import torch

import tilewise
from tests.kv_cases import KvCase, KvInputs, compare, inputs
from tilewise.backends.registry import kv_backend
from tilewise.call.fields import CACHE
from tilewise.kv_request import KvCall
from tilewise.ops import kv as ops
from tilewise.validation import kv as checks

CASES = [
    KvCase((700, 1, 0, 64), heads=32, kv_heads=8, dim=128),
    KvCase((300, 33), queries=3, new=3, page=3, heads=4, kv_heads=1, dim=40, dim_v=24),
    KvCase((300, 33, 5), queries=(40, 0, 3), new=(40, 0, 3), padding=3, csr=True, heads=8, kv_heads=2, dim=64),
    KvCase((300, 33), page=0, new=1, heads=4, kv_heads=2, dim=64, layout="interleaved"),
]


def options_of(x: KvInputs, split: int | None) -> checks.KvOptions:
    return CACHE.completed({**x.options, "split": split, "backend": "triton"})


def eager(x: KvInputs, split: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = tilewise.attention_kv(
        x.q, x.k, x.v, x.lengths, **options_of(x, split) | {"return_lse": True}
    )
    return found


def replayed(x: KvInputs, split: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the call computes when a graph that has its plan, keys and combining runs again; new tokens are in."""
    options = options_of(x, split)
    request = checks.attend_request(x.q, x.k, x.v, x.lengths, options)
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    out = torch.empty(*x.q.shape[:-1], x.v.shape[-1], dtype=x.q.dtype, device=x.q.device)
    lse = torch.empty(*x.q.shape[:-3], x.q.shape[-2], x.q.shape[-3], device=x.q.device)

    def step() -> None:
        ops.schedule(request, plan.schedule)
        call = KvCall(request, None, plan.schedule, plan.workspace, out, lse)
        ops.run("attend", call, lambda: kv_backend(request).attend(call))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for found in (out, lse):
        found.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return out, lse


if __name__ == "__main__":
    for case in CASES:
        for split in (None, 128):
            for call in (eager, replayed):
                x = inputs(case, torch.bfloat16, "cuda")
                if call is replayed:
                    eager(x, split)  # writes the new tokens
                results = call(x, split)
                torch.cuda.synchronize()
                if "--check" in sys.argv:  # many more kernels, torch's own: not for the sanitizer
                    compare(results, x)
                print("ok", call.__name__, case, "split", split, flush=True)
