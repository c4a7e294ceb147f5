"""What a mod may call, by the names that Python, math and torch have for it; and the tensors that it may index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import expr
from .expr import Expr

ALIASES = """
    minimum:min maximum:max absolute:abs logical_and:and logical_or:or logical_not:not fabs:abs remainder:mod
    floor_divide:floordiv true_divide:div truediv:div divide:div multiply:mul subtract:sub negative:neg expit:sigmoid
    arctan:atan greater:gt greater_equal:ge less:lt less_equal:le not_equal:ne double:float half:float bfloat16:float
"""
NAMES = dict(pair.split(":") for pair in ALIASES.split())
BITS = {  # by the names of Python's operators
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "invert": "bitwise_not",
}
ARGUMENTS = {  # that may be given by keyword
    **dict.fromkeys(("clamp", "clip"), ("min", "max")),
    **dict.fromkeys(("sum", "any", "all", "unsqueeze"), ("dim",)),
    "div": ("rounding_mode",),
    "gelu": ("approximate",),
}
COMPOSED: dict[str, Callable[[Sequence[Expr], Mapping[str, Any]], Expr | None]] = {}  # filled by `composed`
PRODUCTS = ("dot", "inner", "vdot", "matmul", "linalg_vecdot")
Argument = Expr | str | None  # given by keyword
KEYWORDS = {"q_len": expr.N_Q, "kv_len": expr.N_K, "q_pos": expr.Q_POS}  # keyword-only parameters that a mod may have
PARAMETERS = {expr.B: "b", expr.H: "h", expr.I: "q_idx", expr.J: "kv_idx", expr.Q_POS: "q_pos"}  # as errors name them
KNOWN = (
    f"abs, min, max, where, clamp, pow, int, float, relu, gelu, {', '.join(expr.FUNCTIONS)}, dot, sum, any, all, or"
    " another of torch's elementary functions (docs/mods.md)"
)


class Captured:
    """A tensor that the mod reads, at the indices that it has so far: `table[b][h]` gets one after the other. `rank` is
    the number of axes that have no index yet. With one of them left it is a row: a vector."""

    def __init__(self, position: int, name: str, rank: int, kind: str, indices: tuple[Expr, ...] = ()) -> None:
        self.position, self.name, self.rank, self.kind, self.indices = position, name, rank, kind, indices

    def at(self, indices: Sequence[Expr]) -> Captured:
        shown = ", ".join(PARAMETERS.get(x, "...") for x in indices)
        rest = self.rank - len(indices)
        return Captured(self.position, f"{self.name}[{shown}]", rest, self.kind, (*self.indices, *indices))

    def load(self) -> Expr:
        return expr.load(self.position, *self.indices, *[expr.R] * self.rank, kind=self.kind)


def elementary(name: str, args: Sequence[Expr], named: Mapping[str, Argument]) -> Expr | None:
    """The function of this name, as Python, math or torch call it; None if there is none, or not of such arguments."""
    name = name.removeprefix("special_")
    name = NAMES.get(name, name)
    named = {word: x for word, x in named.items() if x is not None and x is not expr.const(False)}  # as if left out
    if name in COMPOSED:
        return COMPOSED[name](args, named)
    if any(word not in ARGUMENTS.get(name, ()) for word in named):
        return None
    match name, list(args):
        case (("min" | "max"), [first, _, *_]):
            for a in args[1:]:
                first = expr.arithmetic(name, first, a)
            return first
        case "where", [c, a, b]:
            return expr.where(c, a, b)
        case "abs", [a]:
            return expr.absolute(a)
        case (("and" | "or"), [_, _]) | ("not", [_]):
            return expr.logic(name, *args)
        case "logical_xor", [a, b]:
            return expr.bitwise("bitwise_xor", expr.as_bool(a), expr.as_bool(b))
        case "bitwise_not", [a] if a.kind != "float":
            return expr.logic("not", a) if a.kind == "bool" else expr.arithmetic("sub", expr.const(-1), a)
        case _, [a, b] if name in expr.BITWISE and "float" not in (a.kind, b.kind):
            return expr.bitwise(name, a, b)
        case "div", [a, b] if named:
            return _rounded(named["rounding_mode"], a, b)
        case (("add" | "sub" | "mul" | "div" | "pow" | "mod" | "floordiv"), [a, b]):
            return expr.arithmetic(name, a, b)
        case _, [a, b] if name in expr.COMPARISONS:
            return expr.compare(name, a, b)
        case "neg", [a]:
            return expr.negative(a)
        case (("sum" | "any" | "all" | "unsqueeze"), [a, *rest]) if len(rest) + len(named) <= 1:
            return _along(name, a, *rest, *named.values())
        case _, [a, b] if name in PRODUCTS and expr.is_vector(a) and expr.is_vector(b):
            return expr.reduced("sum", expr.arithmetic("mul", a, b))
        case "float", [a]:
            return expr.as_float(a)
        case "bool", [a]:
            return expr.as_bool(a)
        case (("zeros_like" | "ones_like"), [a]):
            return filled(a.kind, name == "ones_like")
        case "full_like", [a, b]:
            return elementary(a.kind, [b], {})
        case "tensor", [a] if a.op == "const":
            return a
        case (("int" | "long"), [a]):
            return a if a.kind == "int" else expr.node("int", expr.as_float(a), kind="int")
        case (("clamp" | "clip"), [a, *limits]) if len(limits) <= 2:
            bounds = dict(zip(("min", "max"), limits, strict=False)) | dict(named)
            for side, other in (("min", "max"), ("max", "min")):
                limit = bounds.get(side)
                if isinstance(limit, Expr):
                    a = expr.arithmetic(other, a, limit)
            return a
        case "relu", [a]:
            return expr.arithmetic("max", a, expr.const(0))
        case "gelu", [a]:
            return _gelu(named.get("approximate", "none"), a)
        case _, [a] if name in expr.FUNCTIONS:
            return expr.function(name, a)
        case "rsqrt", [a]:
            return expr.arithmetic("div", expr.const(1.0), expr.function("sqrt", a))
    return None


OTHERS = """
    min max where abs and or not logical_xor bitwise_not add sub mul div pow mod floordiv neg sum any all unsqueeze
    float bool zeros_like ones_like full_like int long clamp clip relu gelu rsqrt to type type_as new_ones new_zeros
    index dtype inf nan pi e nn functional special ops aten
