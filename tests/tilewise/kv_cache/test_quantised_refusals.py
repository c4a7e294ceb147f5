"""Scales and dtypes that do not fit are found before anything is launched, and told with what to do; traced calls."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tilewise
from tests.kv_cases import KvCase, compare, inputs
from tests.quantised_cases import E4M3, INT4, INT8, quantised

I32 = torch.int32


def words(dtype: torch.dtype = INT8, **more: Any) -> dict[str, Any]:
    """A right call: two sequences in pages of 4, two KV heads of 16 dims."""
    cache = torch.zeros(3, 4, 2, 8 if dtype == INT4 else 16, dtype=torch.uint8).view(dtype)
    table = torch.tensor([[0, 1], [2, 1]], dtype=I32)
    return {"q": torch.zeros(2, 1, 4, 16), "k_cache": cache, "v_cache": cache.clone(), "page_table": table,
            "lengths": torch.tensor([1, 2], dtype=I32), "k_scale": 0.1, "v_scale": torch.ones(2)} | more  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": None}, "k_scale: found None; expected a number or a float32 tensor: an int8 cache"),
        ({"k_scale": 0.0}, "k_scale: found 0.0; expected a finite number other than 0"),
        ({"v_scale": float("nan")}, "v_scale: found nan"),
        ({"v_scale": True}, "v_scale"),
        ({"k_scale": torch.ones(2).double()}, "dtype of k_scale: found torch.float64; expected torch.float32"),
        ({"k_scale": torch.ones(4)}, r"shape of k_scale: found \(4,\); expected \(\) or \(2,\) by head"),
        ({"v_scale": torch.ones(3, 2)}, r"shape of v_scale: found \(3, 2\)"),
        ({"v_scale": torch.ones(3, 4, 1)}, r"expected .*\(3, 4, 2\) by token and head"),
        ({"v_scale": torch.ones(3, 4, 2, 2)}, "shape of v_scale"),
        (words(INT4, k_scale=torch.ones(3, 4, 2, 3)), r"shape of k_scale: .*\(3, 4, 2, G\).* even number G .* 16"),
        (words(INT4, k_scale=torch.ones(3, 4, 2, 6)), r"shape of k_scale: found \(3, 4, 2, 6\)"),
        (words(INT4, k_scale=torch.ones(3, 4, 2, 0)), r"shape of k_scale: found \(3, 4, 2, 0\)"),
        ({"v_scale": torch.ones(2, device="meta")}, "device of v_scale: found meta; expected cpu.*a Python float"),
        ({"v_scale": torch.ones(2, requires_grad=True)}, "requires_grad"),
        ({"k_cache": torch.zeros(3, 4, 2, 16)}, "k_scale: found 0.1; expected None: k_cache has torch.float32"),
        ({"k_cache": torch.zeros(3, 4, 2, 16, dtype=torch.int32)}, "dtype of k_cache: found torch.int32; expected"),
        ({"q": torch.zeros(2, 1, 4, 16).half(), "k_cache": torch.zeros(3, 4, 2, 16), "k_scale": None}, "dtype of k"),
        ({"k_cache": torch.zeros(3, 4, 2, 16, dtype=INT4)}, "head dim of k_cache: found 32; expected q's 16"),
        ({"qk_norm": tilewise.QkNorm(torch.ones(16), torch.ones(16))}, "qk_norm.* given without new tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tilewise.AttentionError, match=message):
        tilewise.attention_kv(**words(**changes))


NEW = {"k_new": torch.ones(2, 1, 2, 16), "v_new": torch.ones(2, 1, 2, 16)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": torch.ones(1, 1, 2).expand(3, 4, 2)}, "strides of k_scale.*distinct memory"),
        ({"v_new": torch.ones(2, 1, 2, 16).half()}, "dtype of v_new"),
        ({"k_new": torch.ones(2, 1, 2, 8)}, r"heads and dim of k_new: found \(2, 8\); expected the cache's \(2, 16\)"),
        ({"k_new": torch.ones(2, 1, 2, 16, dtype=torch.int8)}, "dtype of k_new"),
        ({"qk_norm": torch.ones(16)}, "qk_norm: found Tensor; expected tilewise.QkNorm"),
        ({"qk_norm": tilewise.QkNorm(torch.ones(8), torch.ones(16))}, "qk_norm q_weight"),
        ({"qk_norm": tilewise.QkNorm(torch.ones(16), torch.ones(16).int())}, "qk_norm k_weight"),
        ({"qk_norm": tilewise.QkNorm(torch.ones(16), torch.ones(16), eps=-1.0)}, "qk_norm eps"),
    ],
    ids=str,
)
def test_new_tokens_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tilewise.AttentionError, match=message):
        tilewise.attention_kv(**words(**NEW | changes))


def test_check_kv_reads_scales() -> None:
    scale = torch.full((3, 4, 2), torch.nan)
    scale[0, 0] = scale[2, 0] = 1.0
    found = words(k_scale=scale)
    with pytest.raises(tilewise.AttentionError, match="k_scale of token 1 of sequence 1"):
        tilewise.check_kv(**found)
    scale[2, 1] = 1.0
    tilewise.check_kv(**found)
    with pytest.raises(tilewise.AttentionError, match=re.escape("v_scale: found [0.0]; expected finite numbers")):
        tilewise.check_kv(**words(v_scale=torch.tensor([1.0, 0.0])))
    dense = words(E4M3, page_table=None, k_scale=None, v_scale=torch.full((3, 4, 2), torch.inf))
    with pytest.raises(tilewise.AttentionError, match="v_scale of token 0 of sequence 0"):
        tilewise.check_kv(**dense)


def test_a_plan_is_for_its_formats() -> None:
    found = words()
    plan = tilewise.plan_kv(**found)
    tilewise.attention_kv(**found, plan=plan)
    with pytest.raises(tilewise.AttentionError, match="plan"):
        tilewise.attention_kv(**words(E4M3), plan=plan)


def test_a_plan_is_for_its_groups() -> None:
    found = words(INT4, k_scale=torch.ones(3, 4, 2, 4))
    plan = tilewise.plan_kv(**found)
    tilewise.attention_kv(**found, plan=plan)
    with pytest.raises(tilewise.AttentionError, match=r"groups of k_scale by token 4; expected .* 2, as in this call"):
        tilewise.attention_kv(**words(INT4, k_scale=torch.ones(3, 4, 2, 2)), plan=plan)


def test_groups_that_kernels_lack(triton_runs: None) -> None:
    """Of one dim each."""
    found = words(INT4, k_scale=torch.ones(3, 4, 2, 16))
    tilewise.attention_kv(**found)
    with pytest.raises(tilewise.AttentionError, match="k_cache with 16 groups of 1 dims"):
        tilewise.attention_kv(**found, backend="triton")


def test_a_kernel_that_lacks_a_format() -> None:
    q = torch.zeros(1, 1, 2, 6)
    cache = torch.zeros(1, 4, 2, 3, dtype=INT4)
    found = tilewise.attention_kv(q, cache, cache, 2, k_scale=1.0, v_scale=1.0)
    assert found.shape == (1, 1, 2, 6)
    with pytest.raises(tilewise.AttentionError, match="backend='triton'"):
        tilewise.attention_kv(q, cache, cache, 2, k_scale=1.0, v_scale=1.0, backend="triton")


@pytest.mark.parametrize("kind", ["float", "head", "token"])
def test_compile(kind: str) -> None:
    case = KvCase((20, 3), new=2, queries=2, dim=16, page=8)
    x, wanted = quantised(inputs(case), (INT8, E4M3), (kind, kind))
    y, _ = quantised(inputs(case), (INT8, E4M3), (kind, kind))
    norm = tilewise.QkNorm(torch.rand(16), torch.rand(16))
    k_scale, v_scale = x.options.pop("k_scale"), x.options.pop("v_scale")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q: Any, k: Any, v: Any, lengths: Any, k_scale: Any, v_scale: Any, norm: Any = None) -> Any:
        return tilewise.attention_kv(
            q, k, v, lengths, **x.options, k_scale=k_scale, v_scale=v_scale, qk_norm=norm, return_lse=True
        )

    compare(step(x.q, x.k, x.v, x.lengths, k_scale, v_scale), x)
    assert torch.equal(x.k.view(torch.uint8), wanted["k"])
    if kind == "token":
        assert torch.equal(v_scale.nan_to_num(-1), wanted["v_scale"].nan_to_num(-1))
    out, _ = step(x.q, x.k, x.v, x.lengths, k_scale, v_scale, norm)
    assert torch.allclose(out, tilewise.attention_kv(y.q, y.k, y.v, y.lengths, **y.options, qk_norm=norm), atol=1e-5)
