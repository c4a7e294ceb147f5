"""Offsets of packed sequences of which parts are not used."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import AttentionError
from ..validation.dense import tensor


def used(cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None, used_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Offsets of sequences of which the first tokens alone are used: three of each, the tokens used, the queries left
    over without keys, the keys left over without queries.

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
