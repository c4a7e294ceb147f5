"""Errors name the function and the argument, also those of checks that `tilewise.attention` has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tilewise import AttentionError, sparse

X = torch.randn(1, 8, 2, 16)
CU = torch.tensor([0, 3, 8])
GATES: Any = (torch.rand(1, 8, 2),) * 3
NO_HEADS: Any = (torch.rand(1, 8, 0),) * 3
OWN = (torch.arange(8) // 4).view(1, 8, 1, 1).expand(1, 8, 2, 1)


def moba(q: Any = X, k: Any = X, v: Any = X, **options: Any) -> Any:
    return sparse.moba(q, k, v, **{"block_size": 4, "top_k": 2} | options)


def packed(**options: Any) -> Any:
    return sparse.moba(X[0], X[0], X[0], **{"block_size": 4, "top_k": 2, "cu_seqlens": CU} | options)


def nsa(q: Any = X, k: Any = X, v: Any = X, gates: Any = GATES, **options: Any) -> Any:
    return sparse.nsa(q, k, v, gates, **{"block_size": 4, "num_blocks": 2, "window": 2} | options)


def neighborhood(q: Any = X, k: Any = X, v: Any = X, **options: Any) -> Any:
    return sparse.neighborhood(q, k, v, **{"kernel_size": 3} | options)


def topk(q: Any = X, k: Any = X, v: Any = X) -> Any:
    return sparse.topk(q, k, v, torch.zeros(1, 8, 2, 1, dtype=torch.int32))


def gate(dtype: torch.dtype) -> Any:
    return lambda q, k, n: torch.zeros(1, 8, 2, 2, dtype=dtype)


def blocks(value: int, dtype: torch.dtype = torch.int64) -> Any:
    return nsa(blocks=torch.full((1, 8, 2, 1), value, dtype=dtype))


CASES: dict[str, Any] = {
    "head dim of k of moba: found 4; expected q's 16": lambda: moba(k=X[..., :4]),
    "dtype of k of moba: found torch.float64; expected q's torch.float32": lambda: moba(k=X.double()),
    "dtype of q of moba: found torch.int64": lambda: moba(X.long(), X.long(), X.long()),
    "shape of v of moba: found (1, 8, 1, 16)": lambda: moba(v=X[:, :, :1]),
    "heads of q of moba: found 0; expected at least 1": lambda: moba(X[:, :, :0]),
    "scale of moba: found nan": lambda: moba(scale=float("nan")),
    "backend of moba: found 'none'": lambda: moba(backend="none"),
    "gate of moba: found 3; expected a function": lambda: moba(gate=3),
    "result of gate of moba: found a tensor (1, 8, 2, 2) of torch.int64": lambda: moba(gate=gate(torch.int64)),
    "result of gate of moba: found a tensor (1, 8, 2, 2) of torch.bool": lambda: moba(gate=gate(torch.bool)),
    "cu_seqlens[2] of moba: found 2; expected at least cu_seqlens[1], 3": lambda: packed(
        cu_seqlens=torch.tensor([0, 3, 2])
    ),
    "dtype of cu_seqlens of moba: found torch.float32": lambda: packed(cu_seqlens=CU.float()),
    "cu_seqlens of moba: found list": lambda: packed(cu_seqlens=[0, 8]),
    "dtype of k of nsa: found torch.float64": lambda: nsa(k=X.double()),
    "heads of q of nsa: found 3": lambda: nsa(torch.randn(1, 8, 3, 16), gates=(torch.rand(1, 8, 3),) * 3),
    "heads of q of nsa: found 0; expected at least 1": lambda: nsa(X[:, :, :0], gates=NO_HEADS),
    "dtype of compressed of nsa: found torch.float64": lambda: nsa(compressed=(X[:, :2].double(),) * 2),
    "gates of nsa: found (a tensor (1, 8, 2) of torch.int64": lambda: nsa(gates=tuple(g.long() for g in GATES)),
    "blocks[0, 0, 0, 0] of nsa: found 2; expected -1 for none, or 0 to 0, the query's own": lambda: blocks(2),
    "blocks[0, 0, 0, 0] of nsa: found 1;": lambda: blocks(1),
    "blocks[0, 0, 0, 0] of nsa: found -2": lambda: blocks(-2),
    "blocks[0, 0, 0, 0] of nsa: found 4294967296": lambda: blocks(2**32),
    "blocks[0, 0, 0, 0] of nsa: found 1073741824": lambda: blocks(2**30, torch.int32),
    "blocks[0, 0, 0] of nsa: found 0 twice": lambda: nsa(blocks=torch.cat([OWN, OWN], -1)),
    "shape of blocks of nsa: found (1, 8, 2, 0); expected (1, 8, 2) and n at least 1": lambda: nsa(blocks=OWN[..., :0]),
    "dtype of k of neighborhood: found torch.float64": lambda: neighborhood(k=X.double()),
    "heads of q of neighborhood: found 3": lambda: neighborhood(torch.randn(1, 8, 3, 16)),
    "scale of neighborhood: found inf": lambda: neighborhood(scale=float("inf")),
    "dtype of q of topk: found torch.float8_e4m3fn": lambda: topk(*(X.to(torch.float8_e4m3fn),) * 3),
    "block_size of selected_blocks: found 0": lambda: sparse.selected_blocks(
        X, X[:, :2], torch.zeros(1, 2, 8), block_size=0, num_blocks=2
    ),
    "num_blocks of selected_blocks: found 0": lambda: sparse.selected_blocks(
        X, X[:, :2], torch.zeros(1, 2, 8), block_size=4, num_blocks=0
    ),
    "block_size of mean_key_gate: found 3; expected a number that divides the 8 tokens": lambda: sparse.mean_key_gate(
        X, X, 3
    ),
}


@pytest.mark.parametrize("match", CASES)
def test_names(match: str) -> None:
    with pytest.raises(AttentionError, match=re.escape(match)):
        CASES[match]()


def test_right_calls_pass() -> None:
    """What the cases change; a gate in float16; -1 and blocks without the own one."""
    for call in (moba, packed, nsa, neighborhood, topk):
        call()
    moba(gate=gate(torch.float16))
    nsa(blocks=OWN)
    blocks(-1)
    blocks(0, torch.int32)
