"""Quantised KV caches: every format and kind of scale, on each backend, beside float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.covering import cases, each_once
from tests.kv_cases import KvCase, compare, inputs
from tests.quantised_cases import E4M3, E5M2, INT4, INT8, KINDS, nearest, quantised
from tilewise.backends.common.kv import partition

BASE = KvCase((18, 3, 0, 9), dim=16, page=8)
HALF, BRAIN = torch.float16, torch.bfloat16


def check(
    case: KvCase, dtypes: Any, kinds: Any, backend: str, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    x, wanted = quantised(inputs(case, dtype), dtypes, kinds)
    found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **options, return_lse=True, backend=backend)
    compare(found, x, **options)
    for name, cache in (("k", x.k), ("v", x.v)):
        if name in wanted:
            assert torch.equal(cache.view(torch.uint8), wanted[name]), f"bytes of {name}"
        if f"{name}_scale" in wanted:
            assert torch.equal(x.options[f"{name}_scale"].nan_to_num(-1), wanted[f"{name}_scale"].nan_to_num(-1))


@cases(
    "dtype, kind",
    [(E4M3, "token"), (E5M2, "token"), (INT8, "batch"), (INT4, "token")],
    [*product((E4M3, E5M2), KINDS[:-1]), *product((INT8,), KINDS[1:-1]), *product((INT4,), KINDS[1:])],
    ids=str,
)
def test_formats_and_scales(dtype: torch.dtype, kind: str, backend: str) -> None:
    check(BASE.but(new=1), (dtype, dtype), (kind, kind), backend, BRAIN)
    check(BASE.but(page=0, queries=(3, 1, 0, 11), new=(3, 1, 0, 2)), (dtype, dtype), (kind, kind), backend, HALF)


@cases("dtype, kind", [(INT8, "token"), (INT4, "group")], [(E4M3, "head"), (E5M2, "token")], ids=str)
def test_tiles_of_8_rows(dtype: torch.dtype, kind: str, triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are the rows of their products, and queries the columns."""
    monkeypatch.setattr(partition, "INTERPRETER", partition.KvTile(8, 16, 4, 1, 1))
    check(BASE.but(new=1), (dtype, dtype), (kind, kind), "triton", BRAIN)
    check(BASE.but(page=0, queries=3, new=3), (dtype, dtype), (kind, kind), "triton", HALF, window=(6, 0))
    check(BASE.but(dim=24, dim_v=40), (dtype, dtype), (kind, kind), "triton", BRAIN)


@cases(
    "case, kinds",
    [(BASE.but(dim=48, dim_v=24, page=0, queries=(3, 1, 0, 11), new=(3, 1, 0, 2)), ("group 6", "group 4"))],
    [
        (BASE.but(dim=64, new=1), ("group 4", "group 8")),
        (BASE.but(dim=16, page=3, layout="interleaved", queries=2, new=2), ("group 8", "token")),
        (BASE.but(dim=8, dim_v=64, page=1, csr=True), ("head", "group 16")),
    ],
    ids=str,
)
def test_many_groups_of_dims(case: KvCase, kinds: tuple[str, str], backend: str) -> None:
    for dtype, options in ((BRAIN, {}), (torch.float32, {"window": (6, 0)})):
        check(case, (INT4, INT4), kinds, backend, dtype, **options)


