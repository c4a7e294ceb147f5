"""Checks every argument of a call and makes the request of it, before anything is launched.

`attention`, `attention_varlen`, `explain` and `check` call `checked_request`, so they accept the same arguments and
raise the same errors.
"""

from __future__ import annotations

import os
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError, shown
from ..mods.blocks import BlockMask
from ..mods.dropout import as_seed, is_whole
from ..mods.program import Mod
from ..options import Options, options_of
from ..request import MAX_HEAD_DIM, Request, Spec, band
from ..torch_internals import has_address, is_autocast
from .arguments import (
    DTYPES,
    LARGEST,
    check_block_mask,
    check_tables,
    check_term,
    checked_bias,
    checked_mod,
    checked_precision,
    combined_score_mod,
    number,
    perhaps_swapped,
    resolved,
    tensor,
)

OPTIONS_WITH_MAX_SEQLEN = ("bias", "score_mod", "alibi_slopes", "mask_mod")  # their tensors may have such an axis
CHECK_CONTENTS = os.environ.get("TILEWISE_CHECK", "0") not in ("", "0")


def checked_request(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Any, ...], max_seqlens: Any, given: Options, read: bool = False
) -> Request:
    """The checked request of a call.

    Args:
        q, k, v: the tensors.
        cu: (cu_seqlens_q, cu_seqlens_k) of `attention_varlen`; empty for `attention`.
        max_seqlens: (max_seqlen_q, max_seqlen_k) of `attention_varlen`.
        given: the options of the call.
        read: whether to check the contents of tensors too, which waits for a GPU.
    """
    options = options_of(given)
    q, k, v = resolved(q), resolved(k), resolved(v)
    request = packed(q, k, v, cu[0], cu[1], max_seqlens, options) if cu else dense(q, k, v, options)
    if read or CHECK_CONTENTS:
        check_contents(request, max_seqlens, options)
    return request


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Request:
    """A call of `attention`."""
    _check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
    if q.shape[0] != k.shape[0]:
        raise AttentionError("batch of k", k.shape[0], f"q's {q.shape[0]}")
    return request_of(q, k, v, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), options)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_seqlens: tuple[int | None, int | None],
    options: Options,
) -> Request:
    """A call of `attention_varlen`."""
    _check_tensors(q, k, v, rank=3, axes="(tokens, heads, dim)")
    check_max_seqlens(*max_seqlens)
    _check_offset_shapes(q, k, cu_q, cu_k)
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    request = request_of(q, k, v, (cu_q.shape[0] - 1, q.shape[1], *max_seqlens), options, cu_q, cu_k)
    if _is_readable_without_sync(cu_q) and _is_readable_without_sync(cu_k):
        _check_lengths(request, max_seqlens, options)
    return request


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    here: tuple[int, int],
    whole: tuple[int, int],
    documents: int | None,
    options: Options,
) -> Request:
    """A call of `distributed.attention`: a rank has `here` tokens of q and k, and the bias has as many columns as
    `whole` has keys; `documents`, for a packed plan, is the number of batch rows that slopes may have."""
    _check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
    for name, x, n in (("q", q, here[0]), ("k", k, here[1])):
        if x.shape[1] != n:
            raise AttentionError(f"tokens of {name}", x.shape[1], f"the {n} that the plan gives this rank: plan.shard")
    if q.shape[0] != k.shape[0] or (documents is not None and q.shape[0] != 1):
        found = (q.shape[0], k.shape[0])
        raise AttentionError("batch of q and k", found, "equal" if documents is None else "1, of packed documents")
    if options["precision"] is not None:
        raise AttentionError("precision", shown(options["precision"]), "None: distributed calls compute in q's dtype")
    batch = q.shape[0] if documents is None else documents
    return request_of(q, k, v, (batch, q.shape[2], here[0], whole[1]), options)


def check_contents(request: Request, max_seqlens: tuple[int | None, int | None], options: Options) -> None:
    """Checks the contents of a call's tensors. On a GPU this waits for the device."""
    cu_q, cu_k = request.cu_q, request.cu_k
    if cu_q is None or cu_k is None:
        return
    check_offset_values("cu_seqlens_q", cu_q, request.q.shape[0])
    check_offset_values("cu_seqlens_k", cu_k, request.k.shape[0])
    _check_lengths(request, max_seqlens, options)


