"""Calls that look alike, with every kind of term: the second and later ones run from what the first one recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.plans import before, scaled

TOKENS, HEADS, GROUPS, DIM = 300, 8, 2, 64
Terms = dict[str, Any]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def sinks() -> tuple[Terms, list[Tensor]]:
    x = random(HEADS)
    return {"sinks": x}, [x]


def sinks_and_table() -> tuple[Terms, list[Tensor]]:
    x, table = random(HEADS), random(HEADS, dtype=torch.float32)
    return {"sinks": x, "score_mod": scaled(table, 0.5)}, [x, table]


def bias() -> tuple[Terms, list[Tensor]]:
    x = random(1, HEADS, TOKENS, TOKENS)
    return {"bias": x}, [x]


def sinks_and_bias() -> tuple[Terms, list[Tensor]]:
    x, y = random(HEADS), random(1, HEADS, 1, TOKENS)
    return {"sinks": x, "bias": y}, [x, y]


def slopes() -> tuple[Terms, list[Tensor]]:
    return {"alibi_slopes": torch.rand(HEADS, device="cuda")}, []


def ends() -> tuple[Terms, list[Tensor]]:
    x = torch.randint(1, TOKENS, (TOKENS,), device="cuda", dtype=torch.int32)
    return {"mask_mod": before(x)}, []


Kind = Callable[[], tuple[Terms, list[Tensor]]]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", [sinks, sinks_and_table, bias, sinks_and_bias, slopes, ends])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_each_of_calls_alike_is_right(backend: str, kind: Kind, packed: bool) -> None:
    """With other data each time; with a gradient of lse, odd addresses and other strides in between."""
    for turn, (odd, with_lse) in enumerate([(0, 0), (0, 0), (0, 1), (1, 0), (0, 1), (0, 0)]):
        torch.manual_seed(turn)
        away = distances(backend, kind, packed, bool(odd), bool(with_lse))
        assert max(away) < 0.03, (turn, away)


def distances(backend: str, kind: Kind, packed: bool, odd: bool, with_lse: bool) -> list[float]:
    """Of out, lse and all gradients from those of the reference, relative to their size."""
    cu = torch.tensor([0, 100, 100, 250, 290], dtype=torch.int32, device="cuda")  # and ten tokens that are in none
    outer = () if packed else (2,)
    leaves = [random(*outer, TOKENS, n, DIM) for n in (HEADS, GROUPS, GROUPS)]
    options, more = kind()
    if odd and "sinks" in options:
        more[0] = options["sinks"] = random(2 * HEADS + 1)[1::2].detach().requires_grad_()
    dout, dlse = torch.randn_like(leaves[0]), torch.randn(*outer, HEADS, TOKENS, device="cuda")
    if odd:
        dout = dout.transpose(-2, -3).contiguous().transpose(-2, -3)

    def results(backend: str, cast: Callable[[Tensor], Tensor]) -> list[Tensor]:
        q, k, v = map(cast, leaves)
        words: Terms = {"causal": True, "return_lse": True, "backend": backend, **options}
        if packed:
            found = tilewise.attention_varlen(q, k, v, cu, cu, max_seqlen_q=TOKENS, max_seqlen_k=TOKENS, **words)
        else:
            found = tilewise.attention(q, k, v, **words)
        given = (cast(dout), dlse) if with_lse else (cast(dout),)
        return [*found, *torch.autograd.grad(found[: len(given)], [*leaves, *more], given)]

    try:
        ours = results(backend, lambda x: x)
    except tilewise.AttentionError as error:
        pytest.skip(str(error))
    away = []
    for a, b in zip(ours, results("reference", Tensor.float), strict=True):
        a, b = (x.detach().float().masked_fill(x == -torch.inf, 0) for x in (a, b))
        away.append(((a - b).norm() / b.norm()).item())
    return away
