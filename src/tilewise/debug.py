"""Attention weights, to look at: no kernel holds them, so they are computed here by the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from .backends.reference.scored import weights_of
from .call.fields import ATTENTION, REQUIRED, misplaced
from .call.options import Layout, Options
from .errors import AttentionError, shown
from .validation import dense as validation


@ATTENTION.shown
def weights(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    *others: Any,
    rows: int | Sequence[int] | Tensor | None = None,
    layout: Layout | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """The softmax weights of some queries in `attention(q, k, v, ...)`, for debugging.

    >>> import torch
    >>> q, k, v = (torch.zeros(1, 4, 2, 8) for _ in range(3))
    >>> weights(q, k, v, rows=[0, 1], causal=True)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000]])

    They are computed in torch operations on the device of q, whatever the backend of the call, and have no gradient.
    Hidden keys have weight 0. With sinks a row sums to less than 1; with dropout, weights are those after it.

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`. It is checked, and its values are not read.
        rows: indices of queries, an int or several. Default: all of them, in O(Sq Sk) memory.
        layout: as in `attention`.
        options: as in `attention`. return_lse and backend have no effect.

    Returns:
        (B, H, rows, Sk) in float32 (float64 for float64).

    Raises:
        AttentionError: an argument is not as in `attention`, or a row is not one of the queries.
    """
    if others:
        raise misplaced("weights", others)
    q, k, v = validation.to_bshd(q, k, v, layout)
    request = validation.checked_request(q, k, v, (), (), options)
    chosen = _indices(rows, q.shape[1], torch.device("cpu") if q.is_meta else q.device)
    if q.is_meta:  # shapes alone
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(q.shape[0], q.shape[2], len(chosen), k.shape[1], dtype=dtype)
    return weights_of(request, chosen)


def _indices(rows: Any, n: int, device: torch.device) -> Tensor:
    if rows is None:
        return torch.arange(n, device=device)
    try:
        found = torch.as_tensor(rows, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise AttentionError("rows", shown(rows), "indices of queries") from None
    found = found.reshape(-1).long() if not found.numel() else found.reshape(-1)
    if found.dtype not in (torch.int32, torch.int64):
        raise AttentionError("rows", f"{found.dtype}", "indices of queries, ints")
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < n:
        raise AttentionError("rows", f"{int(found.min())} to {int(found.max())}", f"0 to {n - 1}")
    return found.long()
