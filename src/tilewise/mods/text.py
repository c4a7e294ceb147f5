"""Programs as text and back: the key of a mod, and its form in pickles, saved graphs and other processes.

    tilewise1;;1;4;score;number:0;div 0 1;tanh 2;mul 1 3          cap * tanh(score / cap)

The version, the ranks of the tensors, the number of floats, the node of the result (and of the derivative, if that was
given), the nodes. A node is its operation, the value of a leaf, and the numbers of its arguments. Reading executes
nothing: operations are looked up in tables, and the kinds of every node's arguments are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from ..errors import AttentionError
from . import expr
from .expr import BITWISE, COMPARISONS, FUNCTIONS, INDICES, REDUCTIONS, Expr

VERSION = "tilewise1"
NODES = 4096  # in a program
LONGEST = 1 << 18  # characters
RANK = 16

NUMBERS = ("int", "float")
# operation -> the kinds of its arguments, one tuple for each form
SIGNATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    **{op: tuple((kind, kind) for kind in NUMBERS) for op in ("add", "sub", "mul", "floordiv", "mod", "min", "max")},
    **{op: tuple((kind, kind) for kind in NUMBERS) for op in COMPARISONS},
    **dict.fromkeys(FUNCTIONS, (("float",),)),
    **dict.fromkeys(BITWISE, (("int", "int"),)),
    **dict.fromkeys(("and", "or"), (("bool", "bool"),)),
    **dict.fromkeys(("neg", "abs"), (("int",), ("float",))),
    "div": (("float", "float"),),
    "not": (("bool",),),
    "where": tuple(("bool", kind, kind) for kind in ("bool", *NUMBERS)),
    "float": (("int",), ("bool",)),
    "int": (("float",),),
}


class Parts(NamedTuple):
    """The fields of a `Program`."""

    root: Expr
    ranks: tuple[int, ...]
    numbers: int
    derivative: Expr | None


def write(parts: Parts) -> str:
    """The text of a program. Equal programs have equal texts."""
    results = [x for x in (parts.root, parts.derivative) if x is not None]
    order = {x: n for n, x in enumerate(expr.nodes(*results))}
    if len(order) > NODES:
        raise AttentionError("operations in a mod", len(order), f"at most {NODES}")
    header = (_numbers(parts.ranks), str(parts.numbers), _numbers(order[x] for x in results))
    return ";".join((VERSION, *header, *(_spelled(x, order) for x in order)))


def _numbers(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


def _spelled(x: Expr, order: dict[Expr, int]) -> str:
    if x.op in REDUCTIONS:
        return f"{x.op}:{x.value[0]}:{x.value[1]} {order[x.args[0]]}"
    value = "" if x.value is None else f":{x.value if x.op == 'index' else repr(x.value)}"
    kind = f":{x.kind}" if x.op == "load" else ""
    return " ".join((f"{x.op}{value}{kind}", *(str(order[a]) for a in x.args)))


def read(text: str) -> Parts:
    """The program of a text that `write` returned. Raises AttentionError for any other text."""
    if not isinstance(text, str) or len(text) > LONGEST or not text.startswith(f"{VERSION};"):
        _refuse(text, f"one that begins with {VERSION};")
    try:
        _, ranks_, numbers_, results, *spelled = text.split(";")
        ranks, numbers = tuple(map(int, ranks_.split())), int(numbers_)
        if len(spelled) > NODES or numbers < 0 or any(not 0 <= rank <= RANK for rank in ranks):
            _refuse(text, f"at most {NODES} nodes, tensors of at most {RANK} axes")
        nodes: list[Expr] = []
        for one in spelled:
            nodes.append(_node(one, nodes, ranks, numbers))
        root, *derivative = (nodes[_natural(n)] for n in results.split())
    except (ValueError, IndexError, ArithmeticError) as error:
        if isinstance(error, AttentionError):
            raise
        raise AttentionError("a program", f"{text[:60]!r} ({error})", "one that tilewise wrote") from error
    parts = Parts(root, ranks, numbers, derivative[0] if derivative else None)
    if (
        len(derivative) > 1
        or (derivative and derivative[0].kind != "float")
        or root.kind == "int"
        or write(parts) != text
    ):
        _refuse(text, "one spelled as tilewise spells it")
    if any(map(expr.is_vector, (root, *derivative))):
        _refuse(text, "one whose result is a number")
    return parts


def _natural(digits: str) -> int:
    if not digits.isdecimal():
        raise ValueError(f"{digits[:20]!r} for a number")
    return int(digits)


def _node(spelled: str, nodes: list[Expr], ranks: tuple[int, ...], numbers: int) -> Expr:
    head, *places = spelled.split(" ")
    op, *values = head.split(":")
    args = [nodes[_natural(n)] for n in places]
    kinds = tuple(a.kind for a in args)
    match op, values:
        case "score", [] if not args:
            return expr.SCORE
        case "index", [name] if not args and name in INDICES:
            return expr.node("index", value=name, kind="int")
        case "const", [value] if not args:
            return expr.const(_constant(value))
        case "number", [n] if not args and _natural(n) < numbers:
            return expr.number(int(n))
        case "load", [n, ("float" | "int" | "bool") as kind] if kinds == ("int",) * ranks[_natural(n)]:
            return expr.load(int(n), *args, kind=kind)
        case (("sum" | "any"), [n, axis]) if len(args) == 1 and _natural(axis) < ranks[_natural(n)]:
            return expr.reduced(op, args[0], (int(n), int(axis)))
        case _, [] if kinds in SIGNATURES.get(op, ()):
            is_bool = op in (*COMPARISONS, "and", "or", "not")
            return expr.node(op, *args, kind="bool" if is_bool else op if op in NUMBERS else kinds[-1])
    raise ValueError(f"no operation {spelled[:40]!r} of {', '.join(kinds) or 'nothing'}")


def _constant(spelled: str) -> bool | int | float:
    if spelled in ("True", "False"):
        return spelled == "True"
    return int(spelled) if spelled.removeprefix("-").isdecimal() else float(spelled)


def _refuse(text: object, expected: str) -> NoReturn:
    raise AttentionError("a program", repr(text)[:60], expected)
