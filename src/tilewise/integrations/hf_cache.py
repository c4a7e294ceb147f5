"""Continuous batching of transformers: keys and values are attended where they lie, in the pages of its cache.
transformers' own functions gather them first, in every layer.

A layer with a sliding window writes over keys that the same call still reads: there transformers gathers, as always.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kv_warmup import StepLimits
from .kv_steps import Memory, Step, Writer


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


class Batch(NamedTuple):
    """A step of a group of layers, and the slots of its new tokens."""

    step: Step
    slots: Tensor


class Steps:
    """The step of a cache that its layers share, by their group. transformers makes new indices for every step; a CUDA
    graph that is captured after a run with the same indices has a step of its own."""

    def __init__(self, most_tokens: int) -> None:
        self.limits = StepLimits(most_tokens, most_tokens, most_tokens)
        self.memory: Memory = {}
        self.write = Writer()
        self.indices: Any = None
        self.batches: dict[tuple[int, bool], Batch] = {}

    def of(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Batch:
        indices = named["read_index"]
        if self.indices is not indices:
            self.indices, self.batches = indices, {}
        key = pool.group, pool.k.is_cuda and torch.cuda.is_current_stream_capturing()
        batch = self.batches.get(key)
        if batch is None:
            batch = self.batches[key] = self.new(pool, offsets, named)
        return batch

    def new(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Batch:
        """With a block table all sequences have one query; otherwise there are slots of all keys and new tokens."""
        cu_q, cu_k = (x.int() for x in offsets)
        lengths, page, most = cu_k.diff(), pool.k.shape[1], 1
        if named.get("block_table") is not None:
            table = named["block_table"][pool.group]
            slots = last_slots(table, lengths, page)
        else:
            name = "max_seqlen" if "max_seqlen_q" in named else "max_length"  # 5.17, 5.22
            longest = named[f"{name}_k"]
            if isinstance(longest, dict):
                longest = longest["full_attention"]
            most, slots = self.limits.max_seqlen_q(named[f"{name}_q"]), named["write_index"][pool.group]
            table = page_table(named["read_index"][pool.group], cu_k, page, longest)
        memory = None if torch.compiler.is_compiling() else self.memory
        return Batch(Step(lengths, cu_q, table, most, self.limits.backend(most), memory), slots)


def last_slots(table: Tensor, lengths: Tensor, page: int) -> Tensor:
    """The slot of the last token of each sequence; -1 for an empty one.

    >>> last_slots(torch.tensor([[3, 1], [2, -1], [-1, -1]]), torch.tensor([5, 2, 0]), page=4)
    tensor([ 4,  9, -1])
    """
    last = (lengths - 1).clamp_(min=0).long()
    slots = table.gather(1, (last // page)[:, None])[:, 0] * page + last % page
    return slots.masked_fill(lengths == 0, -1)


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
    steps = None if torch.compiler.is_compiling() else vars(cache).get("tilewise")
    if steps is None:
        steps = Steps(cache.max_batch_tokens)
    if not torch.compiler.is_compiling():
        cache.tilewise = steps
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    step, slots = steps.of(pool, offsets, named)
    steps.write(k, v, pool.k, pool.v, slots)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    step.attend(q, pool.k, pool.v, out, **options)
    return out[None]


def gathered(cache: Any, key: Tensor, value: Tensor, layer: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values of the sequences, (1, Hk, T, D), after the new ones were written."""
    if "kwargs" in inspect.signature(cache.update).parameters:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=named)
        return k, v
    places = {"read_index": named["read_index"], "write_index": named["write_index"]}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, **places)  # before 5.22: (T, Hk, D)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]
