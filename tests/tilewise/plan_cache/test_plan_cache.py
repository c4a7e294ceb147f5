"""The plan cache: which calls have plans, and that a plan serves equal calls alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests.tilewise.plan_cache.cases import Q, StubBackend, before, ends, scaled
from tests.tilewise.plan_cache.conftest import Spy
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError, api
from tilewise.plan_cache import CallPlan, PlanCache
from tilewise.request import Request
from tilewise.validation import dense


def call_plans(kept: PlanCache) -> int:
    return len({id(x) for x in kept.values() if isinstance(x, CallPlan)})


def test_equal_calls_share_a_plan(stub: StubBackend, kept: PlanCache) -> None:
    for _ in range(3):
        tilewise.attention(*(Q.clone() for _ in range(3)), causal=True)
    assert (len(stub.requests), len(stub.given), call_plans(kept)) == (1, 3, 1)
    tilewise.attention(*(Q.clone() for _ in range(3)), causal=True, layout="bshd")
    tilewise.attention(*(Q.transpose(1, 2) for _ in range(3)), causal=True, layout="bhsd")  # the same memory
    assert call_plans(kept) == 1
    tilewise.attention(*(Q.clone() for _ in range(3)), causal=True, return_lse=True)
    assert call_plans(kept) == 2


def test_a_known_call_is_not_checked_again_and_its_tensors_are_its_own(
    stub: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [
        ([Q.clone() for _ in range(3)], {"sinks": torch.rand(4), "score_mod": scaled(torch.rand(4), 2.0)})
        for _ in range(2)
    ]
    tilewise.attention(*calls[0][0], **calls[0][1])
    monkeypatch.setattr(dense, "checked_request", None)
    tilewise.attention(*calls[1][0], **calls[1][1])
    for given, (tensors, options) in zip(stub.given, calls, strict=True):
        expected = [*tensors, None, options["sinks"], *options["score_mod"].tensors]
        assert len(given) == len(expected)
        assert all(a is b for a, b in zip(given, expected, strict=True))


TERMS: dict[str, Callable[[], dict[str, Any]]] = {
    "sinks": lambda: {"sinks": torch.rand(4)},
    "slopes": lambda: {"alibi_slopes": torch.rand(4)},
    "bias": lambda: {"bias": torch.rand(1, 4, 128, 128)},
    "score mod": lambda: {"score_mod": scaled(torch.rand(4), 2.0)},
    "mask mod": lambda: {"mask_mod": before(ends())},
    "all": lambda: {
        "mask_mod": before(ends()), "score_mod": scaled(torch.rand(4), 2.0), "alibi_slopes": torch.rand(4),
        "sinks": torch.rand(4), "bias": torch.rand(1, 1, 128, 1), "softcap": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("terms", [*TERMS, "block mask"])
def test_terms_of_a_known_call_are_its_own(
    terms: str, packed: bool, stub: StubBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = Q[0] if packed else Q
    calls: list[Any] = []
    for _ in range(2):
        cu = [torch.tensor([0, 128], dtype=torch.int32) for _ in range(2)] if packed else []
        if terms != "block mask":
            options = TERMS[terms]()
        elif packed:
            options = {"mask_mod": tilewise.block_mask_varlen(before(ends()), *cu)}
        else:
            options = {"mask_mod": tilewise.block_mask(before(ends()), 128, 128)}
        calls.append(([q.clone() for _ in range(3)], cu, options))
    longest = {"max_seqlen_q": 128, "max_seqlen_k": 128} if packed else {}
    for n, (tensors, cu, options) in enumerate(calls):
        if n:
            monkeypatch.setattr(dense, "checked_request", None)
        (tilewise.attention_varlen if packed else tilewise.attention)(*tensors, *cu, **longest, **options)
        spec = stub.requests[0].spec
        request = Request.of(spec, stub.given[-1])
        assert all(a is b for a, b in zip(request[:3], tensors, strict=True))
        assert all(a is b for a, b in zip((request.cu_q, request.cu_k), cu, strict=False))
        assert request.sinks is options.get("sinks")
        assert request.bias is options.get("bias")
        mods = [options[name] for name in ("score_mod", "mask_mod") if name in options]
        own = [x for mod in mods for x in getattr(mod, "mod", mod).tensors]
        own += [options[name] for name in ("alibi_slopes",) if name in options]
        assert {id(x) for x in own} == {id(x) for x in (*request.score, *request.mask)}
        assert len(request.blocks) == 4 * (terms == "block mask")
    assert call_plans(kept) == 1


@pytest.mark.parametrize("wanted", ["sinks", "table", "both", "neither"])
def test_gradients_of_a_known_call(wanted: str, stub: StubBackend) -> None:
    """They come from its own tensors, and those of terms only where they are wanted."""
    for _ in range(3):
        q, k, v = (torch.randn(1, 128, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        sinks = torch.rand(4, requires_grad=wanted in ("sinks", "both"))
        table = torch.rand(4, requires_grad=wanted in ("table", "both"))
        shown = ends()
        stub.gradients.clear()
        out = tilewise.attention(
            q, k, v, mask_mod=before(shown), score_mod=scaled(table, 2.0), sinks=sinks, causal=True
        )
        dout = torch.ones_like(out)
        out.backward(dout)
        for x in (q, k, v):
            assert x.grad is not None
            assert set(x.grad.flatten().tolist()) == {7.0}
        for x in (sinks, table):
            assert (x.grad is not None) == x.requires_grad
            assert x.grad is None or x.grad.tolist() == [3.0] * 4
        flags = None if wanted == "neither" else (False, wanted != "table", wanted != "sinks")
        assert [x for x, _ in stub.gradients] == ([None] if flags is None else [None, flags])
        for _, given in stub.gradients:
            request = Request.of(stub.requests[0].spec, given[:-4])
            addresses = [x.data_ptr() for x in (*request[:3], request.sinks, *request.score, *request.mask)]
            assert addresses == [x.data_ptr() for x in (q, k, v, sinks, table, shown)]
            assert given[-2].data_ptr() == dout.data_ptr()
            assert given[-1] is None
    assert len(stub.requests) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_known_call_has_a_gradient_if_grad_mode_says_so(first: bool, stub: StubBackend, kept: PlanCache) -> None:
    q, k, v = (Q.clone().requires_grad_() for _ in range(3))
    for wanted in (first, not first, first):
        with torch.set_grad_enabled(wanted):
            for lse in (True, False):
                out = tilewise.attention(q, k, v, causal=True, return_lse=lse)
                assert (out[0] if lse else out).requires_grad == wanted
    with torch.inference_mode():
        assert not tilewise.attention(q, k, v, causal=True, return_lse=False).requires_grad
    assert tilewise.attention(q, k, v, causal=True, return_lse=False).requires_grad
    assert call_plans(kept) == 2  # with and without lse


def test_tensors_without_a_gradient_have_a_plan_without(stub: StubBackend) -> None:
    """Some of q, k, v and the terms may require a gradient."""
    for n in range(4):
        tensors = [Q.clone().requires_grad_(n == m) for m in range(3)]
        for _ in range(2):
            out = tilewise.attention(*tensors, sinks=torch.zeros(4, requires_grad=n == 3))
            assert out.requires_grad
    tensors = [Q.clone() for _ in range(3)]
    for _ in range(2):
        assert not tilewise.attention(*tensors, sinks=torch.zeros(4)).requires_grad


def test_a_known_call_is_no_way_around_a_check(stub: StubBackend) -> None:
    """1 == True and 2.0 == 2, but the options differ."""
    tilewise.attention(Q, Q, Q, causal=True, window=(2, 0))
    for causal, window in ((1, (2, 0)), (True, (2.0, 0)), (True, [2.0, 0]), (True, (2, False))):
        with pytest.raises(AttentionError):
            tilewise.attention(Q, Q, Q, causal=causal, window=window)
    cu = torch.tensor([0, 128], dtype=torch.int32)
    for longest in (128, 127):
        tilewise.attention_varlen(Q[0], Q[0], Q[0], cu, cu, max_seqlen_q=longest + 1, max_seqlen_k=128)
    for wrong in (-1, 2.0, True, "128"):
        with pytest.raises(AttentionError, match="max_seqlen_q"):
            tilewise.attention_varlen(Q[0], Q[0], Q[0], cu, cu, max_seqlen_q=wrong, max_seqlen_k=128)


def test_calls_with_tensors_made_by_the_library_are_checked_every_time(stub: StubBackend, kept: PlanCache) -> None:
    """The place of such a tensor among the arguments is unknown. Their runners are kept by the checked request."""

    def is_kept(**options: Any) -> bool:
        kept.clear()
        stub.requests.clear()
        for _ in range(3):
            tilewise.attention(Q, Q, Q, **options)
        assert len(stub.requests) == call_plans(kept) == 1
        [key] = kept
        assert key[0] in ("attention", "request")
        return key[0] == "attention"

    assert is_kept(softcap=2.0)
    assert is_kept(sinks=torch.zeros(4))
    assert not is_kept(dropout_p=0.5)  # a seed is drawn
    assert not is_kept(dropout_p=0.5, seed=torch.tensor([3]))
    for more in ({}, {"sinks": torch.zeros(4)}):
        assert is_kept(bias=torch.zeros(1, 1, 1, 1), **more)
        assert not is_kept(bias=torch.zeros(1, 1), **more)  # a view with four axes is made


def test_each_dropout_call_draws_a_seed(stub: StubBackend) -> None:
    for _ in range(2):
        tilewise.attention(Q, Q, Q, dropout_p=0.5)
    seeds = [Request.of(stub.requests[0].spec, given).seed for given in stub.given]
    assert seeds[0] != seeds[1]


def test_a_call_of_unknown_types_or_under_tilewise_check_has_the_runner_of_an_equal_one(
    stub: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is checked, but kernels are not prepared again."""
    for _ in range(2):
        tilewise.attention(Q, Q, Q, window=[2, 0])
    assert len(stub.requests) == 1
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    for _ in range(2):
        tilewise.attention(Q, Q, Q, window=(2, 0))
        tilewise.attention(Q, Q, Q, window=(3, 0))
    assert len(stub.requests) == 2


