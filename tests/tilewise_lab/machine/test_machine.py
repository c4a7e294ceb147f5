from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import AttentionError
from tilewise_lab.costs.devices import DEVICES, KB
from tilewise_lab.machine import budget, coalesce, pipeline, warps
from tilewise_lab.machine.layout import Layout, strides


def test_eight_elements_take_one_warp():
    (warp,) = warps.warps(8)
    assert (warp.active, warp.masked) == (8, 24)


@settings(deadline=None)
@given(st.integers(1, 500))
def test_every_element_has_one_lane(n):
    made = warps.warps(n)
    assert sum(w.active for w in made) == n
    assert all(w.active + w.masked == warps.WARP for w in made)


def test_blocks_number_the_elements():
    """8 elements in blocks of 2 on 4 cores; a million in blocks of 32."""
    assert (warps.grid(8, 2), warps.grid(9, 2)) == (4, 5)
    assert [warps.element(b, 2, t) for b in range(4) for t in range(2)] == list(range(8))
    assert warps.grid(1_000_000, 32) == 31_250


def test_a_branch_costs_both_sides_only_where_lanes_disagree():
    mixed = [lane % 2 == 0 for lane in range(32)]
    assert warps.branch(mixed, 10, 7).taken == 17
    assert warps.branch([False] * 32, 10, 7).taken == 7
    assert warps.branches(mixed * 4, 10, 7) == 4 * 17
    assert warps.branches(sorted(mixed * 4), 10, 7) == 2 * 10 + 2 * 7


def test_throughput_beats_latency_in_the_end_but_not_for_the_first():
    """T1 is done earlier on a core that does nothing else; T1 to T4 are done earlier on one that switches."""
    alone, together = (f(4, compute=2, wait=4) for f in (warps.run_to_completion, warps.switch_on_wait))
    assert warps.finish(together) < warps.finish(alone)
    assert warps.finish([s for s in alone if s.task == 0]) <= warps.finish([s for s in together if s.task == 0])


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 9), st.integers(1, 4))
def test_one_core_computes_one_task_at_a_time(tasks, compute, wait, rounds):
    for plan in (warps.run_to_completion, warps.switch_on_wait):
        busy = sorted((s.start, s.stop) for s in plan(tasks, compute, wait, rounds) if s.doing == "compute")
        assert len(busy) == tasks * rounds
        assert all(a[1] <= b[0] for a, b in pairwise(busy))


def test_a_row_read_together_is_one_line_a_column_is_32():
    assert coalesce.touched(coalesce.contiguous(), 4) == (1, 4, 1.0)
    column = coalesce.touched(coalesce.strided(4096), 4)
    assert (column.lines, column.efficiency) == (32, 1 / 8)
    assert coalesce.touched(coalesce.contiguous(first=1), 4).lines == 2  # not aligned


def test_both_readings_of_moving_along_rows():
    """A thread on its own row is the slow case at every instant; lanes that share a row are the fast one."""
    for t in range(8):
        assert coalesce.touched(coalesce.row_per_thread(4096, t), 4).lines == 32
        assert coalesce.touched(coalesce.row_per_warp(4096, t), 4).lines == 1


@pytest.mark.parametrize(("shape", "found"), [([7], [1]), ([2, 3], [3, 1]), ([2, 4, 3], [12, 3, 1])])
def test_the_notes_strides(shape, found):
    assert strides(shape) == found == list(torch.empty(shape).stride())


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_strides_are_torchs(shape):
    assert strides(shape) == list(torch.empty(shape).stride())
    assert Layout.row_major(shape).contiguous


def test_the_notes_matrix_in_memory():
    """[[1, 2, 3], [5, 8, 13]] lies as 1 2 3 5 8 13; transposed, the same data with other strides."""
    memory = [1, 2, 3, 5, 8, 13]
    matrix = Layout.row_major([2, 3])
    assert [memory[o] for o in matrix.offsets()] == memory
    across = matrix.transpose()
    assert (across.shape, across.strides, across.contiguous) == ([3, 2], [1, 3], False)
    assert [memory[o] for o in across.offsets()] == torch.tensor([[1, 2, 3], [5, 8, 13]]).T.flatten().tolist()


def test_reshape_is_free_only_where_data_is_contiguous():
    assert Layout.row_major([2, 3]).reshape([3, 2]).strides == [2, 1]
    x = torch.arange(6).view(2, 3)
    assert x.reshape(3, 2).data_ptr() == x.data_ptr()
    across = x.T
    with pytest.raises(RuntimeError):
        across.view(6)
    assert across.reshape(6).data_ptr() != x.data_ptr()  # a copy, whatever the notes say
    with pytest.raises(AttentionError, match="contiguous data, or a copy"):
        Layout.row_major([2, 3]).transpose().reshape([6])
    with pytest.raises(AttentionError, match="6 elements"):
        Layout.row_major([2, 3]).reshape([4])


def test_column_major_is_the_transpose_of_row_major():
    assert Layout.column_major([2, 3]).strides == [1, 2]
    assert Layout.column_major([2, 3]).transpose() == Layout.row_major([3, 2])


