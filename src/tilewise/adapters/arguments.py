"""What adapters share: other libraries' arguments as options of tilewise, windows, and parts of packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.fields import Table
from ..errors import AttentionError
from ..validation.dense import tensor


def ours(table: Table, theirs: Mapping[str, Any], values: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The options of a function from another library's arguments. The table of options has their names; `values`
    converts what has another meaning. None is left out.

    >>> from tilewise.call.fields import ATTENTION
    >>> ours(ATTENTION, {"softmax_scale": 0.5, "softcap": 0.0, "causal": True}, {"softcap": lambda x: x or None})
    {'scale': 0.5, 'causal': True}
    """
    found = {}
    for name, x in theirs.items():
        value = values[name](x) if name in values else x
        if value is not None:
            found[table.own_names.get(name, name)] = value
    return found


def window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """The window of sides that are None or negative where there is no bound."""
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return None if left is right is None else (left, right)


def sliding(size: int | None, causal: bool = True) -> tuple[int, int | None] | None:
    """The window of a query that sees `size` keys on its left, its own included; as many on its right if not causal."""
    return None if size is None else (size - 1, 0 if causal else size - 1)


def top_left(n_q: int, n_k: int) -> tuple[int, tuple[None, int]]:
    """Causal attention whose first query is at the first key, as torch and xformers align it: how many keys are seen,
    the first ones, and the window of a call with these alone.

    >>> top_left(4, 6), top_left(6, 4)
    ((4, (None, 0)), (4, (None, 2)))
    """
    n = n_q if n_k > n_q else n_k
    return n, (None, n_q - n)


def used(cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None, used_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Offsets for sequences that use only their first tokens. Each becomes three sequences: the tokens in use, the
    other queries without keys, and the other keys without queries.

    >>> cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> [x.tolist() for x in used(cu, cu, None, torch.tensor([2, 2]))]
    [[0, 3, 3, 3, 5, 5, 5], [0, 2, 2, 3, 5, 5, 5]]
    """
    all_q, all_k = tensor("cu_seqlens_q", cu_q).diff(), tensor("cu_seqlens_k", cu_k).diff()
    for name, own, x in (("seqused_q", used_q, all_q), ("seqused_k", used_k, all_k)):
        if own is not None and (tensor(name, own).shape != x.shape or own.is_floating_point()):
            found = f"{own.dtype} {tuple(own.shape)}"
            raise AttentionError(name, found, f"integers {tuple(x.shape)}, one for each sequence")
    n_q = all_q if used_q is None else used_q.to(all_q.dtype)
    n_k = all_k if used_k is None else used_k.to(all_k.dtype)
    none = torch.zeros_like(n_q)
    lengths = torch.stack([n_q, all_q - n_q, none], 1), torch.stack([n_k, none, all_k - n_k], 1)
    starts_q, starts_k = (pad(x.flatten().cumsum(0, dtype=torch.int32), (1, 0)) for x in lengths)
    return starts_q, starts_k
