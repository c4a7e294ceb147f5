"""The jvp kernel on a GPU: how out and lse move, within twice the error of torch's own arithmetic in the same dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case, make
from tests.oracle import _dense as dense
from tests.tilewise.backends.test_leaks import affected, poisoned
from tilewise.request import Spec

CASES = {
    "causal": Case(batch=2, n_q=256, n_k=256, after=0),
    "full, odd": Case(n_q=131, n_k=77),
    "window, more keys": Case(n_q=100, n_k=333, before=50, after=7),
    "empty rows": Case(n_q=300, n_k=130, after=0),
    "grouped heads": Case(n_q=190, n_k=190, heads=8, kv_heads=2, before=64, after=0),
}
DIMS = {"bfloat16": ((64, 64), (128, 128), (256, 256), (72, 40)), "float32": ((64, 64), (40, 96))}


def moved(call, x: list[Tensor], along: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.func.jvp(call, tuple(x), tuple(along))[1]


@pytest.mark.parametrize(("dtype", "dims"), [(dtype, d) for dtype, dims in DIMS.items() for d in dims], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_within_budget(name: str, dtype: str, dims: tuple[int, int]) -> None:
    case = replace(CASES[name], dtype=dtype, d=dims[0], dv=dims[1])
    spec = case.spec
    x, along = (list(make(replace(case, seed=seed), "cuda")[1:4]) for seed in (0, 1))
    ours = moved(attend(spec), x, along)
    theirs = moved(lambda *t: dense(*t, spec), x, along)
    exact = moved(lambda *t: dense(*t, spec), [t.double() for t in x], [t.double() for t in along])
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        error, torchs = (float((y.double() - truth).abs().max()) for y in (a, b))
        rounding = torch.finfo(a.dtype).eps * float(truth.abs().max())
        assert error <= 2 * torchs + 2 * rounding, (error, torchs, rounding)


def attend(spec: Spec):
    window, scale = (spec.before, spec.after), spec.scale
    return lambda *t: tilewise.attention(*t, window=window, scale=scale, return_lse=True, backend="triton")


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_hidden_token(name: str, d: int) -> None:
    """A key that is not a number reaches those that see it and nobody else, whether it or its movement is."""
    case = Case(batch=1, n_q=300, n_k=330, heads=2, kv_heads=1, d=d, dv=d, dtype="bfloat16", before=70, after=30)
    x, along = (make(replace(case, seed=seed), "cuda") for seed in (0, 1))
    clean = moved(attend(case.spec), list(x[1:4]), list(along[1:4]))[0]
    hit = affected(name, 200, case)["out"].to("cuda")
    bad = (poisoned(x, name, (0, 200), torch.nan), along), (x, poisoned(along, name, (0, 200), torch.inf))
    for bad_x, bad_along in bad:
        dirty = moved(attend(case.spec), list(bad_x[1:4]), list(bad_along[1:4]))[0]
        torch.testing.assert_close(dirty[:, ~hit], clean[:, ~hit], rtol=1.6e-2, atol=4e-3)
        assert not dirty[:, hit].isfinite().all(-1).any()


def test_memory_is_linear() -> None:
    """Beyond its inputs a call keeps what grows with the tokens: four times as many for four times as much."""
    found = []
    for n in (2048, 8192):
        x, along = ([torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        moved(attend(Spec.of(head_dim=64, causal=True)), x, along)
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] <= 4.5 * found[0]
