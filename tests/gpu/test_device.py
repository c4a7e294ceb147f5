"""What only a device can show: reproducible bits, graphs, streams, no host sync, and what hidden tokens must not do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests import budget
from tests.cases import NAMES, Case, Inputs, make, run
from tests.tilewise.backends.test_features import by_distance, by_pair
from tests.tilewise.backends.test_leaks import affected, check_untouched, poisoned
from tests.tilewise.test_integration import check_one_compile, op_arguments
from tilewise.request import Spec

DENSE = Case(batch=2, n_q=700, n_k=700, heads=8, kv_heads=2, d=64, dv=64, dtype="bfloat16", after=0)
PACKED = replace(DENSE, batch=4, lengths=((300, 300), (0, 0), (123, 123), (277, 277)))
DECODE = Case(batch=2, n_q=1, n_k=5001, heads=8, kv_heads=2, d=128, dv=128, dtype="bfloat16", after=0)
CASES = pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
ALL = pytest.mark.parametrize("case", [DENSE, PACKED, DECODE], ids=["dense", "packed", "decode"])


@pytest.fixture(params=[True, False], ids=["deterministic", "default"], autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch.use_deterministic_algorithms also fills what is not written with nan."""
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def same(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> None:
    """The same bits; by default dq, which is summed in any order, only nearly."""
    for name, a, b in zip(NAMES, x, y, strict=True):
        if name == "dq" and not torch.are_deterministic_algorithms_enabled():
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())
        else:
            assert torch.equal(a, b), name


@ALL
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bitwise_reproducible(case: Case, dtype: str) -> None:
    inputs = make(replace(case, dtype=dtype), "cuda")
    first = run(inputs, "auto")
    for _ in range(3):
        same(run(inputs, "auto"), first)


@pytest.mark.parametrize(
    "change",
    [{}, {"n_q": 3, "after": None}, {"n_q": 17, "before": 900}, {"batch": 40, "kv_heads": 8}, {"d": 256, "dv": 64}],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_queries(change: dict[str, int | None], dtype: str) -> None:
    """Their keys are divided among programs, each with a part; a batch may also fill the GPU by itself."""
    inputs = make(replace(DECODE, dtype=dtype, **change), "cuda")
    budget.check(run(inputs, "auto"), inputs)


@ALL
def test_no_host_sync(case: Case) -> None:
    inputs = make(case, "cuda")
    run(inputs, "auto")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, "auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mod", [by_distance, by_pair])
@pytest.mark.parametrize("longest", [{}, {"max_seqlen_q": 300, "max_seqlen_k": 300}], ids=["untold", "told"])
def test_no_host_sync_for_the_gradients_of_terms(mod: Any, longest: dict[str, int]) -> None:
    inputs = make(PACKED, "cuda")
    heads = PACKED.heads
    terms = [torch.randn(8, 17, device="cuda"), torch.randn(heads, device="cuda"), torch.randn(heads, device="cuda")]
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, *terms)]

    def grads() -> Any:
        q, k, v, table, slopes, sinks = leaves
        options: Any = {"score_mod": mod(table), "alibi_slopes": slopes, "sinks": sinks, "causal": True}
        out = tilewise.attention_varlen(q, k, v, inputs.cu_q, inputs.cu_k, **longest, **options)
        return torch.autograd.grad(out, leaves, inputs.dout)

    grads()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ALL
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # the kernels for Hopper where it is one, and the portable
def test_graph(case: Case, dtype: str) -> None:
    """A captured call, replayed on other data, and packed: on other lengths of the same total."""
    case = replace(case, dtype=dtype)
    static = make(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static, "auto")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(static, "auto")
    lengths = None if case.lengths is None else ((1, 1), (650, 650), (49, 49), (0, 0))
    for seed in (1, 2):
        fresh = make(replace(case, seed=seed, lengths=lengths if seed == 2 else case.lengths), "cuda")
        for old, new in zip(static[1:], fresh[1:], strict=True):
            if old is not None:
                old.copy_(new)
        graph.replay()
        same(results, run(fresh, "auto"))


