"""Whether an answer is right: the call that will be timed, compared with the same formula in float64.

Gradients of one (sequence, KV head) do not depend on any other, so a sample of them is compared in full length and
the rest is only asked to be finite. The limit is twice the error that the formula makes in the dtype of the call, with
the row sums of its gradient taken in whichever of the two usual ways is off by more: over P dP, as autograd does, or
over dout out, as every tiled kernel must. A rounding of the largest result, and sqrt(keys) float32 roundings of it, are
allowed in addition: libraries sum in different orders, and the formula may be exact by luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.results import Entry

BUDGET = 2.0
ELEMENTS = 2**26  # of a (rows, keys) matrix held at once


class Error(NamedTuple):
    """The largest error found, None where something is not finite; and the largest allowed."""

    found: float | None
    limit: float

    @property
    def ok(self) -> bool:
        return self.found is not None and self.found <= self.limit


@dataclass(frozen=True)
class Block:
    """One KV head of one sequence, and the group of heads that query it."""

    tokens: slice | int
    head: int
    group: int

    def queries(self, x: Tensor) -> Tensor:
        """(G, S, D)"""
        return x[self.tokens][:, self.head * self.group : (self.head + 1) * self.group].transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """(S, D)"""
        return x[self.tokens][:, self.head]

    def take(self, name: str, x: Tensor) -> Tensor:
        if name == "lse":  # (B, H, S), packed (H, T) -> (G, S)
            heads = slice(self.head * self.group, (self.head + 1) * self.group)
            return x[heads, self.tokens] if isinstance(self.tokens, slice) else x[self.tokens, heads]
        return self.keys(x) if name in ("dk", "dv") else self.queries(x)


class Judge:
    """
    >>> case = Case(1, 8, 2, 2, 4, dtype="float32")
    >>> x = case.inputs(torch.device("cpu"), seed=0)
    >>> judge = Judge(case, x, samples=2)
    >>> judge.errors({"out": torch.zeros_like(x.q)})["out"].ok
    False
    """

    def __init__(self, case: Case, x: Inputs, samples: int, seed: int = 0) -> None:
        every = blocks(case)
        self.chosen = choose(every, samples, random.Random(seed))
        self.checked = f"{len(self.chosen)} of {len(every)} KV heads, every row"
        self.exact: list[dict[str, Tensor]] = []
        largest: dict[str, float] = {}
        usual: dict[str, float] = {}
        rounding = torch.finfo(x.q.dtype).eps / 2
        rounding += torch.finfo(torch.float32).eps / 2 * math.sqrt(case.longest)  # of a sum, in whatever order it is
        for block in self.chosen:
            parts = [block.queries(x.q), block.keys(x.k), block.keys(x.v), block.queries(x.dout)]
            exact = formula(case, *(part.double() for part in parts))
            self.exact.append(exact)
            ways = [formula(case, *parts, tiled=tiled) for tiled in (False, True)]
            for name, truth in exact.items():
                usual[name] = max(usual.get(name, 0.0), *(distance(found[name], truth) for found in ways))
                largest[name] = max(largest.get(name, 0.0), float(truth.abs().max()))
        self.limits = {name: BUDGET * usual[name] + rounding * largest[name] for name in usual}

    def errors(self, answer: Mapping[str, Tensor]) -> dict[str, Error]:
        return {name: Error(self._error(name, x), self.limits[name]) for name, x in answer.items()}

    def changes(self, first: Mapping[str, Tensor], last: Mapping[str, Tensor], *, same_bits: bool) -> dict[str, Error]:
        """What moved in all of an answer since it was found right: two right answers lie two limits apart at most."""
        moved = {name: (last[name].float() - x.float()).abs().max() for name, x in first.items()}
        return {
            name: Error(None if math.isnan(x) else x, 0.0 if same_bits else 2 * self.limits[name])
            for name, x in zip(moved, torch.stack(list(moved.values())).tolist(), strict=True)
        }

    def _error(self, name: str, x: Tensor) -> float | None:
        if not bool(torch.isfinite(x).all()):
            return None
        pairs = zip(self.chosen, self.exact, strict=True)
        return max(distance(block.take(name, x), exact[name]) for block, exact in pairs)


def blocks(case: Case) -> list[Block]:
    ends = [0]
    for length in case.lengths:
        ends.append(ends[-1] + length)
    sequences: list[slice | int] = [slice(a, b) for a, b in pairwise(ends)]
    return [
        Block(tokens, head, case.heads // case.kv_heads)
        for tokens in sequences or list(range(case.batch))
        for head in range(case.kv_heads)
    ]


def choose(every: list[Block], samples: int, rng: random.Random) -> list[Block]:
    """The first, the last, and some between."""
    if samples >= len(every):
        return every
    return [every[0], *rng.sample(every[1:-1], max(0, samples - 2)), every[-1]]


def formula(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, tiled: bool = False) -> dict[str, Tensor]:
    """Attention and its gradient as the textbook has them, in the dtype of the inputs, some rows at a time.

    S = q kᵀ/√D, P = softmax(S), out = P v; dv = Pᵀ dout, dP = dout vᵀ, dS = P (dP - rowsum(P dP)), dq = dS k/√D,
    dk = dSᵀ q/√D, lse = log rowsum(exp S). tiled: rowsum(P dP) is taken as rowsum(dout out), which it equals.
    """
    n_q, n, scale = q.shape[1], k.shape[0], 1 / math.sqrt(q.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    out, dq, lse = torch.empty_like(dout), torch.empty_like(q), torch.empty_like(q[..., 0], dtype=wide)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    step = max(1, ELEMENTS // (n * q.shape[0]))
    keys = torch.arange(n, device=q.device)
    k, v = (x.expand(q.shape[0], -1, -1) for x in (k, v))  # a product per head; all in one, heads of one row round less
    for start in range(0, n_q, step):
        rows = slice(start, min(start + step, n_q))
        s = (scale * q[:, rows]) @ k.mT  # (G, rows, keys)
        if case.causal:
            gap = torch.arange(rows.start, rows.stop, device=q.device)[:, None] - keys
            s.masked_fill_((gap < 0) | (gap > (n if case.window is None else case.window)), -torch.inf)
        lse[:, rows] = s.to(wide).logsumexp(-1)
        p = s.softmax(-1)
        del s
        out[:, rows] = p @ v
        dp = dout[:, rows] @ v.mT
        dv += (p.mT @ dout[:, rows]).sum(0)
        if tiled:
            delta = (dout[:, rows].to(wide) * out[:, rows].to(wide)).sum(-1, keepdim=True)
            ds = (p * (dp - delta)).to(p.dtype)
        else:
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dq[:, rows] = scale * (ds @ k)
        dk += (ds.mT @ (scale * q[:, rows])).sum(0)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


def note(entry: Entry, errors: Mapping[str, Error]) -> None:
    """Write errors down, the largest of each tensor so far."""
    for name, error in errors.items():
        found, limit = entry.errors.get(name, (0.0, error.limit))
        entry.errors[name] = [None if None in (found, error.found) else max(found or 0.0, error.found or 0.0), limit]


def condemn(entry: Entry, errors: Mapping[str, Error], when: str = "") -> None:
    """A wrong answer loses its status and its times, however many right ones there were."""
    bad = {name: error for name, error in errors.items() if not error.ok}
    if bad and entry.status == "ok":
        words = (
            f"{n} is not finite" if e.found is None else f"{n} is off by {e.found:.1e}, allowed {e.limit:.1e}"
            for n, e in bad.items()
        )
        entry.status, entry.reason, entry.times = "wrong", when + "; ".join(words), []
