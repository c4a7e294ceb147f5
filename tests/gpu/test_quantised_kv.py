"""Quantised KV caches on a GPU: every format and kind of scale beside float64, the bytes of appends, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.kv_cases import KvCase, compare, inputs
from tests.quantised_cases import E4M3, E5M2, INT4, INT8, KINDS, nearest, quantised

LENGTHS = (300, 77, 0, 1, 129)
HALF, BRAIN = torch.float16, torch.bfloat16
FORMATS = [E4M3, E5M2, INT8, INT4]


def check(case: KvCase, dtypes: Any, kinds: Any, dtype: torch.dtype = BRAIN, **options: Any) -> None:
    x, wanted = quantised(inputs(case, dtype, "cuda"), dtypes, kinds)
    found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **options, return_lse=True, backend="triton")
    compare(found, x, **options)
    for name, cache in (("k", x.k), ("v", x.v)):
        if name in wanted:
            assert torch.equal(cache.view(torch.uint8).cpu(), wanted[name])
        if f"{name}_scale" in wanted:
            scale = x.options[f"{name}_scale"].cpu()
            assert torch.equal(scale.nan_to_num(-1), wanted[f"{name}_scale"].nan_to_num(-1))


def kinds_of(dtype: torch.dtype) -> list[str]:
    missing = ("none",) if dtype in (INT8, INT4) else ()
    return [kind for kind in KINDS if kind not in missing and (kind != "group" or dtype == INT4)]


SCALES = [pytest.param(dtype, kind, id=f"{dtype}-{kind}") for dtype in FORMATS for kind in kinds_of(dtype)]


@pytest.mark.parametrize(("dtype", "kind"), SCALES)
def test_scales(dtype: torch.dtype, kind: str) -> None:
    check(KvCase(LENGTHS, new=1, dim=128, heads=8), (dtype, dtype), (kind, kind))


@pytest.mark.parametrize(("dtype", "kind"), SCALES)
def test_scales_of_packed_queries(dtype: torch.dtype, kind: str) -> None:
    packed = (70, 1, 0, 1, 9)
    check(KvCase(LENGTHS, queries=packed, new=packed, page=64, dim=64), (dtype, dtype), (kind, kind), HALF)


@pytest.mark.parametrize("kinds", [("group 4", "group 4"), ("group 8", "group 16"), ("token", "group 4")], ids=str)
def test_many_groups(kinds: tuple[str, str]) -> None:
    """Groups of 64 to 8 dims; one query, several, many."""
    check(KvCase(LENGTHS, new=1, dim=128, heads=8), (INT4, INT4), kinds)
    check(KvCase(LENGTHS, queries=3, new=3, page=0, dim=256), (INT4, INT4), kinds, HALF)
    packed = (70, 1, 0, 1, 9)
    check(KvCase(LENGTHS, queries=packed, new=packed, page=64, dim=96, dim_v=48), (INT4, INT4), ("group 6", "group 4"))
    check(KvCase(LENGTHS, new=1, page=3, dim=128), (INT4, INT4), kinds, torch.float32)


def finest(dtype: torch.dtype) -> tuple[str, str]:
    """The finest kinds of scales that a format of the cache has."""
    return ("group", "group") if dtype == INT4 else ("token", "token")


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", ["window", "odd dims", "256", "float32"])
def test_shapes(dtype: torch.dtype, shape: str) -> None:
    case, float_dtype, options = {
        "window": (KvCase(LENGTHS, queries=3, new=3, page=0, dim=128), BRAIN, {"window": (40, 0)}),
        "odd dims": (KvCase(LENGTHS, new=1, page=3, dim=24, dim_v=40), BRAIN, {"softcap": 2.0}),
        "256": (KvCase(LENGTHS, new=1, dim=256), BRAIN, {}),
        "float32": (KvCase(LENGTHS, new=1, dim=64), torch.float32, {}),
    }[shape]
    check(case, (dtype, dtype), finest(dtype), float_dtype, **options)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_splits(dtype: torch.dtype) -> None:
    x, _ = quantised(inputs(KvCase((1100, 300), dim=128), BRAIN, "cuda"), (dtype, dtype), finest(dtype))
    for split in (0, 128):
        found = tilewise.attention_kv(
            x.q, x.k, x.v, x.lengths, **x.options, split=split, return_lse=True, backend="triton"
        )
        compare(found, x)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN], ids=str)
def test_k_and_v_are_independent(dtype: torch.dtype) -> None:
    case = KvCase(LENGTHS, new=2, queries=2, dim=64)
    for dtypes, kinds in (
        ((BRAIN, E4M3), ("", "head")),
        ((E4M3, BRAIN), ("token", "")),
        ((HALF, BRAIN), ("", "")),
        ((BRAIN, HALF), ("", "")),
        ((INT8, INT4), ("head", "group")),
        ((E4M3, INT8), ("batch", "token")),
    ):
        check(case, dtypes, kinds, dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_appended_bytes(dtype: torch.dtype) -> None:
    """Every finite float16."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(HALF)
    x = x[x.isfinite()]
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).view(1, -1, 16, 256)
    for scale in (0.37, 1.0, 3.1e-5):
        width = 128 if dtype == INT4 else 256
        caches = torch.zeros(2, 1, x.shape[1], 16, width, dtype=torch.uint8, device="cuda").view(dtype).unbind(0)
        scales = {"k_scale": scale, "v_scale": torch.full((16,), scale, device="cuda")}
        tilewise.append_kv(x.cuda(), x.cuda(), *caches, 0, **scales, backend="triton")
        _, code = nearest(x.float() / torch.tensor(scale), dtype)
        if dtype == INT4:
            low, high = code.chunk(2, -1)
            code = low | (high << 4)
        assert torch.equal(caches[0].view(torch.uint8).cpu(), code.to(torch.uint8))
        assert torch.equal(caches[1].view(torch.uint8), caches[0].view(torch.uint8))


def test_a_graph_appends_and_attends() -> None:
    """Recorded with empty sequences, replayed with others."""
    case = KvCase((40, 7, 100), new=1, dim=128, heads=8)
    x, y = (quantised(inputs(case, BRAIN, "cuda"), (INT8, E4M3), ("token", "token"))[0] for _ in range(2))
    lengths = torch.zeros_like(x.lengths)

    def step() -> Any:
        return tilewise.attention_kv(x.q, x.k, x.v, lengths, **x.options, return_lse=True, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    x.k.copy_(y.k)
    x.v.copy_(y.v)
    for name in ("k_scale", "v_scale"):
        x.options[name].copy_(y.options[name])
    lengths.copy_(y.lengths)
    graph.replay()
    compare(found, y)


def test_qk_norm() -> None:
    """As on the reference."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, heads, 128, device="cuda") for heads in (8, 2, 2))
    at = torch.arange(64, device="cuda")[:, None] / 100 ** (torch.arange(64, device="cuda") / 64)
    weights = torch.rand(2, 128, device="cuda")
    how = {"qk_norm": tilewise.QkNorm(*weights), "rotary": tilewise.Rotary(at.cos(), at.sin())}
    lengths, found = torch.tensor([0, 4], dtype=torch.int32, device="cuda"), []
    for backend in ("triton", "reference"):
        caches = torch.zeros(2, 2, 8, 2, 128, device="cuda").unbind(0)
        found.append((tilewise.append_kv(k, v, *caches, lengths, q=q, backend=backend, **how), *caches))
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert torch.allclose(a, b, atol=1e-5)
