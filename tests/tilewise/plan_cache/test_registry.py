"""Which backend runs a call, what "auto" says about it, and that a third backend needs no more than the protocol."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.tilewise.plan_cache.conftest import insert
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError
from tilewise.backends import registry
from tilewise.backends.protocol import Backend, KvBackend
from tilewise.call.fields import CACHE
from tilewise.kv_request import CachePlaces, KvRequest
from tilewise.plan_cache import PlanCache
from tilewise.request import INTERPRETER, Gpu, Request, Spec
from tilewise.validation import kv as checks

Q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)
HOPPER = next(backend for backend in registry.BACKENDS if backend.name == "hopper")


def request(backend: str = "auto", q: Tensor = Q, **spec: Any) -> Request:
    return Request(q, q, q, Spec(1.0, backend=backend, **spec))


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [
        (Gpu("cuda", 75), "reference"), (Gpu("cuda", 80), "triton"), (Gpu("cuda", 90), "hopper"),
        (Gpu("cuda", 100), "triton"), (Gpu("cuda", 120), "triton"), (Gpu("hip", "gfx942"), "triton"),
        (Gpu("hip", "gfx90a"), "reference"), (None, "torch"), (INTERPRETER, "torch"),
    ],
)  # fmt: skip
def test_auto_takes_the_first_backend_that_supports_the_call(gpu: Gpu | None, backend: str) -> None:
    chosen = registry.choose(request(), gpu)
    assert chosen.backend.name == backend
    assert chosen.reason.startswith(chosen.backend.reason)
    if backend != "hopper":  # the reason names the backend before it, and why it does not run the call
        assert "hopper: " in chosen.reason or "triton: " in chosen.reason


def test_a_call_that_a_backend_declines_runs_on_it_by_name() -> None:
    """The decode shape is supported by the Hopper kernels, but slower there."""
    q, k = Q[:, :1], Q.expand(1, -1, -1, -1).repeat(1, 64, 1, 1)
    gpu = Gpu("cuda", 90)
    chosen = registry.choose(Request(q, k, k, Spec(1.0)), gpu)
    assert chosen.backend.name == "triton"
    assert "hopper: few queries" in chosen.reason
    assert registry.choose(Request(q, k, k, Spec(1.0, backend="hopper")), gpu) == (HOPPER, "asked for by name")
    assert registry.choose(request("triton"), INTERPRETER).backend.name == "triton"


@pytest.mark.parametrize("name", [name for name in registry.NAMES[2:] if name != "torch"])
def test_a_named_backend_runs_or_raises(name: str) -> None:
    with pytest.raises(AttentionError, match=f"backend='{name}'.*auto.*reference"):
        registry.choose(request(name), Gpu("cuda", 75))
    with pytest.raises(AttentionError, match=f"backend='{name}'"):
        tilewise.attention(Q, Q, Q, backend=name)


def test_an_unknown_name_raises_and_lists_the_names() -> None:
    with pytest.raises(AttentionError, match=r"'cudnn'.*'auto' or 'reference' or 'torch' or 'triton' or 'hopper'"):
        tilewise.attention(Q, Q, Q, backend="cudnn")


def test_the_gradient_comes_from_the_next_backend_that_has_one() -> None:
    """The Hopper forward takes any head dim of q, the backward multiples of 8."""
    gpu = Gpu("cuda", 90)
    for d, expected in ((40, "hopper"), (36, "triton")):
        call = Request(Q[..., :d], Q[..., :d], Q, Spec(1.0))
        assert registry.choose(call, gpu).backend is HOPPER
        assert registry.backward_backend(call, HOPPER, gpu).name == expected


def members(protocol: Any) -> dict[str, Any]:
    return {name: x for name, x in vars(protocol).items() if inspect.isfunction(x) and not name.startswith("_")}


@pytest.mark.parametrize("backend", [*registry.BACKENDS, ThirdBackend()], ids=lambda x: x.name)
def test_backends_implement_the_protocol(backend: Any) -> None:
    assert isinstance(backend.name, str)
    assert isinstance(backend.reason, str)
    for protocol, made in ((Backend, backend), (KvBackend, backend.kv)):
        if made is None:  # it has no cache
            continue
        for name, wanted in members(protocol).items():
            parameters = list(inspect.signature(getattr(made, name)).parameters)
            assert parameters == list(inspect.signature(wanted).parameters)[1:], f"{backend.name}.{name}"


def inputs(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape or (2, 7, 3, 8), dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", ["auto", "third"])
@pytest.mark.parametrize("term", ["plain", "bias", "lse"])
def test_a_third_backend_computes_results_and_gradients(name: str, term: str, third: ThirdBackend) -> None:
    bias = torch.randn(1, 3, 7, 1, dtype=torch.float64, requires_grad=True) if term == "bias" else None
    found, expected = [], []
    for backend, results in ((name, found), ("reference", expected)):
        q, k, v = inputs()
        out, lse = tilewise.attention(q, k, v, bias=bias, scale=0.4, return_lse=True, backend=backend)
        wanted = [q, k, v] if bias is None else [q, k, v, bias]
        loss = (out * out.detach().cos()).sum() + (lse.square().sum() if term == "lse" else 0)
        results += out, lse, *torch.autograd.grad(loss, wanted)
    assert third.ran == ["forward", "backward", *["term_gradients"] * (term == "bias")]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_auto_says_why_it_took_the_third_backend_or_not(third: ThirdBackend) -> None:
    assert registry.choose(request()) == (third, "it is new")
    tilewise.attention(Q, Q, Q, causal=True)
    tilewise.attention(Q, Q[:, :, :2], Q[:, :, :2])
    assert third.ran == []
    with pytest.raises(AttentionError, match="backend='third': found grouped heads; expected backend='auto'"):
        tilewise.attention(Q, Q[:, :, :2], Q[:, :, :2], backend="third")


def test_a_backend_that_declines_on_auto_runs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    third = insert(ThirdBackend(on_auto="it is slow"), monkeypatch)
    tilewise.attention(Q, Q, Q)
    assert third.ran == []
    tilewise.attention(Q, Q, Q, backend="third")
    assert third.ran == ["forward"]


def test_a_backend_without_a_backward_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    third = insert(ThirdBackend(differentiates=False), monkeypatch)
    q, k, v = inputs()
    found = torch.autograd.grad(tilewise.attention(q, k, v, backend="third").sum(), (q, k, v))
    expected = torch.autograd.grad(tilewise.attention(q, k, v, backend="reference").sum(), (q, k, v))
    assert third.ran == ["forward"]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_no_backend_with_a_backward_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (ThirdBackend(differentiates=False),))
    q, k, v = inputs()
    out = tilewise.attention(q, k, v)
    with pytest.raises(AttentionError, match="gradient"):
        out.sum().backward()


def test_a_third_backend_in_forward_mode_and_in_a_transform(third: ThirdBackend) -> None:
    q, k, v = (x.detach() for x in inputs())
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))

    def call(backend: str) -> Any:
        return lambda *x: tilewise.attention(*x, return_lse=True, backend=backend)

    found = torch.func.jvp(call("third"), (q, k, v), tangents)
    expected = torch.func.jvp(call("reference"), (q, k, v), tangents)
    assert third.ran == ["forward", "jvp"]
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert_close(a, b)
    stacked = torch.vmap(lambda x: tilewise.attention(x, k, v, backend="third"))(torch.stack([q, q + 1]))
    assert_close(stacked[1], tilewise.attention(q + 1, k, v))
    gradient = torch.func.grad(lambda x: tilewise.attention(x, k, v, backend="third").sum())(q)
    assert_close(gradient, torch.func.grad(lambda x: tilewise.attention(x, k, v, backend="reference").sum())(q))


def test_a_third_backend_is_traced_and_compiled_as_the_op(third: ThirdBackend) -> None:
    q, k, v = inputs()
    compiled = torch.compile(
        lambda *x: tilewise.attention(*x, scale=0.4, backend="third"), backend="aot_eager", fullgraph=True
    )
    found = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(tilewise.attention(q, k, v, scale=0.4, backend="reference").sum(), (q, k, v))
    assert third.ran == ["forward", "backward"]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_launches_of_a_third_backend(third: ThirdBackend) -> None:
    pytest.importorskip("triton", reason="the launches of the next backend are built from kernels")
    gpu = Gpu("cuda", 90)
    assert list(registry.launches_of(request(), gpu, False)) == ["third forward"]
    assert list(registry.launches_of(request(), gpu, True)) == ["third forward", "third backward"]
    third.differentiates = False
    names = list(registry.launches_of(request(), gpu, True))
    assert names[0] == "third forward"
    assert "hopper backward" in names


def caches() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 3, 8), torch.randn(2, 16, 3, 8), torch.randn(2, 16, 3, 8)
    return q, k, v, torch.tensor([5, 5], dtype=torch.int32)


@pytest.mark.parametrize("name", ["auto", "third"])
def test_a_third_backend_with_a_kv_cache(name: str, third: ThirdBackend) -> None:
    q, k, v, lengths = caches()
    k_new, v_new = torch.randn(2, 2, 2, 3, 8).unbind()
    options = {"k_new": k_new[:, :1], "v_new": v_new[:, :1]}
    theirs = k.clone(), v.clone()
    expected = tilewise.attention_kv(q, *theirs, lengths, backend="reference", return_lse=True, **options)
    found = tilewise.attention_kv(q, k, v, lengths, backend=name, return_lse=True, **options)
    for a, b in zip((*found, k, v), (*expected, *theirs), strict=True):
        assert_close(a, b)
    plan = tilewise.plan_kv(q, k, v, lengths, backend=name)
    assert (plan.schedule.numel(), plan.workspace.numel()) == (2, 3)
    out = torch.empty_like(q)
    assert tilewise.attention_kv(q, k, v, lengths, backend=name, plan=plan, out=out) is out
    assert_close(out, tilewise.attention_kv(q, k, v, lengths, backend="reference"))
    assert tilewise.append_kv(k_new, v_new, k, v, lengths, backend=name) is None
    assert torch.equal(k[:, 5:7], k_new)
    assert third.ran == ["attend", "schedule", "attend", "append"]


def test_a_backend_without_a_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    third = insert(ThirdBackend(with_cache=False), monkeypatch)
    q, k, v, lengths = caches()
    assert tilewise.attention_kv(q, k, v, lengths).shape == q.shape
    call = KvRequest(Request(q, k, v, Spec(1.0)), CachePlaces(lengths))
    assert registry.choose(call).backend.name == "reference"
    for function in (tilewise.attention_kv, tilewise.plan_kv):
        with pytest.raises(AttentionError, match="backend='third': found a KV cache"):
            function(q, k, v, lengths, backend="third")
    with pytest.raises(AttentionError, match="backend='third': found a KV cache"):
        tilewise.append_kv(k[:, :1], v[:, :1], k, v, lengths, backend="third")
    assert third.ran == []


def test_calls_of_a_third_backend_have_plans(third: ThirdBackend, kept: PlanCache) -> None:
    """On a GPU: equal calls share one runner of the forward and one of the backward."""
    for _ in range(3):
        q, k, v = inputs()
        tilewise.attention(q, k, v, backend="third").sum().backward()
    assert third.made == ["forward", "backward"]
    assert third.ran == ["forward", "backward"] * 3


@pytest.mark.parametrize("gpu", [Gpu("cuda", 90), Gpu("cuda", 80), Gpu("hip", "gfx942")], ids=str)
def test_who_serves_a_cache(gpu: Gpu) -> None:
    q, cache, lengths = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 2, 16), torch.tensor([5, 20]).int()

    def chosen(q: torch.Tensor, **more: Any) -> str:
        x = cache.to(q.dtype)
        return registry.choose(checks.attend_request(q, x, x, lengths, CACHE.completed(more)), gpu).backend.name

    assert chosen(q) == chosen(q, backend="triton") == "triton"
    hopper = "hopper" if gpu == Gpu("cuda", 90) else "triton"
    cache = torch.zeros(2, 512, 2, 64)
    many = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16)
    assert chosen(many) == hopper
    assert chosen(many[:, :30]) == "triton"
    packed = {"cu_seqlens_q": torch.tensor([0, 299, 300]).int()}
    assert chosen(many[0], **packed, max_seqlen_q=299) == hopper  # and the portable kernels for the other one
    assert chosen(many[0], **packed, max_seqlen_q=30) == "triton"
    # a table of tokens, which the kernels read for MLA alone
    assert chosen(many, token_table=torch.zeros(2, 32, dtype=torch.int32), causal=False) == "reference"
