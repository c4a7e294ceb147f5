"""The parts of torch that meet attention: the registered ops, torch.compile, torch.func, higher derivatives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tests import features
from tests.cases import Case, Inputs, make, run
from tests.conftest import DEVICE
from tests.oracle import naive
from tilewise.backends.registry import choose
from tilewise.errors import AttentionError
from tilewise.request import Gpu, Request, Spec, arguments


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def case(n_q: int = 7, n_k: int = 9, packed: bool = False, **changes: Any) -> Case:
    lengths = ((n_q - 4, n_k - 4), (0, 0), (4, 4)) if packed else None
    batch = 3 if packed else 2
    return Case(batch, n_q, n_k, 4, 2, 8, 8, lengths=lengths, lse_gradient=True, **{"after": 0} | changes)


def op_arguments(inputs: Inputs, spec: Spec, **terms: Any) -> tuple[Any, ...]:
    return arguments(Request(*inputs[1:4], spec, cu_q=inputs.cu_q, cu_k=inputs.cu_k, **terms))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck(packed: bool, backend: str) -> None:
    inputs = make(case(packed=packed), DEVICE)
    spec = Spec(0.5, 3, 0, backend)
    forward = op_arguments(inputs, spec)
    torch.library.opcheck(torch.ops.tilewise.forward.default, forward)
    out, lse = torch.ops.tilewise.forward(*forward)
    for dlse in (inputs.dlse, None):
        backward = (out, lse, inputs.dout, dlse, *op_arguments(inputs, spec))
        torch.library.opcheck(torch.ops.tilewise.backward.default, backward)


@pytest.mark.slow
def test_opcheck_of_term_gradients(backend: str) -> None:
    """Of a bias, of sinks and of what a mod reads; each alone and all together."""
    inputs = make(case(), DEVICE)
    mod = features.distance_table(torch.randn(4, 16, device=DEVICE))
    spec = Spec(0.5, 3, 0, backend, score_mod=mod.key, score_tensors=len(mod.tensors))
    bias, sinks = torch.randn(1, 4, 7, 9, device=DEVICE), torch.randn(4, device=DEVICE)
    call = op_arguments(inputs, spec, bias=bias, sinks=sinks, score=mod.tensors)
    out, lse = torch.ops.tilewise.forward(*call)
    for wanted in ([True, True, True], [True, False, False], [False, True, False], [False, False, True]):
        given = (out, lse, inputs.dout, inputs.dlse, wanted, *call)
        torch.library.opcheck(torch.ops.tilewise.term_gradients.default, given)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck_of_forward_mode(packed: bool, triton_runs: None) -> None:
    inputs = make(case(packed=packed), DEVICE)
    call = op_arguments(inputs, Spec(0.5, 3, 0, "triton"))
    out, lse = torch.ops.tilewise.forward(*call)
    given = (out, lse, [torch.randn_like(x) for x in inputs[1:4]], *call)
    torch.library.opcheck(torch.ops.tilewise.jvp.default, given)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck_of_second_derivatives(packed: bool, triton_runs: None) -> None:
    inputs = make(case(packed=packed), DEVICE)
    call = op_arguments(inputs, Spec(0.5, 3, 0, "triton"))
    out, lse = torch.ops.tilewise.forward(*call)
    given = (out, lse, inputs.dout, inputs.dlse, [torch.randn_like(x) for x in inputs[1:4]], *call)
    torch.library.opcheck(torch.ops.tilewise.hvp.default, given)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_data(kind: str, packed: bool) -> None:
    """Shapes, dtypes and gradients on torch.device("meta") and under FakeTensorMode, where nothing is computed."""
    f = features.Features(
        softcap=True, mod="distance_table", alibi="h", bias="hij", sinks=True, dropout=True, mask="block_diagonal",
        packed=packed, dtype="bfloat16",
    )  # fmt: skip
    real = features.make(f, 3, longest=40, device="cpu")
    expected = features.run(real, "auto")
    mode = FakeTensorMode()
    with mode if kind == "fake" else nullcontext():

        def empty(x: Tensor) -> Tensor:
            return mode.from_tensor(x) if kind == "fake" else x.to("meta")

        moved = replace(
            real, leaves={name: empty(x) for name, x in real.leaves.items()}, dout=empty(real.dout),
            dlse=empty(real.dlse), cu=None if real.cu is None else tuple(map(empty, real.cu)),
        )  # fmt: skip
        found = features.run(moved, "auto")
    for name, x in found.items():
        assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
        assert x.is_meta == (kind == "meta")


def check_one_compile(cases: list[Case], backend: str, grad: bool) -> None:
    """One compile serves calls that differ in their lengths only, and they return what eager calls do."""
    packed, window = cases[0].lengths is not None, (cases[0].before, cases[0].after)
    attend = tilewise.attention_varlen if packed else tilewise.attention

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return attend(*tensors, window=window, return_lse=True)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    compiles = []
    for each in cases:
        inputs = make(each, DEVICE)
        leaves = [x.detach().requires_grad_(grad) for x in inputs[1:4]]
        found = compiled(*leaves, *((inputs.cu_q, inputs.cu_k) if packed else ()))
        if grad:
            found = *found, *torch.autograd.grad(found, leaves, (inputs.dout, inputs.dlse))
        assert_close(found, run(inputs, "auto")[: len(found)])
        compiles.append(counter.frame_count)
    assert len(set(compiles)) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_compile_once_for_all_lengths(packed: bool, grad: bool) -> None:
    sizes = (7, 9), (8, 8), (33, 40), (21, 13)
    check_one_compile([case(*size, packed, before=20) for size in sizes], "aot_eager", grad)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 5.0}, {"dropout_p": 0.25, "seed": 3}])
def test_numbers_that_the_compiler_does_not_take_for_constants(options: dict[str, Any]) -> None:
    """Those that a module holds, with dynamic shapes: torch.compile makes symbols of them."""

    class Attends(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            found: Tensor = tilewise.attention(q, q, q, causal=True, **{name: getattr(self, name) for name in options})
            return found

    module = Attends()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 9):
        for name, x in options.items():
            setattr(module, name, x if name == "seed" else x + n / 100)
        q = torch.randn(1, n, 2, 16, device=DEVICE, requires_grad=True)
        found, expected = compiled(q), module(q)
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(x.sum(), q) for x in (found, expected)))


def _longest(n: int) -> Tensor:
    x, cu = torch.ones(n, 2, 16, device=DEVICE), torch.tensor([0, n // 2, n], dtype=torch.int32, device=DEVICE)
    found: Tensor = tilewise.attention_varlen(x, x, x, cu, cu, max_seqlen_q=n, max_seqlen_k=n)
    return found


def _longest_of_a_cache(n: int, backend: str = "auto") -> Tensor:
    x, cu = torch.ones(2, n, 2, 16, device=DEVICE), torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    found: Tensor = tilewise.attention_kv(x[:, 0], x, x, cu[1:], cu_seqlens_q=cu, max_seqlen_q=n, backend=backend)
    return found


def _shared_heads(n: int) -> Tensor:
    q, k = torch.ones(1, n, 4, 16, device=DEVICE), torch.ones(1, n // 2, 4, 16, device=DEVICE)
    return tilewise.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def compiles_of(attend: Callable[[int], Tensor], *sizes: int) -> list[int]:
    """How many compiles there were after each of these calls, which return what eager ones do."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    compiles = []
    for n in sizes:
        assert_close(compiled(n), attend(n))
        compiles.append(counter.frame_count)
    return compiles


