"""The schedule of keys: which program attends to which keys of a cache. One program computes it on the device, so that
the host never reads sequence lengths.

A work item is a tile of one sequence's rows (queries times the heads of a group) with the chunks of keys that they see.
The chunks of all work items lie on one axis, which is cut into `num_splits` equal splits. A split has one program for
each KV head, because the heads of a token lie side by side in memory and are then read at about the same time. A split
may cover several work items, and a work item may be divided among several splits. At most one work item of a split
began in an earlier split and at most one ends in a later one, so the workspace does not grow with the lengths.

The schedule, in int64 numbers:
    counts  2                       divided work items; work items without keys
    splits  (num_splits + 1, 12)    where each split begins: work item, chunk; from the fifth number on, the `WorkItem`
    tasks   (num_splits, 12)        of each divided work item: the splits that continue it, first and last; `WorkItem`
    cum     items + 1               where each work item begins on the axis
    items   (items, 8)              `WorkItem`s: from the front those with keys, from the back those without, whose rows
                                    the combine kernel writes

Everything that a program reads first lies in one record: dependent loads are what small batches wait for.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from . import partition


class WorkItem(NamedTuple):
    """A tile of rows: sequence, first row, first token of the sequence in a packed q, its queries, keys and first valid
    key, the first chunk of keys that the tile sees and how many there are."""

    b: tl.tensor
    first: tl.tensor
    q0: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    start: tl.tensor
    first_chunk: tl.tensor
    num_chunks: tl.tensor


class SplitStart(NamedTuple):
    """Where a split begins: work item, chunk."""

    item: tl.tensor
    chunk: tl.tensor


class CombineTask(NamedTuple):
    """The first and the last split that continue a divided work item, which the split before the first one began."""

    first: tl.tensor
    last: tl.tensor


class Sequences(NamedTuple):
    """Sequence lengths in the cache, offsets of packed queries and of new tokens, first valid keys, page table offsets;
    all but the lengths may be None."""

    lengths: tl.tensor
    cu_q: tl.tensor
    cu_new: tl.tensor
    starts: tl.tensor
    indptr: tl.tensor


class BatchSizes(NamedTuple):
    """Queries and new tokens of every sequence (n_q: of all, where packed), keys that a sequence can have, tokens of a
    page, sequences, row tiles of a sequence, work items."""

    n_q: tl.tensor
    n_new: tl.tensor
    capacity: tl.tensor
    page_size: tl.tensor
    batch: tl.tensor
    tiles: tl.tensor
    items: tl.tensor


class ScheduleConfig(NamedTuple):
    """Query heads per KV head; rows of a tile; the cost of beginning a work item, in chunks; work items and splits that
    are computed at once; whether the launch overlaps the one before."""

    GROUP: int
    BLOCK_M: int
    ITEM_COST: int
    BLOCK_ITEMS: int
    BLOCK_SPLITS: int
    OVERLAP: bool


# Sizes that change from call to call, for which no kernel is compiled anew. Triton 3.6 specialises every integer in a
# tuple, whatever `do_not_specialize` says: these are parameters of the kernels themselves, and become structs inside.
QUERY_SIZES = ["n_q", "n_new", "tokens", "batch", "max_queries", "num_positions", "before", "after"]
CACHE_SIZES = ["capacity", "page_size", "num_pages", "table_pages", "table_stride"]
SPLIT_SIZES = ["tiles", "items", "num_splits", "programs", "chunk_size", "min_chunks", "slots", "rows", "tile_height"]
RUNTIME_SIZES = QUERY_SIZES + CACHE_SIZES + SPLIT_SIZES
RECORD: tl.constexpr = tl.constexpr(partition.RECORD)


@triton.jit
def split_record(schedule, split):
    return schedule + 2 + RECORD * split


@triton.jit
def task_record(schedule, num_splits, n):
    return split_record(schedule, num_splits + 1) + RECORD * n


@triton.jit
def item_starts(schedule, num_splits):
    return task_record(schedule, num_splits, num_splits)


@triton.jit
def item_records(schedule, num_splits, items):
    return item_starts(schedule, num_splits) + items + 1


@triton.jit
def load_item(p):
    return WorkItem(
        tl.load(p).to(tl.int32),
        tl.load(p + 1).to(tl.int32),
        tl.load(p + 2).to(tl.int32),
        tl.load(p + 3).to(tl.int32),
        tl.load(p + 4).to(tl.int32),
        tl.load(p + 5).to(tl.int32),
        tl.load(p + 6).to(tl.int32),
        tl.load(p + 7).to(tl.int32),
    )


@triton.jit
def load_split(p):
    return SplitStart(tl.load(p).to(tl.int32), tl.load(p + 1).to(tl.int32))


@triton.jit
def load_task(p):
    return CombineTask(tl.load(p).to(tl.int32), tl.load(p + 1).to(tl.int32))


@triton.jit
def first_tile(cu_q, b, n_q, CONFIG: tl.constexpr):
    """The number of a packed sequence's first tile. Sequences before it have fewer tiles, whatever their lengths."""
    return clamp(tl.load(cu_q + b), 0, n_q) * CONFIG.GROUP // CONFIG.BLOCK_M + b


