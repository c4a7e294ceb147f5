"""Making a failing case small: drop what it does not need, one thing at a time, while it fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tilewise_lab.fuzz.case import MODULES, AnyCase, Case
from tilewise_lab.fuzz.judge import Verdict

SIMPLEST = Case()
OPTIONS = (
    "bias", "alibi", "sinks", "score_mod", "mask_mod", "block", "dropout_p", "softcap", "hidden", "window", "causal",
    "scale", "gain", "deterministic", "layouts", "dtypes", "slack", "return_lse", "return_max_logit", "dtype", "group",
)  # fmt: skip
MODES = ("call", "backward", "func.grad", "func.vjp")
SIZES = ("batch", "n_q", "n_k", "heads", "d", "dv")


def shrink(
    case: AnyCase, verdict: Verdict, judge: Callable[[AnyCase], Verdict], seconds: float = 20.0
) -> tuple[AnyCase, Verdict]:
    """The smallest case found that fails with the same key, and its verdict."""
    until = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(case):
            if time.monotonic() > until:
                return case, verdict
            found = judge(candidate)
            if found.is_finding and found.key == verdict.key:
                case, verdict, smaller = candidate, found, True
                break
    return case, verdict


def simpler(case: AnyCase) -> Iterator[AnyCase]:
    if isinstance(case, Case):
        return candidates(case)
    found: Iterator[AnyCase] = MODULES[type(case)].candidates(case)
    return found


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, the simplest first."""
    if case.bad is not None:
        return
    if case.packed:
        n_q, n_k = case.longest
        yield _kept(
            replace(case, function="attention", batch=len(case.lengths), n_q=n_q, n_k=n_k, lengths=(), slack=(0, 0))
        )
    for mode in MODES[: MODES.index(case.mode)] if case.mode in MODES else MODES:
        yield replace(case, mode=mode)
    for name in OPTIONS:
        simple = getattr(SIMPLEST, name)
        if getattr(case, name) != simple:
            changed = replace(case, **{name: simple})
            yield _kept(changed if name != "mask_mod" else replace(changed, block=0))
    for n in range(len(case.layouts)):
        yield replace(case, layouts=case.layouts[:n] + case.layouts[n + 1 :])
    for n in range(len(case.wants)):
        if len(case.wants) > 1:
            yield replace(case, wants=case.wants[:n] + case.wants[n + 1 :])
    for n in range(len(case.lengths)):
        if len(case.lengths) > 1:
            yield replace(case, lengths=case.lengths[:n] + case.lengths[n + 1 :])
    for name in SIZES:
        size = getattr(case, name)
        for smaller in sorted({1, size // 2, size - 1} - {0}):
            if 0 < smaller < size:
                yield _kept(replace(case, **{name: smaller}))
    for n, (q, k) in enumerate(case.lengths):
        for pair in ((q // 2, k), (q, k // 2), (max(q - 1, 0), k), (q, max(k - 1, 0))):
            if pair != (q, k):
                yield replace(case, lengths=(*case.lengths[:n], pair, *case.lengths[n + 1 :]))
    if case.window is not None:
        before, after = case.window
        for window in ((None, after), (before, None)):
            if window != case.window:
                yield replace(case, window=window)


def _kept(case: Case) -> Case:
    """The case without mentions of tensors that it has no more."""
    names = case.shapes()
    wants = tuple(x for x in case.wants if x in names) or (("q",) if case.wants else ())
    layouts = tuple((n, x) for n, x in case.layouts if n in names or n in ("dout", "dlse"))
    return replace(case, wants=wants, layouts=layouts, dtypes=tuple((n, x) for n, x in case.dtypes if n in names))
