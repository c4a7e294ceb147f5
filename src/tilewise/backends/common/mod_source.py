"""Mods in Triton: the source of a function for each program, generated from its expression and compiled like any other.

A generated function takes (score, b, h, i, j, n_q, n_k, aux): index tensors that broadcast to the tile or to its
transpose, and `aux`: the program's tensors (as `Captured`), then its floats, then for a score mod the scale. Its name
is a hash of the program. Sums over a row are loops. The derivative by a row is that by one element; `aux` then ends
with the position of the element.

Integers have 64 bits; the functions use 32 bits for those that fit for all possible indices.
"""

import hashlib
import linecache
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...mods import PROGRAMS, Program
from ...mods.bounds import Bounds, bounds, is_narrow
from ...mods.expr import (
    EXPONENTIALS,
    FUNCTIONS,
    INT_RANGE,
    LOGARITHMS,
    REDUCTIONS,
    Expr,
    R,
    arithmetic,
    const,
    function,
    is_vector,
    nodes,
    number,
    quotient,
    substitute,
    vectors,
)

cache = lru_cache(4096)


class Captured(NamedTuple):
    """A tensor that a mod reads."""

    ptr: tl.tensor
    strides: tl.tuple
    sizes: tl.tuple


def captured(tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> tuple[Any, ...]:
    """The `aux` of a program."""
    return (*(Captured(x, x.stride(), tuple(x.shape)) for x in tensors), *numbers)


@triton.jit
def floor_divide(a, b):
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def floor_remainder(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def tanh(x):
    """1 - 2 / (e^2x + 1), exact to float32's rounding of 1."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def fast_tanh(x):
    """One instruction, relative error 2^-11: finer than the rounding of float16 and bfloat16 inputs."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def whole(x, score):
    """x in the shape and the layout of the scores. (Only an operation on the scores has their layout.)"""
    return tl.where(score == score, x, x)


@triton.jit
def integer(x):
    """An integer from a tensor, with at least 32 bits."""
    return x + tl.cast(0, tl.int32)


LEAST = tl.constexpr(INT_RANGE[0])
MOST = tl.constexpr(INT_RANGE[1])


@triton.jit
def truncated(x):
    """int(x), clamped to 32 bits; 0 for nan."""
    x = tl.where(x == x, x, 0.0)
    return tl.cast(tl.minimum(tl.maximum(x, LEAST), MOST), tl.int32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def log1p(x):
    """log(u) * x / (u - 1), u the rounded 1 + x: the rounding errors of u cancel."""
    u = 1.0 + x
    return tl.where((u == 1.0) | (u == float("inf")), x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def expm1(x):
    """(u - 1) * x / log(u), u the rounded exp(x): the rounding errors of u cancel."""
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where((u == 0.0) | (u == float("inf")), u - 1.0, (u - 1.0) * (x / tl.log(u))))


@triton.jit
def atan(x):
    """Cephes' polynomial on [-tan(pi/8), tan(pi/8)], after |x| is brought there; 2 ulp."""
    size = tl.abs(x)
    large = size > 2.414213562373095
    middle = size > 0.4142135623730950
    y = tl.where(large, -1.0 / size, tl.where(middle, (size - 1.0) / (size + 1.0), size))
    base = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    z = y * y
    tail = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z
    angle = base + (tail * y + y)
    return tl.where(x < 0.0, -angle, angle)


@triton.jit
def left_shift(x, n):
    inside = (n >= 0) & (n < 64)
    return tl.where(inside, tl.cast(x, tl.int64) << tl.where(inside, tl.cast(n, tl.int64), 0), 0)


@triton.jit
def right_shift(x, n):
    return tl.cast(x, tl.int64) >> tl.where((n >= 0) & (n < 64), tl.cast(n, tl.int64), 63)


ARITHMETIC = (floor_divide, floor_remainder, integer, truncated, left_shift, right_shift, whole)
ELEMENTARY = (tanh, fast_tanh, sigmoid, log1p, expm1, atan)
NAMESPACE = {"triton": triton, "tl": tl, **{f.__name__: f for f in (*ARITHMETIC, *ELEMENTARY)}}
PARAMETERS = "score, b, h, i, j, n_q, n_k, aux"
LARGE = float(1 << 14)  # up to it, rounding lse to float32 changes weights by 7e-4 at most


def short(key: str) -> str:
    """A hash of a program, the same in every process."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@cache
def value(key: str, fast: bool) -> Any:
    """The Triton function of the program: a score, or whether the pair is visible."""
    return _function(f"value_{short(key)}", [PROGRAMS[key].root], len(PROGRAMS[key].ranks), fast)


@cache
def value_and_derivative(key: str, fast: bool) -> Any:
    """The Triton function of the score and of its derivative by the score that is its argument."""
    program = PROGRAMS[key]
    return _function(f"derivative_{short(key)}", [program.root, program.derivative], len(program.ranks), fast)


def has_derivative(key: str) -> bool:
    """Whether the derivative by the score is not 1 everywhere."""
    return PROGRAMS[key].derivative is not const(1.0)


@cache
def has_infinite_derivative(key: str) -> bool:
    """Whether the derivative by the score may be infinite where the score is finite."""
    return any(
        x.op in (*EXPONENTIALS, *LOGARITHMS, "sqrt") or (x.op == "div" and not _is_number(x.args[1]))
        for x in nodes(PROGRAMS[key].derivative)
    )


@cache
def has_large_scores(key: str, numbers: tuple[float, ...]) -> bool:
    """Whether scores may be as large as -1e30: the program contains such a number or exp, or reads floats by query or
    by key, which may be a mask written as numbers. (-inf hides a pair, and is not large.)"""
    return any(LARGE < abs(x) < inf for x in numbers) or _program_has_large_scores(key)


@cache
def _program_has_large_scores(key: str) -> bool:
    constants = [x.value for x in nodes(PROGRAMS[key].root) if x.op == "const" and x.kind == "float"]
    return any(LARGE < abs(x) < inf for x in constants) or any(
        x.op in EXPONENTIALS or (x.op == "load" and x.kind == "float" and _is_of_tokens(x))
        for x in nodes(PROGRAMS[key].root)
    )


def _is_of_tokens(load: Expr) -> bool:
    """Whether an index depends on the query alone, or on the key alone. (That of a table of distances: on both.)"""
    return any(len(index.deps & {"i", "j"}) == 1 for index in load.args)


@cache
def site(key: str, n: int, fast: bool) -> Any:
    """The Triton function of the derivative by the value that the program reads at its n-th site."""
    program = PROGRAMS[key]
    return _function(f"site{n}_{short(key)}", [program.sites[n][1]], len(program.ranks), fast)


@cache
def folded(key: str, fast: bool, derivative: bool) -> tuple[Any, Expr, Expr]:
    """(function of q.k, factor, factor of its derivative): the program is the factor times the function. The factor is
    a product of the program's floats and the scale.

    cap * tanh(scale * q.k / cap)   cap      tanh((scale / cap) * q.k)
    scale * q.k - slope * |i - j|   scale    q.k - (slope / scale) * |i - j|

    This saves a multiplication for every pair; the softmax multiplies by a factor anyway. With `derivative` the
    function also returns the derivative by the score, divided by the last factor.
    """
    program = PROGRAMS[key]
    factor, rest = factors(program)
    rate, derivative_rest = derivative_factors(program) if derivative else (const(1.0), rest)
    roots = [rest, derivative_rest] if derivative else [rest]
    return _function(f"folded{len(roots)}_{short(key)}", roots, len(program.ranks), fast), factor, rate


@cache
def bound(key: str) -> float:
    """The largest absolute value of the function that `folded` returns."""
    return 1.0 if factors(PROGRAMS[key])[1].op in ("tanh", "erf", "sigmoid", "sin", "cos") else inf


def factors(program: Program) -> tuple[Expr, Expr]:
    """(factor, rest) of the program; the scale is the number after the program's own."""
    return _factors(program.root, number(program.numbers))


def derivative_factors(program: Program) -> tuple[Expr, Expr]:
    """(factor, rest) of its derivative by the score."""
    return _factors(program.derivative, number(program.numbers))


def _factors(x: Expr, scale: Expr) -> tuple[Expr, Expr]:
    """(u, r) with x = u * r, u a product of numbers, r in terms of q.k instead of the score."""
    one = const(1.0)
    if _is_number(x):
        return x, one
    parts = [_factors(a, scale) for a in x.args] if x.op in ("mul", "div", "add", "sub", *FUNCTIONS) else []
    match x.op:
        case "score":
            return scale, x
        case "mul" | "div" if x.op == "mul" or _is_number(x.args[1]):
            (u, r), (v, s) = parts
            return arithmetic(x.op, u, v), arithmetic(x.op, r, s)
        case "add" | "sub" if sum("score" in a.deps for a in x.args) == 1:
            u = next(u for (u, _), a in zip(parts, x.args, strict=True) if "score" in a.deps)
            terms = (r if v is u else _times(arithmetic("div", v, u), r) for v, r in parts)
            return u, arithmetic(x.op, *terms)
        case op if op in FUNCTIONS:
            ((u, r),) = parts
            return one, function(op, arithmetic("mul", r, u))
    return one, substitute(x, lambda y, args: arithmetic("mul", y, scale) if y.op == "score" else None)


def _times(u: Expr, x: Expr) -> Expr:
    """u * x, with u multiplied into a factor of x that is constant in the tile, if there is one."""
    if x.op == "mul" and not x.args[0].deps & {"score", "i", "j"}:
        return arithmetic("mul", arithmetic("mul", u, x.args[0]), x.args[1])
    return arithmetic("mul", u, x)


def _is_number(x: Expr) -> bool:
    """Whether x is a product of numbers. `value_of` computes it."""
    return x.op in ("number", "const") or (x.op in ("mul", "div") and all(map(_is_number, x.args)))


def value_of(x: Expr, numbers: tuple[float, ...]) -> float:
    """The value of a product of numbers; infinite or nan after a division by zero, as in torch."""
    if x.op in ("number", "const"):
        return float(numbers[x.value] if x.op == "number" else x.value)
    a, b = (value_of(y, numbers) for y in x.args)
    return a * b if x.op == "mul" else float(quotient(a, b))


def _function(name: str, roots: list[Expr], tensors: int, fast: bool) -> Any:
    name += "_fast" if fast else ""
    source = write(name, roots, tensors, fast)
    filename = f"<tilewise {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    space = dict(NAMESPACE, __name__=f"tilewise.generated.{name}")
    exec(compile(source, filename, "exec"), space)
    return triton.jit(space[name])


def write(name: str, roots: list[Expr], tensors: int, fast: bool) -> str:
    """The source of a function that returns the value of each root."""
    lines = [f"def {name}({PARAMETERS}):"]
    names: dict[Expr, str] = {}
    sizes, numbers = bounds(*roots), count()

    def state(x: Expr, indent: str) -> None:
        args = [names[a] for a in x.args]
        if x.kind == "int" and x.op != "load" and not is_narrow(sizes[x]):
            args = [_wide(name) if a.kind == "int" else name for a, name in zip(x.args, args, strict=True)]
        text = _text(x, args, tensors, fast, sizes)
        if x.args or x.op in ("load", "number"):
            names[x] = f"x{next(numbers)}"
            lines.append(f"{indent}{names[x]} = {text}")
        else:
            names[x] = text

    def state_at(r: str, vector: Expr, indent: str) -> str:
        names[R] = r
        for x in vectors(vector):
            if x is not R:
                state(x, indent)
        return names[vector]

    def state_loop(x: Expr) -> None:
        """The sum starts with the first element of the row: its shape is that of the elements."""
        (body,), (n, axis) = x.args, x.value
        form, sign = "tl.cast({}, tl.int64)" if x.kind == "int" else "{}", "|" if x.op == "any" else "+"
        first = state_at("0", body, "    ")
        names[x], r = f"x{next(numbers)}", f"r{next(numbers)}"
        lines.append(f"    {names[x]} = {form.format(first)}")
        lines.append(f"    for {r} in range(1, aux[{n}].sizes[{axis}]):")
        other = state_at(r, body, "        ")
        lines.append(f"        {names[x]} = {names[x]} {sign} {form.format(other)}")

    for x in nodes(*roots):
        if x.op in REDUCTIONS:
            state_loop(x)
        elif not is_vector(x):
            state(x, "    ")
    for x in roots:
        state_at("aux[-1]", x, "    ")
    results = [names[x] if x.kind == "bool" or "score" in x.deps else f"whole({names[x]}, score)" for x in roots]
    return "\n".join([*lines, f"    return {', '.join(results)}", ""])


OPERATORS = """
    add:+ sub:- mul:* lt:< le:<= gt:> ge:>= eq:== ne:!= and:& or:| bitwise_and:& bitwise_or:| bitwise_xor:^
    bitwise_left_shift:<< bitwise_right_shift:>>
"""
BINARY = dict(pair.split(":") for pair in OPERATORS.split())


def _wide(text: str) -> str:
    return f"tl.cast({text}, tl.int64)"


def _text(x: Expr, args: list[str], tensors: int, fast: bool, sizes: dict[Expr, Bounds]) -> str:
    match x.op:
        case "score":
            return "score"
        case "index":
            return str(x.value)
        case "const":
            if x.value in (float("inf"), float("-inf")) or x.value != x.value:
                return f'float("{x.value}")'
            if x.kind == "int" and not is_narrow(sizes[x]):
                return _wide(repr(x.value))
            return f"({x.value!r})" if x.value < 0 else repr(x.value)
        case "number":
            return f"aux[{tensors + x.value}]"
        case "load":
            return _load(x, args, sizes)
        case "float":
            return f"tl.cast({args[0]}, tl.float32)"
        case "int":
            return f"truncated({args[0]})"
        case "div" if x.args[1].op == "const" and x.args[1].value == 0:  # 1.0 / 0.0 raises while Triton compiles
            return f'{args[0]} * float("{quotient(1.0, x.args[1].value)}")'
        case "div":
            return f"{args[0]} * (1.0 / {args[1]})" if not x.args[1].deps else f"{args[0]} / {args[1]}"
        case "floordiv" | "mod" if x.kind == "float":
            rounded = f"tl.floor({args[0]} / {args[1]})"
            return rounded if x.op == "floordiv" else f"{args[0]} - {args[1]} * {rounded}"
        case "floordiv" | "mod":
            if all(sizes[a][0] >= 0 for a in x.args):
                return f"{args[0]} {'//' if x.op == 'floordiv' else '%'} {args[1]}"
            return f"{'floor_divide' if x.op == 'floordiv' else 'floor_remainder'}({args[0]}, {args[1]})"
        case "min" | "max":
            return f"tl.{x.op}imum({args[0]}, {args[1]})"
        case "not":
            return f"{args[0]} == 0"
        case "neg":
            return f"-{args[0]}"
        case "tanh":
            return f"{'fast_tanh' if fast else 'tanh'}({args[0]})"
        case "sigmoid" | "log1p" | "expm1" | "atan":
            return f"{x.op}({args[0]})"
        case "bitwise_left_shift" | "bitwise_right_shift" if sizes[x.args[1]][0] < 0 or sizes[x.args[1]][1] > 31:
            return f"{x.op.removeprefix('bitwise_')}({args[0]}, {args[1]})"
        case op if op in BINARY:
            return f"{args[0]} {BINARY[op]} {args[1]}"
    return f"tl.{x.op}({', '.join(args)})"


def _load(x: Expr, args: list[str], sizes: dict[Expr, Bounds]) -> str:
    tensor = f"aux[{x.value}]"
    pointer = f"{tensor}.ptr"
    for n, (index, text) in enumerate(zip(x.args, args, strict=True)):
        text = text if sizes[index][0] >= 0 else f"tl.maximum({text}, 0)"
        inside = f"tl.minimum({text}, {tensor}.sizes[{n}] - 1)"
        pointer += f" + tl.cast({inside}, tl.int64) * {tensor}.strides[{n}]"
    match x.kind:
        case "float":
            return f"tl.load({pointer}).to(tl.float32)"
        case "int":
            return f"integer(tl.load({pointer}))"
    return f"tl.load({pointer})"
