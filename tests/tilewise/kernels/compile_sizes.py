"""Run by test_sizes, in a process whose Triton is the compiler's: how many kernels calls of random sizes ask for, and
whether the parameters of compiled kernels are what `kernels.cuda` takes them for. Prints JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import torch

from tilewise.kernels import cuda
from tilewise.kernels.gpu import Gpu
from tilewise.kernels.hopper import launch as hopper
from tilewise.kernels.hopper.kv_launch import many_launch
from tilewise.kernels.offline import binary_for, specialised
from tilewise.kernels.portable import launch as portable
from tilewise.kv_spec import KvRequest, Places
from tilewise.spec import Request, Spec

SM_90 = Gpu("cuda", 90)


def counts(backend: Any, packed: bool, dim: int, **words: Any) -> list[int]:
    """How many kernels have been asked for after each of 40 calls and their gradients."""
    rng, seen, found = random.Random(0), set(), []
    for _ in range(40):
        batch, tokens, heads = rng.randint(1, 9), rng.randint(1, 3000), rng.choice((1, 2, 3, 4, 8, 12, 16, 32))
        outer = (tokens,) if packed else (batch, tokens)
        q = torch.empty(*outer, 2 * heads, dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(*outer, heads, dim, dtype=torch.bfloat16, device="meta")
        cu = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
        request = Request(q, k, k.clone(), Spec.of(head_dim=dim, **words), cu_q=cu, cu_k=cu)
        seen |= {specialised(90, made) for made in backend.every_launch(request, SM_90, True)}
        found.append(len(seen))
    return found


def caches() -> list[int]:
    """The same of many queries over caches of pages, with any numbers of them."""
    rng, seen, found = random.Random(0), set(), []
    for _ in range(20):
        batch, n, pages, width = (rng.choice((1, rng.randint(1, 900))) for _ in range(4))
        q = torch.empty(batch, n, 8, 128, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(batch, 8, n, device="meta")
        k = torch.empty(pages, 16, 2, 128, dtype=torch.bfloat16, device="meta")
        lengths, table = (torch.empty(*x, dtype=torch.int32, device="meta") for x in ((batch,), (batch, width)))
        places = Places(lengths, table, new=rng.choice((0, 1, 2, 16)))
        request = KvRequest(Request(q, k, k.clone(), Spec(0.1, None, 0)), places)
        state = hopper.new_state(torch.device("meta"))
        seen.add(specialised(90, many_launch(request, q.clone(), lse, state, 132)))
        found.append(len(seen))
    return found


def known() -> dict[str, bool]:
    q = torch.empty(2, 77, 4, 64, dtype=torch.bfloat16)
    request = Request(q, q.clone(), q.clone(), Spec.of(head_dim=64, causal=True))
    found = {}
    for made in hopper.every_launch(request, SM_90, True):
        name = made.kernel.fn.__name__
        if name in ("start_kernel", "finish_kernel", "repair_forward_kernel"):
            binary = binary_for(90, made.kernel, made.args, made.options)
            args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
            found[name] = cuda._is_known(binary, args)
    return found


if __name__ == "__main__":
    bands = {"causal": {"causal": True}, "full": {}, "window": {"window": (100, 0)}}
    print(json.dumps({
        **{f"{name} {kind}": counts(hopper, kind == "packed", 128, **words)
           for name, words in bands.items() for kind in ("dense", "packed")},
        "portable": counts(portable, False, 128),
        "narrow": counts(hopper, False, 64, causal=True),
        "caches": caches(),
        "known": known(),
    }))  # fmt: skip
