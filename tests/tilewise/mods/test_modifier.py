"""Decorated functions: what is read when, what is remembered, and what a call of them gives."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import weakref
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise
from tests import features
from tests.tilewise.mods.test_expr import PLACE, S, everything
from tilewise import AttentionError, mods
from tilewise.adapters import flex
from tilewise.mods import modifier, trace

this = sys.modules[__name__]


def test_mods_of_one_name_do_not_share() -> None:
    def make(factor: float):
        @tilewise.score_mod
        def scaled(score, b, h, q_idx, kv_idx):
            return score * factor

        return scaled()

    assert make(2.0).key != make(3.0).key
    assert make(2.0).key == make(2.0).key
    torch.testing.assert_close(make(3.0)(S, *PLACE), 3 * S)


WIDTH = 1.0


def widened(x):
    return x * WIDTH


@tilewise.score_mod
def by_helper(score, b, h, q_idx, kv_idx):
    return widened(score) + this.WIDTH


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A line for each time that a function is read."""
    found: list[object] = []
    traced = trace.trace
    monkeypatch.setattr(trace, "trace", lambda *args: (found.append(args), traced(*args))[1])
    return found


def test_a_changed_global_is_seen_and_nothing_is_read_twice(
    reads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a helper, one in a module."""
    for width in (11.0, 12.0, 11.0, 12.0):
        monkeypatch.setattr(this, "WIDTH", width)
        assert by_helper()(S, *PLACE).equal(S * width + width)
    assert len(reads) == 2


def test_a_changed_closure_is_seen() -> None:
    shift = 1.0

    @tilewise.score_mod
    def shifted(score, b, h, q_idx, kv_idx):
        return score + shift

    assert shifted()(S, *PLACE).equal(S + 1)
    shift = 2.0
    assert shifted()(S, *PLACE).equal(S + 2)


def test_a_zero_of_the_other_sign_is_another_number() -> None:
    zero = 0.0

    @tilewise.score_mod
    def divided(score, b, h, q_idx, kv_idx):
        return torch.where(1.0 / zero > 0, score, -score)

    assert divided()(S, *PLACE).equal(S)
    zero = -0.0
    assert divided()(S, *PLACE).equal(-S)


def test_a_helper_exchanged_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_helper()(S, *PLACE).equal(S + 1)
    monkeypatch.setattr(this, "widened", lambda x: x - 9)
    torch.testing.assert_close(by_helper()(S, *PLACE), S - 8)


class Wide(IntEnum):
    once, twice = 1, 2


class Config:
    width = 1


FACTOR, MODE, BOX = np.float64(1.0), Wide.once, SimpleNamespace(width=1.0)
BOX.widened = lambda x: x * BOX.width


def plain(x):
    return x


plain.width = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["a numpy number", "an enum", "a class", "an object's helper", "a function", "itself"])
def test_a_change_is_seen_of(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_itself = tilewise.score_mod(lambda score, b, h, q_idx, kv_idx: score * by_itself.width)
    by_itself.width = 1.0
    owner, name, twice, mod = {
        "a numpy number": (this, "FACTOR", np.float64(2.0), lambda score, b, h, q_idx, kv_idx: score * FACTOR),
        "an enum": (this, "MODE", Wide.twice, lambda score, b, h, q_idx, kv_idx: score * MODE),
        "a class": (Config, "width", 2, lambda score, b, h, q_idx, kv_idx: score * Config.width),
        "an object's helper": (BOX, "width", 2.0, lambda score, b, h, q_idx, kv_idx: BOX.widened(score)),
        "a function": (plain, "width", 2.0, lambda score, b, h, q_idx, kv_idx: score * plain.width),
        "itself": (by_itself, "width", 2.0, by_itself),
    }[what]
    mod = mod if isinstance(mod, modifier.Modifier) else tilewise.score_mod(mod)
    torch.testing.assert_close(mod()(S, *PLACE), S)
    monkeypatch.setattr(owner, name, twice)
    torch.testing.assert_close(mod()(S, *PLACE), 2 * S)
    travelled = pickle.loads(pickle.dumps(mod()))  # the number is a plain one in the program's text
    torch.testing.assert_close(travelled(S, *PLACE), 2 * S)


def test_new_code_and_a_shadowed_builtin_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython's autoreload does it: the function stays, its code is another."""

    def sized(score, b, h, q_idx, kv_idx):
        return abs(score)

    def doubled(score, b, h, q_idx, kv_idx):
        return 2 * abs(score)

    mod = tilewise.score_mod(sized)
    torch.testing.assert_close(mod()(S, *PLACE), S.abs())
    sized.__code__ = doubled.__code__
    torch.testing.assert_close(mod()(S, *PLACE), 2 * S.abs())
    monkeypatch.setattr(this, "abs", lambda x: x * 5, raising=False)
    torch.testing.assert_close(mod()(S, *PLACE), 10 * S)


def test_what_cannot_be_read_is_not_tried_twice(reads: list[object]) -> None:
    table = {"width": 1.0}
    mod = tilewise.score_mod(lambda score, b, h, q_idx, kv_idx: score * table["width"])
    said = []
    for _ in range(2):
        with pytest.raises(AttentionError, match="'table', a dict") as error:
            mod()
        said.append(str(error.value))
    assert said[0] == said[1]
    assert len(reads) == 1


def test_a_tensor_from_outside_is_checked_at_each_call() -> None:
    table = torch.ones(4)
    mod = tilewise.score_mod(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    mod()
    table = torch.ones(4).to_sparse()
    with pytest.raises(AttentionError, match="dense"):
        mod()
    table = torch.ones(4)
    mod()


def test_a_mod_decorated_again_and_again_is_read_once_and_forgotten(reads: list[object]) -> None:
    def make(factor: float):
        def scaled(score, b, h, q_idx, kv_idx):
            return score * factor

        return tilewise.score_mod(scaled)

    made = [make(7.0) for _ in range(5)]
    assert len({m().key for m in made}) == 1
    assert len(reads) == 1
    gone = [weakref.ref(m) for m in made]
    del made
    gc.collect()
    assert not any(r() for r in gone)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modifier._programs, "limit", 3)
    monkeypatch.setattr(mods.PROGRAMS, "limit", 3)
    found = [mods.block_diagonal(n) for n in range(77_000, 77_010)]  # that no other test has made
    assert len(modifier._programs) <= 3
    assert len(mods.PROGRAMS) <= 3
    assert all(m(0, 0, 80_000, 0).item() is False for m in found)


def test_a_default_is_an_argument() -> None:
    @tilewise.score_mod
    def capped(score, b, h, q_idx, kv_idx, cap=2.0, shift=3):
        return cap * torch.tanh(score / cap) + shift

    assert capped().key == capped(5.0).key == capped(5.0, 3).key
    assert capped().numbers == (2.0,)
    assert capped(5.0, 4).key != capped(5.0).key


class Settings:
    width = 2
    gain = 0.5


SETTINGS, REACH = Settings(), 3


def near(distance):
    return abs(distance) < REACH


def far(distance):
    return abs(distance) >= REACH


choice = near


@tilewise.mask_mod
def chosen(b, h, q_idx, kv_idx):
    return choice(q_idx - kv_idx) | (kv_idx < SETTINGS.width)


@tilewise.score_mod
def gained(score, b, h, q_idx, kv_idx):
    return score * SETTINGS.gain


@pytest.mark.parametrize(
    ("name", "values"),
    [("REACH", (3, 5, 2)), ("choice", (near, far)), ("SETTINGS.width", (2, 4, 1)), ("SETTINGS.gain", (0.5, 0.25, 2.0))],
)
def test_compiled_anew_when_what_it_reads_has_changed(
    name: str, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, x, x, score_mod=gained(), mask_mod=chosen(), backend="reference")

    torch.compiler.reset()
    compiled, x = torch.compile(attend, backend="eager", fullgraph=True), torch.randn(1, 9, 2, 8)
    found = []
    for value in (*values, values[0]):
        monkeypatch.setattr(f"{__name__}.{name}", value)
        found.append(compiled(x))
        torch.testing.assert_close(found[-1], attend(x))
    assert not torch.equal(found[0], found[1])


def test_compiled_anew_when_a_closure_has_changed() -> None:
    width = 2

    @tilewise.mask_mod
    def narrow(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < width

    torch.compiler.reset()
    x = torch.randn(1, 9, 2, 8)
    compiled = torch.compile(lambda x: tilewise.attention(x, x, x, mask_mod=narrow()), backend="eager", fullgraph=True)
    first, width = compiled(x), 4
    assert not torch.equal(compiled(x), first)
    torch.testing.assert_close(compiled(x), tilewise.attention(x, x, x, mask_mod=narrow()))


def test_compiled_with_arguments_that_change() -> None:
    @tilewise.score_mod
    def shifted(score, b, h, q_idx, kv_idx, gain, shift):
        return score * gain + (kv_idx - q_idx) * shift

    def attend(x: torch.Tensor, gain: float, shift: int) -> torch.Tensor:
        return tilewise.attention(x, x, x, score_mod=shifted(gain, shift))

    torch.compiler.reset()
    compiled, x = torch.compile(attend, backend="eager", fullgraph=True), torch.randn(1, 9, 2, 8)
    for gain, shift in ((0.5, 1), (0.5, 2), (0.7, 3)):
        torch.testing.assert_close(compiled(x, gain, shift), attend(x, gain, shift))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(2, 2), "a row of a tensor; expected a number"),
        (torch.zeros(2, 2, 2), "whole; expected t\\[h\\] at 2 indices"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "on cpu, meta"),
    ],
)
def test_tensors_that_no_mod_can_read(tensor: torch.Tensor, found: str) -> None:
    @tilewise.score_mod
    def two(score, b, h, q_idx, kv_idx, t, u):
        return score + t[h] + u[h]

    with pytest.raises(AttentionError, match=found):
        two(tensor, torch.zeros(2))


