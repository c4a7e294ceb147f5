"""The schedule of one rank: the messages it posts, what it computes meanwhile and what it waits for.

    Post(0, sends=(keys to the next rank), receives=(keys of the previous rank))
    Compute(sources=(own,))
    Wait(0)
    Post(1, ...) ...

Both ends of a message post it under the same number, and each rank posts in rising order, so that no two ranks wait for
each other. `execute` runs these steps; the simulator and the tests read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .partition import GATHERING, Partition, kept


class Message(NamedTuple):
    """Some rows to or from a peer (a rank).

    `what` is "kv" (keys and values), "dkv" (their gradients, float32), "state" (out and lse, to be merged), "in"
    (Ulysses: heads for tokens) or "out" (tokens for heads). `source` is the ring rank whose keys they are.
    """

    what: str
    peer: int
    source: int
    rows: int


class Post(NamedTuple):
    """Sends and receives that start together."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Compute(NamedTuple):
    """Attention of this rank's queries over the keys of these ring ranks."""

    sources: tuple[int, ...]


class Wait(NamedTuple):
    """Until the messages of a Post have arrived."""

    number: int


class Merge(NamedTuple):
    """The state received last is merged into this rank's, or replaces it."""

    replaces: bool


Step = Post | Compute | Wait | Merge
HEADS_IN, HEADS_OUT = -1, 1 << 30  # numbers of the exchanges of heads: before and after all others


@kept
def schedule(plan: Partition, rank: int, backward: bool = False) -> list[Step]:
    """All steps of a rank, with the exchanges of heads.

    >>> from tilewise.distributed import plan
    >>> post, *rest = schedule(plan(2, seqlen=8), 0)
    >>> post.sends, rest
    ((Message(what='kv', peer=1, source=0, rows=4),), [Compute(sources=(0,)), Wait(number=0), Compute(sources=(1,))])
    """
    first = [*_exchange_heads(plan, rank, "in", HEADS_IN)]
    last = [*_exchange_heads(plan, rank, "out", HEADS_OUT)]
    return [*first, *attention_schedule(plan, rank, backward), *last]


@kept
def attention_schedule(plan: Partition, rank: int, backward: bool = False) -> list[Step]:
    """The steps of a rank between the exchanges of heads."""
    if plan.strategy == "tree":
        return [*_non_empty(_tree(plan, rank))]
    if plan.strategy in GATHERING:
        return [*_non_empty(_gather(plan, rank, backward))]
    return [*_non_empty(_ring(plan, rank, backward))]


def _ring(plan: Partition, rank: int, backward: bool) -> Iterator[Step]:
    """Ring attention: at step t a ring rank has the keys of the one t before it, and sends them on if a later one needs
    them. In the backward the gradients follow the keys one step behind, and return from the last hop to their owner."""
    n, hops = plan.ring_size, plan.hops
    own, member = divmod(rank, plan.ulysses_size)

    def peer(ring_rank: int) -> int:
        return ring_rank % n * plan.ulysses_size + member

    def message(what: str, to: int, source: int) -> list[Message]:
        return [Message(what, peer(to), source, plan.rows(source))]

    for t in range(max(hops, default=0) + 1):
        source, coming = (own - t) % n, (own - t - 1) % n
        sends = message("kv", own + 1, source) if t < hops[source] else []
        receives = message("kv", own - 1, coming) if t < hops[coming] else []
        yield Post(2 * t, tuple(sends), tuple(receives))
        if t <= hops[source]:
            yield Compute((source,))
        if backward:
            if 0 < t <= hops[source]:
                yield Wait(2 * t - 1)
            sends = message("dkv", own + 1, source) if t < hops[source] else []
            receives = message("dkv", own - 1, coming) if t < hops[coming] else []
            if t == hops[source] > 0:
                sends = message("dkv", source, source)
            if t == hops[own] > 0:
                receives += message("dkv", own + t, own)
            yield Post(2 * t + 1, tuple(sends), tuple(receives))
        yield Wait(2 * t)
    if backward and hops[own]:
        yield Wait(2 * hops[own] + 1)


def _gather(plan: Partition, rank: int, backward: bool) -> Iterator[Step]:
    """All-gather or halo: one exchange of keys, during which the rank computes with its own."""
    others = [(rank - t) % plan.ranks for t in range(1, plan.ranks)]

    def size(to: int, source: int) -> int:
        return sum(b - a for a, b in plan.rows_sent(to, source))

    own = tuple((s, rank, size(s, rank)) for s in others)
    theirs = tuple((s, s, n) for s in others if (n := size(rank, s)))
    yield Post(0, tuple(Message("kv", *x) for x in own), tuple(Message("kv", *x) for x in theirs))
    yield Compute((rank,))
    yield Wait(0)
    if theirs:
        yield Compute(tuple(sorted(source for _, source, _ in theirs)))
    if backward:
        yield Post(1, tuple(Message("dkv", *x) for x in theirs), tuple(Message("dkv", *x) for x in own))
        yield Wait(1)


def _tree(plan: Partition, rank: int) -> Iterator[Step]:
    """Tree decoding: each rank merges its state with that of the rank whose number differs in one bit, bit by bit.
    Ranks beyond the largest power of two first send their state to another, and receive the result at the end."""
    power = 1 << (plan.ranks.bit_length() - 1)
    is_extra, has_extra = rank >= power, rank + power < plan.ranks
    yield Compute((rank,))

    def exchange(number: int, peer: int, sends: bool, receives: bool) -> Iterator[Step]:
        message = (Message("state", peer, 0, plan.queries),)
        yield Post(number, message if sends else (), message if receives else ())
        yield Wait(number)
        if receives:
            yield Merge(replaces=is_extra)

    if is_extra:
        yield from exchange(0, rank - power, True, False)
    elif has_extra:
        yield from exchange(0, rank + power, False, True)
    for level in range(0 if is_extra else power.bit_length() - 1):
        yield from exchange(level + 1, rank ^ (1 << level), True, True)
    last = power.bit_length() + 1
    if is_extra:
        yield from exchange(last, rank - power, False, True)
    elif has_extra:
        yield from exchange(last, rank + power, True, False)


def _exchange_heads(plan: Partition, rank: int, what: str, number: int) -> Iterator[Step]:
    """Ulysses: every rank of a group sends its tokens of some heads to every other, or back."""
    first = rank // plan.ulysses_size * plan.ulysses_size
    counts = plan.counts()
    peers = [r for r in range(first, first + plan.ulysses_size) if r != rank]
    sends = [Message(what, r, rank, counts[rank] if what == "in" else counts[r]) for r in peers]
    receives = [Message(what, r, r, counts[r] if what == "in" else counts[rank]) for r in peers]
    yield from _non_empty([Post(number, tuple(sends), tuple(receives)), Wait(number)])


def _non_empty(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps without messages of no rows, posts of no messages, and waits for those."""
    posted = set()
    for step in steps:
        if isinstance(step, Post):
            sends, receives = (tuple(x for x in messages if x.rows) for messages in step[1:])
            if sends or receives:
                posted.add(step.number)
                yield Post(step.number, sends, receives)
        elif not isinstance(step, Wait) or step.number in posted:
            yield step
