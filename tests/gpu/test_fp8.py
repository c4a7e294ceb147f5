"""precision="fp8" on a GPU, against the reference, which quantises in the same way and multiplies in float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.backends.reference import fp8
from tilewise.request import Request, Spec


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def relative(error: Tensor, of: Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt() / of.double().pow(2).mean().sqrt())


def lse_tolerance(q: Tensor, k: Tensor, scale: float) -> float:
    """Hopper's fp8 products are truncated to 13 bits below the largest of 32 before they are added: an error of at most
    2 ** -13 of the largest product for each of D, and as much again for the sums."""
    return float(2 * q.shape[-1] * 2.0**-13 * abs(scale) * q.abs().max() * k.abs().max())


def skip_unless_hopper(backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")


CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # Sq, Sk, H, Hk, D, Dv
    "full": ((333, 1001, 8, 2, 128, 128), {}),
    "causal": ((517, 1300, 4, 4, 128, 128), {"causal": True}),
    "empty rows": ((517, 130, 4, 4, 128, 128), {"causal": True}),
    "window": ((700, 700, 4, 1, 64, 64), {"window": (100, 20)}),
    "softcap": ((700, 700, 4, 4, 128, 128), {"causal": True, "softcap": 5.0}),
    "negative scale": ((300, 300, 4, 4, 128, 64), {"scale": -0.1}),
    "d 72": ((300, 400, 2, 2, 72, 40), {}),
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_as_the_reference(name: str, backend: str) -> None:
    torch.manual_seed(0)
    skip_unless_hopper(backend)
    (n_q, n_k, heads, kv_heads, d, dv), options = CALLS[name]
    q, k, v = random(2, n_q, heads, d), random(2, n_k, kv_heads, d) + 0.5, random(2, n_k, kv_heads, dv)
    options = {**options, "precision": "fp8", "return_lse": True}
    torch.empty(1 << 24, device="cuda").fill_(math.nan)  # what results and workspaces may be made of
    out, lse = tilewise.attention(q, k, v, backend=backend, **options)
    again, _ = tilewise.attention(q, k, v, backend=backend, **options)
    expected, expected_lse = tilewise.attention(q, k, v, backend="reference", **options)
    assert relative(out - expected, expected) < 0.035  # P in fp8
    atol = lse_tolerance(q, k, options.get("scale", d**-0.5))
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=atol)
    assert torch.equal(out, again)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_packed(backend: str) -> None:
    skip_unless_hopper(backend)
    torch.manual_seed(1)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 5, 5, 400], [0, 77, 300, 900]))
    q, k, v = random(450, 4, 128), random(1000, 2, 128), random(1000, 2, 128)
    options: dict[str, Any] = {"causal": True, "precision": "fp8", "return_lse": True}
    out, lse = tilewise.attention_varlen(q, k, v, cu_q, cu_k, backend=backend, **options)
    expected, expected_lse = tilewise.attention_varlen(q, k, v, cu_q, cu_k, backend="reference", **options)
    assert relative(out - expected, expected) < 0.035
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=lse_tolerance(q, k, 128**-0.5))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_hidden_nan_does_not_leak(backend: str) -> None:
    skip_unless_hopper(backend)
    q, k, v = (random(1, 1024, 2, 128) for _ in range(3))
    k[:, 600], v[:, 700] = math.nan, math.inf
    out = tilewise.attention(q, k, v, causal=True, precision="fp8", backend=backend)
    assert out[:, :600].isfinite().all()
    assert out[:, 600:].isnan().all()


def test_stored_bytes_are_the_documented_ones() -> None:
    from tilewise.backends.common.fp8_launches import quantise
    from tilewise.backends.common.launch import DeviceMemory, target_of

    q, k, v = random(1, 256, 4, 128), random(1, 700, 2, 128), random(1, 700, 2, 128)
    request = Request(q, k, v, Spec(0.1, precision="fp8"), sinks=torch.zeros(4, device="cuda"))
    found = quantise(request, target_of(q.device).gpu, DeviceMemory(q.device), 64, ordered=False)
    for job in found.launches.values():
        job()
    for n, stored, x, axes in ((0, found.k, k, (0, 2, 1, 3)), (1, found.v, v, (0, 3, 1, 2))):
        expected, scale = fp8.quantised(x[0], 128)
        assert torch.equal(stored.permute(axes).contiguous().view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(found.scales.keys[..., n], scale[:, 0, :, 0])
    expected, scale = fp8.quantised(q[0], 1)
    rows = expected[:, 0].unflatten(0, (-1, 128)).transpose(1, 2)
    assert torch.equal(found.q.view(torch.uint8), rows.contiguous().view(torch.uint8))
    assert torch.equal(found.scales.rows[:, :, 0], scale[:, 0, :, 0].unflatten(0, (-1, 128)).transpose(1, 2))


LARGE = {"k": 1e4, "v": 1e20, "q": 1e6}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (500, 0)}, {"causal": True, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("which", [*LARGE, "all later"])
def test_hidden_large_tokens(which: str, d: int, options: dict[str, Any], backend: str) -> None:
    """Rows that do not see them have at most twice the error; the others are as the reference's."""
    skip_unless_hopper(backend)
    torch.manual_seed(3)
    x = {name: random(2, 1100, 4, d) for name in "qkv"}
    x["k"] += random(1, 1, 4, d)
    at = [700, 990]  # each within a block of 128

    def errors() -> float:
        q, k, v = (t.double() for t in x.values())
        expected = tilewise.attention(q, k, v, backend="reference", **options)[:, : at[0]]
        out = tilewise.attention(*x.values(), backend=backend, precision="fp8", **options)[:, : at[0]]
        return relative(out - expected, expected)

    before = errors()
    for name, size in LARGE.items():
        if which in (name, "all later"):
            x[name][:, slice(at[0], None) if which == "all later" else at] *= size
    assert errors() < 2 * before < 0.15
    options = {**options, "precision": "fp8", "return_lse": True}
    out, lse = tilewise.attention(*x.values(), backend=backend, **options)
    expected, expected_lse = tilewise.attention(*x.values(), backend="reference", **options)
    size = expected.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert relative((out - expected) / size, expected / size) < 0.05
    torch.testing.assert_close(
        lse, expected_lse, rtol=2e-2, atol=lse_tolerance(x["q"][:, :700], x["k"][:, :700], d**-0.5)
    )


def test_retrieval_at_128k() -> None:
    torch.manual_seed(2)
    n, found = 131072, 64
    q, k, v = (torch.randn(1, m, 2, 128, device="cuda") for m in (found, n, n))
    at = torch.arange(found, device="cuda") * 2003 + 17
    k[:, at] = q
    out = tilewise.attention(*(x.bfloat16() for x in (q, k, v)), precision="fp8").float()
    near = torch.einsum("bihd,bjhd->bhij", out, v[:, at])
    assert (near.argmax(-1) == torch.arange(found, device="cuda")).all()
