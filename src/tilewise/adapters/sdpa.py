"""torch's scaled_dot_product_attention, its signature and its meaning, computed by tilewise; and in its place."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..api import attention
from ..errors import AttentionError, shown
from .arguments import top_left
from .bool_masks import recognised, table

TORCHS: Any = functional.scaled_dot_product_attention  # as it was when this was imported


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recognise: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by tilewise.

    >>> q, k, v = (torch.randn(2, 8, 128, 64) for _ in range(3))
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torchs = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ours, torchs, atol=1e-5)
    True

    A row that is masked out entirely gives 0, as in torch. Jagged nested tensors (B, H, j, E) are accepted, without a
    mask.

    Args:
        query: (..., H, L, E). Leading axes of the three broadcast.
        key: (..., Hk, S, E).
        value: (..., Hk, S, Ev).
        attn_mask: broadcasts to (..., H, L, S). Bools are True where a pair is visible; floats are added to the scores
            and differentiable. Or torch's CausalBias. Default: none. Not with is_causal.
        dropout_p: probability that a softmax weight is dropped. The random numbers come from torch's generator, but
            torch's kernels drop other pairs. Default 0.
        is_causal: if True, query i sees the keys up to i (top-left alignment, as in torch).
        scale: factor of the scores. Default: 1 / sqrt(E).
        enable_gqa: must be True if the numbers of heads differ. H is a multiple of Hk.
        recognise: if True, a bool mask is read, which synchronizes with the GPU: a band becomes a window, and tiles of
            any other mask without a visible pair are skipped. If False, the mask is applied to every pair.

    Returns:
        (..., H, L, Ev), differentiable.

    Raises:
        AttentionError: an argument is not as above.
    """
    if not isinstance(is_causal, bool):
        raise AttentionError("is_causal", shown(is_causal), "True or False")
    if attn_mask is not None and is_causal:
        raise AttentionError("attn_mask", "a mask with is_causal=True", "one of the two")
    if getattr(query, "layout", None) is torch.jagged:
        return _nested(query, key, value, attn_mask, is_causal, {"scale": scale, "dropout_p": dropout_p})
    q, k, v, lead, rank = _four_axes(query, key, value, enable_gqa)
    n_q, n_k = q.shape[2], k.shape[2]
    options: dict[str, Any] = {}
    if type(attn_mask).__name__ == "CausalBias":  # torch.nn.attention.bias: numbers, and a tensor with nothing in it
        is_causal, options["causal"] = _corner(attn_mask, n_q, n_k)
    elif attn_mask is not None:
        mask = _mask(attn_mask, rank, lead, (q.shape[1], n_q, n_k))
        if mask.dtype != torch.bool:
            options["bias"] = mask
        elif recognise:
            options |= recognised(mask, n_q, n_k)
        elif mask.numel():
            options["mask_mod"] = table(mask)
    if is_causal:
        n, options["window"] = top_left(n_q, n_k)
        k, v = (k, v) if n == n_k else (k[:, :, :n], v[:, :, :n])
    out: Tensor = attention(q, k, v, layout="bhsd", scale=scale, dropout_p=dropout_p, **options)
    if rank == 4:
        return out
    return out[0, 0] if rank == 2 else out.reshape(*lead, *out.shape[1:])


def _corner(bias: Any, n_q: int, n_k: int) -> tuple[bool, bool]:
    """Whether torch's CausalBias is aligned top left, or bottom right."""
    if (bias.seq_len_q, bias.seq_len_kv) != (n_q, n_k):
        raise AttentionError("lengths of attn_mask", (bias.seq_len_q, bias.seq_len_kv), f"query's and key's {n_q, n_k}")
    top_left = bias.variant.name == "UPPER_LEFT"
    return top_left, not top_left


def _nested(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, options: dict[str, Any]) -> Tensor:
    """Jagged (B, H, j, E)."""
    if mask is not None:
        raise AttentionError("attn_mask", "a mask with nested tensors", "None")
    if is_causal and any(x.layout is not torch.jagged or x.shape[2] != query.shape[2] for x in (key, value)):
        raise AttentionError(
            "is_causal", "queries and keys of different lengths", "nested tensors with the same offsets"
        )
    out: Tensor = attention(query, key, value, layout="bhsd", causal=is_causal, **options)
    return out


