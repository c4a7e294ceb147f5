"""Forward and backward of the portable kernels, every feature, within the error budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import budget
from tests.cases import BANDS, DTYPES, LAYOUTS, NAMES, Case, make, run
from tests.conftest import DEVICE
from tests.covering import cases, each_once
from tilewise import attention_varlen
from tilewise.backends.common import tiles

FEATURES = {
    "full": Case(batch=2),
    "whole tiles": Case(n_q=32, n_k=48, before=20, after=10),
    "causal": Case(after=0),
    "window": Case(before=5, after=3),
    "left window": Case(before=4, after=None),
    "sliding causal": Case(before=18, after=0),
    "diagonal": Case(before=0, after=0),
    "grouped heads": Case(heads=4, kv_heads=2, after=0),
    "one kv head": Case(heads=3, kv_heads=1),
    "more keys": Case(n_q=9, n_k=41, after=0),
    "more queries": Case(n_q=41, n_k=9, after=0),
    "one query": Case(n_q=1, n_k=50, after=0),
    "one query, grouped heads": Case(batch=2, n_q=1, n_k=50, heads=6, kv_heads=2, after=0),
    "one query, a window, grouped heads": Case(n_q=1, n_k=50, heads=6, kv_heads=2, before=7, after=0),
    "one key": Case(n_q=20, n_k=1),
    "no keys": Case(n_q=5, n_k=0),
    "no queries": Case(n_q=0, n_k=5),
    "no batch": Case(batch=0),
    "packed": Case(lengths=((20, 20), (3, 3), (17, 17)), n_q=40, n_k=40, after=0),
    "packed, empty sequences": Case(lengths=((0, 0), (5, 0), (0, 7), (18, 21), (0, 0)), n_q=23, n_k=28, before=6),
    "packed, grouped heads": Case(lengths=((20, 33), (16, 16)), n_q=36, n_k=49, heads=4, kv_heads=2, after=2),
    "wide values": Case(d=8, dv=40),
    "narrow values": Case(d=40, dv=3),
    "dim 1": Case(d=1, dv=1),
    "dim 512": Case(n_q=20, n_k=20, heads=1, kv_heads=1, d=512, dv=512, dtype="bfloat16"),
    "float16": Case(dtype="float16", after=0),
    "bfloat16": Case(dtype="bfloat16", after=0),
    "scale 0": Case(scale=0.0),
    "negative scale": Case(scale=-0.7, after=0),
    "large scale": Case(scale=8.0),
    "no lse gradient": Case(lse_gradient=False),
}


@cases(
    "name",
    [
        "whole tiles",
        "one query, grouped heads",
        "one key",
        "no keys",
        "no queries",
        "no batch",
        "packed, empty sequences",
        "dim 1",
        "dim 512",
        "scale 0",
        "large scale",
    ],
    FEATURES,
)
def test_feature(name: str) -> None:
    inputs = make(FEATURES[name], DEVICE)
    budget.check(run(inputs, "triton"), inputs)


sizes = st.integers(1, 35)
windows = st.tuples(*(st.one_of(st.none(), st.integers(0, 40)) for _ in range(2)))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    n_q=sizes, n_k=sizes, d=st.integers(1, 40), dv=st.integers(1, 40), group=st.sampled_from((1, 2)), window=windows,
    layouts=st.tuples(*(st.sampled_from(LAYOUTS) for _ in range(4))), dtype=st.sampled_from(DTYPES),
    scale=st.one_of(st.none(), st.floats(-2, 2)), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_call(n_q, n_k, d, dv, group, window, layouts, dtype, scale, seed) -> None:
    case = Case(1, n_q, n_k, group, 1, d, dv, dtype, *window, scale, layouts, seed=seed)
    inputs = make(case, DEVICE)
    budget.check(run(inputs, "triton"), inputs)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4).map(tuple),
    window=windows, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_packing(lengths, window, dtype, seed) -> None:
    n_q, n_k = (sum(x) for x in zip(*lengths, strict=True))
    case = Case(len(lengths), n_q, n_k, 2, 1, 8, 8, dtype, *window, lengths=lengths, seed=seed)
    inputs = make(case, DEVICE)
    budget.check(run(inputs, "triton"), inputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's tiles come from its table")
@each_once(tile=[(32, 16), (16, 32), (64, 16)], apart=[False, True], band=BANDS[1:3])
def test_tile(
    tile: tuple[int, int], apart: bool, band: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "INTERPRETER", tiles.Tile(*tile, 4, 1, apart))
    inputs = make(Case(batch=1, n_q=70, n_k=75, heads=2, kv_heads=1, d=8, dv=8, before=band[0], after=band[1]), DEVICE)
    budget.check(run(inputs, "triton"), inputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's tiles come from its table")
@pytest.mark.parametrize(("dims", "apart"), [((40, 20), False), ((20, 40), True)], ids=["together", "apart"])
def test_products_of_a_few_columns_at_a_time(
    dims: tuple[int, int], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, dv = dims
    case = Case(
        batch=1, n_q=37, n_k=45, heads=2, kv_heads=1, d=d, dv=dv, before=9, after=20, lengths=((20, 15), (17, 30))
    )
    inputs = make(case, DEVICE)
    monkeypatch.setattr(tiles, "INTERPRETER", tiles.Tile(16, 32, 4, 1, apart, chunk=16))
    budget.check(run(inputs, "triton"), inputs)


def test_empty_rows_are_exact() -> None:
    """Queries before the first key: out 0, lse -inf, gradients 0, not merely small."""
    inputs = make(Case(n_q=40, n_k=10, after=0), DEVICE)
    out, lse, dq, _, _ = run(inputs, "triton")
    assert torch.equal(lse == -torch.inf, torch.arange(40, device=DEVICE).expand_as(lse) < 30)
    assert not out[:, :30].any()
    assert not dq[:, :30].any()
    assert dq[:, 31:].any()


@pytest.mark.parametrize("ends", [([0, 20, 20, 41], [0, 10, 30, 33]), ([0, 5, 5], [0, 16, 16])], ids=["long", "empty"])
def test_rows_past_the_sequences(ends: tuple[list[int], list[int]]) -> None:
    """A packed buffer may be longer than its sequences: out 0, lse -inf and gradients 0 there, whatever it holds."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ends)
    n_q, n_k = (x[-1] for x in ends)

    def grads(extra: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        lengths = n_q, n_k, n_k, n_q
        rows = [torch.randn(n, 2, 8, device=DEVICE) for n in lengths]
        nans = torch.full((extra, 2, 8), torch.nan, device=DEVICE)
        q, k, v, dout = (torch.cat((x, nans)) for x in rows)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = attention_varlen(*leaves, cu_q, cu_k, causal=True, return_lse=True, backend="triton")
        return out, lse.mT, *torch.autograd.grad(out, leaves, dout)

    for name, n, x, y in zip(NAMES, (n_q, n_q, n_q, n_k, n_k), grads(37), grads(0), strict=True):
        assert torch.equal(x[:n], y), name
        assert (x[n:] == (-torch.inf if name == "lse" else 0)).all(), name


@pytest.mark.parametrize("name", ["bfloat16", "packed"])
def test_bitwise_reproducible(name: str) -> None:
    inputs = make(FEATURES[name], DEVICE)
    for result, x, y in zip(NAMES, run(inputs, "triton"), run(inputs, "triton"), strict=True):
        assert torch.equal(x, y), result


@pytest.mark.parametrize("dtype", DTYPES)
def test_unbiased(dtype: str) -> None:
    """No result is systematically too large or too small."""
    inputs = make(Case(batch=2, n_q=31, n_k=31, heads=6, kv_heads=6, dtype=dtype, lse_gradient=False), DEVICE)
    for stick, x in zip(budget.yardsticks(inputs), run(inputs, "triton"), strict=True):
        budget.check_unbiased(stick, x)


def test_poison_works() -> None:
    """The fixture that makes unwritten memory visible does so for the way the launcher allocates."""
    assert torch.ones(2, device=DEVICE).new_empty((3, 5)).isnan().all()
