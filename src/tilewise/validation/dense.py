"""Checks every argument of a call and makes the request of it, before anything is launched.

`attention`, `attention_varlen`, `explain` and `check` call `checked_request`, so they accept the same arguments and
raise the same errors. The checks of single arguments follow: tensors, numbers and the terms of a score.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..call.fields import ATTENTION, LARGEST, REQUIRED
from ..call.options import Options
from ..errors import AttentionError, shown
from ..mods.blocks import BlockMask, check_block_mask
from ..mods.builtin import alibi, alibi_per_batch
from ..mods.builtin import softcap as softcap_mod
from ..mods.dropout import as_seed
from ..mods.program import Mod, bound, check_filled, check_tables
from ..mods.trees import check_tree
from ..request import MAX_HEAD_DIM, TENSOR_TYPES, Request, Spec, band, has_address
from . import offsets

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPTIONS_WITH_MAX_SEQLEN = ("bias", "score_mod", "alibi_slopes", "mask_mod")  # their tensors may have such an axis


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
    options = ATTENTION.completed(given)
    q, k, v = resolved(q), resolved(k), resolved(v)
    request = packed(q, k, v, cu[0], cu[1], max_seqlens, options) if cu else dense(q, k, v, options)
    # torch.compile would guard on the number of environment variables
    if read or (not torch.compiler.is_compiling() and settings.checks_contents()):
        check_contents(request, max_seqlens, options)
    return request


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Request:
    """A call of `attention`."""
    check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
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
    check_tensors(q, k, v, rank=3, axes="(tokens, heads, dim)")
    offsets.check_max_seqlens(*max_seqlens)
    offsets.check_offsets(q, k, tensor("cu_seqlens_q", cu_q), tensor("cu_seqlens_k", cu_k))
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    request = request_of(q, k, v, (cu_q.shape[0] - 1, q.shape[1], *max_seqlens), options, cu_q, cu_k)
    if offsets.is_readable_without_sync(cu_q) and offsets.is_readable_without_sync(cu_k):
        offsets.check_lengths(request, max_seqlens, options)
    return request


def check_contents(request: Request, max_seqlens: tuple[int | None, int | None], options: Options) -> None:
    """Checks the contents of a call's tensors. On a GPU this waits for the device."""
    cu_q, cu_k = request.cu_q, request.cu_k
    if cu_q is None or cu_k is None:
        return
    offsets.check_offset_values("cu_seqlens_q", cu_q, request.q.shape[0])
    offsets.check_offset_values("cu_seqlens_k", cu_k, request.k.shape[0])
    offsets.check_lengths(request, max_seqlens, options)


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
    scale, softcap, dropout_p = options["scale"], options["softcap"], options["dropout_p"]
    if scale is not None and abs(scale) > LARGEST and q.dtype != torch.float64:
        raise AttentionError("scale", scale, f"at most {LARGEST:.1e}, which float32 holds")
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
    precision = options["precision"]
    if precision is not None and q.dtype == torch.float64:
        expected = "float16, bfloat16 or float32, or precision=None"
        raise AttentionError(f"precision={precision!r}", "q in torch.float64", expected)
    named: dict[str, Any] = {"dropout_p": float(dropout_p), "deterministic": deterministic}
    named["max_logit"] = options["return_max_logit"]
    named["precision"] = precision
    mask = options["mask_mod"]
    blocks: tuple[Tensor, ...] = ()
    if isinstance(mask, BlockMask):
        check_block_mask(mask, sizes, q, cu_q is not None, band(options["causal"], options["window"]))
        # `index`: constants, which torch.compile's symbols are not
        blocks, named["mask_block"] = mask.lists, tuple(map(index, (*mask.block, *mask.shape[:2])))
        mask = mask.mod
    elif cu_k is not None and isinstance(mask, Mod):  # calls with a KV cache have no cu_k
        check_tree(mask, k.shape[0], cu_k.shape[0] - 1)
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


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int, axes: str) -> None:
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


