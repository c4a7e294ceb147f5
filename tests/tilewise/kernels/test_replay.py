"""Replaying the launches of an earlier call: only the tensors may differ, and every tensor must."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tilewise.dispatch.memory import signature
from tilewise.kernels import replay
from tilewise.kernels.tile.tuples import View


class Parameter(NamedTuple):
    name: str
    is_constexpr: bool


class Kernel:
    """Stands for a Triton kernel: it remembers what it was called with."""

    params = (Parameter("x", False), Parameter("y", False), Parameter("n", False), Parameter("BLOCK", True))

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.calls.append((grid, *args))


class Launch(NamedTuple):
    kernel: Kernel
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the stand-in for the compiled kernel, which CUDA's driver does not know."""
    monkeypatch.setattr(replay, "runs_on_gpu", lambda x: True)
    monkeypatch.setattr(replay, "compiled", lambda launches, ahead: [made.kernel for made in launches])
    monkeypatch.setattr(replay, "direct", lambda *_: None)
    monkeypatch.setattr(replay, "current_stream", lambda device: 0)
    monkeypatch.setattr(replay, "current_device", lambda: -1)


calls: dict[Any, replay.Recording] = {}


def run(kernel: Kernel, x: torch.Tensor, y: torch.Tensor, builds: list[int]) -> None:
    def build() -> list[Launch]:
        builds.append(1)
        return [
            Launch(kernel, 7, (View(x, x.stride()), y, 5), {"BLOCK": 64, "num_warps": 4}),
            Launch(kernel, 0, (View(x, x.stride()), y, 5), {"BLOCK": 64, "num_warps": 4}),
        ]

    replay.launch((id(kernel), *signature(x, y)), (x, y), build, calls)


def test_a_second_call_takes_its_own_tensors() -> None:
    kernel, builds = Kernel(), []
    x, y, x2, y2 = torch.zeros(2, 3), torch.zeros(4), torch.ones(2, 3), torch.ones(4)
    run(kernel, x, y, builds)
    run(kernel, x2, y2, builds)
    assert builds == [1]
    (_, first, *_), (grid, view, plain, n, block) = kernel.calls
    assert first == View(x.data_ptr(), (3, 1))
    assert grid == (7, 1, 1)
    assert (n, block) == (5, 64)
    assert view == View(x2.data_ptr(), (3, 1))
    assert plain == y2.data_ptr()


def test_other_strides_are_another_call() -> None:
    kernel, builds = Kernel(), []
    y = torch.zeros(4)
    run(kernel, torch.zeros(2, 3), y, builds)
    run(kernel, torch.zeros(3, 2).T, y, builds)
    run(kernel, torch.zeros(2, 3, dtype=torch.float64), y, builds)
    run(kernel, torch.zeros(7)[1:].view(2, 3), y, builds)  # not aligned
    assert len(builds) == 4


def test_the_recording_keeps_no_tensor() -> None:
    kernel = Kernel()
    run(kernel, torch.zeros(2, 3), torch.zeros(4), [])
    [step] = next(found.steps for key, found in calls.items() if key[0] == id(kernel))
    assert not any(isinstance(x, torch.Tensor) for x in [*step.args, *step.args[0]])


def test_one_tensor_in_two_places_is_another_call() -> None:
    kernel, builds = Kernel(), []
    x, y, both = torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4, 1)
    run(kernel, x, y, builds)
    run(kernel, both, both, builds)
    run(kernel, y, x, builds)
    assert len(builds) == 2
    _, _, (_, view, plain, *_) = kernel.calls
    assert view.ptr == y.data_ptr()
    assert plain == x.data_ptr()


def test_a_part_of_the_workspace_lies_where_it_lay_in_the_first() -> None:
    kernel, calls = Kernel(), {}
    for memory in (torch.zeros(9), torch.ones(9)):
        both = torch.zeros(2, 3)  # whose halves are two tensors of the call in one memory
        x, y = both
        part = memory[4:].view(torch.int32)
        made = Launch(kernel, 7, (View(part, (1,)), y, 5), {"BLOCK": 64})
        replay.launch("key", (x, y, memory), lambda made=made: [made], calls)
    _, (_, view, plain, *_) = kernel.calls
    assert view.ptr == memory.data_ptr() + 16
    assert plain == y.data_ptr()


def test_a_view_of_a_tensor_is_that_tensor() -> None:
    kernel, calls = Kernel(), {}
    for _ in range(2):
        x, y = torch.zeros(2, 3, 4)[:, 1:], torch.zeros(4)
        made = Launch(kernel, 7, (View(x.transpose(0, 1), (1,)), y, 5), {"BLOCK": 64})
        replay.launch("key", (x, y), lambda made=made: [made], calls)
    _, (_, view, plain, *_) = kernel.calls
    assert (view.ptr, plain) == (x.data_ptr(), y.data_ptr())


