"""What the language understands, what it refuses and how it says so."""

from __future__ import annotations

import linecache
import math
import zlib

import pytest
import torch

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


def test_a_tensor_of_an_object_and_of_a_helper() -> None:
    class Holder:
        table = TABLE

    holder = Holder()

    def helped(x, k):
        return x + holder.table[k]

    mod = tilewise.score_mod(lambda score, b, h, q, k: helped(score, k) + holder.table[0])()
    assert torch.equal(mod(Z, *PLACE), Z + TABLE + 1)
    assert len(mod.tensors) == 1
