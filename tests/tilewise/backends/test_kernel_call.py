"""How a call of a kernel backend runs: placeholders, allocated buffers, counters, alignment, devices and streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.tilewise.backends import fake_driver
from tests.tilewise.backends.fake_driver import CUresult, FakeDriver, Graph, binary
from tests.tilewise.backends.fake_gpu import CUDA, stand_in_for_gpu
from tilewise import AttentionError
from tilewise.backends.common import kernel_call
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.device.structs import View
from tilewise.backends.common.kernel_call import (
    SPAN,
    Descriptor,
    KernelCall,
    Placeholders,
)
from tilewise.backends.common.launch import COUNTERS, Built, Launch, Slot, all_arguments

# Placeholders


def unaligned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A contiguous tensor whose address is 2 bytes of float16 past a multiple of 16."""
    x = torch.zeros(torch.Size(shape).numel() + 8, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x[1 : 1 + torch.Size(shape).numel()].view(shape)


def test_placeholders_have_the_layout_of_the_tensors() -> None:
    given = [
        torch.zeros(2, 6).T,
        None,
        unaligned(3, 4),
        torch.zeros(4, 0),
        torch.zeros(()),
        torch.zeros(7).long()[1::2],
    ]
    memory = Placeholders(given)
    for n, (made, x) in enumerate(zip(memory.inputs, given, strict=True)):
        if x is None:
            assert made is None
            continue
        assert made.is_meta
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
        assert made.data_ptr() % 16 == x.data_ptr() % 16  # Triton specialises kernels on it
        assert memory.slot(made) == Slot(n)


def test_slots_of_views() -> None:
    memory = Placeholders([torch.zeros(4, 6), unaligned(4, 6)])
    for n, x in enumerate(memory.inputs):
        assert memory.slot(x[1:]) == Slot(n, 6 * x.element_size())
        assert memory.slot(x[:, 2:].T) == Slot(n, 2 * x.element_size())
        assert memory.slot(x[3, 5]) == Slot(n, 23 * x.element_size())
        assert memory.slot(x[4:]) == Slot(n, 24 * x.element_size())  # without elements
    assert memory.slot(memory.inputs[0][1:].view(torch.int32)) == Slot(0, 24)
    assert memory.slot(memory.inputs[0].view(torch.float64)[:, 1]) == Slot(0, 8)


def test_one_tensor_as_two_arguments_has_two_slots() -> None:
    x = torch.zeros(4)
    memory = Placeholders([x, x, x[1:]])
    assert [memory.slot(y).number for y in memory.inputs] == [0, 1, 2]


def test_the_last_byte_of_a_tensor_is_its_own() -> None:
    huge = torch.empty(1, device="meta").expand(1 << 40)
    memory = Placeholders([torch.zeros(1), torch.zeros(1)])
    first = memory.inputs[0].as_strided((SPAN // 4,), (1,))
    assert memory.slot(first[-1]) == Slot(0, SPAN - 4)
    assert huge.numel() * 4 < SPAN  # no tensor is as large


@pytest.mark.parametrize(
    "foreign", [torch.zeros(4), torch.zeros(4)[1:], torch.zeros(4, device="meta")[2:], torch.zeros(0)]
)
def test_a_tensor_that_does_not_belong_to_the_call_raises(foreign: Tensor) -> None:
    memory = Placeholders([torch.zeros(4)])
    with pytest.raises(RuntimeError, match="does not belong to the call"):
        memory.slots((1, View(foreign, (1,))))


def test_allocated_buffers_follow_the_inputs() -> None:
    memory = Placeholders([torch.zeros(4), None])
    out, counters, empty = memory.empty((2, 3), torch.float16), memory.counters(), memory.empty((0, 5), torch.int32)
    assert (out.shape, out.stride(), out.dtype) == ((2, 3), (3, 1), torch.float16)
    assert (counters.shape, counters.dtype) == ((COUNTERS,), torch.int32)
    assert [memory.slot(x) for x in (out, empty, counters)] == [Slot(2), Slot(3), Slot(4)]  # counters are the last
    assert memory.slot(counters[4:]) == Slot(4, 16)
    assert [(x.shape, x.strides, x.dtype) for x in memory.buffers] == [
        ((2, 3), (3, 1), torch.float16), ((0, 5), torch.empty(0, 5).stride(), torch.int32),
    ]  # fmt: skip


class Pair(NamedTuple):
    a: Any
    b: Any


def test_slots_in_nested_arguments() -> None:
    memory = Placeholders([torch.zeros(4, 8), torch.zeros(3)])
    x, y = memory.inputs
    described = SimpleNamespace(base=x[1:], shape=[3, 8], strides=[8, 1], block_shape=[1, 8])
    found = memory.slots((Pair(y, (x, 5)), None, 2.5, "word", described, ()))
    assert found == (Pair(Slot(1), (Slot(0), 5)), None, 2.5, "word", Descriptor(Slot(0, 32), (3, 8), (8, 1)), ())
    assert type(found[0]) is Pair


# A call, with a fake driver


class Parameter(NamedTuple):
    name: str
    is_constexpr: bool


class Kernel:
    """f(x, (y, out), counters, n, BLOCK). Called through Triton, it notes its arguments."""

    params = (*(Parameter(name, False) for name in ("x", "y", "c", "n")), Parameter("BLOCK", True))
    signature = {"x": "*fp16", "y": ("*i64", "*fp32"), "c": "*i32", "n": "i32", "BLOCK": "constexpr"}  # noqa: RUF012
    sizes = (8, 8, 8, 8, 4)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append((grid, args, options))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A GPU with a fake driver: tensors are in the memory of the CPU."""
    with fake_driver.installed(monkeypatch) as found:
        found.stream, found.device, found.devices = 5, 0, 1
        stand_in_for_gpu(monkeypatch, found)
        monkeypatch.setattr(kernel_call, "compile_launches", lambda launches: [
            binary(found, f"f{n}", Kernel.signature, [*Kernel.sizes]) for n, _ in enumerate(launches)
        ])  # fmt: skip
        yield found


class Made:
    """A call of two launches, and one of no programs: out (2, 3) = f(x, y), a workspace, and counters."""

    def __init__(self) -> None:
        self.kernel, self.built = Kernel(), 0

    def __call__(self, tensors: Sequence[Any], target: Any, memory: Any) -> Built:
        self.built += 1
        x, _, y = tensors
        out, room = memory.empty((2, 3), torch.float32), memory.empty((4,), torch.float32)
        counters = memory.counters()
        options = {"BLOCK": 64, "num_warps": 4}
        launches = [
            Launch(self.kernel, 7, (x[1:], (y, out), counters, 3), options),
            Launch(self.kernel, 0, (x, (y, out), counters, 3), options),
            Launch(self.kernel, 2, (x, (y[1:], room[2:]), counters[4:], 5), options),
        ]
        return Built((out, y), launches)


def addresses(launch: Any) -> list[int]:
    return [int.from_bytes(x, "little") for x in launch.read]


def test_a_call_fills_in_the_addresses_of_its_tensors(driver: FakeDriver) -> None:
    made = Made()
    x, y = torch.zeros(4, 8).half(), torch.zeros(3).long()
    call = KernelCall(made, (x, None, y), CUDA)
    for _ in range(2):
        x, y = torch.zeros(4, 8).half(), torch.zeros(3).long()
        out, same = call((x, None, y))
        assert same is y
        assert (out.shape, out.dtype) == ((2, 3), torch.float32)
        first, second = driver.launches[-2:]
        assert [first.grid, second.grid] == [(7, 1, 1), (2, 1, 1)]
        assert first.stream == second.stream == 5
        counters = addresses(first)[3]
        assert addresses(first) == [x.data_ptr() + 16, y.data_ptr(), out.data_ptr(), counters, 3]
        workspace = addresses(second)[2] - 8
        assert addresses(second) == [x.data_ptr(), y.data_ptr() + 8, workspace + 8, counters + 16, 5]
        assert workspace not in (out.data_ptr(), x.data_ptr())
    assert made.built == 1
    assert made.kernel.calls == []
    assert len(driver.launches) == 4


def test_arguments_follow_the_addresses_of_each_call(driver: FakeDriver) -> None:
    x, y = torch.zeros(4, 8).half(), torch.zeros(3).long()
    call = KernelCall(Made(), (x, None, y), CUDA)
    call((x, None, y))
    launches: Any = call.launches
    first = list(launches.idle[0].addresses)
    other = [address + 32 for address in first]
    for given in (first, first, other, first):
        launches(list(given), 5)
        assert addresses(driver.launches[-2])[:3] == [given[0] + 16, given[2], given[3]]


TENSORS = torch.zeros(4, 8).half(), None, torch.zeros(3).long()


def counters_of(driver: Any, call: KernelCall, stream: int = 5, graph: Graph | None = None) -> int:
    """The address of the counters of the next call."""
    driver.stream, driver.graph = stream, graph
    call(TENSORS)
    driver.graph = None
    first, second = driver.launches[-2:]
    assert addresses(second)[3] == addresses(first)[3] + 16
    return addresses(first)[3]


def test_counters_of_a_stream(driver: Any) -> None:
    """Calls on one stream share them. They are zeros, and allocated several at once."""
    call, other = KernelCall(Made(), TENSORS, CUDA), KernelCall(Made(), TENSORS, CUDA)
    used = [counters_of(driver, call, stream) for stream in (5, 5, 6, 5, 6)]
    assert used[0] == used[1] == used[3] != used[2] == used[4]
    assert counters_of(driver, other, 6) == used[-1]
    [memory] = driver.memory
    start = ctypes.addressof(memory)
    assert {*used} <= {*range(start, start + 4 * 4 * COUNTERS, 4 * COUNTERS)}
    assert bytes(memory) == bytes(4 * 4 * COUNTERS)
    assert len({counters_of(driver, call, stream) for stream in range(5, 10)}) == 5
    assert len(driver.memory) == 2


def test_counters_of_a_captured_graph(driver: Any) -> None:
    """A graph may be replayed beside others and beside eager calls, so its counters are its own, for each stream. They
    are never more than that, however many calls it has."""
    call = KernelCall(Made(), TENSORS, CUDA)
    one, two = Graph(), Graph()
    eager = counters_of(driver, call)
    first = [counters_of(driver, call, stream, one) for stream in (5, 6, 5, 6, 5)]
    assert first[0] == first[2] == first[4] != first[1] == first[3]
    others = [counters_of(driver, call, 5, two), counters_of(driver, call, 6, two)]
    assert len({eager, *first, *others}) == 5
    assert counters_of(driver, call) == eager
    assert all(ctypes.string_at(address, 4 * COUNTERS) == bytes(4 * COUNTERS) for address in others)


def test_counters_of_a_graph_come_back(driver: Any) -> None:
    call = KernelCall(Made(), TENSORS, CUDA)
    kept = Graph()
    held = {counters_of(driver, call), counters_of(driver, call, 5, kept)}
    for _ in range(100):
        graph = Graph()
        assert not held & {counters_of(driver, call, stream, graph) for stream in (5, 6)}
        graph.end()
    assert len(driver.memory) == 1
    assert {counters_of(driver, call), counters_of(driver, call, 5, kept)} == held
    many = [Graph() for _ in range(20)]  # that stay
    assert len({counters_of(driver, call, 5, graph) for graph in many} | held) == 22


def test_a_call_whose_first_one_is_captured(driver: Any) -> None:
    """Its counters are allocated during the capture."""
    graph = Graph()
    call = KernelCall(Made(), TENSORS, CUDA)
    captured = counters_of(driver, call, 5, graph)
    assert ctypes.string_at(captured, 4 * COUNTERS) == bytes(4 * COUNTERS)
    assert counters_of(driver, call) != captured


def test_checked_calls_compare_the_counters(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the stream. A kernel that was killed leaves them above zero."""
    address = counters_of(driver, KernelCall(Made(), TENSORS, CUDA))
    number = ctypes.c_int32.from_address(address + 4 * 100)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    KernelCall(Made(), TENSORS, CUDA)
    number.value = 7
    with pytest.raises(AttentionError, match="counters of the stream: found above zero"):
        KernelCall(Made(), TENSORS, CUDA)
    driver.stream = 6
    KernelCall(Made(), TENSORS, CUDA)
    monkeypatch.delenv("TILEWISE_CHECK")
    driver.stream = 5
    KernelCall(Made(), TENSORS, CUDA)


def test_a_call_that_fails_does_not_give_its_counters_to_the_next(driver: Any) -> None:
    """One of its launches may have run, and left them above zero."""
    call = KernelCall(Made(), TENSORS, CUDA)
    before = counters_of(driver, call)
    driver.statuses = [CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_LAUNCH_FAILED]
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        call(TENSORS)
    assert counters_of(driver, call) != before


@pytest.mark.parametrize("position", [0, 1])
def test_a_call_within_a_launch(position: int, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal handler or `__del__`: both calls launch everything, with their own tensors and counters."""
    call = KernelCall(Made(), TENSORS, CUDA)
    other = torch.zeros(4, 8).half(), None, torch.zeros(3).long()
    launch, waiting = driver.cuLaunchKernelEx, [True] * position + [False]

    def interrupted(*given: Any) -> Any:
        if waiting and not waiting.pop(0):
            call(other)
        return launch(*given)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", interrupted)
    call(TENSORS)
    launched = driver.launches
    inner, outer = launched[position : position + 2], [*launched[:position], *launched[position + 2 :]]
    for (first, second), (x, _, y) in ((inner, other), (outer, TENSORS)):
        assert addresses(first)[:2] == [x.data_ptr() + 16, y.data_ptr()]
        assert addresses(second)[:2] == [x.data_ptr(), y.data_ptr() + 8]
        assert addresses(second)[3] == addresses(first)[3] + 16
    assert addresses(inner[0])[3] != addresses(outer[0])[3]


def test_a_launch_that_blocks_holds_up_only_its_stream(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue may wait for a kernel that another thread is about to launch."""
    call = KernelCall(Made(), TENSORS, CUDA)
    entered, leave = threading.Event(), threading.Event()
    launch = driver.cuLaunchKernelEx

    def blocking(config: Any, *given: Any) -> Any:
        if config.hStream == 9:
            entered.set()
            assert leave.wait(20)
        return launch(config, *given)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", blocking)
    monkeypatch.setattr(kernel_call, "current_stream", lambda device: streams.get(threading.get_ident(), 5))
    streams: dict[int, int] = {}
    failures: list[BaseException] = []

    def other() -> None:
        streams[threading.get_ident()] = 9
        try:
            call(TENSORS)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert entered.wait(20)
    here = threading.Thread(target=call, args=(TENSORS,), daemon=True)
    here.start()
    here.join(5)
    assert not here.is_alive(), "waits for the other stream's launch"
    assert [x.stream for x in driver.launches] == [5, 5]
    leave.set()
    thread.join()
    assert not failures
    assert [x.stream for x in driver.launches] == [5, 5, 9, 9]
    assert addresses(driver.launches[0])[3] != addresses(driver.launches[2])[3]


def test_a_call_without_counters_allocates_none(driver: FakeDriver) -> None:
    def build(tensors: Sequence[Any], target: Any, memory: Any) -> Built:
        (x,) = tensors
        return Built((), [Launch(Kernel(), 1, (x, (x, x), x, 3), {"BLOCK": 1})])

    x = torch.zeros(4)
    assert KernelCall(build, (x,), CUDA)((x,)) == []
    assert addresses(driver.launches[0]) == [x.data_ptr()] * 4 + [3]
    assert driver.memory == []


def test_a_call_on_another_device(driver: Any) -> None:
    """Launches, allocations and the stream are those of the call's device."""
    driver.devices, driver.device = 2, 1
    streams = []
    tensors = torch.zeros(4, 8).half(), None, torch.zeros(3).long()
    call = KernelCall(Made(), tensors, CUDA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_call, "current_stream", lambda device: streams.append((device, driver.device)) or 5)
        call(tensors)
    assert streams == [(0, 0)]
    assert driver.device == 1


@pytest.mark.parametrize("hook", ["enter", "exit"])
def test_a_hook_on_launches_sees_them(hook: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profiler's. Triton then launches, and calls the hook."""
    made = Made()
    tensors = torch.zeros(4, 8).half(), None, torch.zeros(3).long()
    call = KernelCall(made, tensors, CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_call.KNOBS, f"launch_{hook}_hook", lambda metadata: None)
        out, _ = call(tensors)
        assert driver.launches == []
        assert [grid for grid, _, _ in made.kernel.calls] == [(7,), (2,)]
        _grid, args, options = made.kernel.calls[0]
        assert args[0].data_ptr() == tensors[0][1:].data_ptr()
        assert args[1][1] is out
        assert options == {"BLOCK": 64, "num_warps": 4}
    call(tensors)
    assert len(driver.launches) == 2


def test_without_the_driver_triton_launches(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "driver", None)
    made = Made()
    tensors = torch.zeros(4, 8).half(), None, torch.zeros(3).long()
    call = KernelCall(made, tensors, CUDA)
    out, y = call(tensors)
    assert y is tensors[2]
    assert out.shape == (2, 3)
    assert len(made.kernel.calls) == 2


def test_an_unaligned_tensor_where_all_were_aligned_is_copied(driver: FakeDriver) -> None:
    """Values and strides stay, also those of a tensor with gaps. Kernels were specialised for aligned addresses."""
    made = Made()
    wide = torch.randn(4, 16).half()[:, :8]
    call = KernelCall(made, (wide, None, torch.zeros(3).long()), CUDA)
    read: list[Tensor] = []
    flat = torch.randn(80).half()
    moved = flat[1:65].view(4, 16)[:, :8]
    assert moved.data_ptr() % 16 == 2
    with pytest.MonkeyPatch.context() as patch:
        run = call.launches
        patch.setattr(call, "launches", Recorded(run, read, moved))
        call((moved, None, torch.zeros(3).long()))
    assert made.kernel.calls == []
    assert len(driver.launches) == 2
    [copy] = read
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, moved)


class Recorded:
    """Prepared launches that note the memory at the first address, with the layout of a tensor."""

    def __init__(self, run: Any, read: list[Tensor], like: Tensor) -> None:
        self.run, self.read, self.like, self.device = run, read, like, run.device

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        if not self.run(addresses, stream):
            return False
        x = self.like
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = (ctypes.c_byte * (span * x.element_size())).from_address(addresses[0])
        flat = torch.frombuffer(bytearray(memory), dtype=x.dtype)
        copy = torch.empty(span + 8, dtype=x.dtype)[:span].copy_(flat)
        self.read.append(copy.as_strided(x.shape, x.stride()))
        assert addresses[0] % 16 == 0
        return True


def test_alignments_that_differ_are_left_to_triton(driver: FakeDriver) -> None:
    """Kernels were specialised for the addresses of the first call, tensor by tensor."""
    made = Made()
    y = torch.zeros(4).long()
    odd, even = unaligned(4, 8), torch.zeros(4, 8).half()
    call = KernelCall(made, (odd, None, y[:3]), CUDA)
    call((odd, None, y[:3]))
    call((unaligned(4, 8), None, y[:3]))
    assert len(driver.launches) == 4
    for tensors in ((even, None, y[:3]), (odd, None, y[1:]), (even, None, y[1:])):
        made.kernel.calls.clear()
        call(tensors)
        assert len(made.kernel.calls) == 2
    assert len(driver.launches) == 4
    eight = torch.zeros(44).half()[4:36].view(4, 8)
    call = KernelCall(made, (eight, None, y[:3]), CUDA)
    made.kernel.calls.clear()
    call((even, None, y[1:]))  # the other tensor is 8 bytes off
    assert len(made.kernel.calls) == 2


def test_arguments_in_the_order_of_the_parameters() -> None:
    launch = Launch(Kernel(), 1, (1, 2, 3, 4), {"num_warps": 8, "BLOCK": 64})
    assert all_arguments(launch) == [1, 2, 3, 4, 64]
