"""The course's formulas are LaTeX. Notebooks and pages take them as they are; a terminal gets them as text.

>>> text(r"l \\leftarrow l \\cdot e^{m - m'} + \\sum_j \\exp(S_{ij} - m')")
"l ← l · e^{m - m'} + Σⱼ exp(Sᵢⱼ - m')"
>>> text(r"O = \\mathrm{softmax}\\left(\\frac{Q K^\\top}{\\sqrt{d}}\\right) V")
'O = softmax(Q Kᵀ / √d) V'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SYMBOLS = {
    "cdot": "·", "times": "×", "le": "≤", "ge": "≥", "ne": "≠", "approx": "≈", "infty": "∞", "leftarrow": "←",
    "to": "→", "Rightarrow": "⇒", "sum": "Σ", "prod": "Π", "partial": "∂", "Delta": "Δ", "nabla": "∇", "alpha": "α",
    "delta": "δ", "varphi": "φ", "circ": "∘", "top": "ᵀ", "in": "∈", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈",
    "rceil": "⌉", "ldots": "…", "cdots": "⋯", "cup": "∪", "oplus": "⊕", "checkmark": "✓", "ast": "∗", "pm": "±",
    "{": "{", "}": "}", "%": "%", "_": "_", "quad": "   ", "qquad": "      ", ",": " ", ";": " ", "!": "", "mid": "|",
}  # fmt: skip
WORDS = ("log", "exp", "max", "min", "tanh", "sin", "cos")  # functions, set upright
FONTS = ("mathrm", "text", "operatorname", "mathbb")
DOUBLE = {"R": "ℝ"}
LOW = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
HIGH = dict(
    zip("0123456789+-=()abcdefghijklmnoprstuvwxyzᵀ∗", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀ*", strict=True)
)
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|\d+(?:[.,]\d+)*|.", re.S)


@dataclass
class Node:
    """kind: row, symbol, number, word, script, frac, sqrt, table; `parts` are what it is made of."""

    kind: str
    value: str = ""
    parts: list[Node] = field(default_factory=list)


class Reader:
    def __init__(self, source: str) -> None:
        self.tokens: list[str] = TOKEN.findall(source)
        self.at = 0

    def next(self) -> str:
        if self.at == len(self.tokens):
            raise ValueError("a formula that ends too soon")
        self.at += 1
        return self.tokens[self.at - 1]

    def row(self, until: Callable[[str], bool] = lambda token: False) -> Node:
        found = Node("row")
        while self.at < len(self.tokens) and not until(self.tokens[self.at]):
            found.parts.append(self.scripted())
        return found

    def scripted(self) -> Node:
        base = self.atom()
        low = high = None
        while self.at < len(self.tokens) and self.tokens[self.at] in "_^":
            if self.next() == "_":
                low = self.atom()
            else:
                high = self.atom()
        if low is None and high is None:
            return base
        return Node("script", parts=[base, low or Node("row"), high or Node("row")])

    def atom(self) -> Node:
        token = self.next()
        if token == "{":
            inside = self.row(lambda t: t == "}")
            self.next()
            return inside
        if token.isspace():
            return Node("space")
        if token[0].isdigit():
            return Node("number", token)
        if token[0] != "\\":
            return Node("symbol", token)
        return self.command(token[1:])

    def command(self, name: str) -> Node:
        if name in ("left", "right"):
            token = self.next()
            return Node("symbol", "" if token == "." else SYMBOLS.get(token[1:], token))
        if name in FONTS:
            word = self.raw()
            return Node("symbol", DOUBLE[word]) if name == "mathbb" else Node("word", word)
        if name in WORDS:
            return Node("word", name)
        if name == "frac":
            return Node("frac", parts=[self.atom(), self.atom()])
        if name == "sqrt":
            return Node("sqrt", parts=[self.atom()])
        if name == "begin":
            return self.table()
        if name not in SYMBOLS:
            raise ValueError(f"\\{name} is no command that the course's formulas know")
        return Node("space", SYMBOLS[name]) if not SYMBOLS[name].strip() else Node("symbol", SYMBOLS[name])

    def raw(self) -> str:
        """The text in braces, as it stands."""
        start = self.at = self.at + 1
        while self.next() != "}":
            pass
        return "".join(self.tokens[start : self.at - 1]).replace("\\_", "_")

    def table(self) -> Node:
        """aligned or pmatrix: rows end with \\\\, cells with &."""
        found = Node("table", self.raw(), [Node("row")])
        while self.tokens[self.at] != "\\end":
            found.parts[-1].parts.append(self.row(lambda t: t in ("&", "\\\\", "\\end")))
            if self.tokens[self.at] != "\\end" and self.next() == "\\\\":
                found.parts.append(Node("row"))
        self.next()
        self.raw()
        return found


def text(source: str) -> str:
    """One formula as plain text; the rows of a table are lines."""
    lines = _plain(Reader(source.strip()).row()).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _plain(node: Node) -> str:
    match node.kind:
        case "space":
            return node.value or " "
        case "symbol" | "number" | "word":
            return node.value
        case "row":
            return "".join(map(_plain, node.parts))
        case "sqrt":
            return "√" + _grouped(_plain(node.parts[0]))
        case "frac":
            over, under = (_plain(part) for part in node.parts)
            return f"{_grouped(over, sums_only=True)} / {_grouped(under)}"
        case "script":
            base, low, high = map(_plain, node.parts)
            return base + _script(low.strip(), LOW, "_") + _script(high.strip(), HIGH, "^")
        case "table":
            rows = [[_plain(cell).strip() for cell in row.parts] for row in node.parts]
            if node.value == "pmatrix":
                return "[" + "; ".join("  ".join(row) for row in rows) + "]"
            widths = [max(len(row[n]) if n < len(row) else 0 for row in rows) for n in range(max(map(len, rows)))]
            return "\n".join(" ".join(f"{c:<{widths[n]}}" for n, c in enumerate(row)).rstrip() for row in rows)
    raise AssertionError(node.kind)


def _grouped(words: str, *, sums_only: bool = False) -> str:
    """In parentheses, if it is more than one thing (for a numerator: a sum)."""
    bare = re.sub(r"\([^()]*\)", "", words)
    simple = re.search(r" [+-] ", bare) is None if sums_only else re.fullmatch(r"\S+", bare) is not None
    return words if simple else f"({words})"


def _script(words: str, letters: dict[str, str], mark: str) -> str:
    if not words:
        return ""
    if all(letter in letters for letter in words):
        return "".join(letters[letter] for letter in words)
    return f"{mark}{words}" if re.fullmatch(r"[\w'∞]+|\W", words) else f"{mark}{{{words}}}"


FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$", re.S)


def formulas(words: str) -> Iterator[str]:
    """
    >>> list(formulas("with $a$ and $$b$$"))
    ['a', 'b']
    """
    for display, inline in FORMULA.findall(_without_code(words)):
        yield (display or inline).strip()


def for_terminal(words: str) -> str:
    """Markdown whose formulas are text: those on lines of their own indented, the others in place.

    >>> print(for_terminal("with $x_i$:"))
    with xᵢ:
    """

    def one(found: re.Match[str]) -> str:
        display, inline = found.groups()
        if display is None:
            return text(inline)
        return "\n".join("    " + line for line in text(display).splitlines())

    return FORMULA.sub(one, words)


def _without_code(words: str) -> str:
    return re.sub(r"`[^`\n]*`", "", words)
