"""`TensorCache`: tensors that follow from a key alone (indices, orders, offsets), kept for later calls on any stream.

It is the one place that keeps device tensors between calls. A CUDA tensor is safe on one stream only: another stream
may read it before it is written, and its memory is given to other tensors of its own stream once it is dropped. So

- entries are made on a stream of their own, for which the host waits: a kept tensor is complete, for every stream;
- a stream that uses an entry for the first time is recorded with the allocator (`Tensor.record_stream`);
- entries that a CUDA graph has captured are never dropped: the graph reads their memory at every replay. An entry
  cannot be made during a capture, which allows no wait.

Callers must not change the tensors, and must not return them to users.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import AttentionError
from .torch_internals import current_stream, num_dispatch_modes, transform_level

T = TypeVar("T")
MAX_ENTRIES = 4096


class TensorCache:
    """Entries by key and device: at most `max_bytes` bytes of tensors and `max_entries` entries, or one entry. The
    oldest are dropped. `nbytes` is the number of bytes now."""

    def __init__(self, max_bytes: int, max_entries: int = MAX_ENTRIES) -> None:
        self.max_bytes, self.max_entries, self.nbytes = max_bytes, max_entries, 0
        self._entries: dict[Hashable, Entry] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """The value of a key on a device. `make` returns it: tensors, or tuples and lists with tensors, most of them on
        the device. It runs on the CPU where it names no device, and outside of inference mode, so that autograd can
        save the tensors.

        Raises:
            AttentionError: the entry is not there during the capture of a CUDA graph.
        """
        if num_dispatch_modes() and type(torch.empty(0, device="cpu")) is not Tensor:  # fake tensors are of one mode
            return make()
        entry = self._entries.get((key, device))
        if entry is None:
            plain = transform_level() is None and not num_dispatch_modes()
            entry = self._keep((key, device), Entry(_made(device, make) if plain else _made_apart(device, make)))
        if device.type == "cuda":
            entry.used_on(device)
        value: T = entry.value
        return value

    def _keep(self, key: Hashable, entry: Entry) -> Entry:
        with self._lock:
            if key in self._entries:  # made by another thread meanwhile
                return self._entries[key]
            self._entries[key] = entry
            self.nbytes += entry.nbytes
            while len(self._entries) > 1 and (self.nbytes > self.max_bytes or len(self._entries) > self.max_entries):
                self.nbytes -= self._entries.pop(next(iter(self._entries))).nbytes
        return entry


_captured: set[Entry] = set()  # what CUDA graphs read, as long as the process lives: a graph does not say when it ends


class Entry:
    """A value, its tensors and the streams that have used them."""

    __slots__ = ("nbytes", "streams", "tensors", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensors = list(tensors_in(value))
        self.nbytes = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors}.values())
        self.streams: set[int] = set()

    def used_on(self, device: torch.device) -> None:
        """Records the current stream of a CUDA device."""
        stream = current_stream(device.index)
        if stream not in self.streams:
            for x in self.tensors:
                if x.is_cuda:
                    x.record_stream(torch.cuda.current_stream(device))
            self.streams.add(stream)
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_in(x)


def device_of(device: Any) -> torch.device:
    """A device as tensors have it, with its number; None is the CPU."""
    found = torch.device("cpu" if device is None else device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _made(device: torch.device, make: Callable[[], T]) -> T:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        if device.type != "cuda":
            return make()
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise AttentionError(
                    "a call during the capture of a CUDA graph",
                    "one whose tables of indices are not on the GPU yet",
                    "the same call once before the capture",
                )
            stream = _stream(device)
            with torch.cuda.stream(stream):
                value = make()
            stream.synchronize()
    return value


def _made_apart(device: torch.device, make: Callable[[], T]) -> T:
    """In another thread, which has no torch.func transforms and no dispatch modes: their tensors end with them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_made, device, make).result()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