@pytest.mark.parametrize("attend", [_longest, _longest_of_a_cache, _shared_heads])
def test_sizes_that_the_compiler_does_not_take_for_constants(attend: Callable[[int], Tensor]) -> None:
    assert len(set(compiles_of(attend, 8, 12, 16))) == 1


def test_one_compile_for_what_fits_a_tile(triton_runs: None) -> None:
    """The kernels' workspace has room for the rows of a tile, 16 in the interpreter, or for fewer."""
    attend = partial(_longest_of_a_cache, backend="triton")
    assert len(set(compiles_of(attend, 8, 16))) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compiled_calls_do_not_read_the_plan_cache(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing does not read the plan cache: some versions of torch would guard its length, and compile again after
    every new eager call. The op that the graph calls on a GPU reads it."""

    def traced(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        monkeypatch.undo()
        return graph

    monkeypatch.setattr(tilewise.api, "plans", None)
    inputs = make(case(8, 8, packed), DEVICE)
    attend = tilewise.attention_varlen if packed else tilewise.attention
    compiled = torch.compile(lambda *tensors: attend(*tensors, causal=True), backend=traced, fullgraph=True)
    compiled(*inputs[1:4], *((inputs.cu_q, inputs.cu_k) if packed else ()))
    assert tilewise.api.plans is not None


def test_compile_turns_dynamic_by_itself() -> None:
    """Without dynamic=True: one compile for the first length, one for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, causal=True), backend=counter, fullgraph=True)
    compiles = []
    for n in (7, 12, 30, 45):
        inputs = make(case(n, n), DEVICE)
        assert_close(compiled(*inputs[1:4]), run(inputs, "auto")[0])
        compiles.append(counter.frame_count)
    assert len(set(compiles)) == 2


def test_compile_one_tensor_for_everything() -> None:
    x = torch.randn(12, 2, 8, device=DEVICE, requires_grad=True)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)

    def loss(x: Tensor) -> Tensor:
        return tilewise.attention_varlen(x, x, x, cu, cu, causal=True).square().sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), x)
    assert_close(found, expected)


