"""Which keys of a cache the queries of a tile see: windows, starts, trees of draft tokens. For all decode kernels."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.mask import masked, visible


class TreeMask(NamedTuple):
    """(tokens of q, words) int64: a bit for each of a sequence's last n_q keys that a query sees."""

    ptr: tl.tensor
    words: tl.tensor


@triton.jit
def tree_visible(tree, w, i, draft, first, N: tl.constexpr):
    """Which of the N keys from draft token `first` on the queries i see: those before all drafts, and those whose bits
    are set."""
    keep = draft < 0
    word = tl.maximum(first, 0) // 64
    for n in tl.static_range((N + 63) // 64 + 1):
        at = tree.ptr + tl.cast(w.r0, tl.int64) * tree.words + (i * tree.words + word + n)
        bits = tl.load(at, mask=(i < w.n_q) & (word + n < tree.words), other=0)
        place = draft - (word + n) * 64
        inside = (place >= 0) & (place < 64)
        keep |= inside & (((bits >> tl.where(inside, place, 0).to(tl.int64)) & 1) != 0)
    return keep


@triton.jit
def seen_by_all(start, w, params, CONFIG: tl.constexpr):
    """(lo, hi): the range of keys that all rows of a tile see. Keys are valid from `start` on."""
    offset = w.n_k - w.n_q
    first_position = w.first // CONFIG.GROUP + offset
    last_position = tl.minimum((w.first + CONFIG.BLOCK_M - 1) // CONFIG.GROUP, w.n_q - 1) + offset
    lo = start
    hi = w.n_k
    if params.before is not None:
        lo = tl.maximum(lo, last_position - params.before)
    if params.after is not None:
        hi = tl.minimum(hi, first_position + params.after + 1)
    return lo, hi


@triton.jit
def mask_pairs(s, pairs, start, tree, at, edge, params, CONFIG: tl.constexpr):
    """s, with -inf for pairs that are not seen. `edge`: some row does not see one of the BLOCK_N keys from `at` on."""
    N: tl.constexpr = CONFIG.BLOCK_N
    w = pairs.w
    offset = w.n_k - w.n_q
    s = masked(s, float("-inf"), pairs, edge, True, params)
    if CONFIG.HAS_STARTS:
        if edge:
            s = tl.where(pairs.j >= start, s, float("-inf"))
    if tree.ptr is not None:
        if at + N > offset:
            s = tl.where(tree_visible(tree, w, pairs.i, pairs.j - offset, at - offset, N), s, float("-inf"))
    return s


@triton.jit
def pairs_seen(pairs, start, tree, at, params, CONFIG: tl.constexpr):
    """The mask of `mask_pairs`, which the NaN repair needs for values too."""
    N: tl.constexpr = CONFIG.BLOCK_N
    w = pairs.w
    offset = w.n_k - w.n_q
    mask = visible(pairs, params)
    if CONFIG.HAS_STARTS:
        mask = mask & (pairs.j >= start)
    if tree.ptr is not None:
        mask = mask & tree_visible(tree, w, pairs.i, pairs.j - offset, at - offset, N)
    return mask
