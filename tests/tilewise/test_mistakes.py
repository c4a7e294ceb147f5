"""Likely mistakes of a new user: each error says in one sentence what was found and what to write instead."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import tilewise
from tests.forks import python
from tilewise import AttentionError, attention, attention_varlen

Q = torch.randn(1, 8, 2, 16)
PACKED = torch.randn(10, 2, 16)
CU = torch.tensor([0, 3, 10], dtype=torch.int32)
BLOCKS = tilewise.block_mask(tilewise.mods.block_diagonal(16), 32, 32, block=(16, 16))


REQUIRED = {
    "attention": ("q", "k", "v"),
    "attention_varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "weights": ("q", "k", "v"),
    "check": ("q", "k", "v"),
    "explain": ("q", "k", "v"),
    "attention_kv": ("q", "k_cache", "v_cache", "lengths"),
    "plan_kv": ("q", "k_cache", "v_cache", "lengths"),
    "check_kv": ("q", "k_cache", "v_cache", "lengths"),
    "explain_kv": ("q", "k_cache", "v_cache", "lengths"),
    "append_kv": ("k_new", "v_new", "k_cache", "v_cache", "lengths"),
    "attention_mla": ("q", "cache"),
}


def test_these_are_all_functions_of_q_and_more_tensors() -> None:
    functions = {name: getattr(tilewise, name) for name in tilewise.__all__}
    found = {
        name for name, x in functions.items() if inspect.isfunction(x) and "backend" in inspect.signature(x).parameters
    }
    assert found - {"warmup"} <= set(REQUIRED)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_tensors_are_named(name: str) -> None:
    """Whatever was given before them; help() shows that they have no default."""
    function, names = getattr(tilewise, name), REQUIRED[name]
    own = [x for x in inspect.signature(function).parameters.values() if x.default is inspect.Parameter.empty]
    assert tuple(x.name for x in own if x.kind is x.POSITIONAL_OR_KEYWORD) == names
    is_cache = name == "attention_mla"
    tokens = PACKED if name == "attention_varlen" else torch.randn(1, 8, 1, 576) if is_cache else Q
    given = [CU if x.startswith("cu") else tokens for x in names]
    for n in range(len(names)):
        with pytest.raises(AttentionError, match=f"({'|'.join(names[n:])}): found nothing; expected "):
            function(*given[:n])


def test_of_lengths_the_hint_makes_offsets():
    lengths = torch.tensor([3, 7])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    assert cu.tolist() == CU.tolist()
    expected = attention_varlen(PACKED, PACKED, PACKED, CU, CU, causal=True)
    assert cu.dtype == torch.int64
    assert torch.equal(attention_varlen(PACKED, PACKED, PACKED, cu, cu, causal=True), expected)
    tilewise.check(PACKED, PACKED, PACKED, cu, cu, causal=True)
    far = torch.tensor([0, 2**32 + 10])
    with pytest.raises(AttentionError, match="end of cu_seqlens_q: found 2147483647; expected at most the 10"):
        attention_varlen(PACKED, PACKED, PACKED, far, far)


def test_values_of_a_mod_are_seen_by_calling_it():
    mod = tilewise.score_mod(lambda score, b, h, q_idx, kv_idx: score + q_idx)()
    assert mod(torch.tensor(2.0), 0, 0, 3, 0) == 5


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attn_func", "tilewise.compat.flash_attn"),
        ("flex_attention", "tilewise.compat"),
        ("create_block_mask", "tilewise.compat"),
        ("memory_efficient_attention", "tilewise.compat.xformers"),
    ],
)
def test_functions_of_other_libraries_are_pointed_to(name, module):
    line = f"from {module} import {name}"
    with pytest.raises(AttributeError, match=line):
        getattr(tilewise, name)
    assert not hasattr(tilewise, name)
    with pytest.raises(ImportError, match=line):
        exec(f"from tilewise import {name}")
    exec(line)


def test_dir_lists_the_public_names():
    code = "import tilewise; print(*dir(tilewise)); assert all(hasattr(tilewise, name) for name in dir(tilewise))"
    found = python("-c", code).stdout.split()
    assert found == sorted(tilewise.__all__)
    assert {"distributed", "compat", "replaces_sdpa", "weights"} <= set(found)


def test_signatures_are_those_of_the_call():
    shown = inspect.signature(attention).parameters
    assert list(shown)[:5] == ["q", "k", "v", "layout", "causal"]
    assert shown["q"].default is inspect.Parameter.empty
    assert {"q", "cu_seqlens_q", "device", "causal", "show"} <= set(inspect.signature(tilewise.explain).parameters)
    assert {"k_cache", "lengths", "device"} <= set(inspect.signature(tilewise.explain_kv).parameters)


def test_an_explanation_is_short_unless_it_is_printed():
    found = tilewise.explain(Q, Q, Q, device="H200", show=False)
    assert repr(found).startswith("<Explanation: q (1, 8, 2, 16)")
    assert len(repr(found)) < 200 < len(str(found))
    assert found._repr_html_().count("<tr>") == len(str(found).splitlines())
    cached = tilewise.explain_kv((2, 1, 2, 16), (2, 64, 2, 16), None, [9, 8], device="H200", show=False)
    assert repr(cached).startswith("<KvExplanation: 2 sequences, 2 queries on 17 keys")
    assert cached._repr_html_().count("<tr>") == len(str(cached).splitlines())


def test_a_prediction_for_a_cpu_says_what_it_is_worth():
    here, there = (tilewise.explain(Q, Q, Q, device=device, show=False) for device in ("cpu", "H200"))
    assert "us or more: the overhead of torch's operations" in str(here)
    assert "us or more;" in repr(here)
    assert "or more" not in str(there) + repr(there)


def test_a_call_that_looks_swapped_warns_once_and_check_raises():
    q = torch.randn(1, 4, 16, 8)
    said = r"q \(1, 4, 16, 8\) with more heads, 16, than tokens, 4; expected layout='bhsd'"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            attention(q, q, q)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=said):
        attention(q, q, q)
    with pytest.raises(AttentionError, match=said):
        tilewise.check(q, q, q)


def test_a_named_layout_is_believed():
    q, long = torch.randn(1, 4, 16, 8), torch.randn(1, 64, 16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in ("bshd", "bhsd"):
            attention(q, q, q, layout=layout)
            tilewise.check(q, q, q, layout=layout)
        attention(q, long, long)  # some new tokens and many keys
        attention(q[:, :1], q[:, :1], q[:, :1])
        tilewise.check(q, long, long)


def test_plain_functions_are_mods():
    table = torch.randn(8, 8, requires_grad=True)

    def shifted(score, b, h, q_idx, kv_idx):
        return score + table[q_idx, kv_idx]

    def seen(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    out = attention(Q, Q, Q, score_mod=shifted, mask_mod=seen)
    assert torch.equal(out, attention(Q, Q, Q, score_mod=tilewise.score_mod(shifted)(), mask_mod=seen))
    assert torch.allclose(out, attention(Q, Q, Q, bias=table, causal=True), atol=1e-6)
    (grad,) = torch.autograd.grad(out.sum(), table)
    assert grad.abs().sum() > 0
    tilewise.check(Q, Q, Q, mask_mod=seen)
    assert tilewise.explain(Q, Q, Q, mask_mod=seen, show=False).call.terms is not None
    packed = attention_varlen(PACKED, PACKED, PACKED, CU, CU, mask_mod=seen)
    assert torch.allclose(packed, attention_varlen(PACKED, PACKED, PACKED, CU, CU, causal=True), atol=1e-6)
    assert torch.equal(attention(Q, Q, Q, mask_mod=tilewise.mask_mod(seen)), attention(Q, Q, Q, mask_mod=seen))
    blocks = tilewise.block_mask(seen, 8, 8, block=(16, 16))
    assert torch.allclose(attention(Q, Q, Q, mask_mod=blocks), attention(Q, Q, Q, causal=True), atol=1e-6)


def test_a_plain_function_is_known_by_what_it_reads():
    """The same function object with another number or tensor in its closure is another mod."""
    reach, mask = 1, torch.ones(8, 8).tril().bool()

    def near(b, h, q_idx, kv_idx):
        return mask[q_idx, kv_idx] & (q_idx - kv_idx <= reach)

    first = attention(Q, Q, Q, mask_mod=near)
    assert torch.allclose(first, attention(Q, Q, Q, window=(1, 0)), atol=1e-6)
    reach = 3
    assert torch.allclose(attention(Q, Q, Q, mask_mod=near), attention(Q, Q, Q, window=(3, 0)), atol=1e-6)
    mask = torch.ones(8, 8).bool()
    expected = attention(Q, Q, Q, window=(3, None))
    assert torch.allclose(attention(Q, Q, Q, mask_mod=near), expected, atol=1e-6)


def test_mods_are_compared_by_their_tensors_and_numbers():
    @tilewise.score_mod
    def relative(score, b, h, q_idx, kv_idx, slopes, x):
        return score + slopes[h] * x

    a, b = torch.ones(2), torch.ones(2)
    assert relative(a, 1.0) == relative(a, 1.0)
    assert (relative(a, 1.0) != relative(a, 1.0)) is False
    assert hash(relative(a, 1.0)) == hash(relative(a, 1.0))
    assert relative(a, 1.0) != relative(b, 1.0)
    assert relative(a, 0.0) != relative(a, -0.0)
    assert relative(a, 1.0) != 3
