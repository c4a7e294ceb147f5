"""The language of mods: expressions over one pair (query, key), and their value in torch.

    score                   the score so far, scale * q.k
    b h i j                 batch, head, query and key index; n_q n_k the two lengths; Q_POS = i + n_k - n_q, the key
                            position of the query
    number                  a float argument of the mod
    load                    a tensor of the mod at integer indices
    const                   a number in the function's source
    r                       the position in a row: an expression that depends on r is a vector, one value for each r
    sum any                 of a vector, over the positions of an axis of a tensor

Equal expressions are one object, so the cost of a graph is its number of distinct nodes. Integers have 64 bits; a shift
by 64 or more gives 0 (>> of a negative number: -1).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

INDICES = ("b", "h", "i", "j", "n_q", "n_k", "r")
REDUCTIONS = ("sum", "any")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
EXPONENTIALS = ("exp", "exp2", "expm1")
LOGARITHMS = ("log", "log2", "log1p")
FUNCTIONS = (*EXPONENTIALS, *LOGARITHMS, "sqrt", "tanh", "erf", "sigmoid", "sin", "cos", "atan", "floor")
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift")
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", *SHIFTS)  # of ints


class Expr:
    """A node: an operation on other nodes. `kind` is float, int or bool; `deps` the names of the leaves below it."""

    __slots__ = ("__weakref__", "args", "deps", "kind", "op", "value")
    op: str
    args: tuple[Expr, ...]
    value: Any
    kind: str
    deps: frozenset[str]

    def __repr__(self) -> str:
        inside = ", ".join(f"<{a.op}>" for a in self.args) if self.args else repr(self.value)
        return f"{self.op}({inside})"


_nodes: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_nodes_lock = RLock()  # two threads would make two equal nodes; reentrant, as a signal handler may call attention


def node(op: str, *args: Expr, value: Any = None, kind: str) -> Expr:
    key = (op, *map(id, args), repr(value), kind)
    with _nodes_lock:
        found = _nodes.get(key)
        if found is None:
            found = Expr()
            found.op, found.args, found.value, found.kind = op, args, value, kind
            own = {value} if op == "index" else {"score"} if op == "score" else set()
            found.deps = frozenset(own).union(*(a.deps for a in args))
            if op in REDUCTIONS:
                found.deps -= {"r"}
            _nodes[key] = found
    return found


SCORE = node("score", kind="float")
B, H, I, J, N_Q, N_K, R = (node("index", value=name, kind="int") for name in INDICES)


def plain_number(value: bool | int | float) -> bool | int | float:
    """The number without its subclass: an IntEnum's int, a numpy.float64's float."""
    return value if isinstance(value, bool) else int(value) if isinstance(value, int) else float(value)


def const(value: bool | int | float) -> Expr:
    value = plain_number(value)
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if kind == "int" and not -(2**63) <= value < 2**63:
        raise OverflowError(f"the integer {value}")
    return node("const", value=value, kind=kind)


def number(n: int) -> Expr:
    return node("number", value=n, kind="float")


def load(n: int, *indices: Expr, kind: str) -> Expr:
    return node("load", *indices, value=n, kind=kind)


def is_vector(x: Expr) -> bool:
    return "r" in x.deps


def reduced(op: str, x: Expr, extent: tuple[int, int] | None = None) -> Expr:
    """The sum of x over r, or whether any of it is true. r runs over an axis of a tensor: `extent`, (tensor, axis), or
    the axis along which the vector x is read. A number x is returned as it is."""
    x = as_bool(x) if op == "any" else _counted(x)
    if extent is None:
        if not is_vector(x):
            return x
        extent = lengths(x)[0]
    if x.kind == "float" and ("score" in x.deps or any(y.op == "sum" for y in nodes(x))):
        raise ArithmeticError("a sum over a row of what is made of the score, or of another such sum")
    return node(op, x, value=extent, kind=x.kind)


def vectors(x: Expr) -> list[Expr]:
    """The nodes of x that depend on r, arguments first."""
    return nodes(x, through=is_vector) if is_vector(x) else []


def lengths(x: Expr) -> list[tuple[int, int]]:
    """The (tensor, axis) pairs along which a vector is read: they must have one length."""
    loads = [y for y in vectors(x) if y.op == "load"]
    return list({(y.value, n): None for y in loads for n, index in enumerate(y.args) if index is R})


def as_float(x: Expr) -> Expr:
    """x as a float. A difference of positions is taken between floats (exact below 2^24): one conversion per row and
    one per column instead of one per pair."""
    if x.kind == "float":
        return x
    if x.op == "const":
        return const(float(x.value))
    if x.kind == "int" and all(y.op in AFFINE for y in nodes(x)):
        return substitute(x, _float_leaf)
    return node("float", x, kind="float")


AFFINE = ("index", "const", "add", "sub", "neg", "abs")


def _float_leaf(x: Expr, args: tuple[Expr, ...]) -> Expr:
    if x.op == "const":
        return const(float(x.value))
    return node(x.op, *args, kind="float") if args else node("float", x, kind="float")


def as_bool(x: Expr) -> Expr:
    return x if x.kind == "bool" else compare("ne", x, const(0))


def arithmetic(op: str, a: Expr, b: Expr) -> Expr:
    a, b = _counted(a), _counted(b)
    if op == "div" or "float" in (a.kind, b.kind):
        a, b = as_float(a), as_float(b)
    x, y = a.value if a.op == "const" else None, b.value if b.op == "const" else None
    if op in ("floordiv", "mod") and y == 0 and a.kind == "int":
        raise ZeroDivisionError("a division by 0")
    if op in SHIFTS and y is not None and not 0 <= y < 64:
        raise OverflowError(f"a shift by {y}")
    if x is not None and y is not None:
        return const(_folded(op, x, y))
    if (op == "add" and y == 0) or (op == "sub" and y == 0) or (op in ("mul", "div") and y == 1):
        return a
    if (op == "add" and x == 0) or (op == "mul" and x == 1):
        return b
    if op == "pow":
        return _power(a, b)
    return node(op, a, b, kind=a.kind)


def _folded(op: str, x: Any, y: Any) -> Any:
    if op == "pow" and isinstance(x, int) and abs(x) > 1 and y > 63:
        raise OverflowError(f"the integer {x}**{y}")
    if op in ("div", "floordiv", "mod") and y == 0:  # of floats: that of ints has raised
        return math.nan if op == "mod" else quotient(x, y)
    try:
        result = _PYTHON[op](x, y)
    except ArithmeticError as error:
        raise ArithmeticError(f"{op} of {x} and {y}, which has no value") from error
    if isinstance(result, complex):
        raise ArithmeticError(f"the complex number {x}**{y}")
    return result


def quotient(a: Any, b: Any) -> Any:
    """a / b, for Python's numbers as in torch: a division by 0 is infinite or nan, where Python raises."""
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b != 0:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1.0, b) if a != 0 and a == a else math.nan


