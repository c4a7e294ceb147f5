"""Softmax, from the definition to the form that needs each element only twice.

Every function works on the last dim of a tensor (..., N), so that one call does every row of a matrix. The loops
run over single elements x[..., i]: the number of times an element is read is the number of passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """What a softmax must remember of the elements it has seen: m = max x_i and l = Σ exp(x_i - m)."""

    m: Tensor
    l: Tensor


def naive(x: Tensor) -> Tensor:
    """exp(x_i) / Σ exp(x_j), as defined: overflows where x > 88.7 in float32, 11.1 in float16.

    >>> naive(torch.tensor([1.0, 100.0]))
    tensor([0., nan])
    """
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def safe(x: Tensor) -> Tensor:
    """exp(x_i - m) / Σ exp(x_j - m): no exponent is above 0. It takes three passes: the maximum m, the sum, the
    quotients.

    >>> safe(torch.tensor([3.0, 2.0, 5.0, 1.0]))
    tensor([0.1125, 0.0414, 0.8310, 0.0152])
    """
    n = x.shape[-1]
    m, l = nothing(x)
    for i in range(n):
        m = torch.maximum(m, x[..., i])
    for i in range(n):
        l = l + torch.exp(x[..., i] - m)
    return torch.stack([torch.exp(x[..., i] - m) / l for i in range(n)], -1)


def nothing(x: Tensor) -> State:
    """The state of no elements at all, m = -inf and l = 0: the neutral element of `merge`."""
    zero = x.new_zeros(x.shape[:-1])
    return State(zero - torch.inf, zero)


def merge(a: State, b: State) -> State:
    """The state of all elements of a and b together, in any order: each l is corrected to the common maximum.

    m = max(m_a, m_b);  l = l_a·exp(m_a - m) + l_b·exp(m_b - m)
    """
    m = torch.maximum(a.m, b.m)
    return State(m, a.l * correction(a.m, m) + b.l * correction(b.m, m))


def correction(old: Tensor, new: Tensor) -> Tensor:
    """exp(old - new): 1 where the maximum stays; 0 where there was none, though -inf - (-inf) is no number."""
    return torch.exp(old - new.masked_fill(new == -torch.inf, 0.0))


def online_states(x: Tensor) -> Iterator[State]:
    """The state after each element: maximum and denominator in the same pass.

    >>> for m, l in online_states(torch.tensor([3.0, 2.0, 5.0, 1.0])):
    ...     print(f"{m:.0f} {l:.6f}")
    3 1.000000
    3 1.367879
    5 1.185122
    5 1.203438
    """
    state = nothing(x)
    for i in range(x.shape[-1]):
        state = merge(state, State(x[..., i], torch.ones_like(state.l)))
        yield state


def online(x: Tensor) -> Tensor:
    """Softmax in two passes: one for (m, l), one for the outputs."""
    *_, (m, l) = online_states(x)
    return torch.stack([torch.exp(x[..., i] - m) / l for i in range(x.shape[-1])], -1)


def wrong_local_max_states(x: Tensor) -> Iterator[State]:
    """WRONG, and why `merge` corrects: terms summed under one maximum are kept when the maximum changes.

    >>> states = wrong_local_max_states(torch.tensor([3.0, 2.0, 5.0, 1.0]))
    >>> [round(l.item(), 6) for _, l in states]
    [1.0, 1.367879, 2.367879, 2.386195]
    """
    m, l = nothing(x)
    for i in range(x.shape[-1]):
        m = torch.maximum(m, x[..., i])
        l = l + torch.exp(x[..., i] - m)
        yield State(m, l)


def logsumexp(x: Tensor) -> Tensor:
    """log Σ exp(x_i) = m + log l: all that a later pass needs, since softmax is then exp(x - lse).

    >>> logsumexp(torch.tensor([3.0, 2.0, 5.0, 1.0]))
    tensor(5.1852)
    """
    *_, (m, l) = online_states(x)
    return m + l.log()