def test_requests_with_0_and_minus_0_are_two(stub: StubBackend) -> None:
    for by in (0.0, -0.0, 0.0):
        tilewise.attention(Q, Q, Q, score_mod=scaled(torch.ones(4), by), bias=torch.zeros(1, 1))
    assert len(stub.requests) == 2


def test_one_tensor_as_two_arguments(third: ThirdBackend, kept: PlanCache) -> None:
    """One plan serves all: q, k and v stand at their own positions, whichever of them are one tensor."""
    x, y, z = (torch.randn(1, 6, 2, 8) for _ in range(3))
    for tensors in ((x, x, x), (x, y, z), (x, y, y), (y, y, x), (x, y, x), (z, z, z), (y, z, x)):
        found = tilewise.attention(*tensors)
        assert_close(found, tilewise.attention(*tensors, backend="reference"))
    assert third.made == ["forward"]
    bias = torch.randn(1, 2, 6, 8)[..., :6]
    for q in (x, bias.transpose(1, 2)):  # as a term, too
        tilewise.attention(q, q, q)


def test_autocast(third: ThirdBackend, kept: PlanCache) -> None:
    for _ in range(3):
        q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
        with torch.autocast("cpu", torch.bfloat16):
            torch.set_autocast_enabled("cuda", True)  # where the tensors say they are
            out = tilewise.attention(q, k, v)
            torch.set_autocast_enabled("cuda", False)
        out.sum().backward()
        assert out.dtype == torch.bfloat16
        assert q.grad is not None
        assert q.grad.dtype == torch.float32
        assert tilewise.attention(q, k, v).dtype == torch.float32
    assert third.made == ["forward", "backward", "forward"]


