"""Who streams which keys of a cache: planned on the device, by one program, from lengths that no host ever reads.

An item is a tile of one sequence's rows (queries and the heads of a group), which stream the units of keys that they
see. Items and units lie on one axis, and each team of programs takes an equal stretch of it, each of its programs with
a KV head of its own: the heads of a token, which lie side by side in memory, are read at about the same time. A team
has at most one item that began before its stretch and one that ends after it: the workspace is constant.

The ledger, of 64-bit numbers, for `teams` and `items`:
    counts  2                   items that are divided; items without keys
    work    (teams + 1, 12)     where each stretch begins: item, unit; and, from the fifth on, the `Item`
    tasks   (teams, 12)         of each divided item: the first team that goes on with it, the last; and the `Item`
    cum     items + 1           where each item begins on the axis
    items   (items, 8)          `Item`: in their order those with keys, and from the end on those without, whose rows
                                `kv_combine` writes

What a kernel needs first, it finds in one place: looks at memory one after another are what small batches wait for.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait


class Item(NamedTuple):
    """A tile of rows: sequence, first row, first token of the sequence in a packed q, its queries, keys and first valid
    key, the first unit of keys that the tile sees and how many there are."""

    b: tl.tensor
    first: tl.tensor
    q0: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    start: tl.tensor
    unit: tl.tensor
    units: tl.tensor


class Stretch(NamedTuple):
    """A place on the axis; of a task, the first team and the last."""

    item: tl.tensor
    unit: tl.tensor


RECORD: tl.constexpr = tl.constexpr(12)


@triton.jit
def work_of(ledger, team):
    return ledger + 2 + RECORD * team


@triton.jit
def task_of(ledger, teams, n):
    return work_of(ledger, teams + 1) + RECORD * n


@triton.jit
def cum_of(ledger, teams):
    return task_of(ledger, teams, teams)


@triton.jit
def items_of(ledger, teams, items):
    return cum_of(ledger, teams) + items + 1


@triton.jit
def load_item(p):
    return Item(
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
def load_stretch(p):
    return Stretch(tl.load(p).to(tl.int32), tl.load(p + 1).to(tl.int32))


@triton.jit
def first_tile(cu_q, b, n_q, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a packed sequence: far enough behind those before it, whatever their lengths."""
    return clamp(tl.load(cu_q + b), 0, n_q) * GROUP // BLOCK_M + b