def test_it_says_what_it_is() -> None:
    assert repr(mods.alibi) == "<score_mod alibi(slopes): call it, and give attention what it returns>"
    assert repr(mods.alibi(torch.ones(3))) == "score_mod alibi(float32 (3,))"
    assert repr(mods.softcap(2.0)) == "score_mod softcap(2.0)"


def test_compiled_with_tensors_from_outside() -> None:
    """Between two graphs; as one graph it is refused."""
    table = torch.rand(2)

    @tilewise.score_mod
    def closed(score, b, h, q_idx, kv_idx):
        return score + table[h] * kv_idx

    def attend(x):
        return tilewise.attention(x, x, x, score_mod=closed())

    x = torch.randn(1, 8, 2, 4)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(x), attend(x))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tensors from outside"):
        torch.compile(attend, backend="eager", fullgraph=True)(x)


def test_a_given_slope_is_used() -> None:
    @tilewise.score_mod(grad=lambda_free_zero)
    def straight(score, b, h, q_idx, kv_idx):
        return score

    q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    out = tilewise.attention(q, k, v, score_mod=straight())
    dq, dv = torch.autograd.grad(out.sum(), (q, v))
    assert (dq == 0).all()
    assert (dv != 0).any()


def lambda_free_zero(score, b, h, q_idx, kv_idx):
    return 0.0


