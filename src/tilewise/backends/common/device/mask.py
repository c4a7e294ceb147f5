"""Who sees whom: the band and the mask mod, for the pairs of one tile."""

import triton
import triton.language as tl

from .structs import Place


@triton.jit
def visible(i, j, w, before, after):
    """Which keys j the band shows the queries i: those that exist and lie in it. (Queries that do not exist see what
    the last one's neighbours would; their weights are 0 for other reasons.)"""
    at = i + (w.n_k - w.n_q)
    last = w.n_k - 1
    if after is not None:
        last = tl.minimum(at + after, last)
    keep = (j <= last) & (at == at)
    if before is not None:
        keep &= j >= at - before
    return keep


@triton.jit
def pleases(i, j, w, h, terms, MASK_MOD: tl.constexpr):
    """Which keys j the mask mod shows the queries i."""
    at = place(i, j, w, h, terms)
    return MASK_MOD(None, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.mask)


@triton.jit
def seen(i, j, w, h, law):
    """Which keys j the queries i see: both exist, the band shows the key, and the mask mod does."""
    keep = visible(i, j, w, law.before, law.after) & (i < w.n_q)
    if law.MASK_MOD is not None:
        keep &= pleases(i, j, w, h, law.terms, law.MASK_MOD)
    return keep


@triton.jit
def masked(x, hidden, edge, picky, i, j, w, h, law):
    """x, with `hidden` for the pairs that do not see each other. The branches are the same for the whole program: the
    mask mod is asked only where it hides something, and where nothing is hidden nothing is done."""
    if law.MASK_MOD is None:
        if edge:
            x = tl.where(visible(i, j, w, law.before, law.after), x, hidden)
    else:
        if edge or picky:
            if picky:
                x = tl.where(pleases(i, j, w, h, law.terms, law.MASK_MOD), x, hidden)
            x = tl.where(visible(i, j, w, law.before, law.after), x, hidden)
    return x


@triton.jit
def place(i, j, w, h, terms):
    """Where mods and dropout find the pair: here, or where `origin` says that this call lies in a larger one."""
    if terms.origin is None:
        return Place(w.b, h, i, j, w.n_q, w.n_k)
    else:
        row = terms.origin + w.b * 7
        step = tl.load(row + 4)
        i = tl.load(row + 2) + step * i
        j = tl.load(row + 3) + step * j
        return Place(tl.load(row), tl.load(row + 1) + h, i, j, tl.load(row + 5), tl.load(row + 6))
