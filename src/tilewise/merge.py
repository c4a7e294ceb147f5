"""The one algebraic fact: partial attention results form a commutative monoid.

A pair (o, lse) over some keys merges with the pair over other keys into the pair over their union, in any order.
Online softmax merges elements, FlashAttention tiles, split-KV decoding chunks of a cache, context parallelism GPUs.
The neutral element is (0, -inf): no keys at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]


def merge(a: State, b: State) -> State:
    """The attention over the union of two disjoint sets of keys.

    >>> o, lse = torch.randn(3, 8), torch.randn(3)
    >>> nothing = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    >>> all(torch.equal(x, y) for x, y in zip(merge((o, lse), nothing), (o, lse)))
    True

    o has one trailing dim more than lse (the head dim); both must broadcast. Differentiable, even at -inf.

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse)·o_a + exp(lse_b - lse)·o_b
    """
    (o_a, lse_a), (o_b, lse_b) = a, b
    pivot = torch.maximum(lse_a, lse_b).detach()
    pivot = pivot.masked_fill(pivot == -torch.inf, 0.0)
    w_a, w_b = torch.exp(lse_a - pivot), torch.exp(lse_b - pivot)
    l = w_a + w_b
    nothing = l == 0
    l = l.masked_fill(nothing, 1.0)
    o = o_a * (w_a / l)[..., None] + o_b * (w_b / l)[..., None]
    lse = (pivot + l.log()).masked_fill(nothing, -torch.inf)
    return o.to(torch.promote_types(o_a.dtype, o_b.dtype)), lse
