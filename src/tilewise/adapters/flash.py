"""flash-attn 2.8 and FlashAttention-3 on tilewise: one mapping of their arguments for both."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..call.fields import ATTENTION, CACHE, Table
from ..errors import AttentionError, shown
from ..kv_cache import append_kv, attention_kv
from ..kv_request import Rotary
from ..mods.dropout import is_whole
from ..mods.modifier import mask_mod
from ..request import MAX_HEAD_DIM
from ..validation.dense import tensor
from .arguments import ours, used, window
from .steps import Plans

Window = tuple[int, int]
F = TypeVar("F", bound=Callable[..., Any])
BOTH_WAYS: Window = (-1, -1)


@mask_mod
def same_chunk(b, h, q_idx, kv_idx, chunk, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    """Each query sees the keys of its own chunk; the last query is at the last key.

    Args:
        chunk: int >= 1, the tokens of a chunk.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `chunk` is not a number or a tensor.
    """
    return (q_idx + (kv_len - q_len)) // chunk == kv_idx // chunk


@mask_mod
def same_chunk_since(b, h, q_idx, kv_idx, chunk, starts, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    """`same_chunk` for sequences padded on the left: chunks count from the first valid key.

    Args:
        chunk: int >= 1, the tokens of a chunk.
        starts: (B,) integers: the first valid key of each sequence.

    Returns:
        A mask mod.

    Raises:
        AttentionError: an argument is not a number or a tensor.
    """
    first = starts[b]
    return (q_idx + (kv_len - q_len) - first) // chunk == (kv_idx - first) // chunk


def _window(given: Any) -> Any:
    """flash-attn converts a window that is a tensor of two integers, which waits for a GPU that holds it."""
    if isinstance(given, Tensor) and tuple(given.shape) == (2,) and not given.is_floating_point():
        given = tuple(given.tolist())
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not pair or not all(side is None or is_whole(side) for side in given):
        raise AttentionError("window_size", shown(given), "(left, right), two ints, -1 for no bound")
    return window(*given)


# What their values mean. The names are in the tables of options.
VALUES: dict[str, Callable[[Any], Any]] = {
    "window_size": _window,
    "softcap": lambda x: x or None,
    "deterministic": lambda x: True if x else None,
    "num_splits": lambda n: 0 if n == 1 else None,  # 1: one split; other numbers change no result
    "return_attn_probs": bool,
    "return_softmax_lse": bool,
}


def options_of(table: Table, theirs: dict[str, Any]) -> dict[str, Any]:
    """The options of a table's function."""
    chunk, starts = theirs.pop("attention_chunk", 0), theirs.get("cache_leftpad")
    for name in ("q_descale", "k_descale", "v_descale"):
        if theirs.pop(name, None) is not None:
            raise AttentionError(name, "a tensor", "None: FP8 descale factors are not supported")
    if not is_whole(chunk) or chunk < 0:
        raise AttentionError("attention_chunk", shown(chunk), "an int >= 0 (0: no chunks)")
    options = ours(table, theirs, VALUES)
    if chunk:
        first = None if starts is None else tensor("cache_leftpad", starts)
        options["mask_mod"] = same_chunk(chunk) if first is None else same_chunk_since(chunk, first)
    return options


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor] | None = None,
    *,
    seqused: tuple[Tensor | None, Tensor | None] = (None, None),
    qv: Tensor | None = None,
    **theirs: Any,
) -> Any:
    """`tilewise.attention`, or with the offsets of queries and keys `tilewise.attention_varlen`.

    Args:
        seqused: how many queries and keys each sequence uses; None for all.
        qv: queries that are multiplied with the values.
        theirs: their other arguments.
    """
    options = options_of(ATTENTION, theirs)
    q, k = with_qv(q, k, v, qv)
    if offsets is None:
        return attention(q, k, v, layout="bshd", **options)
    if seqused != (None, None):
        offsets = used(*offsets, *seqused)
    return attention_varlen(q, k, v, *offsets, **options)


def call_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Any,
    *,
    new: tuple[Tensor | None, Tensor | None] = (None, None),
    rotary: tuple[Tensor | None, Tensor | None, bool] = (None, None, True),
    rotary_lengths: Any = None,
    qv: Tensor | None = None,
    plans: Plans | None = None,
    **theirs: Any,
) -> Any:
    """`tilewise.attention_kv`.

    Args:
        new: k and v that are written into the cache first.
        rotary: cos, sin and interleaved. flash-attn rotates the i-th query by the position of the i-th new key if the
            call is causal or has a window (also if there are more or fewer new keys than queries), and all queries by
            the position of the first new key otherwise.
        rotary_lengths: the position of each sequence's first new key, if not its length in the cache.
        qv: queries that are multiplied with the values.
        plans: plans from `get_scheduler_metadata`.
        theirs: their other arguments.
    """
    options = options_of(CACHE, theirs)
    (k, v), (cos, sin, interleaved) = new, rotary
    if (k is None) != (v is None) or (k is None and cos is not None):
        raise AttentionError("k and v", "only one of them, or rotary_cos without them", "both")
    if (cos is None) != (sin is None):
        raise AttentionError("rotary_cos and rotary_sin", "only one of them", "both, or neither")
    for name, x in (("q", q), ("k_cache", k_cache), *((("k", k), ("v", v)) if k is not None else ())):
        tensor(name, x)
    if plans is not None and not isinstance(plans, Plans):
        raise AttentionError("scheduler_metadata", type(plans).__name__, "what get_scheduler_metadata returns")
    if lengths is None:
        table = options.get("page_table")
        pages = 1 if table is None else tensor("page_table", table).shape[-1]
        lengths = pages * k_cache.shape[1] - (0 if k is None else k.shape[1])
    if k is not None:
        options |= {"k_new": k, "v_new": v}
    if cos is not None and sin is not None:
        options["rotary"] = Rotary(cos, sin, interleaved)
        banded = options["causal"] or "window" in options
        alike = k is not None and q.shape[:-2] == k.shape[:-2] and "cu_seqlens_new" not in options
        if rotary_lengths is not None or not banded or not alike:
            cu_q, cu_new = options.get("cu_seqlens_q"), options.get("cu_seqlens_new", options.get("cu_seqlens_q"))
            batch = q.shape[0] if cu_q is None else tensor("cu_seqlens_q", cu_q).shape[0] - 1
            own = _starts(lengths if rotary_lengths is None else rotary_lengths, q, batch)
            places = {"positions": _positions(k, cu_new, own), "q_positions": _positions(q, cu_q, own, banded)}
            options["rotary"] = Rotary(cos, sin, interleaved, **places)
    if qv is not None:
        _check_qv(q, k_cache, v_cache, qv)  # before anything is written
        if k is not None:
            q, lengths = _appended(q, k_cache, v_cache, lengths, options)
        q, k_cache = with_qv(q, k_cache, v_cache, qv)
    if plans is not None:
        options["plan"] = plans.of(q, k_cache, v_cache, lengths, options)
    return attention_kv(q, k_cache, v_cache, lengths, **options)


