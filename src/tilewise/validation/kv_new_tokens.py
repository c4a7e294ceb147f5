"""Checks the values of new tokens that are written into a cache: places, positions of the rotary embedding. Reads them,
which synchronises a GPU."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from .. import settings
from ..errors import AttentionError
from ..kv_request import AppendRequest
from .kv_contents import check_constant_scales, check_distinct, check_length, check_pages, check_rows, check_slots
from .memory import check_new_values
from .offsets import check_offset_values

Spans = list[tuple[int, int]]  # first token and number of tokens of every sequence


def check_append(append: AppendRequest) -> None:
    """Raises AttentionError for the first new token of `append_kv` that has no place in the cache, or has another
    invalid value."""
    places, k = append.places, append.k
    if places.cu_new is not None:
        check_offset_values("cu_seqlens_new", places.cu_new, append.k_new.shape[0])
    check_constant_scales(append.k_scale, append.v_scale)
    if append.slots is not None:
        check_slots(append.slots, k.shape[0] * k.shape[1], settings.checks_contents())
    else:
        _check_places(append)
    check_new_tokens(append)


def _check_places(append: AppendRequest) -> None:
    places, k = append.places, append.k
    page, capacity = k.shape[1], places.capacity(k)
    check_rows(places.rows, k.shape[0])
    table: list[list[int]] | None = None if places.table is None else places.table.tolist()
    if places.indptr is not None and places.table is not None:
        check_offset_values("page_table[0]", places.indptr, places.table.shape[0])
        table = [places.table[a:b].tolist() for a, b in pairwise(places.indptr.tolist())]
    for b, (length, (_, new)) in enumerate(zip(places.lengths.tolist(), _new_spans(append), strict=True)):
        check_length(b, length, new, capacity if table is None else len(table[b]) * page)
        if table is not None and new:
            check_pages(b, table[b], (length // page, -(-(length + new) // page)), k.shape[0])
            check_distinct(b, table[b], (length, new), page)


def check_new_tokens(append: AppendRequest) -> None:
    """Raises AttentionError for the first position outside of the rotary embedding's table, and for values of an MLA
    cache that are not the first columns of the keys."""
    check_new_values(append.k_new, append.v_new, append.k, append.v, read=True)
    rotary = append.rotary
    if rotary is None:
        return
    count, new = rotary.cos.shape[0], _new_spans(append)
    lengths = append.places.lengths.tolist()
    _check_positions("new token", rotary.positions, new, lengths, count)
    if append.q is not None:
        queries = _spans(append.q, append.cu_q)
        given = rotary.positions if rotary.q_positions is None else rotary.q_positions
        firsts = [n + a[1] - b[1] for n, a, b in zip(lengths, new, queries, strict=True)]
        _check_positions("query", given, queries, firsts, count)


def _check_positions(what: str, given: Tensor | None, spans: Spans, firsts: list[int], count: int) -> None:
    """`firsts`: the position of the first token of every sequence, where none are given. A query before the first key
    has a negative one, and sees nothing."""
    numbers = None if given is None else given.flatten().tolist()
    for b, (first, n) in enumerate(spans):
        for i in range(n):
            position = max(firsts[b] + i, 0) if numbers is None else numbers[first + i]
            if not 0 <= position < count:
                expected = f"0 to {count - 1}, the rows of cos and sin"
                raise AttentionError(f"rotary position of {what} {i} of sequence {b}", position, expected)


def _new_spans(append: AppendRequest) -> Spans:
    return _spans(append.k_new, append.places.cu_new)


def _spans(x: Tensor, cu: Tensor | None) -> Spans:
    if cu is None:
        return [(b * x.shape[1], x.shape[1]) for b in range(x.shape[0])]
    return [(a, max(b - a, 0)) for a, b in pairwise(cu.tolist())]