def _is_readable_without_sync(cu: Tensor) -> bool:
    """Whether its contents can be read without waiting for a device."""
    return cu.device.type == "cpu" and not torch.compiler.is_compiling() and has_address(cu)


def _check_lengths(request: Request, max_seqlens: tuple[int | None, int | None], options: Options) -> None:
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


def check_max_seqlens(n_q: Any, n_k: Any) -> None:
    """Checks max_seqlen_q and max_seqlen_k. Every call does, because most signatures do not contain them."""
    for name, n in ("max_seqlen_q", n_q), ("max_seqlen_k", n_k):
        if n is not None and (not is_whole(n) or n < 0):
            raise AttentionError(name, shown(n), "an int >= 0, or None")


def request_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[int, int, int | None, int | None],
    options: Options,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
) -> Request:
    """The request of tensors that are checked, with options that are not.

    Args:
        q, k, v: the tensors.
        sizes: (B, H, Sq, Sk); for packed sequences Sq and Sk are max_seqlen_q and max_seqlen_k, or None.
        options: the completed options.
        cu_q, cu_k: the offsets of packed sequences.
    """
    if not isinstance(options["backend"], str):
        raise AttentionError("backend", type(options["backend"]).__name__, "a name, as a str")
    for name in ("causal", "return_lse", "return_max_logit", "deterministic"):
        if not isinstance(options[name], bool) and not (name == "deterministic" and options[name] is None):
            raise AttentionError(name, shown(options[name]), "True or False")
    scale, softcap, dropout_p = options["scale"], options["softcap"], options["dropout_p"]
    if scale is not None:
        scale = number("scale", scale, "a finite number (zero and negative are fine), or None for 1/sqrt(D)")
        if abs(scale) > LARGEST and q.dtype != torch.float64:
            raise AttentionError("scale", scale, f"at most {LARGEST:.1e}, which float32 holds")
    dropout_p = number("dropout_p", 0.0 if dropout_p is None else dropout_p, "0 <= p < 1")
    if not 0 <= dropout_p < 1:
        raise AttentionError("dropout_p", dropout_p, "0 <= p < 1")
    seed = options["seed"]
    if dropout_p == 0 and seed is not None:
        raise AttentionError("seed", "one, with dropout_p=0", "dropout_p above 0, or no seed")
    bias, sinks = resolved(options["bias"]), resolved(options["sinks"])
    if bias is not None:
        bias = checked_bias(q, sizes, bias)
    if sinks is not None:
        check_term("sinks", sinks, q, [(sizes[1],)])
    known = sizes if cu_q is None else (*sizes[:2], None, None)  # max_seqlen may exceed every length
    score = combined_score_mod(q, known, softcap, options["score_mod"], options["alibi_slopes"])
    deterministic = options["deterministic"]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    named: dict[str, Any] = {"dropout_p": dropout_p, "deterministic": deterministic}
    named["max_logit"] = options["return_max_logit"]
    named["precision"] = checked_precision(options["precision"], q)
    mask = options["mask_mod"]
    blocks: tuple[Tensor, ...] = ()
    if isinstance(mask, BlockMask):
        check_block_mask(mask, sizes, q, cu_q is not None, band(options["causal"], options["window"]))
        blocks, named["mask_block"] = mask.lists, (*mask.block, *mask.shape[:2])
        mask = mask.mod
    if mask is not None:
        mask = checked_mod("mask", mask, q, known)
        named |= {"mask_mod": mask.key, "mask_numbers": mask.numbers, "mask_tensors": len(mask.tensors)}
    if score is not None:
        named |= {"score_mod": score.key, "score_numbers": score.numbers, "score_tensors": len(score.tensors)}
        if cu_q is not None and score.tensors and sizes[2] is not None and sizes[3] is not None:
            named["max_seqlen"] = max(sizes[2], sizes[3])
    spec = Spec.of(
        head_dim=q.shape[-1],
        causal=options["causal"],
        window=options["window"],
        scale=scale,
        backend=options["backend"],
        **named,
    )
    score_tensors, mask_tensors = (() if mod is None else mod.tensors for mod in (score, mask))
    seed = as_seed(seed, q.device) if dropout_p else None
    return Request(q, k, v, spec, bias, sinks, score_tensors, cu_q, cu_k, seed, mask_tensors, blocks)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int, axes: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if tensor(name, x).dim() != rank:
            hint = {3: "; packed sequences are for attention_varlen"}.get(x.dim(), "") if rank == 4 else ""
            raise AttentionError(f"shape of {name}", tuple(x.shape), f"{rank} axes {axes}{hint}")
    dims, k_dims, v_dims = q.shape, k.shape, v.shape
    for name, d in (("q", dims[-1]), ("k", k_dims[-1]), ("v", v_dims[-1])):
        if not 1 <= d <= MAX_HEAD_DIM:
            raise AttentionError(f"head dim of {name}", d, f"1 to {MAX_HEAD_DIM}")
    dtype, device = q.dtype, q.device
    if dtype not in DTYPES:
        raise AttentionError("dtype of q", dtype, " or ".join(map(str, DTYPES)))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise AttentionError(f"dtype of {name}", x.dtype, f"q's {dtype}")
        if x.device != device:
            raise AttentionError(f"device of {name}", x.device, f"q's {device}")
    if k_dims[-1] != dims[-1]:
        raise AttentionError("head dim of k", k_dims[-1], f"q's {dims[-1]}")
    if k_dims[:-1] != v_dims[:-1]:
        raise AttentionError("shape of v", tuple(v_dims), f"k's {axes}, {tuple(k_dims)}, up to the head dim")
    heads, kv_heads = dims[-2], k_dims[-2]
    if heads % kv_heads if kv_heads else heads:
        hint = perhaps_swapped(q)
        raise AttentionError("heads of q", heads, f"a multiple of k's {kv_heads} (each KV head serves a group){hint}")


