"""Second derivatives on Hopper in one pass, run by the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import second
from tests.cases import Case, make
from tests.compiling import reports
from tests.covering import cases
from tests.oracle import _dense as dense
from tilewise.backends.common.hvp_launches import build_hvp
from tilewise.backends.common.launch import DeviceMemory, Target
from tilewise.backends.hopper.hvp_launches import ONE_PASS
from tilewise.request import Gpu, Request
from tilewise_lab import emulator

pytestmark = [pytest.mark.usefixtures("triton_runs")]
CASES = {
    "full, odd": Case(n_q=130, n_k=70, heads=1, kv_heads=1, d=64, dv=64),
    "causal, grouped heads": Case(n_q=150, n_k=150, heads=2, kv_heads=1, d=64, dv=64, after=0),
    "causal, empty rows": Case(batch=2, n_q=140, n_k=9, heads=1, kv_heads=1, d=64, dv=64, after=0),
    "window": Case(n_q=129, n_k=300, heads=1, kv_heads=1, d=64, dv=64, before=20, after=9),
    "D 128": Case(n_q=64, n_k=128, heads=1, kv_heads=1, d=128, dv=128, after=0),
}


class NanMemory(DeviceMemory):
    """Memory whose values are NaN until they are written."""

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return super().empty(shape, dtype).fill_(torch.nan if dtype.is_floating_point else 2**30)


def derivatives(case: Case, **options: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """dout's, dlse's, q's, k's and v's: in one pass, by torch in bfloat16, and in float64."""
    inputs, along = (make(Case(**vars(case) | {"dtype": "bfloat16", "seed": seed}), "cpu") for seed in (0, 1))
    request = Request(inputs.q, inputs.k, inputs.v, inputs.case.spec)
    out, lse = dense(*(x.double() for x in inputs[1:4]), inputs.case.spec)
    saved = out.to(inputs.q.dtype), lse.float(), inputs.dout, inputs.dlse
    target = Target(Gpu("cuda", 90), 2)
    built = build_hvp(request.spec, ONE_PASS)((*request.tensors(), *saved, *along[1:4]), target, NanMemory(out.device))
    for launch in built.launches:
        if hasattr(launch.kernel, "is_gluon") and launch.kernel.is_gluon():
            emulator.launch(*launch, **options)
        else:
            launch()
    theirs, exact = (second.torchs(inputs, along[1:4], dtype) for dtype in (torch.bfloat16, torch.float64))
    return list(built.results), theirs, exact


@cases("name", ["causal, grouped heads"], CASES)
def test_within_budget(name: str) -> None:
    found, theirs, exact = derivatives(CASES[name])
    for which, x, y, truth in zip(second.NAMES, found, theirs, exact, strict=True):
        error, own = ((a.double() - truth).abs().max().item() for a in (x, y))
        rounding = torch.finfo(torch.bfloat16).eps * max(truth.abs().max().item(), 1.0)
        assert error <= 2 * own + 2 * rounding, f"{which}: {error:.1e}, torch's {own:.1e}"


@pytest.mark.slow
def test_compiles_without_spills(request: pytest.FixtureRequest) -> None:
    """The variant with a window of each head dim; with --all, every variant."""
    windows = (None, None), (None, 0), (100, 7)
    rows = [
        {"arch": 90, "dtype": dtype, "dim": dim, "one_pass": True, "window": window, "group": group}
        for dim in (64, 128)
        for window, dtype, group in zip(windows, ("bfloat16", "float16", "bfloat16"), (1, 2, 1), strict=True)
    ]
    if not request.config.getoption("--all"):
        rows = rows[2::3]
    made = [x for x in reports("tests.tilewise.backends.compile_hvp", rows) if x["kernel"] == "hvp_kernel"]
    assert len(made) == len(rows)
    for x in made:
        assert x["spills"] == 0, x
        assert x["shared"] <= 227 * 1024, x
        assert not x["warnings"], x
