"""precision="fp8": the option, what it computes on a CPU, and how far that is from exact attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.backends.common.fp8_format import FIRST_KEYS, KEY_BLOCK, MEAN_KEYS
from tilewise.backends.reference import fp8


def tensors(*, n: int = 300, heads: int = 4, kv_heads: int = 2, d: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, h, d) for h in (heads, kv_heads, kv_heads)]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = tilewise.attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    return out, lse


def error(found: Tensor, expected: Tensor) -> float:
    """Root mean square, relative."""
    return float((found.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


@pytest.mark.parametrize("wrong", ["fp16", "FP8", 8, True, torch.float8_e4m3fn])
def test_only_fp8_is_a_precision(wrong: Any) -> None:
    q, k, v = tensors(n=8)
    with pytest.raises(tilewise.AttentionError, match=r"precision: found .* None, or 'fp8'"):
        tilewise.attention(q, k, v, precision=wrong)


def test_no_float64() -> None:
    with pytest.raises(tilewise.AttentionError, match=r"torch\.float64"):
        tilewise.attention(*(x.double() for x in tensors(n=8)), precision="fp8")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_only(which: int) -> None:
    given = tensors(n=8)
    given[which].requires_grad_()
    with pytest.raises(tilewise.AttentionError, match="forward only"):
        tilewise.attention(*given, precision="fp8")
    with torch.no_grad():
        out = tilewise.attention(*given, precision="fp8")
    assert not out.requires_grad
    assert torch.equal(out, tilewise.attention(*(x.detach() for x in given), precision="fp8"))


def test_forward_mode_raises() -> None:
    q, k, v = tensors(n=8)
    with pytest.raises(tilewise.AttentionError, match="forward-mode"):
        torch.func.jvp(lambda x: tilewise.attention(x, k, v, precision="fp8"), (q,), (torch.ones_like(q),))


def test_stored_values_are_the_documented_ones() -> None:
    torch.manual_seed(1)
    x = torch.randn(2 * KEY_BLOCK + 3, 2, 16)
    stored, scale = fp8.quantised(x, KEY_BLOCK)
    assert stored.shape == (3, KEY_BLOCK, 2, 16)
    for block in range(3):
        for head in range(2):
            rows = x[block * KEY_BLOCK : (block + 1) * KEY_BLOCK, head]
            largest = rows.abs().max()
            assert scale[block, 0, head, 0] == largest / 448
            expected = (rows * (448 / largest)).to(torch.float8_e4m3fn)
            assert torch.equal(stored[block, : len(rows), head].float(), expected.float())
    assert (stored[2, 3:].float() == 0).all()


def test_zeros_and_tiny_values_have_a_scale() -> None:
    for value in (0.0, 1e-30):
        stored, scale = fp8.quantised(torch.full((4, 1, 8), value), KEY_BLOCK)
        assert (scale > 0).all()
        assert stored.float().isfinite().all()


@pytest.mark.parametrize(
    ("name", "most"), [("gaussian", 0.06), ("outliers", 0.09), ("mean key", 0.06), ("short", 0.06), ("softcap", 0.08)]
)
def test_error_against_float64(name: str, most: float) -> None:
    """Measured: 0.05 of gaussian data. Without smoothing, the mean key makes it 0.4."""
    q, k, v = tensors(n=5 if name == "short" else 700)
    options: dict[str, Any] = {"softcap": 3.0} if name == "softcap" else {}
    if name == "outliers":
        q, k, v = (x * torch.where(torch.rand_like(x) < 1e-3, 10.0, 1.0) for x in (q, k, v))
    if name == "mean key":
        k = k + 8 * torch.randn(1, 1, 2, 64)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected, expected_lse = exact(q, k, v, causal=True, **options)
    out, lse = tilewise.attention(q, k, v, causal=True, precision="fp8", return_lse=True, **options)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert 0.005 < error(out, expected) < most  # and it is not computed in bfloat16
    assert (lse - expected_lse).abs().max() < (1.5 if name == "outliers" else 0.4)  # scores of outliers are large
    signed = (out.double() - expected).mean() / expected.pow(2).mean().sqrt()
    assert abs(signed) < 0.005


def test_the_mean_key_is_given_back_to_lse() -> None:
    """A key shifted by c shifts every score by scale * q.c, exactly."""
    q, k, v = tensors()
    shift = torch.randn(1, 1, 2, 64) * 4
    plain, lse = tilewise.attention(q, k, v, precision="fp8", return_lse=True)
    shifted, lse_shifted = tilewise.attention(q, k + shift, v, precision="fp8", return_lse=True)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=0.02)
    expected = lse + torch.einsum("bihd,bjhd->bhi", q, shift.repeat_interleave(2, 2)) / 8
    torch.testing.assert_close(lse_shifted, expected, rtol=0, atol=0.05)


def test_the_mean_is_that_of_sampled_keys() -> None:
    k = torch.arange(3.0 * MEAN_KEYS).reshape(-1, 1, 1)
    assert fp8.mean_key(k) == k[::3].mean()
    assert fp8.mean_key(k[:7]) == 3


def test_the_mean_is_of_keys_that_rows_see_and_not_of_large_ones() -> None:
    k = torch.randn(1, 1000, 1, 8) + 3
    large = k.clone()
    large[0, 50] *= 1e6
    assert (fp8.mean_key(large[0]) - fp8.mean_key(k[0])).abs().max() < 0.05
    q = torch.randn(1, 1000, 1, 8)
    later = torch.cat([k[:, :FIRST_KEYS], 1e6 * k[:, FIRST_KEYS:]], 1)
    first, second = (tilewise.attention(q, x, x, causal=True, precision="fp8") for x in (k, later))
    torch.testing.assert_close(first[:, :FIRST_KEYS], second[:, :FIRST_KEYS], rtol=1e-4, atol=1e-4)


# A call, and the rows that do not see the key 101: of 150 queries and 150 or 290 keys
HIDDEN: dict[str, tuple[dict[str, Any], int, slice]] = {
    "causal": ({"causal": True}, 150, slice(0, 101)),
    "causal, more keys": ({"causal": True}, 290, slice(0, 0)),
    "window": ({"window": (40, 0)}, 150, slice(0, 101)),
    "window to the right": ({"window": (0, 30)}, 150, slice(0, 71)),
    "left window": ({"window": (20, None)}, 150, slice(122, 150)),
    "causal, softcap": ({"causal": True, "softcap": 5.0}, 150, slice(0, 101)),
    "mask": ({"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx}, 150, slice(0, 101)),
}


def rows_that_do_not_see(name: str, n_k: int, at: int) -> slice:
    rows = HIDDEN[name][2]
    return rows if n_k == 150 else slice(0, at - (n_k - 150))


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("large", [1e2, 1e4, 1e8, 1e20])
@pytest.mark.parametrize("which", ["q", "k", "v", "k and v"])
def test_a_hidden_key_changes_a_row_by_no_more_than_rounding(name: str, large: float, which: str) -> None:
    """Of one token, in the block of 128 keys of rows that do not see it: their error is at most twice as large."""
    options, n_k, _ = HIDDEN[name]
    at = 101 if n_k == 150 else 240
    rows = rows_that_do_not_see(name, n_k, at)
    torch.manual_seed(0)
    given = {x: torch.randn(1, n, 2, 64) for x, n in (("q", 150), ("k", n_k), ("v", n_k))}
    given["k"] += 2 * torch.randn(1, 1, 2, 64)
    other = {x: given[x].clone() for x in given}
    for x in which.split(" and "):
        other[x][:, at - (n_k - 150) if x == "q" else at] *= large
    errors = []
    for tensors in (given, other):
        expected, lse = exact(*tensors.values(), **options)
        out, found = tilewise.attention(*tensors.values(), precision="fp8", return_lse=True, **options)
        errors.append((error(out[:, rows], expected[:, rows]), error(found[..., rows], lse[..., rows])))
    (before, before_lse), (after, after_lse) = errors
    assert 0.005 < before < 0.09
    assert after < 2 * before
    assert after_lse < 2 * before_lse


@pytest.mark.parametrize("which", ["k", "v"])
def test_many_later_keys_change_no_earlier_row(which: str) -> None:
    """All keys from 90 on, of a sequence of 200 in a batch and packed."""
    torch.manual_seed(0)
    x = {name: torch.randn(1, 200, 2, 64) for name in "qkv"}
    expected = exact(*x.values(), causal=True)[0][:, :90]
    before = error(tilewise.attention(*x.values(), causal=True, precision="fp8")[:, :90], expected)
    x[which][:, 130:] *= 1e5
    cu = torch.tensor([0, 200], dtype=torch.int32)
    q, k, v = (t[0] for t in x.values())
    packed = tilewise.attention_varlen(q, k, v, cu, cu, causal=True, precision="fp8")
    for out in (tilewise.attention(*x.values(), causal=True, precision="fp8"), packed[None]):
        assert error(out[:, :90], expected) < 2 * before


def test_retrieval_in_a_long_context() -> None:
    """The value of the one key that a query is made for, among 32k others, comes back as exactly as in bfloat16."""
    torch.manual_seed(2)
    n, d = 32768, 64
    k, v = torch.randn(1, n, 1, d), torch.randn(1, n, 1, d)
    at = torch.arange(8) * 4001 + 5
    q = 3 * k[:, at]
    out = tilewise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), precision="fp8")
    near = torch.einsum("bihd,bjhd->bij", out.float(), v[:, at])
    assert (near.argmax(-1) == torch.arange(8)).all()
    assert error(out, exact(q, k, v)[0]) < 0.05


def test_packed_sequences_are_quantised_one_by_one() -> None:
    torch.manual_seed(3)
    lengths = [7, 0, 200, 130]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths) + 5, h, 32) for h in (4, 2, 2))
    out, lse = tilewise.attention_varlen(q, k, v, cu, cu, causal=True, window=(50, 0), precision="fp8", return_lse=True)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b]) + n)
        one, one_lse = tilewise.attention(
            *(x[None, rows] for x in (q, k, v)), causal=True, window=(50, 0), precision="fp8", return_lse=True
        )
        torch.testing.assert_close(out[rows], one[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])
    assert (out[cu[-1] :] == 0).all()
    assert (lse[:, cu[-1] :] == -math.inf).all()


def test_nan_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = tensors()
    k[0, 200, 0] = math.nan
    v[0, 250, 1] = math.inf
    out = tilewise.attention(q, k, v, causal=True, precision="fp8")
    assert out[0, :200].isfinite().all()
    assert out[0, 200:, :2].isnan().all()
    assert out[0, :250, 2:].isfinite().all()


@pytest.mark.parametrize("option", ["bias", "sinks", "mask_mod", "dropout_p", "return_max_logit"])
def test_the_reference_has_every_term(option: str) -> None:
    q, k, v = tensors(n=60)
    values: dict[str, Any] = {
        "bias": torch.randn(1, 4, 60, 60),
        "sinks": torch.randn(4),
        "mask_mod": tilewise.mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 > 0),
        "dropout_p": 0.3,
        "return_max_logit": True,
    }
    options = {option: values[option]} | ({"seed": 4} if option == "dropout_p" else {})
    found = tilewise.attention(q, k, v, precision="fp8", **options)
    expected = tilewise.attention(q, k, v, **options)
    if option == "return_max_logit":
        torch.testing.assert_close(found[1], expected[1], rtol=0.05, atol=0.05)
        found, expected = found[0], expected[0]
    assert 0.005 < error(found, expected.double()) < 0.08


def test_distributed_calls_raise() -> None:
    from tilewise.call.fields import ATTENTION
    from tilewise.distributed.api import sharded

    q, k, v = tensors(n=8)
    with pytest.raises(tilewise.AttentionError, match="precision"):
        sharded(q, k, v, (8, 8), (8, 8), None, ATTENTION.completed({"precision": "fp8"}))


@pytest.mark.parametrize(
    ("d", "mask", "expected"), [(128, False, "hopper"), (256, False, "triton"), (128, True, "hopper")]
)
def test_auto_takes_what_has_run_on_a_gpu(d: int, mask: bool, expected: str) -> None:
    shape = 1, 4096, 8, d
    options: Any = {"mask_mod": tilewise.mods.block_diagonal(64)} if mask else {}
    assert tilewise.explain(shape, shape, shape, device="H200", precision="fp8", **options).backend == expected


def test_explain_says_that_its_times_are_others() -> None:
    shape = 1, 4096, 8, 128
    found = tilewise.explain(shape, shape, shape, device="H200", precision="fp8")
    assert found.backend == "hopper"
    assert "does not know precision='fp8'" in found.reason