def test_the_compiled_graph_calls_the_registered_ops() -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    q, k, v = (x.requires_grad_() for x in make(case(), DEVICE)[1:4])
    compiled = torch.compile(tilewise.attention, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    compiled(q, k, v).sum().backward()
    forward, backward = graphs
    assert torch.ops.tilewise.forward.default in forward
    assert torch.ops.tilewise.backward.default in backward


class Seen(TorchDispatchMode):
    """The names of the ops that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(op))
        return op(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_registered_ops(backend: str) -> None:
    inputs = make(case(), DEVICE)
    expected = run(inputs, backend)
    with Seen() as seen:
        assert_close(run(inputs, backend), expected)
    assert {"tilewise.forward.default", "tilewise.backward.default"} <= seen.names


@pytest.mark.parametrize("changes", [{"scale": 0.3}, {"window": (3, 2)}, {"window": (None, 4), "scale": -1.0}], ids=str)
def test_compile_arguments(changes: dict[str, Any]) -> None:
    q, k, v = make(case(), DEVICE)[1:4]
    compiled = torch.compile(tilewise.attention, backend="aot_eager", fullgraph=True)
    assert_close(compiled(q, k, v, **changes), tilewise.attention(q, k, v, **changes))


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    """Attention between things that inductor fuses."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = torch.nn.functional.gelu(x @ w).unflatten(-1, (3, 4, 8)).unbind(-3)
        return tilewise.attention(q, k, v, causal=True).flatten(-2).tanh().sum()

    x, w = torch.randn(2, 11, 16, device=DEVICE), torch.randn(16, 96, device=DEVICE)
    expected, found = (w.clone().requires_grad_() for _ in range(2))
    block(x, expected).backward()
    torch.compile(block, fullgraph=True)(x, found).backward()
    assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_compile_under_autocast() -> None:
    q, k, v = make(case(), DEVICE)[1:4]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = torch.compile(tilewise.attention, backend="aot_eager", fullgraph=True)(q, k, v)
    assert out.dtype == torch.bfloat16
    expected, _ = tilewise.attention(*(x.bfloat16() for x in (q, k, v)), return_lse=True)  # a program computes lse, too
    assert torch.equal(out, expected)


def test_errors_survive_compilation() -> None:
    q, k = torch.randn(1, 4, 2, 8, device=DEVICE), torch.randn(1, 4, 2, 9, device=DEVICE)
    with pytest.raises(AttentionError, match="head dim of k: found 9; expected q's 8"):
        torch.compile(tilewise.attention, backend="eager")(q, k, q)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"AttentionError\(.*'head dim of k'.*\b9\b.*\"q's 8\""):
        torch.compile(tilewise.attention, backend="eager", fullgraph=True)(q, k, q)


def test_errors_can_be_pickled() -> None:
    error = AttentionError("scale", "nan", "a number")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "scale: found nan; expected a number"


def test_func_grad(backend: str) -> None:
    inputs = make(case(), DEVICE)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return (out * inputs.dout).sum() + (lse * inputs.dlse).sum()

    found = torch.func.grad(loss, (0, 1, 2))(*inputs[1:4])
    assert_close(found, run(inputs, backend)[2:])


def test_func_grad_of_what_hopper_would_run() -> None:
    """A tensor that torch.func wraps has no address, of which the Hopper kernels ask a multiple of 16 bytes."""
    q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16)
    found = []

    def loss(q: Tensor) -> Tensor:
        found.append(choose(Request(q, q, q, Spec(1.0)), Gpu("cuda", 90)).backend.name)
        return q.sum()

    torch.func.grad(loss)(q)
    assert found == ["hopper"]


def gradient_penalty(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    return dq.square().sum()


def test_second_derivatives_on_the_reference() -> None:
    """Those of the kernels: tests/tilewise/backends/test_second.py."""
    q, k, v = (x.double().requires_grad_() for x in make(case(), DEVICE)[1:4])
    spec = Spec.of(head_dim=8, causal=True)
    expected = torch.autograd.grad(gradient_penalty(q, k, v, lambda *x: naive(*x, spec)[0]), (q, k, v))
    found = torch.autograd.grad(
        gradient_penalty(q, k, v, lambda *x: tilewise.attention(*x, causal=True, backend="reference")), (q, k, v)
    )
    assert_close(found, expected)


def test_deterministic_mode(backend: str) -> None:
    inputs = make(case(), DEVICE)
    expected = run(inputs, backend)
    torch.use_deterministic_algorithms(True)
    try:
        found = run(inputs, backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_checkpointing(backend: str) -> None:
    """Activation checkpointing runs the forward twice and must see the same result."""
    inputs = make(case(), DEVICE)
    q, k, v = (x.detach().requires_grad_() for x in inputs[1:4])

    def attend(*x: Tensor) -> Any:
        return tilewise.attention(*x, causal=True, return_lse=True, backend=backend)

    out, lse = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    assert_close((out, lse, *grads), run(inputs, backend))


def test_inference_mode(backend: str) -> None:
    inputs = make(case(), DEVICE)
    with torch.inference_mode():
        out = tilewise.attention(*inputs[1:4], causal=True, backend=backend)
    assert torch.equal(out, run(inputs, backend)[0])
