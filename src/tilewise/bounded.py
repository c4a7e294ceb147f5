"""A dict of bounded size, for caches."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict that drops the oldest eighth of its entries before it grows beyond `limit` entries.

    >>> found = Bounded(8)
    >>> for n in range(10):
    ...     found[n] = str(n)
    >>> list(found)
    [2, 3, 4, 5, 6, 7, 8, 9]

    Entries are as old as their first write. Threads may share it without a lock: each operation on the dict is atomic.

    Args:
        limit: the number of entries, at least 1.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        self._make_room(key)
        super().__setitem__(key, value)

    def setdefault(self, key: K, default: V) -> V:  # type: ignore[override]
        """The value of the key, which is written if there is none.

        Args:
            key: the key.
            default: the value of a new entry.

        Returns:
            The value that the dict holds.
        """
        self._make_room(key)
        return super().setdefault(key, default)

    def _make_room(self, key: K) -> None:
        if len(self) >= self.limit and key not in self:
            for old in list(self)[: len(self) - self.limit + max(1, self.limit // 8)]:
                self.pop(old, None)
