"""Calls that raise AttentionError, with their messages: tests/tables/errors has one table for each public function, or
for a few of them. A row is a call, and below it the message that a user reads. The calls are written by hand:

    python -m tests.errors    # writes the messages again, after a change of their words: read the diff

`attention(scale=nan)` is the right call of `RIGHT["attention"]` with another scale. With positional arguments a call
has these alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilewise
from tests.covering import FOLDER as TABLES
from tilewise import mods, sparse
from tilewise.compat import flash_mla

FOLDER = TABLES / "errors"
INTERPRETED = "interpreted"  # the table whose calls are of kernels, in Triton's interpreter
half, bf16, f64, int8, fp8 = torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn
nan, inf = float("nan"), float("inf")


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=device, **options)


def ones(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.ones(shape, dtype=dtype, **options)


def i32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def i64(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def loops(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    for _ in range(3):
        score = score + 1
    return score


def waits(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    while score > 1:
        score = score - 1
    return score


def prints(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    print(score)
    return score


def torch_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, device="cpu")


class NoFloat:
    """As a symbol of sympy: it has a __float__ that raises."""

    def __float__(self) -> float:
        raise TypeError

    def __repr__(self) -> str:
        return "NoFloat()"


def paged() -> dict[str, Any]:
    """Two sequences in pages of 8, of 5 and 9 keys. The first has two pages, too."""
    return {
        "q": x(2, 1, 4, 16),
        "k_cache": x(5, 8, 2, 16),
        "v_cache": x(5, 8, 2, 16),
        "lengths": i32(5, 9),
        "page_table": i32([0, 1], [2, 3]),
    }


def quantised(dtype: torch.dtype = int8, **scales: Any) -> dict[str, Any]:
    """Two sequences in pages of 4 of a quantised cache."""
    width = 8 if dtype == torch.uint8 else 16
    k, v = (torch.zeros(3, 4, 2, width, dtype=torch.uint8).view(dtype) for _ in "kv")
    caches = {"k_cache": k, "v_cache": v, "page_table": i32([0, 1], [2, 1]), "lengths": i32(1, 2)}
    return {"q": x(2, 1, 4, 16), **caches, "k_scale": 0.1, "v_scale": ones(2)} | scales


def new(n: int = 1, dim: int = 16) -> dict[str, Any]:
    """New tokens of two sequences."""
    return {"k_new": ones(2, n, 2, dim), "v_new": ones(2, n, 2, dim)}


def latent(n: int = 576) -> dict[str, Any]:
    """append_kv into a cache of latents, whose values are the first columns of its keys."""
    cache, tokens = x(2, 8, 1, n), ones(2, 1, 1, n)
    n_v = 512 if n == 576 else n - 16
    return {"k_new": tokens, "v_new": tokens[..., :n_v], "k_cache": cache, "v_cache": cache[..., :n_v],
            "lengths": i32(1, 5)}  # fmt: skip


def latent_int8(k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """append_kv into a quantised cache of latents."""
    cache = x(2, 8, 1, 80, dtype=int8)
    return latent(80) | {"k_cache": cache, "v_cache": cache[..., :64], "k_scale": k_scale, "v_scale": v_scale}


def last_columns() -> dict[str, Any]:
    """append_kv into a cache of latents, whose values are the last columns of its keys."""
    cache, tokens = x(2, 8, 1, 80), ones(2, 1, 1, 80)
    return {"k_cache": cache, "v_cache": cache[..., 16:], "k_new": tokens, "v_new": tokens[..., 16:]}


def mla(**changes: Any) -> dict[str, Any]:
    """A call of attention_kv with a cache of latents."""
    cache = x(2, 16, 1, 576)
    return {"q": x(2, 2, 4, 576), "k_cache": cache, "v_cache": cache[..., :512], "lengths": 8} | changes


def mla_int8(**changes: Any) -> dict[str, Any]:
    cache = x(2, 16, 1, 576, dtype=int8)
    return mla(k_cache=cache, v_cache=cache[..., :512], k_scale=0.1, v_scale=0.1, q=x(2, 1, 4, 576).half()) | changes


def deepseek_at_odd_addresses() -> dict[str, Any]:
    """Its tokens are 658 bytes apart, and have float32 scales."""
    cache = torch.zeros(2, 8, 1, 658, dtype=torch.uint8).view(fp8)[..., :656]
    return deepseek(k_cache=cache, v_cache=cache[..., :512])


def deepseek_kv(**changes: Any) -> dict[str, Any]:
    """attention_kv with a cache of DeepSeek's fp8 format."""
    caches = {name: deepseek()[name] for name in ("k_cache", "v_cache", "lengths")}
    caches["v_cache"] = caches["k_cache"][..., :512]
    return {"q": x(2, 1, 4, 576).half()} | caches | changes


