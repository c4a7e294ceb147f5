"""Runs steps of vLLM on the backend without a GPU, and reports those that need a kernel which was not compiled.

A process of its own: tests run with Triton's interpreter, and this one builds the launches of an H200 from meta
tensors. The standard input has rows: any of the fields of `DEFAULTS`. Each is answered by a line {"kernels": compiled
ones, "steps": number, "missing": [..]}.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

from tests.tilewise.integrations import vllm_stub
from tests.tilewise.integrations.engine_stub import modules

sys.modules.update(modules(vllm_stub, "0.32.0"))

from tilewise import kv_warmup  # noqa: E402
from tilewise.adapters import steps as kv_steps  # noqa: E402
from tilewise.backends.common.launch import DeviceMemory, Target  # noqa: E402
from tilewise.backends.common.offline import specialised  # noqa: E402
from tilewise.backends.registry import choose  # noqa: E402
from tilewise.call.fields import CACHE  # noqa: E402
from tilewise.kv_cache import PreparedPlan  # noqa: E402
from tilewise.kv_request import KvCall, KvPlan, structure_of  # noqa: E402
from tilewise.request import Gpu  # noqa: E402
from tilewise.validation import kv as checks  # noqa: E402

TARGET = Target(Gpu("cuda", 90), 132)
LENGTH = 4096
STEPS = 60
DEFAULTS = {
    "heads": 32,
    "kv_heads": 8,
    "dim": 128,
    "page": 16,
    "window": None,
    "sinks": False,
    "softcap": None,
    "sequences": 256,
    "tokens": 8192,
    "drafts": 0,
    "stored": "auto",
    "forget": None,  # steps with so many queries at most are not compiled for: to see that this is noticed
}


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Recorder:
    """Stands for the calls that a step makes: keeps what their launches compile to."""

    def __init__(self, binders: dict[int, Any]) -> None:
        self.kernels: set[str] = set()
        self.binders = binders

    def run(self, runner: Any, call: Any) -> None:
        launches = runner.build(structure_of(call)[0], TARGET, DeviceMemory(torch.device("meta"))).launches
        self.kernels |= {specialised(TARGET.gpu.arch, launch, self.binders) for launch in launches}

    def plan(self, memory: Any, q: Tensor, *given: Any, **options: Any) -> KvPlan:
        return memory.plan(q, PreparedPlan(None, None, (16, 16), (), ""))  # type: ignore[arg-type]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, out: Tensor, plan: KvPlan, **options: Any):
        request = checks.attend_request(q, k, v, lengths, CACHE.completed(options))  # type: ignore[arg-type]
        call = KvCall(request, out=out, lse=plan.lse)
        self.run(choose(request, TARGET.gpu).backend.kv.attend_runner(call), call)

    def append(
        self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, backend: str, **options: Any
    ):
        asked = CACHE.completed(options)  # type: ignore[arg-type]
        places = checks.places_of(k_new, k, lengths, asked)
        request = checks.append_request(k_new, v_new, k, v, places, None, asked)
        kernels = import_module("tilewise.backends.triton").TritonBackend.kv
        self.run(kernels.append_runner(request), request)


def steps(row: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """(tokens, sequences, most queries of one) of steps as a scheduler makes them: decoding, in graphs padded to their
    sizes; drafts; prompts in pieces; both mixed."""
    sequences, tokens, drafts = row["sequences"], row["tokens"], row["drafts"]
    draw = random.Random(str(row))
    decoded = {*range(1, min(sequences, 20) + 1), *range(1, sequences + 1, 17), sequences}
    yield from ((n, n, 1) for n in sorted(decoded))
    yield from ((n * (1 + drafts), n, 1 + drafts) for n in sorted(decoded) if n * (1 + drafts) <= tokens)
    yield from ((n, 1, n) for n in (2, 3, 15, 16, 17, 128, 255, 256, 257, tokens) if n <= tokens)
    for _ in range(STEPS):
        decoding = draw.randint(0, sequences - 1)
        most = min(int(2 ** draw.uniform(1, tokens.bit_length() - 1)), tokens - decoding)
        prompts = draw.randint(1, max(1, min(sequences - decoding, (tokens - decoding) // max(most, 1))))
        yield decoding + prompts * most, decoding + prompts, most


def missing(row: dict[str, Any], backend: Any) -> dict[str, Any]:
    heads, kv_heads, dim = row["heads"], row["kv_heads"], row["dim"]
    sinks = meta(heads, dtype=torch.bfloat16) if row["sinks"] else None
    words = {
        "sliding_window": row["window"],
        "sinks": sinks,
        "logits_soft_cap": row["softcap"],
        "kv_cache_dtype": row["stored"],
    }
    dtype = torch.bfloat16 if row["stored"] == "auto" else torch.uint8
    impl = backend.TilewiseImpl(heads, dim, dim**-0.5, kv_heads, **words)
    spec = vllm_stub.AttentionSpec(row["page"], kv_heads, dim, dtype)
    config = vllm_stub.vllm_config({"one": impl}, row["tokens"], row["sequences"], LENGTH, row["drafts"])
    layer = config.compilation_config.static_forward_context["one"]
    layer._k_scale, layer._v_scale = meta(dtype=torch.float32), meta(dtype=torch.float32)
    builder = backend.TilewiseBuilder(spec, ["one"], config, torch.device("meta"))
    layers = backend.layers_of(spec, ["one"], config)
    planned = [step for step in builder.limits.steps() if step[2] != row["forget"]]
    with mock.patch.object(kv_warmup.StepLimits, "steps", return_value=planned):
        compiled = {*kv_warmup.all_launches(layers, builder.limits, TARGET)}
    cache = meta(*backend.TilewiseBackend.get_kv_cache_shape(777, row["page"], kv_heads, dim), dtype=dtype)
    found, count, binders = [], 0, {}
    for tokens, sequences, most in steps(row):
        recorder = Recorder(binders)
        given = (meta(sequences + 1), None, meta(sequences), sequences, tokens, most, LENGTH)
        table, slots = meta(sequences, LENGTH // row["page"] + 1), meta(tokens, dtype=torch.int64)
        metadata = builder.build(0, vllm_stub.CommonAttentionMetadata(*given, table, slots))
        qkv = meta(tokens, heads + 2 * kv_heads, dim, dtype=torch.bfloat16)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        recorded = {"plan_kv_in": recorder.plan, "attention_kv": recorder.attend, "append_kv": recorder.append}
        with mock.patch.multiple(kv_steps, **recorded):
            impl.do_kv_cache_update(layer, k, v, cache, slots)
            impl.forward(layer, q, k, v, cache, metadata, output=meta(tokens, heads * dim, dtype=torch.bfloat16))
        count += 1
        found += [[tokens, sequences, most, name[:2000]] for name in sorted(recorder.kernels - compiled)]
    return {"kernels": len(compiled), "steps": count, "missing": found[:3]}


if __name__ == "__main__":
    module = import_module("tilewise.adapters.vllm")
    for fields in json.load(sys.stdin):
        print(json.dumps(missing(DEFAULTS | fields, module)), flush=True)
