"""Wrong arguments of `attention_mla` and FlashMLA's functions raise AttentionError."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import AttentionError, attention_mla, pack_mla
from tilewise.compat import flash_mla

Q, CACHE = torch.randn(2, 3, 4, 576), torch.randn(2, 8, 1, 576)
INDICES = torch.tensor([[0, 9]], dtype=torch.int32).expand(2, 3, 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"q": torch.tensor(1.0)}, "shape of q: found "),
        ({"q": torch.randn(576)}, "shape of q: found "),
        ({"cache": torch.tensor(1, dtype=torch.uint8)}, "cache: found torch.uint8"),
        ({"lengths": 10**30}, "lengths: found 1000"),
        ({"lengths": -1}, "lengths: found -1"),
        ({"return_lse": torch.ones(2)}, "return_lse: found Tensor"),
        ({"indices": INDICES.long()}, "dtype of indices: found torch.int64; expected torch.int32"),
        ({"out": torch.empty(512)}, "out: found"),
        ({"out": torch.empty(3, 2, 4, 512).transpose(0, 1)}, "no gap between sequences"),
    ],
)
def test_attention_mla(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"q": Q, "cache": CACHE, "indices": INDICES} | options
    with pytest.raises(AttentionError, match=match):
        attention_mla(**given)


def test_contents_of_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    wrong = INDICES.clone()
    wrong[1, 2, 1] = 16
    attention_mla(Q, CACHE, 1, indices=wrong)  # counts one index of each query
    attention_mla(Q, CACHE, indices=-wrong)
    with pytest.raises(AttentionError, match=r"indices\[1, 2, 1\]: found 16; expected at most 15, or negative"):
        attention_mla(Q, CACHE, indices=wrong)


def test_out_with_gaps_between_queries() -> None:
    out = torch.empty(2, 3, 5, 512)[:, :, :4]
    attention_mla(Q, CACHE, indices=INDICES, out=out)
    torch.testing.assert_close(out, attention_mla(Q, CACHE, indices=INDICES))


def test_flash_mla() -> None:
    def call(**options: Any) -> Any:
        given: dict[str, Any] = {"head_dim_v": 512, "indices": INDICES} | options
        meta, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(Q, CACHE, None, None, tile_scheduler_metadata=meta, **given)

    for options, match in (
        ({"attn_sink": [1.0] * 4}, "attn_sink: found list"),
        ({"head_dim_v": torch.ones(2)}, "head_dim_v"),
        ({"is_fp8_kvcache": torch.ones(2)}, "is_fp8_kvcache: found Tensor"),
        ({"causal": torch.ones(2)}, "causal: found Tensor"),
    ):
        with pytest.raises(AttentionError, match=match):
            call(**options)
    with pytest.raises(AttentionError, match="power_of_two: found Tensor"):
        pack_mla(CACHE, power_of_two=torch.ones(2))  # type: ignore[arg-type]