def _counted(x: Expr) -> Expr:
    """A bool as an int: True is 1."""
    return where(x, const(1), const(0)) if x.kind == "bool" else x


def _power(a: Expr, b: Expr) -> Expr:
    if b.op == "const" and float(b.value).is_integer() and 0 <= b.value <= 8:
        power = const(1.0 if a.kind == "float" else 1)
        for _ in range(int(b.value)):
            power = arithmetic("mul", power, a)
        return power
    if b.op == "const" and b.value == 0.5:
        return function("sqrt", a)
    a, b = as_float(a), as_float(b)
    if b.op == "const" and float(b.value).is_integer():
        return arithmetic("div", const(1.0), _power(a, const(-int(b.value))))
    return function("exp2", arithmetic("mul", b, function("log2", a)))


def compare(op: str, a: Expr, b: Expr) -> Expr:
    a, b = _counted(a), _counted(b)
    if "float" in (a.kind, b.kind):
        a, b = as_float(a), as_float(b)
    return node(op, a, b, kind="bool")


def logic(op: str, *args: Expr) -> Expr:
    return node(op, *map(as_bool, args), kind="bool")


def bitwise(op: str, a: Expr, b: Expr) -> Expr:
    """& | ^ << >> of ints; of bools the first three are logic."""
    if op in SHIFTS or "int" in (a.kind, b.kind):
        return arithmetic(op, a, b)
    return where(a, logic("not", b), b) if op == "bitwise_xor" else logic(op.removeprefix("bitwise_"), a, b)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    condition = as_bool(condition)
    if a is b:
        return a
    if a.kind != b.kind:
        a, b = (_counted(a), _counted(b)) if "float" not in (a.kind, b.kind) else (as_float(a), as_float(b))
    return node("where", condition, a, b, kind=a.kind)


