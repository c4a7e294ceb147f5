"""The search: draw, judge, shrink what fails, and keep one finding of each cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tilewise_lab.fuzz.case import AnyCase
from tilewise_lab.fuzz.draw import Where, draw, drawn
from tilewise_lab.fuzz.judge import Verdict
from tilewise_lab.fuzz.shrink import shrink

MAKES = ("dense", "dense", "sparse", "kv", "dense", "grown", "dense", "kv", "mla", "sparse")  # in turn


def case_of(seed: int, number: int, where: Where) -> AnyCase:
    """The call of a seed with this number."""
    family = MAKES[number % len(MAKES)]
    found: AnyCase = draw(seed, number, where) if family == "dense" else drawn(family, seed, number, where)
    return found


SAME_KEY = 4  # cases of one key that are shrunk, since they may have several causes


@dataclass
class Finding:
    """A small failing case, how it fails, and how many cases have failed alike."""

    case: AnyCase
    verdict: Verdict
    number: int
    count: int = 1

    def text(self) -> str:
        return f"{self.verdict.code}\n# {self.verdict.words}"

    def dict(self) -> dict[str, Any]:
        kind, key, words, code = self.verdict
        return {"kind": kind, "key": key, "words": words, "code": code, "count": self.count, "number": self.number,
                "case": self.case.dict()}  # fmt: skip


@dataclass
class Search:
    """All that a seed finds, case by case."""

    seed: int
    where: Where
    judge: Callable[[AnyCase], Verdict]
    findings: list[Finding] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    cases: int = 0

    def run(self, seconds: float | None, cases: int | None = None) -> Iterator[Finding | None]:
        """Goes on until the time or the cases are spent; yields after each case what is new, or None."""
        until = None if seconds is None else time.monotonic() + seconds
        while (until is None or time.monotonic() < until) and (cases is None or self.cases < cases):
            case = case_of(self.seed, self.cases, self.where)
            self.cases += 1
            verdict = self.judge(case)
            self.kinds["bad input" if case.bad else verdict.kind or "right"] += 1
            yield self._kept(case, verdict) if verdict.is_finding else None

    def _kept(self, case: AnyCase, verdict: Verdict) -> Finding | None:
        alike = [f for f in self.findings if f.verdict.key == verdict.key]
        known = next((f for f in alike if f.case.features() <= case.features()), None)
        if known is None and len(alike) >= SAME_KEY:
            known = alike[-1]
        if known is None:
            case, verdict = shrink(case, verdict, self.judge)
            known = next((f for f in alike if f.case.features() == case.features()), None)
        if known is not None:
            known.count += 1
            return None
        self.findings.append(Finding(case, verdict, self.cases - 1))
        return self.findings[-1]
