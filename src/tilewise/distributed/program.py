"""The plan of one rank, step by step: what is posted, what is computed meanwhile, what is waited for.

    Post(0, sends=(keys to the next),  receives=(keys from the last))
    Compute(sources=(own,))
    Wait(0)
    Post(1, ...) ...

Every message is posted under the same number by both of its ends, and each rank posts its numbers in rising order: so
nobody can wait for somebody who waits for them. `execute` follows these steps, in one process or many; the simulator
and the tests read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .division import GATHERING, Division


class Move(NamedTuple):
    """A message. What: "in" (heads for tokens), "kv" (keys and values of a station), "dkv" (their gradients, in
    float32), "out" (tokens for heads) or "state" (out and lse, to be merged); `rows` of them."""

    what: str
    peer: int
    source: int
    rows: int


class Post(NamedTuple):
    number: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


class Compute(NamedTuple):
    """The tiles of this rank's queries with the keys of these stations."""

    sources: tuple[int, ...]


class Wait(NamedTuple):
    number: int


class Merge(NamedTuple):
    """Of a tree: the state that came from a peer becomes part of this rank's, or takes its place."""

    peer: int
    replaces: bool = False


FIRST, LAST = -1, 1 << 30  # the numbers of the exchanges of heads


Step = Post | Compute | Wait | Merge
Program = list[Step]


@lru_cache(1024)
def program(plan: Division, rank: int, backward: bool = False) -> Program:
    """
    >>> from tilewise.distributed import plan
    >>> post, *rest = program(plan(2, seqlen=8), 0)
    >>> post.sends, rest
    ((Move(what='kv', peer=1, source=0, rows=4),), [Compute(sources=(0,)), Wait(number=0), Compute(sources=(1,))])
    """
    station, member = divmod(rank, plan.width)
    if plan.strategy == "tree":
        return list(_tree(plan, rank))
    if plan.strategy in GATHERING:
        body = list(_gather(plan, station, backward))
    else:
        body = list(_ring(plan, station, member, backward))
    if plan.width == 1:
        return body
    # numbers below and above those of the ring: the heads go before it and come back after it
    return [*_heads(plan, rank, "in", FIRST), *body, *_heads(plan, rank, "out", LAST)]


def _ring(plan: Division, station: int, member: int, backward: bool) -> Iterator[Step]:
    """At step t a station holds the keys of the one t before it; those that someone further on wants go on."""
    n, reach = plan.stations, plan.reach
    following, last = ((station + 1) % n) * plan.width + member, ((station - 1) % n) * plan.width + member
    for t in range(max(reach, default=0) + 1):
        source, coming = (station - t) % n, (station - t - 1) % n
        sends = [Move("kv", following, source, plan.rows(source))] if t < reach[source] else []
        receives = [Move("kv", last, coming, plan.rows(coming))] if t < reach[coming] else []
        kv = _some(sends), _some(receives)
        if any(kv):
            yield Post(2 * t, *kv)
        if t <= reach[source]:
            yield Compute((source,))
        if backward:
            # the gradients of the keys follow them, one step behind, and go home from where the keys stop
            if t > 0 and t <= reach[source] and plan.rows(source):
                yield Wait(2 * t - 1)
            sends, receives = [], []
            if t <= reach[source] and reach[source]:
                home = source * plan.width + member
                sends.append(Move("dkv", following if t < reach[source] else home, source, plan.rows(source)))
            if t < reach[coming]:
                receives.append(Move("dkv", last, coming, plan.rows(coming)))
            if t == reach[station] and t > 0:
                end = ((station + t) % n) * plan.width + member
                receives.append(Move("dkv", end, station, plan.rows(station)))
            dkv = _some(sends), _some(receives)
            if any(dkv):
                yield Post(2 * t + 1, *dkv)
        if any(kv):
            yield Wait(2 * t)
    if backward and reach[station] and plan.rows(station):
        yield Wait(2 * reach[station] + 1)


def _gather(plan: Division, station: int, backward: bool) -> Iterator[Step]:
    """Everything at once: own keys while the others' are on their way."""
    n = plan.stations
    some = plan.meets(station) if plan.strategy == "halo" else range(n)
    others = [s for t in range(1, n) if (s := (station - t) % n) in some]

    def moves(what: str, home: bool) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        here = _some([Move(what, s, station, _size(plan, s, station)) for s in others])
        there = _some([Move(what, s, s, _size(plan, station, s)) for s in others])
        return (there, here) if home else (here, there)

    sends, receives = moves("kv", False)
    if sends or receives:
        yield Post(0, sends, receives)
    yield Compute((station,))
    if sends or receives:
        yield Wait(0)
    if receives:
        yield Compute(tuple(sorted(move.source for move in receives)))
    if backward and (sends or receives):
        yield Post(1, *moves("dkv", True))
        yield Wait(1)


def _tree(plan: Division, rank: int) -> Iterator[Step]:
    """Each rank merges with the one whose number differs in one bit, bit by bit; those beyond the largest power of two
    give theirs to another first, and are told the result."""
    n = plan.ranks
    whole = 1 << (n.bit_length() - 1)
    yield Compute((rank,))

    def one(number: int, peer: int, sends: bool, receives: bool) -> Iterator[Step]:
        move = (Move("state", peer, 0, plan.queries),)
        yield Post(number, move if sends else (), move if receives else ())
        yield Wait(number)
        if receives:
            yield Merge(peer, replaces=not sends and rank >= whole)

    if rank >= whole:
        yield from one(0, rank - whole, True, False)
    elif rank + whole < n:
        yield from one(0, rank + whole, False, True)
    bit = 1
    while bit < whole:
        if rank < whole:
            yield from one(bit.bit_length(), rank ^ bit, True, True)
        bit *= 2
    last = whole.bit_length() + 1
    if rank >= whole:
        yield from one(last, rank - whole, False, True)
    elif rank + whole < n:
        yield from one(last, rank + whole, True, False)


def _heads(plan: Division, rank: int, what: str, number: int) -> Iterator[Step]:
    """Within a station: each member's tokens, of some heads, to each."""
    first = rank // plan.width * plan.width
    counts = plan.counts()
    peers = [r for r in range(first, first + plan.width) if r != rank]
    sends = [Move(what, r, rank, counts[rank] if what == "in" else counts[r]) for r in peers]
    receives = [Move(what, r, r, counts[r] if what == "in" else counts[rank]) for r in peers]
    if peers:
        yield Post(number, _some(sends), _some(receives))
        yield Wait(number)


def _size(plan: Division, station: int, source: int) -> int:
    return sum(b - a for a, b in plan.wants(station, source))


def _some(moves: list[Move]) -> tuple[Move, ...]:
    return tuple(move for move in moves if move.rows)
