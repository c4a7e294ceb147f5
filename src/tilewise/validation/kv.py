"""Validates a call with a KV cache and returns its request. Shapes, dtypes and devices are checked here, before any
launch; values on the device are checked by `kv_contents`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..call.fields import ATTENTION, CACHE
from ..call.options import KvOptions
from ..errors import AttentionError, shown
from ..kv_formats import WIDTH, has_token_scales, head_dim, is_deepseek_fp8, shared_columns
from ..kv_request import (
    AppendRequest,
    CachePlaces,
    KvRequest,
    SharedPrefix,
    first_rotated,
    keys_alone,
)
from ..request import MAX_HEAD_DIM, has_address
from ..torch_internals import forward_mode_level, is_vmapped
from .dense import DTYPES, request_of, resolved, tensor
from .kv_contents import are_read
from .kv_rotary import checked_rotary, integers
from .kv_scales import (
    check_cache_dtype,
    check_deepseek_fp8,
    check_new_dtype,
    checked_norm,
    checked_scale,
)
from .memory import check_new_values, check_written

# Options of `append_kv`: where new tokens go.
OF_APPEND = (
    *("cu_seqlens_new", "cu_seqlens_q", "page_table", "slots", "cache_rows", "starts"),
    *("rotary", "qk_norm", "k_scale", "v_scale"),
)


def attend_request(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | int, options: KvOptions) -> KvRequest:
    """The request of `attention_kv`, without its new tokens."""
    q, k, v = resolved(q), resolved(k), resolved(v)
    _check_caches(q, k, v)
    if is_deepseek_fp8(k):
        check_deepseek_fp8(k, v, options["k_scale"], options["v_scale"])
    _check_untransformed("a call with a KV cache", q, k, v)
    if (options["k_new"] is None) != (options["v_new"] is None):
        missing = "k_new" if options["k_new"] is None else "v_new"
        raise AttentionError(missing, "None", "k_new and v_new, or neither of them")
    if options["out"] is not None:
        check_written({"out": tensor("out", options["out"])})
    cu_q = _offsets("cu_seqlens_q", options["cu_seqlens_q"], q, packed=q.dim() == 3)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    places = _places(batch, q, k, lengths, options)
    n_q = q.shape[1] if cu_q is None else None
    given: Any = options
    of_attention: Any = {name: given.get(name, default) for name, default in ATTENTION.defaults.items()}
    of_attention["deterministic"] = True
    dense = request_of(q, k, v, (batch, q.shape[-2], n_q, None), of_attention, cu_q)
    terms = dense.score if dense.sinks is None else (*dense.score, dense.sinks)
    _check_untransformed("a score term of a call with a KV cache", *terms)
    tree = None if options["tree"] is None else _tree(options["tree"], q, cu_q)
    scales = [checked_scale(name, given[name], x, batch) for name, x in (("k_scale", k), ("v_scale", v))]
    most = q.shape[1] if cu_q is None else int(options["max_seqlen_q"] or 0)
    shared = _prefix(options["shared_prefix"], places)
    return KvRequest(dense, places, tree, options["split"], most, scales[0], scales[1], shared)


def append_request(
    k_new: Any, v_new: Any, k: Tensor, v: Tensor, places: CachePlaces, q: Tensor | None, options: KvOptions
) -> AppendRequest:
    """The request that appends the new tokens of a call, which `places` counts."""
    _check_cache("v_cache", v)
    k_new, v_new, q = resolved(k_new), resolved(v_new), resolved(q)
    if resolved(k) is not k or resolved(v) is not v:
        raise AttentionError("cache to write to", "a lazily negated view or a zero tensor", "a tensor with memory")
    if k.shape[:3] != v.shape[:3]:
        raise AttentionError("shape of v_cache", tuple(v.shape), f"k_cache's {tuple(k.shape)} up to the head dim")
    for name, x, cache in (("k_new", k_new, k), ("v_new", v_new, v)):
        packed = places.cu_new is not None
        axes = "(tokens, heads, dim) with cu_seqlens_new" if packed else "(batch, tokens, heads, dim)"
        if tensor(name, x).dim() != (3 if packed else 4):
            raise AttentionError(f"shape of {name}", tuple(x.shape), axes)
        check_new_dtype(name, x, cache)
        _check_untransformed(f"{name}, written into a cache", x)
    _like("v_new", v_new, k_new)
    if k_new.shape[:-1] != v_new.shape[:-1]:
        raise AttentionError("shape of v_new", tuple(v_new.shape), f"k_new's {tuple(k_new.shape)} up to the head dim")
    batch = places.lengths.shape[0]
    if places.cu_new is None and k_new.shape[0] != batch:
        raise AttentionError("batch of k_new", k_new.shape[0], f"{batch}, one for each of lengths")
    tokens = k_new.shape[:-2].numel()
    slots = options["slots"]
    if slots is not None and tensor("slots", slots).numel() != tokens:
        raise AttentionError("slots", slots.numel(), f"{tokens}, one for each new token")
    if slots is not None:
        integers("slots", slots, k)
        slots = slots.flatten().contiguous()
    rotary = options["rotary"]
    cu_q, per_query = None, False
    if q is not None:
        cu_q = _queries(q, k_new, batch, options["cu_seqlens_q"])
        per_query = q.shape[:-2] == k_new.shape[:-2] and options["cu_seqlens_new"] is None
    if rotary is not None:
        rotary = checked_rotary(rotary, k_new, q, (options["cu_seqlens_q"], options["cu_seqlens_new"]))
    norm = checked_norm(options["qk_norm"], k_new)
    if rotary is None and norm is None:
        q = None
    given: Any = options
    if is_deepseek_fp8(k):
        check_deepseek_fp8(k, v, given["k_scale"], given["v_scale"])
    k_scale, v_scale = (checked_scale(name, given[name], x, batch) for name, x in (("k_scale", k), ("v_scale", v)))
    alone = keys_alone(k, v, k_scale, v_scale)
    written = {"k_cache": k, "v_cache": v, "out": options["out"]}
    written |= {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if has_token_scales(x)}
    may_share = shared_columns(k, v) != (0, 0) or (places.table is not None and _pages_apart(k, v))
    columns = [("k_cache", "v_cache")] if may_share else []
    check_written(written, [*columns, ("k_scale", "v_scale")] if alone else columns)
    if not torch.compiler.is_compiling() and not are_read(places.lengths) and has_address(k_new):
        check_new_values(k_new, v_new, k, v, read=False)
    first = first_rotated(k, v, rotary, norm)
    tokens = k_new, v_new, k, v, places, slots, rotary, q, cu_q, None, k_scale, v_scale, norm
    return AppendRequest(*tokens, per_query, first, alone)


def _pages_apart(k: Tensor, v: Tensor) -> bool:
    """Whether the values lie whole pages after the keys in one memory, as in transformers, whose page tables name every
    other page."""
    if (
        torch.compiler.is_compiling()
        or not (has_address(k) and has_address(v))
        or k.stride() != v.stride()
        or k.element_size() != v.element_size()
    ):
        return False
    page = k.stride(0) * k.element_size()
    distance = v.data_ptr() - k.data_ptr()
    return bool(page and distance and distance % page == 0)


def _queries(q: Any, k_new: Tensor, batch: int, cu_q: Tensor | None) -> Tensor | None:
    """cu_seqlens_q of the queries that are rotated with the new keys, if they are packed."""
    if tensor("q", q).dim() not in (3, 4) or q.shape[-1] != k_new.shape[-1]:
        expected = f"(batch, tokens, heads, {k_new.shape[-1]}) or packed (tokens, heads, {k_new.shape[-1]}), as k_new"
        raise AttentionError("shape of q", tuple(q.shape), expected)
    _like("q", q, k_new)
    offsets = _offsets("cu_seqlens_q", cu_q, q, packed=True) if q.dim() == 3 else None
    sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    if batch != sequences:
        raise AttentionError("sequences of q", sequences, f"{batch}, one for each of lengths")
    return offsets


def append_options(given: dict[str, Any]) -> KvOptions:
    """The given options of `append_kv`, completed with the defaults."""
    defaults = CACHE.defaults
    for name in given:
        if name in defaults and name not in OF_APPEND and given[name] is not defaults[name]:
            raise AttentionError("keyword argument", f"{name}= of append_kv", f"only {', '.join(OF_APPEND)}")
        if name not in defaults:
            raise CACHE.unknown({name: given[name]}, {x: defaults[x] for x in OF_APPEND})
    options: KvOptions = CACHE.completed(given)
    return options


def places_of(k_new: Tensor, k: Tensor, lengths: Tensor | int, options: KvOptions) -> CachePlaces:
    """The places of `append_kv`, whose batch is that of k_new or cu_seqlens_new."""
    _check_cache("k_cache", k)
    _check_new("k_new", k_new)
    cu_new = _offsets_of_new(k_new, options)
    batch = k_new.shape[0] if cu_new is None else tensor("cu_seqlens_new", cu_new).numel() - 1
    return _places(batch, k_new, k, lengths, options | {"k_new": k_new})  # type: ignore[operator]


def _offsets_of_new(k_new: Tensor, options: KvOptions) -> Tensor | None:
    """cu_seqlens_new as given; its default for packed tokens is cu_seqlens_q."""
    cu_new = options["cu_seqlens_new"]
    if cu_new is not None or k_new.dim() != 3:
        return cu_new
    if options["cu_seqlens_q"] is None:
        raise AttentionError("cu_seqlens_new", "None, for packed k_new", "int32 (B + 1,) offsets of its tokens")
    return options["cu_seqlens_q"]


def _places(batch: int, q: Tensor, k: Tensor, lengths: Any, options: KvOptions) -> CachePlaces:
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        if not 0 <= lengths < 2**31:
            raise AttentionError("lengths", lengths, "0 to 2**31 - 1")
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    _counts("lengths", lengths, batch, q)
    k_new, cu_new = options["k_new"], options["cu_seqlens_new"]
    new = 0
    if k_new is not None:
        _check_new("k_new", k_new)
        cu_new = _offsets_of_new(k_new, options)
        cu_new = _offsets("cu_seqlens_new", cu_new, k_new, packed=k_new.dim() == 3)
        if cu_new is not None and cu_new.shape[0] != batch + 1:
            raise AttentionError("length of cu_seqlens_new", cu_new.shape[0], f"{batch + 1}, sequences + 1")
        new = k_new.shape[1] if cu_new is None else 0
    elif cu_new is not None:
        raise AttentionError("cu_seqlens_new", "given without k_new", "None, or k_new and v_new too")
    table, indptr = _table(options["page_table"], batch, q)
    by_token = options["token_table"] is not None
    if by_token:
        table = _token_table(batch, q, options)
    rows, starts = options["cache_rows"], options["starts"]
    if rows is not None:
        _counts("cache_rows", rows, batch, q)
        if table is not None:
            raise AttentionError(
                "cache_rows", "given with page_table", "one of them: a page table has the order of rows"
            )
        rows = rows.contiguous()
    elif table is None and k.shape[0] < batch:
        raise AttentionError(
            "rows of k_cache", k.shape[0], f"at least {batch}, one a sequence; or page_table=, cache_rows="
        )
    if starts is not None:
        _counts("starts", starts, batch, q)
        starts = starts.contiguous()
    return CachePlaces(lengths.contiguous(), table, indptr, rows, starts, cu_new, new, by_token)


def _check_caches(q: Tensor, k: Tensor, v: Tensor) -> None:
    if tensor("q", q).dim() not in (3, 4):
        raise AttentionError(
            "shape of q", tuple(q.shape), "(batch, tokens, heads, dim), or (tokens, heads, dim) packed"
        )
    for name, x in (("k_cache", k), ("v_cache", v)):
        _check_cache(name, x)
        check_cache_dtype(name, x, q.dtype, "q's")
        if x.device != q.device:
            raise AttentionError(f"device of {name}", x.device, f"{q.device}, as the other tensors")
    if q.dtype not in DTYPES:
        raise AttentionError("dtype of q", q.dtype, " or ".join(map(str, DTYPES)))
    for name, d, most in (("q", q.shape[-1], WIDTH), ("v_cache", head_dim(v), MAX_HEAD_DIM)):
        if not 1 <= d <= most:
            raise AttentionError(f"head dim of {name}", d, f"1 to {most}")
    if not (is_deepseek_fp8(k) and q.shape[-1] == WIDTH) and head_dim(k) != q.shape[-1]:
        raise AttentionError("head dim of k_cache", head_dim(k), f"q's {q.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise AttentionError("shape of v_cache", tuple(v.shape), f"k_cache's {tuple(k.shape)} up to the head dim")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        raise AttentionError(
            "heads of q", heads, f"a multiple of the cache's {kv_heads} (each KV head has a group of query heads)"
        )
    if k.shape[1] == 0 and k.shape[0]:
        raise AttentionError("tokens of a page", 0, "at least 1")


def _check_untransformed(whose: str, *tensors: Tensor) -> None:
    """Raises AttentionError if a derivative is requested: calls with a KV cache have none."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise AttentionError("requires_grad", f"True for {whose}", "torch.no_grad(), .detach(), or tilewise.attention")
    if torch.compiler.is_compiling():
        return
    if forward_mode_level() >= 0 and any(unpack_dual(x).tangent is not None for x in tensors):
        raise AttentionError("forward-mode AD", f"a tangent of {whose}", "tilewise.attention, which has derivatives")
    if any(map(is_vmapped, tensors)):
        raise AttentionError("vmap", f"over {whose}", "a larger batch: every sequence has its own length")


