"""The request of a call: its spec, its flattening, the schema of the ops."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise.request import (
    ARGUMENTS,
    FAR,
    SCHEMA,
    Request,
    Spec,
    arguments,
    band,
    num_differentiable,
    request_from_arguments,
)


def full() -> Request:
    """One of everything, each tensor another."""
    spec = Spec(
        0.5, 3, 0, "triton", "score", (1.0, 2.0), 2, "mask", (3.0,), 1, (16, 16, 1, 1), 0.1, deterministic=True,
        max_seqlen=7,
    )  # fmt: skip
    x = [torch.empty(n) for n in range(14)]
    return Request(x[0], x[1], x[2], spec, x[3], x[4], (x[5], x[6]), x[7], x[8], x[9], (x[10],), (x[11], x[12], x[13]))


def same(a: Request, b: Request) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return a.spec == b.spec and all(x is y for x, y in pairs)


def test_a_request_survives_both_flattenings() -> None:
    request = full()
    assert same(Request.of(request.spec, request.tensors()), request)
    assert same(request_from_arguments(*arguments(request)), request)
    without = request._replace(mask=(), blocks=(), spec=request.spec._replace(mask_tensors=0))
    assert same(request_from_arguments(*arguments(without)), without)


def test_the_schema_has_a_place_for_every_argument() -> None:
    assert len(SCHEMA.split(", ")) == ARGUMENTS == len(arguments(full()))
    *numbers, others = (part.split()[1] for part in SCHEMA.split(", ")[4:])
    assert others == "options"
    assert set(numbers) < set(Spec._fields)


def test_gradients_are_asked_of_the_first_tensors() -> None:
    request = full()
    asked = request.tensors()[: num_differentiable(request.spec)]
    expected: list[Tensor | None] = [request.q, request.k, request.v, request.bias, request.sinks, *request.score]
    assert all(x is y for x, y in zip(asked, expected, strict=True))


@pytest.mark.parametrize(("change", "plain", "masked"), [
    ({}, True, False), ({"bias": torch.zeros(1)}, False, False), ({"sinks": torch.zeros(1)}, False, False),
    ({"seed": torch.zeros(1)}, False, False), ({"spec": Spec(1.0, after=0)}, True, True),
    ({"spec": Spec(1.0, score_mod="x")}, False, False), ({"spec": Spec(1.0, mask_mod="x")}, False, True),
])  # fmt: skip
def test_plain_and_masked(change: dict, plain: bool, masked: bool) -> None:
    x = torch.zeros(1)
    request = Request(x, x, x, Spec(1.0))._replace(**change)
    assert (request.is_plain, request.is_masked) == (plain, masked)


@pytest.mark.parametrize("side", [FAR, 2**31 - 1, 2**40])
def test_what_is_far_is_unbounded(side: int) -> None:
    assert band(False, (side, FAR - 1)) == (None, FAR - 1)
    assert band(True, (FAR - 1, side)) == (FAR - 1, 0)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_is_finite(scale: float) -> None:
    with pytest.raises(AttentionError, match="scale"):
        Spec.of(head_dim=4, scale=scale)


def test_the_error_travels() -> None:
    error = AttentionError("window", -1, "an int >= 0")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.args) == ("window: found -1; expected an int >= 0", error.args)