def _check_offset_shapes(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, cu, x in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        tensor(name, cu)
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise AttentionError(f"shape of {name}", tuple(cu.shape), "(B + 1,), starting with 0")
        if cu.dtype != torch.int32:
            raise AttentionError(f"dtype of {name}", cu.dtype, "torch.int32 or torch.int64")
        if cu.device != q.device and not q.is_meta:
            raise AttentionError(f"device of {name}", cu.device, f"q's {q.device}")
        if cu.shape[0] == 1 and x.shape[0] > 0:
            raise AttentionError(f"sequences of {name}", f"none, for {x.shape[0]} tokens", "at least one sequence")
        if _is_readable_without_sync(cu):
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


def swapped(q: Any, k: Any) -> str | None:
    """A message if q and k look like (batch, heads, tokens, dim), else None."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        return None
    if not (q.shape[2] > q.shape[1] > 1 and k.shape[2] > k.shape[1] > 1):
        return None
    return f"none, for q {tuple(q.shape)} with more heads, {q.shape[2]}, than tokens, {q.shape[1]}"


LAYOUTS = "layout='bhsd' if the tensors are (batch, heads, tokens, dim), else layout='bshd'"


def warn_if_swapped(q: Any, k: Any) -> None:
    """Warns the caller of `attention`. Python shows a warning once for each place that it comes from."""
    found = None if torch.compiler.is_compiling() else swapped(q, k)
    if found is not None:
        warnings.warn(f"layout: found {found}; expected {LAYOUTS}", stacklevel=4)


def to_bshd(q: Tensor, k: Tensor, v: Tensor, layout: str | None = None) -> tuple[Tensor, ...]:
    """q, k and v as "bshd" views, in autocast's dtype if it is active (as torch's scaled_dot_product_attention)."""
    if layout is not None and (not isinstance(layout, str) or layout != "bshd"):
        q, k, v = bhsd_to_bshd(layout, q, k, v)
    if not is_autocast(q) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    if q.dtype is dtype and k.dtype is dtype and v.dtype is dtype:
        return q, k, v
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


def bhsd_to_bshd(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """ "bshd" views of tensors with layout "bhsd". Any other layout raises."""
    if not isinstance(layout, str) or layout != "bhsd":
        raise AttentionError("layout", shown(layout), "'bshd' (batch, tokens, heads, dim) or 'bhsd'")
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor) or x.dim() != 4:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name}", found, "4 axes (batch, heads, tokens, dim)")
    return tuple(x.transpose(1, 2) for x in tensors)
