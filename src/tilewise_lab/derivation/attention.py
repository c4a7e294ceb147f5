"""Attention of one head, from the definition to FlashAttention-2, each rung a small change to the one before.

q (N, D), k (M, D), v (M, E) -> o (N, E). `rows` and `columns` are the sizes of a block of q and of a block of k and v;
the last block may be smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.merging import State as Partial
from tilewise.merging import union
from tilewise_lab.derivation.softmax import correction


class State(NamedTuple):
    """What a block of rows remembers of the keys it has seen: maximum (N,), denominator (N,), numerator (N, E)."""

    m: Tensor
    l: Tensor
    o: Tensor


def scores(q: Tensor, k: Tensor) -> Tensor:
    """S = Q Kᵀ / √D"""
    return q @ k.mT / math.sqrt(q.shape[-1])


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O = softmax(S) V, with all of S (N, M) in memory."""
    return torch.softmax(scores(q, k), -1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> Tensor:
    """O = S V in blocks, O_i = Σ_j S_ij V_j: were it not for the softmax, a block of S would be used and forgotten."""
    o = []
    for q_i in q.split(rows):
        o_i = v.new_zeros(q_i.shape[0], v.shape[1])
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            o_i = o_i + scores(q_i, k_j) @ v_j
        o.append(o_i)
    return torch.cat(o)


def softmax_star(s: Tensor) -> Tensor:
    """softmax*(S) = exp(S - rowmax(S)): softmax without its denominator.

    >>> softmax_star(torch.tensor([[2.0, 1.0], [0.0, 3.0]]))
    tensor([[1.0000, 0.3679],
            [0.0498, 1.0000]])
    """
    return torch.exp(s - s.amax(-1, keepdim=True))


def wrong_local_softmax(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> Tensor:
    """WRONG, and why the next rungs correct: each block takes its own maximum and its own sum.

    The weights of a row add up to the number of blocks:

    >>> (q, k), ones = torch.randn(2, 8, 4), torch.ones(8, 1)
    >>> sums = wrong_local_softmax(q, k, ones, rows=2, columns=2)
    >>> sums.mean().round(decimals=4)
    tensor(4.)
    """
    o = []
    for q_i in q.split(rows):
        o_i = v.new_zeros(q_i.shape[0], v.shape[1])
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            p = softmax_star(scores(q_i, k_j))
            o_i = o_i + p / p.sum(-1, keepdim=True) @ v_j
        o.append(o_i)
    return torch.cat(o)


def rescale(factor: Tensor, o: Tensor) -> Tensor:
    """diag(factor) O: each row by its own number, so the inverse of the diagonal matrix is 1 / factor."""
    return factor[:, None] * o


def nothing(q_i: Tensor, v: Tensor) -> State:
    """m = -inf, l = 0, o = 0: no key has been seen."""
    zero = q_i.new_zeros(q_i.shape[0])
    return State(zero - torch.inf, zero, q_i.new_zeros(q_i.shape[0], v.shape[1]))


def step(state: State, q_i: Tensor, k_j: Tensor, v_j: Tensor, hide: Tensor | None = None) -> State:
    """One more block of keys: what was summed under the old maximum is corrected to the new one.

    m' = max(m, rowmax(S));  P = exp(S - m');
    l' = exp(m - m')·l + rowsum(P);  O' = diag(exp(m - m'))·O + P V_j

    A pair that does not see each other (`hide`, (N, M) of bools) has S = -inf and so P = 0, also before any pair does.
    """
    s = scores(q_i, k_j)
    if hide is not None:
        s = s.masked_fill(hide, -torch.inf)
    m = torch.maximum(state.m, s.amax(-1))
    p = correction(s, m[:, None])
    alpha = correction(state.m, m)
    return State(m, alpha * state.l + p.sum(-1), rescale(alpha, state.o) + p @ v_j)


def states(q_i: Tensor, k: Tensor, v: Tensor, columns: int) -> Iterator[State]:
    """The state of one block of queries after each block of keys; o / l is the attention over the keys so far."""
    state = nothing(q_i, v)
    for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
        state = step(state, q_i, k_j, v_j)
        yield state


def fa1(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """o, m, l in FlashAttention's first order: keys outside, queries inside.

    A block of keys is read once, but o, m and l of every query are read, divided, and written again for every block of
    keys.
    """
    o = q.new_zeros(q.shape[0], v.shape[1])
    l = q.new_zeros(q.shape[0])
    m = l - torch.inf
    for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
        for start in range(0, q.shape[0], rows):
            i = slice(start, start + rows)
            m[i], l[i], numerator = step(State(m[i], l[i], rescale(l[i], o[i])), q[i], k_j, v_j)
            o[i] = rescale(1 / l[i], numerator)
    return o, m, l


def fa2(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> Partial:
    """o, lse in FlashAttention-2's order: queries outside, so that blocks of rows are independent of one another.

    The state stays with its block, the division comes once at the end, and lse = m + log l is all that is kept.
    """
    o, lse = [], []
    for q_i in q.split(rows):
        state = nothing(q_i, v)
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            state = step(state, q_i, k_j, v_j)
        o.append(rescale(1 / state.l, state.o))
        lse.append(state.m + state.l.log())
    return torch.cat(o), torch.cat(lse)


def split_keys(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int, chunk: int) -> Partial:
    """o, lse from independent chunks of keys: each chunk is an attention of its own, and `union` puts them together."""
    parts = (fa2(q, k_c, v_c, rows, columns) for k_c, v_c in zip(k.split(chunk), v.split(chunk), strict=True))
    return functools.reduce(union, parts)
