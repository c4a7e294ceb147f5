"""Validates the option `shared_prefix` of a call with a KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_request import CachePlaces, SharedPrefix

ACCEPTED = '"auto", int32 (B,) tensor, or None'


def checked_prefix(given: Any, places: CachePlaces) -> SharedPrefix:
    """The option: None, "auto", or the keys that each sequence has in common with the one before it."""
    if given is None:
        return None
    if not isinstance(given, Tensor) and given != "auto":
        raise AttentionError("shared_prefix", repr(given), ACCEPTED)
    if places.table is None or places.by_token:
        raise AttentionError("shared_prefix", "given without page_table", "a page table: sequences share pages")
    if not isinstance(given, Tensor):
        return "auto"
    lengths = places.lengths
    if given.dtype != torch.int32:
        raise AttentionError("dtype of shared_prefix", given.dtype, "torch.int32")
    if tuple(given.shape) != tuple(lengths.shape):
        expected = f"({lengths.shape[0]},), for each sequence the keys it has in common with the one before"
        raise AttentionError("shape of shared_prefix", tuple(given.shape), expected)
    if given.device != lengths.device:
        raise AttentionError("device of shared_prefix", given.device, f"{lengths.device}, as lengths")
    return given.contiguous()


def check_prefix(common: list[int], tables: list[list[int]], totals: list[int], page: int) -> None:
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
