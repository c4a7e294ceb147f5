"""Who holds which tokens: runs of positions, dealt out to ranks.

    contiguous    one stretch for each rank; the halo of a window is then its neighbour's end
    zigzag        two stretches for each rank, the r-th and the r-th from the end: causal work is the same for all
    striped       every n-th token: the same to within a row, for any length
    document      packed documents: long ones zigzag, short ones whole, so that work and tokens are even

Documents lie one after the other in a stream; a dense sequence is one document. Nothing needs to divide anything: a
rank may hold a token more than another, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 0.02  # of a rank's share, in work and in tokens: a document below this stays whole


class Run(NamedTuple):
    """Tokens start, start + step, ... of a document, `size` of them."""

    document: int
    start: int
    step: int
    size: int

    def part(self, a: int, b: int) -> Run:
        """Its tokens a .. b.

        >>> Run(0, 10, 2, 5).part(1, 3)
        Run(document=0, start=12, step=2, size=2)
        """
        return Run(self.document, self.start + self.step * a, self.step, b - a)


Shard = tuple[Run, ...]


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each document begins in the stream, and where the last one ends."""
    return [0, *accumulate(lengths)]


def cut(n: int, parts: int) -> list[int]:
    """The ends of `parts` stretches of n tokens, as even as can be.

    >>> cut(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [n * p // parts for p in range(parts + 1)]


def contiguous(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> contiguous([10], 4)[1]
    (Run(document=0, start=2, step=1, size=3),)
    """
    ends = cut(sum(lengths), ranks)
    return _dealt(lengths, [[(ends[r], ends[r + 1])] for r in range(ranks)])


def zigzag(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> zigzag([8], 2)[0]
    (Run(document=0, start=0, step=1, size=2), Run(document=0, start=6, step=1, size=2))
    """
    ends = cut(sum(lengths), 2 * ranks)
    stretches = list(pairwise(ends))
    return _dealt(lengths, [[stretches[r], stretches[2 * ranks - 1 - r]] for r in range(ranks)])


def striped(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> striped([5], 2)[0]
    (Run(document=0, start=0, step=2, size=3),)
    """
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    for document, (begin, n) in enumerate(zip(starts(lengths), lengths, strict=False)):
        for r in range(ranks):
            first = (r - begin) % ranks
            if first < n:
                shards[r].append(Run(document, first, ranks, -(-(n - first) // ranks)))
    return [tuple(x) for x in shards]


def document(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> [sum(run.size for run in shard) for shard in document([64, 1, 1, 1, 1], 2)]
    [34, 34]
    """
    if ranks == 1:
        return contiguous(lengths, 1)
    pairs = [n * (n + 1) // 2 for n in lengths]
    total, tokens = max(1, sum(pairs)), max(1, sum(lengths))
    loads = [max(p / total, n / tokens) for p, n in zip(pairs, lengths, strict=True)]
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    work, held = [0.0] * ranks, [0.0] * ranks
    small = [d for d, load in enumerate(loads) if load * ranks <= SMALL]
    spare = 0
    for d, n in enumerate(lengths):
        if loads[d] * ranks <= SMALL:
            continue
        ends = cut(n, 2 * ranks)
        for p, (a, b) in enumerate(pairwise(ends)):
            r = (min(p, 2 * ranks - 1 - p) + spare) % ranks
            if a < b:
                shards[r].append(Run(d, a, 1, b - a))
                work[r] += (b * (b + 1) - a * (a + 1)) / 2 / total
                held[r] += (b - a) / tokens
        spare += n % ranks  # the next document's tokens that are left over go to others
    for d in sorted(small, key=loads.__getitem__, reverse=True):
        n = lengths[d]
        r = min(range(ranks), key=lambda r: (max(work[r] + pairs[d] / total, held[r] + n / tokens), held[r]))
        work[r] += pairs[d] / total
        held[r] += n / tokens
        if n:
            shards[r].append(Run(d, 0, 1, n))
    return [joined(x) for x in shards]


LAYOUTS: dict[str, Callable[[Sequence[int], int], list[Shard]]] = {
    "contiguous": contiguous, "zigzag": zigzag, "striped": striped, "document": document,
}  # fmt: skip


def _dealt(lengths: Sequence[int], stretches: Sequence[Iterable[tuple[int, int]]]) -> list[Shard]:
    """Stretches of the stream, of each rank, as runs of documents."""
    begins = starts(lengths)
    shards = []
    for own in stretches:
        runs = []
        for a, b in own:
            d = max(0, int(torch.searchsorted(torch.tensor(begins), a, right=True)) - 1) if a < b else len(lengths)
            while d < len(lengths) and begins[d] < b:
                low, high = max(a, begins[d]), min(b, begins[d + 1])
                if low < high:
                    runs.append(Run(d, low - begins[d], 1, high - low))
                d += 1
        shards.append(joined(runs))
    return shards


def joined(runs: Iterable[Run]) -> Shard:
    """In the order of the stream, neighbours as one.

    >>> joined([Run(0, 4, 1, 2), Run(0, 0, 1, 4)])
    (Run(document=0, start=0, step=1, size=6),)
    """
    result: list[Run] = []
    for run in sorted(runs):
        last = result[-1] if result else None
        if last and last.step == run.step == 1 and last[:2] == (run.document, run.start - last.size):
            result[-1] = last._replace(size=last.size + run.size)
        else:
            result.append(run)
    return tuple(result)


def tokens(shard: Shard, lengths: Sequence[int]) -> Tensor:
    """The places in the stream of a shard's tokens, in its order."""
    begins = starts(lengths)
    parts = [begins[run.document] + run.start + run.step * torch.arange(run.size) for run in shard]
    return torch.cat([torch.arange(0), *parts])


def positions(shard: Shard) -> Tensor:
    """The places within their documents."""
    return torch.cat([torch.arange(0), *(run.start + run.step * torch.arange(run.size) for run in shard)])
