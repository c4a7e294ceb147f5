"""attention_mla: the reference and the portable kernel (in the interpreter) beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.covering import cases
from tests.mla_cases import MlaCase, compare, inputs
from tilewise import AttentionError
from tilewise.kv_formats import unpack_latent

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
CASES = {
    "pages of 16": MlaCase((40, 17, 0, 1)),
    "3 queries": MlaCase((40, 2), queries=3, heads=6),
    "pages of 3": MlaCase((20, 7), page=3),
    "dense": MlaCase((33, 18), page=0, heads=1),
    "fp8": MlaCase((40, 17, 0), packed=True),
    "fp8, 2 queries": MlaCase((20, 18), packed=True, queries=2, page=0),
}


@cases("name", ["3 queries", "fp8"], CASES)
def test_mla(name: str, backend: str) -> None:
    for dtype in (torch.float16, torch.float32):
        x = inputs(CASES[name], dtype)
        compare(
            tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, return_lse=True, backend=backend), x.q, x.keys
        )


STORED = [(dtype, kind) for dtype in (E4M3, INT8) for kind in ("float", "tensor", "token")] + [(E4M3, "none")]


@cases("stored", [(E4M3, "token"), (INT8, "float"), (INT8, "token")], STORED, ids=str)
def test_quantised(stored: tuple[torch.dtype, str], backend: str) -> None:
    """One query in pages, several, of a dense cache, of packed queries with a plan; keys that queries name."""
    for dtype, case in (
        (torch.bfloat16, MlaCase((40, 17, 0, 1), stored=stored)),
        (torch.float16, MlaCase((20, 7), queries=3, heads=6, page=3, stored=stored)),
        (torch.float32, MlaCase((33, 18), queries=2, page=0, heads=1, stored=stored)),
    ):
        x = inputs(case, dtype)
        found = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, return_lse=True, backend=backend)
        compare(found, x.q, x.keys)
        v, options = x.cache[..., :512], x.options | {"v_scale": x.options.get("k_scale"), "backend": backend}
        plan = tilewise.plan_kv(x.q, x.cache, v, x.lengths, **options)
        out = tilewise.attention_kv(x.q, x.cache, v, x.lengths, **options, plan=plan)
        assert torch.equal(out, found[0])
    x = inputs(MlaCase((40, 17, 0), queries=2, stored=stored), torch.float16)
    indices, keys = sparse(x, 20)
    words: Any = {"k_scale": x.options.get("k_scale"), "backend": backend}
    out, lse = tilewise.attention_mla(x.q, x.cache, indices=indices, return_lse=True, **words)
    flat = out.flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)[..., None]
    compare(flat, x.q.flatten(0, 1)[:, None], keys, causal=False)


def test_quantised_rows_and_heads(backend: str) -> None:
    """Two latent heads, scales by sequence and head, tokens with gaps; sizes that float16 does not hold."""
    torch.manual_seed(0)
    q, lengths = torch.randn(2, 2, 6, 576).bfloat16(), torch.tensor([20, 3], dtype=torch.int32)
    cache = torch.randint(-127, 128, (2, 24, 2, 600)).to(INT8)[..., 7:583]
    for scale in (torch.tensor([[1e-3, 2e-2], [0.5, 1e-8]]), torch.full((2, 2), 3e7)):
        exact = cache.double() * scale[:, None, :, None].double()
        out, lse = tilewise.attention_kv(
            q, cache, cache[..., :512], lengths, k_scale=scale, v_scale=scale, return_lse=True, backend=backend
        )
        for b in range(2):
            for h in range(2):
                keys = [exact[b, : lengths[b], h]]
                one = slice(3 * h, 3 * h + 3)
                compare((out[b : b + 1, :, one], lse[b : b + 1, one]), q[b : b + 1, :, one], keys)


def test_named_tokens_of_scales_by_sequence(backend: str) -> None:
    x = inputs(MlaCase((40, 17), queries=2, stored=(INT8, "float")), torch.float32)
    size = x.options["k_scale"]
    x.options["k_scale"] = 1.0
    indices, keys = sparse(x, 20)  # of the numbers without their scale
    scale = torch.tensor([[size], [2 * size]])
    out, lse = tilewise.attention_mla(x.q, x.cache, indices=indices, k_scale=scale, return_lse=True, backend=backend)
    flat = out.flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)[..., None]
    scaled = [k * scale[n // 2].double() for n, k in enumerate(keys)]
    compare(flat, x.q.flatten(0, 1)[:, None], scaled, causal=False)


def test_check_reads_the_scales_of_tokens() -> None:
    x = inputs(MlaCase((20, 7), stored=(E4M3, "token")), torch.float16)
    options: Any = x.options | {"v_scale": x.options["k_scale"]}
    tilewise.check_kv(x.q, x.cache, x.cache[..., :512], x.lengths, **options)
    options["k_scale"][x.options["page_table"][1, 0], 6] = torch.inf
    with pytest.raises(AttentionError, match="k_scale of token 6 of sequence 1"):
        tilewise.check_kv(x.q, x.cache, x.cache[..., :512], x.lengths, **options)
    new = torch.randn(2, 1, 1, 576).half()
    options["k_scale"][x.options["page_table"][1, 0], 6] = 1.0
    options |= {"k_new": new, "v_new": new[..., 64:]}
    with pytest.raises(AttentionError, match="v_new: found other numbers than in k_new"):
        tilewise.check_kv(x.q, x.cache, x.cache[..., :512], x.lengths, **options)


@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_a_scale_that_is_nan_reaches_only_rows_that_see_it(dtype: torch.dtype, backend: str) -> None:
    x = inputs(MlaCase((20,), queries=3, stored=(dtype, "token")), torch.float16)
    table = x.options["page_table"]
    clean = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, backend=backend)
    x.options["k_scale"][table[0, 1], 3] = torch.nan  # of key 19, which the last query alone sees
    out = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, backend=backend)
    assert torch.equal(out[:, :2], clean[:, :2])
    assert out[:, 2].isnan().all()


@pytest.mark.parametrize("batch", [0, 2])
def test_no_indices(batch: int, backend: str) -> None:
    q, cache = torch.randn(batch, 2, 4, 576), torch.randn(2, 8, 1, 576)
    none = torch.zeros(batch, 2, 0, dtype=torch.int32)
    out, lse = tilewise.attention_mla(q, cache, indices=none, return_lse=True, backend=backend)
    assert out.shape == (batch, 2, 4, 512)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def sparse(x: Any, k: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Indices (B, Sq, k) of used tokens, some of them none, and the keys that each query names."""
    g = torch.Generator().manual_seed(seed)
    page, table = x.cache.shape[1], x.options["page_table"].long()
    exact = unpack_latent(x.cache, torch.float64) if x.cache.dtype == torch.uint8 else x.cache.double()
    scale = x.options.get("k_scale", 1.0)
    exact = exact * (scale[..., None].double() if isinstance(scale, torch.Tensor) and scale.dim() else float(scale))
    exact = exact.flatten(0, 1)[:, 0]
    indices = torch.full((*x.q.shape[:2], k), -1)
    for b, n in enumerate(x.lengths.tolist()):
        for i in range(x.q.shape[1]):
            j = torch.randperm(n, generator=g)[: k - 1]
            indices[b, i, 1 : 1 + len(j)] = table[b, j // page] * page + j % page
    indices[0, 0, -1] = x.cache.shape[0] * page  # past the cache: none
    valid = (indices >= 0) & (indices < x.cache.shape[0] * page)
    return indices.int(), [
        exact[row[keep]] for row, keep in zip(indices.flatten(0, 1), valid.flatten(0, 1), strict=True)
    ]


@pytest.mark.parametrize("packed", [False, True], ids=["16-bit", "fp8"])
def test_named_tokens(packed: bool, backend: str) -> None:
    x = inputs(MlaCase((40, 17, 0), queries=2, packed=packed), torch.float16)
    indices, keys = sparse(x, 20)
    out, lse = tilewise.attention_mla(x.q, x.cache, indices=indices, return_lse=True, backend=backend)
    flat = out.flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)[..., None]
    compare(flat, x.q.flatten(0, 1)[:, None], keys, causal=False)
    counts = torch.tensor([5, 20, 3], dtype=torch.int32)
    some = tilewise.attention_mla(x.q, x.cache, counts, indices=indices, backend=backend)
    cut = indices.masked_fill(torch.arange(20) >= counts[:, None, None], -1)
    assert torch.equal(some, tilewise.attention_mla(x.q, x.cache, indices=cut, backend=backend))


