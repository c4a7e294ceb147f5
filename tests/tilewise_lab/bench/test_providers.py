from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.oracle import naive
from tilewise.errors import AttentionError
from tilewise.request import Spec
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.judge import Judge
from tilewise_lab.bench.peers import FlashAttn3
from tilewise_lab.bench.provider import RefusedError, auto
from tilewise_lab.bench.providers import roster

CPU = torch.device("cpu")
FULL = Case(2, 33, 4, 4, 16, dtype="float32")
CAUSAL = Case(2, 33, 4, 4, 16, causal=True, dtype="float32")
GQA = Case(1, 33, 4, 2, 16, causal=True, dtype="float32")
WINDOW = Case(1, 33, 2, 2, 16, causal=True, window=5, dtype="float32")
PACKED = Case(1, 0, 4, 4, 16, causal=True, lengths=(9, 1, 30), dtype="float32")
FEW = Case(2, 33, 4, 2, 16, queries=17, dtype="float32")
NARROW = Case(2, 33, 4, 4, 24, causal=True, value_dim=16, dtype="float32")
ALL = [FULL, CAUSAL, GQA, WINDOW, PACKED, FEW, NARROW]


def right(provider, case, which):
    """For most of three draws: of float32 and a few tokens, one in twenty is just beyond the budget, however it is
    summed; what is wrong is wrong for all of them."""
    return sum(right_for(provider, case, which, seed) for seed in range(3)) >= 2


def right_for(provider, case, which, seed):
    x = case.inputs(CPU, seed=seed)
    answer = provider.answer(case, which, x)
    first, again = answer(), answer()
    assert all(torch.equal(first[name], again[name]) for name in first)
    return all(error.ok for error in Judge(case, x, 100).errors(first).values())


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.key)
@pytest.mark.parametrize("name", ["tilewise-reference", "sdpa", "naive"])
def test_cpu_providers_are_right_or_say_why(name, case, which):
    provider = roster(CPU).known[name]
    assert provider.missing(CPU) is None
    refusal = provider.refuses(case, which)
    if refusal is None:
        assert right(provider, case, which)
    else:
        assert (name, case) in [("sdpa", WINDOW), ("sdpa", PACKED), ("naive", PACKED)]


def test_everyone_else_says_why_not():
    known = roster(CPU).known
    reasons = {name: provider.missing(CPU) for name, provider in known.items()}
    assert [name for name, reason in reasons.items() if reason is None] == [
        "tilewise-reference",
        "tilewise-torch",
        "sdpa",
        "flex",
        "naive",
    ]
    assert "hopper" in reasons["tilewise-hopper"]
    assert "--fa3" in reasons["fa3"]
    assert all(len(reason) > 10 for reason in reasons.values() if reason)


def test_the_interpreter_is_no_contender(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in roster(CPU).known["tilewise-triton"].missing(CPU)


def test_flex_has_no_backward_on_the_cpu():
    with pytest.raises(RefusedError, match="no backward"):
        roster(CPU).known["flex"].backward(FULL, FULL.inputs(CPU, 0))


def test_a_backend_torch_lacks_is_refused_in_its_words():
    with pytest.raises(RefusedError):
        roster(CPU).known["cudnn"].forward(FULL, FULL.inputs(CPU, 0))


def test_unknown_peers_are_an_error():
    with pytest.raises(AttentionError, match="fa9"):
        roster(CPU, ("fa9",))


def test_all_is_everyone():
    everyone = roster(CPU, ("all",))
    assert set(everyone.asked) == set(everyone.known)


def test_auto_is_what_a_user_gets():
    assert auto(CAUSAL, CAUSAL.inputs(CPU, 0)) == "tilewise-torch"
    assert auto(PACKED, PACKED.inputs(CPU, 0)) == "tilewise-reference"


def attend(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None], cu: Tensor | None = None) -> Tensor:
    """The oracle behind the signatures of the flash-attn family."""
    before, after = (None if side is None or side < 0 else side for side in window)
    return naive(q, k, v, Spec(q.shape[-1] ** -0.5, before, after), cu, cu)[0].to(q.dtype)


