"""The launch that follows kernels whose rows do not all see the same keys, and nearly always finds nothing to do.

A matrix product cannot leave a value out: a weight of 0 times nan is nan, and so is 0 times inf. The kernels look at
what they have summed and raise a flag where it has a nan; a kernel of this module, which follows on the stream, looks
at the flags and computes the flagged tiles once more, with the products that know who sees what (`CAREFUL`): 16 rows of
the other side at a time, none of them kept from one to the next, so it asks for few registers.

EACH: there is a flag for each tile, which its program has set to 0 or 1. Otherwise there is one for all, which the
kernel before only ever raises.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.attend import store_attention, stream_keys
from .device.gradients import key_gradients, query_gradient, store_key_gradients
from .device.structs import ANY_SIZE, Law, Rows, Work
from .device.tile_io import store_rows
from .device.tile_range import locate
from .jvp import moves, store_moves
from .pdl import gdc_launch_dependents, gdc_wait

LOOK: tl.constexpr = tl.constexpr(128)  # flags that a program looks at at once
LINE: tl.constexpr = tl.constexpr(16)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """What follows the repair may be placed already; the repair waits for the kernels before it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def in_question(flags, total, EACH: tl.constexpr):
    """How many of so many tiles there are to look at: all, or none where the one flag is not raised."""
    if EACH:
        return total
    else:
        return tl.where(tl.load(flags) > 0, total, 0)


@triton.jit
def take_down(flags, raised):
    """The one flag, once all programs have seen it."""
    if raised:  # noqa: SIM102 - only then is it counted
        if tl.atomic_add(flags + 1, 1) == tl.num_programs(0) - 1:
            tl.store(flags, 0)
            tl.store(flags + 1, 0)


@triton.jit
def end_of_look(flags, first, total, EACH: tl.constexpr):
    """Where the LOOK tiles of this program from `first` on end; at once where none of their flags is raised."""
    end = tl.minimum(first + tl.num_programs(0) * LOOK, total)
    if EACH:
        n = first + tl.arange(0, LOOK) * tl.num_programs(0)
        raised = tl.max(tl.load(flags + n, mask=n < total, other=0), 0)
        end = tl.where(raised > 0, end, first)
    return end


@triton.jit
def is_raised(flags, n, EACH: tl.constexpr):
    if EACH:
        return tl.load(flags + n) > 0
    else:
        return True


@triton.jit(**ANY_SIZE)
def repair_forward_kernel(
    q, k, v, o, lse, flags, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch, parts, terms, total,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, EACH: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """After a forward of `total` tiles; of parts of the keys, before they are merged. A flag for all is taken down for
    the next launch."""
    begin(PLAN.OVERLAP)
    total = in_question(flags, total, EACH)
    if not EACH:
        take_down(flags, total > 0)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * LOOK):
        for n in range(first, end_of_look(flags, first, total, EACH), tl.num_programs(0)):
            if is_raised(flags, n, EACH):
                pid = n
                part = 0
                if parts is not None:
                    part = n % parts
                    pid = n // parts
                w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M, PLAN.HEADS)
                if w.first < w.n_q * PLAN.HEADS:
                    acc, m, l = stream_keys(
                        q, k, v, w, part, parts, Law(before, after, scale, terms, SCORE_MOD, MASK_MOD), PLAN, True
                    )  # fmt: skip
                    b = w.b
                    rows = None
                    if parts is not None:
                        b += part * batch
                        rows = parts * batch
                    store_attention(acc, m, l, o, lse, n_q, heads, w, b, rows, terms, PLAN)


class Tiles(NamedTuple):
    """The tiles of one pass of the backward: a flag for each or one for all, and how they are counted (`locate`). They
    are repaired a few rows at a time, by the plan: products of 64 rows and more are for kernels with as many warps as
    theirs, and not for this one."""

    flags: tl.tensor
    total: tl.tensor
    per_head: tl.tensor
    heads: tl.tensor
    batch: tl.tensor


@triton.jit
def rows_from(w, first):
    """The same share, from another row on."""
    return Work(w.b, w.h, first, w.q0, w.n_q, w.k0, w.n_k, w.r0)