@triton.jit
def queries_of_item(n, cu_q, sizes, CONFIG: tl.constexpr):
    """(b, tile, q0, n_q) of work items n: sequence, tile of its rows, its first token in a packed q, its queries.

    Packed, the tokens past the last sequence are sequence `batch`. It has no keys, so its rows are written as empty."""
    if cu_q is None:
        b = n // sizes.tiles
        tile = n % sizes.tiles
        q0 = tl.zeros_like(n)
        return b, tile, q0, q0 + sizes.n_q
    else:
        b = tl.zeros_like(n)
        width = sizes.batch + 1
        while width > 1:  # binary search: the last sequence whose first tile is not past this one
            half = width // 2
            mid = tl.minimum(b + half, sizes.batch)
            b = tl.where(first_tile(cu_q, mid, sizes.n_q, CONFIG) > n, b, mid)
            width -= half
        tile = n - tl.where(b == 0, 0, first_tile(cu_q, b, sizes.n_q, CONFIG))
        q0 = tl.where(b == 0, 0, clamp(tl.load(cu_q + b), 0, sizes.n_q))
        q1 = clamp(tl.load(cu_q + b + 1, mask=b < sizes.batch, other=sizes.n_q), 0, sizes.n_q)
        return b, tile, q0, tl.maximum(q1 - q0, 0)


@triton.jit
def keys_of_item(n, b, sequences, sizes):
    """(n_k, start) of work items n of sequences b: keys, at most what the cache holds, and the first valid one."""
    exists = (b < sizes.batch) & (n < sizes.items)
    n_k = tl.load(sequences.lengths + b, mask=exists, other=0)
    if sequences.cu_new is None:
        n_k += tl.where(exists, sizes.n_new, 0)
    else:
        new_end = tl.load(sequences.cu_new + b + 1, mask=exists, other=0)
        n_k += tl.maximum(new_end - tl.load(sequences.cu_new + b, mask=exists, other=0), 0)
    capacity = tl.zeros_like(n) + sizes.capacity
    if sequences.indptr is not None:
        pages = sizes.capacity // tl.maximum(sizes.page_size, 1)  # of all sequences: offsets are clamped to the table
        begin = clamp(tl.load(sequences.indptr + b, mask=exists, other=0), 0, pages)
        end = clamp(tl.load(sequences.indptr + b + 1, mask=exists, other=0), 0, pages)
        capacity = tl.maximum(end - begin, 0) * sizes.page_size
    n_k = clamp(n_k, 0, tl.where(exists, capacity, 0))
    start = tl.zeros_like(n)
    if sequences.starts is not None:
        start = clamp(tl.load(sequences.starts + b, mask=exists, other=0), 0, n_k)
    return n_k, start


@triton.jit
def store_item(p, item, mask):
    """Write work items, field by field."""
    for field in tl.static_range(8):
        tl.store(p + field, item[field].to(tl.int64), mask=mask)


@triton.jit
def copy_item(record, source, other: tl.constexpr, source_mask, record_mask):
    """Copy work items to records, from their fifth number on."""
    for n in tl.static_range(8):
        tl.store(record + 4 + n, tl.load(source + n, mask=source_mask, other=other), mask=record_mask)


@triton.jit
def continues(record, item, mask):
    """Whether the split of a record begins inside this work item."""
    return (tl.load(record, mask=mask, other=-1) == item) & (tl.load(record + 1, mask=mask, other=0) > 0)


@triton.jit
def store_splits(schedule, split, x, cum, table, with_keys, num_splits, CONFIG: tl.constexpr):
    """Write where the splits begin, which is at x on the axis. Returns their (work item, chunk)."""
    item = tl.zeros_like(split)
    width = with_keys + 1
    while width > 1:  # binary search: the last work item that does not begin past x
        half = width // 2
        mid = tl.minimum(item + half, with_keys)
        item = tl.where(tl.load(cum + mid) > x, item, mid)
        width -= half
    found = item < with_keys
    chunk = tl.where(found, tl.maximum(x - tl.load(cum + item) - CONFIG.ITEM_COST, 0), 0)
    used = split <= num_splits
    record = split_record(schedule, split)
    tl.store(record, item.to(tl.int64), mask=used)
    tl.store(record + 1, chunk, mask=used)
    copy_item(record, table + item.to(tl.int64) * 8, -1, found, used)
    return item, chunk


