"""Multi-head latent attention (MLA) in absorbed form, over one cache of 512 + 64 numbers for each token."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from . import settings
from .call.fields import REQUIRED, show_required
from .call.options import BackendName, PageTable
from .errors import AttentionError
from .kv_cache import attention_kv
from .kv_formats import BYTES, LATENT, WIDTH
from .kv_request import KvPlan
from .validation.dense import tensor
from .validation.kv_rotary import integers


class MlaArguments(NamedTuple):
    """The arguments of `attention_kv` for a call with an MLA cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Any
    options: dict[str, Any]


class MlaOptions(TypedDict, total=False):
    """The options of `attention_mla`."""

    page_table: PageTable
    indices: Tensor | None
    cu_seqlens_q: Tensor | None
    cache_rows: Tensor | None
    causal: bool
    scale: float | None
    k_scale: Tensor | float | None
    sinks: Tensor | None
    out: Tensor | None
    plan: KvPlan | None
    split: int | None
    max_seqlen_q: int | None
    backend: BackendName


@overload
def attention_mla(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor | int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[MlaOptions],
) -> Tensor: ...


@overload
def attention_mla(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor | int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[MlaOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_mla(
    q: Tensor, cache: Tensor, lengths: Tensor | int | None = None, *, return_lse: bool, **options: Unpack[MlaOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


@show_required
def attention_mla(
    q: Tensor = REQUIRED,
    cache: Tensor = REQUIRED,
    lengths: Tensor | int | None = None,
    *,
    page_table: PageTable = None,
    indices: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cache_rows: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    k_scale: Tensor | float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: KvPlan | None = None,
    split: int | None = None,
    max_seqlen_q: int | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention, absorbed: keys of 576 numbers. Their first 512 are also the values.

    New tokens are written before, by `append_kv(new, new[..., :512], cache, cache[..., :512], lengths, ...)`, which can
    rotate the last 64 numbers of the keys and of q. A cache in DeepSeek's fp8 format is given to it as float8_e4m3fn,
    and new tokens as 576 numbers: it writes the bytes that `pack_mla` returns.

    >>> q, cache = torch.randn(2, 1, 16, 576), torch.randn(8, 64, 1, 576)
    >>> table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32)
    >>> lengths = torch.tensor([100, 3], dtype=torch.int32)
    >>> attention_mla(q, cache, lengths, page_table=table).shape
    torch.Size([2, 1, 16, 512])

    Args:
        q: queries (B, Sq, H, 576), or packed (T, H, 576) with cu_seqlens_q.
        cache: (rows, tokens, 1, 576), or with a page table (pages, page size, 1, 576), in q's dtype, or in float16 or
            bfloat16. Or in float8_e4m3fn, float8_e5m2 or int8, with `k_scale`. Or DeepSeek's fp8 format, (.., 656) in
            uint8 or float8_e4m3fn: see `pack_mla`.
        lengths: int32 (B,): tokens of each sequence in the cache, those of this step included. Or one int for all. With
            `indices`, how many of a query's indices count, (B,) or (B, Sq); None for all.
        page_table: as in `attention_kv`.
        indices: int32 (B, Sq, K): the slots of the keys of each query, page * page size + position, as in DeepSeek's
            sparse attention (DSA). A slot outside the cache, such as -1, is not a key. There are no positions, so
            `causal` and the page table are not used.
        cu_seqlens_q: as in `attention_kv`.
        cache_rows: as in `attention_kv`.
        causal: as in `attention_kv`.
        scale: factor of q.k. Default 1 / sqrt(576). Models use 1 / sqrt(192), the head dim before absorption.
        k_scale: scale of a quantised cache, of keys and values: as in `attention_kv`.
        sinks: as in `attention`.
        out: a tensor for the result.
        return_lse: if True, lse is returned too.
        plan: a plan from `plan_kv(q, cache, cache[..., :512], lengths, ..)`. Not with `indices`.
        split: as in `attention_kv`.
        max_seqlen_q: as in `attention_kv`.
        backend: as in `attention`.

    Returns:
        out (B, Sq, H, 512) or (T, H, 512) in q's dtype. With return_lse=True (out, lse), lse (B, H, Sq) or (H, T).

    Raises:
        AttentionError: an argument is not as above, or the named backend cannot run this call. Nothing was launched.
    """
    call = mla_arguments(q, cache, lengths, indices)
    if indices is not None and isinstance(k_scale, Tensor) and k_scale.dim() == 2:  # each query is a sequence
        k_scale = k_scale.repeat_interleave(q.shape[1], 0)
    options: dict[str, Any] = {"scale": scale, "sinks": sinks, "split": split, "plan": plan, "backend": backend}
    options |= {"k_scale": k_scale, "v_scale": k_scale}
    if indices is None:
        options |= {"page_table": page_table, "cu_seqlens_q": cu_seqlens_q, "cache_rows": cache_rows}
        options |= {"causal": causal, "max_seqlen_q": max_seqlen_q, "out": out}
        results = attention_kv(call.q, call.k, call.v, call.lengths, return_lse=return_lse, **call.options, **options)
        return results  # type: ignore[return-value]  # two at most: no max_logit
    for name, x in (("page_table", page_table), ("cu_seqlens_q", cu_seqlens_q), ("cache_rows", cache_rows)):
        if x is not None:
            raise AttentionError(name, "given with indices", "None: indices are slots of the cache")
    if not isinstance(return_lse, bool):
        raise AttentionError("return_lse", type(return_lse).__name__, "True or False")
    if out is not None:
        gap = tensor("out", out).dim() == 4 and 1 not in out.shape[:2] and out.stride(0) != out.shape[1] * out.stride(1)
        if out.shape != (*q.shape[:3], LATENT) or gap:
            found = f"{tuple(out.shape)} with strides {out.stride()}"
            raise AttentionError("out", found, f"{(*q.shape[:3], LATENT)}, and with indices no gap between sequences")
        options["out"] = out.flatten(0, 1)[:, None]
    result, lse = attention_kv(call.q, call.k, call.v, call.lengths, return_lse=True, **call.options, **options)
    result = result.view(*q.shape[:3], LATENT) if out is None else out
    return (result, by_query(lse, q)) if return_lse else result


def mla_arguments(q: Tensor, cache: Tensor, lengths: Any, indices: Tensor | None) -> MlaArguments:
    """The arguments of `attention_kv`. With indices, every query is a sequence of its own."""
    if tensor("cache", cache).dim() == 4 and cache.element_size() == 1 and cache.shape[-1] == BYTES:
        cache = cache.view(torch.float8_e4m3fn)
    elif cache.dim() != 4 or cache.shape[-1] != WIDTH:
        raise AttentionError("cache", f"{cache.dtype} {tuple(cache.shape)}", f"(.., .., 1, {WIDTH}), or {BYTES} bytes")
    if tensor("q", q).dim() not in (3, 4) or q.shape[-1] != WIDTH:
        expected = f"(B, Sq, H, {WIDTH}), or packed (T, H, {WIDTH}) with cu_seqlens_q"
        raise AttentionError("shape of q", tuple(q.shape), expected)
    if indices is None:
        if lengths is None:
            raise AttentionError("lengths", "None", "int32 (B,), the tokens of each sequence; None only with indices")
        return MlaArguments(q, cache, cache[..., :LATENT], lengths, {})
    shape = tuple(tensor("indices", indices).shape)
    integers("indices", indices, q, (torch.int32,))
    if q.dim() != 4 or len(shape) != 3 or shape[:2] != tuple(q.shape[:2]):
        raise AttentionError("shape of indices", shape, f"(B, Sq, K) for q (B, Sq, H, {WIDTH}), {tuple(q.shape)}")
    table = indices.flatten(0, 1)
    lengths = _index_counts(lengths, shape, q)
    if not torch.compiler.is_compiling() and settings.checks_contents():
        _check_indices(indices, lengths, cache.shape[0] * cache.shape[1])
    return MlaArguments(q.flatten(0, 1)[:, None], cache, cache[..., :LATENT], lengths, {"token_table": table})


def _check_indices(indices: Tensor, counts: Tensor, slots: int) -> None:
    """Raises AttentionError for an index past the cache, which calls skip, as they do negative ones."""
    counted = torch.arange(indices.shape[2], device=indices.device) < counts.view(*indices.shape[:2], 1)
    wrong = ((indices >= slots) & counted).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise AttentionError(f"indices{at}", int(indices[tuple(at)]), f"at most {slots - 1}, or negative for none")


def _index_counts(lengths: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """How many indices of each query count, (B Sq,)."""
    if lengths is None or isinstance(lengths, int):
        count = shape[2] if lengths is None else lengths
        if isinstance(count, bool) or not 0 <= count < 2**31:
            raise AttentionError("lengths", count, "0 to 2**31 - 1")
        return torch.full((shape[0] * shape[1],), count, dtype=torch.int32, device=q.device)
    if tuple(tensor("lengths", lengths).shape) not in ((shape[0],), shape[:2]):
        raise AttentionError("shape of lengths", tuple(lengths.shape), f"{shape[:1]} or {shape[:2]}, as indices")
    every = lengths if lengths.dim() == 2 else lengths[:, None].expand(shape[:2])
    flat: Tensor = every.reshape(-1)
    return flat


def by_query(x: Tensor, q: Tensor) -> Tensor:
    """The lse (B Sq, H, 1) of queries that were sequences as (B, H, Sq)."""
    return x.view(*q.shape[:3]).transpose(1, 2)
