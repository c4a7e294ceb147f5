"""A tiny Flux and a tiny SD3 of diffusers on tilewise, beside torch's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install tilewise[diffusers]")

import tilewise  # noqa: E402
import tilewise.adapters.diffusers as adapter  # noqa: E402
import tilewise.integrations.diffusers as integration  # noqa: E402


@pytest.fixture(autouse=True)
def quiet() -> None:
    diffusers.logging.set_verbosity_error()


def flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }  # fmt: skip
    return model.eval(), inputs


def sd3() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 64), "timestep": torch.tensor([1.0, 5.0]),
    }  # fmt: skip
    return model.eval(), inputs


@pytest.mark.parametrize("make", [flux, sd3])
def test_models(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    inner = adapter.scaled_dot_product_attention
    monkeypatch.setattr(adapter, "scaled_dot_product_attention", lambda *a: (calls.append(a), inner(*a))[1])
    model, inputs = make()
    with torch.no_grad():
        expected = model(**inputs).sample
        model.set_attention_backend("tilewise")
        found = model(**inputs).sample
    if make is sd3 and not calls:
        with torch.no_grad(), tilewise.replaces_sdpa():  # a processor that calls torch's attention itself
            found = model(**inputs).sample
    else:
        assert calls
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_of_keys_and_what_is_refused() -> None:
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 6, 3, 8)
    keys = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    found = integration.attention(q, k, k, keys)
    assert_close(found[:1], integration.attention(q[:1], k[:1, :3], k[:1, :3]))
    with pytest.raises(tilewise.AttentionError, match="parallelism"):
        integration.attention(q, k, k, return_lse=True)


def test_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", "1.0.0")
    with pytest.warns(UserWarning, match="tested with diffusers"):
        integration.register()
