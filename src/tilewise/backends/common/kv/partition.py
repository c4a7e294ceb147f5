"""How the keys of a KV cache are divided among programs: what the host decides from shapes alone. Imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....kv_formats import format_of, has_token_scales, head_dim, is_deepseek_fp8, is_latent
from ..gpu import Gpu
from ..tiles import padded
from . import kv_tiles
from .kv_tiles import KvTile
from .mla_tiles import latent_tile

MIN_SPLIT = 512  # keys that are worth a program
COUNTS, RECORD, ITEM = 4, 16, 8  # int64 numbers of the schedule's parts: see schedule.py
CLASSES = 16  # of work items: those that are divided, then from long to short


class Partition(NamedTuple):
    """The sizes of a schedule and its workspace. A split has one program for each KV head."""

    tile: KvTile
    items: int  # work items
    tiles: int  # row tiles of a sequence, 0 if packed
    resident: int  # splits that run at once
    least: int  # work items; fewer are few
    wanted_splits: int  # that share the chunks of sequences of different lengths
    kv_heads: int
    chunk_size: int  # keys
    slots: int  # partial results of a split that continues a work item
    rows: int  # of a partial result
    item_cost: int  # of beginning a work item, in chunks
    min_chunks: int = 1  # of a work item that is divided
    most_splits: int = 0  # if they are known to be fewer than `items` and `wanted_splits` allow

    @property
    def num_splits(self) -> int:
        return self.most_splits or self.items + self.wanted_splits

    @property
    def programs(self) -> int:
        return self.num_splits * self.kv_heads

    @property
    def schedule_numel(self) -> int:
        counters = self.wanted_splits * self.kv_heads
        return COUNTS + RECORD * self.num_splits + counters + self.items + 1 + ITEM * self.items

    @property
    def whole_slots(self) -> int:
        """Splits that may have one partial result: those of divided work items; with splits of a fixed size all."""
        return self.num_splits if self.slots > 1 else min(self.num_splits, 2 * self.wanted_splits)

    @property
    def num_slots(self) -> int:
        return self.kv_heads * (self.whole_slots + self.wanted_splits * (self.slots - 1))

    def workspace_numel(self, dim_v: int) -> int:
        """Partial results with their lse (or m) and l, and a flag for each program."""
        return self.num_slots * self.rows * (dim_v + 2) + self.programs


def _quantised(request: Any) -> str | None:
    """How the caches are quantised, as `kv_tiles.tile` tells them apart."""
    found = [format_of(x) for x in (request.k, request.v)]
    if None in found:
        return None if found[0] is found[1] else "one"
    by_token = has_token_scales(request.k_scale) or has_token_scales(request.v_scale)
    return "token" if by_token and max(x.bits for x in found if x is not None) == 8 else "both"


def partition(request: Any, gpu: Gpu, num_sms: int, tile: KvTile | None = None) -> Partition:
    """The partition of a `KvRequest`, from shapes alone, on a GPU with so many multiprocessors."""
    q, k, v = request.q, request.k, request.v
    group = q.shape[-2] // k.shape[-2]
    max_rows = request.max_seqlen_q * group  # of a sequence; 0 if unknown
    if tile is None and is_latent(request):
        portable = is_deepseek_fp8(k) and (q.dtype != torch.bfloat16 or request.split is not None)
        portable = portable or request.places.by_token
        tile = latent_tile(gpu.arch, q.element_size(), max_rows, portable)
    if tile is None:
        tile = kv_tiles.tile(
            gpu.arch, q.element_size(), padded(max(q.shape[-1], head_dim(v))), max_rows, _quantised(request)
        )
    if request.dense.cu_q is None:
        tiles = -(-q.shape[1] * group // tile.block_m)
        items = q.shape[0] * tiles
    else:
        tiles = 0
        items = q.shape[0] * group // tile.block_m + request.places.batch + 1
    rows = min(max_rows or tile.block_m, tile.block_m)  # in this order torch.compile guards "no more than block_m"
    chunk_size = request.split or tile.block_n
    slots = 1 if request.split is None else 1 + -(-request.places.capacity(k) // chunk_size)
    item_cost, min_chunks = (0, 1) if request.split else (1, max(1, MIN_SPLIT // chunk_size))
    kv_heads = k.shape[-2]
    resident = max(1, num_sms * tile.programs_per_sm // kv_heads)
    quarters = 2 if tile.programs_per_sm > 1 and _quantised(request) is None else 3
    least = max(1, resident * quarters // 4)
    wanted_splits = resident * (1 if request.split else tile.splits)
    sizes = (resident, least, wanted_splits, kv_heads, chunk_size, slots, rows, item_cost, min_chunks)
    return Partition(tile, items, tiles, *sizes)
