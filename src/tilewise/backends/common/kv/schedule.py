"""The schedule of keys: which program attends to which keys of a cache. One program computes it on the device, so that
the host never reads sequence lengths.

A work item is a tile of one sequence's rows (queries times the heads of a group) with the chunks of keys that they see.
A split is a range of its chunks, with one program for each KV head, because the heads of a token lie side by side in
memory and are then read at about the same time. The GPU starts programs in the order of splits, `resident` splits at a
time; work items that are fewer than `least` are divided so that all splits run at once (see `Division`).
Divided work items come first, then the others from long to short, so that programs end at about the same time. Fewer
than 2 * target splits belong to divided work items, so the workspace does not grow with the lengths.

The schedule, in int64 numbers:
    counts  4                       divided work items; work items without keys; those with keys; splits
    splits  (num_splits, 16)        `WorkItem`; its number, its first split, its splits; the first chunk and the end of
                                    this split
    counters (target, KV heads)     of a divided work item: partial results that are stored; 0 between launches
    cum     items + 1               the first split of each work item
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


class Split(NamedTuple):
    """The chunks [chunk, stop) of work item number `item`, which has so many splits from number `first` on."""

    item: tl.tensor
    first: tl.tensor
    num_splits: tl.tensor
    chunk: tl.tensor
    stop: tl.tensor


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
    page, sequences, row tiles of a sequence, work items; splits, and how many share all chunks equally."""

    n_q: tl.tensor
    n_new: tl.tensor
    capacity: tl.tensor
    page_size: tl.tensor
    batch: tl.tensor
    tiles: tl.tensor
    items: tl.tensor
    num_splits: tl.tensor
    target: tl.tensor


class ScheduleConfig(NamedTuple):
    """Query heads per KV head; KV heads; rows of a tile; the cost of beginning a work item, in chunks; work items and
    splits that are computed at once; whether the launch overlaps the one before; SKIP_EMPTY: work items without keys
    are left out, because no results are wanted for them."""

    GROUP: int
    KV_HEADS: int
    BLOCK_M: int
    ITEM_COST: int
    BLOCK_ITEMS: int
    BLOCK_SPLITS: int
    OVERLAP: bool
    SKIP_EMPTY: bool


# Sizes that change from call to call, for which no kernel is compiled anew. Triton 3.6 specialises every integer in a
# tuple, whatever `do_not_specialize` says: these are parameters of the kernels themselves, and become structs inside.
QUERY_SIZES = ["n_q", "n_new", "tokens", "batch", "max_queries", "num_positions", "before", "after"]
CACHE_SIZES = ["capacity", "page_size", "num_pages", "table_pages", "table_stride"]
SPLIT_SIZES = ["tiles", "items", "num_splits", "target", "resident", "least", "chunk_size", "min_chunks"]
RESULT_SIZES = ["slots", "whole_slots", "num_slots", "rows", "tile_height"]
RUNTIME_SIZES = QUERY_SIZES + CACHE_SIZES + SPLIT_SIZES + RESULT_SIZES
COUNTS: tl.constexpr = tl.constexpr(partition.COUNTS)
RECORD: tl.constexpr = tl.constexpr(partition.RECORD)
CLASSES: tl.constexpr = tl.constexpr(partition.CLASSES)


@triton.jit
def split_record(schedule, split):
    return schedule + COUNTS + RECORD * split


@triton.jit
def split_counters(schedule, sizes):
    return split_record(schedule, sizes.num_splits)


@triton.jit
def item_starts(schedule, sizes, KV_HEADS: tl.constexpr):
    return split_counters(schedule, sizes) + sizes.target * KV_HEADS


@triton.jit
def item_records(schedule, sizes, KV_HEADS: tl.constexpr):
    return item_starts(schedule, sizes, KV_HEADS) + sizes.items + 1


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
    return Split(
        tl.load(p + 8).to(tl.int32),
        tl.load(p + 9).to(tl.int32),
        tl.load(p + 10).to(tl.int32),
        tl.load(p + 11).to(tl.int32),
        tl.load(p + 12).to(tl.int32),
    )