def test_values_elsewhere(backend: str) -> None:
    """Values that are not the first columns of the keys."""
    x = inputs(MlaCase((40, 17), queries=2), torch.float16)
    values = torch.randn(*x.cache.shape[:3], 100).half()
    out = tilewise.attention_kv(x.q, x.cache, values, x.lengths, **x.options, backend=backend)
    wide = torch.nn.functional.pad(values.double(), (0, 412))
    exact = tilewise.attention_kv(x.q.double(), x.cache.double(), wide, x.lengths, **x.options)
    assert (out.double() - exact[..., :100]).abs().max() < 4e-3


def test_a_nan_reaches_only_rows_that_see_it(backend: str) -> None:
    x = inputs(MlaCase((20,), queries=3), torch.float16)
    table = x.options["page_table"]
    x.cache[table[0, 1], 3] = torch.nan  # key 19, which the last query alone sees
    out = tilewise.attention_mla(x.q, x.cache, x.lengths, **x.options, backend=backend)
    assert out[:, :2].isfinite().all()
    assert out[:, 2].isnan().all()


def test_pack() -> None:
    """The largest number of a group becomes 448, others round to the nearest e4m3."""
    x = torch.randn(3, 576)
    x[1, :128] = 0
    packed = tilewise.pack_mla(x)
    scale = packed[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scale[0], x[0, :512].view(4, 128).abs().amax(-1) / torch.full((4,), 448.0))
    assert scale[1, 0] == 1
    assert torch.equal(packed[:, 528:].contiguous().view(torch.bfloat16), x[:, 512:].bfloat16())
    found = unpack_latent(packed, torch.float64)
    error = (found - x).abs()[:, :512].view(3, 4, 128)
    assert (error <= scale[..., None] * 16.001).all()  # half of the distance of numbers near 448
    rounded = tilewise.pack_mla(x, power_of_two=True)[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(rounded, torch.exp2(rounded.log2().round()))
    assert (rounded >= scale).all()


def test_compiled() -> None:
    x = inputs(MlaCase((40, 17)), torch.float32)

    def call(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention_mla(q, x.cache, x.lengths, **x.options)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x.q), call(x.q))


Q, CACHE = torch.randn(2, 3, 4, 576), torch.randn(2, 8, 1, 576)
INDICES = torch.tensor([[0, 9]], dtype=torch.int32).expand(2, 3, 2)


def test_contents_of_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    wrong = INDICES.clone()
    wrong[1, 2, 1] = 16
    tilewise.attention_mla(Q, CACHE, 1, indices=wrong)  # counts one index of each query
    tilewise.attention_mla(Q, CACHE, indices=-wrong)
    with pytest.raises(tilewise.AttentionError, match=r"indices\[1, 2, 1\]: found 16; expected at most 15"):
        tilewise.attention_mla(Q, CACHE, indices=wrong)


def test_out_with_gaps_between_queries() -> None:
    out = torch.empty(2, 3, 5, 512)[:, :, :4]
    tilewise.attention_mla(Q, CACHE, indices=INDICES, out=out)
    torch.testing.assert_close(out, tilewise.attention_mla(Q, CACHE, indices=INDICES))