def negative(x: Expr) -> Expr:
    x = _counted(x)
    return const(-x.value) if x.op == "const" else node("neg", x, kind=x.kind)


def absolute(x: Expr) -> Expr:
    x = _counted(x)
    return const(abs(x.value)) if x.op == "const" else node("abs", x, kind=x.kind)


def function(name: str, x: Expr) -> Expr:
    return node(name, as_float(x), kind="float")


_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    **{op: getattr(operator, op) for op in ("add", "sub", "mul", "floordiv", "mod", "pow")},
    "div": operator.truediv,
    "min": min,
    "max": max,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_left_shift": operator.lshift,
    "bitwise_right_shift": operator.rshift,
}


def substitute(root: Expr, leaf: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """root with every node x replaced by leaf(x, args), args its replaced arguments, unless that is None."""
    done: dict[Expr, Expr] = {}
    for x in nodes(root):
        args = tuple(done[a] for a in x.args)
        done[x] = leaf(x, args) or (x if args == x.args else node(x.op, *args, value=x.value, kind=x.kind))
    return done[root]


def nodes(*roots: Expr, through: Callable[[Expr], bool] = lambda _: True) -> list[Expr]:
    """Every node once, arguments first. Arguments for which `through` is false are left out."""
    order: dict[Expr, None] = {}
    stack = list(reversed(roots))
    while stack:
        missing = [a for a in stack[-1].args if a not in order and through(a)]
        if missing:
            stack += reversed(missing)
        else:
            order[stack.pop()] = None
    return list(order)


Q_POS = arithmetic("add", I, arithmetic("sub", N_K, N_Q))


class Place(NamedTuple):
    """Which pairs: index tensors that broadcast to the tile's shape, and the two lengths."""

    b: Any
    h: Any
    i: Any
    j: Any
    n_q: Any
    n_k: Any
    r: Any = None

    def within(self, position_offsets: Tensor | None) -> Place:
        """The same pairs in the indices of the larger call, if this one is a part (see request.POSITION_OFFSETS)."""
        if position_offsets is None:
            return self
        b, h, i, j, step, n_q, n_k = position_offsets[self.b].long().unbind(-1)
        return Place(b, self.h + h, i + step * self.i, j + step * self.j, n_q, n_k, self.r)


def evaluate(
    roots: Sequence[Expr],
    place: Place,
    score: Tensor | None,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    dtype: torch.dtype = torch.float32,
    known: dict[Expr, Any] | None = None,
) -> list[Any]:
    """The value of each root in torch, floats in `dtype`. An index outside a tensor reads its nearest element. `known`:
    values of nodes that do not depend on r, from another r; the new ones are added."""
    known = {} if known is None else known
    of_vectors: dict[Expr, Any] = {}
    for x in nodes(*roots):
        values = of_vectors if is_vector(x) else known
        if x in values or (is_vector(x) and place.r is None):
            continue
        if x.op in REDUCTIONS:
            n, axis = x.value
            terms = (
                evaluate(x.args, at, score, tensors, numbers, dtype, known)[0]
                for at in positions(place, tensors[n].shape[axis])
            )
            values[x] = reduce(operator.or_ if x.op == "any" else operator.add, terms)
            continue
        args = [of_vectors[a] if is_vector(a) else known[a] for a in x.args]
        if x.op == "score":
            values[x] = score
        elif x.op == "const":
            values[x] = x.value
        elif x.op == "number":
            values[x] = numbers[x.value]
        elif x.op == "index":
            values[x] = _long(getattr(place, x.value))
        elif x.op == "float":
            values[x] = args[0].to(dtype) if isinstance(args[0], Tensor) else float(args[0])
        elif x.op == "int":
            values[x] = truncated(*_tensors(args, dtype))
        elif x.op == "load":
            values[x] = gather(tensors[x.value], args, dtype)
        else:
            values[x] = _torch[x.op](*args) if x.op in _PLAIN else _torch[x.op](*_tensors(args, dtype))
    return [of_vectors[x] if is_vector(x) else known[x] for x in roots]


def positions(place: Place, length: int) -> Iterator[Place]:
    """The places of a row."""
    return (place._replace(r=r) for r in range(length))


def sites(load: Expr, place: Place, tensors: Sequence[Tensor]) -> Iterator[Place]:
    """The places at which a load reads: one; for the load of a row, one for each r."""
    if not is_vector(load):
        return iter((place,))
    n, axis = lengths(load)[0]
    return positions(place, tensors[n].shape[axis])


def gather(tensor: Tensor, indices: Sequence[Any], dtype: torch.dtype) -> Tensor:
    found = tensor[clamped(tensor, indices)] if indices else tensor
    if found.dtype == torch.bool:
        return found
    return found.to(dtype if found.is_floating_point() else torch.int64)


def truncated(x: Tensor) -> Tensor:
    """int(x): rounded towards 0, clamped to 32 bits; 0 for nan."""
    return x.nan_to_num(nan=0.0).clamp(*INT_RANGE).to(torch.int64)


INT_RANGE = (-2147483648.0, 2147483520.0)  # as float32 has them


def _long(x: Any) -> Any:
    return x.long() if isinstance(x, Tensor) else x


def clamped(tensor: Tensor, indices: Sequence[Any]) -> tuple[Tensor, ...]:
    exact = (torch.as_tensor(x, device=tensor.device).long() for x in indices)
    return tuple(x.clamp(0, max(size - 1, 0)) for x, size in zip(exact, tensor.shape, strict=True))


def scatter_(
    total: Tensor, load: Expr, ds: Tensor, place: Place, tensors: Sequence[Tensor], numbers: Sequence[float]
) -> None:
    """total[indices of the load] += ds, first summed over the axes along which the indices do not change."""
    indices, ds = _summands(total, load, ds, place, tensors, numbers)
    if indices:
        total.index_put_(indices, ds, accumulate=True)
    else:
        total += ds


def scattered(
    total: Tensor, load: Expr, ds: Tensor, place: Place, tensors: Sequence[Tensor], numbers: Sequence[float]
) -> Tensor:
    """`scatter_` out of place, for torch to differentiate."""
    indices, ds = _summands(total, load, ds, place, tensors, numbers)
    return total.index_put(indices, ds, accumulate=True) if indices else total + ds


def _summands(
    total: Tensor, load: Expr, ds: Tensor, place: Place, tensors: Sequence[Tensor], numbers: Sequence[float]
) -> tuple[tuple[Tensor, ...], Tensor]:
    indices = clamped(total, evaluate(load.args, place, None, tensors, numbers, ds.dtype))
    if not indices:
        return (), ds.sum()
    shape = torch.broadcast_shapes(*(x.shape for x in indices))
    ds = ds.sum_to_size((1,) * (ds.dim() - len(shape)) + tuple(shape)).reshape(shape)
    return tuple(x.expand(shape) for x in indices), ds


def _tensors(args: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    device = next((a.device for a in args if isinstance(a, Tensor)), None)
    return [
        a if isinstance(a, Tensor) else torch.full((), a, dtype=dtype if isinstance(a, float) else None, device=device)
        for a in args
    ]


_PLAIN = ("add", "sub", "mul", "div", "neg", "abs")  # these take Python's numbers too
_torch: Mapping[str, Callable[..., Any]] = {
    **{op: quotient if op == "div" else getattr(operator, op) for op in _PLAIN},
    **{op: getattr(torch, op) for op in (*FUNCTIONS, *COMPARISONS, *BITWISE)},
    **{op: getattr(torch, f"logical_{op}") for op in ("and", "or", "not")},
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "where": torch.where,
}
