"""Independent work on all of torch's threads, each operation of it on one.

    each(heads, attend)

torch divides every single operation among its threads, and each time all of them wait for the last. An attention has
dozens of operations per tile; where other programs use the cores too, the waiting takes ten times as long as the work.
Here a thread takes a piece of the work as a whole, and only the end is waited for.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tilewise.torch_internals import is_intercepted, is_profiled

T = TypeVar("T")
_pools: dict[int, ThreadPoolExecutor] = {}
_making = threading.Lock()


def each(items: Sequence[T], work: Callable[[T], None]) -> None:
    """work(item) for every item, in any order, without gradients; the first error is raised again.

    >>> found = []
    >>> each([1, 2, 3], found.append)
    >>> sorted(found)
    [1, 2, 3]

    Where there are too few items to go round, or a profiler or a mode of torch's looks at every operation, the caller
    does it all, and torch divides the operations.
    """
    threads = torch.get_num_threads()
    if threads < 2 or len(items) < 2 or 2 * len(items) < threads or _is_seen() or not _has_cores(threads):
        with torch.no_grad():
            for item in items:
                work(item)
        return
    left = deque(items)

    def some() -> None:
        with torch.inference_mode():  # which also lets it write into tensors that were made under it
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


def _is_seen() -> bool:
    return is_intercepted() or is_profiled()


def _has_cores(threads: int) -> bool:
    """Whether this thread, and those that it starts, may use as many cores. OMP_PROC_BIND ties it to one of them."""
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) >= threads


def _pool(threads: int) -> ThreadPoolExecutor:
    """As many threads, in each of which torch has one."""
    pool = _pools.get(threads)
    if pool is not None:
        return pool
    with _making:
        if threads not in _pools:
            started = threading.Barrier(threads + 1)

            def alone() -> None:
                torch.get_num_threads()  # or the thread would hear what others say once more, at its first operation
                torch.set_num_threads(1)
                started.wait()

            pool = ThreadPoolExecutor(threads, "tilewise", alone)
            for _ in range(threads):
                pool.submit(int)
            started.wait()
            torch.set_num_threads(threads)  # what a thread says of itself, threads that are still to come hear too
            _pools[threads] = pool
    return _pools[threads]


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_pools.clear)
