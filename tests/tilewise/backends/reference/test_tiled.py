"""The last rung against the whole score matrix in float64: values, gradients, what must not leak, what it may cost."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import naive_grads, seen
from tilewise.backends.reference import backward, forward, tiled
from tilewise.request import BackwardInputs, Request, Spec

NAMES = ("out", "lse", "dq", "dk", "dv")
FULL, CAUSAL = Spec(scale=0.5), Spec(scale=0.5, after=0)
BANDS = [FULL, CAUSAL, Spec(0.5, 3, 2), Spec(0.5, 0, None), Spec(0.5, 4, 0), Spec(0.5, None, 5)]


@contextlib.contextmanager
def tiles(q: int, k: int, scores: int = 1, mild: float = tiled.MILD, sum_q: int = 3) -> Iterator[None]:
    """Small tiles, so that small inputs have many of them; and no scores that are `mild`, if that is 0."""
    sizes = {"TILE_Q": q, "TILE_K": k, "TILE_SCORES": scores, "MILD": mild, "SUM_Q": sum_q}
    with mock.patch.multiple(tiled, **sizes), mock.patch.object(tiled, "tile_height", lambda n_q, *_: min(n_q, q)):
        yield


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None

    def run(self, spec: Spec) -> tuple[Tensor, ...]:
        q, k, v, dout, dlse, cu_q, cu_k = self
        request = Request(q, k, v, spec, cu_q=cu_q, cu_k=cu_k)
        out, lse = forward(request)
        return out, lse, *backward(request, BackwardInputs(out, lse, dout, dlse))

    def exact(self, spec: Spec) -> tuple[Tensor, ...]:
        q, k, v, dout, dlse, cu_q, cu_k = self
        return naive_grads(q, k, v, spec, dout, dlse, cu_q, cu_k)

    def clone(self) -> Case:
        return Case(*(None if x is None else x.clone() for x in self))


def dense(b=1, n_q=13, n_k=17, h=2, h_k=2, d=4, e=3, dtype=torch.float64, dlse=True, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, n_q, h, d), (b, n_k, h_k, d), (b, n_k, h_k, e), (b, n_q, h, e), (b, h, n_q)
    q, k, v, dout, dl = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return Case(q, k, v, dout, dl if dlse else None)


def packed(lengths_q: list[int], lengths_k: list[int], spare: int = 0, **sizes: int) -> Case:
    q, k, v, dout, dlse = (x[0] for x in dense(1, sum(lengths_q) + spare, sum(lengths_k) + spare, **sizes)[:5])
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k))
    return Case(q, k, v, dout, dlse, cu_q, cu_k)


def check(case: Case, spec: Spec) -> None:
    for name, found, expected in zip(NAMES, case.run(spec), case.exact(spec), strict=True):
        assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        assert found.is_contiguous(), name


# Ways to hold a (B, S, H, D) tensor that are not contiguous.
LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of a packed qkv": lambda x: torch.stack([x, x, x], 2)[:, :, 1],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns first": lambda x: x.mT.contiguous().mT,
    "one head expanded": lambda x: x[:, :, :1].expand(x.shape),
    "one row expanded": lambda x: x[:, :1].expand(x.shape),
}

sizes = st.integers(0, 16)
MILDS = st.sampled_from([0.0, tiled.MILD])
sides = st.none() | st.integers(0, 12)
specs = st.tuples(st.sampled_from([0.5, -1.0, 0.0, 3.0]), sides, sides).map(lambda x: Spec(*x))
tilings = st.builds(tiles, st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 64, 1 << 20]), MILDS)
wide = settings(max_examples=60, deadline=None, derandomize=True)


@wide
@given(st.data(), specs, tilings)
def test_dense(data: st.DataObject, spec: Spec, tiling: Any) -> None:
    draw = data.draw
    h_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d, e = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    case = dense(draw(st.integers(0, 3)), draw(sizes), draw(sizes), group * h_k, h_k, d, e, dlse=draw(st.booleans()))
    layouts = [LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(4)]
    tensors = [layout(x) if x.numel() else x for layout, x in zip(layouts, case[:4], strict=True)]
    with tiling:
        check(Case(*tensors, case.dlse), spec)


@wide
@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4), st.integers(1, 3), specs, tilings)
def test_packed(lengths: list[tuple[int, int]], group: int, spec: Spec, tiling: Any) -> None:
    lengths_q, lengths_k = map(list, zip(*lengths, strict=True))
    with tiling:
        check(packed(lengths_q, lengths_k, h=2 * group), spec)


@pytest.mark.parametrize("spec", BANDS)
@pytest.mark.parametrize("n", [(700, 700), (520, 1200), (1200, 520)])
def test_real_tiles(n: tuple[int, int], spec: Spec) -> None:
    check(dense(1, *n, h=2, h_k=1, d=8, e=8), spec)


@pytest.mark.parametrize("n", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("b", [0, 2])
def test_empty(n: tuple[int, int], b: int) -> None:
    check(dense(b, *n), CAUSAL)


def test_packed_equals_each_sequence_alone() -> None:
    lengths_q, lengths_k = [5, 0, 7, 1, 4], [5, 3, 0, 9, 2]
    case = packed(lengths_q, lengths_k, h=4)
    out, lse, dq, dk, dv = case.run(CAUSAL)
    for rows, keys in zip(torch.arange(17).split(lengths_q), torch.arange(19).split(lengths_k), strict=True):
        alone = Case(
            case.q[None, rows], case.k[None, keys], case.v[None, keys], case.dout[None, rows], case.dlse[None, :, rows]
        ).run(CAUSAL)
        found = out[rows], lse[:, rows], dq[rows], dk[keys], dv[keys]
        assert_close(found, tuple(x[0] for x in alone))


@pytest.mark.parametrize("spec", BANDS)
def test_rows_that_see_nothing(spec: Spec) -> None:
    case = dense(n_q=20, n_k=6)
    out, lse, dq, dk, dv = case.run(spec)
    blind = ~seen(20, 6, spec).any(1)
    assert blind.any() == (spec.after is not None and spec.after < 14)
    assert not out[:, blind].any()
    assert not dq[:, blind].any()
    assert (lse[..., blind] == -torch.inf).all()
    assert all(x.isfinite().all() for x in (out, lse[..., ~blind], dq, dk, dv))


def test_rows_whose_scores_are_all_minus_infinity() -> None:
    case = dense()
    case = case._replace(q=torch.ones_like(case.q), k=torch.full_like(case.k, -math.inf))
    out, lse, _, _, dv = case.run(FULL)
    assert (lse == -math.inf).all()
    assert not out.any()
    assert not dv.any()


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, spec):
        out, lse = forward(Request(q, k, v, spec, cu_q=cu_q, cu_k=cu_k))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = cu_q, cu_k, spec
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        cu_q, cu_k, spec = ctx.rest
        request = Request(q, k, v, spec, cu_q=cu_q, cu_k=cu_k)
        return *backward(request, BackwardInputs(out, lse, dout, dlse)), None, None, None


@pytest.mark.parametrize("spec", BANDS)
def test_gradcheck(spec: Spec) -> None:
    case = dense(n_q=3, n_k=4, h=2, h_k=1, d=2, e=3)
    leaves = [x.requires_grad_() for x in case[:3]]
    with tiles(2, 3):
        torch.autograd.gradcheck(lambda *x: Attention.apply(*x, None, None, spec), leaves)


def test_gradcheck_packed() -> None:
    case = packed([2, 0, 1], [3, 1, 1], h=2, h_k=1, d=2, e=1)
    leaves = [x.requires_grad_() for x in case[:3]]
    with tiles(2, 3):
        torch.autograd.gradcheck(lambda *x: Attention.apply(*x, case.cu_q, case.cu_k, CAUSAL), leaves)


@pytest.mark.parametrize("tiling", [(512, 1024), (4, 4), (3, 5, 1, 0.0)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", BANDS)
@pytest.mark.parametrize("victim", ["q", "k", "v", "dout"])
def test_poison_reaches_only_those_who_see_it(victim: str, spec: Spec, value: float, tiling: tuple[Any, ...]) -> None:
    n_q, n_k = 20, 14
    clean = dense(1, n_q, n_k, h=4, h_k=2)
    poisoned = clean.clone()
    at = 9
    getattr(poisoned, victim)[:, at] = value
    mask = seen(n_q, n_k, spec)
    if victim in ("q", "dout"):
        rows = torch.arange(n_q) == at
        rows &= mask.any(1)
    else:
        rows = mask[:, at]
    keys = mask[rows].any(0)  # their gradients sum over the poisoned rows
    # what each output may take from the victim: nothing, its rows, its keys
    touched = {
        "q": {"out", "lse", "dq", "dk", "dv"},
        "k": {"out", "lse", "dq", "dk", "dv"},
        "v": {"out", "dq", "dk"},
        "dout": {"dq", "dk", "dv"},
    }[victim]
    with tiles(*tiling):
        before, after = clean.run(spec), poisoned.run(spec)
    for name, x, y in zip(NAMES, before, after, strict=True):
        x, y = (z.mT if name == "lse" else z for z in (x, y))
        reached = (rows if name in ("out", "lse", "dq") else keys) if name in touched else torch.zeros(y.shape[1]) > 0
        assert_close(y[:, ~reached], x[:, ~reached], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        if math.isnan(value):
            assert y[:, reached].isnan().all(), name


def test_poison_in_another_sequence_or_past_the_end() -> None:
    lengths = [6, 5, 7]
    clean = packed(lengths, lengths, spare=4, h=4)
    poisoned = clean.clone()
    for x in poisoned[:4]:
        x[6:11] = math.nan
        x[18:] = math.inf
    poisoned.dlse[:, 6:11] = math.nan
    kept = [*range(6), *range(11, 18)]
    for name, x, y in zip(NAMES, clean.run(CAUSAL), poisoned.run(CAUSAL), strict=True):
        x, y = (z.mT if name == "lse" else z for z in (x, y))
        assert torch.equal(x[kept], y[kept]), name
        assert torch.equal(y[18:], torch.full_like(y[18:], -math.inf if name == "lse" else 0.0)), name


@pytest.mark.parametrize("spec", [FULL, CAUSAL])
@pytest.mark.parametrize(("dtype", "h"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.float16, 1)])
def test_error_is_at_most_twice_that_of_torch(dtype: torch.dtype, h: int, spec: Spec) -> None:
    case = dense(1, 300, 300, h, h, 64, 64, dtype=dtype, dlse=False)
    spec = Spec(0.125, spec.before, spec.after)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in case[:3]]
    out = scaled_dot_product_attention(*leaves, is_causal=spec.after == 0)
    grads = torch.autograd.grad(out, leaves, case.dout.transpose(1, 2))
    hide = ~seen(300, 300, spec)
    lse = (leaves[0].float() @ leaves[1].float().mT * 0.125).masked_fill(hide, -torch.inf).logsumexp(-1)
    theirs = out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in grads)
    for name, x, y, exact in zip(NAMES, case.run(spec), theirs, case.exact(spec), strict=True):
        assert x.dtype == (torch.float32 if name == "lse" else dtype)
        error, rounding = x.double() - exact, torch.finfo(x.dtype).eps / 2 * exact[exact.isfinite()].abs().max()
        assert error.abs().max() <= 2 * (y.double() - exact).abs().max() + rounding, name
        assert error.mean().abs() <= 5 * error.std() / math.sqrt(error.numel()), name


def test_large_values_and_gradients_do_not_overflow() -> None:
    """exp(S) times one of them may, where exp(S - m) does not."""
    case = dense(n_q=40, n_k=40, dtype=torch.float32, dlse=False)
    q, k, large = 2 * case.q, 2 * case.k, 3e35
    for v, dout in (large * case.v, case.dout), (case.v, large * case.dout):
        one = case._replace(q=q, k=k, v=v, dout=dout)
        for found, exact in zip(one.run(CAUSAL), one.exact(CAUSAL), strict=True):
            seen_ = exact.isfinite()
            assert (found.double() - exact)[seen_].abs().max() <= 1e-4 * exact[seen_].abs().max()


@pytest.mark.parametrize("victim", ["q", "k"])
def test_one_long_row_is_enough_for_scores_not_to_be_mild(victim: str) -> None:
    for large in 1e3, 1e20, 1e30:  # the length of the last two is beyond a float32
        case = dense(n_q=17, n_k=40, dtype=torch.float32)
        getattr(case, victim)[:, 4, :, 1:] = 0.0
        getattr(case, victim)[:, 4, :, 0] = large
        out, lse, *_ = case.run(FULL)
        exact, exact_lse, *_ = case.exact(FULL)
        assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
        assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", BANDS)
def test_large_scores_do_not_overflow(spec: Spec) -> None:
    case = dense(dtype=torch.float32, n_q=17)
    case = case._replace(q=1e4 * case.q)
    assert all(x.isfinite().all() for x in case.run(spec))
    assert_close(case.run(spec)[0].double(), case.exact(spec)[0], rtol=1e-3, atol=1e-3)


def test_autocast_does_not_lower_the_precision() -> None:
    case = dense(dtype=torch.float32)
    expected = case.run(CAUSAL)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(case.run(CAUSAL), expected, rtol=0, atol=0)


def test_inputs_are_not_written() -> None:
    case = dense()
    before = case.clone()
    case.run(CAUSAL)
    assert all(torch.equal(x, y) for x, y in zip(case[:5], before[:5], strict=True))


@pytest.mark.parametrize("before", [None, 0, 1, 4])
@pytest.mark.parametrize("after", [None, 0, 2])
def test_key_tiles_against_brute_force(before: int | None, after: int | None) -> None:
    spec = Spec(1.0, before, after)
    with tiles(1, 3):
        for n_q, n_k in itertools.product(range(1, 8), range(8)):
            mask, part = seen(n_q, n_k, spec), tiled.Part([], [], n_q, n_k, [])
            for a, b in itertools.combinations(range(n_q + 1), 2):
                columns = []
                for tile in tiled.key_tiles(part, slice(a, b), spec):
                    some = mask[a:b, tile.start : tile.stop]
                    found = tile.clear_(torch.ones(1, b - a, tile.stop - tile.start))[0] > 0
                    assert torch.equal(found, some)
                    assert (tile.hidden(found[None]) is None) == some.all()
                    columns += range(tile.start, tile.stop)
                assert columns == mask[a:b].any(0).nonzero().flatten().tolist()


def scores_computed(case: Case, spec: Spec) -> int:
    computed = []

    def spy(*args: Tensor, f=tiled.scores) -> Tensor:
        s = f(*args)
        computed.append(s.numel())
        return s

    with mock.patch.object(tiled, "scores", spy):
        forward(Request(*case[:3], spec))
    return sum(computed)


def test_tiles_outside_the_band_are_skipped() -> None:
    n, tile = 128, 8
    case = dense(1, n, n, 1, 1)
    with tiles(tile, tile):
        assert scores_computed(case, FULL) == n * n
        assert scores_computed(case, CAUSAL) == n * (n + tile) // 2
        assert scores_computed(case, Spec(0.5, tile, 0)) < 3 * n * tile


@pytest.mark.parametrize("mild", [0.0, tiled.MILD])
def test_only_edge_tiles_are_masked(mild: float) -> None:
    n, tile = 128, 8
    case = dense(1, n, n, 1, 1)
    masked: list[Tensor] = []

    def spy(x: Tensor, *args: Any, f: Any = Tensor.tril_) -> Tensor:
        masked.append(x)
        return f(x, *args)

    with tiles(tile, tile, mild=mild), mock.patch.object(Tensor, "tril_", spy):
        case.run(FULL)
        assert not masked
        forward(Request(*case[:3], CAUSAL))
        assert len(masked) == n // tile


class Largest(TorchDispatchMode):
    """The size of the largest storage that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("spec", [FULL, CAUSAL])
def test_nothing_grows_with_the_square_of_the_length(spec: Spec) -> None:
    n, heads, d = 512, 4, 8
    case = dense(1, n, n, heads, heads, d, d, dtype=torch.float32)
    with tiles(64, 128, scores=64 * 128, sum_q=64), Largest() as largest:
        case.run(spec)
    assert largest.numel == n * heads * d


def test_scores_below_every_float32():
    """In float64 they are as good as any."""
    q = torch.full((1, 2, 1, 1), -1e20, dtype=torch.float64)
    k, v = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 1) for x in ([1e20, 1e20], [1.0, 2.0]))
    out, lse = forward(Request(q, k, v, Spec(1.0)))
    assert (out == 1.5).all()
    assert (lse == -1e40).all()
