"""What the language understands, what it refuses and how it says so."""

from __future__ import annotations

import functools
import linecache
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import exp as exp_of_torch

import tilewise
from tests.conftest import DEVICE
from tilewise import AttentionError


def bad(source: str) -> object:
    """A decorated function whose body is `return <source>`, from a file of its own."""

    text = f"def wrong(score, b, h, q_idx, kv_idx, t):\n    x = score\n    return {source}\n"
    name = f"<test {zlib.crc32(source.encode())}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, object] = {"torch": torch, "names": ["a"], "u": torch.ones(2, 2)}
    exec(compile(text, name, "exec"), space)
    return tilewise.score_mod(space["wrong"])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.fft.fft(x)", "call of"),
        ("x[0]", "an index into 'x'"),
        ("x + t", "a row of a tensor; expected a number"),
        ("t.sum(1) + x", "a call of sum with 2 arguments"),
        ("(t * x).sum()", "made of the score"),
        ("(t * (t * t).sum()).sum()", "of another such sum"),
        ("x + t @ kv_idx", "a call of matmul"),
        ("x + u[int(t)].sum()", "rows chosen by a row"),
        ("x + (t.unsqueeze(-1) * t).sum()", "a call of unsqueeze"),
        ("x + t[q_idx, 0]", "2 indices"),
        ("x + t[x]", "a float as an index"),
        ("x + nowhere", "unknown name 'nowhere'"),
        ("[x for _ in range(3)]", "for _ in range"),
        ("x if q_idx in (1, 2) else 0", ""),
        ("x + names[0]", "'names', a list"),
        ("x * (x & 3)", "'x & 3', of float, int"),
        ("x if ~x else 0", "'~x', of float"),
        ("x + (q_idx << 64)", "a shift by 64"),
        ("x + (1 >> -1)", "a shift by -1"),
        ("torch.add(x, 1, alpha=2)", "a call of add with 2 arguments, alpha"),
        ("torch.div(x, 2, rounding_mode='up')", "a call of div with 2 arguments, rounding_mode"),
        ("torch.nn.functional.gelu(x, approximate='no')", "a call of gelu with 1 arguments, approximate"),
        ("x + (q_idx + 2**63)", "the integer 9223372036854775808"),
        ("x + 10 ** 10 ** 10", "the integer 10**10000000000"),
        ("x + q_idx % 0", "a division by 0"),
        ("x + 2.0 ** 10000", "pow of 2.0 and 10000.0"),
        ("x * (-8.0) ** 0.5", "complex"),
        ("x + float('many')", "float('many')"),
    ],
)
def test_what_cannot_be_compiled_shows_its_line(source: str, found: str) -> None:
    with pytest.raises(AttentionError) as caught:
        bad(source)(torch.zeros(3))
    assert f"`return {source}`" in str(caught.value)
    assert found in str(caught.value)


TABLE = torch.tensor([1.0, 10.0, 100.0])
PLACE = (0, 1, torch.arange(3)[:, None], torch.arange(3))
Z = torch.zeros(3, 3)
SEEN = torch.ones(3, 3).tril().bool()

LAMBDAS = [lambda score, b, h, q, k: score + 2, lambda score, b, h, q, k: score if q >= k else score + 3]


def test_two_lambdas_on_one_line() -> None:
    """Told apart by their columns; of the second, no single instruction covers it."""
    first, second = (tilewise.score_mod(f)()(Z, *PLACE) for f in LAMBDAS)
    assert torch.equal(first, Z + 2)
    assert torch.equal(second, torch.where(SEEN, 0.0, 3.0))


def test_a_lambda_in_a_lambda() -> None:
    make = lambda: tilewise.score_mod(lambda score, b, h, q, k: score + 5 if q < 0 else score + 7)  # noqa: E731
    assert torch.equal(make()()(Z, *PLACE), Z + 7)


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
        lambda score, b, h, q, k: torch.where(q >= k, score, float("-inf")),
        lambda score, b, h, q, k: score if q >= k else -math.inf,
        lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf),
    ],
)
def test_ways_to_write_infinity(function: object, backend: str) -> None:
    x = torch.randn(1, 20, 2, 16, device=DEVICE)
    out = tilewise.attention(x, x, x, score_mod=tilewise.score_mod(function)(), backend=backend)
    expected = tilewise.attention(x, x, x, causal=True, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_tensors_from_outside_are_captured_with_their_gradients(backend: str) -> None:
    slopes = torch.rand(2, device=DEVICE, requires_grad=True)
    gain = 1.5

    @tilewise.score_mod
    def closed(score, b, h, q_idx, kv_idx):
        return score * gain + slopes[h] * (kv_idx - q_idx)

    @tilewise.score_mod
    def given(score, b, h, q_idx, kv_idx, slopes, gain):
        return score * gain + slopes[h] * (kv_idx - q_idx)

    x = torch.randn(1, 20, 2, 16, device=DEVICE)
    results = []
    for mod in (closed(), given(slopes, gain)):
        out = tilewise.attention(x, x, x, score_mod=mod, backend=backend)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), slopes)))
    torch.testing.assert_close(*results)
    assert results[0][1].abs().min() > 0


