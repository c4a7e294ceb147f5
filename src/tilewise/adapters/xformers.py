"""xformers.ops.memory_efficient_attention and its bias classes, computed by tilewise.

The biases may be xformers' own (of 0.0.35; with others it warns once), known by their names, or those of this module,
for where xformers is not installed. Paged biases, and any others that are not supported, raise AttentionError.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..errors import AttentionError, shown
from ..mods.dropout import is_whole
from ..mods.modifier import mask_mod
from ..validation.dense import tensor
from ..validation.versions import check_version
from .segments import used
from .xformers_masks import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    SeqInfo,
)

FAR = 2**30
TESTED = (0, 0, 35)


@mask_mod
def from_top_left(b, h, q_idx, kv_idx, window):  # type: ignore[no-untyped-def]
    """Causal, with query i at key i, and a window.

    Args:
        window: keys that a query sees, its own included.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `window` is not a number or a tensor.
    """
    return (kv_idx <= q_idx) & (kv_idx > q_idx - window)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """xformers' function, computed by tilewise.

    >>> q = torch.randn(1, 7, 4, 16)
    >>> mask = BlockDiagonalMask.from_seqlens([3, 4]).make_causal()
    >>> memory_efficient_attention(q, q, q, mask).shape
    torch.Size([1, 7, 4, 16])

    Args:
        query: (B, M, H, K), or (B, M, K) of one head, or (B, M, G, H, K) of grouped heads.
        key: (B, N, H, K), with the axes of query.
        value: (B, N, H, Kv), with the axes of query.
        attn_bias: a tensor that is added to the scores and broadcasts to (B, H, M, N), or one of the classes of this
            module or of xformers. Default: none.
        p: probability that a softmax weight is dropped. Default 0.
        scale: factor of the scores. Default: 1 / sqrt(K).
        op: a kernel of xformers: ignored.
        output_dtype: dtype of the result. Default: that of query.

    Returns:
        A tensor with the axes of query and the last size of value.

    Raises:
        AttentionError: an argument is not as above, or attn_bias is of another class (pages are not supported).
    """
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise AttentionError("output_dtype", shown(output_dtype), "a torch.dtype, or None")
    if query.dim() == 5 and k.shape[2] == q.shape[2] and key.stride(3) == value.stride(3) == 0:
        k, v = key[:, :, :, 0], value[:, :, :, 0]  # heads of a group, which share what is expanded
    options: dict[str, Any] = {"scale": scale, "dropout_p": p}
    named = type(attn_bias).__name__ in BANDS  # some of xformers' classes were tensors once
    if attn_bias is None or (isinstance(attn_bias, Tensor) and not named):
        options["bias"] = None if attn_bias is None else _bias(attn_bias, query)
        out = attention(q, k, v, layout="bshd", **options)
    else:
        if type(attn_bias).__module__.startswith("xformers."):
            check_version("xformers", sys.modules["xformers"].__version__, TESTED, TESTED)
        out = _of_class(q, k, v, attn_bias, options, query)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype)  # type: ignore[no-any-return]


def _four_axes(name: str, x: Tensor) -> Tensor:
    if tensor(name, x).dim() not in (3, 4, 5):
        raise AttentionError(f"shape of {name}", tuple(x.shape), "3 to 5 axes, (B, M, [G,] [H,] K)")
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _bias(x: Tensor, query: Tensor) -> Tensor:
    """(B, H, M, N) of a tensor that has the axes of the query: (B, M, N) of one head, (B, G, H, M, N) of groups."""
    if query.dim() == 3:
        return x[:, None]
    if x.dim() != 5:
        return x
    own, wanted = x.shape[1:3], query.shape[2:4]
    if 1 in own and own != (1, 1) and all(n in (1, m) for n, m in zip(own, wanted, strict=False)):
        x = x.expand(-1, *wanted, -1, -1)
    return x.flatten(1, 2)


def _of_class(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any], query: Tensor) -> Any:
    name = type(bias).__name__
    if name.startswith("BlockDiagonal") and name in BANDS:
        return _packed(q, k, v, bias, options | BANDS[name](bias))
    if name in BANDS:
        options = options | BANDS[name](bias)
        if "bias" in options:
            options["bias"] = _bias(tensor("bias of attn_bias", options["bias"]), query)
        if "mask_mod" not in options:
            return attention(q, k, v, layout="bshd", **options)
        n = min(k.shape[1], q.shape[1])  # aligned top left: keys past the last query's are seen by none
        options["window"] = None, q.shape[1] - n
        added = options.get("bias")
        options["bias"] = added if added is None or added.shape[-1] == 1 else added[..., :n]
        del options["mask_mod"]
        return attention(q, k[:, :n], v[:, :n], layout="bshd", **options)
    raise AttentionError("attn_bias", name, f"None, a tensor, or one of {', '.join(BANDS)}")


def _packed(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any]) -> Tensor:
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise AttentionError("batch beside a block-diagonal bias", q.shape[0], "1: sequences one after the other")
    for name, x, info in (("query", q, bias.q_seqinfo), ("key", k, bias.k_seqinfo)):
        ends = getattr(info, "seqstart_py", None)
        if ends and ends[-1] != x.shape[1]:
            raise AttentionError(f"tokens of {name}", x.shape[1], f"the {ends[-1]} of attn_bias")
    cu_q, cu_k = (x.seqstart.to(q.device, torch.int32) for x in (bias.q_seqinfo, bias.k_seqinfo))
    lengths = getattr(bias.k_seqinfo, "seqlen", None)
    if lengths is not None:  # of padded keys: what is used of each
        cu_q, cu_k = used(cu_q, cu_k, None, lengths.to(q.device))
    out: Tensor = attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)
    return out[None]


def _window(bias: Any) -> dict[str, Any]:
    left, right = bias.window_left, bias.window_right
    if not is_whole(left) or not is_whole(right):
        raise AttentionError("window of attn_bias", (left, right), "two ints, below 0 for no bound")
    return {"window": (None if left < 0 else left, None if right < 0 else right)}


def _top_left(bias: Any) -> dict[str, Any]:
    if getattr(bias, "q_seqinfo", None) is getattr(bias, "k_seqinfo", bias):  # as many queries as keys: both corners
        return _bottom_right(bias)
    return {"mask_mod": from_top_left(_size(bias) or FAR)}


def _bottom_right(bias: Any) -> dict[str, Any]:
    size = _size(bias)
    return {"causal": True, "window": None if size is None else (size - 1, 0)}


def _size(bias: Any) -> int | None:
    size: int | None = getattr(bias, "_window_size", None)
    if size is not None and (not is_whole(size) or size < 1):
        raise AttentionError("window_size of attn_bias", shown(size), "an int above 0")
    return size


# What each class says in tilewise's options.
BANDS: dict[str, Any] = {
    "LowerTriangularMask": _top_left,
    "LowerTriangularMaskWithTensorBias": lambda bias: _top_left(bias) | {"bias": bias._bias},
    "LowerTriangularFromBottomRightMask": _bottom_right,
    "LowerTriangularFromBottomRightLocalAttentionMask": _bottom_right,
    "LocalAttentionFromBottomRightMask": _window,
    "BlockDiagonalMask": lambda bias: {},
    "BlockDiagonalCausalMask": _top_left,
    "BlockDiagonalCausalLocalAttentionMask": _top_left,
    "BlockDiagonalCausalFromBottomRightMask": _bottom_right,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _bottom_right,
    "BlockDiagonalPaddedKeysMask": lambda bias: {},
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _bottom_right,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _bottom_right,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _window,
}