def test_no_tensor_of_the_caller_is_kept_alive(third: ThirdBackend, kept: PlanCache) -> None:
    for _ in range(2):
        q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
        bias = torch.zeros(1, 1, 6, 6, requires_grad=True)
        out, lse = tilewise.attention(q, k, v, bias=bias, return_lse=True)
        dout = torch.randn_like(out)
        out.backward(dout)
        alive = [weakref.ref(x) for x in (q, k, v, bias, out, lse, dout, q.grad)]
        memory = [weakref.ref(x.untyped_storage()) for x in (q, bias, dout)]
        del q, k, v, bias, out, lse, dout
        gc.collect()
        assert [x() for x in (*alive, *memory)] == [None] * 11
    assert call_plans(kept) == 1


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_runners_of_the_backends_keep_no_tensor(backend: str, kept: PlanCache, triton_runs: None) -> None:
    for _ in range(2):
        q, k, v = (torch.randn(1, 6, 2, 16, requires_grad=True) for _ in range(3))
        out = tilewise.attention(q, k, v, causal=True, backend=backend)
        expected = tilewise.attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
        assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
        out.sum().backward()
        alive = [weakref.ref(x) for x in (q, k, v, out, q.grad)]
        del q, k, v, out, expected
        gc.collect()
        assert [x() for x in alive] == [None] * 5
    assert call_plans(kept) >= 1


