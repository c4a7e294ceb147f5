"""What makes a signature: calls that differ have different ones."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.tilewise.plan_cache.cases import before, ends, fp32_precision, scaled, shifted
from tests.tilewise.plan_cache.conftest import signature_of_call
from tilewise.plan_cache import PlanCache, positions, signature


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


IN_KEYS = {"are_deterministic_algorithms_enabled", "backends.cuda.matmul.fp32_precision"}  # the test above
NOT_IN_KEYS = {  # other settings of torch that modules read, and why a plan does not depend on them
    "is_autocast_enabled": "a call with autocast has no plan before its tensors are cast",
    "get_autocast_dtype": "as above",
    "is_grad_enabled": "a plan has both ways; each call chooses",
    "get_num_threads": "calls on a CPU have no plans",
    "backends.mha.get_fastpath_enabled": "set by replaces_sdpa, not read by calls",
    "backends.mha.set_fastpath_enabled": "as above",
}
SETTING = re.compile(r"torch\.((?:backends\.[\w.]+)|(?:(?:is|are|get)_\w+))")


def settings_of_torch(source: str) -> set[str]:
    """The settings that a user may change at any time: torch.backends.*, torch.is_*, torch.are_*, torch.get_*."""
    names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    found = {match[1] for match in map(SETTING.fullmatch, names) if match}
    return {x for x in found if not any(y.startswith(x + ".") for y in found)}


def test_every_setting_of_torch_is_in_the_keys_or_has_a_reason() -> None:
    assert settings_of_torch("if torch.backends.cudnn.allow_tf32 or f(torch.is_x(y)): z(torch.backends.a.b.c)") == {
        "backends.cudnn.allow_tf32", "is_x", "backends.a.b.c",
    }  # fmt: skip
    sources = Path(tilewise.__file__).parent.rglob("*.py")
    found = set().union(*(settings_of_torch(path.read_text(encoding="utf-8")) for path in sources))
    assert found == IN_KEYS | set(NOT_IN_KEYS)


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
def test_calls_on_a_cpu_with_other_tensors_have_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contents are checked."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: False))
    assert signature_of() is not None
    assert signature_of(sinks=torch.ones(4)) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert signature_of() is None


def test_tensors_that_left_their_transform_have_no_signature(kept: PlanCache) -> None:
    """They are wrappers without memory, which `Function.apply` unwraps and `eager_apply` does not."""
    left: list[Tensor] = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(torch.randn(1, 4, 2, 8))
    (x,) = left
    assert signature("attention", [x, x, x], {}) is None


@pytest.mark.usefixtures("spied")
def test_every_call_is_checked_with_tilewise_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    assert signature_of() is None
