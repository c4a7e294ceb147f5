"""Reverse-mode differentiation in a page: numbers that remember how they were made.

>>> a, w, b = Value(2.0, "a"), Value(3.0, "w1"), Value(1.0, "b1")
>>> phi = (a * w + b) ** 2
>>> phi.backward()
>>> phi.value, w.gradient  # 2a(aw + b)
(49.0, 28.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


class Value:
    """A number, the values it was made from, and its derivative with respect to each of them."""

    def __init__(self, value: float, name: str = "", op: str = "", made_from: tuple[tuple[Value, float], ...] = ()):
        self.value, self.name, self.op, self.made_from = value, name, op, made_from
        self.gradient = 0.0

    def named(self, name: str) -> Value:
        self.name = name
        return self

    def __add__(self, other: Value | float) -> Value:
        x = _value(other)
        return Value(self.value + x.value, op="+", made_from=((self, 1.0), (x, 1.0)))

    def __mul__(self, other: Value | float) -> Value:
        x = _value(other)
        return Value(self.value * x.value, op="×", made_from=((self, x.value), (x, self.value)))

    def __pow__(self, n: float) -> Value:
        return Value(self.value**n, op=f"^{n:g}", made_from=((self, n * self.value ** (n - 1)),))

    def exp(self) -> Value:
        e = math.exp(self.value)
        return Value(e, op="exp", made_from=((self, e),))

    def log(self) -> Value:
        return Value(math.log(self.value), op="log", made_from=((self, 1 / self.value),))

    def __neg__(self) -> Value:
        return self * -1.0

    def __sub__(self, other: Value | float) -> Value:
        return self + -_value(other)

    def __truediv__(self, other: Value | float) -> Value:
        return self * _value(other) ** -1.0

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: float) -> Value:
        return -self + other

    def order(self) -> list[Value]:
        """Every value this one depends on, each after those it was made from."""
        seen: dict[int, Value] = {}

        def visit(x: Value) -> None:
            if id(x) not in seen:
                for parent, _ in x.made_from:
                    visit(parent)
                seen[id(x)] = x

        visit(self)
        return list(seen.values())

    def backward(self) -> None:
        """∂self/∂x for every x: from the end, each value passes its gradient on, times the local derivative."""
        for x in self.order():
            x.gradient = 0.0
        self.gradient = 1.0
        for x in reversed(self.order()):
            for parent, local in x.made_from:
                parent.gradient += x.gradient * local

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "graph", "nodes": [{id, name, op, value, gradient, inputs: [{id, local}]}]}, inputs first."""
        nodes = self.order()
        number = {id(x): i for i, x in enumerate(nodes)}
        return {
            "kind": "graph",
            "nodes": [
                {
                    "id": number[id(x)],
                    "name": x.name,
                    "op": x.op,
                    "value": x.value,
                    "gradient": x.gradient,
                    "inputs": [{"id": number[id(parent)], "local": local} for parent, local in x.made_from],
                }
                for x in nodes
            ],
        }


def _value(x: Value | float) -> Value:
    return x if isinstance(x, Value) else Value(float(x))


def notes_example(a: float = 2.0, w1: float = 3.0, b1: float = 1.0) -> dict[str, Any]:
    """φ = y₃ = y₂², y₂ = y₁ + b₁, y₁ = a w₁, with the gradients: ∂φ/∂w₁ = 1 · 2y₂ · 1 · a.

    >>> {node["name"]: node["gradient"] for node in notes_example()["nodes"]}
    {'a': 42.0, 'w1': 28.0, 'y1': 14.0, 'b1': 14.0, 'y2': 14.0, 'φ': 1.0}
    """
    y1 = (Value(a, "a") * Value(w1, "w1")).named("y1")
    y2 = (y1 + Value(b1, "b1")).named("y2")
    phi = (y2**2).named("φ")
    phi.backward()
    return phi.to_dict()


def edges(graph: dict[str, Any]) -> Iterator[tuple[int, int, float]]:
    """(from, to, gradient that flows back along the edge)"""
    for node in graph["nodes"]:
        for parent in node["inputs"]:
            yield parent["id"], node["id"], node["gradient"] * parent["local"]
