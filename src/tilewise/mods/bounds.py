"""What is known of an expression without evaluating it: the bounds of its integers (kernels use 32 bits for those that
fit), and whether it depends on two indices by their difference alone."""

from __future__ import annotations

from collections.abc import Sequence

from .expr import Expr, const, nodes, substitute

TOKENS = 1 << 30  # the longest sequence for which the bounds hold
INT32 = (-(1 << 31), (1 << 31) - 1)
INT64 = (-(1 << 63), (1 << 63) - 1)

Bounds = tuple[int, int]  # the least and the greatest


def bounds(*roots: Expr) -> dict[Expr, Bounds]:
    """The bounds of every int node of the roots. Tensors count as int32: results of wider ones are wide in any case.

    >>> from tilewise.mods.expr import I, J, arithmetic
    >>> distance, product = arithmetic("sub", I, J), arithmetic("mul", I, J)
    >>> is_narrow(bounds(distance)[distance]), is_narrow(bounds(product)[product])
    (True, False)
    """
    found: dict[Expr, Bounds] = {}
    for x in nodes(*roots):
        if x.kind == "int":
            least, most = _bounds(x, [found[a] for a in x.args if a in found])
            found[x] = (least, most) if INT64[0] <= least and most <= INT64[1] else INT64  # an overflow: any value
    return found


def is_narrow(own: Bounds) -> bool:
    return INT32[0] <= own[0] and own[1] <= INT32[1]


def _bounds(x: Expr, args: list[Bounds]) -> Bounds:
    match x.op, args:
        case "sum", _:
            return INT64
        case "index", _:
            return 0, TOKENS - (x.value not in ("n_q", "n_k"))
        case "const", _:
            return x.value, x.value
        case "add", [(a, b), (c, d)]:
            return a + c, b + d
        case "sub", [(a, b), (c, d)]:
            return a - d, b - c
        case "mul", [(a, b), (c, d)]:
            products = (a * c, a * d, b * c, b * d)
            return min(products), max(products)
        case "neg", [(a, b)]:
            return -b, -a
        case "abs", [(a, b)]:
            return max(0, a, -b), max(-a, b)
        case "min", [(a, b), (c, d)]:
            return min(a, c), min(b, d)
        case "max", [(a, b), (c, d)]:
            return max(a, c), max(b, d)
        case "where", [(a, b), (c, d)]:
            return min(a, c), max(b, d)
        case "floordiv", [(a, b), (c, _)]:
            most = max(abs(a), abs(b))
            return (0, b) if min(a, c) >= 0 else (-most, most)
        case "mod", [(a, _), (c, d)]:
            most = max(abs(c), abs(d))
            return 0 if min(a, c) >= 0 else -most, most
        case "bitwise_and", [(a, b), (c, d)] if max(a, c) >= 0:
            return 0, min(most for least, most in args if least >= 0)
        case (("bitwise_and" | "bitwise_or" | "bitwise_xor"), _):
            most = (1 << max((n if n >= 0 else ~n).bit_length() for own in args for n in own)) - 1
            return 0 if min(least for least, _ in args) >= 0 else ~most, most
        case (("bitwise_left_shift" | "bitwise_right_shift"), [(a, b), (c, d)]):
            steps = (c, d) if c >= 0 and d < 64 else (0, 64)
            ends = [n << by if x.op == "bitwise_left_shift" else n >> by for n in (a, b) for by in steps]
            return min(ends), max(ends)
    return INT32  # a load, or int() of a float


def only_difference(roots: Sequence[Expr], a: Expr, b: Expr) -> bool:
    """Whether the expressions depend on two indices by their difference alone, each possibly shifted by a term without
    them.

    >>> from tilewise.mods.expr import I, J, Q_POS, arithmetic
    >>> only_difference([arithmetic("sub", Q_POS, J)], I, J), only_difference([arithmetic("add", I, J)], I, J)
    (True, False)
    """
    names = {a.value, b.value}

    def moved(x: Expr) -> Expr:
        while x.op in ("float", "add", "sub"):
            inside = [y for y in x.args if y.deps & names]
            if len(inside) != 1 or (x.op == "sub" and inside[0] is x.args[1]):
                break
            (x,) = inside
        return x

    def mark(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        return const(0) if x.op == "sub" and {moved(y) for y in x.args} == {a, b} else None

    return not any(substitute(x, mark).deps & names for x in roots)
