"""From a Python function to an expression: its syntax tree, read once, names resolved where the function stands."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise.mods import expr
from tilewise.mods.expr import Expr
from tilewise.mods.functions import (
    BITS,
    KNOWN,
    NO_NUMBER,
    PLACES,
    Captured,
    Word,
    conversion,
    dtype_of,
    elementary,
    spoken,
)
from tilewise.mods.source import DEPTH, Definition, definition, outside, plain
from tilewise.mods.trace import follow

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul",
}  # fmt: skip
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
LOGIC = {ast.And: "and", ast.Or: "or"}
BITWISE: dict[type[ast.AST], str] = {
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "lshift", ast.RShift: "rshift",
    ast.Invert: "invert",
}  # fmt: skip


def read(
    function: Callable[..., Any], values: Sequence[Expr | Captured], tensors: Mapping[int, Captured] | None = None
) -> Expr:
    """The function's value when its positional parameters are `values`; `tensors`: those that it reads from outside, by
    their id."""
    found = definition(function)
    if found is None:
        return follow(function, values, lambda x: (tensors or {}).get(id(x)))
    return _Reader(function, found, tensors or {}, 0).call(values)


class _Reader:
    def __init__(
        self, function: Callable[..., Any], found: Definition, tensors: Mapping[int, Captured], depth: int
    ) -> None:
        self.function, self.tensors, self.depth = function, tensors, depth
        self.definition, self.lines = found
        self.outside = outside(function)

    def call(self, values: Sequence[Expr | Captured]) -> Expr:
        arguments = self.definition.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        missing = len(names) - len(values)
        defaults = self.function.__defaults__ or ()
        if 0 < missing <= len(defaults) and all(isinstance(x, (bool, int, float)) for x in defaults[-missing:]):
            values = [*values, *(expr.const(x) for x in defaults[-missing:])]
        if arguments.vararg or arguments.kwarg or len(names) != len(values):
            self.fail(self.definition, f"{len(names)} parameters", f"{len(values)} positional ones: {', '.join(names)}")
        self.env: dict[str, Expr | Captured] = dict(zip(names, values, strict=True))
        for a in arguments.kwonlyargs:
            if a.arg not in PLACES:
                self.fail(self.definition, f"the keyword-only parameter {a.arg!r}", "q_len, kv_len or q_pos")
            self.env[a.arg] = PLACES[a.arg]
        if isinstance(self.definition, ast.Lambda):
            return self.returned(self.definition.body)
        for statement in self.definition.body:
            result = self.statement(statement)
            if result is not None:
                return result
        self.fail(self.definition, "no return", "a `return` of the value")

    def statement(self, x: ast.stmt) -> Expr | None:
        match x:
            case ast.Return(value=ast.expr() as value):
                return self.returned(value)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self.env[name] = self.expression(value)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                load = ast.copy_location(ast.Name(name, ast.Load()), x)
                self.env[name] = self.value(ast.copy_location(ast.BinOp(load, op, value), x))
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                pass
            case ast.If():
                self.fail(x, "an if statement", "`a if condition else b`, or torch.where(condition, a, b)")
            case _:
                self.fail(x, f"a statement of kind {type(x).__name__}", "assignments to names, and one return")
        return None

    def returned(self, x: ast.expr) -> Expr:
        found = self.value(x)
        if expr.is_vector(found) and self.depth == 0:
            self.fail(x, *NO_NUMBER)
        return found

    def value(self, x: ast.expr) -> Expr:
        found = self.expression(x)
        if isinstance(found, Captured):
            if found.rank > 1:
                self.fail(x, f"the tensor {ast.unparse(x)!r} whole", f"{ast.unparse(x)} at {found.rank} indices")
            return found.load()
        return found

    def expression(self, x: ast.expr) -> Expr | Captured:
        try:
            return self.match(x)
        except ArithmeticError as error:
            self.fail(x, str(error), "integers of 64 bits, real numbers, no division by 0, no sum within a sum")

    def match(self, x: ast.expr) -> Expr | Captured:
        match x:
            case ast.Name(id=name):
                return self.name(x, name)
            case ast.Constant(value=bool() | int() | float() as value):
                return expr.const(value)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left), self.value(right)
                if type(op) in BITWISE:
                    return self.bitwise(x, BITWISE[type(op)], a, b)
                if type(op) in BINARY:
                    return self.builtin(x, BINARY[type(op)], [a, b], {})
            case ast.BoolOp(op=op, values=values):
                result = self.value(values[0])
                for v in values[1:]:
                    result = expr.logic(LOGIC[type(op)], result, self.value(v))
                return result
            case ast.UnaryOp(op=ast.USub(), operand=a):
                return expr.negative(self.value(a))
            case ast.UnaryOp(op=ast.UAdd(), operand=a):
                return self.value(a)
            case ast.UnaryOp(op=ast.Invert() as op, operand=a):
                return self.bitwise(x, BITWISE[type(op)], self.value(a))
            case ast.UnaryOp(op=ast.Not(), operand=a):
                return expr.logic("not", self.value(a))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self.comparison(x, left, ops, others)
            case ast.IfExp(test=test, body=a, orelse=b):
                return expr.where(self.value(test), self.value(a), self.value(b))
            case ast.Subscript(value=tensor, slice=index):
                return self.subscript(x, tensor, index)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self.called(x, function, args, keywords)
            case ast.Attribute():
                found = self.from_outside(self.resolve(x))
                if found is not None:
                    return found
        self.fail(x, f"{ast.unparse(x)!r}", "arithmetic, comparisons, torch.where, indexing and elementary functions")

    def name(self, x: ast.expr, name: str) -> Expr | Captured:
        if name in self.env:
            return self.env[name]
        value = self.outside.get(name)
        known = self.from_outside(value)
        if known is not None:
            return known
        found = f"{name!r}, a {type(value).__name__}" if name in self.outside else f"the unknown name {name!r}"
        self.fail(x, found, "a parameter, a name assigned above, a number or a tensor")

    def from_outside(self, value: Any) -> Expr | Captured | None:
        if isinstance(value, (bool, int, float)):
            return expr.const(value)
        return self.tensors.get(id(value)) if isinstance(value, Tensor) else None

    def comparison(self, x: ast.expr, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> Expr:
        values = [self.value(v) for v in (left, *others)]
        result = None
        for op, a, b in zip(ops, values, values[1:], strict=False):
            if type(op) not in COMPARE:
                self.fail(x, f"{ast.unparse(x)!r}", "one of < <= > >= == !=")
            one = expr.compare(COMPARE[type(op)], a, b)
            result = one if result is None else expr.logic("and", result, one)
        assert result is not None
        return result

    def bitwise(self, x: ast.expr, name: str, *args: Expr) -> Expr:
        found = elementary(BITS[name], args, {})
        if found is None:
            expected = "& | ^ ~ << >> of integers, or & | ^ ~ of what is true or false"
            self.fail(x, f"{ast.unparse(x)!r}, of {', '.join(a.kind for a in args)}", expected)
        return found

    def subscript(self, x: ast.expr, tensor: ast.expr, index: ast.expr) -> Captured:
        captured = self.expression(tensor)
        if not isinstance(captured, Captured):
            self.fail(x, f"an index into {ast.unparse(tensor)!r}", "an index into a tensor the mod was called with")
        indices = [self.value(i) for i in (index.elts if isinstance(index, ast.Tuple) else [index])]
        if len(indices) > captured.rank:
            self.fail(x, f"{len(indices)} indices", f"{captured.rank}, as many as {ast.unparse(tensor)!r} has axes")
        for i in indices:
            if i.kind != "int":
                self.fail(x, f"a {i.kind} as an index", "an int: write int(...) around it")
        found = captured.at(indices)
        if found.rank and any(map(expr.is_vector, indices)):
            self.fail(x, "rows chosen by a row", f"{captured.rank} indices, if one of them is a row")
        return found

    def called(self, x: ast.Call, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Expr:
        outside = self.resolve(function)
        method = function if isinstance(function, ast.Attribute) and outside is None else None
        if method is not None and method.attr in ("to", "type", "type_as"):
            return self.converted(x, method, [*args, *(k.value for k in keywords)])
        named = {k.arg or "**": self.word(k.value) for k in keywords}
        if method is not None:  # x.abs() is abs(x)
            values = [self.value(method.value), *map(self.value, args)]
            return self.builtin(x, method.attr, values, named)
        name = getattr(outside, "__name__", None) or ast.unparse(function)
        inner = plain(outside)
        if inner is not None and not named:
            return self.inlined(x, inner, [self.expression(a) for a in args])
        match name, args:
            case "float", [ast.Constant(value=str() as digits)]:  # float("-inf")
                try:
                    return expr.const(float(digits))
                except ValueError:
                    self.fail(x, f"float({digits!r})", "a number in it")
        return self.builtin(x, name, [self.value(a) for a in args], named)

    def converted(self, x: ast.expr, function: ast.Attribute, args: list[ast.expr]) -> Expr:
        """x.to(dtype), x.type(dtype) and x.type_as(y) as calls of float, int or bool."""
        match args:
            case [ast.Attribute(value=like, attr="dtype")] if self.resolve(like) is None:
                dtype: Any = dtype_of(self.expression(like))
            case [like] if function.attr == "type_as":
                dtype = dtype_of(self.expression(like))
            case [one]:
                dtype = self.resolve(one)
            case _:
                dtype = None
        kind = conversion(dtype) if isinstance(dtype, torch.dtype) else None
        if kind is None:
            self.fail(x, f"{ast.unparse(x)!r}", "a dtype: of floats, torch.int32, torch.int64 or torch.bool")
        return self.builtin(x, kind, [self.value(function.value)], {})

    def word(self, x: ast.expr) -> Word:
        match x:
            case ast.Constant(value=str() | None as value):
                return value
        return self.value(x)

    def inlined(self, x: ast.expr, function: Callable[..., Any], values: list[Expr | Captured]) -> Expr:
        if self.depth == DEPTH:
            self.fail(x, f"calls nested {DEPTH} deep", "no recursion: a mod is one expression")
        found = definition(function)
        if found is None:
            self.fail(x, f"{function.__name__!r}, which has no source", "a function in a file or a notebook")
        return _Reader(function, found, self.tensors, self.depth + 1).call(values)

    def builtin(self, x: ast.expr, name: str, args: list[Expr], named: dict[str, Word]) -> Expr:
        found = elementary(name, args, named)
        if found is not None:
            return found
        self.fail(x, spoken(name, args, named), f"one of {KNOWN}, or a function made of them")

    def resolve(self, x: ast.expr) -> Any:
        """What a dotted name outside the function stands for, or None."""
        match x:
            case ast.Name(id=name):
                return None if name in self.env else self.outside.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.resolve(value)
                return None if owner is None else getattr(owner, attr, None)
        return None

    def fail(self, x: ast.AST, found: str, expected: str) -> NoReturn:
        line = getattr(x, "lineno", 1)
        place = f"{self.function.__code__.co_filename}:{line}"
        shown = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise AttentionError(f"mod {self.function.__name__!r}, {place}, in `{shown}`", found, expected)