def test_tiles_of_many_groups(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows, whose products have keys as their rows; divided sequences; fixed splits; the repair of nan."""
    kinds = ("group 4", "group 6")
    x, _ = quantised(inputs(KvCase((200, 40, 290), dim=64, dim_v=48), BRAIN), (INT4, INT4), kinds)
    for options in ({"split": 128}, {}):
        found = tilewise.attention_kv(
            x.q, x.k, x.v, x.lengths, **x.options, **options, return_lse=True, backend="triton"
        )
        compare(found, x)
    monkeypatch.setattr(partition, "INTERPRETER", partition.KvTile(8, 16, 4, 1, 1))
    check(BASE.but(dim=64, dim_v=48, new=1), (INT4, INT4), kinds, "triton", BRAIN)
    case = KvCase((9, 3), queries=4, new=4, dim=16, heads=2, kv_heads=1, page=8)
    x, y = (quantised(inputs(case, BRAIN), (INT4, INT4), ("group 4", "group 8"))[0] for _ in range(2))
    clean = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton")
    for name in ("k_new", "v_new"):
        y.options[name][:, 2, :, 15] = torch.nan
    out = tilewise.attention_kv(y.q, y.k, y.v, y.lengths, **y.options, backend="triton")
    assert torch.equal(out[:, :2], clean[:, :2])
    assert not out[:, 2:].isfinite().all(-1).any()


def test_a_shared_prefix_of_many_groups(triton_runs: None) -> None:
    x, _ = quantised(inputs(KvCase((40, 37), dim=32, page=8), BRAIN), (INT4, INT4), ("group 4", "group 4"))
    table = x.options["page_table"]
    for j in range(3):  # the first 24 keys of both
        table[1, j] = table[0, j]
    x.keys[1][:24], x.values[1][:24] = x.keys[0][:24], x.values[0][:24]
    shared = torch.tensor([0, 24], dtype=torch.int32)
    options = x.options | {"shared_prefix": shared, "return_lse": True, "backend": "triton"}
    compare(tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **options), x)


@each_once(rows=[8, 16], dtype=[HALF, BRAIN], ids=str)
def test_sums_of_integers(rows: int, dtype: torch.dtype, triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sums of products: lse is exact only if integers are unpacked to themselves, not to 1024 + n."""
    monkeypatch.setattr(partition, "INTERPRETER", partition.KvTile(rows, 32, 4, 1, 1))
    for stored, kind in ((INT4, "token"), (INT4, "group"), (INT8, "head")):
        check(KvCase((60, 17), dim=128, page=16), (stored, stored), (kind, kind), "triton", dtype)


@pytest.mark.parametrize(
    ("dtypes", "kinds", "dtype"),
    [
        ((BRAIN, E4M3), ("", "head"), HALF),
        ((E4M3, BRAIN), ("token", ""), BRAIN),
        ((HALF, BRAIN), ("", ""), torch.float32),
        ((INT4, E5M2), ("group", "none"), HALF),
        ((E4M3, INT8), ("batch", "token"), BRAIN),
    ],
    ids=str,
)
def test_k_and_v_are_independent(dtypes: Any, kinds: Any, dtype: torch.dtype, backend: str) -> None:
    check(BASE.but(new=2, queries=2), dtypes, kinds, backend, dtype)


@pytest.mark.parametrize(("dtype", "kind"), [(E4M3, "head"), (INT8, "token")], ids=str)
def test_odd_dims_and_strides(dtype: torch.dtype, kind: str, backend: str) -> None:
    """Bytes that cannot be read as words of 16 bits."""
    check(BASE.but(dim=15, dim_v=7, new=1), (dtype, dtype), (kind, kind), backend, BRAIN)
    x, _ = quantised(inputs(BASE, BRAIN), (dtype, dtype), (kind, kind))
    room = torch.full((*x.k.shape[:3], 33), 127, dtype=torch.uint8).view(dtype)
    room[..., 1:33:2] = x.k
    found = tilewise.attention_kv(x.q, room[..., 1:33:2], x.v, x.lengths, **x.options, return_lse=True, backend=backend)
    compare(found, x)


@each_once(new=[torch.float32, HALF, BRAIN], dtype=[E4M3, E5M2, INT8, INT4], ids=str)
def test_appended_bytes(dtype: torch.dtype, new: torch.dtype, backend: str) -> None:
    """Round to nearest even, saturate: every float16 and bfloat16 there is, beside the nearest number of the format."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    if new == torch.float32:  # halfway between two numbers of the format, and the floats next to that
        bits = bits.view(HALF).float().view(torch.int32)
        x = torch.cat([(bits + n).view(torch.float32) for n in (-1, 0, 1)])
    else:
        x = bits.view(new)
    x = x[x.isfinite()]
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).view(1, -1, 16, 256)
    for scale in (0.37, 1.0):
        width = 128 if dtype == INT4 else 256
        caches = torch.zeros(2, 1, x.shape[1], 16, width, dtype=torch.uint8).view(dtype).unbind(0)
        tilewise.append_kv(x, x, *caches, 0, k_scale=scale, v_scale=torch.full((16,), scale), backend=backend)
        _, code = nearest(x.float() / torch.tensor(scale), dtype)
        if dtype == INT4:
            low, high = code.chunk(2, -1)
            code = low | (high << 4)
        assert torch.equal(caches[0].view(torch.uint8), code.to(torch.uint8))
        assert torch.equal(caches[1].view(torch.uint8), caches[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8, INT4], ids=str)
def test_what_is_not_finite_stays_so(dtype: torch.dtype, backend: str) -> None:
    """With a scale by token, a nan or an infinity in a token makes the token nan, in every format."""
    for bad in (torch.nan, torch.inf):
        new = torch.randn(1, 3, 2, 16)
        new[0, 1, 0, 5] = bad
        caches = torch.zeros(2, 1, 4, 2, 8 if dtype == INT4 else 16, dtype=torch.uint8).view(dtype).unbind(0)
        scales = torch.zeros(2, 1, 4, 2).unbind(0)
        tilewise.append_kv(new, new, *caches, 0, k_scale=scales[0], v_scale=scales[1], backend=backend)
        q = torch.randn(1, 1, 2, 16)
        out = tilewise.attention_kv(q, *caches, 3, k_scale=scales[0], v_scale=scales[1], backend=backend)
        assert out[0, 0, 0].isnan().all()
        assert out[0, 0, 1].isfinite().all()


@each_once(dtype=[E4M3, INT8], words=["", "split", "tree"], ids=str)
def test_what_a_query_does_not_see_cannot_reach_it(words: str, dtype: torch.dtype, backend: str) -> None:
    """Scales that are not finite, and in float8 numbers that are not, of keys that only later queries see."""
    x, y = (
        quantised(
            inputs(KvCase((9, 3, 17), queries=4, new=4, dim=16, heads=2, kv_heads=1, page=8), BRAIN),
            (dtype, dtype),
            ("token", "token"),
        )[0]
        for _ in range(2)
    )
    options: Any = {
        "": {"window": (6, 0)},
        "split": {"split": 128},
        "tree": {"tree": torch.tril(torch.ones(3, 4, 4, dtype=torch.bool))},
    }[words]
    clean = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **options, backend=backend)
    for name in ("k_new", "v_new"):
        y.options[name][:, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None, None]
    out = tilewise.attention_kv(y.q, y.k, y.v, y.lengths, **y.options, **options, backend=backend)
    assert torch.equal(out[:, :2], clean[:, :2])
    assert not out[:, 2:].isfinite().any()


def test_scales_of_any_size(backend: str) -> None:
    """Weights times scales beyond the range of float16, in either direction, and both in one sequence."""
    for sizes in ([1e-12] * 40, [1e12] * 40, [10.0 ** (n % 17 - 8) for n in range(40)]):
        x = inputs(KvCase((40,), dim=16), BRAIN)
        for b in range(1):
            x.values[b] *= torch.tensor(sizes)[:, None, None]
        x, _ = quantised(x, (E4M3, INT8), ("token", "token"))
        found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, return_lse=True, backend=backend)
        compare(found, x)


def test_queries_beyond_float16(backend: str) -> None:
    """bfloat16 queries are multiplied in float16 where keys are quantised."""
    for size in (1e-30, 1e-6, 1e30):
        x = inputs(KvCase((40, 7), dim=16), BRAIN)
        x.q[:] *= size
        x.rows[:] = [row * size for row in x.rows]
        for dtypes, kinds in (((E4M3, E4M3), ("head", "none")), ((INT8, INT4), ("token", "token"))):
            y, _ = quantised(x, dtypes, kinds)
            found = tilewise.attention_kv(
                y.q, y.k, y.v, y.lengths, **y.options, scale=0.25 / size, return_lse=True, backend=backend
            )
            compare(found, y, scale=0.25 / size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_qk_norm(offset: float, interleaved: bool | None, backend: str) -> None:
    from tests.tilewise.kv_cache.test_append_kv import angles, rotated

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 20), torch.randn(2, 3, 2, 20) * 5, torch.randn(2, 3, 2, 12)
    weights = torch.rand(20), torch.randn(20)
    norm = tilewise.QkNorm(*weights, eps=1e-3, offset=offset)
    rotary = None if interleaved is None else tilewise.Rotary(*angles(10), interleaved)
    caches = torch.zeros(2, 8, 2, 20), torch.zeros(2, 8, 2, 12)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    found = tilewise.append_kv(k, v, *caches, lengths, q=q, qk_norm=norm, rotary=rotary, backend=backend)
    at = torch.tensor([0, 1, 2, 4, 5, 6])
    exact = [rms_norm(x, w + offset, 1e-3).flatten(0, 1) for x, w in zip((q, k), weights, strict=True)]
    if interleaved is not None:
        exact = [rotated(x, at, *angles(10), interleaved) for x in exact]
    assert found is not None
    assert torch.allclose(found.flatten(0, 1).double(), exact[0], atol=2e-6)
    keys = torch.cat([caches[0][0, :3], caches[0][1, 4:7]])
    assert torch.allclose(keys.double(), exact[1], atol=4e-6)
    assert torch.equal(caches[1][1, 4:7], v[1])


def test_qk_norm_into_a_quantised_cache(backend: str) -> None:
    """Norm, then rotation, then the scale of the token: one call is its parts."""
    torch.manual_seed(0)
    x, y = (quantised(inputs(BASE.but(new=2, queries=2), BRAIN), (INT8, E4M3), ("token", "head"))[0] for _ in range(2))
    at = torch.arange(64)[:, None] / 100 ** (torch.arange(8) / 8)
    how = {"qk_norm": tilewise.QkNorm(torch.rand(16), torch.rand(16)), "rotary": tilewise.Rotary(at.cos(), at.sin())}
    out = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **how, backend=backend)
    k, v = y.options.pop("k_new"), y.options.pop("v_new")
    q = tilewise.append_kv(k, v, y.k, y.v, y.lengths, **y.options, **how, q=y.q, backend=backend)
    assert q is not None
    parts = tilewise.attention_kv(q, y.k, y.v, y.lengths + 2, **y.options, backend=backend)
    assert torch.equal(out, parts)
    assert torch.equal(x.k, y.k)
    wide = tilewise.append_kv(
        k.float(), v.float(), y.k.clone(), y.v.clone(), y.lengths, **y.options, **how, q=y.q.float(), backend=backend
    )
    assert torch.allclose(q.float(), wide, atol=2e-2)
