"""The demo in the terminal: progress while it works, then two tables."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tilewise_lab.cli import CALLED
from tilewise_lab.demo import measure
from tilewise_lab.demo.measure import BUDGET, CONTENDERS, Results, Setting
from tilewise_lab.demo.words import binary, duration, ratio
from tilewise_lab.progress import progress

NEXT = {
    "learn": "a course: how FlashAttention works, in lessons that run",
    "explain 1 4096 16 128 --device H200": "what a call costs on a GPU, and what limits it",
    "explore": "an interactive page on how attention is computed",
    "--help": "all commands",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def watch(setting: Setting) -> Results:
    """Run everything, and show how far it is."""
    results = Results(setting, load=measure.load())
    total = len(DTYPES) + 1 + len(setting.lengths)
    with progress(every=2.0) as say, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch tells how it multiplies on this CPU
        for done, dtype in enumerate(DTYPES):
            say(f"checking {str(dtype).removeprefix('torch.')} against float64", done, total)
            results.errors.extend(measure.errors(setting, dtype))
        say("warming up", len(DTYPES), total)  # to compile, and to allocate what is kept between calls
        list(measure.runs(setting, setting.lengths[0]))
        for done, length in enumerate(setting.lengths, len(DTYPES) + 1):
            say(f"measuring {length} tokens", done, total)
            results.runs.extend(measure.runs(setting, length))
    return results


def show(results: Results, page: Path) -> None:
    console = Console()
    setting = results.setting
    console.print(f"\n[bold]tilewise[/] on {setting.machine}, torch {torch.__version__}\n")
    console.print(errors_table(results), "")
    console.print(runs_table(results), "")
    right = sum(error.ok for error in results.errors)
    verdict = f"{right} of {len(results.errors)} errors are at most {BUDGET:g}x that of torch's own attention (naive)"
    if results.busy:
        console.print(f"[yellow]{results.busy}[/]", soft_wrap=True)
    console.print(
        f"[bold {'green' if results.passed else 'red'}]{verdict}[/]; the pictures are in {page}", soft_wrap=True
    )
    console.print("\nWhat to try next:")
    width = max(map(len, NEXT))
    for command, what in NEXT.items():
        console.print(f"  {CALLED} {command:<{width}}  {what}", soft_wrap=True, highlight=False)


def errors_table(results: Results) -> Table:
    table = Table(title="largest error against float64, causal, forward and backward", title_justify="left")
    for name in ("dtype", "tensor"):
        table.add_column(name)
    for name in (*CONTENDERS, "tilewise / naive"):
        table.add_column(name, justify="right")
    table.add_column(f"≤ {BUDGET:g}x", justify="center")
    for error in results.errors:
        first = error.tensor == measure.TENSORS[0]
        table.add_row(
            error.dtype if first else "",
            error.tensor,
            f"{error.ours:.1e}",
            "-" if error.sdpa is None else f"{error.sdpa:.1e}",
            f"{error.naive:.1e}",
            ratio(error.ratio),
            "[green]yes[/]" if error.ok else "[bold red]no[/]",
            end_section=error.tensor == measure.TENSORS[-1],
        )
    return table


def runs_table(results: Results) -> Table:
    setting = results.setting
    dtype = str(setting.dtype).removeprefix("torch.")
    title = f"forward + backward, causal, {setting.heads} heads of {setting.head_dim}, {dtype}"
    table = Table(title=title, title_justify="left")
    table.add_column("tokens", justify="right")
    for name in CONTENDERS:
        table.add_column(f"{name}\nmemory", justify="right")
    for name in CONTENDERS:
        table.add_column(f"{name}\ntime", justify="right")
    for length in setting.lengths:
        row = {run.contender: run for run in results.runs if run.length == length}
        table.add_row(
            str(length),
            *(binary(row[name].peak) for name in CONTENDERS),
            *(duration(row[name].seconds) for name in CONTENDERS),
        )
    return table
