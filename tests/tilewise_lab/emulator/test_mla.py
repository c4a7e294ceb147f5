"""The Hopper kernel of MLA in the emulator: pages in any order, unused tokens nan, against brute force in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.covering import cases
from tests.mla_cases import MlaCase, compare, inputs
from tilewise.call.fields import CACHE
from tilewise.kv_request import KvCall
from tilewise.validation import kv as checks
from tilewise_lab.emulator import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")

CASES = {
    "64 heads": MlaCase((450, 100, 0, 64), heads=64, page=64),
    "3 queries": MlaCase((200, 2), heads=24, queries=3, page=64),
    "pages of 16": MlaCase((130, 37), heads=20, page=16),
    "pages of 24": MlaCase((130,), heads=64, page=24),
    "dense": MlaCase((200, 63), heads=70, page=0),
    "fp8": MlaCase((200, 0, 63, 400), heads=64, page=64, packed=True),
    "fp8, pages of 24": MlaCase((130, 37), heads=20, queries=3, page=24, packed=True, exact=True),
    "fp8, dense": MlaCase((100,), heads=16, page=0, packed=True),
}


@cases("name, processors", [("3 queries", 1), ("pages of 24", 3), ("fp8", 3), ("dense", 1)], product(CASES, [1, 3]))
def test_mla(name: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.common.kv import partition
    from tilewise.backends.common.launch import DeviceMemory, Target
    from tilewise.backends.hopper import kv_launches
    from tilewise.request import INTERPRETER

    monkeypatch.setattr(partition, "INTERPRETER", partition.KvTile(64, 64, 4, 1, 1))
    monkeypatch.setattr(partition, "INTERPRETED_PROCESSORS", processors)
    x = inputs(CASES[name], torch.bfloat16 if CASES[name].packed else torch.float16)
    cache = x.cache.view(torch.float8_e4m3fn) if CASES[name].packed else x.cache
    request = checks.attend_request(x.q, cache, cache[..., :512], x.lengths, CACHE.completed(x.options))
    batch, n_q, heads, _ = x.q.shape
    out = torch.full((batch, n_q, heads, 512), torch.nan, dtype=x.q.dtype)
    lse = torch.full((batch, heads, n_q), torch.nan)
    target, memory = Target(INTERPRETER, 2), DeviceMemory(torch.device("cpu"))
    numbers, floats = kv_launches.schedule_sizes(request, target)
    schedule, workspace = torch.full((numbers,), -1), torch.full((floats,), torch.nan)
    (scheduling,) = kv_launches.schedule_launches(request, schedule, target)
    scheduling()
    first, *rest = kv_launches.attend_launches(KvCall(request, None, schedule, workspace, out, lse), target, memory)
    for seed in range(3):
        launch(first.kernel, first.programs, first.args, first.options, seed=seed)
    for job in rest:
        job()
    compare((out, lse), x.q, x.keys, rounded=CASES[name].packed and not CASES[name].exact)
