"""Limits that keep the library readable: arguments of a function, lines of a function, lines of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "src" / "tilewise"
FILES = sorted(LIBRARY.rglob("*.py"))
POSITIONAL, LINES, DEVICE_LINES, FILE_LINES = 8, 80, 100, 450
OTHER_SIGNATURES = ("compat", "integrations", "nn.py")  # functions with the signatures of other libraries
GIVEN_BY = ("mask_mod", "score_mod", "torch.library.impl")  # decorators: the arguments are bound tensors, or of an op


def functions(source: str) -> Iterator[ast.FunctionDef]:
    yield from (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef))


def on_device(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(x) for x in function.decorator_list)


def is_kernel(function: ast.FunctionDef) -> bool:
    return function.name.endswith("_kernel") and on_device(function)


def with_many_arguments(source: str) -> list[str]:
    """Functions with more positional arguments than the limit. Kernels build their structs in their first lines."""
    found = []
    for function in functions(source):
        names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        given = any(ast.unparse(x).startswith(GIVEN_BY) for x in function.decorator_list)
        if len(names) > POSITIONAL and not given and not is_kernel(function):
            found.append(function.name)
    return found


def too_long(source: str) -> list[str]:
    """Functions with more lines of code than the limit: their docstrings, which list arguments, do not count."""
    found = []
    for function in functions(source):
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        start = first.end_lineno if documented else function.lineno
        limit = DEVICE_LINES if on_device(function) else LINES
        if function.end_lineno - start > limit and not is_kernel(function):  # type: ignore[operator]
            found.append(function.name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_limits(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= FILE_LINES
    assert not too_long(source)
    if path.relative_to(LIBRARY).parts[0] not in OTHER_SIGNATURES:
        assert not with_many_arguments(source)


def test_the_limits_can_tell() -> None:
    many = "def f(a, b, c, d, e, f, g, h, i): pass\n"
    assert with_many_arguments(many) == ["f"]
    assert with_many_arguments(many.replace("i)", "*, i)")) == []
    assert with_many_arguments("@triton.jit\n" + many.replace("f(", "f_kernel(", 1)) == []
    assert with_many_arguments("@mask_mod\n" + many) == []
    assert too_long("def f():\n" + "    x\n" * (LINES + 1)) == ["f"]
    assert too_long('def f():\n    """' + "x\n" * 200 + '    """\n    x\n') == []
