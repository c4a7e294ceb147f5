"""Every score term on the reference, alone and in combinations, dense and packed: derivatives of every kind.

Gradients are held to the float64 oracle; forward mode and gradients of gradients to differences of what is so known.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests import features, features_budget
from tests.covering import cases, each_once
from tests.features import ALONE, Call, Features

STEP = 1e-5


def double(chosen: Features, seed: int) -> Call:
    """The call with float64 data."""
    call = features.make(chosen, seed, longest=20, device="cpu")
    return replace(
        call, leaves={name: x.double() for name, x in call.leaves.items()},
        dout=call.dout.double(), dlse=call.dlse.double(),
    )  # fmt: skip


def directions(call: Call, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in call.leaves.values()]


def moved(call: Call, along: list[Tensor], step: float) -> Call:
    return replace(call, leaves={n: x + step * d for (n, x), d in zip(call.leaves.items(), along, strict=True)})


def value(call: Call, *leaves: Tensor) -> Tensor:
    """What `features.run` differentiates; rows that see nothing have no lse to count."""
    out, lse = features.attend(call, dict(zip(call.leaves, leaves, strict=True)), "reference")
    lse = torch.where(lse.detach().isfinite(), lse, 0.0)
    return (out * call.dout).sum() + (lse * call.dlse).sum()


def check(call: Call) -> None:
    exact = features_budget.truth(call, torch.float64)
    for name, x in features.run(call, "reference").items():
        torch.testing.assert_close(x, exact[name], rtol=1e-10, atol=1e-10)

    along = directions(call, 1)
    grads = [exact[name] for name in call.leaves]
    expected = sum((g * d).sum() for g, d in zip(grads, along, strict=True))
    _, forward = torch.func.jvp(lambda *x: value(call, *x), tuple(call.leaves.values()), tuple(along))
    torch.testing.assert_close(forward, expected, rtol=1e-9, atol=1e-9)

    leaves = [x.clone().requires_grad_() for x in call.leaves.values()]
    first = torch.autograd.grad(value(call, *leaves), leaves, create_graph=True)
    toward = directions(call, 2)
    slope = sum((g * d).sum() for g, d in zip(first, toward, strict=True))
    second = torch.autograd.grad(slope, leaves, allow_unused=True, materialize_grads=True)
    found = sum((g * d).sum() for g, d in zip(second, along, strict=True))
    up, down = (features_budget.truth(moved(call, along, sign * STEP), torch.float64) for sign in (1, -1))
    difference = sum(
        ((up[name] - down[name]) * d).sum() / (2 * STEP) for name, d in zip(call.leaves, toward, strict=True)
    )
    torch.testing.assert_close(found, difference, rtol=1e-5, atol=1e-5)


@each_once(name=ALONE, packed=[False, True])
def test_alone(name: str, packed: bool) -> None:
    check(double(Features(**ALONE[name], packed=packed, d=8, dv=16, band=(False, True)), seed=4))


@cases("seed", range(6), range(24))
def test_combined(seed: int) -> None:
    check(double(Features.random(seed, dims=(8, 16), dtypes=("float32",), blocks=16), seed))
