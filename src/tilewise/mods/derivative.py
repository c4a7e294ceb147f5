"""The derivative of an expression, which is an expression."""

from __future__ import annotations

from collections.abc import Callable

from .expr import Expr, arithmetic, compare, const, function, is_vector, negative, nodes, reduced, where


def derivative(root: Expr, by: Expr) -> Expr:
    """d root / d by, where `by` is the score or a load; for the load of a row a vector, one value for each r."""
    zero, one = const(0.0), const(1.0)
    d: dict[Expr, Expr] = {}
    for x in nodes(root):
        da = [d[a] for a in x.args]
        if x is by:
            d[x] = one
        elif x.kind != "float" or all(g is zero for g in da) or x.op == "load":
            d[x] = zero
        elif x.op == "sum":
            d[x] = da[0] if is_vector(by) else reduced("sum", da[0], x.value)
        else:
            d[x] = _rules[x.op](x, *x.args, *da)
    return d[root]


def _plus(a: Expr, b: Expr) -> Expr:
    return arithmetic("add", a, b)


def _minus(a: Expr, b: Expr) -> Expr:
    return negative(b) if a is const(0.0) else arithmetic("sub", a, b)


def _times(a: Expr, b: Expr) -> Expr:
    zero = const(0.0)
    return zero if zero in (a, b) else arithmetic("mul", a, b)


def _over(a: Expr, b: Expr) -> Expr:
    return a if a is const(0.0) else arithmetic("div", a, b)


def _sign(a: Expr, da: Expr) -> Expr:
    zero = const(0.0)
    return where(compare("gt", a, zero), da, where(compare("lt", a, zero), negative(da), zero))


_LN2, _TWO_BY_ROOT_PI = const(0.6931471805599453), const(1.1283791670955126)
# (node, *its arguments, *their derivatives) -> the node's derivative
_rules: dict[str, Callable[..., Expr]] = {
    "add": lambda x, a, b, da, db: _plus(da, db),
    "sub": lambda x, a, b, da, db: _minus(da, db),
    "mul": lambda x, a, b, da, db: _plus(_times(da, b), _times(a, db)),
    "div": lambda x, a, b, da, db: _over(_minus(da, _times(x, db)), b),
    "floordiv": lambda x, a, b, da, db: const(0.0),
    "mod": lambda x, a, b, da, db: _minus(da, _times(arithmetic("floordiv", a, b), db)),
    "min": lambda x, a, b, da, db: where(compare("le", a, b), da, db),
    "max": lambda x, a, b, da, db: where(compare("ge", a, b), da, db),
    "where": lambda x, c, a, b, dc, da, db: where(c, da, db),
    "neg": lambda x, a, da: negative(da),
    "abs": lambda x, a, da: _sign(a, da),
    "exp": lambda x, a, da: _times(x, da),
    "exp2": lambda x, a, da: _times(_times(x, _LN2), da),
    "expm1": lambda x, a, da: _times(_plus(x, const(1.0)), da),
    "log": lambda x, a, da: _over(da, a),
    "log1p": lambda x, a, da: _over(da, _plus(const(1.0), a)),
    "log2": lambda x, a, da: _over(da, _times(a, _LN2)),
    "sqrt": lambda x, a, da: _over(da, _times(const(2.0), x)),
    "tanh": lambda x, a, da: _times(_minus(const(1.0), _times(x, x)), da),
    "erf": lambda x, a, da: _times(_times(_TWO_BY_ROOT_PI, function("exp", negative(_times(a, a)))), da),
    "sigmoid": lambda x, a, da: _times(_times(x, _minus(const(1.0), x)), da),
    "sin": lambda x, a, da: _times(function("cos", a), da),
    "cos": lambda x, a, da: negative(_times(function("sin", a), da)),
    "atan": lambda x, a, da: _over(da, _plus(const(1.0), _times(a, a))),
    "floor": lambda x, a, da: const(0.0),
}
