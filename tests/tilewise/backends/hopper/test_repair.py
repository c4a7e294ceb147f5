"""Rows that do not see a value that is not finite: the forward and its repair in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.mods.builtin import document
from tilewise.request import Request, Spec

emulator = pytest.importorskip("tilewise_lab.emulator")
hopper = pytest.importorskip("tilewise.backends.hopper.launches")

from tilewise.backends.common.launch import DeviceMemory  # noqa: E402


def run(v: torch.Tensor, spec: Spec, bad_key: int | None = None, **terms: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)"""
    torch.manual_seed(0)
    q, k = (torch.randn_like(v) for _ in range(2))
    if bad_key is not None:
        k[:, bad_key] = torch.nan
    out, lse = torch.full_like(v, torch.nan), torch.full((1, 1, v.shape[1]), torch.nan)
    request, memory = Request(q, k, v, spec, **terms), DeviceMemory(v.device)
    state = hopper.new_state(memory, request)._replace(mask_words=hopper.new_words(request, memory))
    for words in hopper.words_launches(request, state.mask_words):
        words()
    (forward,) = hopper.forward_launches(request, out, lse, state, 2)
    emulator.launch(*forward)
    assert not state.flags.any()  # ready for the next launch
    return out, lse


@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask mod"])
def test_only_who_sees_a_nan_gets_one(masked):
    v = torch.randn(1, 150, 1, 64).half()
    spoilt = v.clone()
    spoilt[:, 100] = torch.nan
    if masked:
        ids = (torch.arange(150) >= 90).int()
        mod = document(ids=ids)
        spec = Spec(0.1, mask_mod=mod.key, mask_numbers=mod.numbers, mask_tensors=1)
        terms, sees = {"mask": mod.tensors}, ids == 1
    else:
        spec, terms, sees = Spec(0.1, None, 0), {}, torch.arange(150) >= 100
    out, lse = run(v, spec, **terms)
    again, lse_again = run(spoilt, spec, **terms)
    assert again[0, sees].isnan().all()
    torch.testing.assert_close(again[0, ~sees], out[0, ~sees], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse_again, lse, atol=1e-4, rtol=0)


def test_a_nan_in_a_key_and_its_value():
    """max drops a NaN: rows that see the key have one all the same."""
    torch.manual_seed(0)
    v = torch.randn(1, 150, 1, 64).half()
    out, _ = run(v, Spec(0.1, 50, 0))
    v[:, 70] = torch.nan
    again, lse = run(v, Spec(0.1, 50, 0), bad_key=70)
    i = torch.arange(150)
    sees = (i >= 70) & (i <= 120)
    assert again[0, sees].isnan().all()
    assert lse[..., sees].isnan().all()
    torch.testing.assert_close(again[0, ~sees], out[0, ~sees], atol=2e-3, rtol=0)


def test_the_repair_knows_score_terms():
    """With a nan that nobody but its own row's followers see, all is computed again, terms included."""
    torch.manual_seed(0)
    v = torch.randn(1, 100, 1, 64).half()
    sinks, cap = torch.tensor([0.7]), tilewise.mods.softcap(0.5)
    spec = Spec(0.1, None, 0, score_mod=cap.key, score_numbers=cap.numbers)
    clean, lse = run(v, spec, sinks=sinks)
    v[:, 99] = torch.inf
    again, lse_again = run(v, spec, sinks=sinks)
    torch.testing.assert_close(again[0, :99], clean[0, :99], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse_again, lse, atol=1e-4, rtol=0)
    plain, _ = run(v, Spec(0.1, None, 0))
    assert (plain[0, :99] - again[0, :99]).abs().max() > 1e-2


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("d", [64, 256])
def test_the_repair_reads_the_bits_of_a_block_mask(d, monkeypatch):
    """Tiles of 256 keys. Each row of words has 128 keys."""
    monkeypatch.setattr("tilewise.backends.hopper.mask_words.MIN_SHARING", 0)
    torch.manual_seed(0)
    v = torch.randn(1, 300, 1, d).half()
    ids = torch.bucketize(torch.arange(300), torch.tensor([90, 170]), right=True, out_int32=True)
    mod = document(ids=ids)
    mask = tilewise.block_mask(mod, 300, 300, causal=True, block=(256, 256))
    spec = Spec(0.1, None, 0, mask_mod=mod.key, mask_tensors=1, mask_block=(256, 256, 1, 1))
    terms = {"mask": mod.tensors, "blocks": mask.lists}
    out, lse = run(v, spec, **terms)
    v[:, 120] = torch.nan
    again, lse_again = run(v, spec, **terms)
    sees = (ids == 1) & (torch.arange(300) >= 120)
    assert again[0, sees].isnan().all()
    torch.testing.assert_close(again[0, ~sees], out[0, ~sees], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse_again, lse, atol=1e-4, rtol=0)
