"""The table of the bench: for each target what it measures, and its rows, each a name and the work that gives cells."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tilewise.errors import AttentionError
from tilewise_lab import asked
from tilewise_lab.bench import calls, cold, hf, kv, sweep, whole
from tilewise_lab.bench.cases import PASSES
from tilewise_lab.bench.provider import OURS, Tilewise
from tilewise_lab.bench.results import Cell, Peak, Results
from tilewise_lab.bench.runner import Run
from tilewise_lab.bench.shapes import part_of, shapes

Part = Callable[[], Iterator[Cell | Peak]]
Rows = Iterator[tuple[str, Part]]


@dataclass(frozen=True)
class Target:
    about: str
    rows: Callable[[Run, Results, Namespace], Rows]


def _grid(which: str) -> Callable[[Run, Results, Namespace], Rows]:
    """Forward and backward of a case are checked and timed together, with the first of the two that is asked for."""

    def rows(run: Run, results: Results, options: Namespace) -> Rows:
        passes = [name for name in PASSES if name in options.wanted]
        if which == passes[0]:
            groups = dict(zip(passes, passes, strict=True))
            yield from ((case.key, partial(run.attention, case, groups)) for case in run.settings.grid())

    return rows


def _cases(name: str, passes: Sequence[str] = PASSES) -> Callable[[Run, Results, Namespace], Rows]:
    groups = {which: f"{name} {which}" for which in passes}
    return lambda run, results, options: (
        (case.key, partial(run.attention, case, groups)) for case in getattr(run.settings, name)
    )


def _calls(group: str) -> Callable[[Run, Results, Namespace], Rows]:
    return lambda run, results, options: (
        (f"{group}: {name}", partial(calls.cells, run, group, name, row)) for name, row in calls.ROWS[group].items()
    )


def _one(name: str, work: Callable[[Run], Iterator[Cell]]) -> Callable[[Run, Results, Namespace], Rows]:
    return lambda run, results, options: iter([(name, partial(work, run))])


def _gpt(run: Run, results: Results, options: Namespace) -> Rows:
    for size in run.settings.gpt:
        for mode in run.settings.modes:
            yield f"gpt {mode}, {size.name}", partial(whole.gpt, run, size, mode)


def _memory(run: Run, results: Results, options: Namespace) -> Rows:
    return ((f"memory at {n}", partial(whole.memory, run, n)) for n in run.settings.memory_lengths)


def _overhead(run: Run, results: Results, options: Namespace) -> Rows:
    yield "overhead", partial(whole.overhead, run, results.notes)


def _shapes(group: str) -> Callable[[Run, Results, Namespace], Rows]:
    def rows(run: Run, results: Results, options: Namespace) -> Rows:
        if group == "rows":
            drawn = sweep.named_shapes()
        else:
            count = asked.count("--count", 200 if options.count is None else options.count)
            drawn = shapes(count, options.seed, part_of(options.part))
        known = run.roster.known
        names = list(known) if options.peers == ["all"] else options.peers or sweep.PEERS
        peers = [known[name] for name in names if not name.startswith(OURS)]
        providers = [Tilewise(OURS, "tilewise, as auto chooses"), *peers]

        def compiled() -> Iterator[Cell]:
            sweep.compile_first([x.case for x in drawn], run.device)
            yield from ()

        yield "compiling", compiled
        for shape in drawn:
            yield shape.key, partial(sweep.cells, shape, providers, run.device, group)

    return rows


TARGETS = {
    "forward": Target("the grid of head dims, masks and lengths, forward", _grid("forward")),
    "backward": Target("the same grid, backward", _grid("backward")),
    "gqa": Target("grouped heads, causal, forward and backward", _cases("gqa")),
    "varlen": Target("32 packed sequences of random lengths, causal, forward and backward", _cases("varlen")),
    "window": Target("a sliding window, forward and backward", _cases("window")),
    "heads": Target("head dims that are no power of two, forward and backward", _cases("heads")),
    "deterministic": Target("the backward with the same bits in every run", _cases("deterministic", ("backward",))),
    "decode": Target("one query token against a long cache, forward", _cases("decode", ("forward",))),
    "layer": Target("a transformer layer, forward and backward", _one("layer", whole.layer)),
    "gpt": Target("the training step of GPTs, small to long: eager, compiled, in CUDA graphs", _gpt),
    "memory": Target("peak memory against length", _memory),
    "overhead": Target("what one call costs the host; what `import tilewise` costs", _overhead),
    "cold": Target("a program's first call: with an empty cache, with a full one, with other sizes",
                   _one("cold", cold.cells)),
    "terms": Target("softcap, ALiBi, sinks, a bias beside FlexAttention and SDPA", _calls("terms")),
    "flex": Target("FlexAttention's standard mods, beside it", _calls("flex")),
    "masks": Target("dropout beside cuDNN, block masks beside FlexAttention and packed calls", _calls("masks")),
    "sparse": Target("prefix trees, MoBA, NSA, top-k, neighbourhoods beside their peers", _calls("sparse")),
    "second": Target("a double backward beside the first one", _one("second", calls.second)),
    "growing": Target("a new shape at every call, on the host", _one("growing", calls.growing)),
    "hf": Target("models of transformers: training steps, generate, attention modules", hf.rows),
    "kv": Target("a KV cache, paged or dense, quantised or shared, beside serving kernels",
                 lambda run, results, options: kv.rows(run, options)),
    "mla": Target("decoding with MLA, beside FlashMLA", _one("mla", calls.mla)),
    "rows": Target("calls of real models, one of each kind, beside FlashAttention-3 and cuDNN in CUDA graphs",
                   _shapes("rows")),
    "models-shapes": Target("the same for 200 shapes of published models", _shapes("models-shapes")),
}  # fmt: skip
DEFAULT = ("forward", "backward", "overhead")
QUICK = ("forward", "backward", "gqa", "varlen", "window", "layer", "memory", "overhead")


def chosen(named: Sequence[str], *, quick: bool = False) -> tuple[str, ...]:
    """
    >>> chosen(["memory", "forward"]), chosen([])
    (('forward', 'memory'), ('forward', 'backward', 'overhead'))
    """
    for name in named:
        if name != "all" and name not in TARGETS:
            raise AttentionError("target", name, f"'all', or of: {', '.join(TARGETS)}")
    wanted = tuple(TARGETS) if "all" in named else tuple(named) or (QUICK if quick else DEFAULT)
    return tuple(target for target in TARGETS if target in wanted)


def measure(run: Run, options: Namespace, save: Path, show: Callable[..., None]) -> Results:
    """Every row of the targets in `options.wanted`. Results are saved after each, so that nothing measured is lost."""
    from tilewise_lab.bench.report import line

    results, began = run.start(), time.monotonic()
    todo = [row for name in options.wanted for row in TARGETS[name].rows(run, results, options)]
    for done, (name, part) in enumerate(todo):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            results.notes["not measured"] = f"{len(todo) - done} rows, for lack of time (--seconds)"
            break
        show(name, done, len(todo))
        for found in part():
            if isinstance(found, Peak):
                results.memory.append(found)
            else:
                results.cells.append(found)
                print(line(found, results.unit()), flush=True)
        results.seconds = round(time.monotonic() - began, 1)
        results.save(save)
    results.save(save)
    return results
