"""What the public functions promise, on each backend that runs here."""

from __future__ import annotations

import inspect
import math
import typing
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests import budget
from tests.cases import NAMES, Case, make, run
from tests.conftest import DEVICE
from tests.oracle import naive
from tilewise.request import Spec

CASE = Case(batch=2, n_q=9, n_k=12, heads=4, kv_heads=2, d=8, dv=5)


def qkv(case: Case = CASE) -> tuple[Tensor, Tensor, Tensor]:
    return make(case, DEVICE)[1:4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_shapes_and_dtypes(dtype: str, backend: str) -> None:
    out, lse = tilewise.attention(*qkv(replace(CASE, dtype=dtype)), return_lse=True, backend=backend)
    assert (out.shape, out.dtype) == ((2, 9, 4, 5), getattr(torch, dtype))
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_float64_is_exact_on_the_reference() -> None:
    q, k, v = (x.double() for x in qkv())
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert lse.dtype == torch.float64
    assert_close((out, lse), naive(q, k, v, Spec(8**-0.5, None, 0)), rtol=1e-12, atol=1e-12)


def test_return_lse_changes_nothing_else(backend: str) -> None:
    out = tilewise.attention(*qkv(), backend=backend)
    both = tilewise.attention(*qkv(), backend=backend, return_lse=True)
    assert torch.equal(out, both[0])


def test_default_scale(backend: str) -> None:
    inputs = make(CASE, DEVICE)
    default, given = run(inputs, backend), run(inputs, backend, scale=1 / math.sqrt(8))
    assert all(torch.equal(a, b) for a, b in zip(default, given, strict=True))


def test_causal_is_a_window(backend: str) -> None:
    def attend(**band: object) -> Tensor:
        return tilewise.attention(*qkv(), backend=backend, **band)

    assert torch.equal(attend(causal=True), attend(window=(None, 0)))
    assert torch.equal(attend(causal=True, window=(3, None)), attend(window=(3, 0)))
    assert torch.equal(attend(causal=True, window=(3, 7)), attend(window=(3, 0)))
    assert torch.equal(attend(), attend(window=(None, None)))
    assert not torch.equal(attend(), attend(causal=True))


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, batch=0),
        replace(CASE, n_q=0),
        replace(CASE, n_k=0),
        replace(CASE, n_q=0, n_k=0, after=0),
        Case(batch=3, n_q=0, n_k=0, lengths=((0, 0),) * 3),
        Case(batch=2, n_q=4, n_k=0, lengths=((1, 0), (3, 0))),
        Case(batch=2, n_q=0, n_k=6, lengths=((0, 2), (0, 4))),
    ],
    ids=str,
)
def test_nothing_there(case: Case, backend: str) -> None:
    inputs = make(case, DEVICE)
    out, lse, *grads = run(inputs, backend)
    assert out.shape == inputs.dout.shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    for grad, x in zip(grads, inputs[1:4], strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


def test_no_sequences(backend: str) -> None:
    q, cu = torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, lse = tilewise.attention_varlen(q, q, q, cu, cu, backend=backend, return_lse=True)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize("band", [(None, None), (None, 0), (5, 2)])
def test_packed_is_dense_sequence_by_sequence(band: tuple[int | None, int | None], backend: str) -> None:
    lengths = ((9, 12), (0, 4), (17, 17), (6, 0))
    case = Case(4, 32, 33, 4, 2, 8, 5, before=band[0], after=band[1], lengths=lengths)
    inputs = make(case, DEVICE)
    packed = dict(zip(NAMES, run(inputs, backend), strict=True))
    row = key = 0
    for n_q, n_k in lengths:
        rows, keys = slice(row, row + n_q), slice(key, key + n_k)
        alone = inputs._replace(
            case=replace(case, batch=1, n_q=n_q, n_k=n_k, lengths=None), cu_q=None, cu_k=None,
            q=inputs.q[None, rows], k=inputs.k[None, keys], v=inputs.v[None, keys], dout=inputs.dout[None, rows],
            dlse=inputs.dlse[None, :, rows],
        )  # fmt: skip
        for name, x in zip(NAMES, run(alone, backend), strict=True):
            part = packed[name][:, rows] if name == "lse" else packed[name][keys if name in ("dk", "dv") else rows]
            assert_close(part, x[0], msg=lambda text, name=name: f"{name}: {text}")
        row, key = row + n_q, key + n_k


def test_maximal_lengths_are_not_needed(backend: str) -> None:
    inputs = make(Case(batch=2, n_q=12, n_k=12, lengths=((5, 5), (7, 7))), DEVICE)
    plain, with_lengths = run(inputs, backend), run(inputs, backend, max_seqlen_q=7, max_seqlen_k=7)
    assert all(torch.equal(a, b) for a, b in zip(plain, with_lengths, strict=True))


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic(deterministic: bool, backend: str) -> None:
    inputs = make(replace(CASE, after=0), DEVICE)
    twice = [run(inputs, backend, deterministic=deterministic) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


def test_only_wanted_gradients(backend: str) -> None:
    q, k, v = qkv()
    tilewise.attention(q, k.requires_grad_(), v, backend=backend).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None


def test_gradient_through_lse_alone(backend: str) -> None:
    inputs = make(replace(CASE, dv=8), DEVICE)
    expected = run(inputs._replace(dout=torch.zeros_like(inputs.dout)), backend)
    q, k = (x.detach().requires_grad_() for x in inputs[1:3])
    _, lse = tilewise.attention(q, k, inputs.v, return_lse=True, backend=backend)
    dq, dk = torch.autograd.grad(lse, (q, k), inputs.dlse)
    assert_close((dq, dk), expected[2:4])


def test_sum_of_outputs(backend: str) -> None:
    """The gradient of a sum is one number with strides of 0."""
    inputs = make(replace(CASE, lse_gradient=False), DEVICE)
    inputs = inputs._replace(dout=inputs.dout.new_ones(()).expand(inputs.dout.shape))
    budget.check(run(inputs, backend), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch.autocast(DEVICE, dtype):
        out, lse = tilewise.attention(q, k.half(), v, backend=backend, return_lse=True)
    out.sum().backward()
    expected = tilewise.attention(*(x.detach().to(dtype) for x in (q, k.half(), v)), backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected)
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = (x.double() for x in qkv())
    with torch.autocast(DEVICE, torch.bfloat16):
        assert tilewise.attention(q, k, v).dtype == torch.float64


def test_merge_of_two_halves_is_the_whole(backend: str) -> None:
    q, k, v = qkv()
    halves = [
        tilewise.attention(q, k[:, part], v[:, part], return_lse=True, backend=backend)
        for part in (slice(5), slice(5, None))
    ]
    assert_close(tilewise.merge(*halves), tilewise.attention(q, k, v, return_lse=True, backend=backend))


@pytest.mark.parametrize("function", [tilewise.attention, tilewise.attention_varlen])
def test_overloads_say_what_is_returned(function):
    found = {}
    for overload in typing.get_overloads(function):
        signature = inspect.signature(overload)
        kinds = (signature.parameters[name].annotation for name in ("return_lse", "return_max_logit"))
        found[tuple(kinds)] = signature.return_annotation
    yes, no = "Literal[True]", "Literal[False]"
    assert found == {
        (no, no): "Tensor",
        (yes, no): "OutLse",
        (no, yes): "OutMaxLogit",
        (yes, yes): "OutLseMaxLogit",
        ("bool", "bool"): "Result",
    }