def deepseek(**changes: Any) -> dict[str, Any]:
    """append_kv into a cache of DeepSeek's fp8 format."""
    cache = tilewise.pack_mla(ones(2, 8, 1, 576)).view(fp8)
    return latent() | {"k_cache": cache, "v_cache": cache[..., :512]} | changes


def turn(dims: int, **options: Any) -> tilewise.Rotary:
    """A rotary embedding of so many dims, with 16 positions."""
    return tilewise.Rotary(ones(16, dims // 2), x(16, dims // 2), **options)


def norm(*shapes: int, **options: Any) -> tilewise.QkNorm:
    return tilewise.QkNorm(*(ones(n) for n in shapes), **options)


def token_scales(*wrong: tuple[int, int], value: float = nan, used: float = 1.0) -> Tensor:
    """Scales by token of the quantised cache, nan in unused tokens."""
    found = torch.full((3, 4, 2), nan)
    found[0, 0] = found[2, :2] = used
    for at in wrong:
        found[at] = value
    return found


def planned(q: Tensor | None = None, **changes: Any) -> tilewise.KvPlan:
    """The plan of a call like that of `paged`, by the reference."""
    return tilewise.plan_kv(**paged() | ({} if q is None else {"q": q}) | changes)


def same(shape: tuple[int, ...]) -> dict[str, Any]:
    """k_cache and v_cache in the same memory, a token apart."""
    memory = x(shape[0], shape[1] + 1, *shape[2:])
    return {"k_cache": memory[:, :-1], "v_cache": memory[:, 1:]}


def call_rotated(q_positions: Tensor | None = None) -> Any:
    """As many new tokens as queries in all, of other sequences."""
    rotary = turn(8, positions=i64(4, 4, 5), q_positions=q_positions)
    return tilewise.append_kv(
        x(3, 2, 8), x(3, 2, 8), x(2, 8, 2, 8), x(2, 8, 2, 8), i32(4, 4), q=x(3, 2, 8), cu_seqlens_q=i32(0, 2, 3),
        cu_seqlens_new=i32(0, 1, 3), rotary=rotary)  # fmt: skip


GATES = (torch.rand(1, 8, 2),) * 3
OWN = (torch.arange(8) // 4).view(1, 8, 1, 1).expand(1, 8, 2, 1)  # the block of each query
BLOCKS = tilewise.block_mask(mods.block_diagonal(16), 32, 32, block=(16, 16))
S = x(1, 8, 2, 16)
TOKENS = x(8, 2, 16)
PART = (x(1, 3, 2, 8), x(1, 2, 3))
PACKED = {"q": TOKENS, "k": TOKENS, "v": TOKENS, "cu_seqlens": i64(0, 3, 8)}

RIGHT: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attention": (tilewise.attention, lambda: {"q": x(2, 5, 4, 8), "k": x(2, 7, 2, 8), "v": x(2, 7, 2, 8)}),
    "attention_varlen": (
        tilewise.attention_varlen,
        lambda: {"q": x(9, 4, 8), "k": x(9, 2, 8), "v": x(9, 2, 8), "cu_seqlens_q": i32(0, 4, 9),
                 "cu_seqlens_k": i32(0, 3, 9)},
    ),
    "check": (tilewise.check, lambda: RIGHT["attention"][1]()),
    "check_varlen": (tilewise.check, lambda: RIGHT["attention_varlen"][1]()),
    "attention_kv": (
        tilewise.attention_kv,
        lambda: {"q": x(2, 1, 4, 16), "k_cache": x(3, 8, 2, 16), "v_cache": x(3, 8, 2, 16), "lengths": i32(1, 2)},
    ),
    "paged_kv": (tilewise.attention_kv, paged),
    "plan_kv": (tilewise.plan_kv, paged),
    "check_kv": (tilewise.check_kv, paged),
    "append_kv": (
        tilewise.append_kv,
        lambda: {"k_cache": x(3, 8, 2, 16), "v_cache": x(3, 8, 2, 16), "lengths": i32(1, 2)} | new(),
    ),
    "attention_mla": (
        tilewise.attention_mla,
        lambda: {"q": x(2, 3, 4, 576), "cache": x(2, 8, 1, 576), "indices": i32([0, 9]).expand(2, 3, 2)},
    ),
    "pack_mla": (tilewise.pack_mla, lambda: {"kv": x(2, 8, 1, 576)}),
    "moba": (sparse.moba, lambda: {"q": S, "k": S, "v": S, "block_size": 4, "top_k": 2}),
    "packed_moba": (sparse.moba, lambda: PACKED | {"block_size": 4, "top_k": 2}),
    "nsa": (
        sparse.nsa, lambda: {"q": S, "k": S, "v": S, "gates": GATES, "block_size": 4, "num_blocks": 2, "window": 2},
    ),
    "packed_nsa": (
        sparse.nsa,
        lambda: PACKED | {"gates": (x(8, 2),) * 3, "block_size": 4, "num_blocks": 2, "window": 2},
    ),
    "neighborhood": (sparse.neighborhood, lambda: {name: x(1, 9, 9, 2, 8) for name in "qkv"} | {"kernel_size": 3}),
    "topk": (sparse.topk, lambda: {"q": S, "k": S, "v": S, "indices": i32(0).expand(1, 8, 2, 1)}),
    "layer": (
        tilewise.nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: {name: x(2, 3, 8) for name in ("query", "key", "value")},
    ),
    "flash_mla": (
        flash_mla.flash_mla_with_kvcache,
        lambda: {"q": x(2, 3, 4, 576), "k_cache": x(2, 8, 1, 576), "block_table": None, "cache_seqlens": None,
                 "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0], "head_dim_v": 512,
                 "indices": i32([0, 9]).expand(2, 3, 2)},
    ),
    "merge": (tilewise.merge, dict),
}  # fmt: skip


def names() -> dict[str, Any]:
    """What the calls of the tables may name."""
    return {**globals(), **{name: changed(name) for name in RIGHT}}


def changed(name: str) -> Callable[..., Any]:
    """The function of `RIGHT`, with the arguments of the right call and changes to them."""
    function, right = RIGHT[name]

    def call(*args: Any, **changes: Any) -> Any:
        given = changes if args else right() | changes
        tensors = [x for x in (*args, *given.values()) if isinstance(x, Tensor)]
        before = [x._version for x in tensors]
        try:
            return function(*args, **given)
        except tilewise.AttentionError:
            assert [x._version for x in tensors] == before, "the call wrote into a tensor before it raised an error"
            raise

    return call


def evaluated(call: str) -> Any:
    return eval(call, names())


def message(call: str) -> str | None:
    """The message of the AttentionError that a call raises, without the path and line of a mod, or None."""
    try:
        evaluated(call)
    except tilewise.AttentionError as error:
        return re.sub(rf"{re.escape(__file__)}:\d+", "errors.py", str(error))
    return None


def table(path: Path) -> list[tuple[str, str]]:
    """(call, message) of every row."""
    rows: list[tuple[str, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            rows[-1] = rows[-1][0], line.strip()
        elif line:
            rows.append((line, ""))
    return rows


def main() -> None:
    from tests import conftest  # imports Triton for its interpreter

    assert conftest.INTERPRETED
    for path in sorted(FOLDER.glob("*.txt")):
        os.environ.pop("TRITON_INTERPRET", None)
        if path.stem == INTERPRETED:
            os.environ["TRITON_INTERPRET"] = "1"
        rows = [(call, message(call)) for call, _ in table(path)]
        path.write_text("".join(f"{call}\n    {text}\n" for call, text in rows), encoding="utf-8")
        print(
            f"{path.name}: {len(rows)} rows", *(f"  no error: {call}" for call, text in rows if text is None), sep="\n"
        )


if __name__ == "__main__":
    main()

__all__ = ["np"]  # for the calls of the tables
