"""The portable kernels without a branch around the mask, with rows whole and in pieces (`tiles.Tile`), against
float64: the interpreter's tiles of all other tests have the branch and whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise.backends.common import tiles
from tilewise.backends.common.tiles import Tile

KINDS = {
    "no branch": Tile(16, 16, 4, 1, chunk=32, branch=False),
    "no branch, in pieces": Tile(16, 32, 4, 1, piece=32, branch=False),
    "pieces, dK apart": Tile(32, 16, 4, 1, apart=True, piece=64, branch=False),
}
DIMS = {"no branch": 96, "no branch, in pieces": 72, "pieces, dK apart": 136}


def document(n: int) -> Any:
    return tilewise.mods.document(ids=torch.arange(n) // 20)


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda n: {},
    "causal": lambda n: {"causal": True},
    "window": lambda n: {"window": (21, 0)},
    "two sides": lambda n: {"window": (17, 9), "softcap": 2.0},
    "mask": lambda n: {"mask_mod": document(n), "window": (30, 0)},
    "blocks": lambda n: {"mask_mod": tilewise.block_mask(document(n), n, n, block=(32, 32)), "causal": True},
    "terms": lambda n: {"causal": True, "dropout_p": 0.2, "seed": 3, "sinks": torch.tensor([0.3, -0.4])},
    "bias": lambda n: {"bias": torch.linspace(-1, 1, n * n).view(1, 1, n, n), "window": (25, 3)},
}


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tiles, "INTERPRETER", KINDS[request.param])
    return str(request.param)


def results(call: Callable[..., Any], tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """out, lse and the gradients of both."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    out, lse = call(*leaves)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, [x.to(dtype) for x in tensors[3:]])]


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_tile(name: str, kind: str, triton_runs: None) -> None:
    torch.manual_seed(0)
    n, d = 52, DIMS[kind]
    q, dout = torch.randn(1, n, 2, d), torch.randn(1, n, 2, d)
    k, v = (torch.randn(1, n, 1, d) for _ in range(2))
    tensors = [q, k, v, dout, torch.randn(1, 2, n)]

    def call(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        options = CALLS[name](n) | {"backend": backend, "return_lse": True}
        return results(lambda *x: tilewise.attention(*x, **options), tensors, dtype)

    check(call("triton", torch.float32), call("reference", torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("window", [(None, 0), (19, 5)], ids=str)
def test_packed_sequences(window: tuple[int | None, int], kind: str, triton_runs: None) -> None:
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 33, 33, 37, 50), (0, 40, 45, 45, 70)))
    q, dout = torch.randn(50, 1, 40), torch.randn(50, 1, 24)
    tensors = [q, torch.randn(70, 1, 40), torch.randn(70, 1, 24), dout, torch.randn(1, 50)]

    def call(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        options = {"window": window, "backend": backend, "return_lse": True, "max_seqlen_q": 33, "max_seqlen_k": 40}
        return results(lambda *x: tilewise.attention_varlen(*x, cu_q, cu_k, **options), tensors, dtype)

    check(call("triton", torch.float32), call("reference", torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hidden_key_that_is_not_finite(value: float, kind: str, triton_runs: None) -> None:
    """Key 20: rows that see it become nan, whole, and the others are what they are without it."""
    torch.manual_seed(0)
    n, d = 60, DIMS[kind]
    tensors = [torch.randn(1, n, 1, d) for _ in range(4)] + [torch.randn(1, 1, n)]
    dirty = [x.clone() for x in tensors]
    dirty[1][0, 20, :, 3] = dirty[2][0, 20, :, d - 1] = value

    def call(x: list[torch.Tensor]) -> list[torch.Tensor]:
        return results(
            lambda *x: tilewise.attention(*x, window=(10, 0), backend="triton", return_lse=True), x, torch.float32
        )

    i = torch.arange(n)
    queries = (i >= 20) & (i <= 30)
    keys = (i <= 30) & (i >= 20 - 10)  # those that a query which sees key 20 sees too
    clean, found = call(tensors), call(dirty)
    for at, seen in ((0, queries), (2, queries), (3, keys), (4, keys)):
        torch.testing.assert_close(found[at][:, ~seen], clean[at][:, ~seen], rtol=1e-5, atol=1e-5)
    assert found[0][:, queries].isnan().all()


def test_a_window_in_pieces(monkeypatch: pytest.MonkeyPatch, triton_runs: None) -> None:
    """The quick one: keys before, inside and after those that every query of a tile sees."""
    monkeypatch.setattr(tiles, "INTERPRETER", Tile(16, 16, 4, 1, piece=16, branch=False))
    torch.manual_seed(0)
    tensors = [torch.randn(1, 70, 1, 24) for _ in range(4)] + [torch.randn(1, 1, 70)]

    def call(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        options = {"window": (45, 2), "backend": backend, "return_lse": True}
        return results(lambda *x: tilewise.attention(*x, **options), tensors, dtype)

    check(call("triton", torch.float32), call("reference", torch.float64))
