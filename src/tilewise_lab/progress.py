"""How long work goes: a line that changes in place on a terminal, plain lines now and then elsewhere.

    with progress() as show:
        for done, page in enumerate(pages):
            show(page, done, len(pages))

Nothing but Python is needed; with rich there is a bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

EVERY = 15.0  # seconds between two lines if the output is not a terminal


class Show(Protocol):
    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None: ...


@contextmanager
def progress(every: float = EVERY) -> Iterator[Show]:
    """A function that shows what is at work and, where it is known, how much of how much is done."""
    if sys.stderr.isatty():
        try:
            import rich.progress as bars
            from rich.console import Console
        except ModuleNotFoundError:
            pass
        else:
            columns = (
                bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(),
                bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
            )  # fmt: skip
            with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("starting", total=None)
                yield lambda text, done=None, total=None: bar.update(
                    task, description=text, completed=done, total=total
                )
            return
    last = time.monotonic()

    def line(text: str, done: int | None = None, total: int | None = None) -> None:
        nonlocal last
        if time.monotonic() - last >= every or (total is not None and done == total):
            last = time.monotonic()
            count = "" if done is None else f"{done}: " if total is None else f"{done} of {total}: "
            print(count + text, file=sys.stderr, flush=True)

    yield line
