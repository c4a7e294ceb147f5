"""What a mod may call, by the names that Python, math and torch have for it; and the tensors that it may index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.mods import expr
from tilewise.mods.expr import Expr

NAMES = {"minimum": "min", "maximum": "max", "absolute": "abs", "logical_and": "and", "logical_or": "or",
         "logical_not": "not", "fabs": "abs", "remainder": "mod", "floor_divide": "floordiv",
         "true_divide": "div", "truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
         "negative": "neg"}  # fmt: skip
BITWISE = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_not": "not"}
PLACES = {"q_len": expr.N_Q, "kv_len": expr.N_K, "q_pos": expr.Q_POS}  # keyword-only parameters that a mod may have
KNOWN = ", ".join(("abs", "min", "max", "where", "clamp", "pow", "int", "float", *expr.FUNCTIONS))


class Captured:
    """A tensor that the mod reads: worth something only at an index, or alone if it has no axes. `rank` counts the axes
    that have no index yet; `table[b][h]` has got one after the other."""

    def __init__(self, position: int, name: str, rank: int, kind: str, indices: tuple[Expr, ...] = ()) -> None:
        self.position, self.name, self.rank, self.kind, self.indices = position, name, rank, kind, indices

    def at(self, indices: Sequence[Expr]) -> Captured:
        rest = self.rank - len(indices)
        return Captured(self.position, self.name, rest, self.kind, (*self.indices, *indices))

    def load(self) -> Expr:
        return expr.load(self.position, *self.indices, kind=self.kind)


def elementary(name: str, args: Sequence[Expr], named: Mapping[str, Expr]) -> Expr | None:
    """The function of this name, as Python, math or torch call it; None if there is none, or not of such arguments."""
    name = NAMES.get(name, name)
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
        case _, _ if name in BITWISE and all(a.kind == "bool" for a in args):
            return elementary(BITWISE[name], args, {})
        case (("add" | "sub" | "mul" | "div" | "pow" | "mod" | "floordiv"), [a, b]):
            return expr.arithmetic(name, a, b)
        case _, [a, b] if name in expr.COMPARISONS:
            return expr.compare(name, a, b)
        case "neg", [a]:
            return expr.negative(a)
        case "float", [a]:
            return expr.as_float(a)
        case (("int" | "long"), [a]):
            return a if a.kind == "int" else expr.node("int", expr.as_float(a), kind="int")
        case (("clamp" | "clip"), [a, *limits]) if len(limits) <= 2:
            bounds = dict(zip(("min", "max"), limits, strict=False)) | dict(named)
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
    return None
