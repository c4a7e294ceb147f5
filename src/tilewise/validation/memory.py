"""Whether tensors that a call writes have memory of their own. Compares addresses and strides, so no device is waited
for. Only calls whose signature is not known come here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_formats import shared_columns
from ..request import has_address

MOST_STEPS = 10_000  # of a search; strides of tensors that were not made by as_strided need less than 100
Term = tuple[int, int, int]  # (stride, least, most): a multiple of a stride

DISTINCT = "distinct memory for each element (no expanded dims, no overlapping rows)"


def check_written(written: dict[str, Tensor | None], allowed: Sequence[tuple[str, str]] = ()) -> None:
    """Raises AttentionError if one of the tensors has two elements at one address, or if two tensors share memory.

    Args:
        written: what a call writes, by the names of its arguments.
        allowed: pairs of names that may share memory.
    """
    given = {name: x for name, x in written.items() if x is not None and x.numel()}
    for name, x in given.items():
        expanded = any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))
        if expanded or (not torch.compiler.is_compiling() and overlaps_itself(x)):
            raise AttentionError(f"strides of {name}, which is written", x.stride(), DISTINCT)
    if torch.compiler.is_compiling():
        return
    addressed = [(name, x) for name, x in given.items() if has_address(x) and not x.is_meta]
    for (a, x), (b, y) in combinations(addressed, 2):
        if (a, b) not in allowed and share_memory(x, y):
            raise AttentionError(f"{a} and {b}", "in the same memory", "memory of its own for each: both are written")


def check_new_values(k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, read: bool) -> None:
    """Raises AttentionError if v_cache is a view of k_cache's columns, but v_new not of the same columns of k_new: one
    of both would overwrite the other.

    Args:
        k_new: new keys.
        v_new: new values.
        k: k_cache.
        v: v_cache.
        read: whether equal numbers in other memory are accepted, which waits for a GPU.
    """
    first, end = shared_columns(k, v)
    if not end or not v_new.numel():
        return
    shift = (v.data_ptr() - k.data_ptr()) // (k.stride(-1) * k.element_size())  # the first of the values' columns
    keys, values = k_new[..., first:end], v_new[..., first - shift : end - shift]
    strides = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (keys, values)]
    same = keys.dtype == values.dtype and strides[0] == strides[1] and has_address(keys) and has_address(values)
    if same and keys.data_ptr() == values.data_ptr():
        return
    if read and not bool((keys != values).logical_and((keys == keys) | (values == values)).any()):  # nan equals nan
        return
    name = "v_new" if values.shape == v_new.shape else f"v_new[..., {first - shift}:{end - shift}]"
    found = "other numbers than in k_new" if read else "other memory than k_new's"
    raise AttentionError(name, found, f"k_new[..., {first}:{end}], because v_cache is a view of k_cache")


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one tensor lies where one of the other does, exactly: keys and values that alternate in
    one allocation share nothing.

    >>> x = torch.zeros(4, 2, 8)
    >>> share_memory(x[:, 0], x[:, 1]), share_memory(x[1:3], x[2:])
    (False, True)
    """
    distance = a.data_ptr() - b.data_ptr()
    terms = [(s, 0, n) for s, n in _steps(a)] + [(s, -n, 0) for s, n in _steps(b)]
    return _has_sum(terms, 1 - a.element_size() - distance, b.element_size() - 1 - distance)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor lie at one address.

    >>> x = torch.zeros(8)
    >>> overlaps_itself(x.as_strided((3, 4), (2, 1))), overlaps_itself(x.view(2, 4).T)
    (True, False)
    """
    steps, size = sorted(_steps(x), reverse=True), x.element_size()
    ends = list(accumulate((s * n for s, n in reversed(steps)), initial=size))[::-1]
    if all(s >= end for (s, _), end in zip(steps, ends[1:], strict=True)):
        return False  # each step passes everything that smaller ones reach
    for at, (s, n) in enumerate(steps):  # the difference of two elements: this index is the first in which they differ
        rest = [(t, -m, m) for t, m in steps[at + 1 :]]
        if _has_sum([(s, 1, n), *rest], 1 - size, size - 1):
            return True
    return False


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """(bytes, the largest index) of the axes of a tensor."""
    return [(s * x.element_size(), n - 1) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def _has_sum(terms: list[Term], least: int, most: int) -> bool:
    """Whether multiples of the strides add up to a number from `least` to `most`. Terms from the largest stride on; a
    partial sum is left if what remains cannot reach the numbers. True if that takes too many steps."""
    terms = sorted(terms, reverse=True)
    lows = list(accumulate((s * a for s, a, _ in reversed(terms)), initial=0))[::-1]
    highs = list(accumulate((s * b for s, _, b in reversed(terms)), initial=0))[::-1]
    left, steps = [(0, least, most)], 0
    while left:
        n, low, high = left.pop()
        steps += 1
        if high < lows[n] or low > highs[n]:
            continue
        if n == len(terms) or steps > MOST_STEPS:
            return True
        s, a, b = terms[n]
        if s == 0:
            left.append((n + 1, low, high))
            continue
        first, last = max(a, -((highs[n + 1] - low) // s)), min(b, (high - lows[n + 1]) // s)
        left += [(n + 1, low - s * i, high - s * i) for i in range(first, min(last, first + MOST_STEPS) + 1)]
    return False
