"""What several programs have of one row set, put together: softmax over a union of keys follows from (o, lse) over its
parts (tilewise.merge). Where scores may be far out (FAR), an lse does not tell how many keys a part has
(`renormalise`): then (o, m, l) are kept, with m in place of lse."""

import triton
import triton.language as tl

from ..device.softmax import logsumexp
from ..device.structs import LOG2E, Work
from ..pdl import gdc_wait
from .schedule import items_of, load_item, load_stretch, task_of, work_of


@triton.jit
def row_pointers(x, w, i, h):
    """Pointers to the rows (query i, head h) of a tile."""
    base = x.ptr + w.b.to(tl.int64) * x.strides[0]
    return base + (w.q0 + i).to(tl.int64) * x.strides[1] + h.to(tl.int64) * x.strides[2]


@triton.jit
def columns(x, d):
    """Offsets of the dims d within a row, with 64 bits where they lie that far apart."""
    if x.wide is not None:
        d = d.to(tl.int64)
    return d * x.strides[3]


@triton.jit
def sums_of(room, programs, slots, rows, DV: tl.constexpr):
    """Where the workspace has l of all parts: behind the parts, their lse or m, and the programs' flags."""
    return room + tl.cast(programs, tl.int64) * slots * rows * (DV + 1) + programs


@triton.jit
def union(o_a, log_a, l_a, o_b, log_b, l_b, FAR: tl.constexpr):
    """(o, lse) over the keys of both, l without a meaning; or FAR (o, m, l). The products are fused as written, for the
    same bits wherever this is called."""
    top = tl.maximum(log_a, log_b)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    w_a = tl.exp2((log_a - pivot) * LOG2E)
    w_b = tl.exp2((log_b - pivot) * LOG2E)
    if FAR:
        w_a *= l_a
        w_b *= l_b
    l = w_a + w_b
    share = 1.0 / tl.where(l == 0.0, 1.0, l)
    o = tl.fma(o_a, (w_a * share)[:, None], o_b * (w_b * share)[:, None])
    if FAR:
        return o, top, l
    else:
        return o, tl.where(l == 0.0, float("-inf"), pivot + logsumexp(0.0, l)), l


@triton.jit
def with_sink(o, log, l, sinks, h, exists, FAR: tl.constexpr):
    """(o, lse): the sink joins the denominator, once, behind all keys."""
    if sinks.ptr is not None:
        sink = tl.load(sinks.ptr + h * sinks.stride, mask=exists, other=float("-inf")).to(tl.float32)
        top = tl.maximum(log, sink)
        pivot = tl.where(top == float("-inf"), 0.0, top)
        w_o = tl.exp2((log - pivot) * LOG2E)
        if FAR:
            w_o *= l
        l = w_o + tl.exp2((sink - pivot) * LOG2E)
        o = o * (w_o / tl.where(l == 0.0, 1.0, l))[:, None]
        log = tl.where(l == 0.0, float("-inf"), pivot + logsumexp(0.0, l))
    elif FAR:
        log += logsumexp(0.0, l)
    return o, log


