"""The plan cache: what makes a signature, which calls have plans, and that a plan serves equal calls alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests.tilewise.plan_cache.conftest import Spy, signature_of_call
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError, api, plan_cache
from tilewise.backends import registry
from tilewise.plan_cache import CallPlan, PlanCache, positions
from tilewise.request import BackwardInputs, Request, Spec, arguments

Q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)


class StubBackend:
    """Supports every call and computes nothing.

    Attributes:
        requests: those that a runner was made for.
        given: the tensors that each run of a forward was given.
    """

    name, reason, kv = "stub", "a test", None

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.given: list[Sequence[Tensor | None]] = []
        self.gradients: list[tuple[tuple[bool, ...] | None, Sequence[Tensor | None]]] = []

    def unsupported(self, request: Any, gpu: Any) -> str | None:
        return None

    def declines(self, request: Any, gpu: Any) -> str | None:
        return None

    def has_backward(self, request: Request) -> bool:
        return True

    def forward(self, request: Request) -> Any:
        self.requests.append(request._replace(q=None, k=None, v=None))  # type: ignore[arg-type]

        def run(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            self.given.append(tensors)
            q, v = tensors[0], tensors[2]
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)

        return run

    def backward(self, request: Request, bwd_inputs: BackwardInputs) -> Any:
        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.gradients.append((None, tensors))
            return [torch.full_like(x, 7) for x in tensors[:3]]

        return run

    def term_gradients(self, request: Request, bwd_inputs: BackwardInputs, wanted: tuple[bool, ...]) -> Any:
        spec = request.spec

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.gradients.append((wanted, tensors))
            request = Request.of(spec, tensors[:-4])
            terms = request.bias, request.sinks, *request.score
            return [torch.full_like(x, 3) for x, wants in zip(terms, wanted, strict=True) if wants and x is not None]

        return run


@pytest.fixture
def stub(kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> StubBackend:
    backend = StubBackend()
    monkeypatch.setattr(registry, "BACKENDS", (backend, *registry.BACKENDS))
    return backend


@tilewise.score_mod
def scaled(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score * table[h] * by


@tilewise.score_mod
def shifted(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score + table[h] * by


@tilewise.mask_mod
def before(b, h, q_idx, kv_idx, ends):  # type: ignore[no-untyped-def]
    return kv_idx < ends[q_idx]


def ends(n: int = 128) -> Tensor:
    return torch.full((n,), 100, dtype=torch.int32)


# Signatures


def signature_of(*, causal: Any = True, window: Any = (2, 0), **more: Any) -> tuple[Any, ...] | None:
    """The signature of a call with new tensors."""
    shape = 1, more.pop("n", 128), 4, 64
    dtype, grad = more.pop("dtype", torch.bfloat16), more.pop("grad", False)
    tensors = [torch.zeros(shape, dtype=dtype, requires_grad=grad) for _ in range(3)]
    if more.pop("strided", False):
        tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    if more.pop("unaligned", False):
        tensors[2] = torch.zeros(128 * 4 * 64 + 1, dtype=dtype)[1:].view(shape)
    if more.pop("without memory", False):
        tensors[2] = torch._efficientzerotensor(shape, dtype=dtype)
    if more.pop("same", False):
        tensors[1] = tensors[0]
    if more.pop("same values", False):
        tensors[2] = tensors[1]
    if more.pop("negative", False):
        tensors[0] = torch.zeros(shape, dtype=torch.complex64).conj().imag.as_strided(shape, tensors[0].stride())
    options = {"causal": causal, "window": window, **more}
    if not more.pop("packed", False):
        return signature_of_call(lambda: tilewise.attention(*tensors, **options))
    cu = torch.tensor([0, 128], dtype=torch.int32)
    del options["packed"]
    return signature_of_call(lambda: tilewise.attention_varlen(*(x[0] for x in tensors), cu, cu.clone(), **options))


ALWAYS_ONES = torch.ones(4)
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"causal": False}),
    "True and 1": ({}, {"causal": 1}),
    "True and 1.0": ({}, {"causal": 1.0}),
    "window": ({}, {"window": (3, 0)}),
    "no window": ({}, {"window": None}),
    "2 and 2.0 in a tuple": ({}, {"window": (2.0, 0)}),
    "0 and False in a tuple": ({}, {"window": (2, False)}),
    "longer tuple": ({}, {"window": (2, 0, 0)}),
    "scale": ({"scale": 0.5}, {"scale": 0.25}),
    "scale 1 and 1.0": ({"scale": 1}, {"scale": 1.0}),
    "scale 1 and True": ({"scale": 1}, {"scale": True}),
    "scale 0.0 and -0.0": ({"scale": 0.0}, {"scale": -0.0}),
    "no scale": ({}, {"scale": None}),
    "softcap": ({"softcap": 2.0}, {"softcap": 3.0}),
    "softcap or scale": ({"softcap": 2.0}, {"scale": 2.0}),
    "return_lse": ({}, {"return_lse": True}),
    "deterministic": ({"deterministic": False}, {"deterministic": True}),
    "deterministic by default": ({"deterministic": None}, {"deterministic": False}),
    "backend": ({}, {"backend": "triton"}),
    "seed": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": 0.5, "seed": 2}),
    "shorter": ({}, {"n": 127}),
    "longer": ({}, {"n": 129}),
    "strides": ({}, {"strided": True}),
    "dtype": ({}, {"dtype": torch.float16}),
    "alignment": ({}, {"unaligned": True}),
    "no memory": ({}, {"without memory": True}),
    "q is k, with sinks": ({"sinks": ALWAYS_ONES}, {"same": True, "sinks": ALWAYS_ONES}),
    "k is v, with sinks": ({"sinks": ALWAYS_ONES}, {"same values": True, "sinks": ALWAYS_ONES}),
    "requires_grad": ({}, {"grad": True}),
    "negative bit": ({"dtype": torch.float32}, {"dtype": torch.float32, "negative": True}),
    "packed": ({}, {"packed": True}),
    "mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": shifted(torch.ones(4), 2.0)}),
    "number of a mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(4), 3.0)}),
    "0.0 and -0.0 of a mod": ({"score_mod": scaled(torch.ones(4), 0.0)}, {"score_mod": scaled(torch.ones(4), -0.0)}),
    "shape in a mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(1), 2.0)}),
    "strides in a mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(8)[::2], 2.0)}),
    "dtype in a mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(4).double(), 2.0)}),
    "alignment in a mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(5)[1:], 2.0)}),
    "gradient in a mod": (
        {"score_mod": scaled(torch.ones(4), 2.0)}, {"score_mod": scaled(torch.ones(4).requires_grad_(), 2.0)}),
    "kind of mod": ({"score_mod": scaled(torch.ones(4), 2.0)}, {"mask_mod": scaled(torch.ones(4), 2.0)}),
    "mask or block mask": (
        {"mask_mod": before(ends())}, {"mask_mod": tilewise.block_mask(before(ends()), 128, 128)}),
    "tiles of a block mask": (
        {"mask_mod": tilewise.block_mask(before(ends()), 128, 128, block=(128, 128))},
        {"mask_mod": tilewise.block_mask(before(ends()), 128, 128, block=(64, 64))}),
    "sinks or slopes": ({"sinks": torch.ones(4)}, {"alibi_slopes": torch.ones(4)}),
    "one tensor in two options": (
        {"sinks": ALWAYS_ONES, "alibi_slopes": ALWAYS_ONES}, {"sinks": ALWAYS_ONES, "alibi_slopes": torch.ones(4)}),
    "bias": ({"bias": torch.ones(1, 4, 1, 1)}, {"bias": torch.ones(1, 1, 1, 1)}),
    "max_seqlen beside a bias": (
        {"packed": True, "bias": torch.ones(1, 1, 1, 1), "max_seqlen_q": 128},
        {"packed": True, "bias": torch.ones(1, 1, 1, 1), "max_seqlen_q": 129}),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.usefixtures("spied")
def test_calls_that_differ_have_different_signatures(case: str) -> None:
    one, other = (signature_of(**x) for x in DIFFERENT[case])
    assert one is not None
    assert other is not None
    assert one != other
    assert [signature_of(**x) for x in DIFFERENT[case]] == [one, other]  # with other tensors: contents do not count
    plans: PlanCache[str] = PlanCache()
    plans.keep(one, "one")
    plans.keep(other, "other")
    assert (plans[one], plans[other]) == ("one", "other")


def test_the_plan_of_a_call_with_one_tensor_as_q_and_k_serves_any_other() -> None:
    q, k, v, sinks = (torch.zeros(1) for _ in range(4))
    assert positions([q, q, v], [q, q, v]) == (0, 1, 2)
    assert positions([q, k, k], [q, k, k]) == (0, 1, 2)
    assert positions([q, k, v, None, sinks], [q, k, v, sinks]) == (0, 1, 2, None, 3)
    assert positions([q, k, v, None, sinks, q], [q, k, v, sinks]) == (0, 1, 2, None, 3, 0)
    assert positions([q, k, v + 0], [q, k, v]) is None


@contextmanager
def fp32_precision(setting: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("spied")
def test_settings_of_torch_count() -> None:
    plain, single = signature_of(), signature_of(dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert signature_of() not in (None, plain)
    finally:
        torch.use_deterministic_algorithms(False)
    with fp32_precision("tf32"):
        assert signature_of() == plain  # no bfloat16 kernel uses TF32
        assert signature_of(dtype=torch.float32) not in (None, single)


@pytest.mark.usefixtures("spied")
def test_max_seqlen_counts_only_beside_an_option_of_that_size() -> None:
    """It may change with every batch."""
    found = [signature_of(packed=True, max_seqlen_q=n, max_seqlen_k=m) for n, m in ((128, 128), (64, None), (None, 1))]
    assert found[0] is not None
    assert found[0] == found[1] == found[2]
    for name in ("bias", "alibi_slopes"):
        term = {name: torch.ones(1)}
        found = [signature_of(packed=True, max_seqlen_q=128, max_seqlen_k=n, **term) for n in (128, 127, None)]
        assert len({*found}) == 3


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "options",
    [{"window": [2, 0]}, {"scale": torch.float32.itemsize + 0j}, {"sinks": torch.ones(4).as_subclass(Subclass)},
     {"mask_mod": lambda: None}, {"seed": threading}, {"window": (2, [0])}],
    ids=["list", "complex", "subclass of Tensor", "function", "module", "list in a tuple"],
)  # fmt: skip
@pytest.mark.usefixtures("spied")
def test_options_of_unknown_types_have_no_signature(options: dict[str, Any]) -> None:
    assert signature_of(**options) is None


@pytest.mark.usefixtures("spied")
def test_calls_on_a_cpu_have_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: False))
    assert signature_of() is None


@pytest.mark.usefixtures("spied")
def test_every_call_is_checked_with_tilewise_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.validation, "CHECK_CONTENTS", True)
    assert signature_of() is None


# Plans


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
    monkeypatch.setattr(api.validation, "checked_request", None)
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
            monkeypatch.setattr(api.validation, "checked_request", None)
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
    monkeypatch.setattr(api.validation, "CHECK_CONTENTS", True)
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
            out = tilewise.attention(q, k, v)
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


def test_a_full_cache_starts_again(stub: StubBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 8)
    for n in range(1, 21):
        x = Q[:, :n]
        for _ in range(2):
            assert tilewise.attention(x, x, x).shape == x.shape
        assert len(kept) <= 8
    assert len(stub.requests) == 20


# Calls that bypass the cache


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


# Backward


def strided(x: Tensor, kind: str) -> Tensor:
    """The same numbers with other strides or another alignment."""
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "padded":
        padded = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        padded[..., : x.shape[-1]] = x
        return padded[..., : x.shape[-1]]
    if kind == "unaligned":
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if kind == "last axis":
        return x.mT.contiguous().mT
    return x


KINDS = ["contiguous", "heads first", "padded", "unaligned", "last axis"]


def gradients(out: Tensor, lse: Tensor, wanted: Sequence[Tensor], dout: Tensor, dlse: Tensor | None) -> Any:
    outputs, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, wanted, given)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_gradient_with_other_strides(with_lse: bool, third: ThirdBackend, kept: PlanCache) -> None:
    for kind in KINDS * 2:
        q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
        dout = torch.randn(2, 6, 2, 8)
        dlse = torch.randn(2, 6, 2).mT if with_lse else None
        found = gradients(*tilewise.attention(q, k, v, return_lse=True), (q, k, v), strided(dout, kind), dlse)
        results = tilewise.attention(q, k, v, return_lse=True, backend="reference")
        expected = gradients(*results, (q, k, v), dout, dlse)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
    assert third.made.count("forward") == 1
    assert third.made.count("backward") == 3  # contiguous or copied, heads first, padded
    assert third.ran.count("backward") == len(KINDS) * 2


def test_gradients_with_and_without_one_of_lse(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    for wanted in ("out", "lse", "both", "out", "lse"):
        for backend in ("auto", "reference"):
            out, lse = tilewise.attention(q, k, v, return_lse=True, backend=backend)
            loss = out.square().sum() * (wanted != "lse") + lse.square().sum() * (wanted != "out")
            found = torch.autograd.grad(loss if wanted == "both" else (out if wanted == "out" else lse).sum(), (q, k))
            if backend == "auto":
                first = found
        for a, b in zip(first, found, strict=True):
            assert_close(a, b)


def test_an_expanded_gradient_and_a_zero_tensor(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    for dout in (torch.ones(()).expand(2, 6, 2, 8), torch._efficientzerotensor((2, 6, 2, 8)), -torch.ones(2, 6, 2, 8)):
        found = torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), dout)
        plain = torch.zeros(2, 6, 2, 8) + dout
        expected = torch.autograd.grad(tilewise.attention(q, k, v, backend="reference"), (q, k, v), plain)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_saved_tensors_that_a_hook_returns_with_other_strides(
    kind: str, stub: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an offload to the host: the runner of the first backward does not fit."""
    made: list[Any] = []
    backward = stub.backward
    monkeypatch.setattr(stub, "backward", lambda *x: made.append([y.stride() for y in x[0][:3]]) or backward(*x))
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for hooked in (False, True, True, False):
        unpack = (lambda x: strided(x, kind) if x.dim() == 4 else x) if hooked else lambda x: x
        with saved_tensors_hooks(lambda x: x.detach().clone(), unpack):
            tilewise.attention(q, k, v).backward(torch.ones(1, 6, 2, 8))
        given = stub.gradients[-1][1]
        expected = [strided(x.detach(), kind) if hooked else x for x in (q, k, v)]
        assert [x.stride() for x in given[:3]] == [x.stride() for x in expected]
        assert [x.data_ptr() & 15 for x in given[:3]] == [x.data_ptr() & 15 for x in expected]
        assert all(torch.equal(a, b) for a, b in zip(given[:3], expected, strict=True))
    assert len(made) == 1 + (kind != "unaligned")  # a KernelCall checks the alignment itself
    assert len(stub.requests) == 1


