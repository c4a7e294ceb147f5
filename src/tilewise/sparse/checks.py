"""Checks that the sparse attentions share, and a rule of vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import settings
from ..call.options import Options
from ..errors import AttentionError, shown
from ..request import Spec
from ..validation.dense import checked_request
from ..validation.offsets import as_int32_offsets

P = ParamSpec("P")
T = TypeVar("T")


def named(function: Callable[P, T]) -> Callable[P, T]:
    """The function. Its errors, also those of `tilewise.attention`, name it and its arguments."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return function(*args, **options)
        except AttentionError as error:
            what, found, expected = error.args
            name = function.__name__
            if f" of {name}" in what:
                raise
            what, expected = (x.replace("cu_seqlens_q", "cu_seqlens") for x in (what, expected))
            raise AttentionError(f"{what} of {name}", found, expected) from None

    return call


def check_sizes(**sizes: int) -> None:
    for name, x in sizes.items():
        if isinstance(x, bool) or not isinstance(x, int) or not 1 <= x < 2**31:
            raise AttentionError(name, shown(x), "an int, at least 1 and below 2^31")


def checked_batch(q: Tensor, k: Tensor, v: Tensor, block_size: int, options: Options) -> Spec:
    """The spec of a causal call on batch rows whose tokens come in whole blocks."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(
                f"shape of {name}", found, "4 axes (batch, tokens, heads, dim), or packed sequences and cu_seqlens"
            )
        if x.shape[:2] != q.shape[:2]:
            raise AttentionError(f"batch and tokens of {name}", tuple(x.shape[:2]), f"q's {tuple(q.shape[:2])}")
    check_divides(block_size, q.shape[1])
    spec = checked_request(q, k, v, (), (), options).spec
    _check_heads(q)
    return spec


def checked_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, options: Options) -> tuple[Spec, Tensor]:
    """The spec of a causal call on packed sequences, and their offsets in int32."""
    cu_seqlens = as_int32_offsets(cu_seqlens)
    spec = checked_request(q, k, v, (cu_seqlens, cu_seqlens), (None, None), options).spec
    if len(q) != len(k):
        raise AttentionError("tokens of k", len(k), f"q's {len(q)}")
    _check_heads(q)
    return spec, cu_seqlens


def check_divides(block_size: int, tokens: int) -> None:
    if tokens % block_size:
        raise AttentionError("block_size", block_size, f"a number that divides the {tokens} tokens")


def _check_heads(q: Tensor) -> None:
    if q.shape[-2] == 0:
        raise AttentionError("heads of q", 0, "at least 1")


def check_indices(name: str, function: str, indices: Tensor, last: int | Tensor) -> None:
    """Raises unless the indices (B, S, Hk, n) are -1 or 0 to `last`, one number or (S, 1, 1), and none is there twice.
    On a GPU only if TILEWISE_CHECK=1."""
    if indices.device.type != "cpu" and (torch.compiler.is_compiling() or not settings.checks_contents()):
        return
    wrong = ((indices < -1) | (indices > last)).nonzero()
    if len(wrong):
        b, i, h, n = wrong[0].tolist()
        most = last if isinstance(last, int) else f"{int(last[i])}, the query's own"
        what = f"{name}[{b}, {i}, {h}, {n}] of {function}"
        raise AttentionError(what, int(indices[b, i, h, n]), f"-1 for none, or 0 to {most}")
    ordered = indices.sort(-1).values
    again = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).nonzero()
    if len(again):
        b, i, h, n = again[0].tolist()
        what = f"{name}[{b}, {i}, {h}] of {function}"
        raise AttentionError(what, f"{int(ordered[b, i, h, n])} twice", "no index twice")


def looped(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """A rule of vmap for an op: once for each entry of the batch."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        each = [
            [x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True)]
            for n in range(info.batch_size)
        ]
        return torch.stack([op(*some) for some in each]), 0

    return rule
