"""How kernels are compiled: in parallel threads, with keys that every process agrees on. Nothing is compiled here."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from tests.forks import environment, python  # noqa: E402
from tilewise.backends.common import launch as compiler  # noqa: E402
from tilewise.backends.common.launch import Launch, compile_launches  # noqa: E402

ASYNC = hasattr(triton, "AsyncCompileMode")
needs_async = pytest.mark.skipif(not ASYNC, reason="this Triton compiles one kernel after the other")


class Kernel:
    """A kernel whose compilation is a function. In an AsyncCompileMode its warmup returns a future, as Triton's does.

    Attributes:
        in_cache: whether Triton has it already.
        warmed: the options of every warmup.
    """

    cache_key = "a key"

    def __init__(self, name: str, build: Callable[[], None] = lambda: None, in_cache: bool = False) -> None:
        self.name, self.build, self.in_cache = name, build, in_cache
        self.warmed: list[dict[str, Any]] = []
        self.fn = lambda: None

    def is_gluon(self) -> bool:
        return self.name.startswith("gluon")

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.warmed.append(options)
        if self.in_cache:
            return self.name
        if ASYNC:
            from triton.runtime._async_compile import active_mode

            mode = active_mode.get()
            if mode is not None:
                return mode.submit(self.name, self.compile, lambda kernel: None)
        return self.compile()

    def compile(self) -> str:
        self.build()
        return self.name


def launches(*kernels: Kernel) -> list[Launch]:
    return [Launch(kernel, 3, (), {"BLOCK": 64}) for kernel in kernels]


@needs_async
def test_kernels_are_compiled_in_parallel_and_returned_in_order() -> None:
    together = threading.Barrier(4, timeout=30)
    kernels = [Kernel(str(n), lambda: together.wait() and None) for n in range(4)]
    assert compile_launches(launches(*kernels)) == ["0", "1", "2", "3"]


def test_kernels_in_the_cache_are_taken_from_it() -> None:
    there, new = Kernel("there", pytest.fail, in_cache=True), Kernel("new")
    assert compile_launches(launches(there, new, there)) == ["there", "new", "there"]


def test_a_call_without_launches() -> None:
    assert compile_launches([]) == []


@needs_async
def test_a_kernel_of_two_launches_is_compiled_once() -> None:
    built: list[int] = []
    kernel = Kernel("both", lambda: built.append(1))
    assert compile_launches(launches(kernel, kernel)) == ["both"] * 2
    assert built == [1]


def test_older_versions_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode", raising=False)
    built: list[str] = []
    kernels = [Kernel(str(n), lambda n=n: built.append(str(n))) for n in range(3)]
    assert compile_launches(launches(*kernels)) == ["0", "1", "2"] == built


@pytest.mark.parametrize("position", [0, 1])
def test_an_error_is_raised_and_the_next_call_compiles(position: int) -> None:
    def fail() -> None:
        raise ValueError("out of registers")

    wrong, fine = Kernel("wrong", fail), Kernel("fine")
    both = [fine, fine]
    both[position] = wrong
    for _ in range(2):
        with pytest.raises(ValueError, match="out of registers"):
            compile_launches(launches(*both))
    assert compile_launches(launches(fine)) == ["fine"]
    wrong.build = lambda: None
    assert compile_launches(launches(wrong)) == ["wrong"]


def test_an_error_of_warmup_itself_is_raised_and_the_next_call_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an argument that Triton does not accept."""
    fine, wrong = Kernel("fine"), Kernel("wrong")
    monkeypatch.setattr(wrong, "warmup", lambda **_: pytest.fail("an argument"))
    with pytest.raises(pytest.fail.Exception, match="an argument"):
        compile_launches(launches(fine, wrong))
    assert compile_launches(launches(fine)) == ["fine"]


@needs_async
def test_an_error_of_parsing_in_two_threads_is_compiled_again() -> None:
    """CPython's ast.parse may raise SystemError where two threads are parsing."""
    threads: list[str] = []

    def parse() -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise SystemError("AST constructor recursion depth mismatch")

    assert compile_launches(launches(Kernel("parsed", parse), Kernel("fine"))) == ["parsed", "fine"]
    assert len(threads) == 2
    assert threads[1] == threading.current_thread().name


def test_threads_compile_at_once() -> None:
    kernels = [Kernel(str(n)) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_launches(launches(*kernels)), range(8)))
    assert found == [["0", "1", "2", "3"]] * 8


@pytest.mark.parametrize("debug", [False, True])
def test_gluon_kernels_have_no_overflow_checks_unless_triton_debugs(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
    gluon, plain = Kernel("gluon kernel"), Kernel("plain")
    compile_launches(launches(gluon, plain))
    assert gluon.warmed == [{"BLOCK": 64, "sanitize_overflow": debug}]
    assert plain.warmed == [{"BLOCK": 64}]


@needs_async
def test_a_message_after_a_while(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It says how many kernels are compiled, where they are kept, and what compiles them ahead of time."""
    monkeypatch.setattr(compiler, "LOG_AFTER_SECONDS", 0.05)
    told = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    handler = Handler()
    compiler.log.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, "tilewise"):
            compile_launches(launches(Kernel("slow", lambda: told.wait(30) and None), Kernel("quick")))
    finally:
        compiler.log.removeHandler(handler)
    [record] = caplog.records
    message = record.getMessage()
    assert "compiling 2 kernels" in message
    assert "1 done" in message
    assert str(triton.knobs.cache.dir) in message
    assert "tilewise warm" in message


def test_no_message_of_what_is_quick(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tilewise"):
        compile_launches(launches(Kernel("quick"), Kernel("there", in_cache=True)))
    assert caplog.records == []


def test_functions_among_the_arguments_are_found() -> None:
    """Such as mods, which are compile-time options."""
    script = (
        "from tilewise.backends.common.launch import functions_in\n"
        "from tilewise.backends.common.device.softmax import *\n"
        "from tilewise.backends.common.clear import fill, clear_kernel\n"
        "found = functions_in(({'A': (fill, [clear_kernel, 3]), 'B': None}, fill, 'fill'))\n"
        "assert list(found) == [fill, clear_kernel, fill]\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_key_of_a_kernel_does_not_depend_on_those_before_it() -> None:
    """What one process has compiled, others find."""
    script = [sys.executable, "-m", "tests.tilewise.backends.cache_keys"]
    found = [
        subprocess.run([*script, order], capture_output=True, text=True, env=environment())
        for order in ("sorted", "reversed", "1")
    ]
    for process in found:
        assert process.returncode == 0, process.stderr
    keys = [process.stdout for process in found]
    assert len(keys[0].splitlines()) > 200
    assert keys[1:] == keys[:1] * 2
