"""Which backend runs a call; what is remembered of calls, and what is not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import AttentionError, api, dispatch, torch_private
from tilewise.dispatch import memory
from tilewise.kernels.gpu import Gpu
from tilewise.spec import Request, Spec, arguments

Q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [
        (Gpu("cuda", 75), "reference"), (Gpu("cuda", 80), "triton"), (Gpu("cuda", 90), "hopper"),
        (Gpu("cuda", 100), "triton"), (Gpu("cuda", 120), "triton"), (Gpu("hip", "gfx942"), "triton"),
        (Gpu("hip", "gfx90a"), "reference"), (None, "reference"),
    ],
)  # fmt: skip
def test_auto(gpu: Gpu | None, backend: str) -> None:
    chosen = dispatch.choose(Request(Q, Q, Q, Spec(1.0)), gpu)
    assert chosen.backend.name == backend
    if backend != "hopper":
        assert "hopper: " in chosen.reason or "triton: " in chosen.reason


def test_a_named_backend_runs_or_raises() -> None:
    for name in dispatch.NAMES[2:]:
        with pytest.raises(AttentionError, match=f"backend='{name}'"):
            dispatch.choose(Request(Q, Q, Q, Spec(1.0, backend=name)), Gpu("cuda", 75))
    with pytest.raises(AttentionError, match="'auto' or 'reference' or 'triton' or 'hopper'"):
        tilewise.attention(Q, Q, Q, backend="cudnn")


def test_a_third_backend_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the functions, a row in the table: `auto`, errors and calls know it."""
    ran = []

    def forward(request: Request, recordings: Any) -> Any:
        ran.append(request)
        return request.q.clone(), request.q.new_zeros(1, 4, 128, dtype=torch.float32)

    row = dispatch.Backend("third", "no.module", lambda r, g: None, lambda r, g: None, "it is new")
    monkeypatch.setattr(dispatch, "BACKENDS", (row, *dispatch.BACKENDS))
    monkeypatch.setattr(dispatch, "named", lambda name: SimpleNamespace(forward=forward))
    out = tilewise.attention(Q, Q, Q, causal=True)
    assert torch.equal(out, Q)
    assert [request.spec.after for request in ran] == [0]
    assert dispatch.choose(Request(Q, Q, Q, Spec(1.0))) == (row, "it is new")


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """CPU tensors are taken for a GPU's, and a stub computes."""
    calls: dict[Any, Any] = memory.Memory()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(memory, "_calls", calls)
    monkeypatch.setattr(dispatch, "choose", lambda request: SimpleNamespace(backend=SimpleNamespace(name="stub")))
    stub = SimpleNamespace(forward=lambda r, recordings: (r.q.clone(), r.q.new_zeros(1, 4, r.q.shape[1])))
    monkeypatch.setattr(dispatch, "named", lambda name: stub)
    return calls


