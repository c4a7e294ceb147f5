"""Checks of what `attention_varlen` has beside `attention`: cu_seqlens, the offsets of packed sequences, and
max_seqlen."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call.options import Options
from ..errors import AttentionError, shown
from ..mods.blocks import BlockMask
from ..mods.dropout import is_whole
from ..mods.program import Mod, check_tables
from ..request import Request, has_address


def check_offsets(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, cu, x in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise AttentionError(f"shape of {name}", tuple(cu.shape), "(B + 1,), starting with 0")
        if cu.dtype != torch.int32:
            raise AttentionError(f"dtype of {name}", cu.dtype, "torch.int32 or torch.int64")
        if cu.device != q.device and not q.is_meta:
            raise AttentionError(f"device of {name}", cu.device, f"q's {q.device}")
        if cu.shape[0] == 1 and x.shape[0] > 0:
            raise AttentionError(f"sequences of {name}", f"none, for {x.shape[0]} tokens", "at least one sequence")
        if is_readable_without_sync(cu):
            check_offset_values(name, cu, x.shape[0])
    if cu_q.shape != cu_k.shape:
        raise AttentionError("length of cu_seqlens_k", cu_k.shape[0], f"cu_seqlens_q's {cu_q.shape[0]}")


def check_offset_values(name: str, cu: Tensor, tokens: int) -> None:
    ends = cu.tolist()
    if ends[0] != 0:
        hint = "0; from lengths n: torch.nn.functional.pad(n.cumsum(0), (1, 0))"
        raise AttentionError(f"start of {name}", ends[0], hint)
    for n, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise AttentionError(f"{name}[{n + 1}]", b, f"at least {name}[{n}], {a}")
    if ends[-1] > tokens:
        raise AttentionError(f"end of {name}", ends[-1], f"at most the {tokens} tokens there are")


def as_int32_offsets(cu: Any) -> Any:
    """cu_seqlens as kernels read them, contiguous int32. Offsets past 31 bits stay larger than any tensor."""
    if not isinstance(cu, Tensor) or cu.layout is not torch.strided:
        return cu
    return (cu.clamp(-1, 2**31 - 1).to(torch.int32) if cu.dtype == torch.int64 else cu).contiguous()


def check_max_seqlens(n_q: Any, n_k: Any) -> None:
    """Checks max_seqlen_q and max_seqlen_k. Every call does, because most signatures do not contain them."""
    for name, n in ("max_seqlen_q", n_q), ("max_seqlen_k", n_k):
        if n is not None and (not is_whole(n) or n < 0):
            raise AttentionError(name, shown(n), "an int >= 0, or None")


def check_lengths(request: Request, max_seqlens: tuple[int | None, int | None], options: Options) -> None:
    """Checks max_seqlen, the tensors of mods and a block mask against the lengths of packed sequences."""
    cu_q, cu_k, mask, score = request.cu_q, request.cu_k, options["mask_mod"], options["score_mod"]
    assert cu_q is not None
    assert cu_k is not None
    if max_seqlens == (None, None) and mask is score is None:
        return
    found = [max((b - a for a, b in pairwise(cu.tolist())), default=0) for cu in (cu_q, cu_k)]
    for side, given, most in zip("qk", max_seqlens, found, strict=True):
        if given is not None and given < most:
            raise AttentionError(f"max_seqlen_{side}", given, f"at least {most}, the length of a sequence")
    if isinstance(mask, BlockMask):
        for name, own, cu in zip(("cu_seqlens_q", "cu_seqlens_k"), mask.cu_seqlens or (), (cu_q, cu_k), strict=False):
            if own.tolist() != cu.tolist():
                raise AttentionError(f"{name} of the block mask", own.tolist(), f"{cu.tolist()}, as in this call")
        mask = mask.mod
    for mod in (mask, score):
        if isinstance(mod, Mod):
            check_tables(mod, (None, None, *found))


def is_readable_without_sync(cu: Tensor) -> bool:
    """Whether its contents can be read without waiting for a device."""
    return cu.device.type == "cpu" and not torch.compiler.is_compiling() and has_address(cu)
