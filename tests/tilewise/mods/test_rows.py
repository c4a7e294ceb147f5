"""Rows of tensors: what mods read with an index too few, and sums over it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.tilewise.mods.test_expr import PLACE, S
from tests.tilewise.mods.test_trace import made
from tilewise import AttentionError
from tilewise.mods import PROGRAMS
from tilewise.mods.bounds import bounds, is_narrow

HEADS, N, DIM, LENGTH = 2, 20, 8, 3


@tilewise.score_mod
def product(score, b, h, q_idx, kv_idx, queries, keys, cap: float):
    """As MLA adds what of its scores is rotated; capped, so that the slope knows the sum."""
    return cap * torch.tanh((score + 0.5 * torch.dot(queries[b, h, q_idx], keys[b, h // 2, kv_idx])) / cap)


@tilewise.score_mod
def relative(score, b, h, q_idx, kv_idx, queries, table, gains):
    """A row that both positions choose, and a number within a sum."""
    row = table[q_idx - kv_idx + N]
    return score + (queries[b, h, q_idx] * row * gains[h]).sum(-1) - 0.1 * (gains[h] + row).sum()


@tilewise.mask_mod
def chosen_tiles(b, h, q_idx, kv_idx, chosen):
    return (chosen[b, h, q_idx // 4] == kv_idx // 4).any(-1) | (kv_idx == 0)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "q": (1, N, HEADS, DIM),
        "k": (1, N, HEADS, DIM),
        "v": (1, N, HEADS, DIM),
        "queries": (1, HEADS, N, LENGTH),
        "keys": (1, 1, N, LENGTH),
        "table": (2 * N, LENGTH),
        "gains": (HEADS,),
    }
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


CHOSEN = torch.randint(0, N // 4, (1, HEADS, N // 4, 2), generator=torch.Generator().manual_seed(1))


def textbook(name: str, x: dict[str, Tensor]) -> Tensor:
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s = x["q"].transpose(1, 2) @ x["k"].permute(0, 2, 3, 1) * DIM**-0.5
    if name == "product":
        s = 2.0 * torch.tanh((s + 0.5 * x["queries"] @ x["keys"].mT) / 2.0)
    else:
        rows, gains = x["table"][i - j + N], x["gains"][None, :, None, None]
        s = s + gains * torch.einsum("bhir,ijr->bhij", x["queries"], rows)
        s = s - 0.1 * (LENGTH * gains + rows.sum(-1))
    seen = (CHOSEN[:, :, i // 4] == (j // 4)[:, None]).any(-1) | (j == 0)
    return (torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ x["v"].transpose(1, 2)).transpose(1, 2)


def attend(name: str, x: dict[str, Tensor], **options: Any) -> Tensor:
    given = {"product": (x["queries"], x["keys"], 2.0), "relative": (x["queries"], x["table"], x["gains"])}[name]
    mod = {"product": product, "relative": relative}[name](*given)
    return tilewise.attention(
        x["q"], x["k"], x["v"], score_mod=mod, mask_mod=chosen_tiles(CHOSEN.to(x["q"].device)), **options
    )


def results(out: Tensor, x: dict[str, Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, list(x.values()), weights, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", ["product", "relative"])
def test_gradients_to_the_last_bits(name: str) -> None:
    x = tensors(torch.float64)
    ours, expected = results(attend(name, x), x), results(textbook(name, x), x)
    assert len(ours) == len(expected) == (6 if name == "product" else 7)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["product", "relative"])
def test_on_every_backend(name: str, backend: str) -> None:
    x, exact = tensors(), tensors(torch.float64)
    ours, expected = results(attend(name, x, backend=backend), x), results(textbook(name, exact), exact)
    torch.testing.assert_close([g.double() for g in ours], expected, rtol=2e-5, atol=2e-5)


def test_gradients_of_gradients() -> None:
    x = tensors(torch.float64)
    leaves = [x[name].detach()[:, :, :4].requires_grad_() for name in ("queries", "keys")]
    q = torch.randn(1, 4, HEADS, DIM, dtype=torch.float64)

    def call(queries: Tensor, keys: Tensor) -> Tensor:
        return tilewise.attention(q, q, q, score_mod=product(queries, keys, 2.0))

    assert torch.autograd.gradgradcheck(call, leaves)


ROW, ROWS = torch.rand(5, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
PLACES = torch.randint(0, 5, (4, 3), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "body",
    [
        "score + torch.dot(ROW, ROWS[q_idx])",
        "score + ROW @ ROWS[q_idx] - torch.inner(ROW, ROW)",
        "score - (-ROW * ROWS[q_idx] / 2 + kv_idx).sum(dim=-1)",
        "score + (ROW - ROWS[q_idx]).abs().exp().sum(0)",
        "score + (PLACES[q_idx] == kv_idx).sum() * 0.5",
        "torch.where((PLACES[q_idx] == kv_idx.unsqueeze(-1)).any(dim=-1), score, 0.0)",
        "torch.where((PLACES[q_idx] < kv_idx).all(), score, 0.0)",
        "score + ROW[PLACES[q_idx]].sum() * ROW[kv_idx]",
        "score + PLACES[q_idx].sum() / 3",
    ],
)
@pytest.mark.parametrize("way", ["read", "followed"])
def test_what_a_row_can_do(body: str, way: str, tmp_path: Any) -> None:
    outside = {"torch": torch, "ROW": ROW, "ROWS": ROWS, "PLACES": PLACES}
    if way == "followed":
        mod = made(body, **outside)()
    else:
        space, path = dict(outside), tmp_path / "written.py"
        path.write_text(f"def mod(score, b, h, q_idx, kv_idx):\n    return {body}\n")
        exec(compile(path.read_text(), str(path), "exec"), space)
        mod = tilewise.score_mod(space["mod"])()
    found = mod(S, *PLACE)
    for i in range(4):
        for j in range(5):
            names = {**outside, "score": S[:, i, j], "q_idx": torch.tensor(i), "kv_idx": torch.tensor(j)}
            torch.testing.assert_close(found.expand(S.shape)[:, i, j], eval(body, names).double())


def test_rows_of_unequal_length() -> None:
    x = tensors()
    with pytest.raises(AttentionError, match="lengths of 3, 2; expected equal"):
        attend("product", x | {"keys": x["keys"][..., :2]})


def test_one_program_for_every_length() -> None:
    keys = {product(torch.ones(1, 1, 2, n), torch.ones(1, 1, 2, n), 1.0).key for n in (1, 3, 64)}
    assert len(keys) == 1
    mod = pickle.loads(pickle.dumps(product(torch.ones(1, 1, 2, 64), torch.ones(1, 1, 2, 64), 100.0)))
    assert mod.program is PROGRAMS[keys.pop()]
    torch.testing.assert_close(mod(torch.zeros(1), 0, 0, 0, 1), 100 * torch.tanh(torch.tensor([0.32])))


def test_behind_another_mod() -> None:
    """Tensors, and the axes that say how long a row is, are counted from those of the first mod on."""
    x = tensors(torch.float64)
    slopes = torch.rand(HEADS, dtype=torch.float64)
    out = attend("product", x, alibi_slopes=slopes.float(), softcap=3.0)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s = 3.0 * torch.tanh(x["q"].transpose(1, 2) @ x["k"].permute(0, 2, 3, 1) * DIM**-0.5 / 3.0)
    s = 2.0 * torch.tanh((s + 0.5 * x["queries"] @ x["keys"].mT) / 2.0)
    s = s - slopes.float().double()[:, None, None] * (i - j).abs()
    seen = (CHOSEN[:, :, i // 4] == (j // 4)[:, None]).any(-1) | (j == 0)
    expected = torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ x["v"].transpose(1, 2)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_compiled_whole() -> None:
    x = tensors()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled("product", x), attend("product", x))


def test_a_sum_of_integers_has_64_bits() -> None:
    root = made("score + PLACES[q_idx].sum()", PLACES=PLACES)().program.root
    wide = [x for x, own in bounds(root).items() if not is_narrow(own)]
    assert [x.op for x in wide] == ["sum"]


@pytest.mark.parametrize(
    "text",
    [
        "tilewise1;1;0;1;index:r;load:0:float 0",  # a vector
        "tilewise1;1;0;2;index:r;load:0:float 0;sum:0:1 1",  # no such axis
        "tilewise1;1;0;1;score;sum:0:0 0",
        "tilewise1;1;0;4;index:r;load:0:float 0;sum:0:0 1;mul 1 2;sum:0:0 3",
    ],
)
def test_texts_that_are_no_programs(text: str) -> None:
    with pytest.raises(AttentionError, match="a program"):
        PROGRAMS[text]