@triton.jit
def split_chunk(num_chunks, split, num_splits):
    """The first chunk of one of the splits of a work item."""
    return (num_chunks.to(tl.int64) * split // tl.maximum(num_splits, 1)).to(tl.int32)


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
def items_at(first, sequences, sizes, view, CONFIG: tl.constexpr):
    """(WorkItem, whether it exists) of BLOCK_ITEMS work items in the order of their sequences."""
    n = first + tl.arange(0, CONFIG.BLOCK_ITEMS)
    b, tile, q0, n_q = queries_of_item(n, sequences.cu_q, sizes, CONFIG)
    n_k, start = keys_of_item(n, b, sequences, sizes)
    row = tile * CONFIG.BLOCK_M
    exists = (n < sizes.items) & (row < n_q * CONFIG.GROUP)
    if view.max_queries is not None:
        exists = exists & ((n_q <= view.max_queries) | (b == sizes.batch))
    first_position = row // CONFIG.GROUP + n_k - n_q
    last_position = tl.minimum((row + CONFIG.BLOCK_M - 1) // CONFIG.GROUP, n_q - 1) + n_k - n_q
    lo = start
    hi = n_k
    if view.before is not None:
        lo = tl.maximum(lo, first_position - view.before)
    if view.after is not None:
        hi = tl.minimum(hi, last_position + view.after + 1)
    first_chunk = lo // view.chunk_size
    num_chunks = tl.where(hi > lo, (hi + view.chunk_size - 1) // view.chunk_size - first_chunk, 0)
    if CONFIG.SKIP_EMPTY:
        exists = exists & (num_chunks > 0)
    return WorkItem(b, row, q0, n_q, n_k, start, first_chunk, num_chunks), exists


class Division(NamedTuple):
    """How work items are divided, if they have more than `undivided` chunks. If all are about equally long, `remainder`
    of them are, into `pieces` splits of at least `most` / 2 chunks: those that would otherwise run alone at the end,
    into as many as run at once. If they are not equally long (pieces = 0), all with more than `most` chunks are
    divided."""

    undivided: tl.tensor
    most: tl.tensor
    remainder: tl.tensor
    pieces: tl.tensor
    longest: tl.tensor  # work item that is not divided, in chunks


@triton.jit
def division_of(chunks, num_items, longest, view, CONFIG: tl.constexpr):
    """The division of so many chunks of so many work items with keys."""
    cost = chunks + num_items * CONFIG.ITEM_COST
    shares = tl.maximum(view.resident - num_items, view.least)  # the splits of few work items run all at once
    shares = tl.where(num_items <= view.least, shares, view.target)
    worth = (view.min_chunks + 1) // 2  # a program
    most = tl.maximum((cost + shares - 1) // shares, worth)
    equal = longest.to(tl.int64) * num_items * 4 <= chunks * 5
    remainder = num_items % view.resident
    pieces = tl.where(equal, view.resident // tl.maximum(remainder, 1), 0)
    remainder = tl.where(pieces > 1, remainder, 0)
    undivided = tl.where(equal, longest, tl.minimum(longest, most).to(tl.int32))
    return Division(view.min_chunks, tl.where(equal, worth, most), remainder, pieces, undivided)


@triton.jit
def classes_of(item, exists, before, division, max_rows, CONFIG: tl.constexpr):
    """(splits of work items; (items, CLASSES): 1 for their class). The first class has those that are divided, the
    others those of a range of lengths, from long to short. `before`: work items with keys before these. Partial results
    have `max_rows` rows: a work item with more, because max_seqlen_q was too small, is not divided."""
    real = (exists & (item.num_chunks > 0)).to(tl.int32)
    splits = ((item.num_chunks + division.most - 1) // division.most).to(tl.int32)
    splits = tl.where(item.num_chunks > division.undivided, splits, 1)
    if division.pieces > 0:
        number = before + tl.cumsum(real, 0) - real
        splits = tl.where(number < division.remainder, tl.minimum(splits, division.pieces), 1)
    if max_rows is not None:
        rows = tl.minimum(item.n_q * CONFIG.GROUP - item.first, CONFIG.BLOCK_M)
        splits = tl.where(rows > max_rows, tl.minimum(splits, 1), splits)
    splits *= real
    shorter = tl.maximum(division.longest - item.num_chunks, 0).to(tl.int64)
    rank = 1 + (shorter * (CLASSES - 1) // tl.maximum(division.longest, 1)).to(tl.int32)
    rank = tl.where(splits > 1, 0, tl.minimum(rank, CLASSES - 1))
    return splits, real[:, None] * (rank[:, None] == tl.arange(0, CLASSES)[None, :]).to(tl.int32)


@triton.jit
def store_splits(schedule, first, total, cum, table, num_splits, CONFIG: tl.constexpr):
    """Write the records of BLOCK_SPLITS splits, empty ones past the last."""
    split = first + tl.arange(0, CONFIG.BLOCK_SPLITS)
    found = split < total.splits
    item = tl.zeros_like(split)
    width = total.items + 1
    while width > 1:  # binary search: the last work item whose first split is not past this one
        half = width // 2
        mid = tl.minimum(item + half, total.items)
        item = tl.where(tl.load(cum + mid) > split, item, mid)
        width -= half
    begin = tl.load(cum + item, mask=found, other=0).to(tl.int32)
    own = tl.load(cum + item + 1, mask=found, other=0).to(tl.int32) - begin
    source = table + item.to(tl.int64) * 8
    num_chunks = tl.load(source + 7, mask=found, other=0).to(tl.int32)
    used = split < num_splits
    record = split_record(schedule, split)
    for n in tl.static_range(8):
        tl.store(record + n, tl.load(source + n, mask=found, other=0), mask=used)
    tl.store(record + 8, item.to(tl.int64), mask=used)
    tl.store(record + 9, begin.to(tl.int64), mask=used)
    tl.store(record + 10, own.to(tl.int64), mask=used)
    tl.store(record + 11, split_chunk(num_chunks, split - begin, own).to(tl.int64), mask=used)
    tl.store(record + 12, split_chunk(num_chunks, split - begin + 1, own).to(tl.int64), mask=used)


class View(NamedTuple):
    """The window, keys of a chunk, and the most queries of a sequence, or None; splits that run at once; work items
    that are few; splits that share the chunks of sequences of different lengths; chunks that are worth one; rows of a
    partial result, or None if no work item has more."""

    before: tl.tensor
    after: tl.tensor
    chunk_size: tl.tensor
    max_queries: tl.tensor
    resident: tl.tensor
    least: tl.tensor
    target: tl.tensor
    min_chunks: tl.tensor
    max_rows: tl.tensor


class Total(NamedTuple):
    """Work items with keys, and their splits."""

    items: tl.tensor
    splits: tl.tensor


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
    target,
    resident,
    least,
    before,
    after,
    chunk_size,
    min_chunks,
    max_queries,
    rows,
    CONFIG: tl.constexpr,
):
    """Write the schedule. Sequences with more than `max_queries` queries, if given, are left out: another kernel
    computes them."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sizes = BatchSizes(n_q, n_new, capacity, page_size, batch, tiles, items, num_splits, target)
    view = View(before, after, chunk_size, max_queries, resident, least, target, min_chunks, rows)
    cum = item_starts(schedule, sizes, CONFIG.KV_HEADS)
    table = item_records(schedule, sizes, CONFIG.KV_HEADS)
    chunks = tl.cast(0, tl.int64)
    longest = tl.cast(0, tl.int32)
    with_keys = tl.cast(0, tl.int32)
    for first in range(0, items, CONFIG.BLOCK_ITEMS):
        item, exists = items_at(first, sequences, sizes, view, CONFIG)
        own_chunks = tl.where(exists, item.num_chunks, 0)
        chunks += tl.sum(own_chunks.to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(own_chunks, 0))
        with_keys += tl.sum((own_chunks > 0).to(tl.int32), 0)
    division = division_of(chunks, with_keys, longest, view, CONFIG)
    item_counts = tl.full([CLASSES], 0, tl.int32)
    split_counts = tl.full([CLASSES], 0, tl.int32)
    for first in range(0, items, CONFIG.BLOCK_ITEMS):
        item, exists = items_at(first, sequences, sizes, view, CONFIG)
        splits, member = classes_of(item, exists, tl.sum(item_counts, 0), division, rows, CONFIG)
        item_counts += tl.sum(member, 0)
        split_counts += tl.sum(member * splits[:, None], 0)
    total = tl.sum(split_counts, 0)
    next_item = tl.cumsum(item_counts, 0) - item_counts
    next_split = tl.cumsum(split_counts, 0) - split_counts
    empties = tl.cast(0, tl.int32)
    before_items = tl.cast(0, tl.int32)
    for first in range(0, items, CONFIG.BLOCK_ITEMS):
        item, exists = items_at(first, sequences, sizes, view, CONFIG)
        splits, member = classes_of(item, exists, before_items, division, rows, CONFIG)
        own = member * splits[:, None]
        place = tl.sum(member * (tl.cumsum(member, 0) - 1 + next_item[None, :]), 1)
        begin = tl.sum(member * (tl.cumsum(own, 0) - own + next_split[None, :]), 1)
        empty = (exists & (item.num_chunks == 0)).to(tl.int32)
        place = tl.where(empty > 0, items - empties - tl.cumsum(empty, 0), place)
        tl.store(cum + place, begin.to(tl.int64), mask=splits > 0)
        store_item(table + place.to(tl.int64) * 8, item, exists)
        next_item += tl.sum(member, 0)
        next_split += tl.sum(own, 0)
        empties += tl.sum(empty, 0)
        before_items += tl.sum((splits > 0).to(tl.int32), 0)
    tl.store(cum + with_keys, total.to(tl.int64))
    tl.store(schedule, tl.sum(tl.where(tl.arange(0, CLASSES) == 0, item_counts, 0), 0).to(tl.int64))
    tl.store(schedule + 1, empties.to(tl.int64))
    tl.store(schedule + 2, with_keys.to(tl.int64))
    tl.store(schedule + 3, total.to(tl.int64))
    for first in range(0, target * CONFIG.KV_HEADS, CONFIG.BLOCK_SPLITS):
        n = first + tl.arange(0, CONFIG.BLOCK_SPLITS)
        zero = tl.full([CONFIG.BLOCK_SPLITS], 0, tl.int64)
        tl.store(split_counters(schedule, sizes) + n, zero, mask=n < target * CONFIG.KV_HEADS)
    tl.debug_barrier()
    for first in range(0, num_splits, CONFIG.BLOCK_SPLITS):
        store_splits(schedule, first, Total(with_keys, total), cum, table, num_splits, CONFIG)
