from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import seen
from tilewise.backends.common.tiles import Tile
from tilewise.request import BackwardInputs, Gpu, Request, Spec, padded
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.predict import MODEL, Kernel, plan, predict, rereads, span, work_of

H200 = device("H200")
USUAL = Call(4, 4096, 4096, 16, 16, 128, 128)
side = st.none() | st.integers(0, 40)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), side, side, st.sampled_from([8, 16]), st.sampled_from([8, 16]))
def test_steps_cover_what_the_mask_shows(n_q, n_k, before, after, block_m, block_n):
    """Every visible pair lies in a visited tile, and a tile that is called unmasked hides nothing."""
    mask = seen(n_q, n_k, Spec(scale=1.0, before=before, after=after))
    for first in range(0, n_q, block_m):
        last = min(first + block_m, n_q)
        steps, edges = span(first, last, n_q, n_k, before, after, block_n)
        rows = mask[first:last]
        tiles = rows.split(block_n, dim=1)
        needed = sum(bool(tile.any()) for tile in tiles)
        full = sum(bool(tile.all()) and tile.shape[1] == block_n for tile in tiles)
        assert needed <= steps
        assert 0 <= steps - edges <= full


def test_causal_visits_a_triangle():
    call = Call(1, 1024, 1024, 1, 1, 64, 64, after=0)
    work = work_of(call, Tile(128, 128, 4, 2))
    assert [steps for _, steps, _ in work] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [edges for _, _, edges in work] == [1] * 8


def test_the_key_side_sees_the_band_sideways():
    call = Call(1, 1024, 1024, 4, 2, 64, 64, after=0)
    work = work_of(call, Tile(128, 128, 4, 2), by_key=True)
    assert [steps for _, steps, _ in work] == [2 * n for n in (8, 7, 6, 5, 4, 3, 2, 1)] * 2


def test_programs_are_those_the_launcher_starts(monkeypatch):
    launch = pytest.importorskip("tilewise.backends.triton.launches")
    options = pytest.importorskip("tilewise.backends.common.kernel_config")
    monkeypatch.setattr(options, "INTERPRETED", False)
    q, k = (torch.empty(4, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((1000, 8), (1537, 2)))
    lse = torch.empty(4, 8, 1000, device="meta")
    call = Call(4, 1000, 1537, 8, 2, 128, 128, after=0)
    request, gpu = Request(q, k, k, Spec(scale=1.0, after=0)), Gpu("cuda", 90)
    forward = launch.forward_launch(request, q, lse, gpu)
    passes = pytest.importorskip("tilewise.backends.triton.backward_launches")
    preprocess = pytest.importorskip("tilewise.backends.common.preprocess")
    memory = pytest.importorskip("tilewise.backends.common.launch").DeviceMemory(q.device)
    rows = preprocess.row_statistics(request, memory)
    _, key, query = passes.backward_launches(request, BackwardInputs(q, lse, q, None), (q, k, k), rows, None, gpu)
    assert [one.programs for one in (forward, key, query)] == [
        kernel.programs for kernel in plan(call, "triton", H200, backward=True)
    ]


@pytest.mark.parametrize(("n_q", "before"), [(1, None), (5, None), (40, 300), (64, 300)])
def test_few_queries_of_a_group_share_tiles_here_as_in_the_launcher(n_q, before, monkeypatch):
    launch = pytest.importorskip("tilewise.backends.triton.launches")
    options = pytest.importorskip("tilewise.backends.common.kernel_config")
    monkeypatch.setattr(options, "INTERPRETED", False)
    q, k = (torch.empty(64, n, h, 256, dtype=torch.bfloat16, device="meta") for n, h in ((n_q, 8), (1537, 2)))
    request = Request(q, k, k, Spec(scale=1.0, before=before, after=0))
    memory = pytest.importorskip("tilewise.backends.common.launch").DeviceMemory(request.q.device)
    forward = launch.forward_launch(request, *launch.new_results(request, memory), Gpu("cuda", 90))
    (kernel,) = plan(Call(64, n_q, 1537, 8, 2, 256, 256, before=before, after=0), "triton", H200, backward=False)
    assert kernel.programs == forward.programs == 64 * 2 * -(-n_q * 4 // 64)
    assert kernel.profile.heads == forward.options["CONFIG"].HEADS == 4
    assert kernel.tile.block_m == forward.options["CONFIG"].BLOCK_M == 64


def test_the_tail_shows_in_the_prediction():
    """Two tiles for each of half as many heads as slots are one wave; one row more starts another."""
    (kernel,) = plan(USUAL, "triton", H200, backward=False)
    n, heads = 2 * kernel.tile.block_m, kernel.slots // 2
    fits = replace(USUAL, batch=1, n_q=n, heads=heads, kv_heads=heads)
    times = [plan(replace(fits, n_q=rows), "triton", H200, backward=False)[0].schedule.finish for rows in (n, n + 1)]
    assert times[1] == pytest.approx(2 * times[0])


def test_predictions_follow_the_work():
    full, causal = USUAL, replace(USUAL, after=0)
    window = replace(USUAL, before=255, after=0)
    times = [predict(call, "triton", H200).device for call in (full, causal, window)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[1] == pytest.approx(2, rel=0.2)
    assert predict(USUAL, "triton", H200, only_backward=True).device > 2 * times[0]


def test_small_calls_wait_for_the_host():
    tiny = predict(Call(1, 128, 128, 4, 4, 64, 64), "triton", H200)
    assert tiny.call == MODEL.host > tiny.device


def test_a_faster_device_is_faster():
    times = [predict(USUAL, "triton", device(name)).device for name in ("L4", "RTX 4090", "A100", "H100", "B200")]
    assert times == sorted(times, reverse=True)


def test_memory_can_bind():
    decode = Call(64, 1, 8192, 32, 32, 128, 128)
    moved = 2 * 64 * 8192 * 32 * 128 * 2
    assert predict(decode, "triton", H200).device > moved / H200.bandwidth


def test_l2_decides_how_often_keys_are_read():
    tile = Tile(128, 64, 8, 3)
    assert rereads(USUAL, H200, tile) == 1.0
    long = Call(1, 262144, 262144, 1, 1, 128, 128)
    assert rereads(long, H200, tile) > 10


def test_the_reference_has_no_kernels():
    assert plan(USUAL, "reference", H200, backward=True) == []
    assert predict(USUAL, "reference", H200).device > 0


@pytest.mark.parametrize(("d", "wide"), [(1, 16), (16, 16), (17, 32), (100, 128), (128, 128), (129, 256), (512, 512)])
def test_padding(d, wide):
    assert padded(d) == wide


def test_many_programs_are_not_simulated_one_by_one():
    kernel = Kernel("forward", Tile(128, 64, 8, 3), ((20_000, 8, 0), (20_000, 4, 0)), 10**6, 0, 1, 132, 1e12, MODEL)
    exact = sum(n * (MODEL.prologue + s * 132e-6) for n, s, _ in kernel.work) / 132
    assert exact < kernel.schedule.finish < 1.02 * exact


def test_the_hopper_backward_is_where_the_launcher_has_it():
    for d, names in ((64, ["hopper backward"]), (256, ["hopper backward"]), (100, ["key", "query"])):
        kernels = plan(replace(USUAL, d=d, dv=d), "hopper", H200, backward=True, only_backward=True)
        assert [kernel.name for kernel in kernels] == names
