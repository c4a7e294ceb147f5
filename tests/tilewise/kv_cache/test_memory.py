"""What calls write has memory of its own; what they read on a CPU is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import AttentionError, append_kv, attention_kv, attention_mla, check_kv, plan_kv
from tilewise.validation.memory import overlaps_itself, share_memory

I32 = torch.int32
LENGTHS = torch.tensor([2], dtype=I32)
NEW = torch.randn(1, 1, 2, 8)
Q = torch.randn(1, 1, 4, 8)


def places_of(x: Tensor) -> set[int]:
    """The addresses of a tensor's elements, one after another."""
    steps = [[i * s for i in range(n)] for n, s in zip(x.shape, x.stride(), strict=True)]
    return {x.storage_offset() + sum(index) for index in product(*steps)}


def test_overlap_is_exact() -> None:
    """Against all elements of random views of one tensor."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, n: int) -> list[int]:
        return torch.randint(low, high, (n,), generator=generator).tolist()

    memory, found = torch.zeros(200), {(a, b): 0 for a in (False, True) for b in (False, True)}
    for _ in range(400):
        views = []
        for _ in range(2):
            views.append(memory.as_strided(draw(1, 4, 3), draw(0, 12, 3), *draw(0, 100, 1)))
        a, b = views
        own, shared = len(places_of(a)) < a.numel(), bool(places_of(a) & places_of(b))
        assert overlaps_itself(a) == own, (a.shape, a.stride())
        assert share_memory(a, b) == shared, (a.shape, a.stride(), b.shape, b.stride())
        found[own, shared] += 1
    assert min(found.values()) > 20


def test_elements_of_different_sizes() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    scales, numbers = memory.view(4, 16)[:, 12:].view(torch.float32), memory.view(4, 16)
    assert not share_memory(numbers[:, :12], scales)
    assert share_memory(numbers[:, :13], scales)
    assert share_memory(scales, numbers[:, 15:])


def quantised() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 8, 2, 8, dtype=torch.int8), torch.zeros(1, 8, 2, 8, dtype=torch.int8), torch.ones(2, 1, 8, 2)


def of_scales(k_scale: Tensor, v_scale: Tensor) -> None:
    k, v, _ = quantised()
    append_kv(NEW, NEW, k, v, LENGTHS, k_scale=k_scale, v_scale=v_scale)


def of_caches(k: Tensor, v: Tensor) -> None:
    append_kv(NEW, 2 * NEW, k, v, LENGTHS)


def of_new_tokens(k: Tensor, v: Tensor) -> None:
    attention_kv(Q, k, v, LENGTHS, k_new=NEW, v_new=2 * NEW)


def of_out(k: Tensor, v: Tensor) -> None:
    """The first row of out is a row of the cache."""
    attention_kv(Q, k, torch.zeros_like(v), LENGTHS, k_new=NEW, v_new=NEW, out=v.as_strided(Q.shape, Q.stride()))


def of_new_out(k: Tensor, v: Tensor) -> None:
    out = v.as_strided((2, 1, 4, 8), (24, 8, 8, 1))
    attention_kv(torch.cat([Q, Q]), *torch.zeros(2, 2, 8, 2, 8).unbind(), LENGTHS.repeat(2), out=out)


def of_mla_out(k: Tensor, v: Tensor) -> None:
    out = k.as_strided((1, 2, 3, 512), (0, 16, 16, 1))
    attention_mla(torch.randn(1, 2, 3, 576), torch.randn(1, 4, 1, 576), LENGTHS, out=out)


WIDE, CACHE, SCALE = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 8), quantised()[2][0]
MEMORY = torch.zeros(8192)
SHARED: dict[str, tuple[Callable[[Tensor, Tensor], None], Tensor, Tensor, str]] = {
    "one scale": (of_scales, SCALE, SCALE, "k_scale and v_scale: found in the same memory"),
    "one cache": (of_caches, WIDE[..., :8], WIDE[..., :8], r"v_new: .* k_new\[..., 0:8\], because v_cache is a view"),
    "columns": (of_caches, WIDE[..., :8], WIDE[..., 4:12], r"v_new\[..., 0:4\]: .* k_new\[..., 4:8\], because"),
    "a token on": (of_caches, CACHE[:, :4], CACHE[:, 1:5], "k_cache and v_cache: found in the same memory"),
    "attention": (of_new_tokens, WIDE[..., :8], WIDE[..., :8], r"v_new: .* because v_cache is a view"),
    "a row of the cache": (of_out, WIDE[..., :8], WIDE[..., :8], "k_cache and out: found in the same memory"),
    "rows of out": (of_new_out, MEMORY, MEMORY, "strides of out, which is written"),
    "rows of MLA": (of_mla_out, MEMORY, MEMORY, "strides of out, which is written"),
}


@pytest.mark.parametrize("case", SHARED)
def test_memory_that_two_share(case: str) -> None:
    """Every tensor that a call writes, and no number is lost."""
    call, a, b, match = SHARED[case]
    before = a.clone(), b.clone()
    with pytest.raises(AttentionError, match=match):
        call(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_memory_that_two_may_share(backend: str) -> None:
    """Keys and values that alternate in one allocation; one tensor of both with equal new tokens; scales in the bytes
    behind the numbers."""
    pool = torch.zeros(3, 2, 8, 2, 8)
    append_kv(NEW, 2 * NEW, pool[:, 0], pool[:, 1], LENGTHS, backend=backend)
    assert torch.equal(pool[0, 1, 2], 2 * NEW[0, 0])
    both = torch.zeros(1, 8, 2, 8)
    append_kv(NEW, NEW, both, both, LENGTHS, backend=backend)
    joint = torch.zeros(1, 8, 2, 12, dtype=torch.int8)
    scales = joint[..., 8:].view(torch.float32)[..., 0]
    append_kv(NEW, 2 * NEW, joint[..., :8], torch.zeros(1, 8, 2, 8), LENGTHS, k_scale=scales, backend=backend)
    assert torch.allclose(joint[0, 2, :, :8] * scales[0, 2, :, None], NEW[0, 0], atol=0.02)


WRITERS = {"k_cache", "v_cache", "out", "cache"}


def test_every_public_function_that_writes_is_here() -> None:
    """By the names of parameters. `plan_kv` and `check_kv` read shapes and contents."""
    functions = {
        name: getattr(tilewise, name) for name in tilewise.__all__ if inspect.isfunction(getattr(tilewise, name))
    }
    writers = {name for name, f in functions.items() if WRITERS & {*inspect.signature(f).parameters}}
    assert writers == {"attention_kv", "append_kv", "attention_mla", "plan_kv", "check_kv", "explain_kv"}


POOL = torch.randn(2, 4, 4, 2, 8).unbind()  # 4 pages of 4 tokens
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=I32)


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=I32)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "past the capacity": ({"lengths": lengths(3, 9)}, "tokens of sequence 1: found 9; expected at most 8"),
    "negative": ({"lengths": lengths(-1, 3)}, r"lengths\[0\]: found -1; expected 0 or more"),
    "full": ({"lengths": lengths(3, 8), "new": 1}, "sequence 1: found 8 in the cache and 1 new; expected at most 8"),
    "no page": (
        {"lengths": lengths(3, 5), "table": [[1, 9], [3, 7]]},
        "page 1 of sequence 1: found 7",
    ),
    "negative page": ({"lengths": lengths(3, 5), "table": [[-1, 9], [3, 1]]}, "page 0 of sequence 0: found -1"),
}


@pytest.mark.parametrize("function", ["attention_kv", "append_kv", "plan_kv", "check_kv", "compiled", "attention_mla"])
@pytest.mark.parametrize("case", WRONG)
def test_contents_on_a_cpu(case: str, function: str) -> None:
    """The same words from every function; nothing was written."""
    given, match = WRONG[case]
    table = torch.tensor(given["table"], dtype=I32) if "table" in given else TABLE
    n, new = given["lengths"], torch.randn(2, given.get("new", 0), 2, 8)
    k, v = (x.clone() for x in POOL)
    options: dict[str, Any] = {"page_table": table}
    if function == "append_kv":
        more = new if new.numel() else torch.randn(2, 1, 2, 8)
        if case in ("past the capacity", "no page", "negative page"):
            n = n - 1  # the new token is the last
            match = match.replace("found 9", "found 8 in the cache and 1 new")
        if case == "negative page":
            n = lengths(0, 3)
        with pytest.raises(AttentionError, match=match):
            append_kv(more, more, k, v, n, **options)
    elif function == "attention_mla":
        if given.get("new"):
            pytest.skip("it writes nothing")
        with pytest.raises(AttentionError, match=match):
            attention_mla(torch.randn(2, 1, 3, 576), torch.randn(4, 4, 1, 576), n, **options)
    else:
        if new.numel():
            options |= {"k_new": new, "v_new": new}
        call: Any = {"attention_kv": attention_kv, "plan_kv": plan_kv, "check_kv": check_kv}.get(function)
        if call is None:
            call = torch.compile(attention_kv, backend="eager", fullgraph=True)
        with pytest.raises(AttentionError, match=match):
            call(torch.randn(2, 1, 4, 8), k, v, n, **options)
    assert torch.equal(k, POOL[0])
    assert torch.equal(v, POOL[1])


def test_contents_that_are_not_read() -> None:
    """Pages past the last token, and before a window."""
    table = torch.tensor([[99, 2, 1], [3, -5, 77]], dtype=I32)
    attention_kv(torch.randn(2, 1, 4, 8), *POOL, lengths(11, 3), page_table=table, window=(2, 0))
    with pytest.raises(AttentionError, match="page 0 of sequence 0: found 99"):
        attention_kv(torch.randn(2, 1, 4, 8), *POOL, lengths(11, 3), page_table=table)


@pytest.mark.usefixtures("triton_runs")
def test_kernels_clamp_unless_they_are_asked_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 1, 4, 8)
    attention_kv(q, *POOL, lengths(3, 9), page_table=TABLE, backend="triton")
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(AttentionError, match="tokens of sequence 1: found 9"):
        attention_kv(q, *POOL, lengths(3, 9), page_table=TABLE, backend="triton")
