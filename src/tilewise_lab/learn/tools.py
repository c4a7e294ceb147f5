"""What a lesson needs besides the library."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewise_lab.language import say
from tilewise_lab.trace.show import table


def pictures_folder() -> Path:
    """Where pictures go: TILEWISE_PICTURES, or a folder in the system's temporary one."""
    folder = Path(os.environ.get("TILEWISE_PICTURES") or Path(tempfile.gettempdir(), "tilewise-course"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def picture(
    name: str, draw: Callable[..., None], *, panels: tuple[int, int] = (1, 1), size: tuple[float, float] = (8, 4.5)
) -> Path | None:
    """Call `draw` with matplotlib axes (one per panel), save what it drew as `name`.png and say where.

    >>> import contextlib, io
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     path = picture("line", lambda axes: axes.plot([0, 1], [0, 1]))
    """
    if find_spec("matplotlib") is None:
        print(
            say(
                f"(picture {name}: matplotlib is not installed; pip install matplotlib draws it)",
                f"（图 {name}：没有安装 matplotlib；pip install matplotlib 之后就能画出来）",
            )
        )
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*panels, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    draw(*axes.flat)
    path = pictures_folder() / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    if in_notebook():
        shown = import_module("IPython.display")
        shown.display(shown.Image(str(path)))
    else:
        print(say(f"(picture: {path})", f"（图：{path}）"))
    return path


def in_notebook() -> bool:
    """Whether this runs in Jupyter, where a picture is shown and not only kept."""
    return "ipykernel" in sys.modules


def show(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A small table."""
    table(title, headers, rows)


def expect(condition: Any, hint: str, zh: str) -> None:
    """One line of a checker: a hint for the learner, in both languages, where the answer is not right."""
    if not bool(condition):
        raise AssertionError(say(hint, zh))


@contextlib.contextmanager
def step(number: int, of: int, name: str) -> Iterator[None]:
    """One step of an exercise that is graded so: a hint says which one it is about, and those before are right."""
    where = say(f"step {number} of {of}, {name}: ", f"第 {number} 步（共 {of} 步），{name}：")
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}{error}") from error
    except Exception as error:
        if isinstance(beginning(error), NotImplementedError):
            raise AssertionError(f"{where}{not_written()}") from error
        raise AssertionError(f"{where}{type(beginning(error)).__name__}: {beginning(error)}") from error


def beginning(error: BaseException) -> BaseException:
    """What was raised first: Triton's interpreter wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def not_written() -> str:
    return say(
        "not written yet: replace the `raise NotImplementedError`",
        "还没写：请把 `raise NotImplementedError` 换成你的代码",
    )


def has_triton(what: str) -> bool:
    """Whether Triton is here; if not, say what the reader misses."""
    if find_spec("triton") is None:
        print(
            say(
                f"(no Triton here, it exists for Linux only: skipped {what})",
                f"（这里没有 Triton，它只有 Linux 版：跳过 {what}）",
            )
        )
        return False
    return True