def tripled(factor: float, x: torch.Tensor) -> torch.Tensor:
    return x * factor


exp = functools.partial(tripled, 3.0)


class Tanh:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def abs(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


tanh, cos = Tanh(), functools.lru_cache(lambda x: x * 3)
cos.__name__ = "cos"


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: exp(score),
        lambda score, b, h, q, k: tanh(score),
        lambda score, b, h, q, k: tanh.abs(score),
        lambda score, b, h, q, k: cos(score),
    ],
)
def test_a_callable_with_the_name_of_an_elementary_function_is_not_that_function(function: Any) -> None:
    x = torch.randn(1, 9, 2, 8)
    with pytest.raises(AttentionError, match=r"'(exp|tanh|tanh\.abs|cos)', a"):
        tilewise.attention(x, x, x, score_mod=function)


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: score + exp_of_torch(k),
        lambda score, b, h, q, k: score + np.exp(k),
        lambda score, b, h, q, k: score + torch.Tensor.exp(k),
        lambda score, b, h, q, k: score + torch.ops.aten.exp(k),
        lambda score, b, h, q, k: score + torch.special.expm1(k) + 1,
        lambda score, b, h, q, k: score + math.exp(k),
    ],
)
def test_functions_of_libraries(function: Any) -> None:
    expected = Z + torch.arange(3).exp()
    torch.testing.assert_close(tilewise.score_mod(function)()(Z, *PLACE), expected)


class Properties:
    """One whose properties count how often they are read."""

    def __init__(self) -> None:
        self.read = []

    @property
    def gain(self) -> float:
        self.read.append("gain")
        return 2.0

    @property
    def tanh(self) -> float:
        self.read.append("tanh")
        return 1.0


def test_only_the_properties_that_a_mod_reads_are_called() -> None:
    owner = Properties()
    mod = tilewise.score_mod(lambda score, b, h, q, k: score.tanh() * owner.gain)
    for _ in range(3):
        assert mod()(Z, *PLACE).equal(Z)
    assert owner.read == ["gain"] * 3


def test_a_helper_reached_by_two_names_and_then_two_helpers() -> None:
    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    first = second = double
    mod = tilewise.score_mod(lambda score, b, h, q, k: first(score) + second(score))
    ones = Z + 1
    assert mod()(ones, *PLACE).equal(ones * 4)
    second = triple
    assert mod()(ones, *PLACE).equal(ones * 5)
    first, second = triple, double
    assert mod()(ones, *PLACE).equal(ones * 5)
    first = second
    assert mod()(ones, *PLACE).equal(ones * 4)


def test_one_tensor_by_two_names_and_then_two_tensors() -> None:
    first = second = TABLE
    mod = tilewise.score_mod(lambda score, b, h, q, k: score + first[k] - second[k])
    assert mod()(Z, *PLACE).equal(Z)
    second = TABLE + 1
    assert mod()(Z, *PLACE).equal(Z - 1)


def test_a_default_of_a_helper_changes() -> None:
    def scaled(x, gain=2.0):
        return x * gain

    mod = tilewise.score_mod(lambda score, b, h, q, k: scaled(score))
    ones = Z + 1
    assert mod()(ones, *PLACE).equal(ones * 2)
    scaled.__defaults__ = (3.0,)
    assert mod()(ones, *PLACE).equal(ones * 3)


def test_a_name_that_is_assigned_later() -> None:
    def make():
        mod = tilewise.score_mod(lambda score, b, h, q, k: score + late)
        with pytest.raises(AttentionError, match="unknown name 'late'"):
            mod()
        late = 2.0
        return mod

    assert make()()(Z, *PLACE).equal(Z + 2)


def test_a_mod_that_calls_itself() -> None:
    def again(score, b, h, q, k):
        return again(score, b, h, q, k)

    with pytest.raises(AttentionError, match="no recursion"):
        tilewise.score_mod(again)()


def test_a_tensor_of_an_object_and_of_a_helper() -> None:
    class Holder:
        table = TABLE

    holder = Holder()

    def helped(x, k):
        return x + holder.table[k]

    mod = tilewise.score_mod(lambda score, b, h, q, k: helped(score, k) + holder.table[0])()
    assert torch.equal(mod(Z, *PLACE), Z + TABLE + 1)
    assert len(mod.tensors) == 1
