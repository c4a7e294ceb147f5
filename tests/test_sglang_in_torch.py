"""bench/engines/sglang_in_torch: replacements of SGLang's kernels against torch's own functions."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu
from torch.testing import assert_close

FOLDER = Path(__file__).parents[1] / "bench/engines/sglang_in_torch"
EPS = 1e-5


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(sgl_kernel, tvm_ffi.cpp) of the folder."""
    for part in ("kernels", "jit"):
        monkeypatch.syspath_prepend(str(FOLDER / part))
    before = set(sys.modules)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else operators for a CPU are defined
    yield import_module("sgl_kernel"), import_module("tvm_ffi.cpp")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("sgl_kernel", "tvm_ffi"):
            del sys.modules[name]


def test_norms_and_activations(modules: Any) -> None:
    kernels, jit = modules
    made = jit.load_inline("sgl_kernel_jit_norm")
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    assert_close(kernels.rmsnorm(x, weight, EPS), rms_norm(x, (64,), weight, EPS))
    assert_close(kernels.silu_and_mul(x), silu(x[:, :32]) * x[:, 32:])
    for fused in (kernels.fused_add_rmsnorm, made.fused_add_rmsnorm):
        y, r = x.clone(), residual.clone()
        fused(y, r, weight, EPS)
        assert_close(r, x + residual)
        assert_close(y, rms_norm(x + residual, (64,), weight, EPS))
    out = torch.empty(3, 32)
    made.run_activation(x, out, "silu")
    assert_close(out, silu(x[:, :32]) * x[:, 32:])


@pytest.mark.parametrize("neox", [True, False])
def test_rope_and_caches(modules: Any, neox: bool) -> None:
    made = modules[1].load_inline(f"sgl_kernel_jit_fused_rope_{str(neox).lower()}_8_x")
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    angles, at = torch.randn(10, 4), torch.tensor([2, 0, 9])
    turn = torch.polar(torch.ones(3, 1, 4), angles[at][:, None])
    pairs = [torch.stack(x.chunk(2, -1), -1) if neox else x.unflatten(-1, (4, 2)) for x in (q, k)]
    turned = [torch.view_as_real(torch.view_as_complex(x.contiguous()) * turn) for x in pairs]
    expected = [torch.cat(x.unbind(-1), -1) if neox else x.flatten(-2) for x in turned]
    caches = torch.zeros(2, 6, 16)
    made.run_rope_store(q, k, v, *caches, torch.cat((angles.cos(), angles.sin()), -1), at, torch.tensor([1, 5, 3]))
    assert_close([q, k], expected)
    assert_close(caches[:, [1, 5, 3]], torch.stack((k, v)).flatten(2))
    made.store_cache(v.flatten(1), k.flatten(1), *caches, torch.tensor([2, 0, 4]), 1, 6, 0)
    assert_close(caches[:, [2, 0, 4]], torch.stack((v, k)).flatten(2))


def test_other_names(modules: Any) -> None:
    from sgl_kernel.scalar_type import scalar_types  # type: ignore[import-not-found]

    assert scalar_types.uint4 is not None
    with pytest.raises(NotImplementedError, match="moe_sum"):
        modules[0].moe_sum(1)
