"""Masks as bands around the diagonal, which kernels compute without a mask mod, and the rest of them."""

from __future__ import annotations

from ..request import FAR
from .expr import Expr, logic, negative
from .program import Mod, Program, register

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def split(mod: Mod) -> tuple[int, int, Mod | None]:
    """(before, after, rest): the mask is true where j >= i - before, j <= i + after and `rest` is true (None: always).

    >>> from tilewise.mods.modifier import mask_mod
    >>> @mask_mod
    ... def window(b, h, q_idx, kv_idx, ids):
    ...     return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (ids[q_idx] == ids[kv_idx])
    >>> import torch
    >>> before, after, rest = split(window(torch.zeros(4, dtype=torch.int32)))
    >>> before, after, rest.name
    (127, 0, 'window')
    """
    before, after = FAR, FAR
    left: list[Expr] = []
    for part in _conjuncts(mod.program.root):
        sides = _sides(part)
        if sides is None:
            left.append(part)
        else:
            before, after = min(before, sides[0]), min(after, sides[1])
    left = [x for x in left if not (x.op == "const" and x.value is True)]
    if not left:
        return before, after, None
    if (before, after) == (FAR, FAR):
        return before, after, mod
    root = left[0]
    for x in left[1:]:
        root = logic("and", root, x)
    key = register(Program(root, mod.program.ranks, mod.program.numbers))
    return before, after, mod._replace(key=key)


def _conjuncts(x: Expr) -> list[Expr]:
    return [part for a in x.args for part in _conjuncts(a)] if x.op == "and" else [x]


def _sides(x: Expr) -> tuple[int, int] | None:
    """(before, after) of a comparison of i - j with a number."""
    if x.op not in MIRRORED:
        return None
    a, b = x.args
    if b.op == "abs":
        return _distance(MIRRORED[x.op], b.args[0], a)
    if a.op == "abs":
        return _distance(x.op, a.args[0], b)
    one, other = _linear(a), _linear(b)
    if one is None or other is None:
        return None
    return _bounds(x.op, tuple(p - q for p, q in zip(one, other, strict=True)))


def _distance(op: str, x: Expr, limit: Expr) -> tuple[int, int] | None:
    """|x| <= limit."""
    found = _linear(x)
    if op not in ("lt", "le") or limit.op != "const" or limit.kind != "int" or found is None:
        return None
    if found[:2] not in ((1, -1), (-1, 1)):
        return None
    reach, sign = limit.value - (op == "lt"), found[0]
    return reach + sign * found[2], reach - sign * found[2]


def _bounds(op: str, form: tuple[int, ...]) -> tuple[int, int] | None:
    """Of form = (a, b, c): a i + b j + c compared with 0."""
    if form[:2] == (-1, 1):
        op, form = MIRRORED[op], tuple(-x for x in form)
    if form[:2] != (1, -1):
        return None
    c = form[2]
    return {"ge": (FAR, c), "gt": (FAR, c - 1), "le": (-c, FAR), "lt": (-c - 1, FAR), "eq": (-c, c)}[op]


def _linear(x: Expr) -> tuple[int, int, int] | None:
    """(a, b, c) of a i + b j + c."""
    if x.kind != "int":
        return None
    if x.op == "const":
        return 0, 0, x.value
    if x.op == "index":
        return {"i": (1, 0, 0), "j": (0, 1, 0)}.get(x.value)
    if x.op == "neg":
        inner = _linear(x.args[0])
        return None if inner is None else (-inner[0], -inner[1], -inner[2])
    if x.op in ("add", "sub"):
        one, other = _linear(x.args[0]), _linear(x.args[1] if x.op == "add" else negative(x.args[1]))
        return None if one is None or other is None else (one[0] + other[0], one[1] + other[1], one[2] + other[2])
    return None
