"""From a Python function to an expression: its syntax tree, read once, names resolved where the function stands."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tilewise.mods import expr
from tilewise.mods.expr import Expr
from tilewise.spec import AttentionError

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow",
}  # fmt: skip
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
LOGIC = {ast.BitAnd: "and", ast.BitOr: "or", ast.And: "and", ast.Or: "or"}
NAMES = {"minimum": "min", "maximum": "max", "absolute": "abs", "logical_and": "and", "logical_or": "or",
         "logical_not": "not", "fabs": "abs", "remainder": "mod", "floor_divide": "floordiv"}  # fmt: skip
DEPTH = 8  # functions inlined into one another


class Captured:
    """A tensor the mod was called with: worth something only at an index, or alone if it has no axes."""

    def __init__(self, position: int, name: str, rank: int, kind: str) -> None:
        self.position, self.name, self.rank, self.kind = position, name, rank, kind


def read(function: Callable[..., Any], values: Sequence[Expr | Captured], lengths: bool = True) -> Expr:
    """The function's value when its positional parameters are `values`."""
    return _Reader(function, 0).call(values, lengths)


class _Reader:
    def __init__(self, function: Callable[..., Any], depth: int) -> None:
        self.function, self.depth = function, depth
        try:
            lines, self.first = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            raise AttentionError(
                f"the source of {getattr(function, '__name__', function)!r}", error, "a `def` in a file"
            ) from error
        self.lines = lines
        tree = ast.parse(textwrap.dedent("".join(lines)))
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise AttentionError(f"mod {function.__name__!r}", f"{lines[0].strip()!r}", "a plain `def`")
        self.definition = definition
        outside = inspect.getclosurevars(function)
        self.outside = {**outside.builtins, **outside.globals, **outside.nonlocals}

    def call(self, values: Sequence[Expr | Captured], lengths: bool) -> Expr:
        arguments = self.definition.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if arguments.vararg or arguments.kwarg or len(names) != len(values):
            self.fail(self.definition, f"{len(names)} parameters", f"{len(values)} positional ones: {', '.join(names)}")
        self.env: dict[str, Expr | Captured] = dict(zip(names, values, strict=True))
        for a in arguments.kwonlyargs:
            known = {"q_len": expr.N_Q, "kv_len": expr.N_K} if lengths else {}
            if a.arg not in known:
                self.fail(self.definition, f"the keyword-only parameter {a.arg!r}", "q_len or kv_len, the two lengths")
            self.env[a.arg] = known[a.arg]
        for statement in self.definition.body:
            result = self.statement(statement)
            if result is not None:
                return result
        self.fail(self.definition, "no return", "a `return` of the value")

    def statement(self, x: ast.stmt) -> Expr | None:
        match x:
            case ast.Return(value=ast.expr() as value):
                return self.value(value)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self.env[name] = self.value(value)
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

    def value(self, x: ast.expr) -> Expr:
        found = self.expression(x)
        if isinstance(found, Captured):
            if found.rank:
                self.fail(x, f"the tensor {found.name!r} whole", f"{found.name} at {found.rank} indices")
            return expr.load(found.position, kind=found.kind)
        return found

    def expression(self, x: ast.expr) -> Expr | Captured:
        match x:
            case ast.Name(id=name):
                return self.name(x, name)
            case ast.Constant(value=bool() | int() | float() as value):
                return expr.const(value)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left), self.value(right)
                if type(op) in LOGIC:
                    return expr.logic(LOGIC[type(op)], a, b)
                if type(op) in BINARY:
                    return expr.arithmetic(BINARY[type(op)], a, b)
            case ast.BoolOp(op=op, values=values):
                result = self.value(values[0])
                for v in values[1:]:
                    result = expr.logic(LOGIC[type(op)], result, self.value(v))
                return result
            case ast.UnaryOp(op=ast.USub(), operand=a):
                return expr.negative(self.value(a))
            case ast.UnaryOp(op=ast.UAdd(), operand=a):
                return self.value(a)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=a):
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
                outside = self.resolve(x)
                if isinstance(outside, (bool, int, float)):
                    return expr.const(outside)
        self.fail(x, f"{ast.unparse(x)!r}", "arithmetic, comparisons, torch.where, indexing and elementary functions")

    def name(self, x: ast.expr, name: str) -> Expr | Captured:
        if name in self.env:
            return self.env[name]
        outside = self.outside.get(name)
        if isinstance(outside, (bool, int, float)):
            return expr.const(outside)
        found = f"{name!r}, a {type(outside).__name__}" if name in self.outside else f"the unknown name {name!r}"
        self.fail(x, found, "a parameter (pass tensors when you call the mod), a name assigned above, or a number")

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

    def subscript(self, x: ast.expr, tensor: ast.expr, index: ast.expr) -> Expr:
        captured = self.expression(tensor)
        if not isinstance(captured, Captured):
            self.fail(x, f"an index into {ast.unparse(tensor)!r}", "an index into a tensor the mod was called with")
        indices = [self.value(i) for i in (index.elts if isinstance(index, ast.Tuple) else [index])]
        if len(indices) != captured.rank:
            self.fail(x, f"{len(indices)} indices", f"{captured.rank}, as many as {captured.name!r} has axes")
        for i in indices:
            if i.kind != "int":
                self.fail(x, f"a {i.kind} as an index", "an int: write int(...) around it")
        return expr.load(captured.position, *indices, kind=captured.kind)

    def called(self, x: ast.Call, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Expr:
        named = {k.arg: self.value(k.value) for k in keywords if k.arg}
        outside = self.resolve(function)
        if isinstance(function, ast.Attribute) and outside is None:  # a method: x.abs() is abs(x)
            values = [self.value(function.value), *map(self.value, args)]
            return self.builtin(x, function.attr, values, named)
        name = getattr(outside, "__name__", None) or ast.unparse(function)
        inner = getattr(outside, "function", outside)
        if inspect.isfunction(inner) and not named and not inner.__module__.startswith("torch"):
            if self.depth == DEPTH:
                self.fail(x, f"calls nested {DEPTH} deep", "no recursion: a mod is one expression")
            return _Reader(inner, self.depth + 1).call([self.expression(a) for a in args], True)
        return self.builtin(x, name, [self.value(a) for a in args], named)

    def builtin(self, x: ast.expr, name: str, args: list[Expr], named: dict[str, Expr]) -> Expr:
        name = NAMES.get(name, name)
        match name, args:
            case (("min" | "max"), [_, _, *_]):
                result = args[0]
                for a in args[1:]:
                    result = expr.arithmetic(name, result, a)
                return result
            case "where", [c, a, b]:
                return expr.where(c, a, b)
            case "abs", [a]:
                return expr.absolute(a)
            case (("and" | "or" | "not"), [_, *_]):
                return expr.logic(name, *args)
            case (("pow" | "mod" | "floordiv"), [a, b]):
                return expr.arithmetic(name, a, b)
            case "float", [a]:
                return expr.as_float(a)
            case (("int" | "long"), [a]):
                return a if a.kind == "int" else expr.node("int", expr.as_float(a), kind="int")
            case (("clamp" | "clip"), [a, *limits]) if len(limits) <= 2:
                bounds = dict(zip(("min", "max"), limits, strict=False)) | named
                for side, other in (("min", "max"), ("max", "min")):
                    if side in bounds:
                        a = expr.arithmetic(other, a, bounds[side])
                return a
            case "relu", [a]:
                return expr.arithmetic("max", a, expr.const(0))
            case _, [a] if name in expr.FUNCTIONS:
                return expr.function(name, a)
            case "rsqrt", [a]:
                return expr.arithmetic("div", expr.const(1.0), expr.function("sqrt", a))
        known = ", ".join(("abs", "min", "max", "where", "clamp", "pow", "int", "float", *expr.FUNCTIONS))
        self.fail(x, f"a call of {name} with {len(args)} arguments", f"one of {known}, or a function made of them")

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
        place = f"{self.function.__code__.co_filename}:{self.first + line - 1}"
        shown = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise AttentionError(f"mod {self.function.__name__!r}, {place}, in `{shown}`", found, expected)
