"""Rows that do not see a value that is not finite: the forward and its repair in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.mods.builtin import document
from tilewise.mods.program import bound
from tilewise.request import Request, Spec

emulator = pytest.importorskip("tilewise_lab.emulator")
hopper = pytest.importorskip("tilewise.backends.hopper.launches")

from tilewise.backends.common.launch import DeviceMemory  # noqa: E402


def run(
    v: torch.Tensor, spec: Spec, bad_key: int | None = None, bad_queries: torch.Tensor | None = None, **terms: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)"""
    torch.manual_seed(0)
    q, k = (torch.randn_like(v) for _ in range(2))
    if bad_key is not None:
        k[:, bad_key] = torch.nan
    if bad_queries is not None:
        q[:, bad_queries] = torch.nan
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


def test_several_tiles_of_a_program_and_several_launches():
    """One program computes seven tiles. Memory for lists holds numbers of another tensor at first, and then the lists
    of the launch before."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 400, 1, 64).half()
    out, lse = torch.empty_like(v), torch.empty(1, 1, 400)
    request, memory = Request(q, k, v, Spec(0.1, 20, 0)), DeviceMemory(v.device)
    state = hopper.new_state(memory, request)
    assert state.tiles is not None
    state.tiles.fill_(1 << 30)
    (forward,) = hopper.forward_launches(request, out, lse, state, 1, PROGRAMS=1)
    clean, i = v.clone(), torch.arange(400)
    expected = run_again(forward, out, state)
    for keys in ((100, 350), (), (10,), (64, 127, 399)):
        v.copy_(clean)
        v[:, list(keys)] = torch.nan
        again = run_again(forward, out, state)
        sees = torch.stack([(i >= key) & (i <= key + 20) for key in keys] or [i < 0]).any(0)
        assert again[0, sees].isnan().all()
        torch.testing.assert_close(again[0, ~sees], expected[0, ~sees], atol=2e-3, rtol=0)
    assert forward.programs == 1


def run_again(forward: Any, out: torch.Tensor, state: Any) -> torch.Tensor:
    out.fill_(7.0)
    emulator.launch(*forward)
    assert not state.flags.any()
    return out.clone()


@tilewise.mask_mod
def key_70_for_half_of_the_rows(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx % 16 < 8) | (kv_idx != 70)


@pytest.mark.parametrize("swapped", [False, True])
def test_half_of_the_rows_tell_for_all(swapped):
    """A lane looks at one of its two rows. Those that see an inf have one, those that do not have a nan."""
    torch.manual_seed(0)
    v = torch.randn(1, 150, 1, 64).half()
    mod = bound([key_70_for_the_other_half() if swapped else key_70_for_half_of_the_rows()])
    assert mod is not None
    spec = Spec(0.1, mask_mod=mod.key, mask_numbers=mod.numbers, mask_tensors=len(mod.tensors))
    out, _ = run(v, spec, mask=mod.tensors)
    v[:, 70] = torch.inf
    again, _ = run(v, spec, mask=mod.tensors)
    sees = (torch.arange(150) % 16 < 8) != swapped
    assert (again[0, sees] == torch.inf).all()
    torch.testing.assert_close(again[0, ~sees], out[0, ~sees], atol=2e-3, rtol=0)


@tilewise.mask_mod
def key_70_for_the_other_half(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx % 16 >= 8) | (kv_idx != 70)


@pytest.mark.parametrize("upper", [False, True])
def test_queries_with_nan_do_not_hide_a_nan_of_other_rows(upper):
    """Half of the rows are nan by themselves: these, or the others, are those that are looked at."""
    torch.manual_seed(0)
    v = torch.randn(1, 100, 1, 64).half()
    out, _ = run(v, Spec(0.1, None, 0))
    v[:, 99] = torch.nan
    bad = (torch.arange(100) % 16 >= 8) != upper
    again, lse = run(v, Spec(0.1, None, 0), bad_queries=bad)
    assert again[0, bad].isnan().all()
    assert lse[0, 0, bad].isnan().all()
    good = ~bad & (torch.arange(100) < 99)
    torch.testing.assert_close(again[0, good], out[0, good], atol=2e-3, rtol=0)


def test_two_warpgroups_with_the_same_rows():
    """Above head dim 256 each computes half of the columns. Only one half has a nan."""
    torch.manual_seed(0)
    v = torch.randn(1, 100, 1, 320).half()
    out, _ = run(v, Spec(0.05, None, 0))
    v[:, 99, :, 300] = torch.nan
    again, _ = run(v, Spec(0.05, None, 0))
    assert again[0, 99, 0, 300].isnan()
    torch.testing.assert_close(again[0, :99], out[0, :99], atol=2e-3, rtol=0)
