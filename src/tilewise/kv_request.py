"""What a call with a KV cache asks for: checked once, passed whole, flattened once for the ops; and what ran for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .request import Request, Spec

UNDIVIDED = 2**30  # keys of a split that no sequence fills


class Rotary(NamedTuple):
    """Rotary embedding of new keys, and of the queries that come with them.

        tilewise.Rotary(cos, sin)                          halves of the head dim turn together, as in Llama
        tilewise.Rotary(cos, sin, interleaved=True)        neighbours do, as in GPT-J

    cos and sin (positions, width / 2): the first `width` dims turn, of all heads. A new key turns by its place in the
    cache, lengths + i, a query by the place where it sits; or by `positions` and `q_positions`, integers of the shape
    of the tokens. Where new keys and queries are as many, `positions` is of both.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    positions: Tensor | None = None
    q_positions: Tensor | None = None


class KvPlan(NamedTuple):
    """How the keys of a step are dealt to the processors, and where they put what they have in common. Made by
    `plan_kv`; every layer of the step uses it, one after the other."""

    schedule: Tensor
    workspace: Tensor
    lse: Tensor  # for calls that do not return it
    shape: tuple[Any, ...]


class PlannedTile(NamedTuple):
    """What a plan says of a tile of rows: its sequence, its first row; the sequence's first query in a packed q, its
    queries, keys and first valid key; the first unit of keys that the tile sees, and how many."""

    b: int
    first: int
    q0: int
    n_q: int
    n_k: int
    start: int
    unit: int
    units: int


class Places(NamedTuple):
    """Where the tokens of every sequence lie in a cache.

    A sequence has `lengths` tokens and gains `new` of them, or as many as `cu_new` says. With a table of pages, token j
    lies in page table[b, j // page] (with `indptr`, in table[indptr[b] + j // page]) at row j % page; without, in
    batch row `rows[b]`, or b, at row j. Tokens before `starts` are none.
    """

    lengths: Tensor
    table: Tensor | None = None
    indptr: Tensor | None = None
    rows: Tensor | None = None
    starts: Tensor | None = None
    cu_new: Tensor | None = None
    new: int = 0

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def capacity(self, cache: Tensor) -> int:
        """Tokens that a sequence can have, as far as shapes tell."""
        if self.table is None:
            return cache.shape[1]
        return self.table.shape[-1] * cache.shape[1]


class KvRequest(NamedTuple):
    """`call` has q (B, Sq, H, D), or packed (T, H, D) with cu_q; as k and v the caches (C, S, Hk, D); and every term.

    `tree` (tokens of q, words), of int64, has a bit for each of a sequence's last n_q keys that a query sees. `split`:
    keys are summed so many at a time, whatever the batch; None: as keeps all processors busy. `most`: no sequence has
    more queries, or 0 where nobody said.
    """

    call: Request
    places: Places
    tree: Tensor | None = None
    split: int | None = None
    most: int = 0

    # Shorter names, but for what torch.compile traces: that of torch 2.10 sees no properties of a named tuple.
    @property
    def q(self) -> Tensor:
        return self.call.q

    @property
    def k(self) -> Tensor:
        return self.call.k

    @property
    def v(self) -> Tensor:
        return self.call.v

    @property
    def spec(self) -> Spec:
        return self.call.spec


class AppendRequest(NamedTuple):
    """New tokens (B, Sn, Hk, D), or packed (T, Hk, D) with places.cu_new, and the caches that they are written to, at
    `slots` if given; and queries to turn with them, as many as `call` has. `rotated` is where those go."""

    k_new: Tensor
    v_new: Tensor
    k: Tensor
    v: Tensor
    places: Places
    slots: Tensor | None = None
    rotary: Rotary | None = None
    q: Tensor | None = None
    cu_q: Tensor | None = None
    rotated: Tensor | None = None


