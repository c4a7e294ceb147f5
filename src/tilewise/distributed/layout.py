"""Layouts: which tokens each rank holds, as runs of positions.

    contiguous    one stretch of tokens per rank, so that a window reaches into the neighbouring ranks only
    zigzag        stretches r and 2n - 1 - r of 2n for rank r of n: causal work is the same on all ranks
    striped       every n-th token: causal work is equal to within a row, for any length
    document      packed documents stay whole where tokens and work are then even; long ones are cut zig-zag

Documents are concatenated to a stream; a dense sequence is one document. No length has to be divisible: a rank may hold
one token more than another, or none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
CUT_ABOVE = (1.0, 0.5, 0.25)  # of a rank's share: documents above it are cut; tried in this order
TOLERANCE = 0.03  # the busiest rank may have this much more than its share
SMALLEST_CUT = 0.005  # of a rank's share: a smaller piece is not cut off


def cacheable(make: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function whose tensors are cached: it runs on the CPU, whatever the default device, and outside of
    inference mode, so that autograd can use the tensors later."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args, **kwargs)

    return made


class Run(NamedTuple):
    """`size` tokens of a document, at positions start, start + step, ..."""

    document: int
    start: int
    step: int
    size: int

    def part(self, a: int, b: int) -> Run:
        """The run of its tokens a to b - 1.

        >>> Run(0, 10, 2, 5).part(1, 3)
        Run(document=0, start=12, step=2, size=2)
        """
        return Run(self.document, self.start + self.step * a, self.step, b - a)


Shard = tuple[Run, ...]


def starts(lengths: Sequence[int]) -> list[int]:
    """The offset of each document in the stream, and the end of the last one (cu_seqlens)."""
    return [0, *accumulate(lengths)]


def even_splits(n: int, parts: int) -> list[int]:
    """The boundaries of `parts` stretches of n tokens, whose sizes differ by at most 1.

    >>> even_splits(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [n * p // parts for p in range(parts + 1)]


def contiguous(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> contiguous([10], 4)[1]
    (Run(document=0, start=2, step=1, size=3),)
    """
    stretches = pairwise(even_splits(sum(lengths), ranks))
    return [_runs_of(lengths, [stretch]) for stretch in stretches]


def zigzag(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """
    >>> zigzag([8], 2)[0]
    (Run(document=0, start=0, step=1, size=2), Run(document=0, start=6, step=1, size=2))
    """
    stretches = list(pairwise(even_splits(sum(lengths), 2 * ranks)))
    return [_runs_of(lengths, [stretches[r], stretches[2 * ranks - 1 - r]]) for r in range(ranks)]


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
    """A document that is cut costs traffic, one that is not costs balance: takes the coarsest cut that is even.

    >>> [sum(run.size for run in shard) for shard in document([64, 1, 1, 1, 1], 2)]
    [34, 34]
    >>> [len(shard) for shard in document([512] * 16, 8)]  # two whole documents each: no keys are sent
    [2, 2, 2, 2, 2, 2, 2, 2]
    """
    work, tokens = _shares([n * (n + 1) // 2 for n in lengths], ranks), _shares(lengths, ranks)
    best: list[Shard] = []
    least = float("inf")
    for limit in (*CUT_ABOVE, None):
        cut = _fill_ranks(lengths, work, tokens, ranks) if limit is None else _cut(lengths, work, tokens, ranks, limit)
        shards = [merge_runs(runs) for runs in cut]
        loads = [[sum(run.size * 1.0 for run in shard) for shard in shards], [_work(shard) for shard in shards]]
        excess = max(max(_shares(load, ranks)) for load in loads) - 1
        if excess < least:
            best, least = shards, excess
        if excess <= TOLERANCE:
            break
    return best


def _shares(loads: Sequence[float], ranks: int) -> list[float]:
    """The loads in units of a rank's even share."""
    total = max(1, sum(loads))
    return [x * ranks / total for x in loads]


def _work(shard: Iterable[Run]) -> float:
    """The visible pairs of a shard's queries under a causal mask."""
    return sum(run.size * (run.start + (run.size + 1) / 2) for run in shard)


def _cut(
    lengths: Sequence[int], work: Sequence[float], tokens: Sequence[float], ranks: int, limit: float
) -> list[list[Run]]:
    """Cuts documents whose work or tokens exceed `limit` into equal zig-zag parts, and gives the parts to ranks: the
    largest first, each to the rank whose load is then the smallest."""
    parts: list[tuple[float, int, int, int]] = []  # (load, document, m, k): part m of k
    for d, load in enumerate(map(max, work, tokens)):
        k = min(ranks, max(1, -int(-load // limit)))
        parts += [(load / k, d, m, k) for m in range(k)]
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    loads = torch.zeros(2, ranks, dtype=torch.float64, device="cpu")
    for _, d, m, k in sorted(parts, key=lambda x: -x[0]):
        after = torch.maximum(loads[0] + work[d] / k, loads[1] + tokens[d] / k)
        r = int(after.add_(loads[0] + loads[1], alpha=1e-6).argmin())
        loads[0, r] += work[d] / k
        loads[1, r] += tokens[d] / k
        shards[r] += _zigzag_part(d, lengths[d], m / k, (m + 1) / k)
    return shards


def _fill_ranks(lengths: Sequence[int], work: Sequence[float], tokens: Sequence[float], ranks: int) -> list[list[Run]]:
    """Fills one rank after the other with parts of the longest and the shortest document left. Long ones have more work
    per token, so that a mix of both gives a rank its share of work and of tokens with at most two cuts."""
    order = sorted((d for d, n in enumerate(lengths) if n), key=lambda d: -lengths[d])
    density = {d: work[d] / tokens[d] for d in order}
    left = {d: tokens[d] for d in order}
    shards: list[list[Run]] = [[] for _ in range(ranks)]
    done_work = done_tokens = 0.0

    def take(r: int, d: int, size: float) -> None:
        nonlocal done_work, done_tokens
        if (left[d] - size) * max(1.0, density[d]) < SMALLEST_CUT:
            size = left[d]
            order.remove(d)
        elif size * max(1.0, density[d]) < SMALLEST_CUT:
            return
        begin = 1 - left[d] / tokens[d]
        left[d] -= size
        shards[r].extend(_zigzag_part(d, lengths[d], begin, 1 - left[d] / tokens[d]))
        done_work += size * density[d]
        done_tokens += size

    for r in range(ranks):
        filled = 0.0
        while order and filled < 1:
            w, t = r + 1 - done_work, r + 1 - done_tokens  # missing to the rank's share
            long, short = order[0], order[-1]
            high, low = density[long], density[short]
            # a tokens of the long and t - a of the short document have work w
            a = min(max(0.0, (w - low * t) / (high - low)), t) if high > low else t
            filled = min([1.0, *(left[d] / x for d, x in ((long, a), (short, t - a)) if x > 0)])
            for d, size in ((long, filled * a), (short, filled * (t - a))):
                if size > 0:
                    take(r, d, size)
    for d in list(order):
        take(ranks - 1, d, left[d])
    return shards


def _zigzag_part(document: int, n: int, begin: float, end: float) -> list[Run]:
    """The part from `begin` to `end` (0 to 1) of a document, half of it from the document's start and half from its
    end: parts of one size have the same causal work.

    >>> [tuple(run)[1:] for run in _zigzag_part(0, 10, 0, 0.4)], [tuple(run)[1:] for run in _zigzag_part(0, 10, 0.4, 1)]
    ([(0, 1, 2), (8, 1, 2)], [(2, 1, 6)])
    """
    a = round(begin * (n // 2))
    if end >= 1:
        return [Run(document, a, 1, n - 2 * a)] if n > 2 * a else []
    b = round(end * (n // 2))
    return [Run(document, a, 1, b - a), Run(document, n - b, 1, b - a)] if b > a else []


TokenLayout = Literal["contiguous", "zigzag", "striped", "document"]
LAYOUTS: dict[TokenLayout, Callable[[Sequence[int], int], list[Shard]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "document": document,
}


def _runs_of(lengths: Sequence[int], stretches: Iterable[tuple[int, int]]) -> Shard:
    """The runs of documents in some stretches of the stream."""
    begins = starts(lengths)
    runs = []
    for a, b in stretches:
        d = max(0, bisect_right(begins, a) - 1) if a < b else len(lengths)
        while d < len(lengths) and begins[d] < b:
            low, high = max(a, begins[d]), min(b, begins[d + 1])
            if low < high:
                runs.append(Run(d, low - begins[d], 1, high - low))
            d += 1
    return merge_runs(runs)


def merge_runs(runs: Iterable[Run]) -> Shard:
    """The runs in the order of the stream; adjacent ones become one.

    >>> merge_runs([Run(0, 4, 1, 2), Run(0, 0, 1, 4)])
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


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ranges, in their order; one that begins within the one before it, or at its end, becomes part of it.

    >>> merge_ranges([(0, 2), (2, 5), (4, 6), (8, 9)])
    ((0, 6), (8, 9))
    """
    found: list[tuple[int, int]] = []
    for a, b in ranges:
        if found and found[-1][0] <= a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return tuple(found)


def token_index(shard: Shard, lengths: Sequence[int]) -> Tensor:
    """The indices in the stream of a shard's tokens, in the shard's order, on the CPU."""
    begins = starts(lengths)
    return torch.cat([torch.arange(0, device="cpu"), *(begins[run.document] + _positions(run) for run in shard)])


def positions(shard: Shard) -> Tensor:
    """The positions of a shard's tokens within their documents, on the CPU."""
    return torch.cat([torch.arange(0, device="cpu"), *map(_positions, shard)])


def _positions(run: Run) -> Tensor:
    return run.start + run.step * torch.arange(run.size, device="cpu")
