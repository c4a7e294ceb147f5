"""Dicts of bounded size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tilewise.bounded import Bounded


def test_the_oldest_eighth_is_dropped() -> None:
    found: Bounded[int, int] = Bounded(16)
    for n in range(16):
        found[n] = -n
    found[3] = 0  # a new value of a known key drops nothing
    assert list(found) == list(range(16))
    assert found.setdefault(16, -16) == -16
    assert list(found) == list(range(2, 17))
    assert found.setdefault(5, 1) == -5
    found[17] = 0
    found[18] = 0
    assert list(found) == list(range(4, 19))


def test_a_smaller_limit_holds_at_the_next_write() -> None:
    found: Bounded[int, int] = Bounded(16)
    for n in range(16):
        found[n] = n
    found.limit = 3
    found[16] = 16
    assert list(found) == [14, 15, 16]


def test_threads_share_one() -> None:
    found: Bounded[int, int] = Bounded(64)

    def write(first: int) -> None:
        for n in range(first, first + 2000):
            found[n % 400] = n % 400
            assert found.get(n % 400, n % 400) == n % 400

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, 800, 100)))
    assert len(found) <= 64 + 8  # each of 8 threads may have looked before the others wrote
    assert all(key == value for key, value in found.items())
