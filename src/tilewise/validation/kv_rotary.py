"""Checks the rotary embedding of new tokens, and tensors of integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_request import Rotary
from ..request import has_address
from .dense import resolved, tensor


def integers(name: str, x: Tensor, q: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)) -> None:
    if tensor(name, x).dtype not in dtypes:
        raise AttentionError(f"dtype of {name}", x.dtype, " or ".join(map(str, dtypes)))
    if x.device != q.device and not q.is_meta:
        raise AttentionError(f"device of {name}", x.device, f"q's {q.device}")


def checked_rotary(
    rotary: Any, k_new: Tensor, q: Tensor | None, offsets: tuple[Tensor | None, Tensor | None]
) -> Rotary:
    """The rotary embedding of k_new and q. `offsets`: cu_seqlens_q and cu_seqlens_new, as given."""
    if not isinstance(rotary, Rotary):
        raise AttentionError("rotary", type(rotary).__name__, "tilewise.Rotary(cos, sin)")
    cos, sin, interleaved, positions, q_positions = rotary
    if not isinstance(interleaved, bool):
        raise AttentionError("rotary interleaved", type(interleaved).__name__, "True or False")
    cos, sin = resolved(cos), resolved(sin)
    for name, x in (("cos", cos), ("sin", sin)):
        if tensor(f"rotary {name}", x).dim() != 2 or not x.is_floating_point() or not x.shape[0]:
            raise AttentionError(f"rotary {name}", f"{x.dtype} {tuple(x.shape)}", "floats (positions, width / 2)")
        if x.device != k_new.device:
            raise AttentionError(f"device of rotary {name}", x.device, f"{k_new.device}, as the other tensors")
    if cos.shape != sin.shape or not 1 <= 2 * cos.shape[1] <= k_new.shape[-1]:
        expected = f"equal shapes (positions, width / 2) with width at most the head dim {k_new.shape[-1]}"
        raise AttentionError("shapes of rotary cos and sin", (tuple(cos.shape), tuple(sin.shape)), expected)
    tokens = k_new.shape[:-2].numel()
    queries = None if q is None else q.shape[:-2].numel()
    for name, at, n in (("positions", positions, tokens), ("q_positions", q_positions, queries)):
        if at is not None:
            integers(f"rotary {name}", at, k_new)
            if at.numel() != n:
                raise AttentionError(f"shape of rotary {name}", tuple(at.shape), f"{n} integers, one for each token")
    if positions is not None and q_positions is None and q is not None and not _is_one_to_one(q, k_new, offsets):
        expected = f"{queries} integers: there are {tokens} new tokens, whose positions do not fit the queries"
        if queries == tokens:
            expected = f"{queries} integers: cu_seqlens_new is not cu_seqlens_q, so positions are of new tokens only"
        raise AttentionError("rotary q_positions", "None", expected)
    flat = [None if x is None else x.flatten().contiguous() for x in (positions, q_positions)]
    return Rotary(cos.contiguous(), sin.contiguous(), interleaved, *flat)


def _is_one_to_one(q: Tensor, k_new: Tensor, offsets: tuple[Tensor | None, Tensor | None]) -> bool:
    """Whether every query comes with a new key, so that the positions of keys are those of queries. Offsets on a GPU
    are not read here: `check_kv` compares them (`check_positions`)."""
    if q.shape[:-2] != k_new.shape[:-2]:
        return False
    cu_q, cu_new = offsets
    if q.dim() == 4 or cu_new is None or cu_q is cu_new:
        return True
    if cu_q is None:
        return False
    if torch.compiler.is_compiling() or not (has_address(cu_q) and has_address(cu_new)):
        return True
    return cu_q.device.type != "cpu" or cu_new.device.type != "cpu" or torch.equal(cu_q, cu_new)


def check_positions(rotary: Rotary | None, cu_q: Tensor | None, cu_new: Tensor | None) -> None:
    """Raises if the positions of packed new tokens, which the queries have too, are those of other tokens."""
    if rotary is None or rotary.positions is None or rotary.q_positions is not None or cu_q is None or cu_new is None:
        return
    if cu_q.tolist() != cu_new.tolist():
        expected = "given, because cu_seqlens_new is not cu_seqlens_q: positions are of new tokens only"
        raise AttentionError("rotary q_positions", "None", expected)
