"""Compiles the kernels of a call: in parallel threads, with cache keys that every process agrees on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from .launch import Launch

THREADS = 8
LOG_AFTER_SECONDS = 1.0  # seconds before a message says what is being compiled
log = logging.getLogger("tilewise")


def compile_launches(launches: Sequence[Launch]) -> list[Any]:
    """The compiled kernels of launches, from Triton's cache or built now. Logs a message if that takes long."""
    for launch in launches:
        compute_cache_keys(launch)
    with ThreadPoolExecutor(THREADS, "tilewise-compile") as pool, async_mode(pool):
        kernels = [start_compiling(launch) for launch in launches]
        log_if_slow([x.future for x in kernels if hasattr(x, "future")])
    return [compiled(launch, x) for launch, x in zip(launches, kernels, strict=True)]


def compiled(launch: Launch, kernel: Any) -> Any:
    """The result of `start_compiling`. CPython 3.11 and early 3.12 may raise SystemError where two threads parse source
    (gh-106905): such a kernel is compiled again, by this thread."""
    try:
        return kernel.result() if hasattr(kernel, "future") else kernel
    except SystemError:
        return start_compiling(launch)


def async_mode(pool: ThreadPoolExecutor) -> Any:
    """Within it, `kernel.warmup` returns a future. Older versions of Triton compile one kernel after the other.

    Errors are raised by `result()` afterwards: on an error within, Triton's mode stays active and refuses the next."""
    mode = getattr(triton, "AsyncCompileMode", None)
    return nullcontext() if mode is None else mode(pool, ignore_errors=True)


def start_compiling(launch: Launch) -> Any:
    return launch.kernel.warmup(*launch.args, grid=(1,), **compile_options(launch))


def compile_options(launch: Launch) -> dict[str, Any]:
    """The options of a launch, as it is compiled here and offline. Triton 3.6 emits overflow checks for Gluon kernels
    and removes them again unless it debugs; leaving them out gives the same PTX in 1/8 less time."""
    if not launch.kernel.is_gluon():
        return launch.options
    return launch.options | {"sanitize_overflow": bool(triton.knobs.runtime.debug)}


def log_if_slow(futures: Sequence[Any]) -> None:
    done, missing = wait(futures, LOG_AFTER_SECONDS)
    if missing:
        kernels = "1 kernel" if len(futures) == 1 else f"{len(futures)} kernels"
        progress = f"{kernels} for a new kind of call, {len(done)} done after {LOG_AFTER_SECONDS:.0f} s"
        hint = "tilewise.warmup and `tilewise warm` compile ahead of time"
        log.warning(f"tilewise: compiling {progress}; Triton keeps them in {triton.knobs.cache.dir} ({hint})")


def compute_cache_keys(launch: Launch) -> None:
    """Compute Triton's cache keys of the device functions that a launch uses, callees first.

    Triton hashes the constants that a function's callees read only if the callee's own key was computed before. Without
    this, the key of a kernel depends on which kernels a process compiled earlier, and another process does not find it.
    """
    seen: set[int] = set()
    for function in (launch.kernel, *functions_in((launch.args, launch.options))):
        _callees_first(function, seen)


def _callees_first(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    names = function.fn.__globals__
    for name in function.fn.__code__.co_names:
        callee = names.get(name)
        if isinstance(callee, JITFunction):
            _callees_first(callee, seen)
    _ = function.cache_key


def functions_in(x: Any) -> Iterator[Any]:
    """The device functions among a launch's arguments, such as mods."""
    if isinstance(x, JITFunction):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from functions_in(item)
    elif isinstance(x, dict):
        yield from functions_in(tuple(x.values()))