def test_compiled_whole() -> None:
    def loss(q, k, v, table):
        mod = features.distance_table(table)
        mask = mods.window_with_globals(3, 1)
        return tilewise.attention(q, k, v, softcap=5.0, score_mod=mod, mask_mod=mask).square().sum()

    x = [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)] + [torch.randn(2, 16, requires_grad=True)]
    eager = torch.autograd.grad(loss(*x), x)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*x), x)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"softcap": 0.0}, "softcap"),
        ({"bias": torch.zeros(3, 8, 8)}, "H of bias"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"alibi_slopes": torch.zeros(2, 3)}, "alibi_slopes"),
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"seed": 3}, "seed"),
        ({"score_mod": everything}, "score_mod"),
        ({"score_mod": mods.block_diagonal(3)}, "score_mod"),
        ({"mask_mod": mods.softcap(3.0)}, "mask_mod"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 9, 8)}, "Sq of the block mask"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 8, 8, causal=True)}, "window of the block mask"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 8, 8, window=(2, 2)), "window": (3, 0)}, "window of"),
    ],
)
def test_refusals(options: dict[str, object], what: str) -> None:
    x = torch.zeros(2, 8, 2, 4)
    with pytest.raises(AttentionError, match=what):
        tilewise.attention(x, x, x, **options)


@tilewise.score_mod
def by_row(score, b, h, q_idx, kv_idx, t):
    return score + t[b, h, q_idx].sum()


@tilewise.mask_mod
def by_key(b, h, q_idx, kv_idx, t):
    return t[b, kv_idx]


@pytest.mark.parametrize("sizes", [(0, 5, 5, 2), (2, 5, 5, 0), (0, 5, 5, 0), (2, 0, 5, 2), (2, 5, 0, 2)], ids=str)
def test_tables_of_calls_without_pairs_are_empty(sizes: tuple[int, ...], backend: str) -> None:
    batch, n_q, n_k, heads = sizes
    backend = backend if heads else "auto"  # kernels want heads
    q, k = torch.randn(batch, n_q, heads, 16, requires_grad=True), torch.randn(batch, n_k, heads, 16)
    table, slopes = torch.randn(batch, heads, n_q, 3, requires_grad=True), torch.rand(batch, heads)
    seen = torch.ones(batch, n_k, dtype=torch.bool)
    out = tilewise.attention(
        q, k, k, score_mod=by_row(table), alibi_slopes=slopes, mask_mod=by_key(seen), backend=backend
    )
    assert out.shape == q.shape
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is not None and (q.grad == 0).all()  # noqa: PT018
    assert table.grad is not None and (table.grad == 0).all()  # noqa: PT018