@triton.jit
def store_tasks(schedule, split, item, chunk, table, num_splits):
    """Write a task for every work item that several splits share. A split with chunk > 0 continues a work item."""
    inside = (chunk > 0) & (split > 0) & (split < num_splits)
    begins = inside & ~continues(split_record(schedule, split - 1), item, inside)
    ends = inside & ~continues(split_record(schedule, split + 1), item, inside & (split + 1 < num_splits))
    tl.store(schedule, tl.sum(begins.to(tl.int64), 0))
    task = task_record(schedule, num_splits, tl.cumsum(begins.to(tl.int32), 0) - 1)
    tl.store(task, split.to(tl.int64), mask=begins)
    tl.store(task + 1, split.to(tl.int64), mask=ends)
    copy_item(task, table + item.to(tl.int64) * 8, 0, begins, begins)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def schedule_kernel(
    schedule,
    sequences,
    n_q,
    n_new,
    capacity,
    page_size,
    batch,
    tiles,
    items,
    num_splits,
    before,
    after,
    chunk_size,
    min_chunks,
    max_queries,
    CONFIG: tl.constexpr,
):
    """Write the schedule. A split has at least `min_chunks` chunks; if no work item has more and there are splits for
    all, each work item gets its own. Sequences with more than `max_queries` queries, if given, are left out: another
    kernel computes them."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sizes = BatchSizes(n_q, n_new, capacity, page_size, batch, tiles, items)
    cum = item_starts(schedule, num_splits)
    table = item_records(schedule, num_splits, items)
    total = tl.cast(0, tl.int64)
    longest = tl.cast(0, tl.int32)
    with_keys = tl.cast(0, tl.int32)
    empties = tl.cast(0, tl.int32)
    for first_item in range(0, items, CONFIG.BLOCK_ITEMS):
        n = first_item + tl.arange(0, CONFIG.BLOCK_ITEMS)
        b, tile, q0, own_q = queries_of_item(n, sequences.cu_q, sizes, CONFIG)
        n_k, start = keys_of_item(n, b, sequences, sizes)
        row = tile * CONFIG.BLOCK_M
        exists = (n < items) & (row < own_q * CONFIG.GROUP)
        if max_queries is not None:
            exists = exists & ((own_q <= max_queries) | (b == batch))
        first_position = row // CONFIG.GROUP + n_k - own_q
        last_position = tl.minimum((row + CONFIG.BLOCK_M - 1) // CONFIG.GROUP, own_q - 1) + n_k - own_q
        lo = start
        hi = n_k
        if before is not None:
            lo = tl.maximum(lo, first_position - before)
        if after is not None:
            hi = tl.minimum(hi, last_position + after + 1)
        first_chunk = lo // chunk_size
        num_chunks = tl.where(hi > lo, (hi + chunk_size - 1) // chunk_size - first_chunk, 0)
        real = (exists & (num_chunks > 0)).to(tl.int32)
        empty = (exists & (num_chunks == 0)).to(tl.int32)
        place = tl.where(num_chunks > 0, with_keys + tl.cumsum(real, 0) - 1, items - empties - tl.cumsum(empty, 0))
        cost = (real * (num_chunks + CONFIG.ITEM_COST)).to(tl.int64)
        longest = tl.maximum(longest, tl.max(real * num_chunks, 0))
        tl.store(cum + place, total + tl.cumsum(cost, 0) - cost, mask=real > 0)
        total += tl.sum(cost, 0)
        with_keys += tl.sum(real, 0)
        empties += tl.sum(empty, 0)
        item = WorkItem(b, row, q0, own_q, n_k, start, first_chunk, num_chunks)
        store_item(table + place.to(tl.int64) * 8, item, exists)
    tl.store(cum + with_keys, total)
    tl.store(schedule + 1, empties.to(tl.int64))
    tl.debug_barrier()

    split = tl.arange(0, CONFIG.BLOCK_SPLITS)
    per_split = tl.maximum((total + num_splits - 1) // num_splits, min_chunks)
    x = tl.minimum(split.to(tl.int64) * per_split, total)
    if (with_keys <= num_splits) & (longest <= min_chunks):
        x = tl.load(cum + tl.minimum(split, with_keys))
    item, chunk = store_splits(schedule, split, x, cum, table, with_keys, num_splits, CONFIG)
    tl.debug_barrier()
    store_tasks(schedule, split, item, chunk, table, num_splits)
