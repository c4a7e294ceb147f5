"""Score terms in the Hopper kernels, in the emulator: combinations against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests import features, features_budget
from tests.covering import cases
from tilewise.backends import reference
from tilewise.backends.common.launch import DeviceMemory
from tilewise.backends.reference import ReferenceBackend
from tilewise.plan_cache import plans
from tilewise.request import BackwardInputs, Request, Spec
from tilewise_lab.emulator import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")

PLAIN = features.Features(dtype="bfloat16")
MEMORY = DeviceMemory(torch.device("cpu"))
ONE = {
    "softcap": {"softcap": True},
    "alibi": {"alibi": "h", "band": (False, True)},
    "alibi per batch": {"alibi": "bh", "packed": True},
    "sinks": {"sinks": True, "band": (False, True)},
    "sinks without keys": {"sinks": True, "packed": True, "dtype": "float16"},
    "bias": {"bias": "bhij", "dv": 128},
    "bias of keys": {"bias": "j", "packed": True, "band": (False, True)},
    "mod": {"mod": "distance_table", "d": 128},
    "mod per key": {"mod": "per_key", "band": (True, True)},
    "mask": {"mask": "document"},
    "mask and band": {"mask": "prefix_lm", "band": (True, True), "packed": True},
    "tile lists and band": {"mask": "prefix_lm", "blocks": 128, "band": (True, True), "sinks": True},
    "many": {"softcap": True, "mod": "gated", "alibi": "h", "bias": "hi", "sinks": True, "mask": "dilated_window"},
    "256 softcap": {"softcap": True, "d": 256, "dv": 256, "band": (False, True)},
    "256 alibi": {"alibi": "h", "d": 256, "dv": 128},
    "256 mod": {"mod": "gated", "d": 192, "dv": 128, "band": (True, True), "packed": True},
    "dropout": {"dropout": True, "band": (False, True), "dtype": "float16"},
    "dropout, packed": {"dropout": True, "packed": True, "d": 128, "dv": 128, "sinks": True},
    "dropout, 96": {"dropout": True, "d": 96, "dv": 64, "mask": "document"},
    "dropout, tile lists": {"dropout": True, "mask": "prefix_lm", "blocks": 128, "band": (True, True)},
    "256 dropout": {"dropout": True, "d": 256, "dv": 128, "band": (False, True), "packed": True},
    "packed tile lists": {"mask": "prefix_lm", "blocks": 128, "packed": True, "band": (True, True)},
    "packed tile lists, softcap": {"mask": "document", "blocks": 128, "packed": True, "softcap": True, "d": 128},
    "256 tile lists": {"mask": "prefix_lm", "blocks": 128, "band": (False, True), "d": 256, "dv": 256},
    "192 tile lists, mod": {"mask": "document", "blocks": 128, "d": 192, "dv": 128, "mod": "gated", "packed": True},
    "256 mask": {"mask": "document", "bias": "ij", "sinks": True, "d": 256, "dv": 256},
}


def forward(request: Request) -> Any:
    from tilewise.backends.hopper.launches import forward_launches, new_state
    from tilewise.backends.hopper.mask_words import new_words, words_launches

    q, k, v, *_ = request
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=request.result_dtype)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    words = new_words(request, MEMORY)
    for job in words_launches(request, words):
        job()
    (job,) = forward_launches(request, out, lse, new_state(MEMORY, request)._replace(mask_words=words), 2)
    launch(*job)
    return out, lse


def backward(request: Request, bwd_inputs: BackwardInputs) -> Any:
    from tilewise.backends.common.kernel_call import call_shape
    from tilewise.backends.common.renormalise import renormalised
    from tilewise.backends.hopper.backward_launches import GPU, backward_launches, new_workspace
    from tilewise.backends.hopper.backward_schedule import choose_split
    from tilewise.backends.hopper.mask_words import new_words, words_launches

    request = Request.of(request.spec, [None if x is None else x.detach() for x in request.tensors()])
    q, k, v, *_ = request
    out, lse, dout, dlse = bwd_inputs
    bwd_inputs = BackwardInputs(out.detach(), lse.detach(), dout.contiguous(), dlse)
    grads = [torch.full_like(x, torch.nan, dtype=request.result_dtype) for x in (q, k, v)]
    if k.numel() == 0 or q.numel() == 0:
        return [x.zero_() for x in grads]
    space = new_workspace(MEMORY, call_shape(request), choose_split(request, 2))
    first, bwd_inputs = renormalised(request, bwd_inputs, GPU, MEMORY)
    words = new_words(request, MEMORY, by_key=True)
    first = [*first, *words_launches(request, words, by_key=True)]
    for job in (*first, *backward_launches(request, bwd_inputs, tuple(grads), space, 2, words).values()):
        if hasattr(job.kernel, "is_gluon"):
            launch(*job)
        else:
            job()
    return grads


ORDERED = {
    "tile lists": {"mask": "document", "blocks": 128, "band": (False, True)},
    "packed tile lists": {"mask": "prefix_lm", "blocks": 128, "packed": True, "d": 128, "softcap": True},
    "large tile lists": {"mask": "prefix_lm", "blocks": 256, "dropout": True},
    "256 tile lists": {"mask": "document", "blocks": 128, "d": 256},
}


@cases("name", ["many", "dropout, tile lists"], ONE)
def test_within_budget(name, monkeypatch):
    judge(ONE[name], monkeypatch)


BITS = {
    "document": {"mask": "document", "blocks": 128, "band": (False, True)},
    "large tiles": {"mask": "prefix_lm", "blocks": 256, "d": 128, "dv": 128, "band": (True, True)},
    "packed": {"mask": "prefix_lm", "blocks": 128, "packed": True, "band": (True, True), "sinks": True},
    "256": {"mask": "document", "blocks": 128, "d": 256, "dv": 256, "band": (False, True)},
    "mod and dropout": {"mask": "dilated_window", "blocks": 128, "mod": "gated", "dropout": True},
}


@cases("name", ["packed"], BITS)
def test_partial_tiles_as_bits(name, monkeypatch):
    """However few heads share a list."""
    monkeypatch.setattr("tilewise.backends.hopper.mask_words.MIN_SHARING", 0)
    judge(BITS[name], monkeypatch, longest=400)


@tilewise.mask_mod
def in_turn(b, h, q_idx, kv_idx):
    return q_idx // 64 == kv_idx // 128 % 2


def test_tiles_that_one_warpgroup_sees():
    """Of three tiles one warpgroup sees the first and the last, the other the second: flags say what it leaves out."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 4, 64).bfloat16() for n in (128, 384, 384))
    mask = tilewise.block_mask(in_turn(), 128, 384)
    spec = Spec(0.125, mask_mod=mask.mod.key, mask_block=(*mask.block, 1, 1))
    found = forward(Request(q, k, v, spec, blocks=mask.lists))
    expected = tilewise.attention(q, k, v, mask_mod=mask, backend="reference", return_lse=True)
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found[0], expected[0], atol=2e-2, rtol=2e-2)


