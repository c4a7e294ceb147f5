"""What a call must do: pairs, FLOPs, and bytes to and from memory, naive and tiled.

>>> heads = {"heads": 16, "kv_heads": 16, "d": 64, "dv": 64}
>>> gpt2 = Call(batch=64, n_q=1024, n_k=1024, **heads, dtype="float16")
>>> round(gpt2.score_bytes / 1e9, 3)  # one pass over all scores
2.147
>>> moved = traffic(gpt2, backward=True, masked=True, dropout=True)
>>> # the FlashAttention paper measured 40.3 and 4.4
>>> round(moved.naive / 1e9, 1), round(moved.fa1 / 1e9, 1)
(44.6, 4.7)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tilewise.request import heads_are_queries
from tilewise_lab.costs.devices import ITEMSIZE

STATISTIC = 4  # bytes of a running maximum, a denominator, a logsumexp


class ScoreTerms(NamedTuple):
    """What a call does to its scores besides scaling them, and to their weights.

    Operations are per visible pair, on the ordinary units: an addition is one, see `terms.py`. `read` is what
    biases and tables bring from memory, `written` their gradients; `visited` the share of the tiles of a block mask.
    """

    names: tuple[str, ...]
    forward: int = 0
    backward: int = 0
    read: int = 0
    written: int = 0
    visited: float = 1.0
    masked: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class Call:
    """The shapes of a call. `lengths` are (n_q, n_k) of packed sequences; n_q and n_k are then their totals."""

    batch: int
    n_q: int
    n_k: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    dtype: str = "bfloat16"
    before: int | None = None
    after: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    deterministic: bool = False
    terms: ScoreTerms | None = None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """(how many, n_q, n_k)"""
        if self.lengths is None:
            yield self.batch, self.n_q, self.n_k
        else:
            yield from ((1, n_q, n_k) for n_q, n_k in self.lengths)

    @property
    def heads_are_queries(self) -> bool:
        plain = self.lengths is None and self.terms is None
        return plain and heads_are_queries(self.n_q, self.heads // self.kv_heads, self.before)

    @property
    def has_lists(self) -> bool:
        """Whether there are lists of the tiles that a block mask visits."""
        return self.terms is not None and self.terms.visited < 1

    @property
    def pairs(self) -> int:
        """Query-key pairs that see each other, over all heads and sequences; with a block mask, those of its tiles."""
        pairs = self.heads * sum(
            count * visible_pairs(n_q, n_k, self.before, self.after) for count, n_q, n_k in self.sequences
        )
        return pairs if self.terms is None else round(pairs * self.terms.visited)

    @property
    def score_bytes(self) -> int:
        """One pass over the whole score matrix, hidden pairs included: a naive implementation computes them too."""
        return self.itemsize * self.heads * sum(count * n_q * n_k for count, n_q, n_k in self.sequences)

    def rows(self, which: str) -> int:
        """Bytes of q, k, v or o. Its gradient has as many."""
        rows = self.heads * self.n_q if which in "qo" else self.kv_heads * self.n_k
        return self.itemsize * (1 if self.lengths else self.batch) * rows * (self.d if which in "qk" else self.dv)

    @property
    def statistic_bytes(self) -> int:
        """One float32 per query and head."""
        return STATISTIC * (1 if self.lengths else self.batch) * self.heads * self.n_q

    def flops(self, backward: bool = False) -> int:
        """Two products forward, five backward (S again, dP, dV, dQ, dK); 2 FLOPs per multiply-add, visible pairs only.

        >>> call = Call(1, 4096, 4096, 16, 16, 128, 128)
        >>> call.flops() == 4 * 16 * 4096**2 * 128
        True
        >>> call.flops(backward=True) / call.flops()
        2.5
        """
        return 2 * self.pairs * (3 * self.d + 2 * self.dv if backward else self.d + self.dv)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def visible_pairs(n_q: int, n_k: int, before: int | None, after: int | None) -> int:
    """Pairs inside the band, in closed form: row i sees clip(p + after + 1) - clip(p - before) keys, with p = i + n_k -
    n_q and clip to [0, n_k].

    >>> visible_pairs(4, 4, None, 0), visible_pairs(4, 4, 1, 1)
    (10, 10)
    >>> visible_pairs(1, 4, None, 0)
    4
    """
    p = n_k - n_q
    stop = n_q * n_k if after is None else _clipped_sum(p + after + 1, n_q, n_k)
    start = 0 if before is None else _clipped_sum(p - before, n_q, n_k)
    return stop - start


def _clipped_sum(a: int, m: int, n: int) -> int:
    """Σ clip(a + i, 0, n) for i in range(m)"""

    def up_to(x: int) -> int:
        return 0 if x < 0 else x * (x + 1) // 2 if x <= n else n * (n + 1) // 2 + (x - n) * n

    return up_to(a + m - 1) - up_to(a - 1)


class Step(NamedTuple):
    """One kernel of the naive implementation: passes over the score matrix, and rows read or written ("qk": Q, K)."""

    name: str
    passes: float
    rows: str


FORWARD = (Step("S = Q Kᵀ", 1, "qk"), Step("P = softmax(S)", 2, ""), Step("O = P V", 1, "vo"))
BACKWARD = (
    Step("dV = Pᵀ dO", 1, "ov"),
    Step("dP = dO Vᵀ", 1, "ov"),
    Step("dS = P∘(dP - rowsum(P∘dP))", 3, ""),
    Step("dQ = dS K", 1, "kq"),
    Step("dK = dSᵀ Q", 1, "qk"),
)
# Elementwise steps that an eager framework runs on their own: each reads the matrix and writes it again.
MASK = Step("mask S", 2, "")
DROPOUT = Step("drop P", 2.5, "")  # half a pass for one byte of keep-or-drop per score
TERM = Step("change S", 2, "")


def naive_steps(*, backward: bool, masked: bool = False, dropout: bool = False, terms: int = 0) -> list[Step]:
    """The kernels of an eager implementation; the backward of mask, dropout and terms costs what their forward did."""
    extra = [step for step, there in ((MASK, masked), (DROPOUT, dropout)) if there]
    extra += [TERM] * terms
    again = [Step(f"{step.name}, backward", step.passes, "") for step in extra]
    return [*FORWARD, *extra, *((*BACKWARD, *again) if backward else ())]


class Traffic(NamedTuple):
    """Bytes to and from device memory: naive, FlashAttention's first loop order, tilewise's, and the least possible."""

    naive: int
    fa1: int
    tiled: int
    least: int


def traffic(
    call: Call,
    *,
    backward: bool = False,
    masked: bool = False,
    dropout: bool = False,
    fa1_block: int = 256,
    reads_of_keys: float = 1.0,
    reads_of_queries: float = 1.0,
) -> Traffic:
    """`reads_of_keys`: how often K and V come from memory, once if L2 serves the other query tiles; `reads_of_queries`
    is the same for Q and dO in the backward. FA1 keeps one block of `fa1_block` keys at a time and streams Q and O past
    each block."""
    terms = call.terms or ScoreTerms(())
    masked, dropout = masked or terms.masked, dropout or terms.dropout
    steps = naive_steps(backward=backward, masked=masked, dropout=dropout, terms=len(terms.names))
    naive = sum(round(step.passes * call.score_bytes) + sum(map(call.rows, step.rows)) for step in steps)
    more = terms.read * (1 + backward) + terms.written * backward
    return Traffic(
        naive + more,
        _fa1(call, fa1_block, backward) + more,
        _tiled(call, backward, reads_of_keys, reads_of_queries) + more,
        _least(call, backward) + terms.read + terms.written * backward,
    )


def _fa1(call: Call, block: int, backward: bool) -> int:
    """Outer loop over key blocks: O is read and written again for each of them, and so are m and l.

    Forward: K, V once; per block Q in, O out, O in again (not for the first), with m and l.
    Backward: K, V in and dK, dV out once; per block Q, dO in, dQ out, dQ in again; O and dO once for D = rowsum(dO∘O).
    """
    q, k, v, o = map(call.rows, "qkvo")
    blocks = max(-(-n_k // block) for _, _, n_k in call.sequences)
    again = blocks - 1
    total = k + v + blocks * (q + o) + again * o + 2 * (blocks + again) * call.statistic_bytes
    if backward:
        total += 2 * (k + v) + blocks * (q + o + q) + again * q + 2 * o + 2 * blocks * call.statistic_bytes
    return total


def _tiled(call: Call, backward: bool, reads_of_keys: float, reads_of_queries: float) -> int:
    """Outer loop over query tiles: O and lse are written once and never read; the scores never leave the chip.

    The backward runs three kernels: row statistics (O, dO), dK and dV (streams Q, dO past the keys), dQ (streams K, V).
    """
    q, k, v, o = map(call.rows, "qkvo")
    total = q + reads_of_keys * (k + v) + o + call.statistic_bytes
    if backward:
        total += 2 * o + 3 * call.statistic_bytes
        total += 2 * (k + v) + reads_of_queries * (q + o + 2 * call.statistic_bytes)
        total += 2 * q + o + reads_of_keys * (k + v) + 2 * call.statistic_bytes
    return round(total)


def _least(call: Call, backward: bool) -> int:
    """Every input once, every output once."""
    q, k, v, o = map(call.rows, "qkvo")
    forward = q + k + v + o + call.statistic_bytes
    return forward + (2 * (q + k + v) + 2 * o + call.statistic_bytes if backward else 0)