def test_a_strangers_tensor_is_refused() -> None:
    both = torch.zeros(2, 3)
    x, y = both
    made = Launch(Kernel(), 7, (View(x, (1,)), y, 5), {"BLOCK": 64})
    with pytest.raises(KeyError, match="not the call's"):  # though it lies in the memory of one that is
        replay.launch("key", (x,), lambda: [made], {})


def test_launches_of_two_recordings_are_one_call() -> None:
    """Whose tensors are in other places."""
    kernel, x, y, z = Kernel(), torch.zeros(2, 3), torch.zeros(4), torch.zeros(4)
    made = [Launch(kernel, n, (View(x, (3, 1)), other, 5), {"BLOCK": 64}) for n, other in ((7, y), (8, z))]
    one = replay.launch("key", (x, y), lambda: made[:1], {})
    two = replay.launch("key", (z, None, x), lambda: made[1:], {})
    assert one is not None
    assert two is not None
    both = replay.joined([(one, (2, 0)), (two, (1, None, 2))], [y, z], [x])
    assert both.made == (((2, 3), (3, 1), torch.float32),)
    kernel.calls.clear()
    both.launch([100, 200, 300])
    assert kernel.calls == [((7, 1, 1), View(300, (3, 1)), 100, 5, 64), ((8, 1, 1), View(300, (3, 1)), 200, 5, 64)]


def test_without_a_memory_nothing_is_recorded() -> None:
    builds = []

    def build() -> list[Launch]:
        builds.append(1)
        return []

    for _ in range(2):
        replay.launch("key", (torch.zeros(1),), build, None)
    assert len(builds) == 2


class Called:
    """A call that is given q and k, makes `out` and a room, and counts with `zeros` that it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.zeros = Kernel(), torch.zeros(4)
        self.recordings: dict[Any, replay.Recording] = {}
        monkeypatch.setattr(replay, "empty_cuda", lambda *what: torch.empty_strided(what[0], what[1], dtype=what[2]))

    def kept(self, device: int) -> tuple[torch.Tensor]:
        return (self.zeros,)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, room = torch.empty(2, 3), torch.empty(5, dtype=torch.int32)

        def build(zeros: torch.Tensor) -> list[Launch]:
            args = View(q, q.stride()), (k, out, room), zeros
            return [Launch(self.kernel, 7, args, {"BLOCK": 64})]

        replay.whole("forward", (q, None, k), (out, None, room), build, self.recordings, kept=self.kept)
        return out


def test_a_whole_call_runs_from_its_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Called(monkeypatch)
    call(torch.randn(8, 4), torch.randn(4))
    q, k = torch.randn(8, 4), torch.randn(4)
    out, room = call.recordings["forward"].run([q.data_ptr(), k.data_ptr()])
    assert (out.shape, out.dtype, room.shape, room.dtype) == ((2, 3), torch.float32, (5,), torch.int32)
    _, view, (key, result, scratch), zeros, block = call.kernel.calls[-1]
    assert [view.ptr, key, result, scratch, zeros] == [x.data_ptr() for x in (q, k, out, room, call.zeros)]
    assert block == 64


def test_a_recording_is_for_tensors_that_lie_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Called(monkeypatch)
    call(torch.randn(8, 4), torch.randn(4))
    recording, (q, k) = call.recordings["forward"], (torch.randn(8, 4), torch.randn(4))
    assert recording.where((q, k)) == [q.data_ptr(), k.data_ptr()]
    assert recording.where((q.mT.contiguous().mT, k)) is None
    assert recording.where((q, torch.randn(5)[1:])) is None
    assert recording.where((q.to("meta"), k)) is None
    assert recording.where((q.bfloat16(), k)) is None
    leaf = q.clone().requires_grad_()
    assert recording.where((leaf, k)) is None


def test_a_call_that_looks_otherwise_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a backward that is called under autocast once, and then without: both are right, the last is quick."""
    call, q, k = Called(monkeypatch), torch.randn(8, 4), torch.randn(4)
    with torch.inference_mode():
        call(q, k)
    first = call.recordings["forward"]
    assert first.where((q, k)) is None
    call(q, k)
    assert call.recordings["forward"].steps is first.steps
    assert call.recordings["forward"].where((q, k)) is not None


@pytest.mark.parametrize("kind", ["one tensor twice", "an odd address"])
def test_what_cannot_be_told_apart_runs_the_long_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, q = Called(monkeypatch), torch.randn(8, 4)
    for _ in range(2):
        call(q, q if kind == "one tensor twice" else torch.randn(5)[1:])
    assert "forward" not in call.recordings
    assert len(call.kernel.calls) == 2