@triton.jit
def repair_queries(
    saved, dq, tiles, cu_q, cu_k, n_q, n_k, rate, law, EACH: tl.constexpr, ROWS: tl.constexpr, PLAN: tl.constexpr
):  # fmt: skip
    total = in_question(tiles.flags, tiles.total, EACH)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * LOOK):
        for n in range(first, end_of_look(tiles.flags, first, total, EACH), tl.num_programs(0)):
            if is_raised(tiles.flags, n, EACH):
                w = locate(
                    n, tiles.per_head, tiles.heads, tiles.batch, cu_q, cu_k, n_q, n_k, cu_q, ROWS
                )  # fmt: skip
                for row in range(w.first, tl.minimum(w.first + ROWS, w.n_q), PLAN.BLOCK_M):
                    u = rows_from(w, row)
                    acc = query_gradient(saved, u, law, PLAN, True)
                    store_rows(Rows(dq, u.b, u.h, u.q0, u.first, u.n_q), acc * rate, PLAN.D)


@triton.jit
def repair_keys(
    saved, dk, dv, tiles, cu_q, cu_k, n_q, n_k, rate, law, EACH: tl.constexpr, ROWS: tl.constexpr, PLAN: tl.constexpr
):  # fmt: skip
    total = in_question(tiles.flags, tiles.total, EACH)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * LOOK):
        for n in range(first, end_of_look(tiles.flags, first, total, EACH), tl.num_programs(0)):
            if is_raised(tiles.flags, n, EACH):
                w = locate(
                    n, tiles.per_head, tiles.heads, tiles.batch, cu_q, cu_k, n_q, n_k, cu_k, ROWS
                )  # fmt: skip
                for row in range(w.first, tl.minimum(w.first + ROWS, w.n_k), PLAN.BLOCK_N):
                    u = rows_from(w, row)
                    dk_acc, dv_acc = key_gradients(saved, u, tiles.heads, law, PLAN, True)
                    store_key_gradients(dk, dv, dk_acc, dv_acc, u, rate, PLAN)


@triton.jit(**ANY_SIZE)
def repair_backward_kernel(
    saved, dq, dk, dv, flags, cu_q, cu_k, n_q, n_k, before, after, scale, rate,
    q_total, k_total, q_tiles, k_tiles, heads, kv_heads, batch, q_terms, k_terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """After the backward: dQ, dK and dV, with the plan of the pass that summed each, in tiles of so many QUERIES and
    KEYS, but for fewer rows at a time; VALUE is None where KEY's sums both of the latter. `flags` has those of the
    queries, of the keys and, where KEY does not sum both, of the values, each from a multiple of LINE on."""
    begin(QUERY.OVERLAP)
    of_queries = Tiles(flags, q_total, q_tiles, heads, batch)
    repair_queries(
        saved, dq, of_queries, cu_q, cu_k, n_q, n_k, rate, Law(before, after, scale, q_terms, SCORE_MOD, MASK_MOD),
        EACH, QUERIES, QUERY,
    )  # fmt: skip
    if EACH:
        flags += tl.cdiv(q_total, LINE) * LINE
    of_keys = Tiles(flags, k_total, k_tiles, kv_heads, batch)
    repair_keys(
        saved, dk, dv, of_keys, cu_q, cu_k, n_q, n_k, rate, Law(before, after, scale, k_terms, SCORE_MOD, MASK_MOD),
        EACH, KEYS, KEY,
    )  # fmt: skip
    if VALUE is not None:
        of_values = Tiles(flags + tl.cdiv(k_total, LINE) * LINE, k_total, k_tiles, kv_heads, batch)
        repair_keys(
            saved, dk, dv, of_values, cu_q, cu_k, n_q, n_k, rate,
            Law(before, after, scale, k_terms, SCORE_MOD, MASK_MOD), EACH, KEYS, VALUE,
        )  # fmt: skip


@triton.jit(**ANY_SIZE)
def repair_jvp_kernel(
    moving, o, lse, do, dlse, flags, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch, total,
    EACH: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """After a forward-mode pass of `total` tiles."""
    begin(PLAN.OVERLAP)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * LOOK):
        for n in range(first, end_of_look(flags, first, total, EACH), tl.num_programs(0)):
            if is_raised(flags, n, EACH):
                w = locate(n, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M)
                if w.first < w.n_q:
                    moved, acc = moves(
                        moving, lse, n_q, heads, w, Law(before, after, scale, (), None, None), PLAN, True
                    )
                    store_moves(moved, acc, o, do, dlse, n_q, heads, w, PLAN)
