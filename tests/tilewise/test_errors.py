"""Every request that cannot be met is refused before anything runs, in words: what was asked, found, and would work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.backends.reference import ReferenceBackend
from tilewise.backends.registry import choose
from tilewise.backends.triton import support as limits
from tilewise.errors import AttentionError
from tilewise.request import Request


class Refusal(NamedTuple):
    """A call, as changes to one that works, and the three parts of the message that it must get."""

    changes: dict[str, Any]
    what: str
    found: str
    expected: str


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def cu(*ends: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=dtype, device=device)


DENSE = {
    "rank of q": Refusal({"q": x(5, 4, 8)}, "shape of q", "(5, 4, 8)", "4 axes (batch, tokens, heads, dim)"),
    "rank of k": Refusal({"k": x(2, 5, 4, 8, 1)}, "shape of k", "(2, 5, 4, 8, 1)", "4 axes"),
    "rank of v": Refusal({"v": x(8)}, "shape of v", "(8,)", "4 axes"),
    "batch": Refusal({"k": x(3, 7, 2, 8), "v": x(3, 7, 2, 8)}, "batch of k", "3", "q's 2"),
    "tokens of v": Refusal({"v": x(2, 6, 2, 8)}, "shape of v", "(2, 6, 2, 8)", "(2, 7, 2, 8)"),
    "heads of v": Refusal({"v": x(2, 7, 4, 8)}, "shape of v", "(2, 7, 4, 8)", "(2, 7, 2, 8)"),
    "group": Refusal({"k": x(2, 7, 3, 8), "v": x(2, 7, 3, 8)}, "heads of q", "4", "a multiple of k's 3"),
    "no kv heads": Refusal({"k": x(2, 7, 0, 8), "v": x(2, 7, 0, 8)}, "heads of q", "4", "a multiple of k's 0"),
    "head dim of k": Refusal({"k": x(2, 7, 2, 9)}, "head dim of k", "9", "q's 8"),
    "head dim 0": Refusal({"q": x(2, 5, 4, 0)}, "head dim of q", "0", "1 to 512"),
    "head dim 513": Refusal({"v": x(2, 7, 2, 513)}, "head dim of v", "513", "1 to 512"),
    "integers": Refusal({"q": x(2, 5, 4, 8, dtype=torch.int64)}, "dtype of q", "torch.int64", "torch.bfloat16"),
    "float8": Refusal({"v": x(2, 7, 2, 8).to(torch.float8_e4m3fn)}, "dtype of v", "float8_e4m3fn", "torch.float32"),
    "mixed dtypes": Refusal({"k": x(2, 7, 2, 8, dtype=torch.float16)}, "dtype of k", "float16", "q's torch.float32"),
    "devices": Refusal({"v": x(2, 7, 2, 8, device="meta")}, "device of v", "meta", "q's cpu"),
    "window word": Refusal({"window": 5}, "window", "5", "(left, right)"),
    "window of three": Refusal({"window": (1, 2, 3)}, "window", "(1, 2, 3)", "(left, right)"),
    "negative left": Refusal({"window": (-3, 0)}, "window left", "-3", "an int >= 0, or None for unbounded"),
    "negative right": Refusal({"window": (4, -2)}, "window right", "-2", "an int >= 0"),
    "reversed": Refusal({"window": (-4, -8)}, "window left", "-4", "an int >= 0"),
    "flash-attn's -1": Refusal({"window": (128, -1)}, "window right", "-1 (flash-attn", "None for unbounded"),
    "fractional window": Refusal({"window": (1.5, 0)}, "window left", "1.5", "an int >= 0"),
    "boolean window": Refusal({"window": (True, 0)}, "window left", "True", "an int >= 0"),
    "scale": Refusal({"scale": float("nan")}, "scale", "nan", "a finite number"),
    "unknown backend": Refusal(
        {"backend": "cuda"}, "backend", "'cuda'", "'auto' or 'reference' or 'triton' or 'hopper'"
    ),
    "no GPU for triton": Refusal(
        {"backend": "triton"}, "backend='triton'", "the tensors are on the cpu", "'reference'"
    ),
    "no GPU for hopper": Refusal({"backend": "hopper"}, "backend='hopper'", "", "'reference'"),
}

VARLEN = {
    "rank": Refusal({"q": x(1, 9, 4, 8)}, "shape of q", "(1, 9, 4, 8)", "3 axes (tokens, heads, dim)"),
    "cu dtype": Refusal({"cu_seqlens_q": cu(0, 9, dtype=torch.int16)}, "dtype of cu_seqlens_q", "int16", "torch.int32"),
    "cu shape": Refusal({"cu_seqlens_k": cu(0, 9)[None]}, "shape of cu_seqlens_k", "(1, 2)", "(B + 1,)"),
    "cu scalar": Refusal({"cu_seqlens_q": cu()}, "shape of cu_seqlens_q", "(0,)", "(B + 1,), starting with 0"),
    "cu device": Refusal({"cu_seqlens_q": cu(0, 9, device="meta")}, "device of cu_seqlens_q", "meta", "q's cpu"),
    "cu lengths": Refusal({"cu_seqlens_k": cu(0, 4, 9)}, "length of cu_seqlens_k", "3", "cu_seqlens_q's 2"),
    "tokens, but no sequence": Refusal(
        {"cu_seqlens_q": cu(0), "cu_seqlens_k": cu(0)}, "sequences of cu_seqlens_q", "9 tokens", "at least one sequence"
    ),
}


def call_dense(**changes: Any) -> Any:
    args: dict[str, Any] = {"q": x(2, 5, 4, 8), "k": x(2, 7, 2, 8), "v": x(2, 7, 2, 8)}
    return tilewise.attention(**args | changes)


def call_varlen(**changes: Any) -> Any:
    args: dict[str, Any] = {name: x(9, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return tilewise.attention_varlen(**args | {"cu_seqlens_q": cu(0, 9), "cu_seqlens_k": cu(0, 9)} | changes)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaching a backend is a failure of the test."""

    monkeypatch.setattr(ReferenceBackend, "forward_runner", lambda *_: pytest.fail("a backend was asked to run"))


