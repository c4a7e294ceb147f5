"""Which pairs of a query and a key are visible: the window and the mask mod."""

import triton
import triton.language as tl

from .structs import ModIndices

FARTHEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def in_window(i, j, w, before, after):
    """Which keys j exist and lie in the window of the queries i. Queries past the end of the sequence are treated like
    the others: their p is 0 because their lse is +inf, or they are not stored."""
    at = i + (w.n_k - w.n_q)
    last = w.n_k - 1
    if after is not None:
        last = tl.minimum(at + after, last)
    keep = (j <= last) & (at == at)
    if before is not None:
        keep &= j >= at - before
    return keep


@triton.jit
def mask_mod_visible(pairs, terms, MASK_MOD: tl.constexpr):
    """Which pairs the mask mod shows."""
    at = mod_indices(pairs, terms)
    return MASK_MOD(None, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.mask)


@triton.jit
def visible(pairs, params):
    """Which pairs are visible: query and key exist, the key is in the window, and the mask mod shows it."""
    keep = in_window(pairs.i, pairs.j, pairs.w, params.before, params.after) & (pairs.i < pairs.w.n_q)
    if params.MASK_MOD is not None:
        keep &= mask_mod_visible(pairs, params.terms, params.MASK_MOD)
    return keep


@triton.jit
def masked(x, value, pairs, edge, partial, params):
    """x, with `value` for hidden pairs. `edge`: the window may hide some; `partial`: the mask mod may. Both are the
    same for the whole program, so that tiles without hidden pairs skip the mask."""
    if params.MASK_MOD is None:
        if edge:
            x = tl.where(in_window(pairs.i, pairs.j, pairs.w, params.before, params.after), x, value)
    else:
        if edge or partial:
            if partial:
                x = tl.where(mask_mod_visible(pairs, params.terms, params.MASK_MOD), x, value)
            x = tl.where(in_window(pairs.i, pairs.j, pairs.w, params.before, params.after), x, value)
    return x


@triton.jit
def hidden_by_bounds(x, value, pairs, edge, params):
    """x, with `value` where `edge` is set and the window hides the pair. No branch: a branch around a tile of scores
    hides one product from the other, so that Triton divides them differently among the warps. Columns are compared with
    bounds of the rows, which are 32-bit infinities where `edge` is not set."""
    i, j, w = pairs.i, pairs.j, pairs.w
    offset = w.n_k - w.n_q
    if i.shape[1] == 1:  # (queries, keys): row i sees the keys i + offset - before .. i + offset + after
        at = i + offset
        last = w.n_k - 1 + 0 * i
        if params.after is not None:
            last = tl.minimum(at + params.after, last)
        keep = j <= tl.where((at == at) & edge, last, FARTHEST)
        if params.before is not None:
            keep &= j >= tl.where((at == at) & edge, at - params.before, -FARTHEST)
    else:  # (keys, queries): key j is seen by the queries j - offset - after .. j - offset + before
        at = j - offset  # rows of keys past the end see everything: they are not stored
        keep = (i == i) & (j == j)
        if params.after is not None:
            keep = i >= tl.where((at == at) & edge, at - params.after, -FARTHEST)
        if params.before is not None:
            keep &= i <= tl.where((at == at) & edge, at + params.before, FARTHEST)
    return tl.where(keep, x, value)


@triton.jit
def hidden(x, value, pairs, edge, partial, params, BRANCH: tl.constexpr):
    """`masked`, without a branch unless BRANCH is set. A mask mod keeps its branch: it costs more than a comparison."""
    if BRANCH or params.MASK_MOD is not None:
        return masked(x, value, pairs, edge, partial, params)
    else:
        return hidden_by_bounds(x, value, pairs, edge, params)


@triton.jit
def mod_indices(pairs, terms):
    """The indices that mods and dropout get: those of this call, or those of the larger call in `position_offsets`."""
    if terms.position_offsets is None:
        return ModIndices(pairs.w.b, pairs.h, pairs.i, pairs.j, pairs.w.n_q, pairs.w.n_k)
    else:
        row = terms.position_offsets + pairs.w.b * 7
        step = tl.load(row + 4)
        i = tl.load(row + 2) + step * pairs.i
        j = tl.load(row + 3) + step * pairs.j
        return ModIndices(tl.load(row), tl.load(row + 1) + pairs.h, i, j, tl.load(row + 5), tl.load(row + 6))
