"""Continuous batching of transformers: keys and values are attended where they lie, in the pages of its cache.
transformers' own functions gather them first, in every layer.

A layer with a sliding window writes over keys that the same call still reads: there transformers gathers, as always.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_warmup import StepLimits
from ..torch_internals import version_of
from .steps import Memory, Step


class Pool(NamedTuple):
    """A layer's keys and values (pages, page size, Hk, D), and the number of its group among the indices."""

    k: Tensor
    v: Tensor
    group: int


def pool_of(cache: Any, layer: int) -> Pool | None:
    """Of transformers' PagedAttentionCache; None for a layer that has to be gathered."""
    if hasattr(cache, "layer_to_allocator"):  # 5.22
        allocator = cache.layer_to_allocator[layer]
        if allocator.layer_type != "full_attention":
            return None
        k, v = allocator.get_cache_for_block_table(layer)
        return Pool(k, v, allocator.index)
    if cache.sliding_windows[layer] != 1:  # 5.17, where 1 is none
        return None
    group, place = cache.layer_index_to_group_indices[layer]
    k, v = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    return Pool(k, v, group)


class Steps:
    """The step of a cache that its layers share, by their group. transformers makes new indices for every step, or
    writes those of the step before; a CUDA graph that is captured after a run with the same indices has a step of its
    own."""

    def __init__(self, most_tokens: int) -> None:
        self.limits = StepLimits(most_tokens, most_tokens, most_tokens)
        self.memory: Memory = {}
        self.indices: Any = None
        self.versions: list[int] = []
        self.steps: dict[tuple[int, bool], Step] = {}

    def of(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Step:
        indices, table = named["read_index"], named.get("block_table")
        versions = [version_of(x) for x in (*indices, *offsets, *(() if table is None else table))]
        if self.indices is not indices or self.versions != versions:
            self.indices, self.versions, self.steps = indices, versions, {}
        key = pool.group, pool.k.is_cuda and torch.cuda.is_current_stream_capturing()
        step = self.steps.get(key)
        if step is None:
            step = self.steps[key] = self.new(pool, offsets, named)
        return step

    def new(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Step:
        """With a block table all sequences have one query; otherwise there are the slots of all keys."""
        cu_q, cu_k = (x.int() for x in offsets)
        most, table = 1, named.get("block_table")
        if table is not None:
            table = table[pool.group]
        else:
            name = "max_seqlen" if "max_seqlen_q" in named else "max_length"  # 5.17, 5.22
            longest = named[f"{name}_k"]
            if isinstance(longest, dict):
                longest = longest["full_attention"]
            most = self.limits.max_seqlen_q(named[f"{name}_q"])
            table = page_table(named["read_index"][pool.group], cu_k, pool.k.shape[1], longest)
        memory = None if torch.compiler.is_compiling() else self.memory
        return Step(cu_k.diff() - cu_q.diff(), cu_q, table, most, self.limits.backend(most), memory)


def steps_of(cache: Any) -> Steps:
    """Kept on the cache, except by torch.compile, which traces every step."""
    steps: Steps | None = None if torch.compiler.is_compiling() else vars(cache).get("tilewise")
    if steps is None:
        steps = Steps(cache.max_batch_tokens)
        if not torch.compiler.is_compiling():
            cache.tilewise = steps
    return steps


def page_table(read: Tensor, cu_k: Tensor, page: int, longest: int) -> Tensor:
    """The pages of each sequence, from the slots of its keys: a page's first slot is a multiple of its size.

    >>> slots = torch.tensor([12, 13, 14, 15, 4, 8, 9])
    >>> page_table(slots, torch.tensor([0, 5, 7]), page=4, longest=5)
    tensor([[3, 1],
            [2, 2]], dtype=torch.int32)
    """
    first = cu_k[:-1, None] + torch.arange(0, longest, page, device=read.device)
    return (read[first.clamp_(max=read.shape[0] - 1)] // page).int()  # entries past a sequence's end are not read


def attend(
    cache: Any,
    pool: Pool,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    named: dict[str, Any],
    **options: Any,
) -> Tensor | None:
    """q (1, H, T, D), new k and v (1, Hk, T, D) -> (1, T, H, Dv), written and attended in place; None if nothing was
    cached before, and the new keys are the only ones."""
    if named.get("block_table") is None and not named["read_index"][pool.group].numel():
        return None
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    steps_of(cache).of(pool, offsets, named).attend(q, pool.k, pool.v, out, k_new=k, v_new=v, **options)
    return out[None]


def gathered(cache: Any, key: Tensor, value: Tensor, layer: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values of the sequences, (1, Hk, T, D), after the new ones were written."""
    if named.get("block_table") is not None:
        raise AttentionError("block_table", "that of a layer with a window", "None: max_blocks_per_request=0")
    if "kwargs" in inspect.signature(cache.update).parameters:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=named)
        return k, v
    places = {"read_index": named["read_index"], "write_index": named["write_index"]}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, **places)  # before 5.22: (T, Hk, D)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]
