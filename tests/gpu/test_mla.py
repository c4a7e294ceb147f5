"""MLA on a GPU: the portable and the Hopper kernel beside float64, token tables, plans, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.mla_cases import MlaCase, answer, compare, inputs
from tests.tilewise.kv_cache.test_mla import sparse
from tilewise.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

LENGTHS = (300, 77, 0, 1, 1500, 64)
CASES = [
    *(MlaCase(LENGTHS, heads=h, page=64) for h in (1, 8, 16, 63, 64, 126, 128)),
    *(MlaCase(LENGTHS, heads=16, queries=n, page=64) for n in (2, 3, 4, 5, 8)),
    *(MlaCase(LENGTHS, heads=h, queries=2, page=page) for h in (8, 32) for page in (0, 1, 3, 8, 16, 24, 256)),
]


@pytest.fixture(params=["triton", "hopper", "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mla(case: MlaCase, backend: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = inputs(case, dtype, "cuda")
        out = torch.full((*x.q.shape[:3], 512), torch.nan, dtype=dtype, device="cuda")
        if backend == "hopper" and case.page in (1, 3):
            with pytest.raises(tilewise.AttentionError, match="hopper"):
                tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, out=out, backend=backend)
            continue
        found = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, out=out, return_lse=True, backend=backend)
        compare(found, x.q, x.keys)


@pytest.mark.parametrize("exact", [False, True], ids=["any scales", "powers of two"])
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8(heads: int, exact: bool, backend: str) -> None:
    """The Hopper kernel rounds keys to bfloat16, which is exact if scales are powers of two."""
    hopper = backend != "triton" and torch.cuda.get_device_capability() == (9, 0)
    for queries, page in ((1, 64), (3, 16), (2, 0), (1, 3)):
        case = MlaCase(LENGTHS, heads=heads, queries=queries, page=page, packed=True, exact=exact)
        x = inputs(case, torch.bfloat16, "cuda")
        out = torch.full((*x.q.shape[:3], 512), torch.nan, dtype=x.q.dtype, device="cuda")
        found = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, out=out, return_lse=True, backend=backend)
        compare(found, x.q, x.keys, rounded=hopper and not exact)


@pytest.mark.parametrize("kind", ["float", "token"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised(stored: torch.dtype, kind: str) -> None:
    for heads, queries, page, dtype in (
        (16, 1, 64, torch.bfloat16),
        (128, 1, 64, torch.bfloat16),
        (16, 3, 3, torch.float16),
        (8, 2, 0, torch.float32),
    ):
        x = inputs(MlaCase(LENGTHS, heads=heads, queries=queries, page=page, stored=(stored, kind)), dtype, "cuda")
        out = torch.full((*x.q.shape[:3], 512), torch.nan, dtype=dtype, device="cuda")
        for backend in ("triton", "auto"):
            words = x.options | {"out": out, "return_lse": True, "backend": backend}
            compare(tilewise.attention_mla(x.q, x.cache, x.lengths, **words), x.q, x.keys)
    x = inputs(MlaCase((300, 77, 1500), heads=16, queries=2, stored=(stored, kind)), torch.bfloat16)
    indices, keys = sparse(x, 200)
    scale = x.options["k_scale"]
    scale = scale.cuda() if isinstance(scale, torch.Tensor) else scale
    q, options = x.q.cuda(), {"indices": indices.cuda(), "k_scale": scale, "return_lse": True, "backend": "triton"}
    found, lse = tilewise.attention_mla(q, x.cache.cuda(), **options)
    flat = found.flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)[..., None]
    compare(flat, q.flatten(0, 1)[:, None], [k.cuda() for k in keys], causal=False)


def test_append_with_one_scale_by_token() -> None:
    """The kernel and the reference write the same bytes and scales; the values are not written by themselves."""
    new = torch.randn(2, 3, 1, 576, device="cuda").bfloat16()
    lengths = torch.tensor([63, 3], dtype=torch.int32, device="cuda")
    for dtype in (torch.float8_e4m3fn, torch.int8):
        caches = torch.zeros(2, 2, 128, 1, 576, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(2, 2, 128, 1, device="cuda")
        for cache, scale, backend in zip(caches.view(dtype), scales, ("triton", "reference"), strict=True):
            words = {"k_scale": scale, "v_scale": scale, "backend": backend}
            for _ in range(2):  # the second call is found by its signature
                tilewise.append_kv(new, new[..., :512], cache, cache[..., :512], lengths, **words)
        assert torch.equal(*caches)
        assert torch.equal(*scales)
        assert torch.equal(
            scales[0, 0, 63:66, 0],
            new[0, :, 0].float().abs().amax(-1)
            / torch.full_like(scales[0, 0, :3, 0], 127.0 if dtype == torch.int8 else 448.0),
        )


@pytest.mark.parametrize("slots", [None, [300, -1, 7, 64]], ids=["", "slots"])
def test_append_fp8(slots: list[int] | None) -> None:
    """The bytes of `pack_mla`, and the last 64 numbers rotated as in the reference, to a unit in the last place."""
    torch.manual_seed(0)
    new = torch.randn(2, 2, 1, 576, device="cuda").bfloat16()
    table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([63, 3], dtype=torch.int32, device="cuda")
    at = torch.arange(128, device="cuda")[:, None] / 100 ** (torch.arange(32, device="cuda") / 32)
    options: dict[str, Any] = {"page_table": table} if slots is None else {"slots": torch.tensor(slots, device="cuda")}
    for rotary in (None, tilewise.Rotary(at.cos(), at.sin())):
        caches = torch.full((2, 8, 64, 1, 656), 255, dtype=torch.uint8, device="cuda")
        for cache, backend in zip(caches.view(torch.float8_e4m3fn), ("triton", "reference"), strict=True):
            written = {"rotary": rotary, "backend": backend, **options}
            tilewise.append_kv(new, new[..., :512], cache, cache[..., :512], lengths, **written)
        ours, theirs = caches
        assert torch.equal(ours[..., :528], theirs[..., :528])
        a, b = (x[..., 528:].contiguous().view(torch.bfloat16) for x in caches)
        assert torch.allclose(a.float(), b.float(), rtol=0 if rotary is None else 2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("packed", [False, True], ids=["16-bit", "fp8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_named_tokens(heads: int, packed: bool) -> None:
    on_cpu = inputs(MlaCase((300, 77, 1500), heads=heads, queries=2, packed=packed), torch.bfloat16)
    indices, keys = sparse(on_cpu, 200)
    q, cache, named = on_cpu.q.cuda(), on_cpu.cache.cuda(), indices.cuda()
    out, lse = tilewise.attention_mla(q, cache, indices=named, return_lse=True, backend="triton")
    flat = out.flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)[..., None]
    compare(flat, q.flatten(0, 1)[:, None], [k.cuda() for k in keys], causal=False)


def test_a_graph_with_other_lengths(backend: str) -> None:
    x = inputs(MlaCase((500, 77, 300), heads=32, page=64), torch.bfloat16, "cuda")
    lengths = torch.ones_like(x.lengths)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        plan = tilewise.plan_kv(x.q, x.cache, x.cache[..., :512], lengths, **x.options, backend=backend)
        return tilewise.attention_mla(x.q, x.cache, lengths, **x.options, plan=plan, return_lse=True, backend=backend)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    lengths.copy_(x.lengths)
    graph.replay()
    compare(found, x.q, x.keys)


def test_values_elsewhere_after_shared_ones() -> None:
    """The same layouts, but the values are not the first columns of the keys: another kernel, not the cached one.
    Errors are at most twice those of exact scores with weights and results in bfloat16: a fifth of torch's own."""
    x = inputs(MlaCase((300, 64), heads=16, page=64), torch.bfloat16, "cuda")
    exact, _ = answer(x.q, x.keys, torch.float64)
    rounded = answer(x.q, x.keys, torch.float64, weights=torch.bfloat16)[0].bfloat16()
    theirs = (rounded - exact).abs().max().item()
    other = x.cache.clone()
    for times, cache in ((1, x.cache), (1, other), (2, other)):
        if times == 2:
            other.mul_(2)
        out = tilewise.attention_kv(x.q, x.cache, cache[..., :512], x.lengths, **x.options)
        error = (out - times * exact).abs().max().item()
        assert error <= 2 * times * theirs, f"error {error:.1e}, of rounded weights {times * theirs:.1e}"


