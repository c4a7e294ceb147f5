"""Every wrong word gets one kind of error, before anything runs; and all entrances take the same words."""

from __future__ import annotations

import inspect
import pickle
import warnings

import numpy as np
import pytest
import torch

import tilewise
from tilewise import AttentionError, mods
from tilewise.validation import offsets
from tilewise.validation.versions import check_version
from tilewise_lab.costs.explain import explain

Q = torch.zeros(1, 4, 2, 8)
T = torch.zeros(4, 2, 8)
CU = torch.tensor([0, 4], dtype=torch.int32)


def test_all_entrances_have_the_same_options() -> None:
    found = [
        {name: (p.default, p.annotation) for name, p in inspect.signature(f).parameters.items()}
        for f in (tilewise.attention, tilewise.attention_varlen, tilewise.check, explain)
    ]
    common = set.intersection(*map(set, found)) - {"q", "k", "v"}
    assert {"causal", "window", "sinks", "backend", "seed"} <= common
    for name in common:
        assert len({str(signature[name]) for signature in found}) == 1


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**40, 2**63])
@pytest.mark.parametrize("side", [0, 1])
def test_a_window_beyond_every_sequence_is_none(far: int, side: int, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    window, unbounded = (far, 0) if side == 0 else (0, far), (None, 0) if side == 0 else (0, None)
    ours = tilewise.attention(q, k, v, window=window, sinks=torch.zeros(2), backend=backend)
    assert torch.equal(ours, tilewise.attention(q, k, v, window=unbounded, sinks=torch.zeros(2), backend=backend))
    numpys = tilewise.attention(q, k, v, window=(np.int64(1), np.int32(0)), backend=backend)
    assert torch.equal(numpys, tilewise.attention(q, k, v, window=(1, 0), backend=backend))


def test_the_other_layout(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3))
    out, lse = tilewise.attention(q, k, v, causal=True, layout="bhsd", return_lse=True, backend=backend)
    swapped = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected, expected_lse = tilewise.attention(*swapped, causal=True, return_lse=True, backend=backend)
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(lse, expected_lse)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(q.grad, swapped[0].grad.transpose(1, 2))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are not read, as on a GPU."""
    monkeypatch.setattr(offsets, "is_readable_without_sync", lambda cu: False)


CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 12], [0, 8, 19]))


@pytest.mark.parametrize("shape", [(2, 1, 5, 6), (1, 2, 5, 1), (1, 1, 1, 6), (1, 1, 1, 1)])
@pytest.mark.parametrize("twice", [False, True])
def test_a_bias_past_its_end_is_zero(shape: tuple[int, ...], twice: bool, backend: str, unread: None) -> None:
    if twice and backend != "reference":
        pytest.skip("gradients of gradients are the reference's")
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 2, 8), torch.randn(19, 2, 8), torch.randn(19, 2, 8)
    short = torch.randn(shape, requires_grad=True)
    missing = [m - n if n > 1 else 0 for n, m in zip(shape[2:], (9, 11), strict=True)]
    found = [
        tilewise.attention_varlen(
            q, k, v, CU_Q, CU_K, bias=bias, max_seqlen_q=n, max_seqlen_k=m, return_lse=True, backend=name
        )
        for bias, n, m, name in (
            (short, 5, 6, backend),
            (torch.nn.functional.pad(short, (0, missing[1], 0, missing[0])), 9, 11, "reference"),
        )
    ]
    weights = torch.randn(12, 2, 8)
    grads = [torch.autograd.grad((out * weights).sum() + lse.sum(), short, create_graph=twice) for out, lse in found]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*grads)


def test_a_block_mask_of_other_sequences(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Is refused where its offsets are read; where not, nothing outside its lists is read."""
    cu, x = torch.tensor([0, 128, 256], dtype=torch.int32), torch.randn(256, 1, 8)
    mask = tilewise.block_mask_varlen(mods.block_diagonal(8), cu, cu)
    others = torch.tensor([0, 0, 256], dtype=torch.int32)
    for call in (tilewise.attention_varlen, tilewise.check):
        with pytest.raises(
            AttentionError, match=r"cu_seqlens_q of the block mask: found \[0, 128, 256\]; .* \[0, 0, 256\]"
        ):
            call(x, x, x, others, others, mask_mod=mask)
    with pytest.raises(AttentionError, match="cu_seqlens_k of the block mask"):
        tilewise.attention_varlen(x, x, x, cu, others, mask_mod=mask)
    assert torch.equal(pickle.loads(pickle.dumps(mask)).cu_seqlens[0], cu)
    cu[1] = 5  # in place: what the mask was made of is what it was
    with pytest.raises(AttentionError, match="block mask"):
        tilewise.attention_varlen(x, x, x, cu, cu, mask_mod=mask)
    monkeypatch.setattr(offsets, "is_readable_without_sync", lambda cu: False)
    out = tilewise.attention_varlen(x, x, x, others, others, mask_mod=mask, backend=backend)
    assert torch.equal(out[128:], torch.zeros(128, 1, 8))  # the mask knows one row of tiles of each sequence


def test_tables_shorter_than_a_packed_sequence(unread: None) -> None:
    x, mod = torch.zeros(19, 2, 8), mods.document(ids=torch.arange(10))
    tilewise.attention_varlen(x, x, x, CU_K, CU_K, mask_mod=mod, backend="reference")
    with pytest.raises(AttentionError, match="found 10; expected one for each key, 11,"):
        tilewise.check(x, x, x, CU_K, CU_K, mask_mod=mod)


def test_every_call_begins_with_a_check_where_that_is_wanted(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """TILEWISE_CHECK=1"""
    x, cu = torch.zeros(4, 2, 8), torch.tensor([0, 9], dtype=torch.int32)
    tilewise.attention_varlen(x, x, x, cu, cu)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(AttentionError, match="end of cu_seqlens_q: found 9"):
        tilewise.attention_varlen(x, x, x, cu, cu)


def test_a_version_that_was_not_tested_warns_once() -> None:
    with pytest.warns(UserWarning, match=r"tested with some 1.2 to 1.4; this is 1.5.0"):
        check_version("some", "1.5.0", (1, 2), (1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in ("1.5.0", "1.2", "1.4.9+cu1"):
            check_version("some", found, (1, 2), (1, 4))
