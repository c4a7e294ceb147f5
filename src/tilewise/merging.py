"""The one algebraic fact: partial attention results form a commutative monoid.

A pair (o, lse) over some keys merges with the pair over other keys into the pair over their union, in any order.
Online softmax merges elements, FlashAttention tiles, split-KV decoding chunks of a cache, context parallelism GPUs.
The neutral element is (0, -inf): no keys at all.
"""

from __future__ import annotations

import warnings
from functools import reduce

import torch
from torch import Tensor

from .call.options import Layout
from .errors import AttentionError, shown

State = tuple[Tensor, Tensor]


def merge(*parts: State, layout: Layout | None = None) -> State:
    """Attention over the union of disjoint sets of keys, from `attention(..., return_lse=True)` over each of them.

    >>> # (batch, tokens, heads, dim) and (batch, heads, tokens)
    >>> out, lse = torch.randn(1, 3, 2, 8), torch.randn(1, 2, 3)
    >>> nothing = torch.zeros(1, 3, 2, 8), torch.full((1, 2, 3), -torch.inf)
    >>> same_out, same_lse = merge((out, lse), nothing)
    >>> torch.equal(out, same_out), torch.equal(lse, same_lse)
    (True, True)

    Args:
        parts: (out, lse) of each set of keys, as `attention` or `attention_varlen` return them: out (B, S, H, D) with
            lse (B, H, S), or out (T, H, D) with lse (H, T). Where lse is -inf a part saw no key, and its out is not
            read.
        layout: "bshd" for these shapes, or "bhsd" for out (B, H, S, D) of calls with layout="bhsd". Default: "bshd".
            Give it if there are as many tokens as heads, because both layouts have the same shape then. Without it, a
            part with the strides of a "bhsd" result raises; any other part is taken as "bshd", with a warning.

    Returns:
        (out, lse) over all keys, differentiable. A single part is returned as it is.

    Raises:
        AttentionError: there are no parts, or their shapes, dtypes, devices or layouts do not fit.
    """
    if not parts:
        raise AttentionError("parts to merge", "none", "(out, lse) of at least one")
    if layout not in (None, "bshd", "bhsd"):
        raise AttentionError("layout", shown(layout), "'bshd' (batch, tokens, heads, dim) or 'bhsd'")
    heads_first = layout == "bhsd"
    for n, part in enumerate(parts):
        _check(f"part {n}", part, parts[0], heads_first)
    if layout is None:
        for n, part in enumerate(parts):
            _check_order(f"part {n}", part[0])
    if len(parts) == 1:
        return parts[0]
    dtype = reduce(torch.promote_types, (out.dtype for out, _ in parts))
    exact = torch.promote_types(dtype, torch.float32)  # rounded once, however many there are
    rows = ((out.to(exact), lse if heads_first else lse.mT) for out, lse in parts)
    out, lse = reduce(union, ((out.masked_fill((lse == -torch.inf)[..., None], 0.0), lse) for out, lse in rows))
    return out.to(dtype), lse if heads_first else lse.mT


def union(a: State, b: State) -> State:
    """`merge` of two parts whose lse has the shape of o without its last axis; both broadcast.

    >>> o, lse = torch.randn(3, 8), torch.randn(3)
    >>> nothing = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    >>> all(torch.equal(x, y) for x, y in zip(union((o, lse), nothing), (o, lse)))
    True

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse)·o_a + exp(lse_b - lse)·o_b

    If one lse is +inf, that part has all the weight. If both are, o is nan and lse +inf.
    """
    (o_a, lse_a), (o_b, lse_b) = a, b
    most = torch.maximum(lse_a, lse_b).detach()
    beyond = most == torch.inf
    pivot = most.masked_fill(most.isinf(), 0.0)
    w_a, w_b = (
        torch.where(beyond, (x == torch.inf).to(x.dtype), torch.exp(x.masked_fill(beyond, 0.0) - pivot))
        for x in (lse_a, lse_b)
    )
    l = w_a + w_b
    nothing = l == 0
    l = l.masked_fill(nothing, 1.0).masked_fill((lse_a == torch.inf) & (lse_b == torch.inf), torch.nan)
    o = o_a * (w_a / l)[..., None] + o_b * (w_b / l)[..., None]
    lse = (pivot + l.log()).masked_fill(nothing, -torch.inf).masked_fill(beyond, torch.inf)
    return o.to(torch.promote_types(o_a.dtype, o_b.dtype)), lse


def _check(name: str, part: object, first: State, heads_first: bool) -> None:
    if not (isinstance(part, (tuple, list)) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)):
        raise AttentionError(name, type(part).__name__, "(out, lse), as attention(..., return_lse=True) returns them")
    out, lse = part
    if not out.is_floating_point() or not lse.is_floating_point():
        raise AttentionError(f"dtypes of {name}", (out.dtype, lse.dtype), "floats, as attention returns them")
    if not out.device == lse.device == first[0].device:
        raise AttentionError(f"devices of {name}", (out.device, lse.device), f"those of part 0, {first[0].device}")
    shapes = tuple(out.shape), tuple(lse.shape)
    if heads_first and (out.dim() not in (3, 4) or lse.shape != out.shape[:-1]):
        raise AttentionError(f"shapes of {name}", shapes, "out (B, H, S, D), lse (B, H, S), or both without B")
    if out.dim() not in (3, 4) or lse.dim() != out.dim() - 1:
        raise AttentionError(f"shapes of {name}", shapes, "out (B, S, H, D), lse (B, H, S), or both without B")
    *batch, tokens, heads, _ = out.shape
    if not heads_first and tuple(lse.shape) != (*batch, heads, tokens):
        hint = "; or layout='bhsd', if that is out's" if lse.shape == out.shape[:-1] else ""
        raise AttentionError(
            f"lse of {name}", tuple(lse.shape), f"(.., heads, tokens), {(*batch, heads, tokens)}{hint}"
        )
    if out.shape != first[0].shape:
        raise AttentionError(f"out of {name}", tuple(out.shape), f"that of part 0, {tuple(first[0].shape)}")


def _check_order(name: str, out: Tensor) -> None:
    """Where `layout` was not given and the shape fits both layouts: raise if the strides are those of "bhsd", else
    warn. Python shows a warning once for each place that it comes from."""
    if not out.shape[-3] == out.shape[-2] > 1:
        return
    found = f"none, for out {tuple(out.shape)}, as many tokens as heads"
    expected = "layout='bhsd', if the heads come first; or layout='bshd'"
    if out.stride(-3) < out.stride(-2):
        raise AttentionError(f"layout of {name}", f"{found}, strides {out.stride()}", expected)
    if not torch.compiler.is_compiling():
        warnings.warn(f"layout of merge: found {found}, taken as 'bshd'; expected {expected}", stacklevel=3)
