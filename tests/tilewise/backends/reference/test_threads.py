"""Work divided among threads: all of it is done, nothing of torch's own is changed, and nothing hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.backends.reference.threads import each


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr("tilewise.backends.reference.threads._has_cores", lambda threads: True)
    yield
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_every_item_once_in_threads_where_torch_has_one() -> None:
    found, caller = [], threading.get_ident()
    together = threading.Barrier(3)

    def work(item: int) -> None:
        if item < 3:
            together.wait(20)  # three at once, or this breaks
        found.append((item, torch.get_num_threads(), threading.get_ident() != caller))

    each(range(20), work)
    assert sorted(found) == [(n, 1, True) for n in range(20)]
    assert torch.get_num_threads() == threads_of_a_new_thread() == 3


def test_an_error_is_raised_and_ends_the_work() -> None:
    done = []

    def work(item: int) -> None:
        if item == 2:
            raise ZeroDivisionError
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        each(range(100_000), work)
    assert len(done) < 100_000


class Seen(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("why", ["one thread", "few items", "tied to a core", "a mode", "a profiler"])
def test_the_caller_does_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    idents = set()
    if why == "one thread":
        torch.set_num_threads(1)
    if why == "tied to a core":
        monkeypatch.setattr("tilewise.backends.reference.threads._has_cores", lambda threads: False)
    seen = Seen()
    watching = {"a mode": seen, "a profiler": torch.autograd.profiler.profile()}
    with watching.get(why, torch.no_grad()):
        each(range(1 if why == "few items" else 5), lambda n: idents.add((threading.get_ident(), *torch.ones(1).shape)))
    assert idents == {(threading.get_ident(), 1)}
    assert seen.ops == (5 if why == "a mode" else 0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_attention_is_the_same_however_many_threads(mode: type) -> None:
    inputs = [torch.randn(2, 70, 6, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for n in (1, 3):
        torch.set_num_threads(n)
        with mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilewise.backends.reference.tiled.PART_SCORES", 1)
            out, lse = tilewise.attention(*inputs, causal=True, return_lse=True)
            grads = torch.autograd.grad((out.square().sum(), lse.sum()), inputs) if out.requires_grad else ()
        found.append((out, lse, *grads))
    for one, three in zip(*found, strict=True):
        assert_close(three, one, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    each(range(5), lambda n: None)  # the parent's exist
    child = os.fork()
    if child == 0:
        found: list[int] = []
        each(range(5), found.append)
        os._exit(0 if sorted(found) == [0, 1, 2, 3, 4] else 1)
    timer = threading.Timer(20, os.kill, (child, 9))  # it hangs where it waits for threads that it has not
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert status == 0