"""


def is_elementary(name: str) -> bool:
    """Whether the function or attribute of this name, of a number or a library, is always the same."""
    name = name.removeprefix("special_")
    name = NAMES.get(name, name)
    known = *OTHERS.split(), *expr.FUNCTIONS, *expr.COMPARISONS, *expr.BITWISE, *PRODUCTS
    return name in COMPOSED or name in known or isinstance(getattr(torch, name, None), torch.dtype)


def filled(kind: str, value: int) -> Expr:
    """0 or 1 of a kind."""
    return expr.const(float(value) if kind == "float" else bool(value) if kind == "bool" else int(value))


def conversion(dtype: torch.dtype) -> str | None:
    """The name of the conversion to a dtype: float (the scores' dtype), int (64 bits) or bool; None for others."""
    if dtype.is_floating_point:
        return "float"
    return {torch.bool: "bool", torch.int32: "int", torch.int64: "int"}.get(dtype)


def dtype_of(value: Expr | Captured) -> torch.dtype:
    return {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[value.kind]


def _along(name: str, x: Expr, axis: Argument = None) -> Expr | None:
    """Of a row, along its one axis. A number, unsqueezed, is a row of one, which meets others as the number does."""
    if axis not in (None, expr.const(-1), expr.const(0)):
        return None
    if name == "unsqueeze":
        return None if axis is None or expr.is_vector(x) else x
    if name == "all":
        return expr.logic("not", expr.reduced("any", expr.logic("not", x)))
    return expr.reduced(name, x)


def _rounded(mode: Argument, a: Expr, b: Expr) -> Expr | None:
    """torch.div: to the lower integer, or towards 0."""
    if mode == "floor":
        return expr.arithmetic("floordiv", a, b)
    if mode != "trunc":
        return None
    a_size, b_size = expr.absolute(a), expr.absolute(b)
    if "float" in (a_size.kind, b_size.kind):  # where the quotient is rounded first: 1.0 by 0.1 is 10
        size = expr.function("floor", expr.arithmetic("div", a_size, b_size))
    else:
        size = expr.arithmetic("floordiv", a_size, b_size)
    below = expr.bitwise("bitwise_xor", *(expr.compare("lt", x, expr.const(0)) for x in (a, b)))
    return expr.where(below, expr.negative(size), size)


def _gelu(approximate: Argument, x: Expr) -> Expr | None:
    """x times how much of a normal distribution lies below x."""

    def times(a: float, b: Expr) -> Expr:
        return expr.arithmetic("mul", expr.const(a), b)

    if approximate == "none":
        tail = expr.function("erf", times(math.sqrt(0.5), x))
    elif approximate == "tanh":
        cube = times(0.044715, expr.arithmetic("pow", x, expr.const(3)))
        tail = expr.function("tanh", times(math.sqrt(2 / math.pi), expr.arithmetic("add", x, cube)))
    else:
        return None
    return expr.arithmetic("mul", times(0.5, x), expr.arithmetic("add", expr.const(1.0), tail))
