"""Derivatives that the kernels of a call lack: the reference computes them if the backend is "auto"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import tilewise
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError

Call = Callable[..., Any]


def attend(backend: str) -> Call:
    """Out and lse in one number, as a function of q, k, v and a bias."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out, lse = tilewise.attention(q, k, v, bias=bias, scale=0.4, return_lse=True, backend=backend)
        return (out.sin().sum() + lse.square().sum()) / 10

    return call


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 3, 4, dtype=torch.float64).unbind()
    return q, k, v, torch.randn(1, 3, 5, 1, dtype=torch.float64)


def second_gradients(call: Call, create_graph: bool = False) -> list[Tensor]:
    xs = [x.requires_grad_() for x in inputs()]
    firsts = torch.autograd.grad(call(*xs), xs, create_graph=True)
    penalty = sum(x.square().sum() for x in firsts)
    return list(torch.autograd.grad(penalty, xs, create_graph=create_graph))  # type: ignore[arg-type]


def dual(call: Call) -> list[Tensor]:
    with forward_ad.dual_level():
        result = call(*[forward_ad.make_dual(x, x.cos()) for x in inputs()])
        return [*forward_ad.unpack_dual(result)]


def forward_over_reverse(call: Call) -> Any:
    xs = inputs()
    return torch.func.jvp(torch.func.grad(call, (0, 1, 2, 3)), xs, tuple(x.cos() for x in xs))


def reverse_over_forward(call: Call) -> Any:
    xs = inputs()
    tangents = tuple(x.cos() for x in xs)
    return torch.func.grad(lambda *x: torch.func.jvp(call, x, tangents)[1], (0, 3))(*xs)


def hessian(call: Call) -> Any:
    q, k, v, bias = inputs()
    return torch.func.hessian(lambda q, bias: call(q, k, v, bias), (0, 1))(q[:, :2], bias[:, :, :2])


WAYS = {
    "second gradients": second_gradients,
    "dual tensors": dual,
    "jvp": lambda call: torch.func.jvp(call, inputs(), tuple(x.cos() for x in inputs())),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "hessian": hessian,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_has_what_the_kernels_lack(way: str, third: ThirdBackend) -> None:
    found, expected = (WAYS[way](attend(backend)) for backend in ("auto", "reference"))
    assert_close(found, expected)
    assert "forward" in third.ran


@pytest.mark.parametrize("way", WAYS)
def test_kernels_that_are_named_raise(way: str, third: ThirdBackend) -> None:
    with pytest.raises(
        AttentionError, match=r"(forward mode|a gradient of the gradient|a derivative of the gradient): found"
    ):
        WAYS[way](attend("third"))
