"""Each rung of softmax equals the one before; the numbers are those of the worked example x = [3, 2, 5, 1]."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise_lab.derivation import softmax
from tilewise_lab.derivation.softmax import State

X = torch.tensor([3.0, 2.0, 5.0, 1.0], dtype=torch.float64)
CORRECT = [softmax.safe, softmax.online]

vectors = st.lists(st.floats(-50, 50), min_size=1, max_size=12).map(lambda x: torch.tensor(x, dtype=torch.float64))
quick = settings(max_examples=50, deadline=None, derandomize=True)


class CountLoads:
    """Counts the reads of single elements."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.new_zeros, self.loads = x, x.shape, x.new_zeros, 0

    def __getitem__(self, index: object) -> Tensor:
        self.loads += 1
        return self.x[index]


def single(x: Tensor) -> State:
    return State(x, torch.ones_like(x))


@pytest.mark.parametrize("rung", [softmax.naive, *CORRECT])
def test_worked_example(rung) -> None:
    assert_close(rung(X), torch.tensor([0.112457, 0.041371, 0.830953, 0.015219]).double(), atol=1e-6, rtol=0)


def test_worked_example_states() -> None:
    states = list(softmax.online_states(X))
    assert [m.item() for m, _ in states] == [3, 3, 5, 5]
    assert states[2].l.item() == pytest.approx((1 + math.exp(-1)) * math.exp(3 - 5) + 1)
    assert [round(l.item(), 6) for _, l in states] == [1, 1.367879, 1.185122, 1.203438]
    assert round(softmax.logsumexp(X).item(), 6) == 5.185182


def test_worked_example_corrections() -> None:
    maxima = [-math.inf, *(m.item() for m, _ in softmax.online_states(X))]
    factors = [softmax.correction(torch.tensor(a), torch.tensor(b)).item() for a, b in itertools.pairwise(maxima)]
    assert factors == pytest.approx([0, 1, math.exp(-2), 1])


def test_local_max_is_wrong() -> None:
    wrong, right = list(softmax.wrong_local_max_states(X)), list(softmax.online_states(X))
    assert [m for m, _ in wrong] == [m for m, _ in right]
    assert round(wrong[2].l.item(), 6) == 2.367879
    assert round(right[2].l.item(), 6) == 1.185122


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 88.72), (torch.float16, 11.09)])
def test_naive_overflows_where_safe_does_not(dtype: torch.dtype, limit: float) -> None:
    below, above = torch.tensor([[limit - 0.03], [limit + 0.03]], dtype=dtype)
    assert softmax.naive(below).item() == 1
    assert softmax.naive(above).isnan().item()
    assert all(rung(above).item() == 1 for rung in CORRECT)


@pytest.mark.parametrize(("rung", "passes"), [(softmax.safe, 3), (softmax.online, 2)])
def test_passes(rung, passes: int) -> None:
    x = CountLoads(torch.randn(7))
    rung(x)
    assert x.loads == passes * 7


@quick
@given(vectors)
def test_rungs_agree(x: Tensor) -> None:
    expected = torch.softmax(x, -1)
    assert expected.sum() == pytest.approx(1)
    for rung in (softmax.naive, *CORRECT):
        assert_close(rung(x), expected)
    assert_close(softmax.logsumexp(x), torch.logsumexp(x, -1))


@quick
@given(vectors, st.floats(-50, 50))
def test_shift_changes_nothing(x: Tensor, shift: float) -> None:
    assert_close(softmax.naive(x + shift), softmax.naive(x), rtol=1e-11, atol=1e-13)


@quick
@given(vectors)
def test_invariant_after_every_prefix(x: Tensor) -> None:
    for n, (m, l) in enumerate(softmax.online_states(x), start=1):
        assert m == x[:n].max()
        assert_close(l, torch.exp(x[:n] - m).sum())


