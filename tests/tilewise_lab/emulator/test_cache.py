"""The Hopper forward over a KV cache, in the emulator: pages in any order, unused places full of NaN, against brute
force in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.covering import cases
from tests.kv_cases import KvCase, compare, inputs
from tilewise.call.fields import CACHE
from tilewise.errors import AttentionError
from tilewise.kv_request import KvCall
from tilewise.validation import kv as checks
from tilewise_lab.emulator import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")

BASE = KvCase((150, 3, 0, 260), queries=70, dim=64, page=16)
CASES = {
    "pages of 16": BASE,
    "pages of 64": BASE.but(page=64, heads=2, kv_heads=2),
    "pages of 256": BASE.but(page=256),
    "pages of 24": BASE.but(page=24),
    "dense": BASE.but(page=0),
    "side by side": BASE.but(layout="interleaved"),
    "heads first": BASE.but(layout="heads_first", page=8),
    "all layers": BASE.but(layout="wide", dim_v=32),
    "packed": BASE.but(queries=(70, 1, 2, 130), padding=5, heads=2, kv_heads=1),
    "packed, all many": BASE.but(queries=(70, 66, 0, 130), heads=2, kv_heads=1),
    "192 by 128": KvCase((150, 40), queries=70, dim=192, dim_v=128, heads=1, kv_heads=1),
    "256": KvCase((90, 140), queries=65, dim=256, heads=1, kv_heads=1, page=0),
}


def attend(x: Any, *, planned: bool = False, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`planned`: with the lse of a plan, whose memory is transposed."""
    from tilewise.backends.common.launch import DeviceMemory, Target
    from tilewise.backends.hopper import kv_launches as kv_launch
    from tilewise.request import INTERPRETER

    request = checks.attend_request(x.q, x.k, x.v, x.lengths, CACHE.completed(x.options | options))
    *outer, n_q, heads, _ = x.q.shape
    out = torch.full((*outer, n_q, heads, x.v.shape[-1]), torch.nan, dtype=x.q.dtype)
    lse = torch.full((*outer, n_q, heads), torch.nan).mT if planned else torch.full((*outer, heads, n_q), torch.nan)
    target = Target(INTERPRETER, 2)
    numbers, floats = kv_launch.schedule_sizes(request, target)
    schedule, workspace = torch.full((numbers,), -1), torch.full((floats,), torch.nan)
    for scheduling in kv_launch.schedule_launches(request, schedule, target):
        scheduling()
    call = KvCall(request, None, schedule, workspace, out, lse)
    first, *rest = kv_launch.attend_launches(call, target, DeviceMemory(torch.device("cpu")))
    launch(first.kernel, first.programs, first.args, first.options)
    for job in rest:
        job()
    return out, lse


@cases("name", ["pages of 16", "packed"], CASES)
def test_every_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.hopper import kv_launches as kv_launch

    monkeypatch.setattr(kv_launch, "MAX_DECODE_QUERIES", 60)  # of packed sequences, which the portable kernels compute
    x = inputs(CASES[name], torch.bfloat16)
    compare(attend(x), x)


def test_the_lse_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward writes a contiguous lse: not into this one, in which the decode kernels write other rows."""
    from tilewise.backends.hopper import kv_launches as kv_launch

    monkeypatch.setattr(kv_launch, "MAX_DECODE_QUERIES", 60)
    x = inputs(CASES["packed"], torch.bfloat16)
    out, lse = attend(x, planned=True)
    expected_out, expected_lse = attend(x)
    assert torch.equal(out, expected_out)
    decoded = [*range(70, 73), *range(203, 208)]  # rows of short sequences, and past the last one
    assert torch.equal(lse[:, decoded], expected_lse[:, decoded])
    others = [i for i in range(lse.shape[1]) if i not in decoded]
    assert lse[:, others].isnan().all()


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": (40, 0)}, {"softcap": 3.0}, {"sinks": None}], ids=str
)
def test_terms(options: dict[str, Any]) -> None:
    x = inputs(BASE.but(heads=2, kv_heads=1), torch.bfloat16)
    if "sinks" in options:
        options = {"sinks": torch.randn(2)}
    compare(attend(x, **options), x, **options)


def test_what_it_leaves_to_others() -> None:
    from tilewise.backends.hopper.support import GPU, unsupported

    def kept_by(case: KvCase, **options: Any) -> str | None:
        x = inputs(case, torch.bfloat16)
        request = checks.attend_request(x.q, x.k, x.v, x.lengths, CACHE.completed(x.options | options))
        return unsupported(request, GPU)

    assert kept_by(BASE) is None
    assert kept_by(BASE.but(page=0)) is None
    for case, options in (
        (BASE.but(page=3), {}),
        (BASE.but(csr=True), {}),
        (BASE.but(starts=(1, 0, 0, 2)), {}),
        (BASE, {"split": 128}),
        (BASE.but(dim=20), {}),
    ):
        found = kept_by(case, **options)
        assert found is not None, (case, options)


def test_asked_for_by_name_elsewhere_it_says_why() -> None:
    import tilewise

    x = inputs(BASE, torch.bfloat16)
    with pytest.raises(AttentionError, match="hopper"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="hopper")
