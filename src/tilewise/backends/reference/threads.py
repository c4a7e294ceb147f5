"""Runs independent work items on threads, each item on one thread.

    each(heads, attend)

torch divides every operation among its threads, and all threads wait for the last one each time. Attention has dozens
of operations per tile; if other programs use the cores too, the waits take ten times as long as the work. Here a thread
runs a whole item, and there is one wait at the end.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ...torch_internals import num_dispatch_modes, profiler_enabled

T = TypeVar("T")
_pools: dict[int, ThreadPoolExecutor] = {}
_making = threading.Lock()


def each(items: Sequence[T], work: Callable[[T], None]) -> None:
    """work(item) for every item, in any order, without gradients; the first error is raised again.

    >>> found = []
    >>> each([1, 2, 3], found.append)
    >>> sorted(found)
    [1, 2, 3]

    If there are too few items, or a profiler or dispatch mode is active, the calling thread runs all items, and torch
    divides the operations.
    """
    threads = torch.get_num_threads()
    if threads < 2 or len(items) < 2 or 2 * len(items) < threads or _is_observed() or not _has_cores(threads):
        with torch.no_grad():
            for item in items:
                work(item)
        return
    left = deque(items)

    def some() -> None:
        with torch.inference_mode():  # inference tensors may be written only under it
            while left:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                try:
                    work(item)
                except BaseException:
                    left.clear()
                    raise

    pool = _pool(threads)
    for done in [pool.submit(some) for _ in range(min(threads, len(items)))]:
        done.result()


def _is_observed() -> bool:
    return num_dispatch_modes() > 0 or (not torch.compiler.is_compiling() and profiler_enabled())


def _has_cores(threads: int) -> bool:
    """Whether this process may use that many cores. OMP_PROC_BIND ties a thread to one of them."""
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) >= threads


def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of this many threads. In each of them torch runs operations on one thread."""
    pool = _pools.get(threads)
    if pool is not None:
        return pool
    with _making:
        if threads not in _pools:
            started = threading.Barrier(threads + 1)

            def alone() -> None:
                torch.get_num_threads()  # initialises the thread; its first operation would reset the number otherwise
                torch.set_num_threads(1)
                started.wait()

            pool = ThreadPoolExecutor(threads, "tilewise", alone)
            for _ in range(threads):
                pool.submit(int)
            started.wait()
            torch.set_num_threads(threads)  # set_num_threads(1) above is also the default of threads started later
            _pools[threads] = pool
    return _pools[threads]


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_pools.clear)
