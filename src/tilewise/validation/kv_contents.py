"""Checks the values of a call with a KV cache: lengths, offsets, pages, slots. Reads them, which synchronises a GPU.

Calls on a CPU check what would give a wrong result without a word. The rest, which is defined or has no effect (such as
a slot past the cache, which is no key), is checked by `check_kv` and with TILEWISE_CHECK=1 alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .. import settings
from ..errors import AttentionError
from ..kv_request import AppendRequest, KvRequest, PlannedTile, Scale
from ..mods.program import Mod, check_tables
from ..request import gpu_of
from .offsets import check_offset_values, is_readable_without_sync


def are_read(x: Tensor) -> bool:
    """Whether calls with this tensor check contents: on a CPU, where no kernel runs, or with TILEWISE_CHECK=1."""
    if torch.compiler.is_compiling():  # the ops check; torch.compile would guard on the number of environment variables
        return False
    if settings.checks_contents():
        return True
    return is_readable_without_sync(x) and gpu_of(x.device) is None


def check(request: KvRequest, append: AppendRequest | None = None, full: bool = False) -> None:
    """Raises AttentionError for the first sequence with an invalid value.

    Args:
        request: the call.
        append: its new tokens, where they are not written yet.
        full: whether to check what has a defined result, or no effect, too.
    """
    slots = None if append is None else append.slots
    full = full or settings.checks_contents()
    dense, places, k = request.dense, request.places, request.k
    if dense.cu_q is not None:
        check_offset_values("cu_seqlens_q", dense.cu_q, dense.q.shape[0])
    appended = [places.new] * places.batch
    if places.cu_new is not None:
        appended = [b - a for a, b in pairwise(places.cu_new.tolist())]
        total = sum(max(n, 0) for n in appended)
        check_offset_values("cu_seqlens_new", places.cu_new, total if append is None else append.k_new.shape[0])
    page, capacity, before = k.shape[1], places.capacity(k), request.spec.before
    ends = [] if places.indptr is None else places.indptr.tolist()
    if ends and places.table is not None:
        check_offset_values("page_table[0]", places.indptr, places.table.shape[0])  # type: ignore[arg-type]
    queries = [dense.q.shape[1]] * places.batch
    if dense.cu_q is not None:
        queries = [b - a for a, b in pairwise(dense.cu_q.tolist())]
    if full and dense.cu_q is not None and 0 < request.max_seqlen_q < max(queries, default=0):
        expected = f"at least {max(queries)}, the most queries of a sequence, or None"
        raise AttentionError("max_seqlen_q", request.max_seqlen_q, expected)
    drafts = None if request.tree is None else 64 * request.tree.shape[1]
    if drafts is not None and max(queries, default=0) > drafts:
        raise AttentionError("tree", f"{drafts} drafts", f"{max(queries)}, one for each query of a sequence")
    starts = [0] * places.batch if places.starts is None else places.starts.tolist()
    table = None if places.table is None else places.table.tolist()
    check_constant_scales(request.k_scale, request.v_scale)
    for b, (length, new) in enumerate(zip(places.lengths.tolist(), appended, strict=True)):
        check_length(b, length, new, (ends[b + 1] - ends[b]) * page if ends else capacity)
        if not 0 <= starts[b] <= length + new:
            raise AttentionError(f"starts[{b}]", starts[b], f"0 to {length + new}, the tokens of the sequence")
        if table is not None:
            pages = table[ends[b] : ends[b + 1]] if ends else table[b]
        if table is not None and not places.by_token:
            first = starts[b] if before is None else max(starts[b], length + new - queries[b] - before)
            used = min(starts[b] if full else first, length) // page, -(-(length + new) // page)
            check_pages(b, pages, used, k.shape[0])
            if new and append is not None and slots is None:
                _check_overwritten(b, pages, (first, length, new), page)
        if full and places.by_token:
            _check_tokens(b, pages[: length + new], k.shape[0] * page)
        elif full:
            _check_token_scales(request, b, (starts[b], length), None if table is None else pages)
    totals = [length + new for length, new in zip(places.lengths.tolist(), appended, strict=True)]
    _check_mods(request, max(queries, default=0), max(totals, default=0))
    if full and isinstance(request.shared_prefix, Tensor) and table is not None:
        tables = [table[a:b] for a, b in pairwise(ends)] if ends else table
        _check_prefix(request.shared_prefix.tolist(), tables, totals, page)
    check_rows(places.rows, k.shape[0])
    if slots is not None:
        check_slots(slots, k.shape[0] * page, full)


def check_length(b: int, length: int, new: int, most: int) -> None:
    """Raises AttentionError if a sequence has more tokens than its row or pages hold."""
    if length < 0:
        raise AttentionError(f"lengths[{b}]", length, "0 or more")
    if length + new > most:
        found = f"{length} in the cache and {new} new" if new else length
        raise AttentionError(f"tokens of sequence {b}", found, f"at most {most}, which the cache holds")


def _check_mods(request: KvRequest, queries: int, keys: int) -> None:
    """Raises if a mod has a table that is shorter than the longest sequence."""
    dense, spec = request.dense, request.dense.spec
    mods = (
        ("score", spec.score_mod, dense.score, spec.score_numbers),
        ("mask", spec.mask_mod, dense.mask, spec.mask_numbers),
    )
    for kind, key, tensors, numbers in mods:
        if key is not None:
            check_tables(Mod(kind, key, tensors, numbers), (None, None, queries, keys))


def check_rows(rows: Tensor | None, count: int) -> None:
    for b, row in enumerate([] if rows is None else rows.tolist()):
        if not 0 <= row < count:
            raise AttentionError(f"cache_rows[{b}]", row, f"0 to {count - 1}")


def check_constant_scales(k_scale: Scale, v_scale: Scale) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor) and scale.dim() < 3:
            wrong = ~scale.isfinite() | (scale == 0)
            if bool(wrong.any()):
                raise AttentionError(name, scale[wrong].tolist()[:4], "finite numbers other than 0")


def _check_token_scales(request: KvRequest, b: int, tokens: tuple[int, int], pages: list[int] | None) -> None:
    """Raises AttentionError if a token in the cache, from `tokens[0]` to before `tokens[1]`, has a scale that is not
    finite: nothing has been appended there, or a token that is not finite."""
    rows = request.places.rows
    page = request.k.shape[1]
    for name, scale in (("k_scale", request.k_scale), ("v_scale", request.v_scale)):
        if not isinstance(scale, Tensor) or scale.dim() < 3 or tokens[0] >= tokens[1]:
            continue
        j = torch.arange(*tokens, device=scale.device)
        if pages is None:
            of_tokens = scale[b if rows is None else int(rows[b].clamp(0, scale.shape[0] - 1)), j]
        else:
            of_tokens = scale[torch.tensor(pages, device=scale.device)[j // page], j % page]
        wrong = ~of_tokens.isfinite().flatten(1).all(1)
        if bool(wrong.any()):
            at = int(j[wrong][0])
            expected = "finite numbers: append_kv writes the scales of new tokens"
            raise AttentionError(f"{name} of token {at} of sequence {b}", of_tokens[wrong][0].tolist(), expected)


def check_plan(given: list[PlannedTile], expected: list[PlannedTile]) -> None:
    """Raises AttentionError if a plan differs from that of the call, with the first sequence that differs."""
    if given == expected:
        return
    planned, own = ({x.b: (x.q0, x.n_q, x.n_k, x.start) for x in plan} for plan in (given, expected))
    for b in sorted({*planned, *own}):
        if planned.get(b) != own.get(b):
            sizes = f"{_described(own.get(b))}, as this call has; call plan_kv again when lengths, starts or cu_seqlens"
            raise AttentionError(f"plan, made for sequence {b}", _described(planned.get(b)), f"{sizes} change")
    raise AttentionError("plan", "one with other tiles of rows", "what plan_kv returns for the arguments of this call")


def _described(sequence: tuple[int, ...] | None) -> str:
    if sequence is None:
        return "no rows"
    first, queries, keys, start = sequence
    return f"{queries} queries from {first} on, {keys} keys" + (f" from {start} on" if start else "")


def check_pages(b: int, pages: list[int], used: tuple[int, int], count: int) -> None:
    """Raises AttentionError if one of the pages of a sequence from used[0] to before used[1] is not in the cache."""
    for n, page in enumerate(pages[slice(*used)], used[0]):
        if not 0 <= page < count:
            raise AttentionError(f"page {n} of sequence {b}", page, f"0 to {count - 1}, the pages of the cache")


def _check_tokens(b: int, slots: list[int], count: int) -> None:
    """Raises AttentionError for a slot past the cache, which attention_kv skips, as it does negative ones."""
    for n, slot in enumerate(slots):
        if slot >= count:
            raise AttentionError(f"token_table[{b}, {n}]", slot, f"0 to {count - 1}, or negative for none")


def _check_overwritten(b: int, pages: list[int], sizes: tuple[int, int, int], page: int) -> None:
    """Raises AttentionError if new tokens would overwrite visible keys: they are written before keys are read.

    `sizes`: the first visible key, the length before the call, the new tokens.
    """
    first, length, new = sizes
    written = check_distinct(b, pages, (length, new), page)
    among = {number for number, _ in written}
    for j in range(first, length) if among.intersection(pages[first // page : -(-length // page)]) else ():
        if pages[j // page] in among and (pages[j // page], j % page) in written:
            found = "visible to a query, but overwritten by a new token"
            raise AttentionError(f"key {j} of sequence {b}", found, "more pages in the circular page table")


def check_distinct(b: int, pages: list[int], new: tuple[int, int], page: int) -> set[tuple[int, int]]:
    """(page, offset) of a sequence's new tokens, `new[1]` after the length `new[0]`. Raises AttentionError if two have
    one place."""
    written = {(pages[j // page], j % page) for j in range(new[0], sum(new))}
    if len(written) < new[1]:
        raise AttentionError(f"new tokens of sequence {b}", "two at one position of a page", "a position for each")
    return written


def check_slots(slots: Tensor, count: int, full: bool) -> None:
    used = slots[slots >= 0]
    if used.numel() and int(used.max()) >= count:
        raise AttentionError("slots", int(used.max()), f"at most {count - 1}, or negative to skip a token")
    if full and torch.unique(used).numel() < used.numel():
        raise AttentionError("slots", "a slot for two new tokens", "a different slot for each token")


def _check_prefix(common: list[int], tables: list[list[int]], totals: list[int], page: int) -> None:
    """Raises AttentionError for the first sequence that shares less with the one before than is given."""
    for b in range(1, len(common)):
        if not 0 <= common[b] <= min(totals[b - 1 : b + 1]):
            expected = f"0 to {min(totals[b - 1 : b + 1])}, the keys of both sequences"
            raise AttentionError(f"shared_prefix[{b}]", common[b], expected)
        pages = -(-common[b] // page)
        ours, theirs = tables[b][:pages], tables[b - 1][:pages]
        if ours != theirs:
            n = next(n for n, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
            found = f"{common[b]}, but page {n} is {ours[n]}, and {theirs[n]} in sequence {b - 1}"
            raise AttentionError(f"shared_prefix[{b}]", found, "leading keys in equal pages")