@triton.jit
def joined(
    room, logs, sums, first, last, head, slots, rows, r, d, KV_HEADS: tl.constexpr, DV: tl.constexpr,
    BLOCK_C: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """(o, lse) or FAR (o, m, l), as `union`, of rows r over all parts of an item: the prefix of the team before
    `first`, and what each team from there to `last` has in its second slot. BLOCK_C parts at a time."""
    c = tl.arange(0, BLOCK_C)
    parts = last - first + 2
    top = tl.full([r.shape[0]], float("-inf"), tl.float32)
    for c0 in tl.range(0, parts, BLOCK_C):
        held = (c0 + c < parts)[:, None] & (r < rows)[None, :]
        x = tl.load(
            logs + parts_at(first - 1 + c0 + c, first, head, slots, rows, r, KV_HEADS), mask=held, other=float("-inf")
        )
        top = tl.maximum(top, tl.max(x, 0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    l = tl.full([r.shape[0]], 0.0, tl.float32)
    total = tl.full([r.shape[0], d.shape[0]], 0.0, tl.float32)
    for c0 in tl.range(0, parts, BLOCK_C):
        held = (c0 + c < parts)[:, None] & (r < rows)[None, :]
        at = parts_at(first - 1 + c0 + c, first, head, slots, rows, r, KV_HEADS)
        weight = tl.exp2((tl.load(logs + at, mask=held, other=float("-inf")) - pivot[None, :]) * LOG2E)
        if FAR:
            weight *= tl.load(sums + at, mask=held, other=0.0)
        part = room + (at * DV)[:, :, None] + d[None, None, :]
        part = tl.load(part, mask=held[:, :, None] & (d < DV)[None, None, :], other=0.0)
        total += tl.sum(part * weight[:, :, None], 0)
        l += tl.sum(weight, 0)
    if not FAR:
        top = tl.where(l == 0.0, float("-inf"), pivot + logsumexp(0.0, l))
    return total / tl.where(l == 0.0, 1.0, l)[:, None], top, l


@triton.jit
def parts_at(team, first, head, slots, rows, r, KV_HEADS: tl.constexpr):
    """Where the rows r of these teams' parts lie: a prefix in the first slot, what goes on with it in the second."""
    slot = (tl.cast(team, tl.int64) * KV_HEADS + head) * slots + (team >= first).to(tl.int64)
    return (slot * rows)[:, None] + r[None, :]


@triton.jit
def store_set(
    o, lse, total, log, l, it, head, r, d, rows, batch, sinks, GROUP: tl.constexpr, DV: tl.constexpr, FAR: tl.constexpr
):
    """out and lse of the rows r of a row set, from those over its keys."""
    i = (it.first + r) // GROUP
    h = head * GROUP + (it.first + r) % GROUP
    exists = (i < it.n_q) & (r < rows)
    w = Work(it.b, head, it.first, it.q0, it.n_q, 0, it.n_k, 0)
    total, log = with_sink(total, log, l, sinks, h, exists & (it.b < batch), FAR)
    o_rows = row_pointers(o, w, i, h)[:, None] + columns(o, d[None, :])
    tl.store(o_rows, total.to(o.ptr.dtype.element_ty), mask=exists[:, None] & (d < DV)[None, :])
    tl.store(row_pointers(lse, w, i, h), log, mask=exists)


@triton.jit(do_not_specialize=["programs", "items", "slots", "rows", "batch"])
def combine_kernel(
    o, lse, room, ledger, sinks, programs, items, slots, rows, batch, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_DV: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """out and lse of the items that several teams share, and of those without keys: BLOCK_R rows by BLOCK_DV
    columns at a time."""
    if OVERLAP:
        gdc_wait()
    count = tl.load(ledger).to(tl.int32)
    empties = tl.load(ledger + 1).to(tl.int32)
    teams = programs // KV_HEADS
    wide = tl.cdiv(DV, BLOCK_DV)
    blocks = tl.cdiv(rows, BLOCK_R) * wide
    logs = room + tl.cast(programs, tl.int64) * slots * rows * DV
    sums = sums_of(room, programs, slots, rows, DV)
    for n in range(tl.program_id(0), empties * KV_HEADS * blocks, tl.num_programs(0)):
        it = load_item(items_of(ledger, teams, items) + (items - 1 - n // blocks // KV_HEADS).to(tl.int64) * 8)
        r = n % blocks // wide * BLOCK_R + tl.arange(0, BLOCK_R)
        d = n % wide * BLOCK_DV + tl.arange(0, BLOCK_DV)
        log = tl.full([BLOCK_R], float("-inf"), tl.float32)
        l = tl.full([BLOCK_R], 0.0, tl.float32)
        total = tl.full([BLOCK_R, BLOCK_DV], 0.0, tl.float32)
        store_set(o, lse, total, log, l, it, n // blocks % KV_HEADS, r, d, rows, batch, sinks, GROUP, DV, FAR)
    for n in range(tl.program_id(0), count * KV_HEADS * blocks, tl.num_programs(0)):
        task = task_of(ledger, teams, n // blocks // KV_HEADS)
        first, last = load_stretch(task)
        it = load_item(task + 4)
        head = n // blocks % KV_HEADS
        r = n % blocks // wide * BLOCK_R + tl.arange(0, BLOCK_R)
        d = n % wide * BLOCK_DV + tl.arange(0, BLOCK_DV)
        if SPLIT:
            slot = (tl.cast(first - 1, tl.int64) * KV_HEADS + head) * slots
            fits = (r < rows)[:, None] & (d < DV)[None, :]
            total = tl.load(room + ((slot * rows + r) * DV)[:, None] + d[None, :], mask=fits, other=0.0)
            log = tl.load(logs + slot * rows + r, mask=r < rows, other=float("-inf"))
            l = log
            if FAR:
                l = tl.load(sums + slot * rows + r, mask=r < rows, other=0.0)
            team = first
            entered = tl.load(work_of(ledger, first) + 1).to(tl.int32)
            begin = entered
            for unit in range(begin, it.units):
                if team < last:
                    if tl.load(work_of(ledger, team + 1) + 1) == unit:
                        team += 1
                        entered = unit
                slot = (tl.cast(team, tl.int64) * KV_HEADS + head) * slots + 1 + unit - entered
                part = tl.load(room + ((slot * rows + r) * DV)[:, None] + d[None, :], mask=fits, other=0.0)
                log_part = tl.load(logs + slot * rows + r, mask=r < rows, other=float("-inf"))
                l_part = log_part
                if FAR:
                    l_part = tl.load(sums + slot * rows + r, mask=r < rows, other=0.0)
                total, log, l = union(total, log, l, part, log_part, l_part, FAR)
        else:
            total, log, l = joined(
                room, logs, sums, first, last, head, slots, rows, r, d, KV_HEADS, DV, BLOCK_C, FAR
            )  # fmt: skip
        store_set(o, lse, total, log, l, it, head, r, d, rows, batch, sinks, GROUP, DV, FAR)