class KvCall(NamedTuple):
    """A call of `attention_kv`, whole. What is None is made by the call: a schedule with its workspace, out, lse."""

    request: KvRequest
    append: AppendRequest | None = None
    schedule: Tensor | None = None
    workspace: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None


_TENSOR = object()  # where a tensor was


def structure_of(x: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    """The tensors in nested tuples, and a function that puts other tensors in their places. It keeps none of them.

    >>> import torch
    >>> tensors, structure = structure_of((torch.ones(1), None, ("a", torch.zeros(1))))
    >>> structure(["x", "y"])
    ('x', None, ('a', 'y'))
    """
    tensors: list[Tensor] = []

    def emptied(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return _TENSOR
        return _like(x, map(emptied, x)) if isinstance(x, tuple) else x

    empty = emptied(x)

    def filled(x: Any, rest: Iterator[Any]) -> Any:
        if x is _TENSOR:
            return next(rest)
        return _like(x, (filled(item, rest) for item in x)) if isinstance(x, tuple) else x

    return tensors, lambda others: filled(empty, iter(others))


def _like(x: tuple[Any, ...], items: Iterable[Any]) -> Any:
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


PLACES = "Tensor lengths, Tensor? table, Tensor? indptr, Tensor? rows, Tensor? starts, Tensor? cu_new, SymInt new"
ATTEND = (
    f"Tensor q, Tensor k, Tensor v, {PLACES}, Tensor? cu_q, Tensor? tree, Tensor? sinks, Tensor[] score, Tensor[] mask,"
    " float scale, SymInt? before, SymInt? after, str backend, str? score_mod, float[] score_numbers, str? mask_mod,"
    " float[] mask_numbers, int? split, SymInt most"
)
APPEND = (
    f"Tensor k_new, Tensor v_new, {PLACES}, Tensor? slots, Tensor? cos, Tensor? sin, bool interleaved,"
    " Tensor? positions, Tensor? q_positions, Tensor? q, Tensor? cu_q, str backend"
)


def attend_arguments(request: KvRequest) -> tuple[Any, ...]:
    """A request as the ops take it, by `ATTEND`."""
    call, spec = request.call, request.call.spec
    return (
        *call[:3], *request.places, call.cu_q, request.tree, call.sinks, list(call.score), list(call.mask), spec.scale,
        spec.before, spec.after, spec.backend, spec.score_mod, list(spec.score_numbers), spec.mask_mod,
        list(spec.mask_numbers), request.split, request.most,
    )  # fmt: skip


def attend_request(*given: Any) -> KvRequest:
    """The reverse."""
    q, k, v, *rest = given
    places, rest = Places(*rest[:7]), rest[7:]
    cu_q, tree, sinks, score, mask, scale, before, after, backend, score_mod, score_numbers, mask_mod, *rest = rest
    mask_numbers, split, most = rest
    spec = Spec(
        scale, before, after, backend, score_mod, tuple(score_numbers), len(score), mask_mod, tuple(mask_numbers),
        len(mask),
    )  # fmt: skip
    call = Request(q, k, v, spec, sinks=sinks, score=tuple(score), cu_q=cu_q, mask=tuple(mask))
    return KvRequest(call, places, tree, split, most)


def append_arguments(request: AppendRequest, backend: str) -> tuple[Any, ...]:
    """A request as the op takes it, by `APPEND`, behind the caches and the turned queries."""
    turn = request.rotary or (None, None, False, None, None)
    return request.k_new, request.v_new, *request.places, request.slots, *turn, request.q, request.cu_q, backend


def append_request(k: Tensor, v: Tensor, rotated: Tensor | None, *given: Any) -> tuple[AppendRequest, str]:
    """The reverse, and the backend."""
    k_new, v_new, *rest = given
    places, (slots, *turn, q, cu_q, backend) = Places(*rest[:7]), rest[7:]
    rotary = None if turn[0] is None else Rotary(*turn)
    return AppendRequest(k_new, v_new, k, v, places, slots, rotary, q, cu_q, rotated), backend
