"""Other people's models on torch's SDPA, replaced: as nanoGPT and litgpt write theirs, x-transformers, timm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import tilewise
from tilewise.adapters import sdpa


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each call that has reached tilewise."""
    seen: list[int] = []
    monkeypatch.setattr(sdpa, "attention", lambda *a, _f=sdpa.attention, **k: seen.append(1) or _f(*a, **k))
    return seen


class Attention(nn.Module):
    """Causal without a cache; with one, a mask of bools says what is written (litgpt's `input_pos`)."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, room: int = 16) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.qkv, self.out = nn.Linear(width, (heads + 2 * groups) * size), nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(2, 2, groups, room, size))
        self.register_buffer("seen", torch.ones(room, room, dtype=torch.bool).tril()[None, None])

    def forward(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, -1)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], 1)
        mask = None
        if at is not None:
            self.cache[0].index_copy_(2, at, k)
            self.cache[1].index_copy_(2, at, v)
            (k, v), mask = self.cache, self.seen.index_select(2, at)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=mask is None, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recognise", [False, True])
def test_a_model_with_a_cache_of_its_own(calls: list[int], recognise: bool) -> None:
    torch.manual_seed(0)
    layer, x = Attention(), torch.randn(2, 9, 32)
    with torch.no_grad():
        whole = layer(x)
        with tilewise.replaces_sdpa(recognise=recognise):
            assert_close(layer(x), whole)
            steps = [layer(x[:, :5], torch.arange(5)), *(layer(x[:, [n]], torch.tensor([n])) for n in range(5, 9))]
    assert_close(torch.cat(steps, 1), whole)
    assert len(calls) == 6


def same(model: nn.Module, *inputs: Any, **words: Any) -> None:
    """Output and gradients with torch's attention and with tilewise's."""
    found = []
    for context in (torch.enable_grad, tilewise.replaces_sdpa):
        with context():
            out = model(*inputs, **words)
            grads = torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
    assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


XT = [{}, {"attn_kv_heads": 2}, {"alibi_pos_bias": True}, {"attn_qk_norm": True}, {"attn_num_mem_kv": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("words", XT, ids=str)
def test_x_transformers(words: dict[str, Any], calls: list[int]) -> None:
    xt = pytest.importorskip("x_transformers", reason="pip install x-transformers (tried with 2.31)")
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 17))
    for kind, mask in ((xt.Decoder, None), (xt.Encoder, torch.arange(17) < torch.tensor([[11], [17]]))):
        layers = kind(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=True, **words)
        same(xt.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers).eval(), ids, mask=mask)
    assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_timm(name: str, calls: list[int]) -> None:
    timm = pytest.importorskip("timm", reason="pip install timm (tried with 1.0.30)", exc_type=Exception)
    torch.manual_seed(0)
    size = 28 if "patch14" in name else 32
    model = timm.create_model(name, img_size=size, depth=2, num_classes=5).eval()
    same(model, torch.randn(2, 3, size, size))
    assert len(calls) == 2