def _check_cache(name: str, x: Any) -> None:
    if tensor(name, x).dim() != 4:
        raise AttentionError(
            f"shape of {name}", tuple(x.shape), "(rows, tokens, heads, dim), or (pages, page size, heads, dim)"
        )


def _check_new(name: str, x: Any) -> None:
    if tensor(name, x).dim() not in (3, 4):
        axes = "(batch, tokens, heads, dim), or packed (tokens, heads, dim)"
        raise AttentionError(f"shape of {name}", tuple(x.shape), axes)


def _like(name: str, x: Tensor, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise AttentionError(f"dtype of {name}", x.dtype, f"{other.dtype}, as the other tensors")
    if x.device != other.device:
        raise AttentionError(f"device of {name}", x.device, f"{other.device}, as the other tensors")


def _counts(name: str, x: Any, batch: int, q: Tensor) -> None:
    integers(name, x, q, (torch.int32,))
    if tuple(x.shape) != (batch,):
        raise AttentionError(f"shape of {name}", tuple(x.shape), f"({batch},), one for each sequence")


def _offsets(name: str, cu: Tensor | None, x: Tensor, packed: bool) -> Tensor | None:
    if not packed:
        if cu is not None:
            raise AttentionError(name, f"given for tokens {tuple(x.shape)}", "packed (tokens, heads, dim), or None")
        return None
    if cu is None:
        raise AttentionError(name, "None, for packed tokens", "int32 (B + 1,) offsets, where each sequence begins")
    integers(name, cu, x, (torch.int32,))
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise AttentionError(f"shape of {name}", tuple(cu.shape), "(B + 1,), starting with 0")
    return cu.contiguous()


def _table(given: Any, batch: int, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(page table, indptr): (batch, pages) and None, or (entries,) and (batch + 1,)."""
    if given is None:
        return None, None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        indptr, table = given
        integers("page_table[0]", indptr, q, (torch.int32,))
        if tuple(indptr.shape) != (batch + 1,):
            raise AttentionError("shape of page_table[0]", tuple(indptr.shape), f"({batch + 1},), sequences + 1")
        if tensor("page_table[1]", table).dim() != 1:
            raise AttentionError("shape of page_table[1]", tuple(table.shape), "(entries,), the pages of all sequences")
        integers("page_table[1]", table, q, (torch.int32,))
        return table.contiguous(), indptr.contiguous()
    if tensor("page_table", given).dim() != 2 or given.shape[0] != batch:
        raise AttentionError("shape of page_table", tuple(given.shape), f"({batch}, pages), or a pair (indptr, pages)")
    integers("page_table", given, q, (torch.int32,))
    return given if given.stride(1) == 1 else given.contiguous(), None


def _token_table(batch: int, q: Tensor, options: KvOptions) -> Tensor:
    """The slots of each sequence's keys, which have no positions."""
    given: Any = options
    for name in (
        "page_table",
        "cache_rows",
        "starts",
        "k_new",
        "tree",
        "window",
        "alibi_slopes",
        "score_mod",
        "mask_mod",
    ):
        if given[name] is not None:
            raise AttentionError(name, "given with token_table", "one of them: keys of a token table have no positions")
    if q.dim() == 3 or (q.shape[1] > 1 and options["causal"]):
        expected = "q (B, 1, heads, dim); or (B, Sq, heads, dim) with causal=False: all queries see the keys of a row"
        raise AttentionError("token_table", f"given with q {tuple(q.shape)}", expected)
    table = tensor("token_table", options["token_table"])
    if table.dim() != 2 or table.shape[0] != batch:
        raise AttentionError("shape of token_table", tuple(table.shape), f"({batch}, keys)")
    integers("token_table", table, q, (torch.int32,))
    return table if table.stride(1) == 1 else table.contiguous()


def _tree(tree: Tensor, q: Tensor, cu_q: Tensor | None) -> Tensor:
    """The tree mask as (tokens of q, words) int64, 64 drafts in a word."""
    tokens = q.shape[:-2].numel()
    if tensor("tree", tree).device != q.device and not q.is_meta:
        raise AttentionError("device of tree", tree.device, f"q's {q.device}")
    if tree.dtype == torch.int64:
        if tree.numel() != tokens:
            raise AttentionError("tree of bits", tuple(tree.shape), f"{tokens} int64, one for each query")
        if cu_q is None and q.shape[1] > 64:
            raise AttentionError("tree of bits", f"{q.shape[1]} drafts", "at most 64, or bools (B, Sq, Sq)")
        return tree.reshape(tokens, 1).contiguous()
    if tree.dtype != torch.bool:
        raise AttentionError("dtype of tree", tree.dtype, "torch.bool, or torch.int64 for bits")
    shape = (tokens, "drafts") if cu_q is not None else (*q.shape[:2], q.shape[1])
    if cu_q is None and (tree.dim() == 2 or tree.shape[:1] == (1,)):
        tree = tree.expand(q.shape[0], *tree.shape[-2:])  # one tree for the whole batch
    if tree.dim() != len(shape) or any(isinstance(b, int) and a != b for a, b in zip(tree.shape, shape, strict=True)):
        raise AttentionError("shape of tree", tuple(tree.shape), str(shape))
    if tokens and not tree.shape[-1]:
        raise AttentionError("shape of tree", tuple(tree.shape), "a column for each query of a sequence")
    drafts, words = tree.shape[-1], -(-tree.shape[-1] // 64)
    bits = torch.nn.functional.pad(tree.reshape(tokens, drafts).long(), (0, 64 * words - drafts))
    return (bits.view(tokens, words, 64) << torch.arange(64, device=tree.device)).sum(-1)


def _prefix(given: Any, places: CachePlaces) -> SharedPrefix:
    """The option: None, "auto", or the keys that each sequence has in common with the one before it."""
    if given is None:
        return None
    if not isinstance(given, Tensor) and given != "auto":
        raise AttentionError("shared_prefix", shown(given), '"auto", int32 (B,) tensor, or None')
    if places.table is None or places.by_token:
        raise AttentionError("shared_prefix", "given without page_table", "a page table: sequences share pages")
    if not isinstance(given, Tensor):
        return "auto"
    lengths = places.lengths
    if given.dtype != torch.int32:
        raise AttentionError("dtype of shared_prefix", given.dtype, "torch.int32")
    if tuple(given.shape) != tuple(lengths.shape):
        expected = f"({lengths.shape[0]},), for each sequence the keys it has in common with the one before"
        raise AttentionError("shape of shared_prefix", tuple(given.shape), expected)
    if given.device != lengths.device:
        raise AttentionError("device of shared_prefix", given.device, f"{lengths.device}, as lengths")
    return given.contiguous()