def test_four_stages_seven_iterations():
    one, all_at_once = pipeline.sequential(7), pipeline.pipelined(7)
    assert (pipeline.slots(one), pipeline.slots(all_at_once)) == (28, 10)
    assert (pipeline.utilisation(one), pipeline.utilisation(all_at_once)) == (0.25, 0.7)
    assert [len(list(pipeline.at(one, t))) for t in range(28)] == [1] * 28
    assert [len(list(pipeline.at(all_at_once, t))) for t in range(10)] == [1, 2, 3, 4, 4, 4, 4, 3, 2, 1]
    assert [next(s.phase for s in all_at_once if s.start == t) for t in range(10)] == (
        ["prologue"] * 3 + ["steady"] * 4 + ["epilogue"] * 3
    )


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 6))
def test_a_pipeline_keeps_the_order_of_stages(iterations, stages):
    plan = pipeline.pipelined(iterations, stages)
    at = {(s.iteration, s.unit): s.start for s in plan}
    assert all(at[i, s] < at[i, s + 1] for i in range(iterations) for s in range(stages - 1))
    assert len({(s.unit, s.start) for s in plan}) == len(plan)
    assert pipeline.in_flight(plan) == min(iterations, stages)


def test_overlap_takes_operations_that_do_not_wait():
    """An order of instructions, and asynchronous ones: no core here starts anything out of order."""
    pipelined, plain = (
        [(slot.iteration, slot.unit) for slot in sorted(plan, key=lambda slot: slot.start)]
        for plan in (pipeline.pipelined(7), pipeline.sequential(7))
    )
    assert pipeline.slots(pipeline.issued(pipelined, asynchronous=True)) == 10
    assert pipeline.slots(pipeline.issued(pipelined, asynchronous=False)) == 28
    assert 10 < pipeline.slots(pipeline.issued(plain, asynchronous=True)) < 28  # and the loop must be rewritten
    for way in (True, False):
        plan = pipeline.issued(pipelined, asynchronous=way)
        assert [slot.start for slot in plan] == sorted(slot.start for slot in plan)


def test_buffers_bound_the_stages():
    kept, streamed = 128 * 128 * 2, 2 * 128 * 128 * 2
    fit = {name: pipeline.stages_that_fit(d.shared, kept, streamed) for name, d in DEVICES.items()}
    assert (fit["A100"], fit["H200"], fit["L4"]) == (2, 3, 1)
    assert pipeline.stages_that_fit(2 * streamed, kept, streamed) == 1  # Q's tile takes the room of the second
    assert pipeline.stages_that_fit(kept, 2 * kept, streamed) == 0
    assert pipeline.in_flight(pipeline.pipelined(7, 4)) == 4  # as many buffers as iterations in flight


def test_bubbles_are_what_the_plan_leaves_idle():
    for p, m in ((3, 3), (4, 1), (4, 28)):
        assert pipeline.bubble(p, m) == pytest.approx(1 - pipeline.utilisation(pipeline.forward_only(p, m)))
        assert pipeline.bubble(p, m) == pytest.approx(1 - pipeline.utilisation(pipeline.forward_backward(p, m)))


def test_three_devices_hold_three_batches():
    """GPU1, GPU2, GPU3 with batches 2, 1, 0: not two CPUs and a GPU."""
    assert list(pipeline.at(pipeline.forward_only(3, 5), 2)) == [(0, 2), (1, 1), (2, 0)]


def test_the_notes_sizes():
    """4096 tokens: 16.8 M weights, 64 MiB; a 64 x 64 tile of them 16 KiB."""
    assert budget.weights(4096) == (16_777_216, 64 * 2**20)
    assert budget.tile_bytes(64, 64) == 16 * KB
    table = budget.tiles(4096, 64)
    assert len(table) == 64
    assert (table[0].start, table[0].stop, table[63].start, table[63].stop) == (0, 64, 4032, 4096)
    assert budget.shared_bytes(64, 64, 64, itemsize=2) == 32 * KB
    all_in_float32 = budget.shared_bytes(64, 64, 64, itemsize=4, with_output=True)
    assert all_in_float32 == 80 * KB > DEVICES["A100"].shared_static


@settings(deadline=None)
@given(st.sampled_from([32, 64, 128, 256]), st.sampled_from([2, 4]), st.integers(16 * KB, 227 * KB))
def test_the_largest_tile_fits_and_the_next_does_not(d, itemsize, shared):
    size = budget.largest_square_tile(shared, d, itemsize=itemsize)
    assert size == 1 or budget.shared_bytes(size, size, d, itemsize=itemsize) <= shared
    assert budget.shared_bytes(2 * size, 2 * size, d, itemsize=itemsize) > shared


def test_karpathys_vocabulary():
    assert budget.pad_to_multiple(50257, 64) == budget.pad_to_multiple(50257, 128) == 50304 == 64 * 786 == 128 * 393
    assert (budget.alignment(50257), budget.alignment(50304)) == (1, 128)


@settings(deadline=None)
@given(st.integers(1, 10_000))
def test_alignment_is_the_largest_power_of_two(n):
    a = budget.alignment(n)
    assert n % a == 0
    assert a == 128 or n % (2 * a)
    assert math.log2(a).is_integer()