@cases("name", ["packed tile lists"], ORDERED)
def test_ordered_sums_with_tile_lists(name, monkeypatch):
    torch.use_deterministic_algorithms(True)
    try:
        judge(ORDERED[name], monkeypatch, longest=400)
    finally:
        torch.use_deterministic_algorithms(False)


def judge(chosen, monkeypatch, longest=None):
    plans.clear()  # those of the reference itself, and at the end those of the emulator
    run = lambda self, r, needs_lse=True: lambda x: forward(Request.of(r.spec, x))  # noqa: E731
    monkeypatch.setattr(ReferenceBackend, "forward_runner", run)
    monkeypatch.setattr(
        ReferenceBackend,
        "backward_runner",
        lambda self, r, bwd_inputs: lambda x: backward(Request.of(r.spec, x[:-4]), BackwardInputs(*x[-4:])),
    )
    chosen = features.replace(PLAIN, **chosen)
    call = features.make(chosen, 5, longest=longest or (200 if chosen.d <= 128 or chosen.blocks else 90), device="cpu")
    try:
        _, faults = features_budget.judge(call, "reference")
    finally:
        plans.clear()
    assert not faults, "\n".join(faults)


@tilewise.mask_mod
def every_other_block(b, h, q_idx, kv_idx):
    return (q_idx // 128 + kv_idx // 128 + h) % 2 == 0


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
def test_heads_of_a_group_with_lists_of_their_own(deterministic):
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 300, 4, 64).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 300, 2, 64).bfloat16() for _ in range(2))
    mod = every_other_block()
    mask = tilewise.block_mask(mod, 300, 300, heads=4)
    spec = Spec(0.125, mask_mod=mod.key, mask_block=(128, 128, 1, 4), deterministic=deterministic)
    request = Request(q, k, v, spec, blocks=mask.lists)
    bwd_inputs = BackwardInputs(*forward(request), dout, None)
    for ours, theirs in zip(backward(request, bwd_inputs), reference.backward(request, bwd_inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


@tilewise.score_mod
def root(score, b, h, q_idx, kv_idx):
    return torch.sqrt(abs(score))


@cases("d", [64], [256])
def test_slopes_of_rows_that_do_not_exist(d):
    """The scores of padding are 0, where this mod has no finite slope."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 70, 1, d).bfloat16() for _ in range(4))
    mod = root()
    request = Request(q, k, v, Spec(d**-0.5, score_mod=mod.key))
    bwd_inputs = BackwardInputs(*forward(request), dout, None)
    for ours, theirs in zip(backward(request, bwd_inputs), reference.backward(request, bwd_inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=0)


@cases("d, dtype", [(128, torch.float16)], [(64, torch.bfloat16), (256, torch.bfloat16)])
def test_gradients_of_rows_that_are_far_out(d, dtype):
    """All scores of some rows are finfo.min, of others -1e9: each key has 1 / n of the weight, not 1."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 90, 1, d).to(dtype) for _ in range(4))
    bias = torch.zeros(1, 1, 90, 90)
    bias[..., 3:9, :] = torch.finfo(torch.float32).min
    bias[..., 70, :] = -1e9
    request = Request(q, k, v, Spec(d**-0.5, after=0), bias=bias, sinks=torch.full((1,), -1e9))
    bwd_inputs = BackwardInputs(*forward(request), dout, torch.randn(1, 1, 90))
    in_full = request._replace(q=q.float(), k=k.float(), v=v.float())  # in float64, -1e9 + q.k would not be -1e9
    exact = reference.backward(in_full, bwd_inputs._replace(out=bwd_inputs.out.float(), dout=dout.float()))
    for ours, theirs in zip(backward(request, bwd_inputs), exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-2, rtol=2e-2)


@cases("d, scale", [(64, -0.1)], [(64, 0.125), (256, 0.06)])
def test_who_does_not_see_a_nan_gets_none(d, scale):
    """A nan in the last key and its value, which only the last document sees: what others get is computed once more,
    terms included."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 100, 1, d).half() for _ in range(4))
    ids = (torch.arange(100) >= 80).int()
    cap, mask = tilewise.mods.softcap(0.5), tilewise.mods.document(ids=ids)
    spec = Spec(
        scale,
        score_mod=cap.key,
        score_numbers=cap.numbers,
        mask_mod=mask.key,
        mask_numbers=mask.numbers,
        mask_tensors=1,
    )
    request = Request(q, k, v, spec, mask=mask.tensors)
    bwd_inputs = BackwardInputs(*reference.forward(request), dout, None)
    clean = backward(request, bwd_inputs)
    k[:, 99] = v[:, 99] = torch.nan
    found = backward(request, bwd_inputs)
    for x, y in zip(found, clean, strict=True):
        torch.testing.assert_close(x[:, :80], y[:, :80], atol=4e-3, rtol=0)
    assert found[0][:, 80:].isnan().all()


@cases("d", [128], [64])
def test_tile_lists_are_believed(d):
    """Tiles are skipped and taken for full as the lists say, whatever the mask mod would, rows and columns of tiles
    that list nothing among them, and for every head of a group; a nan among keys that nobody sees reaches nobody."""
    torch.manual_seed(0)
    n_q, n_k = 300, 400
    kinds = torch.tensor([[[[1, 0, 3, 0], [0, 0, 0, 0], [0, 0, 1, 3]]]], dtype=torch.int8)
    mask = tilewise.mods.blocks.listed(odd(), kinds, (128, 128), n_q, n_k)
    q = torch.randn(1, n_q, 2, d, dtype=torch.bfloat16)
    k, v = (torch.randn(1, n_k, 1, d, dtype=torch.bfloat16) for _ in range(2))
    spec = Spec(d**-0.5, mask_mod=mask.mod.key, mask_block=(128, 128, 1, 1))
    request = Request(q, k, v, spec, blocks=mask.lists)
    dout = torch.randn_like(q)
    bwd_inputs = BackwardInputs(*forward(request), dout, None)
    grads = backward(request, bwd_inputs)

    kind = kinds[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:n_q, :n_k]
    seen = (kind == 3) | ((kind == 1) & ((torch.arange(n_q)[:, None] + torch.arange(n_k)) % 2 == 1))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = torch.einsum("bihd,bjgd->bhij", leaves[0], leaves[1]) * d**-0.5
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhij,bjgd->bihd", p, leaves[2])
    torch.testing.assert_close(bwd_inputs.out.double(), out.detach(), atol=2e-2, rtol=0)
    for ours, theirs in zip(grads, torch.autograd.grad(out, leaves, dout.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=4e-2, rtol=0)

    k[:, 128:256] = v[:, 128:256] = torch.nan
    for ours, theirs in zip(backward(request, bwd_inputs), grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


@tilewise.mask_mod
def odd(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 1