@quick
@given(vectors, st.randoms(use_true_random=False))
def test_merge_in_any_order_and_grouping(x: Tensor, random) -> None:
    *_, expected = softmax.online_states(x)
    states = [single(x_i) for x_i in x] + [softmax.nothing(x)] * 2
    while len(states) > 1:
        a, b = (states.pop(random.randrange(len(states))) for _ in range(2))
        states.append(softmax.merge(a, b))
    assert_close(states[0], expected)


def test_merge_has_a_neutral_element() -> None:
    nothing, one = softmax.nothing(X), single(X[0])
    assert softmax.merge(nothing, nothing) == nothing
    assert softmax.merge(one, nothing) == softmax.merge(nothing, one) == one


def test_masked_elements_count_for_nothing() -> None:
    x = torch.tensor([-math.inf, 3.0, -math.inf, 2.0])
    assert_close(softmax.online(x), torch.softmax(x, -1))
    assert functools.reduce(softmax.merge, [single(x_i) for x_i in x[[0, 2]]]).m == -math.inf


@pytest.mark.parametrize("rung", [softmax.naive, *CORRECT])
def test_row_by_row(rung) -> None:
    x = torch.randn(2, 3, 5)
    assert_close(rung(x), torch.softmax(x, -1))


class Exponents(TorchFunctionMode):
    """What exp is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.exp:
            self.arguments.append(args[0].detach())
        return func(*args, **(kwargs or {}))

    @property
    def elements(self) -> int:
        return sum(x.numel() for x in self.arguments)


@pytest.mark.parametrize("rung", [softmax.naive, *CORRECT])
def test_weights_lie_between_zero_and_one_and_sum_to_one(rung) -> None:
    weights = rung(torch.tensor([[3.0, 2.0, 5.0, 1.0], [-40.0, 0.0, 40.0, 39.0]], dtype=torch.float64))
    assert ((weights > 0) & (weights <= 1)).all()
    assert_close(weights.sum(-1), torch.ones(2).double())


@pytest.mark.parametrize("rung", CORRECT)
def test_no_exponent_is_above_zero(rung) -> None:
    """So every exponential is in (0, 1], and the largest is 1: the denominator is neither inf nor 0."""
    with Exponents() as seen:
        rung(torch.tensor([30.0, 20.0, 500.0, 499.0], dtype=torch.float64))
    assert max(x.max().item() for x in seen.arguments) == 0


def test_a_shift_makes_the_numbers_smaller_and_not_the_work() -> None:
    """The notes say that it spares computation. Every element takes its exponentials, wherever the row lies."""
    x, counts, largest = torch.randn(8, dtype=torch.float64), {}, {}
    for shift in (-300, 0, 300):
        with Exponents() as seen:
            softmax.safe(x + shift)
        counts[shift], largest[shift] = seen.elements, max(e.max().item() for e in seen.arguments)
    with Exponents() as plain:
        softmax.naive(x + 300)
    assert set(counts.values()) == {2 * 8}
    assert plain.elements == 8
    assert max(largest.values()) == 0 < plain.arguments[0].max()


class Largest(TorchDispatchMode):
    """The most elements that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, out.numel())
        return out


def test_a_pass_reads_every_element_and_keeps_two_numbers() -> None:
    """The notes' O(n) memory is of accesses: however long the row, what is kept of it is m and l."""
    x = torch.randn(50)
    with Largest() as largest:
        *_, state = softmax.online_states(x)
    assert largest.elements == 1
    assert [part.numel() for part in state] == [1, 1]


def test_half_a_row_lacks_the_other_halfs_denominator() -> None:
    """Weights from part of a row are wrong; with the state of the other part they are right."""
    whole, halves = softmax.safe(X), [softmax.safe(X[:2]), softmax.safe(X[2:])]
    assert (torch.cat(halves) - whole).abs().max() > 0.5
    states = [list(softmax.online_states(x))[-1] for x in X.split(2)]
    both = softmax.merge(*states)
    shares = [state.l * torch.exp(state.m - both.m) / both.l for state in states]
    assert_close(torch.cat([share * half for share, half in zip(shares, halves, strict=True)]), whole)
