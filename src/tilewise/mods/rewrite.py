"""The source of a mod, and its rewriting into code that can be called with traced values (see `trace`).

A choice by a traced value (`a if c else b`, `and`, `or`, `not`, `a < b < c`) cannot be traced: Python needs a bool. The
rewritten function calls the operations of `trace` there. It also looks up what it reads from outside by a call, and its
numbers are traced constants, so that arithmetic of them is torch's: 1 / 0.0 is infinite.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple, NoReturn

COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
EXPRESSIONS = (
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Subscript,
    ast.Call,
    ast.Attribute,
)
CONST, OUTSIDE, LOGIC, CHAIN, WHERE = "<const>", "<outside>", "<logic>", "<chain>", "<where>"  # names of the operations


class UnsupportedError(Exception):
    """What a mod cannot do: what was found, what is expected, and the line, if that is known."""

    def __init__(self, found: str, expected: str, line: str = "") -> None:
        super().__init__(found)
        self.found, self.expected, self.line = found, expected, line


class Definition(NamedTuple):
    """A `def` or a lambda, with the lines of the file that has it."""

    node: ast.FunctionDef | ast.Lambda
    lines: list[str]


class Rewritten(NamedTuple):
    """The code of a rewritten function, and its line that returns, as errors quote it."""

    code: CodeType
    returns: str


def rewritten(function: Callable[..., Any]) -> Rewritten | None:
    """The function rewritten; None if Python has no source of it. Raises UnsupportedError if it contains more than
    assignments to names, one return, and the expressions in EXPRESSIONS."""
    return _rewritten(function.__code__, function.__code__.co_filename)  # equal code may be in two files


@lru_cache(256)
def _rewritten(code: CodeType, file: str) -> Rewritten | None:
    found = definition(code)
    return None if found is None else _Rewriter(code, found.lines).function(deepcopy(found.node))


class _Rewriter(ast.NodeTransformer):
    def __init__(self, code: CodeType, lines: list[str]) -> None:
        self.code, self.lines = code, lines

    def function(self, x: ast.FunctionDef | ast.Lambda) -> Rewritten:
        tree: ast.Module | ast.Expression
        if isinstance(x, ast.Lambda):
            returned: ast.AST = x.body
            x.body = self.visit(x.body)
            tree, mode = ast.Expression(x), "eval"
        else:
            returns = [n for n, statement in enumerate(x.body) if isinstance(statement, ast.Return)]
            if not returns:
                self.fail(x, "no return", "a `return` of the value")
            returned = x.body[returns[0]]
            x.body = [self.statement(statement) for statement in x.body[: returns[0] + 1]]
            x.decorator_list, x.returns = [], None
            tree, mode = ast.Module([x], []), "exec"
        x.args.defaults, x.args.kw_defaults = [], [None for _ in x.args.kwonlyargs]
        for parameter in (*x.args.posonlyargs, *x.args.args, *x.args.kwonlyargs):
            parameter.annotation = None
        made = compile(ast.fix_missing_locations(tree), self.code.co_filename, mode)
        (code,) = (constant for constant in made.co_consts if isinstance(constant, CodeType))
        return Rewritten(code, self.line(returned))

    def statement(self, x: ast.stmt) -> ast.stmt:
        match x:
            case (
                ast.Return(value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name()], value=value)
                | ast.AnnAssign(target=ast.Name(), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name(), value=value)
            ):
                x.value = self.visit(value)
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                pass
            case ast.If():
                self.fail(x, "an if statement", "`a if condition else b`, or torch.where(condition, a, b)")
            case ast.For() | ast.While():
                expected = "no loop: write its steps out, or a sum over the row of a tensor as table[q_idx].sum()"
                self.fail(x, f"a {type(x).__name__.lower()} loop", expected)
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
                expected = "none: to see values, call the mod with tensors for its arguments"
                self.fail(x, "a print", expected)
            case ast.Expr():
                self.fail(x, f"{ast.unparse(x)!r}, whose value is not used", "assignments to names, and one return")
            case _:
                self.fail(x, f"a statement of kind {type(x).__name__}", "assignments to names, and one return")
        return x

    def visit(self, x: ast.AST) -> Any:
        if isinstance(x, ast.expr) and not isinstance(x, EXPRESSIONS):
            expected = "arithmetic, comparisons, torch.where, indexing and elementary functions"
            self.fail(x, repr(ast.unparse(x)), expected)
        return super().visit(x)

    def visit_Constant(self, x: ast.Constant) -> ast.expr:
        return self.call(x, CONST, x) if isinstance(x.value, (bool, int, float)) else x

    def visit_Name(self, x: ast.Name) -> ast.expr:
        return self.outside(x, [x.id]) if self.is_outside(x.id) else x

    def visit_Attribute(self, x: ast.Attribute) -> ast.expr:
        """A dotted name outside the function is looked up as a whole."""
        names, value = [x.attr], x.value
        while isinstance(value, ast.Attribute):
            names, value = [value.attr, *names], value.value
        if isinstance(value, ast.Name) and self.is_outside(value.id):
            return self.outside(x, [value.id, *names])
        return ast.copy_location(ast.Attribute(self.visit(x.value), x.attr, ast.Load()), x)

    def visit_BoolOp(self, x: ast.BoolOp) -> ast.expr:
        op = ast.Constant("and" if isinstance(x.op, ast.And) else "or")
        return self.call(x, LOGIC, op, *map(self.visit, x.values))

    def visit_UnaryOp(self, x: ast.UnaryOp) -> ast.expr:
        operand = self.visit(x.operand)
        if isinstance(x.op, ast.Not):
            return self.call(x, LOGIC, ast.Constant("not"), operand)
        return ast.copy_location(ast.UnaryOp(x.op, operand), x)

    def visit_Compare(self, x: ast.Compare) -> ast.expr:
        if any(type(op) not in COMPARE for op in x.ops):
            self.fail(x, repr(ast.unparse(x)), "one of < <= > >= == !=")
        ops = ast.Constant(" ".join(COMPARE[type(op)] for op in x.ops))
        return self.call(x, CHAIN, ops, *map(self.visit, (x.left, *x.comparators)))

    def visit_IfExp(self, x: ast.IfExp) -> ast.expr:
        return self.call(x, WHERE, *map(self.visit, (x.test, x.body, x.orelse)))

    def visit_Subscript(self, x: ast.Subscript) -> ast.expr:
        index = x.slice
        if isinstance(index, ast.Tuple):
            index = ast.copy_location(ast.Tuple([self.visit(i) for i in index.elts], ast.Load()), index)
        else:
            index = self.visit(index)
        return ast.copy_location(ast.Subscript(self.visit(x.value), index, ast.Load()), x)

    def is_outside(self, name: str) -> bool:
        return name not in self.code.co_varnames and name not in self.code.co_cellvars

    def outside(self, x: ast.expr, names: list[str]) -> ast.expr:
        return self.call(x, OUTSIDE, *map(ast.Constant, names))

    def call(self, x: ast.expr, operation: str, *args: ast.expr) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(operation, ast.Load()), list(args), []), x)

    def line(self, x: ast.AST) -> str:
        line = getattr(x, "lineno", 1)
        shown = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return f"{self.code.co_filename}:{line}, in `{shown}`"

    def fail(self, x: ast.AST, found: str, expected: str) -> NoReturn:
        raise UnsupportedError(found, expected, self.line(x))


def definition(code: CodeType) -> Definition | None:
    """The definition of a function by its code; None if Python has no source: of `python -c`, of its standard input, of
    `exec`."""
    try:
        lines, _ = inspect.findsource(code)
        tree = _tree("".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    if code.co_name != "<lambda>":
        for x in ast.walk(tree):
            if isinstance(x, ast.FunctionDef) and x.name == code.co_name:
                first = x.decorator_list[0].lineno if x.decorator_list else x.lineno
                if first == code.co_firstlineno:
                    return Definition(x, lines)
        return None
    lambdas = [x for x in ast.walk(tree) if isinstance(x, ast.Lambda) and x.lineno == code.co_firstlineno]
    if len(lambdas) > 1:
        places: list[Any] = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
        lambdas = [x for x in lambdas if places and all(_contains(x.body, *p) for p in places)]
        lambdas = [x for x in lambdas if not any(x is not y and _contains(x, *_position(y)) for y in lambdas)]
    if not lambdas:
        line = lines[code.co_firstlineno - 1].strip()
        raise UnsupportedError("lambdas that cannot be told apart", "one to a line, or a `def`", f"in `{line}`")
    return Definition(lambdas[0], lines)


@lru_cache(8)
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _position(x: ast.expr) -> tuple[int, int, int, int]:
    """As `co_positions` has it: first and last line, first and last column."""
    return x.lineno, x.end_lineno or x.lineno, x.col_offset, x.end_col_offset or x.col_offset


def _contains(x: ast.expr, first: int, last: int, left: int, right: int) -> bool:
    top, bottom, start, end = _position(x)
    return (top, start) <= (first, left) and (last, right) <= (bottom, end)
