"""Shared prefixes: which consecutive sequences begin with the same pages. Found on the device, as the schedule is.

Two kernels: the first compares the pages of each sequence with those of the sequence before it; the second divides the
batch into groups. The keys that all sequences of a group share are attended to once, for the rows of all of them: in
the schedule of prefixes a group is one packed sequence, the others of the group are empty.

The numbers of the groups, in int32:
    common  batch        leading keys that a sequence has in common with the one before
    lengths batch        keys that a group shares, at its first sequence; 0 at the others
    starts  batch        the same for every sequence: where the keys begin that it attends to alone
    cu_q    batch + 1    offsets of the groups' queries, as in a packed batch
    heads   batch + 1    the first sequence of every group
    least   batch        the smallest `common` of every group
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .schedule import RUNTIME_SIZES, BatchSizes, keys_of_item

GROUP_SIZES = [*RUNTIME_SIZES, "min_shared", "min_saved"]


class Groups(NamedTuple):
    """Pointers to the numbers of the groups."""

    common: tl.tensor
    lengths: tl.tensor
    starts: tl.tensor
    cu_q: tl.tensor
    heads: tl.tensor
    least: tl.tensor


class CommonConfig(NamedTuple):
    """Pages that are compared at once; whether the launch overlaps the one before."""

    BLOCK: int
    OVERLAP: bool


class GroupConfig(NamedTuple):
    """A power of two that is at least the batch; whether the launch overlaps the one before."""

    BLOCK: int
    OVERLAP: bool


@triton.jit
def first_query(cu_q, b, n_q):
    """The first token of sequences b in q. `n_q`: queries of every sequence, or of all if they are packed."""
    if cu_q is None:
        return b * n_q
    else:
        return clamp(tl.load(cu_q + b), 0, n_q)


@triton.jit
def first_page(table, indptr, b, table_stride):
    """A pointer to the page numbers of a sequence."""
    if indptr is None:
        return table + b.to(tl.int64) * table_stride
    else:
        return table + tl.maximum(tl.load(indptr + b), 0)


@triton.jit(do_not_specialize=GROUP_SIZES)
def common_kernel(
    groups,
    sequences,
    table,
    given,
    n_q,
    n_new,
    capacity,
    page_size,
    table_stride,
    batch,
    CONFIG: tl.constexpr,
):
    """Count the leading keys that a sequence has in common with the one before: `given`, or those in equal pages. At
    most the keys before the queries of both, which all of their queries see."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    pair = tl.maximum(b - tl.arange(0, 2), 0)
    sizes = BatchSizes(n_q, n_new, capacity, page_size, batch, 1, batch, 0, 0)
    n_k, _start = keys_of_item(pair, pair, sequences, sizes)
    queries = first_query(sequences.cu_q, pair + 1, n_q) - first_query(sequences.cu_q, pair, n_q)
    limit = tl.maximum(tl.min(n_k - tl.maximum(queries, 0), 0), 0)
    if given is None:
        stop = (limit + page_size - 1) // page_size
        stop = tl.where(b > 0, stop, 0)
        ours = first_page(table, sequences.indptr, b, table_stride)
        theirs = first_page(table, sequences.indptr, tl.maximum(b - 1, 0), table_stride)
        at = tl.cast(0, tl.int32)
        while at < stop:
            n = at + tl.arange(0, CONFIG.BLOCK)
            inside = n < stop
            differ = tl.load(ours + n, mask=inside, other=0) != tl.load(theirs + n, mask=inside, other=0)
            stop = tl.minimum(stop, tl.min(tl.where(differ, n, stop), 0))
            at += CONFIG.BLOCK
        found = stop.to(tl.int64) * page_size
    else:
        found = tl.load(given + b).to(tl.int64)
    common = clamp(found, 0, limit.to(tl.int64)).to(tl.int32)
    tl.store(groups.common + b, tl.where(b > 0, common, 0))


@triton.jit(do_not_specialize=GROUP_SIZES)
def groups_kernel(groups, cu_q, n_q, batch, chunk_size, min_shared, min_saved, CONFIG: tl.constexpr):
    """Divide the batch into groups. A sequence joins the one before it if they share at least `min_shared` keys and not
    less than half of what either shares with its other neighbour. A group shares whole chunks of keys. Nothing is
    shared if that would save less than reading `min_saved` keys."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.arange(0, CONFIG.BLOCK)
    exists = b < batch
    common = tl.load(groups.common + b, mask=exists, other=0)
    before = tl.load(groups.common + b - 1, mask=exists & (b > 0), other=0)
    after = tl.load(groups.common + b + 1, mask=b + 1 < batch, other=0)
    joins = exists & (b > 0) & (common >= min_shared) & (common >= tl.maximum(before, after) // 2)
    leads = exists & (joins == 0)
    group = tl.cumsum(leads.to(tl.int32), 0) - 1
    tl.store(groups.heads + group, b, mask=leads)
    tl.store(groups.heads + tl.sum(leads.to(tl.int32), 0), batch)
    tl.store(groups.least + group, tl.full([CONFIG.BLOCK], 2147483647, tl.int32), mask=leads)
    tl.debug_barrier()
    tl.atomic_min(groups.least + group, common, mask=joins)
    tl.debug_barrier()
    head = tl.load(groups.heads + group, mask=exists, other=0)
    end = tl.load(groups.heads + group + 1, mask=exists, other=0)
    shared = tl.load(groups.least + group, mask=exists, other=0) // chunk_size * chunk_size
    shared = tl.where((end - head > 1) & (shared >= min_shared), shared, 0)
    saved = tl.sum(tl.where(joins, shared, 0).to(tl.int64), 0)
    shared = tl.where(saved >= min_saved, shared, 0)
    tl.store(groups.starts + b, shared, mask=exists)
    tl.store(groups.lengths + b, tl.where(leads, shared, 0), mask=exists)
    own = tl.where(exists, tl.where(leads, b, end), 0)
    tl.store(groups.cu_q + b, first_query(cu_q, own, n_q), mask=exists)
    tl.store(groups.cu_q + batch, first_query(cu_q, batch, n_q))
