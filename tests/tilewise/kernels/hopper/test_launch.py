"""What the launcher makes of a call, on tensors that lie on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tilewise.mods.test_rows import product
from tilewise import dispatch
from tilewise.kernels.gpu import Gpu
from tilewise.kernels.hopper import limits, tiles
from tilewise.mods import block_diagonal, softcap
from tilewise.spec import Request, Spec

pytest.importorskip("triton")


def launches(q: Any, after: int | None = None) -> tuple[Any, list[Any]]:
    from tilewise.kernels.hopper.launch import forward_launches, new_state

    out, lse, state = (
        torch.empty_like(q),
        torch.empty(q.shape[0], q.shape[2], q.shape[1]),
        new_state(torch.device("cpu")),
    )
    k, v = torch.empty_like(q), torch.empty_like(q)
    request = Request(q, k, v, Spec(0.1, None, after))
    return (*request.tensors(), out, lse, *state), forward_launches(request, out, lse, state, 132)


def test_a_second_launch_repairs_only_where_rows_see_different_keys():
    q = torch.empty(2, 256, 4, 128, dtype=torch.bfloat16)
    assert len(launches(q)[1]) == 1
    assert len(launches(q, after=0)[1]) == 2


@pytest.mark.parametrize("window", [None, 100])
def test_heads_that_share_keys_are_queries_of_one_head(window):
    from tilewise.kernels.hopper.launch import forward_launches, new_state
    from tilewise.kernels.portable.launch import forward_launch

    q, out, k, v = (torch.empty(3, n, h, 128, dtype=torch.bfloat16) for n, h in ((1, 8), (1, 8), (500, 2), (500, 2)))
    lse, request = torch.empty(3, 8, 1), Request(q, k, v, Spec(0.1, window, 0))
    portable = forward_launch(request, out, lse, Gpu("cuda", 90))
    hopper = forward_launches(request, out, lse, new_state(torch.device("cpu")), 132)
    heads = 2 if window is None else 8
    assert (portable.programs, hopper[0].programs) == (3 * 2, 3 * heads)
    assert len(hopper) == (1 if window is None else 2)  # all keys are seen, so there is nothing to repair


def test_a_replayed_descriptor_points_at_the_new_tensor():
    from tilewise.kernels import replay

    seen = []

    class Binary:
        def __getitem__(self, grid):
            return lambda *args: seen.append(args)

    q = torch.empty(2, 256, 4, 128, dtype=torch.bfloat16)
    tensors, (made,) = launches(q)
    step = replay._step(made, Binary(), tensors)
    assert not [x for x in step.args if isinstance(getattr(x, "base", x), torch.Tensor)]
    others, (other,) = launches(torch.empty_like(q))
    replay.launch("key", others, lambda: (), {"key": replay.Recording([step], None, -1)})
    for ours, theirs in zip(seen[0][:7], other.args[:7], strict=True):
        if theirs is None:  # no second part of the columns
            assert ours is None
            continue
        assert ours.base.data_ptr() == theirs.base.data_ptr()
        assert (ours.shape, ours.strides, ours.block_shape) == (theirs.shape, theirs.strides, theirs.block_shape)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        (lambda q: q, None),
        (lambda q: q.float(), "float32"),
        (lambda q: torch.empty(2, 64, 4, 320, dtype=q.dtype), "256"),
        (lambda q: torch.empty(2, 64, 4, 36, dtype=q.dtype), "multiples of 8"),
        (lambda q: q.transpose(1, 3), "contiguous"),
        (lambda q: torch.empty(2 * 64 * 4 * 128 + 1, dtype=q.dtype)[1:].view(2, 64, 4, 128), "16 bytes"),
        (lambda q: q[:, :, :1].expand(2, 64, 4, 128), "16 bytes"),
    ],
)
def test_what_it_does_not_take(change, obstacle):
    q = change(torch.empty(2, 64, 4, 128, dtype=torch.bfloat16))
    found = limits.obstacle(Request(q, q, q, Spec(0.1)), Gpu("cuda", 90))
    assert found is None if obstacle is None else obstacle in found


def test_sums_over_rows_it_does_not_take():
    q, rows = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16), torch.empty(2, 4, 64, 8)
    for mod, takes in ((product(rows, rows, 1.0), False), (softcap(1.0), True)):
        spec = Spec(0.1, score_mod=mod.key, score_numbers=mod.numbers, score_tensors=len(mod.tensors))
        found = limits.obstacle(Request(q, q, q, spec, score=mod.tensors), Gpu("cuda", 90))
        assert found is None if takes else "sums over a row" in found


def test_what_goes_to_the_portable_kernels():
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    call = Request(q, q, q, Spec(0.1))
    assert dispatch.choose(call, Gpu("cuda", 80)).backend.name == "triton"
    for request, backend in (
        (call, "hopper"),
        (call._replace(sinks=torch.zeros(4)), "hopper"),
        (call._replace(bias=torch.zeros(1, 1, 64, 64)), "hopper"),
        (call._replace(seed=torch.zeros((), dtype=torch.int64)), "triton"),
        (listed((128, 256, 1, 1)), "hopper"),
        (listed((128, 64, 1, 1)), "triton"),
        (listed((384, 128, 1, 1)), "triton"),
        (listed((128, 128, 1, 1), q=q[0], cu_q=torch.zeros(3, dtype=torch.int32)), "triton"),
    ):
        assert dispatch.choose(request, Gpu("cuda", 90)).backend.name == backend


def listed(block: tuple[int, ...], **others: Any) -> Request:
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    spec = Spec(0.1, mask_mod=block_diagonal(128).key, mask_block=block)
    return Request(q, q, q, spec, blocks=(torch.zeros(1),) * 4)._replace(**others)


def test_block_masks_whose_backward_is_portable():
    few, wide = (torch.empty(2, 64, *x, dtype=torch.bfloat16) for x in ((2, 128), (4, 192)))
    call, by_head = listed((128, 128, 1, 1)), listed((128, 128, 1, 4))
    ordered = call._replace(spec=call.spec._replace(deterministic=True))
    for request, found in (
        (call, True),
        (call._replace(k=few, v=few), True),
        (by_head, True),
        (by_head._replace(k=few, v=few), False),
        (ordered, False),
        (call._replace(q=wide, k=wide, v=wide), False),
    ):
        assert limits.has_backward(request) is found


def test_an_mi200_which_reports_capability_9_0_is_no_hopper():
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    call = Request(q, q, q, Spec(0.1))
    assert dispatch.choose(call, Gpu("hip", "gfx90a")).backend.name == "reference"
    assert dispatch.choose(call, Gpu("hip", "gfx942")).backend.name == "triton"


@pytest.mark.parametrize(
    ("d", "expected"),
    [
        (64, (64,)), (40, (64,)), (65, (64, 16)), (96, (64, 32)), (100, (128,)), (128, (128,)), (130, (128, 16)),
        (192, (128, 64)), (193, (256,)), (256, (256,)),
    ],
)  # fmt: skip
def test_columns_are_cut_into_powers_of_two(d, expected):
    assert tiles.widths(d) == expected


def test_short_causal_calls_have_their_own_row():
    assert tiles.forward_tile(64, 64, banded=True, keys=512).warpgroups == 2
    assert tiles.forward_tile(64, 64, banded=False, keys=512).warpgroups == 3
    assert tiles.forward_tile(64, 64, banded=False, keys=512, plain=False).warpgroups == 2


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "after", "n"),
    [
        (8192, 4096, (8, 2), None, 2),  # 64 programs for 132 processors
        (4096, 8192, (8, 2), None, 1),  # 128: nothing to be won
        (8192, 8192, (8, 2), 0, 4),  # 128, the longest of twice the mean
        (8192, 8192, (32, 8), 0, 4),
        (8192, 4096, (32, 8), None, 1),
        (8192, 4096, (8, 8), None, 1),  # no group to divide
        (8192, 4096, (6, 2), None, 1),  # nor into two halves
        (128, 128, (8, 1), None, 1),  # nothing worth a copy
    ],
)
def test_kv_heads_are_copied_where_programs_are_few(queries, keys, heads, after, n):
    from tilewise.kernels.hopper.backward_launch import copies

    q, k = (torch.empty(1, m, h, 128, dtype=torch.bfloat16) for m, h in zip((queries, keys), heads, strict=True))
    assert copies(Request(q, k, k, Spec(0.1, None, after, partial=True)), 132) == n
    assert copies(Request(q, k, k, Spec(0.1, None, after)), 132) == 1  # whose parts would be rounded