def unpacks(names: str, function: Any, rest: slice) -> Callable[[F], F]:
    """Decorates a function that passes its arguments on: its signature is the names and the rest of `function`'s."""

    def decorate(own: F) -> F:
        first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()]
        own.__signature__ = Signature([*first, *[*signature(function).parameters.values()][rest]])  # type: ignore[attr-defined]
        return own

    return decorate


def _appended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | int]:
    """Write the new tokens of a call, which are removed from `options`. Returns the rotated queries and new lengths."""
    k, v = options.pop("k_new"), options.pop("v_new")
    names = ("cu_seqlens_new", "rotary"), ("cu_seqlens_q", "page_table", "cache_rows")
    given = {name: options.pop(name) for name in names[0] if name in options}
    given |= {name: options[name] for name in names[1] if name in options}
    if k.dim() == 3:
        given.setdefault("cu_seqlens_new", given.get("cu_seqlens_q"))
    rotated = append_kv(k, v, k_cache, v_cache, lengths, q=q, **given)
    assert rotated is not None
    if k.dim() == 4:
        return rotated, lengths + k.shape[1]
    return rotated, (lengths + given["cu_seqlens_new"].diff()).int()


def with_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is q.k + qv.v: concatenated along the head dim."""
    if qv is None:
        return q, k
    _check_qv(q, k, v, qv)
    for first, second, queries in ((k, v, (q, qv)), (v, k, (qv, q))):
        if _is_adjacent(first, second):
            both = first.as_strided((*first.shape[:-1], q.shape[-1] + qv.shape[-1]), first.stride())
            return torch.cat(queries, -1), both
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def _check_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> None:
    dims = tensor("q", q).shape[-1], tensor("qv", qv).shape[-1]
    if qv.shape[:-1] != q.shape[:-1] or dims[1] != tensor("v", v).shape[-1]:
        wanted = f"{(*q.shape[:-1], v.shape[-1])}: q's, with the head dim of v"
        raise AttentionError("shape of qv", tuple(qv.shape), wanted)
    if v.shape[:-1] != tensor("k", k).shape[:-1]:
        raise AttentionError("shape of v", tuple(v.shape), f"k's {tuple(k.shape)} up to the head dim")
    if sum(dims) > MAX_HEAD_DIM:
        what = f"at most {MAX_HEAD_DIM} together: q.k + qv.v is one product of concatenated rows"
        raise AttentionError("head dims of q and qv", f"{dims[0]} + {dims[1]}", what)


def _is_adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether the rows of the second follow those of the first in memory, as parts of one tensor do. False if one
    requires a gradient, which as_strided would not give it."""
    if torch.compiler.is_compiling() or first.requires_grad or second.requires_grad:
        return False
    try:
        memory = [x.untyped_storage().data_ptr() for x in (first, second)]
    except RuntimeError:  # torch.func's tensors have none
        return False
    follows = first.storage_offset() + first.shape[-1] * first.stride(-1) == second.storage_offset()
    return memory[0] == memory[1] and first.stride() == second.stride() and follows


def _starts(given: Any, q: Tensor, batch: int) -> Tensor:
    """The position of each sequence's first token, as a tensor."""
    if is_whole(given):
        return torch.full((), given, device=q.device)
    lengths = tensor("lengths that rotary counts from", given)
    if lengths.is_floating_point() or tuple(lengths.shape) not in ((), (1,), (batch,)):
        found = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise AttentionError("lengths that rotary counts from", found, f"{batch} integers, one for each sequence")
    return lengths.to(q.device)


def _positions(x: Any, cu: Tensor | None, starts: Tensor, consecutive: bool = True) -> Tensor:
    """The position of every token, dense or packed: its sequence's first is at `starts`, the others too or after it."""
    if x.dim() == 4:
        step = torch.arange(x.shape[1], device=x.device) * int(consecutive)
        return starts.expand(x.shape[0])[:, None] + step
    assert cu is not None
    t = torch.arange(x.shape[0], device=x.device)
    b = torch.bucketize(t, cu[1:], right=True).clamp(max=max(cu.shape[0] - 2, 0))
    return starts.expand(cu.shape[0] - 1)[b] + (t - cu[b]) * int(consecutive)
