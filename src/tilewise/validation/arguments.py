"""Checks of single arguments: tensors, numbers, and the terms of a score (bias, sinks, slopes, mods, block masks)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError, shown
from ..mods.blocks import BlockMask
from ..mods.builtin import alibi, alibi_per_batch
from ..mods.builtin import softcap as softcap_mod
from ..mods.program import Mod, bound, check_filled, indexed, rows
from ..options import REQUIRED
from ..torch_internals import has_address

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 3.4e38  # of a float32


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


def number(name: str, x: Any, expected: str) -> float:
    """x as a float. A tensor raises, because its gradient would be lost."""
    if isinstance(x, Tensor):
        raise AttentionError(name, shown(x), f"{expected}: call .item() (no gradient flows into it)")
    real = isinstance(x, (int, float)) or (hasattr(x, "__float__") and getattr(x, "shape", ()) == ())
    if not real or isinstance(x, bool):
        raise AttentionError(name, shown(x), expected)
    try:
        found = float(x)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError):
        raise AttentionError(name, shown(x), expected) from None
    if not -math.inf < found < math.inf:  # isfinite, which torch.compile does not trace
        raise AttentionError(name, x, expected)
    return found


def combined_score_mod(
    q: Tensor, sizes: tuple[int, int, int | None, int | None], softcap: Any, score_mod: Any, slopes: Tensor | None
) -> Mod | None:
    """Softcap, score_mod and ALiBi as one mod; None if there is none of them."""
    mods = []
    if softcap is not None:
        softcap = number("softcap", softcap, "a finite number above 0, or None")
        if not 0 < softcap <= LARGEST:
            raise AttentionError("softcap", softcap, "a finite number above 0, or None")
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


def checked_precision(found: Any, q: Tensor) -> str | None:
    """The option `precision` of a call with these queries."""
    if found is None:
        return None
    if not isinstance(found, str) or found != "fp8":
        raise AttentionError("precision", shown(found), "None, or 'fp8' (q, k and v quantised to float8_e4m3fn)")
    if q.dtype == torch.float64:
        raise AttentionError("precision='fp8'", "q in torch.float64", "float16, bfloat16 or float32, or precision=None")
    return "fp8"


def check_block_mask(
    mask: BlockMask,
    sizes: tuple[int, int, int | None, int | None],
    q: Tensor,
    packed: bool,
    band: tuple[int | None, int | None],
) -> None:
    """Raises unless the mask fits a call of these sizes (B, H, Sq, Sk); for packed sequences Sq and Sk are max_seqlen_q
    and max_seqlen_k, or None. The call's band must not exceed the band that the mask was made for."""
    made, fit = ("block_mask", "block_mask_varlen") if packed else ("block_mask_varlen", "block_mask")
    if packed == (mask.tokens is None):
        raise AttentionError("mask_mod", f"a mask made by {made}", f"one made by {fit}, for this kind of call")
    for name, own, size in zip(("B", "H", "Sq", "Sk"), mask.shape, sizes, strict=True):
        is_bound = packed and name in ("Sq", "Sk") and size is not None and own <= size  # max_seqlen may be larger
        if own != size and size is not None and not is_bound and not (own == 1 and name in ("H" if packed else "BH")):
            raise AttentionError(f"{name} of the block mask", own, f"{size}, as in this call")
    if mask.tokens is not None and mask.tokens[0] > q.shape[0]:
        raise AttentionError("tokens of the block mask", mask.tokens[0], f"q's {q.shape[0]}")
    if mask.lists[0].device != q.device and not q.is_meta:
        raise AttentionError("device of the block mask", mask.lists[0].device, f"q's {q.device}")
    if any(own is not None and (side is None or side > own) for own, side in zip(mask.band, band, strict=True)):
        raise AttentionError(
            "window of the block mask, (left, right)",
            mask.band,
            f"the call's {band}, or a wider one: give both the same",
        )


def check_tables(mod: Mod, sizes: Sequence[int | None]) -> None:
    """Raises unless a tensor that a mod indexes by b, h, q_idx or kv_idx has an element for each of its values."""
    for n, axis, index in indexed(mod.key):
        size, found = sizes["bhij".index(index)], mod.tensors[n].shape[axis]
        if size is not None and 1 < found < size:
            name = ("batch row", "head", "query", "key")["bhij".index(index)]
            raise AttentionError(
                f"axis {axis} of tensor {n} of the {mod.kind} mod {mod.name!r}",
                found,
                f"one for each {name}, {size}, or 1",
            )
    for places in rows(mod.key):
        lengths = [mod.tensors[n].shape[axis] for n, axis in places]
        if any(length != lengths[0] for length in lengths):
            raise AttentionError(
                f"rows that the {mod.kind} mod {mod.name!r} reads together",
                f"lengths of {', '.join(map(str, lengths))}",
                "equal lengths: rows are combined element by element",
            )
