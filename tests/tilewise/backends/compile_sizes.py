"""Run by test_sizes, in a process whose Triton is the compiler's: how many kernels calls of random sizes ask for, and
whether the parameters of compiled kernels have the sizes that `launch` expects. Prints JSON."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from typing import Any

import torch

from tilewise.backends import registry
from tilewise.backends.common.kernel_call import Placeholders, build_backward
from tilewise.backends.common.launch import DeviceMemory, Target, all_arguments, parameters_of, sizes_of
from tilewise.backends.common.offline import binary_for, specialised
from tilewise.backends.hopper import launches as hopper
from tilewise.backends.hopper import offline
from tilewise.backends.hopper.backward_launches import named_launches
from tilewise.backends.hopper.kv_launches import prefill_launch
from tilewise.backends.triton import offline as portable
from tilewise.kv_request import CachePlaces, KvRequest
from tilewise.request import Gpu, Request, Spec
from tilewise.warmup import Kind, _launches
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.sweep import request_of

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
        for backward in (False, True):
            seen |= {specialised(90, x) for x in backend.offline_launches(request, SM_90, backward).values()}
        found.append(len(seen))
    return found


def caches(dim: int) -> list[int]:
    """The same of many queries over caches of pages, with any numbers of them."""
    rng, seen, found = random.Random(0), set(), []
    for _ in range(20):
        batch, n, pages, width = (rng.choice((1, rng.randint(1, 900))) for _ in range(4))
        q = torch.empty(batch, n, 8, dim, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(batch, 8, n, device="meta")
        k = torch.empty(pages, 16, 2, dim, dtype=torch.bfloat16, device="meta")
        lengths, table = (torch.empty(*x, dtype=torch.int32, device="meta") for x in ((batch,), (batch, width)))
        places = CachePlaces(lengths, table, new=rng.choice((0, 1, 2, 16)))
        request = KvRequest(Request(q, k, k.clone(), Spec(0.1, None, 0)), places)
        state = hopper.new_state(DeviceMemory(q.device), None)
        seen.add(specialised(90, prefill_launch(request, q.clone(), lse, state, 132)))
        found.append(len(seen))
    return found


def not_warmed(dim: int, packed: bool, causal: bool) -> list[str]:
    """Forward kernels of calls of many lengths that `tilewise.warmup` does not compile."""
    kind = Kind(dim, dim, 8, 8, "bfloat16", packed, False, {"causal": causal})
    warmed = _launches([kind], SM_90)
    missed = []
    for n in (64, 100, 300, 384, 500, 640, 700, 1000, 1500, 1536, 2048, 3000, 8192):
        case = Case(2, n, 8, 8, dim, causal, lengths=(n, n) if packed else ())
        for made in registry.launches_of(request_of(case), SM_90, False).values():
            if specialised(90, made) not in warmed:
                missed.append(f"{dim} {packed} {causal} {n}")
    return missed


SIZES = {"u64": 8, "s64": 8, "f64": 8, "b64": 8, "u32": 4, "s32": 4, "f32": 4, "b32": 4, "u16": 2, "b16": 2, "u8": 1}
COMPILED = ("forward_kernel", "preprocess_kernel", "postprocess_kernel")


def ptx_sizes(ptx: str) -> list[int]:
    """Bytes of the parameters of a kernel."""
    found = re.search(r"\.entry [^(]*\(([^)]*)\)", ptx)
    assert found is not None
    sizes = []
    for line in found[1].split(","):
        array = re.search(r"\.b8 \w+\[(\d+)\]", line)
        kind = re.search(r"\.param \.([usfb]\d+)", line)
        sizes.append(int(array[1]) if array else SIZES[kind[1]] if kind else -1)
    return sizes


def known() -> dict[str, Any]:
    """For each kernel, the sizes of its parameters beyond those that `launch` expects; or where they differ."""
    q = torch.empty(2, 77, 4, 64, dtype=torch.bfloat16)
    request = Request(q, q.clone(), q.clone(), Spec.of(head_dim=64, causal=True))
    out, lse = q.clone(), torch.empty(2, 4, 77)
    found: dict[str, Any] = {}
    for build, tensors in (
        (hopper.build_forward(request.spec), request.tensors()),
        (build_backward(named_launches, request.spec), (*request.tensors(), out, lse, q.clone(), None)),
    ):
        memory = Placeholders(tensors)
        for launch in build(memory.inputs, Target(SM_90, 132), memory).launches:
            name = launch.kernel.fn.__name__
            if name in COMPILED:
                binary = binary_for(90, launch.kernel, launch.args, launch.options)
                args = [memory.slots(x) for x in all_arguments(launch)]
                expected, sizes = list(sizes_of(binary, args)), ptx_sizes(binary.asm["ptx"])
                same = sizes[: len(expected)] == expected
                found[name] = sizes[len(expected) :] if same else [expected, sizes]
                assert len(list(sizes_of(binary, args))) == len([*_parameters(binary, args)])
    return found


def _parameters(binary: Any, args: Any) -> Any:
    """`parameters_of`, without a driver to encode descriptors."""
    from tilewise.backends.common import launch as launcher

    launcher.TensorMap = lambda *x: x  # type: ignore[assignment,misc]
    return parameters_of(binary, args)


if __name__ == "__main__":
    bands = {"causal": {"causal": True}, "full": {}, "window": {"window": (100, 0)}}
    print(json.dumps({
        **{f"{name} {kind}": counts(offline, kind == "packed", 128, **words)
           for name, words in bands.items() for kind in ("dense", "packed")},
        "portable": counts(portable, False, 128),
        "narrow": counts(offline, False, 64, causal=True),
        "caches": [caches(64), caches(128)],
        "known": known(),
        "not warmed": [x for dim in (64, 80, 128, 192) for kind in product((False, True), repeat=2)
                       for x in not_warmed(dim, *kind)],
    }))  # fmt: skip
