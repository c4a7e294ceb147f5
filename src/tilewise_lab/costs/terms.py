"""The cost of score terms: operations per pair, counted in the expressions of the mods, and bytes of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewise.mods import expr
from tilewise.mods.blocks import BlockMask
from tilewise.mods.expr import Expr
from tilewise.mods.program import PROGRAMS
from tilewise.request import Request
from tilewise_lab.costs.cost import ScoreTerms

# In additions, as timed on an H200 (4 x 4096 tokens, 16 heads of 128, causal):
SPECIAL = 3  # a special function or a quotient
LOAD = 2  # a table read at a query's or a key's position
BIAS = 10  # a bias read for each pair
HASH = 12  # dropout's hash of a pair
FREE = ("score", "index", "number", "const")


def operations(*roots: Expr) -> int:
    """Operations on one pair: those that depend on its score or on both of its positions.

    >>> from tilewise import mods
    >>> operations(mods.softcap(30.0).program.root)  # cap * tanh(score / cap)
    7
    """
    return sum(map(weight, expr.nodes(*roots)))


def repeated(root: Expr, tensors: Sequence[Tensor]) -> int:
    """Operations of sums over rows that `operations` leaves out: it counts only one iteration of each sum."""
    sums = [(x, tensors[x.value[0]].shape[x.value[1]]) for x in expr.nodes(root) if x.op in expr.REDUCTIONS]
    return sum((length - 1) * sum(map(weight, (x, *expr.vectors(x.args[0])))) for x, length in sums)


def weight(x: Expr) -> int:
    if x.op in FREE or not ("score" in x.deps or {"i", "j"} <= x.deps or (x.op == "load" and x.deps & {"i", "j"})):
        return 0
    return LOAD if x.op == "load" else SPECIAL if x.op in (*expr.FUNCTIONS, "div") else 1


def count(request: Request, names: tuple[str, ...], blocks: BlockMask | None = None) -> ScoreTerms | None:
    """The cost of a call's score terms, or None if it has none."""
    spec = request.spec
    if not names:
        return None
    roots = [PROGRAMS[key].root for key in (spec.score_mod, spec.mask_mod) if key is not None]
    derivatives = [PROGRAMS[spec.score_mod].derivative] if spec.score_mod is not None else []
    simple = BIAS * (request.bias is not None) + HASH * (spec.dropout_p > 0)
    for key, given in ((spec.score_mod, request.score), (spec.mask_mod, request.mask)):
        simple += 0 if key is None else repeated(PROGRAMS[key].root, given)
    tensors = [x for x in (request.bias, *request.score, *request.mask) if x is not None]
    return ScoreTerms(
        names,
        forward=simple + operations(*roots),
        backward=simple + operations(*roots, *derivatives),
        read=sum(map(size, tensors)),
        written=sum(size(x) for x in tensors if x.requires_grad),
        visited=1.0 if blocks is None else blocks.density(),
        masked=spec.mask_mod is not None,
        dropout=spec.dropout_p > 0,
    )


def size(x: Tensor) -> int:
    """Bytes of a tensor; broadcast dimensions count once."""
    n = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        n *= length if stride else 1
    return n