@ALL
def test_stream(case: Case) -> None:
    """Inputs that appear late on a side stream: a launch on any other stream would read what was there before."""
    expected = make(case, "cuda")
    late = Inputs(case, *(x if x is None or x.dtype == torch.int32 else torch.zeros_like(x) for x in expected[1:]))
    clean = run(expected, "auto")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late[1:], expected[1:], strict=True):
            if x is not None:
                x.copy_(y)
        results = run(late, "auto")
    stream.synchronize()
    same(results, clean)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    results = run(make(DENSE, "cuda:1"), "auto")
    assert torch.cuda.current_device() == 0
    same(tuple(x.to("cuda:0") for x in results), run(make(DENSE, "cuda:0"), "auto"))


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_alignment(shift: int) -> None:
    """The same shapes and strides at addresses that allow other widths of loads."""
    inputs = make(DENSE, "cuda")

    def moved(x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + shift)[shift:].view(x.shape).copy_(x)

    for _ in range(2):
        same(run(inputs, "triton"), run(inputs._replace(**{n: moved(getattr(inputs, n)) for n in "qkv"}), "triton"))


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@CASES
def test_compile(case: Case, grad: bool) -> None:
    torch.compiler.reset()
    packed = case.lengths is not None
    lengths = {n: ((n - 40, n - 40), (40, 40)) if packed else None for n in (700, 333, 512)}
    check_one_compile([replace(case, n_q=n, n_k=n, lengths=x) for n, x in lengths.items()], "inductor", grad)


@CASES
def test_opcheck(case: Case) -> None:
    inputs = make(replace(case, dtype="float32"), "cuda")
    spec = Spec(0.1, 100, 0)
    forward = op_arguments(inputs, spec)
    torch.library.opcheck(torch.ops.tilewise.forward.default, forward)
    out, lse = torch.ops.tilewise.forward(*forward)
    backward = (out, lse, inputs.dout, inputs.dlse, *op_arguments(inputs, spec))
    torch.library.opcheck(torch.ops.tilewise.backward.default, backward)


LEAKS = Case(batch=1, n_q=300, n_k=330, heads=2, kv_heads=1, d=64, dv=64, before=70, after=30)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(("at", "value"), [(0, torch.nan), (150, torch.inf), (200, torch.nan), (299, -torch.inf)])
def test_hidden_token(name: str, at: int, value: float, dtype: str) -> None:
    case = replace(LEAKS, dtype=dtype)
    inputs = make(case, "cuda")
    found = run(poisoned(inputs, name, (0, at), value), "auto")
    # what is repaired is computed by another kernel, with other roundings
    tolerance = {"rtol": 1.6e-2, "atol": 4e-3} if dtype == "bfloat16" else {}
    check_untouched(run(inputs, "auto"), found, affected(name, at, case), **tolerance)


@tilewise.mask_mod
def blind_to(b, h, q_idx, kv_idx, hidden):  # type: ignore[no-untyped-def]
    return kv_idx != hidden[0]


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_key_that_no_query_sees_through_a_mask_mod(backend: str, value: float, d: int) -> None:
    """Nothing it holds reaches a result, and its own gradients are 0."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 300, h, d, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[0, 150] = value
    mask = blind_to(torch.tensor([150], dtype=torch.int32, device="cuda"))
    results = []
    for keys, values in ((k, v), bad):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        out, lse = tilewise.attention(*leaves, causal=True, mask_mod=mask, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for name, clean, dirty in zip(NAMES, *results, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=1.6e-2, atol=4e-3, msg=lambda m, name=name: f"{name}: {m}")
    for grad in results[1][3:]:
        assert not grad[0, 150].any()


def test_lengths_are_checked_though_the_call_is_remembered() -> None:
    inputs = make(PACKED, "cuda")
    call = [inputs.q, inputs.k, inputs.v, inputs.cu_q, inputs.cu_k]
    for _ in range(2):
        tilewise.attention_varlen(*call, max_seqlen_q=300, max_seqlen_k=300)
    for wrong in (1.5, -1, "300", torch.tensor(300)):
        with pytest.raises(tilewise.AttentionError, match="max_seqlen_q"):
            tilewise.attention_varlen(*call, max_seqlen_q=wrong, max_seqlen_k=300)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_sequences(backend: str, causal: bool) -> None:
    """A packed buffer may be longer than its sequences: out 0, lse -inf and gradients 0 there, whatever it held."""
    cu = torch.tensor([0, 300, 300, 423, 700], dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(1000, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v, dout):
        x[700:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):  # the second is replayed
        try:
            out, lse = tilewise.attention_varlen(*leaves, cu, cu, causal=causal, return_lse=True, backend=backend)
        except tilewise.AttentionError as error:
            pytest.skip(str(error))
        results = out, *torch.autograd.grad(out, leaves, dout)
        assert (lse[:, 700:] == -torch.inf).all()
        for x in results:
            assert not x[700:].any()
            assert x[:700].isfinite().all()


def test_saved_tensors_that_come_back_with_other_strides() -> None:
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in qkv.unbind(2)]
    expected = torch.autograd.grad(tilewise.attention(*leaves, causal=True).float().square().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        found = torch.autograd.grad(tilewise.attention(*leaves, causal=True).float().square().sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_unwritten_memory() -> None:
    for case in (DENSE, PACKED, replace(DENSE, n_q=130, n_k=1), replace(DENSE, n_q=1, n_k=130)):
        inputs = make(case, "cuda")
        budget.check(run(inputs, "auto"), inputs)