@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 2, 5, 0), (2, 0, 5, 3)], ids=str)
def test_tables_of_calls_with_pairs_are_not(shape: tuple[int, ...]) -> None:
    q, mod = torch.randn(2, 5, 2, 16), by_row(torch.zeros(shape))
    with pytest.raises(AttentionError, match=r"by_row.*at least 1 along every axis"):
        tilewise.attention(q, q, q, score_mod=mod)
    with pytest.raises(AttentionError, match=r"by_key.*at least 1 along every axis"):
        mods.block_mask(by_key(torch.ones(0, 5, dtype=torch.bool)), 5, 5, batch=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx,
        lambda b, h, q_idx, kv_idx: 1,
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) * 0.5,
    ],
)
def test_a_mask_is_a_bool(function: Any) -> None:
    x = torch.randn(1, 5, 2, 8)
    with pytest.raises(AttentionError, match=r"mask mod '<lambda>'.* a number \((int|float)\); expected a bool"):
        tilewise.attention(x, x, x, mask_mod=function)
    for make in (
        lambda: tilewise.block_mask(function, 5, 5),
        lambda: flex.mod_of(function, "mask"),
        lambda: flex.mod_of(functools.partial(function), "mask"),  # traced as it is
    ):
        with pytest.raises(AttentionError, match="a bool"):
            make()


@tilewise.score_mod
def by_query(score, b, h, q_idx, kv_idx, t):
    return score + t[q_idx]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"mask_mod": mods.document(ids=torch.arange(8))},
            "axis 0 of tensor 0 .*_same_document'.* found 8; .* key, 9,",
        ),
        (
            {"mask_mod": mods.document(ids=torch.zeros(2, 9).int())},
            "axis 0 .* found 2; expected one for each batch row",
        ),
        ({"mask_mod": mods.document(ids=torch.zeros(1, 9).int())}, None),  # the same for all
        ({"mask_mod": mods.document(ids=torch.zeros(3, 20).int())}, None),  # of a cache that has room for more
        (
            {"mask_mod": mods.document(ids=torch.zeros(4, 9).int())},
            "axis 0 .* found 4; expected one for each batch row, 3, or 1",
        ),
        ({"mask_mod": mods.prefix_lm(torch.ones(2).int())}, "prefix_lm"),
        ({"mask_mod": mods.prefix_lm(torch.ones(5).int())}, "prefix_lm.* found 5; .* batch row, 3, or 1"),
        ({"mask_mod": mods.prefix_lm(torch.ones(4).int())}, None),  # as offsets of 3 sequences
        ({"mask_mod": mods.prefix_lm(torch.ones(1).int())}, None),
        ({"score_mod": mods.t5_relative(torch.ones(32, 5))}, "axis 1 of tensor 0 .*_t5.* found 5; .* head, 4, or 1"),
        ({"score_mod": mods.t5_relative(torch.ones(32, 1))}, None),
        ({"score_mod": mods.alibi(torch.ones(8))}, "alibi.* found 8; .* head, 4, or 1"),
        ({"alibi_slopes": torch.ones(4, 4)}, "alibi_slopes"),
        ({"score_mod": mods.t5_relative(torch.ones(32, 3))}, "axis 1 of tensor 0 .*_t5.* found 3; .* head, 4, or 1"),
        ({"score_mod": mods.alibi(torch.ones(2))}, "alibi"),
        ({"score_mod": by_query(torch.ones(4))}, "query, 5,"),
        ({"score_mod": everything(torch.ones(2, 4), 1.0)}, None),  # computed indices are clamped
    ],
)
def test_tensors_of_other_sizes(options: dict[str, Any], found: str | None) -> None:
    q, k = torch.randn(3, 5, 4, 8), torch.randn(3, 9, 4, 8)
    if found is None:
        assert tilewise.attention(q, k, k, **options).shape == q.shape
    else:
        with pytest.raises(AttentionError, match=found):
            tilewise.attention(q, k, k, **options)


def test_documents_of_another_batch() -> None:
    """In every kind of call that takes mods."""
    q, cache, cu = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 4, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    for rows, fits in ((1, True), (2, True), (3, False)):
        mask = mods.document(ids=torch.zeros(rows, 9).int())
        calls = (
            lambda mask=mask: tilewise.attention(q, cache, cache, mask_mod=mask),
            lambda mask=mask: tilewise.attention_varlen(cache[0], cache[0], cache[0], cu, cu, mask_mod=mask),
            lambda mask=mask: tilewise.attention_kv(q, cache, cache, lengths, mask_mod=mask),
            lambda mask=mask: tilewise.block_mask(mask, 9, 9, batch=2),
            lambda mask=mask: tilewise.block_mask_varlen(mask, cu, cu),
        )
        for call in calls:
            if fits:
                call()
            else:
                with pytest.raises(AttentionError, match="found 3; expected one for each batch row, 2, or 1"):
                    call()