def _four_axes(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, torch.Size, int]:
    """q, k and v as (B, heads, tokens, dim), the leading axes that B stands for, and how many axes the caller sees."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2 or x.layout is not torch.strided:
            raise AttentionError(name, _what(x), "a tensor (..., heads, tokens, dim), dense, or jagged of all three")
    rank = max(query.dim(), key.dim(), value.dim())
    q, k, v = (x[(None,) * (max(rank, 3) - x.dim())] for x in (query, key, value))
    heads, k_heads, v_heads = (x.shape[-3] for x in (q, k, v))
    if enable_gqa:
        shared = k_heads if k_heads == v_heads else math.lcm(k_heads, v_heads)  # which torch.compile does not trace
        if shared and heads % shared:
            raise AttentionError("heads of query", heads, f"a multiple of key's {k_heads} and value's {v_heads}")
        k, v = (x if x.shape[-3] == shared else x.repeat_interleave(shared // x.shape[-3], -3) for x in (k, v))
    else:
        most = max(heads, k_heads, v_heads)
        if any(n not in (1, most) for n in (heads, k_heads, v_heads)):
            found = f"{heads} of query, {k_heads} of key, {v_heads} of value"
            raise AttentionError("heads", found, "the same of all, or enable_gqa=True")
        q = q.expand(*q.shape[:-3], most, -1, -1)
        if k_heads != v_heads:
            k, v = (x.expand(*x.shape[:-3], most, -1, -1) for x in (k, v))
    leads = [x.shape[:-3] for x in (q, k, v)]
    if leads[0] == leads[1] == leads[2]:
        lead = leads[0]
    else:
        try:
            lead = torch.broadcast_shapes(*leads)
        except RuntimeError as error:
            raise AttentionError(
                "leading axes of query, key and value", [*map(tuple, leads)], "some to match"
            ) from error
        q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    if len(lead) != 1:
        q, k, v = (x[None] if not lead else x.flatten(0, -4) for x in (q, k, v))
    return q, k, v, lead, rank


def _what(x: Any) -> Any:
    """What an error says about an argument that is not a dense tensor."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "nested" if x.is_nested else tuple(x.shape) if x.layout is torch.strided else x.layout


def _mask(given: Any, rank: int, lead: torch.Size, sizes: tuple[int, int, int]) -> Tensor:
    """The mask as (B, H, L, S), each axis 1 where it broadcasts."""
    if not isinstance(given, Tensor) or not (given.dtype == torch.bool or given.is_floating_point()):
        found = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise AttentionError("attn_mask", found, "a tensor of bools (True is seen) or of floats (to add)")
    mask: Tensor = given
    whole = (*lead, *sizes)[-rank:]
    short = len(whole) - mask.dim()
    if short < 0 or any(n not in (1, size) for n, size in zip(mask.shape, whole[short:], strict=True)):
        raise AttentionError("shape of attn_mask", tuple(mask.shape), f"one that broadcasts to {whole}")
    mask = mask[(None,) * (max(short, 0) + len(lead) + 3 - rank)]
    outer = mask.shape[: len(lead)]
    if len(lead) == 1:
        return mask
    if all(n == 1 for n in outer):
        return mask[None] if not lead else mask.flatten(0, -4)
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)


@contextmanager
def replaces_sdpa(*, recognise: bool = False) -> Iterator[None]:
    """Context manager: torch's scaled_dot_product_attention is computed by tilewise within it.

    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    >>> x = torch.randn(2, 10, 32)
    >>> with replaces_sdpa():
    ...     ours = layer(x)
    >>> torch.allclose(ours, layer(x), atol=1e-5)
    True

    `replace_sdpa` says what is replaced.

    Args:
        recognise: as in `scaled_dot_product_attention`.

    Yields:
        None.
    """
    undo = _replace(recognise)
    try:
        yield
    finally:
        undo()


def replace_sdpa(*, recognise: bool = False) -> None:
    """Replaces torch's scaled_dot_product_attention by tilewise's: one line at the start of a program.

    >>> import torch, tilewise
    >>> theirs = torch.nn.functional.scaled_dot_product_attention
    >>> with tilewise.replaces_sdpa():  # the same, until the end of the block
    ...     torch.nn.functional.scaled_dot_product_attention is theirs
    False

        tilewise.replace_sdpa()
        import timm, x_transformers, ...

    It replaces the function in torch.nn.functional, also where modules have imported it by name.
    torch.nn.MultiheadAttention and TransformerEncoderLayer then use it too, and their fused evaluation is turned off.
    Calls that tilewise does not support raise AttentionError. Functions that torch.compile has compiled before keep
    torch's.

    Args:
        recognise: as in `scaled_dot_product_attention`.
    """
    _replace(recognise)


def _replace(recognise: bool) -> Any:
    """Puts ours in torch's place; returns the function that ends it. What was there returns with the last one to end,
    in whatever order they do: threads may each have theirs, and all see the latest."""

    @wraps(scaled_dot_product_attention)  # an object of its own: see `_put`
    def own(*args: Any, recognise: bool = recognise, **options: Any) -> Tensor:
        return scaled_dot_product_attention(*args, recognise=recognise, **options)

    with _LOCK:
        if not _ACTIVE:
            _BEFORE[:] = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _ACTIVE.append(own)
        _PUT.append(own)
        _put(own)

    def undo() -> None:
        with _LOCK:
            _ACTIVE[:] = [each for each in _ACTIVE if each is not own]
            old, fused = _BEFORE
            _put(_ACTIVE[-1] if _ACTIVE else old)
            if not _ACTIVE:
                _PUT.clear()
                torch.backends.mha.set_fastpath_enabled(fused)

    return undo


_LOCK = threading.Lock()
_ACTIVE: list[Any] = []  # of each replacement that has not ended, the function
_PUT: list[Any] = []  # all functions that were put in torch's place since the first of these began
_BEFORE: list[Any] = []  # torch's function, and whether its fused evaluation was on


def _put(function: Any) -> None:
    """Under every name by which a module has torch's function, or one that was put in its place. Modules are listed
    each time: some are imported in between. Those that import `scaled_dot_product_attention` from tilewise keep it."""
    others = {id(each) for each in (_BEFORE[0], *_PUT)}
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict) and getattr(module, "__name__", "") not in (__name__, "torch._C._nn"):
            for name, value in list(space.items()):
                if id(value) in others:
                    space[name] = function
