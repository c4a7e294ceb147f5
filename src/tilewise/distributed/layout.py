"""Who holds which tokens: runs of positions, dealt out to ranks.

    contiguous    one stretch for each rank; the halo of a window is then its neighbour's end
    zigzag        two stretches for each rank, the r-th and the r-th from the end: causal work is the same for all
    striped       every n-th token: the same to within a row, for any length
    document      packed documents: whole where that is even, in work and in tokens; long ones zigzag over some ranks

Documents lie one after the other in a stream; a dense sequence is one document. Nothing needs to divide anything: a
rank may hold a token more than another, or none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
PARTS = (1.0, 0.5, 0.25)  # of a rank's share: a document above it is cut, tried in turn
EVEN = 0.03  # more than its share may the busiest rank have
SLIVER = 0.005  # of a rank's share: less is not worth a cut


def lasting(make: Callable[P, T]) -> Callable[P, T]:
    """For what is remembered: tensors on the CPU, whatever the default device, and fit for training, whoever asks for
    them first."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args, **kwargs)

    return made


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
    >>> [len(shard) for shard in document([512] * 16, 8)]  # two whole documents each: nobody needs another's keys
    [2, 2, 2, 2, 2, 2, 2, 2]

    Documents that are cut cost traffic, those that are not cost balance: the coarsest cut that is even is taken.
    """
    work, tokens = (_shares(x, ranks) for x in ([n * (n + 1) // 2 for n in lengths], lengths))
    found = min_over = None
    for part in (*PARTS, None):
        dealt = _mixed(lengths, work, tokens, ranks) if part is None else _even(lengths, work, tokens, ranks, part)
        shards = [joined(x) for x in dealt]
        held = [[sum(run.size * 1.0 for run in shard) for shard in shards], [_work(shard) for shard in shards]]
        over = max(max(_shares(x, ranks)) for x in held) - 1
        if min_over is None or over < min_over:
            found, min_over = shards, over
        if over <= EVEN:
            break
    return found or []


def _shares(each: Sequence[float], ranks: int) -> list[float]:
    """In parts of what a rank should have."""
    whole = max(1, sum(each))
    return [x * ranks / whole for x in each]


def _work(shard: Iterable[Run]) -> float:
    return sum(run.size * (run.start + (run.size + 1) / 2) for run in shard)


def _even(
    lengths: Sequence[int], work: Sequence[float], tokens: Sequence[float], ranks: int, part: float
) -> list[list[Run]]:
    """Documents cut into equal pieces, zigzag, where they are more than this part of a rank's share, of work or of
    tokens; the largest pieces dealt first, each to whom it burdens least."""
    pieces: list[tuple[float, int, int, int]] = []  # (load, document, which of, so many)
    for d, load in enumerate(map(max, work, tokens)):
        k = min(ranks, max(1, -int(-load // part)))
        pieces += [(load / k, d, m, k) for m in range(k)]
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    held = torch.zeros(2, ranks, dtype=torch.float64)
    for _, d, m, k in sorted(pieces, key=lambda x: -x[0]):
        after = torch.maximum(held[0] + work[d] / k, held[1] + tokens[d] / k)
        r = int(after.add_(held[0] + held[1], alpha=1e-6).argmin())
        held[0, r] += work[d] / k
        held[1, r] += tokens[d] / k
        shards[r] += _mirrored(d, lengths[d], m / k, (m + 1) / k)
    return shards


def _mixed(lengths: Sequence[int], work: Sequence[float], tokens: Sequence[float], ranks: int) -> list[list[Run]]:
    """Each rank in turn is filled from both ends of the documents by length, long ones with more work than tokens and
    short ones with less, so that it comes out even in both. At most a cut or two for each rank."""
    order = sorted((d for d, n in enumerate(lengths) if n), key=lambda d: -lengths[d])
    density = {d: work[d] / tokens[d] for d in order}
    left = {d: tokens[d] for d in order}
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    done = [0.0, 0.0]

    def take(r: int, d: int, size: float) -> None:
        if (left[d] - size) * max(1.0, density[d]) < SLIVER:
            size = left[d]
            order.remove(d)
        elif size * max(1.0, density[d]) < SLIVER:
            return
        begin = 1 - left[d] / tokens[d]
        left[d] -= size
        shards[r].extend(_mirrored(d, lengths[d], begin, 1 - left[d] / tokens[d]))
        done[:] = done[0] + size * density[d], done[1] + size

    for r in range(ranks):
        part = 0.0
        while order and part < 1:
            w, t = r + 1 - done[0], r + 1 - done[1]  # what is missing to its share, of work and of tokens
            long, short = order[0], order[-1]
            high, low = density[long], density[short]
            a = min(max(0.0, (w - low * t) / (high - low)), t) if high > low else t
            part = min([1.0, *(left[d] / x for d, x in ((long, a), (short, t - a)) if x > 0)])
            for d, size in ((long, part * a), (short, part * (t - a))):
                if size > 0:
                    take(r, d, size)
    for d in list(order):
        take(ranks - 1, d, left[d])
    return shards


def _mirrored(document: int, n: int, begin: float, end: float) -> list[Run]:
    """This part of a document, taken from its beginning and from its end: as much causal work as any part of the size.

    >>> [tuple(run)[1:] for run in _mirrored(0, 10, 0, 0.4)], [tuple(run)[1:] for run in _mirrored(0, 10, 0.4, 1)]
    ([(0, 1, 2), (8, 1, 2)], [(2, 1, 6)])
    """
    a = round(begin * (n // 2))
    if end >= 1:
        return [Run(document, a, 1, n - 2 * a)] if n > 2 * a else []
    b = round(end * (n // 2))
    return [Run(document, a, 1, b - a), Run(document, n - b, 1, b - a)] if b > a else []


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
            d = max(0, bisect_right(begins, a) - 1) if a < b else len(lengths)
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