def test_hooks_with_numbers(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for unpack in (lambda x: x, lambda x: strided(x, "padded") if x.dim() == 4 else x):
        with saved_tensors_hooks(lambda x: x, unpack):
            found = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
        expected = torch.autograd.grad(tilewise.attention(q, k, v, backend="reference").square().sum(), (q, k, v))
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


def test_runners_of_a_backward_are_bounded(
    third: ThirdBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_LAYOUTS", 4)
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for n in range(10):
        dout = torch.randn(1, 6, 2, 8 + 8 * n)[..., :8]
        torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), dout)
        [plan] = kept.values()
        assert 1 <= len(plan._backward) <= 4
    assert third.made == ["forward", *["backward"] * 10]


def test_the_tf32_setting_of_the_backward_is_the_current_one(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for setting in ("ieee", "tf32", "ieee", "tf32"):
        out = tilewise.attention(q, k, v)
        with fp32_precision(setting):
            torch.autograd.grad(out.sum(), q)
    assert third.made.count("backward") == 2


def test_batched_and_second_gradients_of_a_known_call(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    stack = torch.randn(3, 1, 4, 2, 8, dtype=torch.float64)
    for _ in range(2):
        out = tilewise.attention(q, k, v)
        (found,) = torch.autograd.grad(out, q, stack, is_grads_batched=True, retain_graph=True)
        for n in range(3):
            assert_close(found[n], torch.autograd.grad(out, q, stack[n], retain_graph=True)[0])
        (first,) = torch.autograd.grad(out, q, stack[0], create_graph=True)
        assert_close(first, found[0])
        with pytest.raises(AttentionError, match="gradient of the gradient"):
            first.sum().backward()


def test_a_retained_graph_runs_its_plan_again(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    out = tilewise.attention(q, k, v)
    kept.clear()  # the graph holds its plan
    first, second = (torch.autograd.grad(out.sum(), q, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert third.made == ["forward", "backward"]


# The registered ops


def test_calls_of_the_ops_share_a_plan(third: ThirdBackend, kept: PlanCache) -> None:
    for n in (128, 128, 64, 128, 64, 64):
        q, k, v, dout = (torch.randn(1, n, 4, 8, dtype=torch.float64) for _ in range(4))
        asked = arguments(Request(q, k, v, Spec(0.5)))[3:]
        out, lse = torch.ops.tilewise.forward(q, k, v, *asked)
        found = torch.ops.tilewise.backward(out, lse, dout, None, q, k, v, *asked)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = tilewise.attention(*leaves, scale=0.5, backend="reference")
        assert_close(out, expected)
        for a, b in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
            assert_close(a, b)
    assert third.made == ["forward", "backward"] * 2
    assert [key[0] for key in kept].count("op") == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"before": 3}, {"before": 4}),
        ({"before": 3}, {"after": 3}),
        ({"before": None}, {"before": 0}),
        ({"score_mod": scaled(torch.ones(4), 0.0)}, {"score_mod": scaled(torch.ones(4), -0.0)}),
        ({"backend": "auto"}, {"backend": "stub"}),
        ({"deterministic": False}, {"deterministic": True}),
        ({"partial": False}, {"partial": True}),
    ],
)
def test_other_scalars_of_an_op_are_another_call(
    one: dict[str, Any], other: dict[str, Any], stub: StubBackend, kept: PlanCache
) -> None:
    for words in (one, other) * 2:
        words = {"scale": 1.0, **words}
        mod = words.pop("score_mod", None)
        if mod is not None:
            words |= {"score_mod": mod.key, "score_numbers": mod.numbers, "score_tensors": 1}
        request = Request(Q, Q, Q, Spec(**words), score=() if mod is None else mod.tensors)
        torch.ops.tilewise.forward(*arguments(request))
    assert len(stub.requests) == 2
    assert repr(stub.requests[0].spec) != repr(stub.requests[1].spec)


# Threads


def test_threads_share_the_cache(third: ThirdBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the results of its own tensors, while the cache fills up and starts again."""
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 4)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            start.wait()
            for n in (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8) * 2:
                q, k, v = (torch.randn(1, n, 2, 8, generator=generator).requires_grad_() for _ in range(3))
                found = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
                expected = torch.autograd.grad(
                    torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
                    .square()
                    .sum(),
                    (q, k, v),
                )
                for a, b in zip(found, expected, strict=True):
                    assert_close(a, b, atol=1e-5, rtol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert len(kept) <= 4 + len(threads)


# Tensors whose memory does not hold their values


def negative(*shape: int) -> Tensor:
    """A view with the negative bit: its values are those in memory, negated."""
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize("what", ["q", "k", "v", "bias", "sinks", "slopes", "mod", "dout", "dlse"])
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_negative_views_and_zero_tensors(what: str, kind: str, kept: PlanCache, triton_runs: None) -> None:
    """Kernels read memory, so these are copied first; by every call."""
    make = negative if kind == "negative" else lambda *shape: torch._efficientzerotensor(shape)
    shapes = {"q": (1, 6, 2, 16), "k": (1, 6, 2, 16), "v": (1, 6, 2, 16), "bias": (1, 2, 6, 6), "sinks": (2,),
              "slopes": (2,), "mod": (2,), "dout": (1, 6, 2, 16), "dlse": (1, 2, 6)}  # fmt: skip
    for _ in range(2):
        given = {name: make(*shape) if name == what else torch.randn(*shape) for name, shape in shapes.items()}
        results = []
        for backend in ("triton", "reference"):
            q = given["q"] if what == "q" else given["q"].clone().requires_grad_()
            terms = {"bias": given["bias"], "sinks": given["sinks"], "alibi_slopes": given["slopes"]}
            options: dict[str, Any] = {} if what in "qkv" else terms | {"score_mod": scaled(given["mod"], 1.0)}
            found = tilewise.attention(q, given["k"], given["v"], **options, return_lse=True, backend=backend)
            if q.requires_grad:
                found = *found, *torch.autograd.grad(found, q, (given["dout"], given["dlse"]))
            results.append(found)
        for a, b in zip(*results, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.parametrize("what", ["q", "k", "sinks"])
def test_layouts_without_strides_are_errors(what: str, kind: str, kept: PlanCache) -> None:
    made = torch.ones(1, 6, 2, 8).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(6, 2, 8)])
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    with pytest.raises(AttentionError, match="layout of"):  # noqa: PT012
        if what == "sinks":
            tilewise.attention(q, k, v, sinks=made)
        else:
            tilewise.attention(*((made, k, v) if what == "q" else (q, made, v)))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
def test_calls_without_elements(batch: int, queries: int, keys: int, kept: PlanCache, triton_runs: None) -> None:
    for _ in range(2):
        q = torch.randn(batch, queries, 2, 16, requires_grad=True)
        k, v = torch.randn(2, batch, keys, 2, 16).requires_grad_().unbind()
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="triton")
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -torch.inf).all())
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))