def test_compiled() -> None:
    x = inputs(MlaCase((300, 64), heads=32, page=64), torch.bfloat16, "cuda")

    def call(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention_mla(q, x.cache, x.lengths, **x.options)

    assert torch.allclose(torch.compile(call, fullgraph=True)(x.q), call(x.q), atol=1e-2)


def test_flash_mla() -> None:
    x = inputs(MlaCase((300, 64), heads=128, page=64), torch.bfloat16, "cuda")
    meta, splits = get_mla_metadata()
    for _ in range(2):
        found = flash_mla_with_kvcache(x.q, x.cache, x.options["page_table"], x.lengths, 512, meta, splits)
        compare(found, x.q, x.keys)
    q, kv = torch.randn(9, 64, 576, device="cuda").bfloat16(), torch.randn(500, 1, 576, device="cuda").bfloat16()
    indices = torch.stack([torch.randperm(500, device="cuda")[:100] for _ in range(9)])[:, None].int()
    out, most, lse = flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    keys = [kv[row[0].long(), 0].double() for row in indices]
    compare((out[:, None], lse[..., None]), q[:, None], keys, causal=False)
    largest = torch.stack([(row.double() @ k.mT).amax(-1) for row, k in zip(q, keys, strict=True)]) * 576**-0.5
    assert torch.allclose(most.double(), largest, atol=1e-3)
