"""The tables in tests/tables: rows of options in which every allowed pair of values occurs, as few as a greedy search
finds. `FACTORS` says which values an option has and which do not go together; the tests run every row.

    python -m tests.covering    # writes the tables again, after a change of FACTORS
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"
MOST_ROWS = 60
TRIES = 60  # rows that are drawn for each one that is kept

Row = dict[str, str]
Pair = tuple[str, str, str, str]  # option, value, option, value


@dataclass(frozen=True)
class Factors:
    """options: the values of each, by name. rules: each says whether a row that has all names of the rule is allowed.
    A rule is a function whose arguments are names of options."""

    options: dict[str, tuple[str, ...]]
    rules: tuple[Callable[..., bool], ...] = ()

    def allows(self, row: Row) -> bool:
        """Whether no rule forbids a row, which may lack options."""
        for rule in self.rules:
            names = rule.__code__.co_varnames[: rule.__code__.co_argcount]
            if all(name in row for name in names) and not rule(*(row[name] for name in names)):
                return False
        return True

    def complete(self, row: Row) -> bool:
        """Whether a row can be completed."""
        if not self.allows(row):
            return False
        missing = [name for name in self.options if name not in row]
        if not missing:
            return True
        return any(self.complete(row | {missing[0]: value}) for value in self.options[missing[0]])

    def pairs(self) -> list[Pair]:
        """Every pair of values that a row may have."""
        return [
            (a, x, b, y)
            for a, b in combinations(self.options, 2)
            for x in self.options[a]
            for y in self.options[b]
            if self.complete({a: x, b: y})
        ]


def pairs_of(row: Row) -> Iterator[Pair]:
    for (a, x), (b, y) in combinations(row.items(), 2):
        yield a, x, b, y


def covering(factors: Factors) -> list[Row]:
    """Rows in which every pair of `factors.pairs()` occurs. The same in every run."""
    draw = random.Random(0).random  # the one function of random that no version of Python changes
    order = list(factors.options)
    left = dict.fromkeys(factors.pairs())
    rows = []
    while left:
        candidates = [_candidate(factors, left, draw) for _ in range(TRIES)]
        best = max(candidates, key=lambda row: sum(pair in left for pair in _ordered(row, order)))
        row = {name: best[name] for name in order}
        rows.append(row)
        for pair in pairs_of(row):
            left.pop(pair, None)
    return rows


def _ordered(row: Row, order: list[str]) -> Iterator[Pair]:
    return pairs_of({name: row[name] for name in order if name in row})


def _candidate(factors: Factors, left: dict[Pair, None], draw: Callable[[], float]) -> Row:
    """A row that has a pair that is left, and of every other option the value that makes most pairs that are left."""
    remaining = list(left)
    a, x, b, y = remaining[int(draw() * len(remaining))]
    row = {a: x, b: y}
    names = sorted((name for name in factors.options if name not in row), key=lambda _: draw())
    order = {name: n for n, name in enumerate(factors.options)}
    for name in names:

        def gain(value: str, name: str = name) -> int:
            made = (
                (name, value, other, row[other]) if order[name] < order[other] else (other, row[other], name, value)
                for other in row
            )
            return sum(pair in left for pair in made)

        values = sorted(factors.options[name], key=lambda _: draw())
        values.sort(key=gain, reverse=True)
        row[name] = next(value for value in values if factors.complete(row | {name: value}))
    return row


def text(rows: list[Row]) -> str:
    """A table of tab-separated values, whose columns are aligned by blanks."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    cells = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join("\t".join(line).rstrip() + "\n" for line in cells)