def swapped(q: Any, k: Any) -> str | None:
    """A message if q and k look like (batch, heads, tokens, dim), else None."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        return None
    if not (q.shape[2] > q.shape[1] > 1 and k.shape[2] > k.shape[1] > 1):
        return None
    return f"none, for q {tuple(q.shape)} with more heads, {q.shape[2]}, than tokens, {q.shape[1]}"


LAYOUTS = "layout='bhsd' if the tensors are (batch, heads, tokens, dim), else layout='bshd'"


def warn_if_swapped(q: Any, k: Any) -> bool:
    """Warns the caller of `attention`, and returns whether it did. Python shows a warning once for each place that it
    comes from."""
    found = None if torch.compiler.is_compiling() else swapped(q, k)
    if found is not None:
        warnings.warn(f"layout: found {found}; expected {LAYOUTS}", stacklevel=4)
    return found is not None


def to_bshd(q: Tensor, k: Tensor, v: Tensor, layout: str | None = None) -> tuple[Tensor, ...]:
    """q, k and v as "bshd" views, in autocast's dtype if it is active (as torch's scaled_dot_product_attention)."""
    if layout is not None and (not isinstance(layout, str) or layout != "bshd"):
        q, k, v = bhsd_to_bshd(layout, q, k, v)
    if not is_cast(q, k, v) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


def is_cast(q: Any, k: Any, v: Any) -> bool:
    """Whether autocast is on for the device of q, and one of the three has another dtype than it computes in."""
    if type(q) in TENSOR_TYPES and q.is_cuda:
        device = "cuda"
    elif isinstance(q, Tensor) and not q.is_meta:
        device = q.device.type
    else:
        return False
    if not torch.is_autocast_enabled(device):
        return False
    dtype = torch.get_autocast_dtype(device)
    return not (q.dtype is dtype and getattr(k, "dtype", None) is dtype and getattr(v, "dtype", None) is dtype)


def bhsd_to_bshd(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """ "bshd" views of tensors with layout "bhsd". Any other layout raises."""
    if not isinstance(layout, str) or layout != "bhsd":
        raise AttentionError("layout", shown(layout), "'bshd' (batch, tokens, heads, dim) or 'bhsd'")
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor) or x.dim() != 4:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name}", found, "4 axes (batch, heads, tokens, dim)")
    return tuple(x.transpose(1, 2) for x in tensors)


def resolved(x: Any) -> Any:
    """A tensor whose memory holds its values: a view with the negative bit set, or a zero tensor, is copied. The
    dispatcher does this for registered ops; kernels that are launched directly read memory."""
    if type(x) is not Tensor or torch.compiler.is_compiling() or x.layout is not torch.strided or not has_address(x):
        return x
    if x.is_neg():
        return x.resolve_neg()
    return x + 0 if x.data_ptr() == 0 and x.numel() and not x.is_meta else x


def tensor(name: str, x: Any) -> Tensor:
    """x, if it is a strided tensor. Raises otherwise."""
    if not isinstance(x, Tensor):
        hint = ""
        if isinstance(x, (Mod, BlockMask)):
            hint = "; mods are given as score_mod= or mask_mod=, block masks as mask_mod="
        elif hasattr(x, "__array__") or isinstance(x, (list, tuple)):
            hint = "; torch.as_tensor(x) makes one"
        elif x is REQUIRED and name == "cu_seqlens_k":
            hint = "; give cu_seqlens_q again if queries and keys have the same lengths"
        raise AttentionError(name, type(x).__name__, f"a torch.Tensor{hint}")
    if x.is_nested or x.layout is not torch.strided:
        hint = "use attention_varlen on .values() and .offsets()" if x.is_nested else "call .to_dense()"
        raise AttentionError(f"layout of {name}", "nested" if x.is_nested else x.layout, f"torch.strided: {hint}")
    return x


def combined_score_mod(
    q: Tensor, sizes: tuple[int, int, int | None, int | None], softcap: Any, score_mod: Any, slopes: Tensor | None
) -> Mod | None:
    """Softcap, score_mod and ALiBi as one mod; None if there is none of them."""
    mods = []
    if softcap is not None:
        mods.append(softcap_mod(softcap))
    if score_mod is not None:
        mods.append(checked_mod("score", score_mod, q, sizes))
    if slopes is not None:
        batch, heads, _, _ = sizes
        check_term("alibi_slopes", slopes, q, [(heads,), (batch, heads)])
        slopes = resolved(slopes)
        if not slopes.numel():  # no head or batch row: kernels need one element; autograd still reaches the tensor
            slopes = slopes.sum().expand((1,) * slopes.dim())
        mods.append(alibi(slopes) if slopes.dim() == 1 else alibi_per_batch(slopes))
    return bound(mods) if mods else None


def checked_bias(q: Tensor, sizes: Sequence[int | None], bias: Tensor) -> Tensor:
    """The bias as (B, H, Sq, Sk) with axes of size 1 where it broadcasts."""
    names = ("B", "H", "Sq", "Sk")
    if tensor("bias", bias).dtype == torch.bool:
        raise AttentionError("dtype of bias", bias.dtype, "floats to add; for a mask of bools see tilewise.mask_mod")
    if bias.dim() > 4:
        raise AttentionError("shape of bias", tuple(bias.shape), f"at most 4 axes, {names}")
    if bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    for name, size, found in zip(names, sizes, bias.shape, strict=True):
        if size is None and found != 1:
            raise AttentionError(f"a bias along {name} of packed sequences", found, "max_seqlen_q and max_seqlen_k too")
        if found not in (1, size):
            raise AttentionError(f"{name} of bias", found, f"{size} or 1{perhaps_swapped(q)}")
    check_term("bias", bias, q, [tuple(bias.shape)])
    return bias


def perhaps_swapped(q: Tensor) -> str:
    """A hint for the error message if there are more heads than tokens."""
    swapped = q.dim() == 4 and q.shape[2] > q.shape[1] > 1  # a step of decoding has one token
    return "; if the tensors are (batch, heads, tokens, dim), pass layout='bhsd'" if swapped else ""


def check_term(name: str, x: Tensor, q: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(tensor(name, x).shape) not in shapes:
        expected = " or ".join(map(str, shapes)) + perhaps_swapped(q)
        raise AttentionError(f"shape of {name}", tuple(x.shape), expected)
    if x.dtype not in DTYPES:
        raise AttentionError(f"dtype of {name}", x.dtype, " or ".join(map(str, DTYPES)))
    if x.device != q.device and not q.is_meta:
        raise AttentionError(f"device of {name}", x.device, f"q's {q.device}")


def checked_mod(kind: str, mod: Any, q: Tensor, sizes: Sequence[int | None]) -> Mod:
    if not isinstance(mod, Mod) or mod.kind != kind:
        raise _no_mod(kind, mod)
    for x in mod.tensors:
        if x.device != q.device and not q.is_meta:
            raise AttentionError(f"device of a tensor of the {kind} mod", x.device, f"q's {q.device}")
    if q.numel() and 0 not in sizes:
        check_filled(mod)
    check_tables(mod, sizes)
    tensors = tuple(map(resolved, mod.tensors))
    return mod if all(a is b for a, b in zip(tensors, mod.tensors, strict=True)) else mod._replace(tensors=tensors)


def _no_mod(kind: str, found: Any) -> AttentionError:
    """The error of a score_mod or mask_mod that is not one."""
    name, expected = f"{kind}_mod", f"a plain function (def or lambda), or one decorated with tilewise.{kind}_mod"
    if isinstance(found, Mod):
        return AttentionError(name, f"a {found.kind} mod", f"it as {found.kind}_mod=")
    if type(found).__name__ == "BlockMask":
        if isinstance(found, BlockMask):
            return AttentionError(name, "a block mask", "it as mask_mod=")
        return AttentionError(name, "torch's BlockMask", "tilewise.compat.flex_attention, or tilewise.block_mask(...)")
    if isinstance(found, Tensor):
        told = shown(found)
        if found.is_floating_point() or kind == "score":
            return AttentionError(name, told, "bias=, for a tensor to add to the scores")
        index = {2: "q_idx, kv_idx", 3: "h, q_idx, kv_idx"}.get(found.dim(), "b, h, q_idx, kv_idx")
        return AttentionError(name, told, f"a function: mask_mod=lambda b, h, q_idx, kv_idx: mask[{index}]")
    hint = ", called with its tensors and numbers first" if hasattr(found, "function") else ""
    return AttentionError(name, shown(found), f"{expected}{hint}")
