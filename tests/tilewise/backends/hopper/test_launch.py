"""What the launcher makes of a call, on tensors that lie on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.tilewise.mods.test_rows import product
from tilewise.backends.hopper import support
from tilewise.backends.registry import choose
from tilewise.mods import alibi, block_diagonal, prefix_lm, softcap
from tilewise.request import Gpu, Request, Spec

pytest.importorskip("triton")


def launches(q: Any, after: int | None = None) -> list[Any]:
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.launches import forward_launches, new_state

    out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    request = Request(q, torch.empty_like(q), torch.empty_like(q), Spec(0.1, None, after))
    return forward_launches(request, out, lse, new_state(DeviceMemory(q.device), request), 132)


def is_repaired(launch: Any) -> bool:
    """Whether the kernel looks for NaNs that its rows do not see."""
    from tilewise.backends.hopper.forward import RepairPointers

    (pointers,) = (x for x in launch.args if isinstance(x, RepairPointers))
    return pointers.flags is not None


def test_one_launch_which_repairs_only_where_rows_see_different_keys():
    q = torch.empty(2, 256, 4, 128, dtype=torch.bfloat16)
    (full,), (causal,) = launches(q), launches(q, after=0)
    assert not is_repaired(full)
    assert is_repaired(causal)


def warpgroups(q: Any, before: int | None = None, cu: Any = None) -> int:
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.launches import forward_launches, new_state

    lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3])
    request = Request(q, q, q, Spec(0.1, before, 0), cu_q=cu, cu_k=cu)
    job, *_ = forward_launches(request, torch.empty_like(q), lse, new_state(DeviceMemory(q.device), request), 132)
    found: int = job.options["CONFIG"].WARPGROUPS
    return found


@pytest.mark.parametrize(("length", "found"), [(512, 1), (1024, 1), (4096, 3)])
def test_the_tile_of_packed_sequences_follows_from_their_mean_length(length, found):
    cu = torch.arange(0, 16385, length, dtype=torch.int32)
    assert warpgroups(torch.empty(16384, 4, 64, dtype=torch.bfloat16), cu=cu) == found


@pytest.mark.parametrize(("before", "found"), [(127, 1), (400, 1), (2047, 3), (None, 3)])
def test_the_tile_of_a_window_follows_from_the_keys_in_it(before, found):
    assert warpgroups(torch.empty(1, 4096, 4, 64, dtype=torch.bfloat16), before) == found


@pytest.mark.parametrize("window", [None, 100])
def test_heads_that_share_keys_are_queries_of_one_head(window):
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.launches import forward_launches, new_state
    from tilewise.backends.triton.launches import forward_launch

    q, out, k, v = (torch.empty(3, n, h, 128, dtype=torch.bfloat16) for n, h in ((1, 8), (1, 8), (500, 2), (500, 2)))
    lse, request = torch.empty(3, 8, 1), Request(q, k, v, Spec(0.1, window, 0))
    portable = forward_launch(request, out, lse, Gpu("cuda", 90))
    (hopper,) = forward_launches(request, out, lse, new_state(DeviceMemory(q.device), request), 132)
    heads = 2 if window is None else 8
    assert (portable.programs, hopper.programs) == (3 * 2, 3 * heads)
    assert is_repaired(hopper) == (window is not None)  # otherwise all keys are seen


@pytest.mark.parametrize("after", [None, 0])
def test_launches_of_placeholders_are_those_of_the_tensors(after):
    """The same shapes, strides, offsets and constants: descriptors, views, scalars and results."""
    from tilewise.backends.common.kernel_call import Descriptor, Placeholders, build_backward
    from tilewise.backends.common.launch import DeviceMemory, Slot, Target
    from tilewise.backends.hopper.backward_launches import named_launches
    from tilewise.backends.hopper.launches import build_forward

    q, k, v, out, dout = (torch.empty(2, 256, 4, 128, dtype=torch.bfloat16) for _ in range(5))
    request, lse = Request(q, k, v, Spec(0.1, None, after)), torch.empty(2, 4, 256)
    target, device = Target(Gpu("cuda", 90), 132), DeviceMemory(q.device)

    def same(slot: Any, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            assert isinstance(slot, Slot)
        elif hasattr(x, "block_shape"):
            assert slot == Descriptor(slot.base, tuple(x.shape), tuple(x.strides))
            assert isinstance(slot.base, Slot)
        elif isinstance(x, tuple):
            assert type(slot) is type(x)
            for a, b in zip(slot, x, strict=True):
                same(a, b)
        else:
            assert slot == x

    for build, tensors in (
        (build_forward(request.spec), request.tensors()),
        (build_backward(named_launches, request.spec), (*request.tensors(), out, lse, dout, None)),
    ):
        memory = Placeholders(tensors)
        ours, theirs = build(memory.inputs, target, memory), build(tensors, target, device)
        assert len(ours.results) == len(theirs.results)
        for made, wanted in zip(ours.launches, theirs.launches, strict=True):
            assert (made.kernel, made.programs, made.options) == (wanted.kernel, wanted.programs, wanted.options)
            for a, b in zip(made.args, wanted.args, strict=True):
                same(memory.slots(a), b)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q: q, None),
        (lambda q: q.float(), "float32"),
        (lambda q: torch.empty(2, 64, 4, 320, dtype=q.dtype), None),
        (lambda q: torch.empty(2, 64, 4, 520, dtype=q.dtype), "512"),
        (lambda q: torch.empty(2, 64, 4, 36, dtype=q.dtype), "multiples of 8"),
        (lambda q: q.transpose(1, 3), "contiguous"),
        (lambda q: torch.empty(2 * 64 * 4 * 128 + 1, dtype=q.dtype)[1:].view(2, 64, 4, 128), "16 bytes"),
        (lambda q: q[:, :, :1].expand(2, 64, 4, 128), "16 bytes"),
    ],
)
def test_what_it_does_not_take(change, reason):
    q = change(torch.empty(2, 64, 4, 128, dtype=torch.bfloat16))
    found = support.unsupported(Request(q, q, q, Spec(0.1)), Gpu("cuda", 90))
    assert found is None if reason is None else reason in found


def test_sums_over_rows_it_does_not_take():
    q, rows = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16), torch.empty(2, 4, 64, 8)
    for mod, takes in ((product(rows, rows, 1.0), False), (softcap(1.0), True)):
        spec = Spec(0.1, score_mod=mod.key, score_numbers=mod.numbers, score_tensors=len(mod.tensors))
        found = support.unsupported(Request(q, q, q, spec, score=mod.tensors), Gpu("cuda", 90))
        assert found is None if takes else "sums over a row" in found


def test_prefill_of_a_cache_without_pages() -> None:
    """Sequences without keys, whose page table has no columns."""
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.kv_launches import prefill_launch
    from tilewise.backends.hopper.launches import new_state
    from tilewise.call.fields import CACHE
    from tilewise.validation.kv import attend_request

    q, cache = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16), torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    options = CACHE.completed({"page_table": torch.zeros(1, 0, dtype=torch.int32)})
    request = attend_request(q, cache, cache, torch.zeros(1, dtype=torch.int32), options)
    assert choose(request, Gpu("cuda", 90)).backend.name == "hopper"
    state = new_state(DeviceMemory(q.device), None)
    launch = prefill_launch(request, torch.empty_like(q), torch.empty(1, 4, 300), state, 132)
    assert launch.programs == 8  # 4 heads, 2 tiles of 192 queries


def test_what_goes_to_the_portable_kernels():
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    call = Request(q, q, q, Spec(0.1))
    assert choose(call, Gpu("cuda", 80)).backend.name == "triton"
    for request, backend in (
        (call, "hopper"),
        (call._replace(sinks=torch.zeros(4)), "hopper"),
        (call._replace(bias=torch.zeros(1, 1, 64, 64)), "hopper"),
        (call._replace(seed=torch.zeros((), dtype=torch.int64)), "hopper"),
        (dropped(position_offsets=torch.zeros(2, 7, dtype=torch.int32)), "triton"),
        (dropped(score_mod=softcap(30.0).key), "triton"),
        (dropped(score_mod=alibi(torch.zeros(4)).key), "hopper"),
        (dropped(q=torch.empty(2, 64, 4, 512, dtype=torch.bfloat16)), "triton"),
        (listed((128, 256, 1, 1)), "hopper"),
        (listed((128, 64, 1, 1)), "triton"),
        (listed((384, 128, 1, 1)), "triton"),
        (listed((128, 128, 1, 1), q=q[0], cu_q=torch.zeros(3, dtype=torch.int32)), "hopper"),
        (listed((128, 128, 1, 1), q=torch.empty(2, 64, 4, 512, dtype=torch.bfloat16)), "triton"),
    ):
        assert choose(request, Gpu("cuda", 90)).backend.name == backend


def dropped(score_mod: str | None = None, **others: Any) -> Request:
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    spec = Spec(0.1, dropout_p=0.1, score_mod=score_mod)
    return Request(q, q, q, spec, seed=torch.zeros((), dtype=torch.int64))._replace(**others)


def listed(block: tuple[int, ...], **others: Any) -> Request:
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    spec = Spec(0.1, mask_mod=block_diagonal(128).key, mask_block=block)
    return Request(q, q, q, spec, blocks=(torch.zeros(1),) * 4)._replace(**others)


def test_score_terms_above_head_dim_256_have_the_portable_backward():
    for d in (256, 512):
        q = torch.empty(2, 64, 4, d, dtype=torch.bfloat16)
        call = Request(q, q, q, Spec(0.1, None, 0))
        assert support.has_backward(call)
        assert support.has_backward(call._replace(sinks=torch.zeros(4))) == (d == 256)


@pytest.mark.parametrize("rows", [1, 3, 16, 24, 64, 100])
@pytest.mark.parametrize("least", [0, 1, 5, 10])
def test_rows_that_are_scheduled_together(rows, least):
    """The last group is no emptier than that of any other allowed size."""
    found = support.rows_together(rows, least)
    allowed = range(min(max(least, 1), rows), min(2 * max(least, 1), rows) + 1)
    assert found in allowed
    assert (-rows % found) / found == min((-rows % n) / n for n in allowed) or rows <= least


@pytest.mark.parametrize("rows", [1, 3, 16, 24, 64, 100])
@pytest.mark.parametrize("size", [0, 1, 5, 10])
@pytest.mark.parametrize("last", [0, 1, 7, 200])
def test_a_larger_group_of_rows_at_the_end(rows, size, last):
    *others, end = support.row_groups(rows, size, last).sizes(rows)
    assert sum(others) + end == rows
    assert set(others) <= {max(size, 1)}
    assert end == rows or max(last, size, 1) <= end < max(last, size, 1) + max(size, 1)


def test_every_block_mask_has_the_backward():
    few, wide = (torch.empty(2, 64, *x, dtype=torch.bfloat16) for x in ((2, 128), (4, 192)))
    call, by_head = listed((128, 128, 1, 1)), listed((128, 128, 1, 4))
    ordered = call._replace(spec=call.spec._replace(deterministic=True))
    for request in (call, ordered, by_head, by_head._replace(k=few, v=few), call._replace(q=wide, k=wide, v=wide)):
        assert support.has_backward(request)


def test_an_mi200_which_reports_capability_9_0_is_no_hopper():
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    call = Request(q, q, q, Spec(0.1))
    assert choose(call, Gpu("hip", "gfx90a")).backend.name == "reference"
    assert choose(call, Gpu("hip", "gfx942")).backend.name == "triton"


@pytest.mark.parametrize(
    ("d", "expected"),
    [
        *((64, (64,)), (40, (64,)), (65, (64, 16)), (96, (64, 32)), (100, (128,)), (128, (128,)), (130, (128, 16))),
        *((192, (128, 64)), (193, (256,)), (256, (256,))),
    ],
)
def test_columns_are_cut_into_powers_of_two(d, expected):
    assert support.widths(d) == expected


def test_short_calls_have_their_own_rows():
    assert support.forward_tile(64, 64, banded=True, keys=1024).programs == 3
    assert support.forward_tile(64, 64, banded=True, keys=2048).warpgroups == 3
    assert support.forward_tile(64, 64, banded=True, keys=1024, plain=False).warpgroups == 2
    assert support.forward_tile(64, 64, banded=False, keys=577).programs == 2
    assert support.forward_tile(64, 64, banded=True, keys=None, window=100).programs == 1  # pages
    assert support.forward_tile(128, 128, banded=False, keys=1025).q_stages == 2
    assert support.forward_tile(64, 64, banded=False, keys=1024).warpgroups == 3
    assert not support.forward_tile(64, 64, banded=False, keys=4096).lazy_rescale
    assert support.forward_tile(128, 128, banded=False, keys=4096, plain=False).lazy_rescale
    assert support.forward_tile(64, 64, banded=False, keys=512, plain=False).warpgroups == 2


def test_masks_are_bits_where_heads_share_lists() -> None:
    """Not where every head has its own list, for parts of larger calls, nor for long lists."""
    from tilewise.backends.hopper.mask_words import MAX_WORDS, uses_words

    mod = prefix_lm(torch.tensor([100]))
    mask = tilewise.block_mask(mod, 512, 512)
    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16)
    spec = Spec(0.125, mask_mod=mod.key, mask_tensors=1, mask_block=(128, 128, 1, 1))
    request = Request(q, q, q, spec, mask=mod.tensors, blocks=mask.lists)
    offsets, entries, *rest = mask.lists
    long = torch.empty(MAX_WORDS // 512 + 1, dtype=torch.int32, device="meta")
    assert uses_words(request)
    assert not uses_words(request._replace(spec=spec._replace(mask_block=(128, 128, 2, 4))))
    assert not uses_words(request._replace(position_offsets=torch.zeros(2, 7, dtype=torch.int32)))
    assert not uses_words(request._replace(blocks=(offsets, long, *rest)))
    assert not uses_words(request._replace(blocks=(offsets, entries[:0], *rest)))
