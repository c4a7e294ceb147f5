"""From targets to work: what a run has to do for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tilewise_lab.bench import cold, whole
from tilewise_lab.bench.cases import PASSES
from tilewise_lab.bench.results import Cell, Peak, Results
from tilewise_lab.bench.runner import Run
from tilewise_lab.bench.settings import CASES

Part = Callable[[], Iterator[Cell | Peak]]


def parts(run: Run, targets: Sequence[str], results: Results) -> list[tuple[str, Part]]:
    """What there is to do, as (what to call it, the work)."""
    chosen = run.settings
    found: list[tuple[str, Part]] = []
    passes = [which for which in PASSES if which in targets]
    if passes:
        found += [
            (case.key, partial(run.attention, case, dict(zip(passes, passes, strict=True)))) for case in chosen.grid()
        ]
    for target in targets:
        if target in CASES:
            groups = {which: f"{target} {which}" for which in CASES[target]}
            found += [(case.key, partial(run.attention, case, groups)) for case in getattr(chosen, target)]
        elif target == "layer":
            found.append((target, partial(whole.layer, run)))
        elif target == "gpt":
            found += [
                (f"gpt {mode}, {size.name}", partial(whole.gpt, run, size, mode))
                for size in chosen.gpt for mode in chosen.modes
            ]  # fmt: skip
        elif target == "memory":
            found += [(f"memory at {n}", partial(whole.memory, run, n)) for n in chosen.memory_lengths]
        elif target == "overhead":
            found.append((target, partial(whole.overhead, run, results.notes)))
        elif target == "cold":
            found.append((target, partial(cold.cells, run)))
    return found
