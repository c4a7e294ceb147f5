"""Kernels that were prepared with placeholders, run by the interpreter from slots and addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

import tilewise
from tests.conftest import INTERPRETED
from tests.covering import cases
from tests.kv_cases import KvCase, inputs
from tests.tilewise.backends.fake_gpu import CUDA, stand_in_for_gpu
from tilewise.backends.common import kernel_call
from tilewise.backends.common.kernel_call import (
    KernelCall,
    build_backward,
)
from tilewise.backends.common.launch import Launch, Slot, Target
from tilewise.call.fields import CACHE
from tilewise.kv_cache import _call as kv_call_of
from tilewise.kv_request import KvCall, structure_of
from tilewise.request import INTERPRETER, BackwardInputs, Request
from tilewise.validation import dense as checks


class Interpreted:
    """Stands for `PreparedLaunches`: finds each tensor by its slot, and runs the kernels in the interpreter."""

    def __init__(self, launches: Sequence[Any], tensors: int, device: int, low_bits: tuple[int, ...]) -> None:
        self.launches, self.count, self.device, self.low_bits = launches, tensors, device, low_bits

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        assert len(addresses) == self.count
        if kernel_call.low_bits(addresses) != self.low_bits:
            return False
        for launch in self.launches:
            made: Launch = launch.binary
            args = [self.filled(a, b, addresses) for a, b in zip(made.args, launch.args, strict=True)]
            made._replace(args=tuple(args))()
        return True

    def filled(self, placeholder: Any, slot: Any, addresses: Sequence[int]) -> Any:
        if isinstance(placeholder, Tensor):
            assert isinstance(slot, Slot)
            return tensor_at(addresses[slot.number] + slot.offset, placeholder)
        if isinstance(placeholder, tuple):
            items = [self.filled(a, b, addresses) for a, b in zip(placeholder, slot, strict=True)]
            return type(placeholder)(*items) if hasattr(placeholder, "_fields") else tuple(items)
        assert placeholder is slot or placeholder == slot
        return placeholder


STORAGES: dict[int, Tensor] = {}  # tensors of a test by the addresses of their memory


def known(x: Tensor) -> Tensor:
    STORAGES[x.untyped_storage().data_ptr()] = x
    return x


def tensor_at(address: int, like: Tensor) -> Tensor:
    for start, x in STORAGES.items():
        if start <= address < start + max(x.untyped_storage().nbytes(), 1) and like.numel():
            offset, rest = divmod(address - start, like.element_size())
            assert rest == 0
            return torch.empty(0, dtype=like.dtype).set_(x.untyped_storage(), offset, like.shape, like.stride())
    assert not like.numel()
    return torch.empty(like.shape, dtype=like.dtype)


@pytest.fixture
def interpreted(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not INTERPRETED:
        pytest.skip("kernels are compiled here")
    found = SimpleNamespace(stream=5, device=0, devices=1, capturing=False)
    stand_in_for_gpu(monkeypatch, found)
    monkeypatch.setattr(kernel_call, "target_of", lambda device: Target(INTERPRETER, 16))
    monkeypatch.setattr(kernel_call, "compile_launches", lambda launches: launches)
    monkeypatch.setattr(kernel_call, "all_arguments", lambda launch: launch.args)  # it takes constants by name
    monkeypatch.setattr(kernel_call, "prepared", Interpreted)
    monkeypatch.setattr(kernel_call, "empty_strided_cuda", lambda *x: known(torch.empty_strided(*x[:2], dtype=x[2])))
    STORAGES.clear()
    yield
    STORAGES.clear()


def on_call(request: Request, seed: int) -> Request:
    """The same call with other tensors at other addresses."""
    generator = torch.Generator().manual_seed(seed)

    def like(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if not x.is_floating_point():
            return known(x.clone())
        size = torch.empty_strided(x.shape, x.stride(), device="meta").untyped_storage().nbytes() // 4
        return known(torch.randn(size, generator=generator).to(x.dtype).as_strided(x.shape, x.stride()))

    return Request.of(request.spec, [like(x) for x in request.tensors()])


@tilewise.score_mod
def tilted(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score + table[h] * by * kv_idx


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "bias": {"bias": torch.randn(1, 2, 9, 9)},
    "expanded bias": {"bias": torch.randn(1, 1, 9, 9).expand(2, 2, 9, 9)},
    "sinks": {"sinks": torch.randn(2), "causal": True},
    "mod": {"score_mod": tilted(torch.randn(2), 0.1), "softcap": 3.0},
    "split keys": {"keys": 3000, "queries": 1},
    "packed": {"packed": True, "causal": True},
    "strided": {"strided": True},
    "one tensor": {"same": True},
    "no keys": {"keys": 0},
    "no queries": {"queries": 0},
}


def request_of(name: str) -> Request:
    options = dict(CALLS[name])
    queries, keys = options.pop("queries", 9), options.pop("keys", 9)
    packed, strided, same = (options.pop(x, False) for x in ("packed", "strided", "same"))
    batch = 1 if keys > 1000 else 2
    q, k, v = (torch.randn(batch, n, 2, 16) for n in (queries, keys, keys))
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if same:
        k = v = q
    cu = (torch.tensor([0, 4, 9], dtype=torch.int32),) * 2 if packed else ()
    if packed:
        q, k, v = q[0], k[0], v[0]
    return checks.checked_request(q, k, v, cu, (None, None), options)


@cases("name", ["plain", "bias", "sinks", "mod", "split keys", "packed", "strided", "no keys"], CALLS)
def test_kernels_run_from_slots_and_addresses(name: str, interpreted: None) -> None:
    """Forward and backward, of tensors that are not those of the first call."""
    from tilewise.backends.reference import backward, forward
    from tilewise.backends.triton.backward_launches import named_launches
    from tilewise.backends.triton.launches import build_forward

    first = request_of(name)
    run = KernelCall(build_forward(first.spec), first.tensors(), CUDA)
    again = None
    for seed in range(2):
        request = on_call(first, seed)
        out, lse = run(request.tensors())
        expected = forward(request)
        assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
        assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)
        bwd_inputs = BackwardInputs(*map(known, (out, lse, torch.randn_like(out), torch.randn_like(lse))))
        again = again or KernelCall(build_backward(named_launches, first.spec), (*request.tensors(), *bwd_inputs), CUDA)
        found = again((*request.tensors(), *bwd_inputs))
        for a, b in zip(found, backward(request, bwd_inputs), strict=True):
            assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_sinks_runs_from_addresses(interpreted: None) -> None:
    from tilewise.backends.common.sinks import build_sink_gradient
    from tilewise.backends.reference import forward, scored

    first = request_of("sinks")
    run = None
    for seed in range(2):
        request = on_call(first, seed)
        out, lse = map(known, forward(request))
        bwd_inputs = BackwardInputs(out, lse, known(torch.randn_like(out)), None)
        run = run or KernelCall(build_sink_gradient(first.spec), (*request.tensors(), *bwd_inputs), CUDA)
        (found,) = run((*request.tensors(), *bwd_inputs))
        (expected,) = scored.term_gradients(request, bwd_inputs, [False, True])
        assert_close(found, expected, atol=1e-4, rtol=1e-4)


ANGLES = torch.outer(torch.arange(64.0), 100 ** -(torch.arange(8) / 8))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (KvCase((5, 0, 18), dim=16, heads=2, kv_heads=1, page=8), {}),
        (KvCase((5, 0, 18), dim=16, page=0, new=1), {"rotary": tilewise.Rotary(ANGLES.cos(), ANGLES.sin())}),
        (KvCase((5, 0, 18), dim=16, queries=(2, 1, 1), new=(2, 1, 1), csr=True, padding=2), {"sinks": torch.randn(4)}),
    ],
    ids=["pages", "rotary", "packed"],
)
@pytest.mark.parametrize("given", ["nothing", "out", "plan"])
def test_a_kv_cache_runs_from_addresses(case: KvCase, options: dict[str, Any], given: str, interpreted: None) -> None:
    from tilewise.backends.common.kv import launches, runners
    from tilewise.backends.reference import kv as reference

    run = None
    for seed in range(2):
        ours, theirs = (inputs(case, torch.float32, seed=seed) for _ in range(2))
        made = []
        for x in (ours, theirs):
            asked = CACHE.completed(x.options | options | {"backend": "triton"})
            if given == "out":
                asked["out"] = torch.empty_like(x.q)
            made.append(kv_call_of(x.q, x.k, x.v, x.lengths, asked))
        call: KvCall = made[0]
        if given == "plan":
            numbers, floats = launches.schedule_sizes(call.request, Target(INTERPRETER, 16))
            call = call._replace(
                schedule=torch.zeros(numbers, dtype=torch.int64), workspace=torch.zeros(floats),
                lse=torch.empty(*ours.q.shape[:-3], *ours.q.shape[-3:-1][::-1]),
            )  # fmt: skip
        tensors, _ = structure_of(call)
        for x in tensors:
            known(x)
        if given == "plan":
            for launch in launches.schedule_launches(call.request, call.schedule, Target(INTERPRETER, 16)):
                launch()
        if run is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runners, "KernelCall", lambda build, tensors, device: KernelCall(build, tensors, CUDA))
                run = runners.attend_runner(call, launches)
        out, lse = run(tensors)[:2]
        assert call.out is None or out is call.out
        assert call.lse is None or lse is call.lse
        expected = reference.attend(made[1]._replace(out=None))
        assert_close(out, expected[0], atol=1e-4, rtol=1e-4)
        assert_close(lse, expected[1], atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.k.nan_to_num(), theirs.k.nan_to_num())
