"""Partial results of a row, combined: softmax over a union of keys follows from (out, lse) over its parts
(tilewise.merge). Where scores may be too large for an lse (LARGE_SCORES, see `renormalise`), a partial result is
(out, m, l), with m in place of lse."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.softmax import logsumexp
from ..device.structs import LOG2E
from ..device.tile_io import index
from ..pdl import gdc_wait
from .schedule import RUNTIME_SIZES, item_records, item_starts, load_item, split_chunk


class Buffers(NamedTuple):
    """out and lse as views, the workspace of partial results, the schedule; the largest score of each head, or None;
    and out and lse over shared prefixes as views, or None."""

    out: tl.tuple
    lse: tl.tuple
    workspace: tl.tensor
    schedule: tl.tensor
    max_logit: tl.tensor = None
    prefix_out: tl.tuple = None
    prefix_lse: tl.tuple = None


class SplitSizes(NamedTuple):
    """Work items; splits; partial results of a split that continues a work item; the splits before them, with one each;
    all partial results, and the rows of each; sequences; the most splits that continue work items."""

    items: tl.tensor
    num_splits: tl.tensor
    slots: tl.tensor
    whole_slots: tl.tensor
    num_slots: tl.tensor
    rows: tl.tensor
    batch: tl.tensor
    target: tl.tensor


class DividedItem(NamedTuple):
    """A work item and its number; the first of its splits and how many there are; the KV head."""

    item: tl.tuple
    number: tl.tensor
    first: tl.tensor
    num_splits: tl.tensor
    head: tl.tensor


class Partials(NamedTuple):
    """The workspace: pointers to out, to lse (or m) and to l of all partial results, and to a flag of each program."""

    out: tl.tensor
    lse: tl.tensor
    l: tl.tensor
    flags: tl.tensor
    slots: tl.tensor
    whole_slots: tl.tensor
    rows: tl.tensor


class Partial(NamedTuple):
    """out and lse over some keys; l is undefined. LARGE_SCORES: out, m and l."""

    out: tl.tensor
    lse: tl.tensor
    l: tl.tensor


class PartialRows(NamedTuple):
    """The rows r of the partial result whose first row is number `slot` of the workspace; pointers to its out."""

    partials: tl.tuple
    slot: tl.tensor
    r: tl.tensor
    out: tl.tensor
    out_mask: tl.tensor


class Rows(NamedTuple):
    """Query and head of the rows of a tile, and whether they exist."""

    i: tl.tensor
    h: tl.tensor
    exists: tl.tensor


class CombineConfig(NamedTuple):
    """Query heads per KV head; KV heads; head dim of v; rows, partial results and columns that are combined at once;
    whether splits have a fixed number of keys; whether the launch overlaps the one before; LARGE_SCORES and
    MERGE_PREFIX as in `DecodeConfig`."""

    GROUP: int
    KV_HEADS: int
    DV: int
    BLOCK_R: int
    BLOCK_C: int
    BLOCK_DV: int
    FIXED_SPLIT: bool
    OVERLAP: bool
    LARGE_SCORES: bool
    MERGE_PREFIX: bool


@triton.jit
def tile_rows(item, head, r, limit, GROUP: tl.constexpr):
    """The rows r of a work item, for a KV head; those past `limit`, if it is not None, do not exist."""
    i = (item.first + r) // GROUP
    h = head * GROUP + (item.first + r) % GROUP
    exists = i < item.n_q
    if limit is not None:
        exists = exists & (r < limit)
    return Rows(i, h, exists)


@triton.jit
def row_pointers(x, item, rows):
    """Pointers to rows of a (batch, token, head, ..) view."""
    base = x.ptr + item.b.to(tl.int64) * x.strides[0]
    return base + (item.q0 + rows.i).to(tl.int64) * x.strides[1] + rows.h.to(tl.int64) * x.strides[2]


@triton.jit
def columns(x, d):
    """Offsets of the dims d within a row, in 64 bits where they may exceed 32."""
    return index(x, d) * x.strides[3]


@triton.jit
def partials_of(workspace, sizes, DV: tl.constexpr):
    """The partial results in the workspace."""
    all_rows = tl.cast(sizes.num_slots, tl.int64) * sizes.rows
    lse = workspace + all_rows * DV
    return Partials(workspace, lse, lse + all_rows, lse + 2 * all_rows, sizes.slots, sizes.whole_slots, sizes.rows)


@triton.jit
def slot_of(partials, split, item, n, head, CONFIG: tl.constexpr):
    """The number of the first row of a split's partial result. FIXED_SPLIT: of its n-th, which is 0 for the first split
    of work item number `item`, and 1 and more for those that continue it."""
    if CONFIG.FIXED_SPLIT:
        later = partials.whole_slots + (split - item - 1) * (partials.slots - 1) + n - 1
        slot = tl.where(n == 0, split, later)
    else:
        slot = split
    return (slot.to(tl.int64) * CONFIG.KV_HEADS + head) * partials.rows


@triton.jit
def rows_of_partial(partials, slot, r, d, DV: tl.constexpr):
    """The rows r and the columns d (1, ..) of a partial result."""
    out = partials.out + slot * DV + (r[:, None] * DV + d)
    return PartialRows(partials, slot, r, out, (r < partials.rows)[:, None] & (d < DV))


@triton.jit
def load_partial(x, LARGE_SCORES: tl.constexpr):
    exists = x.r < x.partials.rows
    out = tl.load(x.out, mask=x.out_mask, other=0.0)
    lse = tl.load(x.partials.lse + x.slot + x.r, mask=exists, other=float("-inf"))
    l = lse
    if LARGE_SCORES:
        l = tl.load(x.partials.l + x.slot + x.r, mask=exists, other=0.0)
    return Partial(out, lse, l)


@triton.jit
def store_partial(x, partial, LARGE_SCORES: tl.constexpr):
    exists = x.r < x.partials.rows
    tl.store(x.out, partial.out, mask=x.out_mask)
    tl.store(x.partials.lse + x.slot + x.r, partial.lse, mask=exists)
    if LARGE_SCORES:
        tl.store(x.partials.l + x.slot + x.r, partial.l, mask=exists)


@triton.jit
def merge(a, b, LARGE_SCORES: tl.constexpr):
    """The partial result over the keys of both. The products are fused as written, for the same bits in every
    kernel."""
    m = tl.maximum(a.lse, b.lse)
    pivot = tl.where(m == float("-inf"), 0.0, m)
    w_a = tl.exp2((a.lse - pivot) * LOG2E)
    w_b = tl.exp2((b.lse - pivot) * LOG2E)
    if LARGE_SCORES:
        w_a *= a.l
        w_b *= b.l
    l = w_a + w_b
    inverse = 1.0 / tl.where(l == 0.0, 1.0, l)
    out = tl.fma(a.out, (w_a * inverse)[:, None], b.out * (w_b * inverse)[:, None])
    if LARGE_SCORES:
        return Partial(out, m, l)
    else:
        return Partial(out, tl.where(l == 0.0, float("-inf"), pivot + logsumexp(0.0, l)), l)


@triton.jit
def add_sink(partial, sinks, h, exists, LARGE_SCORES: tl.constexpr):
    """(out, lse): the sink is added to the denominator once, after all keys."""
    out = partial.out
    lse = partial.lse
    if sinks.ptr is not None:
        sink = tl.load(sinks.ptr + h * sinks.stride, mask=exists, other=float("-inf")).to(tl.float32)
        m = tl.maximum(lse, sink)
        pivot = tl.where(m == float("-inf"), 0.0, m)
        weight = tl.exp2((lse - pivot) * LOG2E)
        if LARGE_SCORES:
            weight *= partial.l
        l = weight + tl.exp2((sink - pivot) * LOG2E)
        out = out * (weight / tl.where(l == 0.0, 1.0, l))[:, None]
        lse = tl.where(l == 0.0, float("-inf"), pivot + logsumexp(0.0, l))
    elif LARGE_SCORES:
        lse += logsumexp(0.0, partial.l)
    return out, lse


@triton.jit
def load_prefix(buffers, item, rows, d, DV: tl.constexpr):
    """The result of rows over the prefix that their sequence shares with others, at the columns d (1, ..)."""
    pointers = row_pointers(buffers.prefix_out, item, rows)[:, None] + columns(buffers.prefix_out, d)
    out = tl.load(pointers, mask=rows.exists[:, None] & (d < DV), other=0.0)
    lse = tl.load(row_pointers(buffers.prefix_lse, item, rows), mask=rows.exists, other=float("-inf"))
    return Partial(out, lse, lse)


@triton.jit
def store_rows(buffers, partial, item, rows, d, sinks, batch, CONFIG: tl.constexpr):
    """Write out, at the columns d (1, ..), and lse of rows whose partial result covers all of their keys from
    item.start on."""
    if CONFIG.MERGE_PREFIX:
        if item.start > 0:
            partial = merge(load_prefix(buffers, item, rows, d, CONFIG.DV), partial, False)
    out, lse = add_sink(partial, sinks, rows.h, rows.exists & (item.b < batch), CONFIG.LARGE_SCORES)
    o = buffers.out
    o_rows = row_pointers(o, item, rows)[:, None] + columns(o, d)
    tl.store(o_rows, out.to(o.ptr.dtype.element_ty), mask=rows.exists[:, None] & (d < CONFIG.DV))
    tl.store(row_pointers(buffers.lse, item, rows), lse, mask=rows.exists)


@triton.jit
def combine_splits(partials, first, num_splits, head, r, d, CONFIG: tl.constexpr):
    """The partial result of rows r over the splits of a work item, `first` and those after it. BLOCK_C at a time."""
    c = tl.arange(0, CONFIG.BLOCK_C)
    m = tl.full([r.shape[0]], float("-inf"), tl.float32)
    l = tl.full([r.shape[0]], 0.0, tl.float32)
    acc = tl.full([r.shape[0], d.shape[0]], 0.0, tl.float32)
    for c0 in tl.range(0, num_splits, CONFIG.BLOCK_C):
        exists = (c0 + c < num_splits)[:, None] & (r < partials.rows)[None, :]
        at = slot_of(partials, first + c0 + c, 0, 0, head, CONFIG)[:, None] + r[None, :]
        lse = tl.load(partials.lse + at, mask=exists, other=float("-inf"))
        out = partials.out + (at * CONFIG.DV)[:, :, None] + d[None, None, :]
        out = tl.load(out, mask=exists[:, :, None] & (d < CONFIG.DV)[None, None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((lse - pivot[None, :]) * LOG2E)
        if CONFIG.LARGE_SCORES:
            weight *= tl.load(partials.l + at, mask=exists, other=0.0)
        alpha = tl.exp2((m - pivot) * LOG2E)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        l = l * alpha + tl.sum(weight, 0)
        m = m_new
    if not CONFIG.LARGE_SCORES:
        m = tl.where(l == 0.0, float("-inf"), m + logsumexp(0.0, l))
    return Partial(acc / tl.where(l == 0.0, 1.0, l)[:, None], m, l)


@triton.jit
def combine_chunks(partials, divided, r, d, CONFIG: tl.constexpr):
    """The partial result of rows r over all chunks of a work item with splits of a fixed size, merged in their
    order, so that the result does not depend on the batch. The first split has merged its chunks; the others have each
    chunk in a slot of its own."""
    item, n, first, num_splits, head = divided
    slot = slot_of(partials, first, n, 0, head, CONFIG)
    total = load_partial(rows_of_partial(partials, slot, r, d, CONFIG.DV), CONFIG.LARGE_SCORES)
    for k in range(1, num_splits):
        begin = split_chunk(item.num_chunks, k, num_splits)
        for chunk in range(begin, split_chunk(item.num_chunks, k + 1, num_splits)):
            slot = slot_of(partials, first + k, n, 1 + chunk - begin, head, CONFIG)
            chunk_partial = rows_of_partial(partials, slot, r, d, CONFIG.DV)
            total = merge(total, load_partial(chunk_partial, CONFIG.LARGE_SCORES), CONFIG.LARGE_SCORES)
    return total


@triton.jit
def combine_item(buffers, divided, r, d, sinks, sizes, CONFIG: tl.constexpr):
    """Write out and lse of rows r, columns d of a divided work item."""
    item, _number, first, num_splits, head = divided
    partials = partials_of(buffers.workspace, sizes, CONFIG.DV)
    if CONFIG.FIXED_SPLIT:
        total = combine_chunks(partials, divided, r, d[None, :], CONFIG)
    else:
        total = combine_splits(partials, first, num_splits, head, r, d, CONFIG)
    at = tile_rows(item, head, r, sizes.rows, CONFIG.GROUP)
    store_rows(buffers, total, item, at, d[None, :], sinks, sizes.batch, CONFIG)


@triton.jit
def store_empty_rows(buffers, empties, sinks, sizes, tile_height, CONFIG: tl.constexpr):
    """Write out and lse of work items without keys: BLOCK_R rows by BLOCK_DV columns at a time. Such a tile may have
    more than `rows` rows: those past the last sequence."""
    wide = tl.cdiv(CONFIG.DV, CONFIG.BLOCK_DV)
    tall = tl.cdiv(tile_height, CONFIG.BLOCK_R) * wide
    for n in range(tl.program_id(0), empties * CONFIG.KV_HEADS * tall, tl.num_programs(0)):
        records = item_records(buffers.schedule, sizes, CONFIG.KV_HEADS)
        item = load_item(records + (sizes.items - 1 - n // tall // CONFIG.KV_HEADS).to(tl.int64) * 8)
        r = n % tall // wide * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
        d = n % wide * CONFIG.BLOCK_DV + tl.arange(0, CONFIG.BLOCK_DV)
        lse = tl.full([CONFIG.BLOCK_R], float("-inf"), tl.float32)
        l = tl.full([CONFIG.BLOCK_R], 0.0, tl.float32)
        empty = Partial(tl.full([CONFIG.BLOCK_R, CONFIG.BLOCK_DV], 0.0, tl.float32), lse, l)
        at = tile_rows(item, n // tall % CONFIG.KV_HEADS, r, tile_height, CONFIG.GROUP)
        store_rows(buffers, empty, item, at, d[None, :], sinks, sizes.batch, CONFIG)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def combine_kernel(
    buffers,
    sinks,
    items,
    num_splits,
    slots,
    whole_slots,
    num_slots,
    rows,
    batch,
    target,
    tile_height,
    CONFIG: tl.constexpr,
):
    """Write out and lse of the work items that several splits share, and of those without keys: BLOCK_R rows by
    BLOCK_DV columns at a time."""
    if CONFIG.OVERLAP:
        gdc_wait()
    schedule = buffers.schedule
    divided = tl.load(schedule).to(tl.int32)
    empties = tl.load(schedule + 1).to(tl.int32)
    sizes = SplitSizes(items, num_splits, slots, whole_slots, num_slots, rows, batch, target)
    wide = tl.cdiv(CONFIG.DV, CONFIG.BLOCK_DV)
    blocks = tl.cdiv(rows, CONFIG.BLOCK_R) * wide
    store_empty_rows(buffers, empties, sinks, sizes, tile_height, CONFIG)
    for n in range(tl.program_id(0), divided * CONFIG.KV_HEADS * blocks, tl.num_programs(0)):
        number = n // blocks // CONFIG.KV_HEADS
        item = load_item(item_records(schedule, sizes, CONFIG.KV_HEADS) + number.to(tl.int64) * 8)
        cum = item_starts(schedule, sizes, CONFIG.KV_HEADS) + number
        first = tl.load(cum).to(tl.int32)
        r = n % blocks // wide * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
        d = n % wide * CONFIG.BLOCK_DV + tl.arange(0, CONFIG.BLOCK_DV)
        divided_item = DividedItem(
            item, number, first, tl.load(cum + 1).to(tl.int32) - first, n // blocks % CONFIG.KV_HEADS
        )
        combine_item(buffers, divided_item, r, d, sinks, sizes, CONFIG)