def test_calls_that_look_alike_are_one(remembered: dict[Any, Any]) -> None:
    def known(*tensors: torch.Tensor, **options: Any) -> int:
        tilewise.attention(*tensors, **options)
        return len({id(call) for call in remembered.values() if isinstance(call, dispatch.Call)})

    others = [Q.clone() for _ in range(3)]
    assert known(*others, causal=True) == 1
    assert known(*(x.clone() for x in others), causal=True) == 1
    assert known(*others, window=(None, 0)) == 1  # the same band in other words
    assert known(others[0], others[1], others[1], causal=True) == 2  # k is v
    assert known(*(x[:, :64] for x in others), causal=True) == 3
    assert known(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in others), causal=True) == 4
    torch.use_deterministic_algorithms(True)
    try:
        assert known(*others, causal=True) == 5
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_ran_runs_again_of_q_k_and_v(remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For a call that looks as it did, and for one that looks otherwise and asks for the same."""
    given = []

    def run(addresses: list[int]) -> list[torch.Tensor]:
        given.append(addresses)
        return [tensors[0] + 1, Q.new_zeros(1, 4, 128)]

    def forward(request: Request, recordings: Any) -> Any:
        recordings["forward"] = SimpleNamespace(run=run)
        return request.q.clone(), request.q.new_zeros(1, 4, 128)

    monkeypatch.setattr(dispatch, "named", lambda name: SimpleNamespace(forward=forward))
    tensors = [torch.randn(1, 128, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    assert torch.equal(tilewise.attention(*tensors, causal=True), tensors[0])
    for x in (tensors, leaves, leaves):
        assert torch.equal(tilewise.attention(*x, causal=True), tensors[0] + 1)
    assert given == [[x.data_ptr() for x in of] for of in (tensors, leaves, leaves)]


@pytest.mark.parametrize("first", [True, False])
def test_a_call_like_an_earlier_one_has_a_gradient_if_it_is_wanted(first: bool, remembered: dict[Any, Any]) -> None:
    """Whether it was of the earlier one or not."""
    q, k, v = (Q.clone().requires_grad_() for _ in range(3))
    for wanted in (first, not first, first):
        with torch.set_grad_enabled(wanted):
            for lse in (True, False):
                out = tilewise.attention(q, k, v, causal=True, return_lse=lse)
                assert (out[0] if lse else out).requires_grad == wanted
    assert sum(isinstance(x, dispatch.Call) for x in remembered.values()) == 1


@tilewise.score_mod
def scaled(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score * table[h] * by


@tilewise.mask_mod
def before(b, h, q_idx, kv_idx, ends):  # type: ignore[no-untyped-def]
    return kv_idx < ends[q_idx]


def _ends() -> torch.Tensor:
    return torch.full((128,), 100, dtype=torch.int32)


@pytest.mark.parametrize("wanted", ["sinks", "table", "both", "neither"])
def test_what_ran_runs_again_of_all_tensors(
    wanted: str, remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; the gradients of terms are computed beside, where they are wanted."""
    ran: list[tuple[str, list[int]]] = []
    asked: list[list[bool]] = []

    def forward(request: Request, recordings: Any) -> Any:
        results = [request.q + 1, request.q.new_zeros(1, 4, 128)]
        recordings["forward"] = SimpleNamespace(run=lambda there: ran.append(("forward", there)) or results)
        return request.q.clone(), request.q.new_zeros(1, 4, 128)

    def backward(request: Request, upstream: Any, recordings: Any) -> Any:
        grads = [torch.full_like(x, 7) for x in request[:3]]
        recordings["backward"] = SimpleNamespace(
            run=lambda there: ran.append(("backward", there)) or grads, where=lambda xs: [x.data_ptr() for x in xs]
        )
        return [torch.full_like(x, 5) for x in request[:3]]

    def term_gradients(request: Request, upstream: Any, wanted: list[bool], _recordings: Any) -> list[torch.Tensor]:
        asked.append(wanted)
        inputs = (request.bias, request.sinks, *request.score)
        return [torch.full_like(x, 3) for x, wants in zip(inputs, wanted, strict=True) if wants]

    module = SimpleNamespace(forward=forward, backward=backward, term_gradients=term_gradients)
    monkeypatch.setattr(dispatch, "named", lambda name: module)
    for turn in range(3):
        q, k, v = (torch.randn(1, 128, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        sinks = torch.rand(4, requires_grad=wanted in ("sinks", "both"))
        table = torch.rand(4, requires_grad=wanted in ("table", "both"))
        ends = _ends()
        out = tilewise.attention(q, k, v, mask_mod=before(ends), score_mod=scaled(table, 2.0), sinks=sinks, causal=True)
        out.backward(torch.ones_like(out))
        assert q.grad is not None
        assert set(q.grad.flatten().tolist()) == {5.0 if turn == 0 else 7.0}
        for x in (sinks, table):
            assert (x.grad is not None) == x.requires_grad
            assert x.grad is None or x.grad.tolist() == [3.0] * 4
        if turn:
            given = [x.data_ptr() for x in (q, k, v, sinks, table, ends)]
            (name, there), (other, behind) = ran[-2:]
            assert (name, there) == ("forward", given)
            assert other == "backward"
            assert behind[:6] == given
            assert len(behind) == 9  # and out, lse, dout
    assert asked == ([] if wanted == "neither" else [[False, wanted != "table", wanted != "sinks"]] * 3)


def test_ops_run_again_what_looks_like_the_latest(remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of two lengths with the same words: found again by torch's comparison, or by all there is to know."""
    ran: list[tuple[str, int]] = []

    def recorded(name: str, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Any:
        def run(there: list[int]) -> list[torch.Tensor]:
            assert len(there) == len(tensors)
            ran.append((name, n))
            return results

        n = tensors[0].shape[1]
        look = torch_private.alike(*tensors)
        where = lambda xs: [x.data_ptr() for x in xs] if look(*xs) else None  # noqa: E731
        return SimpleNamespace(run=run, where=where)

    def forward(r: Request, recordings: Any) -> Any:
        results = [r.q + 1, r.q.new_zeros(1, 4, r.q.shape[1])]
        recordings["forward"] = recorded("forward", [*r[:3]], results)
        ran.append(("new", r.q.shape[1]))
        return r.q.clone(), results[1]

    def backward(r: Request, upstream: Any, recordings: Any) -> Any:
        out, lse, dout, _ = upstream
        recordings["backward"] = recorded("backward", [*r[:3], out, lse, dout], [torch.ones_like(x) for x in r[:3]])
        ran.append(("new", r.q.shape[1]))
        return tuple(torch.zeros_like(x) for x in r[:3])

    monkeypatch.setattr(dispatch, "named", lambda name: SimpleNamespace(forward=forward, backward=backward))
    asked = arguments(Request(Q, Q, Q, Spec(0.5, None, 0)))[3:]
    for n in (128, 128, 64, 128, 64, 64):
        q, k, v, dout = (torch.randn(1, n, 4, 64, dtype=torch.bfloat16) for _ in range(4))
        before = len(ran)
        out, lse = torch.ops.tilewise.forward(q, k, v, *asked)
        grads = torch.ops.tilewise.backward(out, lse, dout, None, q, k, v, *asked)
        known = ("new", n) in ran[:before]
        assert ran[before:] == ([("forward", n), ("backward", n)] if known else [("new", n)] * 2)
        assert all(x.shape == q.shape for x in grads)


TERMS: dict[str, Any] = {
    "sinks": lambda: {"sinks": torch.rand(4)},
    "slopes": lambda: {"alibi_slopes": torch.rand(4)},
    "bias": lambda: {"bias": torch.rand(1, 4, 128, 128)},
    "score mod": lambda: {"score_mod": scaled(torch.rand(4), 2.0)},
    "mask mod": lambda: {"mask_mod": before(_ends())},
    "all": lambda: {
        "mask_mod": before(_ends()), "score_mod": scaled(torch.rand(4), 2.0), "alibi_slopes": torch.rand(4),
        "sinks": torch.rand(4), "bias": torch.rand(1, 1, 128, 1), "softcap": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("terms", [*TERMS, "block mask"])
def test_tensors_of_a_call_like_an_earlier_one(
    terms: str, packed: bool, remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are its own, not the earlier one's; and it is not checked again."""
    given: list[Request] = []
    dispatch.named("stub").forward = lambda r, _: given.append(r) or (r.q.clone(), r.q.new_zeros(r.q.shape[:-1]))
    q = Q[0] if packed else Q
    calls = []
    for _ in range(2):
        cu = [torch.tensor([0, 128], dtype=torch.int32) for _ in range(2)] if packed else []
        if terms != "block mask":
            options = TERMS[terms]()
        elif packed:
            options = {"mask_mod": tilewise.block_mask_varlen(before(_ends()), *cu)}
        else:
            options = {"mask_mod": tilewise.block_mask(before(_ends()), 128, 128)}
        calls.append(([q.clone() for _ in range(3)], cu, options))
    found = []
    for checked in (True, False):
        tensors, cu, options = calls.pop(0)
        if not checked:
            monkeypatch.setattr(api.checks, "request_of", None)
        longest = {"max_seqlen_q": 128, "max_seqlen_k": 128} if packed else {}
        (tilewise.attention_varlen if packed else tilewise.attention)(*tensors, *cu, **longest, **options)
        request = given[-1]
        assert all(a is b for a, b in zip((*request[:3], *cu), (*tensors, request.cu_q, request.cu_k), strict=False))
        assert request.sinks is options.get("sinks")
        assert request.bias is options.get("bias")
        mods = [options[name] for name in ("score_mod", "mask_mod") if name in options]
        mods = [getattr(mod, "mod", mod) for mod in mods]
        own = [x for mod in mods for x in mod.tensors] + [options[x] for x in ("alibi_slopes",) if x in options]
        assert {id(x) for x in own} == {id(x) for x in (*request.score, *request.mask)}
        assert len(request.blocks) == 4 * (terms == "block mask")
        found.append(request.spec)
    assert found[0] == found[1]
    assert sum(isinstance(x, dispatch.Call) for x in remembered.values()) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"score_mod": scaled(torch.ones(4), 3.0)}, {"score_mod": scaled(torch.ones(1), 2.0)},
        {"score_mod": scaled(torch.ones(8)[::2], 2.0)}, {"score_mod": scaled(torch.ones(4).double(), 2.0)},
        {"mask_mod": before(torch.ones(200, dtype=torch.int32))}, {"mask_mod": None}, {"score_mod": None},
        {"max_seqlen_q": 129, "max_seqlen_k": 129}, {"bias": torch.ones(1, 4, 1, 1)},
    ],
)  # fmt: skip
def test_calls_with_other_terms(other: dict[str, Any], remembered: dict[Any, Any]) -> None:
    """What is remembered of one serves none of them."""
    cu = torch.tensor([0, 128], dtype=torch.int32)
    options = {"score_mod": scaled(torch.ones(4), 2.0), "mask_mod": before(_ends()), "max_seqlen_q": 128,
               "max_seqlen_k": 128, "bias": torch.ones(1, 1, 1, 1)}  # fmt: skip
    for words in (options, options | other):
        tilewise.attention_varlen(Q[0], Q[0].clone(), Q[0].clone(), cu, cu.clone(), **words)
    assert sum(isinstance(x, dispatch.Call) for x in remembered.values()) == 2


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        {"causal": False}, {"causal": 1.0}, {"window": (2.0, 0)}, {"window": None}, {"softcap": 2.0}, {"scale": 1},
        {"scale": 1.0}, {"return_lse": True}, {"backend": "triton"}, {"n": 127}, {"n": 129}, {"strided": True},
        {"dtype": torch.float16}, {"odd": True}, {"shared": True}, {"parameter": True}, {"grad": True},
    ],
)  # fmt: skip
def test_other_calls(
    other: dict[str, Any], public: bool, remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a call serves no other: whether torch compares tensors for us, or its public functions."""
    if public:
        monkeypatch.setattr(torch_private, "_Guards", None)

    def look(causal: Any = True, window: Any = (2, 0), **more: Any) -> Any:
        size = 1, more.pop("n", 128), 4, 64
        dtype, grad = more.pop("dtype", torch.bfloat16), more.pop("grad", False)
        tensors = [torch.zeros(size, dtype=dtype, requires_grad=grad) for _ in range(3)]
        if more.pop("strided", False):
            tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
        if more.pop("odd", False):
            tensors[2] = torch.zeros(128 * 4 * 64 + 1, dtype=dtype)[1:].view(size)
        if more.pop("parameter", False):
            tensors[0] = torch.nn.Parameter(tensors[0], False)
        if more.pop("shared", False):
            tensors[1] = tensors[0]
        return api._look({"causal": causal, "window": window, **more}, tensors)

    memory.keep(look(), "it")
    assert memory.recall(look())[0] == "it"
    assert memory.recall(look(**other))[0] is None
    remembered.clear()
    memory.keep(look(**other), "the other")
    assert memory.recall(look())[0] is None
    assert memory.recall(look(**other))[0] == "the other"


@pytest.mark.parametrize("public", [False, True])
def test_who_is_watched_is_not_remembered(
    public: bool, remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if public:
        monkeypatch.setattr(torch_private, "_Guards", None)
    look = lambda: api._look({}, [Q, Q.clone(), Q.clone()])  # noqa: E731
    memory.keep(look(), "it")
    seen = []
    with FlopCounterMode(display=False):
        seen.append(memory.recall(look())[0])
    torch.vmap(lambda x: seen.append(memory.recall(look())[0]) or x)(torch.zeros(1))
    assert seen == [None, None]
    assert memory.recall(look())[0] == "it"


def test_a_hit_is_no_way_around_a_check(remembered: dict[Any, Any]) -> None:
    """1 equals True and 2.0 equals 2, but only in Python."""
    tilewise.attention(Q, Q, Q, causal=True, window=(2, 0))
    for causal, window in ((1, (2, 0)), (True, (2.0, 0)), (True, [2.0, 0])):
        with pytest.raises(AttentionError):
            tilewise.attention(Q, Q, Q, causal=causal, window=window)


def test_no_memory_of_what_changes(remembered: dict[Any, Any]) -> None:
    def is_kept(**options: Any) -> bool:
        remembered.clear()
        tilewise.attention(Q, Q, Q, **options)
        return any(isinstance(found, list) for found in remembered.values())

    assert is_kept(softcap=2.0)
    assert is_kept(sinks=torch.zeros(4))
    assert not is_kept(dropout_p=0.5)
    assert not is_kept(dropout_p=0.5, seed=torch.tensor([3]))
    for more in ({}, {"sinks": torch.zeros(4)}):
        assert is_kept(bias=torch.zeros(1, 1, 1, 1), **more)
        assert not is_kept(bias=torch.zeros(1, 1), **more)  # a view of it was made


def test_the_memory_is_bounded_and_threads_share_it(
    remembered: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LIMIT", 8)
    failures = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 40):
                x = torch.zeros(1, n, 4, 64, dtype=torch.bfloat16)
                assert tilewise.attention(x, x, x).shape == x.shape
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1 + 7 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(remembered) <= 8 + 2 * len(threads)
