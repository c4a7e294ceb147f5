"""Continuous batching of transformers: its cache is a pool of tokens, and its `read_index` a table of pages of one,
so that keys and values are attended where they lie. transformers' own functions gather them first, in every layer.

A layer with a sliding window writes over keys that the same call still reads: there transformers gathers, as always.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor

from ..kv_cache import append_kv, attention_kv


class Pool(NamedTuple):
    """A layer's keys and values (tokens, 1, Hk, D), and the number of its group among the indices."""

    k: Tensor
    v: Tensor
    group: int


def pool_of(cache: Any, layer: int) -> Pool | None:
    """Of transformers' PagedAttentionCache; None for a layer that has to be gathered."""
    if hasattr(cache, "layer_to_allocator"):  # 5.22
        allocator = cache.layer_to_allocator[layer]
        if allocator.layer_type != "full_attention":
            return None
        k, v = (x.flatten(0, 1)[:, None] for x in allocator.get_cache_for_block_table(layer))
        return Pool(k, v, allocator.index)
    if cache.sliding_windows[layer] != 1:  # 5.17, where 1 is none
        return None
    group, place = cache.layer_index_to_group_indices[layer]
    return Pool(cache.key_cache[place][:, None], cache.value_cache[place][:, None], group)


def attend(
    pool: Pool,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    named: dict[str, Any],
    **options: Any,
) -> Tensor | None:
    """q (1, H, T, D), new k and v (1, Hk, T, D) -> (1, T, H, Dv), written and attended in place; None if nothing was
    cached before, and the new keys are the only ones."""
    read, write = (named[name][pool.group] for name in ("read_index", "write_index"))
    if not read.numel():
        return None
    cu_q, cu_k = (x.int() for x in offsets)
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    lengths = cu_k.diff()
    append_kv(k, v, pool.k, pool.v, lengths, cu_seqlens_new=cu_q, slots=write)
    pages = (cu_k, read.int())
    out: Tensor = attention_kv(q, pool.k, pool.v, lengths, cu_seqlens_q=cu_q, page_table=pages, **options)
    return out[None]


def gathered(cache: Any, key: Tensor, value: Tensor, layer: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values of the sequences, (1, Hk, T, D), after the new ones were written."""
    if "kwargs" in inspect.signature(cache.update).parameters:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=named)
        return k, v
    places = {"read_index": named["read_index"], "write_index": named["write_index"]}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, **places)  # before 5.22: (T, Hk, D)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]
