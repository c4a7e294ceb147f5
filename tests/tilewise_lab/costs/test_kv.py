"""What is told of calls with a KV cache: its plan is the plan kernel's, its bytes those of the keys that are seen."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, inputs
from tilewise.backends.common.kv.partition import INTERPRETED_PROCESSORS, INTERPRETER, partition
from tilewise.call.fields import CACHE
from tilewise.validation import kv as checks
from tilewise_lab import cli
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.kv import explain_kv
from tilewise_lab.costs.kv_ranges import ranges

CASES = [
    (KvCase((20, 3, 0, 133), dim=16), {}),
    (KvCase((500, 30, 0, 133), dim=16, queries=9, heads=6, kv_heads=1), {}),
    (KvCase((500, 30, 0, 133), dim=16, queries=(9, 1, 0, 40), padding=7), {}),
    (KvCase((500, 30, 12, 133), dim=16, queries=9, new=9, heads=8), {"window": (50, 0)}),
    (KvCase((500, 30, 12, 133), dim=16, queries=(9, 1, 2, 30), new=(9, 1, 2, 30), csr=True), {"causal": False}),
    (KvCase((500, 300, 12, 133), dim=16, starts=(490, 3, 12, 0), page=0), {}),
    (KvCase((500, 300, 12, 900), dim=16), {"split": 128}),
    (KvCase((), dim=16), {}),
]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU there are other tiles, and more programs")
@pytest.mark.parametrize(("case", "words"), CASES, ids=lambda x: str(x))
def test_the_ranges_are_the_plan_kernels(case: KvCase, words: dict[str, Any]) -> None:
    x = inputs(case)
    words = x.options | words | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    request = checks.attend_request(x.q, x.k, x.v, x.lengths, CACHE.completed(words))
    sequences = explain_kv(x.q, x.k, x.v, x.lengths, device="H200", **words).sequences
    gpu = device("H200").gpu
    dealt = partition(request, gpu, INTERPRETED_PROCESSORS, INTERPRETER)
    group, spec = case.heads // case.kv_heads, request.spec
    found = ranges(dealt, sequences, group, spec.before, spec.after)
    ledger = plan.schedule.tolist()
    assert len(ledger) == dealt.schedule_numel
    heads, empty = case.kv_heads, ledger[1]
    assert found.divided == ledger[0] * heads
    items = [ledger[at : at + 8] for at in range(len(ledger) - 8 * dealt.items, len(ledger), 8)]
    reals = len(found.items)
    assert [(x.b, x.first, x.num_chunks) for x in found.items] == [(b, first, n) for b, first, *_, n in items[:reals]]
    assert all(units == 0 for *_, units in items[len(items) - empty :])
    records = [ledger[4 + 16 * n : 20 + 16 * n] for n in range(dealt.num_splits)]
    busy = [x for x in records if x[12] > x[11]]  # from chunk .. to chunk ..
    assert len(busy) * heads == ledger[3] * heads == found.busy
    assert sum(x[10] > 1 for x in busy) * heads == found.parts
    for x, before in pairwise([[0] * 16, *busy]):  # parts of an item are its chunks, one after another, of equal size
        assert before[11] == (x[12] if before[8] == x[8] and x[10] > 1 else 0)
        assert before[12] - before[11] in (before[7] // before[10], -(-before[7] // before[10]))
    assert max((x[12] - x[11] for x in busy), default=0) <= found.each


def test_bytes_and_work() -> None:
    """Four sequences of one tile each: every key that is seen is read once, for all heads of a group."""
    words = {"device": "H200", "backend": "triton"}
    told = explain_kv((4, 1, 32, 128), (4, 4096, 8, 64 * 2), (4, 4096, 8, 64), [4096, 0, 17, 1000], **words)
    keys = 4096 + 17 + 1000
    assert told.read == 2 * keys * 8 * (128 + 64)
    assert told.flops == 2 * 32 * (128 + 64) * keys
    assert told.other == 2 * 4 * 32 * (128 + 64) + 4 * 4 * 32
    seen = explain_kv((4, 1, 32, 128), (4, 4096, 8, 128), None, [4096, 0, 17, 1000], window=(99, 0), **words)
    assert seen.read == 2 * (100 + 17 + 100) * 8 * 256
    many = explain_kv((1, 64, 8, 128), (1, 256, 1, 128), None, [256], **words)
    tiles = 64 * 8 // many.partition.tile.block_m
    assert many.read == 2 * 256 * 256
    assert many.loaded == 2 * 256 * sum(256 - 64 + (n + 1) * 64 // tiles for n in range(tiles))


def test_times_are_those_of_memory() -> None:
    for batch, tokens, measured in ((1, 8192, 21.6e-6), (16, 4096, 75.4e-6), (64, 4096, 255e-6), (128, 8192, 962e-6)):
        cache = (batch, tokens, 8, 128)
        told = explain_kv((batch, 1, 32, 128), cache, None, [tokens] * batch, device="H200", backend="triton")
        assert told.binding == "memory"
        assert told.seconds == pytest.approx(measured, rel=0.06)
        assert told.seconds > told.roofs[0].seconds
    told = explain_kv((1, 4096, 32, 128), (1, 8192, 8, 128), None, [8192], device="H200", backend="triton")
    assert told.binding == "matrix units"


def test_tensors_and_shapes_say_the_same() -> None:
    q, cache = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 2, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([5, 60], dtype=torch.int32)
    new = {"k_new": q[:, :, :2], "v_new": q[:, :, :2], "device": "A100", "backend": "triton"}
    by_tensors = explain_kv(q, cache, cache, lengths, **new)
    shapes = {"k_new": (2, 1, 2, 64), "v_new": (2, 1, 2, 64)}
    assert by_tensors.to_dict() == explain_kv(q.shape, cache.shape, None, [5, 60], **new | shapes).to_dict()
    assert [n for _, n, _ in by_tensors.sequences] == [6, 61]


def test_here_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    told = tilewise.explain_kv((2, 1, 8, 64), (2, 64, 2, 64), None, [5, 60], device="cpu", dtype="float32")
    assert (told.backend, told.ranges) == ("reference", None)
    assert "predicted" in capsys.readouterr().out


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "4", "1", "32", "128", "--hk", "8", "--page", "16", "--device", "H200", "--backend", "triton"]
    words += ["--kv-lengths", "4096", "900", "17", "30000"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "pages of 16" in said
    assert cli.main([*words, "--json", "--split", "256"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["call"]["keys"] == 4096 + 900 + 17 + 30000
    assert told["plan"]["unit"] == 256
    assert cli.main([*words, "1"]) == 2
    assert "one for each sequence" in capsys.readouterr().err


def test_bytes_of_a_cache() -> None:
    """Those of its dtype, with scales by token; what is key and value is read once."""

    def read(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, **scales: Any) -> float:
        told = explain_kv(q, k, v, [4096], device="H200", backend="triton", **scales)
        assert told.to_dict()["bytes"]["read"] == told.read
        return told.read / 4096

    q, scale = torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16), torch.ones(1, 4096, 8)
    cache = torch.zeros(1, 4096, 8, 128, dtype=torch.int8)
    half, int4 = cache[..., :64], cache[..., :64].view(torch.uint8)
    assert read(cache, cache, q, k_scale=1.0, v_scale=1.0) == 8 * 256
    assert read(cache, cache, q, k_scale=scale, v_scale=scale) == 8 * (256 + 8)
    groups = scale[..., None].expand(-1, -1, -1, 2)
    assert read(int4, int4, q, k_scale=groups, v_scale=groups) == 8 * (128 + 16)
    assert read(q.expand(1, 4096, 32, 128)[:, :, :8], half, q, v_scale=1.0) == 8 * (256 + 64)
    q, mla = torch.zeros(1, 1, 16, 576), torch.zeros(1, 4096, 1, 576)
    packed = tilewise.pack_mla(mla).view(torch.float8_e4m3fn)
    assert read(mla, mla[..., :512], q) == 576 * 4
    assert read(mla, mla[..., :512].clone(), q) == (576 + 512) * 4
    assert read(packed, packed[..., :512], q) == 656
