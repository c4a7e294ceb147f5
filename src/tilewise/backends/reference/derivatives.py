"""Derivatives of functions that torch can differentiate, for calls whose kernels lack them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def reference_vjp(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of the wanted inputs of a function that torch can differentiate, None for the others."""
    places = [n for n, (x, wants) in enumerate(zip(inputs, wanted, strict=True)) if wants and x is not None]
    given = [n for n, x in enumerate(cotangents) if x is not None]
    some = _function_of(function, inputs, places, given)
    pull: Any = torch.func.vjp(some, *[inputs[n] for n in places])[1]
    found = dict(zip(places, pull(tuple(cotangents[n] for n in given)), strict=True))
    return tuple(found.get(n) for n in range(len(inputs)))


def reference_jvp(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    tangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The tangents of a function that torch can differentiate. They are the gradient of its vector-Jacobian product
    with respect to the vector: torch does not nest forward mode outside of torch.func."""
    places = [n for n, x in enumerate(tangents) if x is not None]
    results: Any = function(*inputs)
    given = [n for n, x in enumerate(results) if x is not None and x.is_floating_point()]
    some = _function_of(function, inputs, places, given)
    pull: Any = torch.func.vjp(some, *[inputs[n] for n in places])[1]
    push: Any = torch.func.vjp(pull, tuple(torch.zeros_like(results[n]) for n in given))[1]
    (found,) = push(tuple(tangents[n] for n in places))
    of = dict(zip(given, found, strict=True))
    return [of.get(n) for n in range(len(results))]


def _function_of(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    places: Sequence[int],
    given: Sequence[int],
) -> Callable[..., tuple[Any, ...]]:
    """The results `given` of a function of the inputs at `places`."""

    def some(*moved: Tensor) -> tuple[Any, ...]:
        every = [*inputs]
        for n, x in zip(places, moved, strict=True):
            every[n] = x
        results = function(*every)
        return tuple(results[n] for n in given)

    return some