def check(call: Callable[..., Any], refusal: Refusal) -> None:
    with pytest.raises(AttentionError) as raised:
        call(**refusal.changes)
    assert isinstance(raised.value, ValueError)
    parts = re.fullmatch(r"(.*): found (.*); expected (.*)", str(raised.value), re.DOTALL)
    assert parts, raised.value
    for part, words in zip(parts.groups(), refusal[1:], strict=True):
        assert words in part


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, nothing_runs: None) -> None:
    check(call_dense, DENSE[name])


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(name: str, nothing_runs: None) -> None:
    check(call_varlen, VARLEN[name])


OUT, LSE = torch.zeros(1, 3, 2, 8), torch.zeros(1, 2, 3)
SEEN = tilewise.mods.block_diagonal(3)
SHAPE = (2, 1, 4, 8), (2, 16, 2, 8), None
ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "merge of ints": (lambda: tilewise.merge((OUT, LSE.long())), "dtypes of part 0"),
    "merge of two devices": (lambda: tilewise.merge((OUT, LSE), (OUT.to("meta"), LSE.to("meta"))), "devices of part 1"),
    "sizes below 0": (lambda: tilewise.dropout_mask(-1, 1, 2, 2, p=0.5, seed=1), "sizes of a dropout mask"),
    "sizes of strings": (lambda: tilewise.block_mask(SEEN, 4, "a"), "sizes of a block mask"),  # type: ignore[arg-type]
    "a list of offsets": (lambda: tilewise.block_mask_varlen(SEEN, [0, 4], [0, 4]), "cu_seqlens_q: found list"),  # type: ignore[arg-type]
    "a list of documents": (lambda: tilewise.mods.document(ids=[1, 2]), "ids of documents: found list"),  # type: ignore[arg-type]
    "explain, backward": (lambda: tilewise.explain((1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), backward="x"), "backward"),
    "explain_kv, lengths": (lambda: tilewise.explain_kv(*SHAPE, "a", device="H200"), "lengths: found 'a'"),
    "explain_kv, shapes": (
        lambda: tilewise.explain_kv("a", *SHAPE[1:], 3, device="H200"),
        "q: found 'a'",
    ),
    "warmup for a number": (lambda: tilewise.warmup(64, gpu=3), "gpu: found '3'"),
    "warmup for a fossil": (lambda: tilewise.warmup(64, gpu="sm_1"), "no kernels for sm_1"),
    "warmup from nothing": (lambda: tilewise.warmup(config="no.json", gpu="sm_90"), "config: found no.json"),
    "heads of a plan": (lambda: tilewise.distributed.plan(4, seqlen=10, heads="a"), "heads of a plan: found 'a'"),
    "causal?": (lambda: tilewise.distributed.plan(4, seqlen=10, causal="a"), "causal: found 'a'"),
    "which machine": (lambda: tilewise.distributed.plan(4, seqlen=10).simulate(3), "machine: found 3"),
    "a shard of what": (
        lambda: tilewise.distributed.plan(4, seqlen=10).shard(3, rank=0),
        "a tensor to shard: found int",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_functions(name: str) -> None:
    call, words = ELSEWHERE[name]
    with pytest.raises(AttentionError, match=words):
        call()


def test_the_unchanged_calls_work() -> None:
    assert call_dense().shape == (2, 5, 4, 8)
    assert call_varlen().shape == (9, 4, 8)


def test_triton_takes_no_float64(triton_runs: None) -> None:
    double = {
        name: call.double() for name, call in {"q": x(2, 5, 4, 8), "k": x(2, 7, 2, 8), "v": x(2, 7, 2, 8)}.items()
    }
    refusal = Refusal(double | {"backend": "triton"}, "backend='triton'", "float64", "'reference'")
    check(call_dense, refusal)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "has_triton", lambda: False)
    check(call_dense, Refusal({"backend": "triton"}, "backend='triton'", "no triton installed", "'reference'"))


def test_auto_never_runs_the_interpreter(triton_runs: None) -> None:
    q = x(1, 2, 1, 8)
    chosen = choose(Request(q, q, q, tilewise.request.Spec(scale=1.0)))
    assert chosen.backend.name == "reference"
    assert "interpreter" in chosen.reason