def test_a_full_cache_drops_its_oldest_plans(
    stub: StubBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "limit", 8)
    for n in range(1, 21):
        x = Q[:, :n]
        for _ in range(2):
            assert tilewise.attention(x, x, x).shape == x.shape
        assert len(kept) <= 8
    assert len(stub.requests) == 20
    for n in range(13, 21):
        tilewise.attention(Q[:, :n], Q[:, :n], Q[:, :n])
    assert len(stub.requests) == 20


@pytest.fixture
def known(third: ThirdBackend, kept: PlanCache) -> list[Tensor]:
    """The tensors of a call that has a plan."""
    tensors = [torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3)]
    tilewise.attention(*tensors)
    third.made.clear()
    third.ran.clear()
    return tensors


def test_a_known_call_under_a_dispatch_mode_runs_the_op(known: list[Tensor], kept: PlanCache) -> None:
    before = set(kept)
    with FlopCounterMode(display=False) as counter:
        tilewise.attention(*known)
    assert counter.get_total_flops() == 2 * 2 * 6 * 6 * (8 + 8)
    assert {key[0] for key in set(kept) - before} <= {"op"}  # the op's own plan


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "forward mode", "compile", "make_fx", "fake tensors"])
def test_a_known_call_under_a_transform_has_no_signature(
    transform: str, known: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op is called, so that the transform sees it."""
    expected = tilewise.attention(*known, backend="reference")
    monkeypatch.setattr(api, "plans", Spy())  # raises if a signature is looked up
    call = tilewise.attention
    if transform == "vmap":
        found = torch.vmap(lambda q: call(q, *known[1:]))(torch.stack([known[0]] * 2))[1]
    elif transform == "grad":
        found = expected
        torch.func.grad(lambda q: call(q, *known[1:]).sum())(known[0])
    elif transform == "jvp":
        found, _ = torch.func.jvp(lambda q: call(q, *known[1:]), (known[0],), (torch.ones_like(known[0]),))
    elif transform == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(known[0], torch.ones_like(known[0]))
            found, tangent = torch.autograd.forward_ad.unpack_dual(call(dual, *known[1:]))
            assert tangent is not None
    elif transform == "compile":
        found = torch.compile(call, backend="eager", fullgraph=True)(*known)
    elif transform == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda *x: call(*x))(*known)
        assert any("tilewise.forward" in str(node.target) for node in graph.graph.nodes)
        found = expected
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(x) for x in known))
        assert fake.shape == expected.shape
        found = expected
    assert_close(found, expected)