def table(name: str) -> list[Row]:
    """The rows of a table."""
    head, *lines = (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    names = [cell.strip() for cell in head.split("\t")]
    return [dict(zip(names, (cell.strip() for cell in line.split("\t")), strict=True)) for line in lines]


def label(row: Row) -> str:
    """The id of a test: the values that are not the plain ones."""
    return " ".join(value for value in row.values() if value not in ("-", "no"))


def rows(name: str) -> Any:
    """The decorator of a test that runs for each `row` of a table."""
    import pytest

    found = table(name)
    return pytest.mark.parametrize("row", found, ids=[f"{n}: {label(row)}" for n, row in enumerate(found, 1)])


def every_value(name: str) -> Any:
    """The decorator of a test that runs for rows of a table in which every value occurs, and with --all for each row:
    for a test that takes seconds."""
    import pytest

    found, seen = table(name), set[tuple[str, str]]()
    params = []
    left = list(found)
    chosen = []
    while left:
        best = max(left, key=lambda row: len(set(row.items()) - seen))
        if not set(best.items()) - seen:
            break
        seen |= set(best.items())
        chosen.append(best)
        left.remove(best)
    for n, row in enumerate(found, 1):
        marks = () if row in chosen else pytest.mark.full
        params.append(pytest.param(row, marks=marks, id=f"{n}: {label(row)}"))
    return pytest.mark.parametrize("row", params)


def cases(names: str, always: Iterable[Any], more: Iterable[Any] = (), ids: Any = None) -> Any:
    """The decorator of a test that runs for each of `always`, and with --all for the others of `more` too."""
    import pytest

    always = list(always)
    known = [x for x in always if isinstance(x, str | int | tuple)]

    def full(values: Any) -> Any:
        if hasattr(values, "marks"):
            return pytest.param(*values.values, marks=[*values.marks, pytest.mark.full], id=values.id)
        return pytest.param(*(values if "," in names else (values,)), marks=pytest.mark.full)

    others = [full(x) for x in more if not (isinstance(x, str | int | tuple) and x in known)]
    return pytest.mark.parametrize(names, [*always, *others], ids=ids)


def each_once(ids: Any = None, **options: Iterable[Any]) -> Any:
    """The decorator of a test that runs with every value of each option once or more, and with --all for each
    combination of them."""
    values = [list(x) for x in options.values()]
    always = [tuple(n % len(x) for x in values) for n in range(max(map(len, values)))]
    more = [x for x in product(*(range(len(x)) for x in values)) if x not in always]
    found = ([tuple(x[n] for x, n in zip(values, at, strict=True)) for at in row] for row in (always, more))
    return cases(", ".join(options), *found, ids=ids)


HEADS = ("2/2", "4/2", "3/1")
MASKS = ("-", "document", "prefix_lm", "window_with_globals", "neighbourhood_2d", "strided_sparse")


def attention() -> Factors:
    """Calls of `attention` and `attention_varlen` with gradients. "-": without the option."""
    return Factors(
        {
            "tokens": ("equal", "more keys", "more queries", "one query", "packed", "packed apart"),
            "dtype": ("float32", "float16", "bfloat16"),
            "heads": HEADS,
            "dims": ("square", "wide", "uneven"),
            "band": ("-", "causal", "window", "left", "sliding", "diagonal"),
            "scale": ("-", "0.3", "-0.2"),
            "softcap": ("no", "softcap"),
            "score_mod": ("-", "relative", "distance_table", "gated", "per_key", "t5"),
            "alibi": ("-", "alibi h", "alibi bh"),
            "bias": ("-", "bias bhij", "bias ij", "bias bj", "bias h"),
            "sinks": ("no", "sinks"),
            "dropout": ("no", "dropout"),
            "mask_mod": MASKS,
            "lists": ("no", "lists"),
            "layout": ("bshd", "bhsd", "bdsh", "qkv", "strided"),
            "max_logit": ("no", "max_logit"),
            "grads": ("all", "q", "kv", "terms"),
        },
        rules=(lambda mask_mod, lists: mask_mod != "-" or lists == "no",),
    )


def layouts() -> Factors:
    """Strides of every tensor; nothing else."""
    names = ("bshd", "bhsd", "bdsh", "qkv", "strided", "batch", "heads")
    return Factors(
        {
            "q": names,
            "k": names,
            "v": names,
            "dout": names,
            "tokens": ("equal", "one query", "packed"),
            "dims": ("square", "uneven"),
            "dtype": ("float32", "bfloat16"),
        }
    )


def plain() -> Factors:
    """Calls without score terms, which torch's fused kernels compute. More than 512 keys are several of their tiles."""
    names = ("bshd", "bhsd", "bdsh", "qkv", "strided")
    return Factors(
        {
            "tokens": ("1x1", "1x40", "1x700", "33x33", "20x50", "50x20", "600x600", "300x700"),
            "dtype": ("float32", "float16", "bfloat16", "float64"),
            "heads": HEADS,
            "dims": ("1", "5", "16", "40", "64"),
            "band": ("full", "causal", "wide"),
            "scale": ("-", "0.3", "0", "-0.2"),
            "batch": ("1", "3"),
            "layout": names,
            "dout": ("bshd", "heads", "strided"),
            "dlse": ("no", "dlse"),
        },
    )


def nan() -> Factors:
    """A number that is not finite, and what may hide it."""
    return Factors(
        {
            "where": ("q", "k", "v", "dout"),
            "value": ("nan", "inf", "-inf"),
            "tokens": ("equal", "more keys", "more queries", "packed", "packed apart"),
            "dtype": ("float32", "bfloat16"),
            "heads": HEADS,
            "dims": ("square", "wide", "uneven"),
            "band": ("causal", "window", "left", "sliding"),
            "softcap": ("no", "softcap"),
            "sinks": ("no", "sinks"),
            "dropout": ("no", "dropout"),
            "mask_mod": MASKS,
            "lists": ("no", "lists"),
        },
        rules=(lambda mask_mod, lists: mask_mod != "-" or lists == "no",),
    )


def cache() -> Factors:
    """Calls of `attention_kv`. `stored`: the format of the cache and its scales."""
    return Factors(
        {
            "queries": ("one", "three", "packed", "packed padded"),
            "new": ("-", "as many", "more"),
            "memory": ("dense", "pages of 1", "pages of 3", "pages of 8", "csr of 2", "csr of 16"),
            "layout": ("plain", "interleaved", "heads_first", "wide"),
            "heads": ("4/2", "6/1", "3/3"),
            "dims": ("square", "uneven", "odd"),
            "dtype": ("float32", "float16", "bfloat16"),
            "stored": (
                "-",
                "16 bits",
                "e4m3 none",
                "e4m3 head",
                "e5m2 batch",
                "int8 token",
                "int4 group",
                "int8, int4",
            ),
            "band": ("causal", "full", "window", "both sides"),
            "scale": ("-", "-0.3"),
            "softcap": ("no", "softcap"),
            "sinks": ("no", "sinks"),
            "alibi": ("no", "alibi"),
            "mod": ("-", "mask_mod", "score_mod"),
            "tree": ("-", "tree", "tree bits"),
            "starts": ("no", "starts"),
            "split": ("-", "one split", "128 keys"),
            "plan": ("no", "plan"),
            "out": ("no", "out"),
            "max_logit": ("no", "max_logit"),
        },
        rules=(
            lambda stored, dims: not (stored.startswith("int4") or stored.endswith("int4")) or dims != "odd",
            lambda tree, new: tree == "-" or new == "as many",
        ),
    )


TABLES: dict[str, Callable[[], Factors]] = {
    "attention": attention,
    "layouts": layouts,
    "plain": plain,
    "nan": nan,
    "cache": cache,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, factors in TABLES.items():
        made = covering(factors())
        (FOLDER / f"{name}.tsv").write_text(text(made), encoding="utf-8")
        print(f"{name}: {len(made)} rows")
