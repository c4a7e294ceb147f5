"""What a GPU does not forgive and an interpreter overlooks: addresses outside of a launch's tensors, and programs that
write what others of the same launch touch.

    with guard.watched():
        tilewise.attention_kv(..., backend="triton")      # in Triton's interpreter

Accesses out of bounds read and write other memory without an error; and programs that run one after the
other never meet. Here every load and store of a kernel must lie within a tensor that the launch was given, in lanes
that its mask lets through, and two programs may touch one place only if neither writes to it (atomics aside). A program
may read what another wrote before both updated one place with acquire and release semantics, the writer first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime import interpreter

Addresses = np.ndarray


class OutOfBoundsError(Exception):
    """A lane touches memory that the launch was not given."""


class RaceError(Exception):
    """What a program reads or writes, another one writes."""


def named(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an argument, tuples within tuples included."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, tuple):
        fields = getattr(x, "_fields", range(len(x)))
        for field, item in zip(fields, x, strict=True):
            yield from named(f"{name}.{field}", item)
    elif hasattr(x, "block_shape"):
        yield from named(name, x.base)


def span(x: Tensor) -> tuple[int, int]:
    """Addresses [first, behind the last) that its places lie in.

    >>> import torch
    >>> first, end = span(torch.zeros(4, 4)[:2, :3])
    >>> end - first
    28
    """
    first = x.data_ptr()
    if x.numel() == 0:
        return first, first
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (last + 1) * x.element_size()


class Watch:
    """One launch: the addresses that it may access, and which program accessed which."""

    def __init__(self, kernel: str, tensors: list[tuple[str, Tensor]]) -> None:
        self.kernel = kernel
        self.spans = sorted((*span(x), name) for name, x in tensors if x.numel())
        merged: list[list[int]] = []
        for first, end, _ in self.spans:
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self.first, self.end = (np.array([pair[n] for pair in merged], dtype=np.uint64) for n in range(2))
        self.reads: list[tuple[int, Addresses]] = []
        self.writes: list[tuple[int, Addresses]] = []
        self.written: list[int] = []  # when
        self.known: list[dict[int, int]] = []  # of each read: up to when its program knows the writes of others
        self.released: dict[int, dict[int, int]] = {}  # of an address: when programs released it
        self.acquired: dict[int, dict[int, int]] = {}  # of a program: see `known`

    def synchronize(self, program: int, pointers: Any, mask: Any) -> None:
        """An atomic update that acquires and releases."""
        places, lanes = np.broadcast_arrays(pointers.data, mask.data)
        for at in places[lanes.astype(bool)].reshape(-1).tolist():
            released = self.released.setdefault(at, {})
            self.acquired[program] = self.acquired.get(program, {}) | released
            released[program] = len(self.writes)

    def touch(self, what: str, program: int, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        places, lanes = np.broadcast_arrays(pointers.data, mask.data)
        at = places[lanes.astype(bool)]
        if at.size == 0:
            return
        n = np.searchsorted(self.first, at, side="right").astype(np.int64) - 1
        inside = (n >= 0) & (at + np.uint64(size) <= self.end[np.maximum(n, 0)]) if len(self.end) else n >= 0
        if not inside.all():
            raise OutOfBoundsError(
                f"{self.kernel}, program {program}: {what} of {size} bytes {self.near(at[~inside][0])}"
            )
        if what == "store":
            self.written.append(len(self.writes))
            self.writes.append((program, at.reshape(-1)))
        elif what == "load":
            self.reads.append((program, at.reshape(-1)))
            self.known.append(self.acquired.get(program, {}))

    def near(self, address: Any) -> str:
        """Where an address lies, in words."""
        at = int(address)
        before = [(at - end, f"{at - end} bytes past the end of {name}") for _, end, name in self.spans if end <= at]
        behind = [(first - at, f"{first - at} bytes before {name}") for first, _, name in self.spans if first > at]
        return min(before + behind, default=(0, "of no tensor"))[1]

    def finish(self) -> None:
        if not self.writes:
            return
        who, where = flat(self.writes)
        when = np.concatenate([np.full(len(at), time) for time, (_, at) in zip(self.written, self.writes, strict=True)])
        order = np.argsort(where, kind="stable")
        who, where, when = who[order], where[order], when[order]
        both = (where[1:] == where[:-1]) & (who[1:] != who[:-1])
        if both.any():
            n = int(np.flatnonzero(both)[0])
            raise RaceError(
                f"{self.kernel}: programs {who[n]} and {who[n + 1]} write one place of {self.holder(where[n])}"
            )
        for (reader, read), known in zip(self.reads, self.known, strict=True):
            last = np.maximum(np.searchsorted(where, read, side="right") - 1, 0)
            for m in np.flatnonzero((where[last] == read) & (who[last] != reader)).tolist():
                n = int(last[m])
                if when[n] >= known.get(int(who[n]), 0):
                    raise RaceError(
                        f"{self.kernel}: program {reader} reads what {who[n]} writes, in {self.holder(read[m])}"
                    )

    def holder(self, address: Any) -> str:
        return " or ".join(name for first, end, name in self.spans if first <= int(address) < end)


def flat(touched: list[tuple[int, Addresses]]) -> tuple[np.ndarray, Addresses]:
    programs = np.concatenate([np.full(len(at), program) for program, at in touched])
    return programs, np.concatenate([at for _, at in touched])


@contextmanager
def watched(races: bool = True) -> Iterator[None]:
    """Watch every launch of an interpreted kernel. Without `races` programs may meet, as two tokens for one slot do."""
    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    names = "create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"
    load, store, update, swap = (getattr(builder, name) for name in names)
    run = executor.__call__
    watches: list[Watch] = []

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        given = [*zip(self.arg_names, args, strict=False), *options.items()]
        watch = Watch(self.fn.__name__, [pair for name, x in given for pair in named(name, x)])
        watches.append(watch)
        try:
            run(self, *args, **options)
        finally:
            watches.pop()
        if races:
            watch.finish()

    def touch(self: Any, what: str, pointers: Any, mask: Any) -> None:
        if watches:
            watches[-1].touch(what, self.grid_idx[0], pointers, mask)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        touch(self, "load", pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        touch(self, "store", pointers, mask)
        return store(self, pointers, value, mask, *rest, **more)

    def watched_update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, *rest: Any) -> Any:
        touch(self, "atomic", pointers, mask)
        if watches and sem == ir.MEM_SEMANTIC.ACQUIRE_RELEASE:
            watches[-1].synchronize(self.grid_idx[0], pointers, mask)
        return update(self, op, pointers, value, mask, sem, *rest)

    def watched_swap(self: Any, pointers: Any, *rest: Any) -> Any:
        touch(self, "atomic", pointers, interpreter.TensorHandle(np.ones_like(pointers.data, bool), None))
        return swap(self, pointers, *rest)

    for name, method in zip(names, (watched_load, watched_store, watched_update, watched_swap), strict=True):
        setattr(builder, name, method)
    executor.__call__ = launch
    try:
        yield
    finally:
        for name, method in zip(names, (load, store, update, swap), strict=True):
            setattr(builder, name, method)
        executor.__call__ = run
