"""What a lesson needs besides the library."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise_lab.language import say
from tilewise_lab.trace.show import table


def pictures_folder() -> Path:
    """Where pictures go: TILEWISE_PICTURES, or a folder in the system's temporary one."""
    folder = Path(os.environ.get("TILEWISE_PICTURES") or Path(tempfile.gettempdir(), "tilewise-course"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def picture(
    name: str,
    draw: Callable[..., None],
    *,
    alt: str,
    panels: tuple[int, int] = (1, 1),
    size: tuple[float, float] = (8, 4.5),
) -> Path | None:
    """Call `draw` with matplotlib axes (one per panel), save what it drew as `name`.png and say where.

    alt: what the picture shows, in a sentence, for readers who do not see it.

    >>> import contextlib, io
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     path = picture("line", lambda axes: axes.plot([0, 1], [0, 1]), alt="A line from (0, 0) to (1, 1).")
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
        shown.display(shown.Image(str(path), alt=alt))
    else:
        print(say(f"(picture: {path}: {alt})", f"（图：{path}：{alt}）"))
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


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal: numbers and tensors up to rounding, lists and tuples element by element.

    >>> same((1.0, [2]), (1.0 + 1e-12, (2,))), same(1.0, 1.1), same([1], [1, 2])
    (True, False, False)
    """
    if isinstance(b, Tensor):
        if not isinstance(a, Tensor) or a.shape != b.shape:
            return False
        return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    if isinstance(b, list | tuple):
        return isinstance(a, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, float) and isinstance(a, int | float | Tensor):
        return math.isclose(float(a), b, rel_tol=1e-6, abs_tol=1e-12)
    return bool(a == b)


def compare(what: str, got: Any, exact: Any, *wrong: tuple[Any, str, str]) -> None:
    """Compare an answer's result with the exact one and, if they differ, with results of usual mistakes.

    what: the name of the result, as code.
    wrong: (result of the mistake, hint, hint in Chinese); the first that equals `got` explains it.

    >>> compare("mean([1, 3])", 4.0, 2.0, (4.0, "this is the sum", "这是和"))
    Traceback (most recent call last):
    AssertionError: mean([1, 3]): this is the sum
    """
    if same(got, exact):
        return
    for result, en, zh in wrong:
        if same(got, result):
            raise AssertionError(say(f"{what}: {en}", f"{what}：{zh}"))
    if isinstance(got, Tensor) and isinstance(exact, Tensor):
        if got.shape != exact.shape:
            a, b = tuple(got.shape), tuple(exact.shape)
            raise AssertionError(say(f"{what}: the shape is {a}; expected {b}", f"{what}：形状是 {a}；应为 {b}"))
        off = (got.double() - exact.double()).abs().max().item()
        raise AssertionError(say(f"{what} differs by up to {off:.2g}", f"{what} 最多相差 {off:.2g}"))
    found, right = _short(got), _short(exact)
    raise AssertionError(say(f"{what} is {found}; expected {right}", f"{what} 是 {found}；应为 {right}"))


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) < 200 else text[:200] + "..."


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


def has_triton(what: str = "") -> bool:
    """Whether Triton is here; if not, say what the reader misses."""
    if find_spec("triton") is not None:
        return True
    if what:
        print(
            say(
                f"(no Triton here, it exists for Linux only: skipped {what})",
                f"（这里没有 Triton，它只有 Linux 版：跳过 {what}）",
            )
        )
    return False
