"""Every name of Triton that is not public and that host code uses, in one place. Gluon's moving names, which kernels
use, are in `hopper.compat`; what a compiled kernel's parameters are, in `cuda`.

Tested with Triton 3.6.0. What a version lacks is done without: kernels are then compiled one after the other.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from io import BytesIO
from pathlib import Path
from threading import Event, Lock, local
from typing import Any

import triton

try:
    from triton.runtime._async_compile import FutureKernel, active_mode
except ImportError:
    FutureKernel = active_mode = None

WORKERS = 8  # kernels that are compiled at once


class Compiler:
    """Triton asks it to compile, by the key of the kernel in its cache: each once, whoever asks first. What was asked
    for waits until `start`.

    A kernel is first built by Python, which does one thing at a time however many threads there are, and then by
    compilers that run side by side. So each is built alone, in the order in which they were started: were they built
    together, all of them would come to the compilers as late as the last."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(WORKERS, "tilewise-compile")
        self.process = os.getpid()
        self.lock = Lock()
        self.kernels: dict[str, Any] = {}
        self.waiting: dict[Any, Callable[[], Any]] = {}
        self.last = Event()  # the latest to be started is built
        self.last.set()

    def submit(self, key: str, compile_one: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        with self.lock:
            found = self.kernels.get(key)
            if found is None or (found.future.done() and found.future.exception() is not None):
                found = self.kernels[key] = FutureKernel(finalize, Future())
                self.waiting[found] = compile_one
            return found

    def start(self, kernels: Iterable[Any] = ()) -> None:
        """These in this order, then whatever else is waiting."""
        with self.lock:
            for kernel in (*kernels, *self.waiting):
                compile_one = self.waiting.pop(kernel, None)
                if compile_one is not None:
                    before, self.last = self.last, Event()
                    self.pool.submit(_compile, kernel.future, compile_one, before, self.last)


def _compile(future: Future[Any], compile_one: Callable[[], Any], before: Event, built: Event) -> None:
    _turn.before, _turn.built = before, built
    try:
        future.set_result(compile_one())
    except BaseException as error:
        future.set_exception(error)
    finally:
        before.wait()  # what was in the cache is not built, and lets nobody go before those who are
        built.set()


_turn = local()  # of a thread that compiles: after which event it may build, and its own
_compiler: Compiler | None = None


def in_turn(build: Callable[..., Any]) -> Callable[..., Any]:
    """The function that builds a kernel; a thread that compiles waits for its turn, and meanwhile nobody looks for
    garbage, of which there is little in a lot of new objects (a tenth of the time)."""

    @wraps(build)
    def alone(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(_turn, "before"):
            return build(*args, **kwargs)
        _turn.before.wait()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return build(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()
            _turn.built.set()

    return alone


@cache
def build_in_turn() -> None:
    from triton.compiler import code_generator as module

    if hasattr(module, "ast_to_ttir"):
        module.ast_to_ttir = in_turn(module.ast_to_ttir)


@cache
def same_key() -> None:
    """Triton names a kernel by its source and by the constants that it and what it calls read; of what it calls only if
    that had a name before: a name depends on which kernels had one earlier, and what one process compiled another did
    not find. Of this library's functions, what is called gets its name first."""
    from triton.runtime.jit import DependenciesFinder

    merge = getattr(DependenciesFinder, "_update_hash", None)
    if merge is None:
        return

    def merged(self: Any, function: Any) -> None:
        if str(getattr(function, "__module__", "")).startswith(__name__.partition(".")[0]):
            _ = function.cache_key
        merge(self, function)

    DependenciesFinder._update_hash = merged


@cache
def quick_key() -> None:
    """Triton names what it keeps by a hash of its own files, which takes every process up to a second: one of them has
    400 MB. What that one's is was written down when it was installed, if it was not changed since."""
    from triton.runtime import cache as module

    key = getattr(module, "triton_key", None)
    known = recorded(Path(triton.__file__).parent / "_C" / f"libtriton{EXTENSION_SUFFIXES[-1]}")
    if known is None or not hasattr(key, "__wrapped__"):
        return
    stand_in = b"its place is taken by what was written down"

    def opened(path: Any, *mode: Any) -> Any:
        return BytesIO(stand_in) if Path(path).name.startswith("libtriton.") else open(path, *mode)

    module.open = opened  # type: ignore[attr-defined]
    try:
        found = key.__wrapped__().replace(sha256(stand_in).hexdigest(), known)
    finally:
        del module.open  # type: ignore[attr-defined]
    module.triton_key = lambda: found


def recorded(file: Path) -> str | None:
    """The hash of an installed file, by what pip wrote down. None where nothing was, or the file is younger."""
    start = "/".join(file.parts[-3:]) + ",sha256="
    for record in file.parents[2].glob("*triton*.dist-info/RECORD"):
        for line in record.read_text("utf-8").splitlines():
            if line.startswith(start):
                digest, size = line.removeprefix(start).split(",")
                found, written = file.stat(), record.stat()
                is_as_installed = str(found.st_size) == size and found.st_mtime <= written.st_mtime
                return urlsafe_b64decode(digest + "=").hex() if is_as_installed else None
    return None


def lines_of(function: Any) -> tuple[list[str], int]:
    """inspect.getsourcelines of a function of this library, sooner: it ends where the last of its instructions does.
    What others wrote is read as it ever was, token by token."""
    code = function.__code__
    ends = [end for _, end, _, _ in code.co_positions() if end is not None]  # none with -X no_debug_ranges
    if not ends or not str(function.__module__).startswith(__name__.partition(".")[0] + "."):
        return inspect.getsourcelines(function)
    first = code.co_firstlineno
    return linecache.getlines(code.co_filename, function.__globals__)[first - 1 : max(ends)], first


class _Inspect:
    """The module `inspect`, as Triton sees it while it reads kernels: that was half of what importing them took."""

    getsourcelines = staticmethod(lines_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def read_quickly() -> None:
    from triton.runtime import jit

    if getattr(jit, "inspect", None) is inspect:
        jit.inspect = _Inspect()  # type: ignore[attr-defined]


read_quickly()


def shared_keys() -> None:
    """What whoever compiles does first, so that others find it."""
    same_key()
    quick_key()


@contextmanager
def side_by_side() -> Iterator[Callable[[Iterable[Any]], None]]:
    """Within, `kernel.warmup` of what is not compiled yet returns at once, with a `future` and a `result()`; they are
    compiled from the end on, or once they are given to what this returns, in that order."""
    global _compiler
    if active_mode is None or active_mode.get() is not None:
        yield lambda kernels: None
        return
    if _compiler is None or _compiler.process != os.getpid():  # threads do not survive a fork
        build_in_turn()
        shared_keys()
        _compiler = Compiler()
    compiler = _compiler
    before = active_mode.set(compiler)
    try:
        yield compiler.start
    finally:
        active_mode.reset(before)
        compiler.start()  # should there have been an error: somebody else may be waiting


def cache_folder() -> str:
    return str(triton.knobs.cache.dir)


def is_hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: then Triton makes them."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
