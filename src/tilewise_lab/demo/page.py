"""The demo as one page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import torch

from tilewise_lab.cli import CALLED
from tilewise_lab.demo import charts
from tilewise_lab.demo.measure import BUDGET, CONTENDERS, Results, Run
from tilewise_lab.demo.words import binary, duration, ratio, three_digits

# Pages of the documentation: name, file in its folder, the command that shows it, what it is.
NEXT = (
    ("Documentation", "index.html", "docs --open", "quickstart, how-to guides and reference"),
    ("Course", "course/index.html", "learn", "eighteen lessons on how the kernels work"),
    (
        "Explorer",
        "explore/index.html",
        "explore",
        "an interactive page: attention of your own tokens, step by step",
    ),
)
SITE = Path("build/docs")  # the default folder of the command `docs`


def render(results: Results, folder: Path = Path()) -> str:
    """The page, to be written into a folder. It links to the documentation if that was built there."""
    setting = results.setting
    template = Template(resources.files("tilewise_lab.demo").joinpath("page.html").read_text(encoding="utf-8"))
    memory = {name: [(run.length, run.peak) for run in results.of(name)] for name in CONTENDERS}
    seconds = {name: [(run.length, run.seconds) for run in results.of(name)] for name in CONTENDERS}
    right = sum(error.ok for error in results.errors)
    return template.substitute(
        machine=escape(setting.machine),
        busy=f"<p>Note: {escape(results.busy)}.</p>" if results.busy else "",
        torch=escape(torch.__version__),
        date=datetime.date.today().isoformat(),
        dtype=str(setting.dtype).removeprefix("torch."),
        heads=setting.heads,
        head_dim=setting.head_dim,
        times="twice" if BUDGET == 2 else f"{BUDGET:g} times",
        next="".join(_next(folder, *one) for one in NEXT),
        called=CALLED,
        verdict="pass" if results.passed else "fail",
        right=right,
        checks=len(results.errors),
        memory_claim=_memory_claim(results),
        speed_claim=_speed_claim(results),
        growth=_growth(results),
        memory=charts.lines("peak memory against length", memory, binary, 2),
        speed=charts.lines("time against length", seconds, duration, 10),
        errors=charts.dots("errors compared with naive attention", results.errors),
        memory_table=_table(["tokens", *CONTENDERS], _rows(results, lambda run: binary(run.peak))),
        speed_table=_table(["tokens", *CONTENDERS], _rows(results, lambda run: duration(run.seconds))),
        errors_table=_table(
            ["dtype", "tensor", *CONTENDERS, "tilewise / naive"],
            (
                [
                    e.dtype,
                    e.tensor,
                    f"{e.ours:.2e}",
                    "-" if e.sdpa is None else f"{e.sdpa:.2e}",
                    f"{e.naive:.2e}",
                    ratio(e.ratio),
                ]
                for e in results.errors
            ),
        ),
    )


def _next(folder: Path, name: str, file: str, command: str, what: str) -> str:
    shown = f'<a href="{(SITE / file).as_posix()}">{name}</a>' if (folder / SITE / file).exists() else f"<b>{name}</b>"
    return f"<li>{shown}: {what}. <code>{escape(CALLED)} {command}</code></li>"


def _memory_claim(results: Results) -> str:
    ours, naive = _longest_pair(results)
    assert ours.peak
    assert naive.peak
    factor, word = _compare(ours.peak, naive.peak, "less", "more")
    return _claim(
        factor,
        f"{word} memory than naive attention at {ours.length} tokens: {binary(ours.peak)} against {binary(naive.peak)}",
    )


def _speed_claim(results: Results) -> str:
    ours, naive = _longest_pair(results)
    assert ours.seconds
    assert naive.seconds
    factor, word = _compare(ours.seconds, naive.seconds, "faster", "slower")
    (sdpa,) = (run for run in results.of("SDPA") if run.length == ours.length)
    return _claim(
        factor,
        f"{word} than naive attention at {ours.length} tokens: {duration(ours.seconds)} against "
        f"{duration(naive.seconds)}; torch's SDPA takes {duration(sdpa.seconds)}",
    )


def _growth(results: Results) -> str:
    """What doubling the length did to the memory, at the longest lengths that naive attention reached."""
    last, _ = _longest_pair(results)
    said = []
    for name in ("naive", "tilewise"):
        before, after = (run for run in results.of(name) if run.length in (last.length // 2, last.length))
        assert before.peak
        assert after.peak
        said.append(f"{name} grew {three_digits(after.peak / before.peak)}-fold")
    return f"From {last.length // 2} to {last.length} tokens, {' and '.join(said)}."


def _longest_pair(results: Results) -> tuple[Run, Run]:
    """tilewise and naive attention at the longest length both could do."""
    pairs = zip(results.of("tilewise"), results.of("naive"), strict=True)
    return [pair for pair in pairs if None not in (pair[0].peak, pair[1].peak)][-1]


def _compare(ours: float, other: float, better: str, worse: str) -> tuple[str, str]:
    return (three_digits(other / ours), better) if ours <= other else (three_digits(ours / other), worse)


def _claim(factor: str, words: str) -> str:
    unbroken = re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", words)
    return f"<strong>{factor}×</strong><span>{escape(unbroken)}</span>"


def _rows(results: Results, form: Callable[[Run], str]) -> Iterable[list[str]]:
    for length in results.setting.lengths:
        row = {run.contender: form(run) for run in results.runs if run.length == length}
        yield [str(length), *(row[name] for name in CONTENDERS)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>{body}</table>"
