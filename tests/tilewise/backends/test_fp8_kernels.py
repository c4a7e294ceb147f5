"""The quantising pass and the portable forward on fp8 operands, in Triton's interpreter.

The interpreter rounds to fp8 wrongly: the data here are integers up to 7 with a block maximum of 7, which fp8 holds
exactly, so that scores and lse are exact. P is not: out is compared loosely here, and on a GPU (tests/gpu/test_fp8.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.request import Request, Spec

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")


def integers(*shape: int) -> Tensor:
    """float16 integers from -7 to 7, with a 7 in every row."""
    x = torch.randint(-7, 8, shape).half()
    x[..., 0] = 7
    return x


def compare(given: tuple[Tensor, ...], cu: tuple[Tensor, Tensor] | None = None, **options: Any) -> None:
    options |= {"precision": "fp8", "return_lse": True, "scale": 0.02}

    def run(backend: str) -> Any:
        if cu is None:
            return tilewise.attention(*given, backend=backend, **options)
        return tilewise.attention_varlen(*given, *cu, backend=backend, **options)

    (out, lse), (expected, expected_lse) = run("triton"), run("reference")
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)
    assert out.dtype == given[0].dtype
    assert (out[(lse == -math.inf).transpose(-1, -2)] == 0).all()
    size = expected.abs().amax(-1, keepdim=True).float().clamp_min(1e-6)  # of a row
    error = ((out - expected) / size).pow(2).mean().sqrt() / (expected / size).pow(2).mean().sqrt()
    assert error < 0.12


SINKS = {"sinks": torch.full((4,), -3.0)}  # and no mean key is subtracted


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (20, 3)}, {"softcap": 2.0}],
    ids=["full", "causal", "window", "softcap"],
)
def test_dense(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    compare((integers(2, 70, 4, 24), integers(2, 150, 2, 24), integers(2, 150, 2, 40)), **options, **SINKS)


def test_packed() -> None:
    torch.manual_seed(1)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 60], [0, 9, 30, 160]))
    compare((integers(64, 4, 16), integers(170, 2, 16), integers(170, 2, 16)), (cu_q, cu_k), causal=True, **SINKS)


def test_strides() -> None:
    torch.manual_seed(2)
    q, k, v = integers(1, 4, 40, 16).transpose(1, 2), integers(1, 40, 8, 16)[:, :, ::2], integers(1, 40, 4, 16)
    compare((q, k, v.flip(-1)[..., ::2] + 0), **SINKS)


def test_the_mean_key_is_taken_from_keys_alone() -> None:
    """A block of two keys: rows past the end, less the mean key, would be its largest, and decide its scale."""
    torch.manual_seed(7)
    k = integers(1, 65, 2, 16)
    compare((integers(1, 20, 2, 16), torch.cat([k, -k], 1) + 64, integers(1, 130, 2, 16)))


def test_hidden_nan_does_not_leak() -> None:
    torch.manual_seed(3)
    q, k, v = integers(1, 70, 2, 16), integers(1, 70, 2, 16), integers(1, 70, 2, 16)
    k[0, 40], v[0, 50] = math.nan, math.inf
    out = tilewise.attention(q, k, v, causal=True, precision="fp8", backend="triton")
    assert out[0, :40].isfinite().all()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_stored(ordered: bool) -> None:
    from tilewise.backends.common.fp8_launches import quantise
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.request import INTERPRETER

    torch.manual_seed(4)
    q, k, v = integers(2, 70, 4, 16), integers(2, 150, 2, 16), integers(2, 150, 2, 16)
    request = Request(q, k, v, Spec(1.0, precision="fp8"), sinks=torch.zeros(4))
    found = quantise(request, INTERPRETER, DeviceMemory(torch.device("cpu")), 32, ordered)
    for x in found[:3]:
        x.view(torch.uint8).fill_(0x7F)  # NaN
    for job in found.launches.values():
        job()
    assert found.scales.shift is found.scales.own is None
    assert (found.scales.rows[:, :, 0, :70] == 7 / 448).all()
    assert (found.scales.keys == 7 / 448).all()
    order = torch.arange(128)
    if ordered:
        order = (order // 16 * 16 + order % 4 // 2 * 8 + order % 16 // 4 * 2 + order % 2).long()
    for b in range(2):
        q8 = found.q.float()[b].permute(1, 0, 2)
        torch.testing.assert_close(q8[:70, :, :16], q[b].float() * 64)
        assert (q8[70:] == 0).all()
        assert (q8[..., 16:] == 0).all()
        k8 = found.k.float()[2 * b : 2 * b + 2].transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(k8[:150, :, :16], k[b].float() * 64)
        assert (k8[150:] == 0).all()
        v8 = torch.empty(2, 128, 2, 32)
        v8[:, order] = found.v.float()[2 * b : 2 * b + 2].permute(0, 3, 1, 2)
        torch.testing.assert_close(v8.flatten(0, 1)[:150, :, :16], v[b].float() * 64)
        assert (v8.flatten(0, 1)[150:] == 0).all()


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (90, 5)}, {"causal": True, "softcap": 2.0}],
    ids=["causal", "window", "cap"],
)
def test_rows_with_scales_of_their_own(options: dict[str, Any]) -> None:
    """Powers of two times the integers, in a block of 128 keys: fp8 holds them exactly with scales by row alone."""
    torch.manual_seed(6)
    q, k, v = (integers(2, n, heads, 24).float() for n, heads in ((70, 4), (150, 2), (150, 2)))
    k[:, [60, 100, 140]] *= 2.0**14
    k[:, 61:63] = 0
    v[:, [90, 145]] *= 2.0**40
    v[:, 30] *= 2.0**-30
    compare((q, k, v), **options, **SINKS)


def test_which_rows_have_scales_of_their_own() -> None:
    from tilewise.backends.common.fp8_launches import quantise
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.request import INTERPRETER

    q, k, v = (integers(1, 300, 1, 16).float() for _ in range(3))
    k[:, 130], k[:, 140], v[:, 5] = 2.0**-8 * k[:, 130], 0, 2.0**11 * v[:, 5]  # above the limit of 2^-10, and below
    request = Request(q, k, v, Spec(1.0, after=0, precision="fp8"), sinks=torch.zeros(1))
    found = quantise(request, INTERPRETER, DeviceMemory(torch.device("cpu")), 32, False)
    for job in found.launches.values():
        job()
    keys = found.scales.keys[:, 0]
    assert (keys[:, 0] == 7 / 448).all()
    assert (keys[1:, 1] == 7 / 448).all()
    assert keys[0, 1] == -(2.0**11) * 7 / 448
    expected = torch.full((128,), 2.0**-11)
    expected[5] = 1
    assert torch.equal(keys[0, 2 + 128 :], expected)
    assert torch.equal(
        found.v[0, 0, :16].float().T, 64 * v[0, :128, 0] * torch.where(expected == 1, 2.0**-11, 1)[:, None]
    )


def test_max_logit() -> None:
    torch.manual_seed(5)
    q, k, v = integers(1, 40, 4, 16), integers(1, 60, 2, 16), integers(1, 60, 2, 16)
    found = [
        tilewise.attention(q, k, v, causal=True, precision="fp8", return_max_logit=True, backend=backend)[1]
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(found[0], found[1])


def test_dropout_is_the_references() -> None:
    q = integers(1, 20, 2, 16)
    with pytest.raises(tilewise.AttentionError, match="dropout with precision='fp8'"):
        tilewise.attention(q, q, q, dropout_p=0.5, precision="fp8", backend="triton")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 5)}], ids=str)
def test_kernels_have_all_parameters_that_launches_name(options: dict[str, Any]) -> None:
    """The interpreter ignores an unknown keyword; the compiler raises KeyError."""
    from tilewise.backends.triton.offline import offline_launches
    from tilewise.request import Gpu

    x = torch.empty(1, 100, 2, 64, dtype=torch.bfloat16, device="meta")
    request = Request(x, x, x, Spec.of(head_dim=64, precision="fp8", **options))
    launches = offline_launches(request, Gpu("cuda", 90), False)
    assert "fp8 quantise" in launches
    for name, launch in launches.items():
        known = {*launch.kernel.arg_names, "num_warps", "num_stages", "maxnreg", "launch_pdl"}
        assert set(launch.options) <= known, name