@triton.jit(
    do_not_specialize=[
        "n_q",
        "new",
        "capacity",
        "page",
        "batch",
        "tiles",
        "items",
        "teams",
        "before",
        "after",
        "unit",
        "least",
        "few",
    ]
)
def plan_kernel(
    ledger, lengths, cu_q, cu_new, starts, indptr, n_q, new, capacity, page, batch, tiles, items, teams, before,
    after, unit, least, few, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, COST: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """COST: what it takes to begin an item, in units of keys; `least`: of them, the shortest stretch, and if no item
    has more and there are teams for all, each has its own. Sequences with more queries than `few`, if there is one, are
    somebody else's. Packed, one more sequence is made of the rows past the last one: it has no keys, so that they are
    written like any empty ones."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    cum = cum_of(ledger, teams)
    table = items_of(ledger, teams, items)
    total = tl.cast(0, tl.int64)
    longest = tl.cast(0, tl.int32)
    reals = tl.cast(0, tl.int32)
    empties = tl.cast(0, tl.int32)
    for first_item in range(0, items, CHUNK):
        n = first_item + tl.arange(0, CHUNK)
        if cu_q is None:
            b = n // tiles
            tile = n % tiles
            q0 = tl.zeros_like(n)
            own = q0 + n_q
        else:
            b = tl.zeros_like(n)
            width = batch + 1
            while width > 1:  # the last sequence whose first tile is not past this one
                half = width // 2
                mid = tl.minimum(b + half, batch)
                b = tl.where(first_tile(cu_q, mid, n_q, GROUP, BLOCK_M) > n, b, mid)
                width -= half
            tile = n - tl.where(b == 0, 0, first_tile(cu_q, b, n_q, GROUP, BLOCK_M))
            q0 = tl.where(b == 0, 0, clamp(tl.load(cu_q + b), 0, n_q))
            q1 = clamp(tl.load(cu_q + b + 1, mask=b < batch, other=n_q), 0, n_q)
            own = tl.maximum(q1 - q0, 0)
        real = (b < batch) & (n < items)
        n_k = tl.load(lengths + b, mask=real, other=0)
        if cu_new is None:
            n_k += tl.where(real, new, 0)
        else:
            gained = tl.load(cu_new + b + 1, mask=real, other=0) - tl.load(cu_new + b, mask=real, other=0)
            n_k += tl.maximum(gained, 0)
        room = tl.zeros_like(n) + capacity
        if indptr is not None:
            pages = capacity // tl.maximum(page, 1)  # of all sequences: what is told of more is not there
            begin = clamp(tl.load(indptr + b, mask=real, other=0), 0, pages)
            until = clamp(tl.load(indptr + b + 1, mask=real, other=0), 0, pages)
            room = tl.maximum(until - begin, 0) * page
        n_k = clamp(n_k, 0, tl.where(real, room, 0))
        start = tl.zeros_like(n)
        if starts is not None:
            start = clamp(tl.load(starts + b, mask=real, other=0), 0, n_k)
        row = tile * BLOCK_M
        exists = (n < items) & (row < own * GROUP)
        if few is not None:
            exists = exists & ((own <= few) | (b == batch))
        at = row // GROUP + n_k - own
        last = tl.minimum((row + BLOCK_M - 1) // GROUP, own - 1) + n_k - own
        lo = start
        hi = n_k
        if before is not None:
            lo = tl.maximum(lo, at - before)
        if after is not None:
            hi = tl.minimum(hi, last + after + 1)
        unit0 = lo // unit
        units = tl.where(hi > lo, (hi + unit - 1) // unit - unit0, 0)
        real = (exists & (units > 0)).to(tl.int32)
        empty = (exists & (units == 0)).to(tl.int32)
        place = tl.where(units > 0, reals + tl.cumsum(real, 0) - 1, items - empties - tl.cumsum(empty, 0))
        cost = (real * (units + COST)).to(tl.int64)
        longest = tl.maximum(longest, tl.max(real * units, 0))
        tl.store(cum + place, total + tl.cumsum(cost, 0) - cost, mask=real > 0)
        total += tl.sum(cost, 0)
        reals += tl.sum(real, 0)
        empties += tl.sum(empty, 0)
        p = table + place.to(tl.int64) * 8
        fields = (b, row, q0, own, n_k, start, unit0, units)
        for field in tl.static_range(8):
            tl.store(p + field, fields[field].to(tl.int64), mask=exists)
    tl.store(cum + reals, total)
    tl.store(ledger + 1, empties.to(tl.int64))
    tl.debug_barrier()

    team = tl.arange(0, BLOCK_T)
    each = tl.maximum((total + teams - 1) // teams, least)
    x = tl.minimum(team.to(tl.int64) * each, total)
    if (reals <= teams) & (longest <= least):
        x = tl.load(cum + tl.minimum(team, reals))
    item = tl.zeros_like(team)
    width = reals + 1
    while width > 1:  # the last item that does not begin past x
        half = width // 2
        mid = tl.minimum(item + half, reals)
        item = tl.where(tl.load(cum + mid) > x, item, mid)
        width -= half
    some = item < reals
    block = tl.where(some, tl.maximum(x - tl.load(cum + item) - COST, 0), 0)
    used = team <= teams
    work = work_of(ledger, team)
    tl.store(work, item.to(tl.int64), mask=used)
    tl.store(work + 1, block, mask=used)
    own = table + item.to(tl.int64) * 8
    for n in tl.static_range(8):
        tl.store(work + 4 + n, tl.load(own + n, mask=some, other=-1), mask=used)
    tl.debug_barrier()

    goes_on = (block > 0) & (team > 0) & (team < teams)
    begins = goes_on & ~continues(work_of(ledger, team - 1), item, goes_on)
    ends = goes_on & ~continues(work_of(ledger, team + 1), item, goes_on & (team + 1 < teams))
    tl.store(ledger, tl.sum(begins.to(tl.int64), 0))
    task = task_of(ledger, teams, tl.cumsum(begins.to(tl.int32), 0) - 1)
    tl.store(task, team.to(tl.int64), mask=begins)
    tl.store(task + 1, team.to(tl.int64), mask=ends)
    for n in tl.static_range(8):
        tl.store(task + 4 + n, tl.load(own + n, mask=begins, other=0), mask=begins)


@triton.jit
def continues(work, item, mask):
    """Whether the stretch that begins there goes on with this item."""
    return (tl.load(work, mask=mask, other=-1) == item) & (tl.load(work + 1, mask=mask, other=0) > 0)