def flash_attn(unbounded: int | None, pair: bool) -> ModuleType:
    module = ModuleType("a_flash_attn")

    def flash_attn_func(q, k, v, *, causal=False, window_size=(unbounded, unbounded)):
        out = attend(q, k, v, (unbounded, 0) if causal else window_size)
        return (out, None) if pair else out

    def flash_attn_varlen_func(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=False,
        window_size=(unbounded, unbounded),
    ):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        out = attend(q, k, v, (unbounded, 0) if causal else window_size, cu_seqlens_k)
        return (out, None) if pair else out

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.key)
@pytest.mark.parametrize(
    ("name", "module", "unbounded", "pair"),
    [
        ("flash-attn", "flash_attn", -1, False),
        ("fa3", "flash_attn_interface", -1, True),
        ("fa4", "flash_attn.cute", None, True),
    ],
)
def test_the_flash_attn_family_is_called_as_it_wants(monkeypatch, name, module, unbounded, pair, case, which):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
    monkeypatch.setitem(sys.modules, module, flash_attn(unbounded, pair))
    assert right(roster(CPU).known[name], case, which)


FA3 = """
import torch
from tests.tilewise_lab.bench.test_providers import attend

def forward(q, k, v, *, causal=False, window=(-1, -1), cu_q=None, cu_k=None, max_q=None, max_k=None):
    return attend(q, k, v, (-1, 0) if causal else window, cu_q), "lse"

def backward(dout, q, k, v, out, lse, *, causal=False, window=(-1, -1), cu_q=None, cu_k=None, max_q=None, max_k=None):
    assert lse == "lse"
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, (-1, 0) if causal else window, cu_q)
    return torch.autograd.grad(out, leaves, dout)
"""


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.key)
def test_fa3_from_a_folder(tmp_path, case, which):
    (tmp_path / "fa3.py").write_text(FA3)
    assert right(FlashAttn3("fa3", "", folder=tmp_path), case, which)


CHOOSY = """
from tests.tilewise_lab.bench.test_providers import attend

def forward(q, k, v, *, causal=False, num_splits=1):
    return attend(q, k, v, (-1, 0 if causal else -1)), num_splits
"""


@pytest.mark.parametrize(("case", "splits"), [(FEW, 0), (FULL, 1)], ids=["few queries", "many"])
def test_fa3_cuts_the_keys_as_it_likes_where_queries_are_few(tmp_path, monkeypatch, case, splits):
    (tmp_path / "fa3.py").write_text(CHOOSY)
    provider, x = FlashAttn3("fa3", "", folder=tmp_path), case.inputs(CPU, 0)
    assert right(provider, case, "forward")
    assert provider.lse(case, x) == splits

    said = []
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, *, causal=False, num_splits=1):
        said.append(num_splits)
        return attend(q, k, v, (-1, -1))

    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert right(FlashAttn3("fa3", ""), case, "forward")
    assert set(said) == {splits}


def flashinfer() -> ModuleType:
    """The oracle behind FlashInfer's plan and run, sequence by sequence."""
    module = ModuleType("flashinfer")

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, ends_q, ends_k, heads, kv_heads, dim, dv, *, causal, window_left, q_data_type):
            self.sizes = (heads, dim), (kv_heads, dim), (kv_heads, dv)
            self.ends, self.spec = (ends_q, ends_k), Spec(dim**-0.5, None, 0 if causal else None)

        def run(self, q, k, v):
            assert tuple(tuple(x.shape[1:]) for x in (q, k, v)) == self.sizes
            return naive(q, k, v, self.spec, *self.ends)[0].to(q.dtype)

    module.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    return module


@pytest.mark.parametrize("case", [FULL, GQA, PACKED, FEW, NARROW], ids=lambda case: case.key)
def test_flashinfer_is_planned_for_the_case(monkeypatch, case):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
    assert right(roster(CPU).known["flashinfer"], case, "forward")


def test_fa3_needs_its_loader():
    provider = roster(CPU, fa3=Path("nowhere")).known["fa3"]
    assert isinstance(provider, FlashAttn3)
    assert "CUDA" in provider.missing(CPU)
