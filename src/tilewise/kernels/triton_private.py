"""Every name of Triton that is not public and that host code uses, in one place. Gluon's moving names, which kernels
use, are in `hopper.compat`; what a compiled kernel's parameters are, in `cuda`.

Tested with Triton 3.6.0. What a version lacks is done without: kernels are then compiled one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock, Thread
from typing import Any

import torch
import triton

try:
    from triton.runtime._async_compile import FutureKernel, active_mode
except ImportError:
    FutureKernel = active_mode = None

WORKERS = 8  # kernels that are compiled at once


class Compiler:
    """Triton asks it to compile, by the key of the kernel in its cache: each once, whoever asks first."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(WORKERS, "tilewise-compile")
        self.process = os.getpid()
        self.lock = Lock()
        self.kernels: dict[str, Any] = {}

    def submit(self, key: str, compile_one: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        with self.lock:
            found = self.kernels.get(key)
            if found is None or (found.future.done() and found.future.exception() is not None):
                found = self.kernels[key] = FutureKernel(finalize, self.pool.submit(compile_one))
            return found


_compiler: Compiler | None = None


def remember_key() -> None:
    """Triton names what it keeps by a hash of all its own files, which every process takes up to a second to read. We
    keep that hash beside the kernels, for files of these sizes and times; and begin when Triton is imported, in a
    thread, while the kernels' own modules are read."""
    from triton.runtime import cache as module

    if not hasattr(module, "triton_key"):
        return
    home = Path(triton.__file__).parent
    files = sorted(file for file in home.rglob("*") if file.suffix in (".py", ".so"))
    facts = [str(home), *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
    place = Path(cache_folder()) / f"tilewise-{sha256(' '.join(facts).encode()).hexdigest()}"
    if not place.exists():
        found = module.triton_key()
        place.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            file.write(found)
        Path(file.name).replace(place)
    key = place.read_text()
    module.triton_key = lambda: key


def _quietly() -> None:
    with suppress(OSError):  # a folder that cannot be written: Triton takes its hash itself
        remember_key()


_remembering = Thread(target=_quietly, name="tilewise-key", daemon=True)
if torch.cuda.is_available():
    _remembering.start()


@contextmanager
def side_by_side() -> Iterator[None]:
    """Within, `kernel.warmup` of what is not compiled yet returns at once, with a `future` and a `result()`."""
    global _compiler
    if active_mode is None or active_mode.get() is not None:
        yield
        return
    if _compiler is None or _compiler.process != os.getpid():  # threads do not survive a fork
        _compiler = Compiler()
    if _remembering.ident is not None:
        _remembering.join()
    before = active_mode.set(_compiler)
    try:
        yield
    finally:
        active_mode.reset(before)


def cache_folder() -> str:
    return str(triton.knobs.cache.dir)


def is_hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: then Triton makes them."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
