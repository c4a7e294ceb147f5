"""How a call of a kernel backend runs: its shapes; allocate results and workspaces, fill in addresses, launch.

A `KernelCall` is made once for a kind of call. It builds the launches from placeholders, compiles them, and prepares
their arguments: Triton's own launcher binds every argument in Python and encodes TMA descriptors at every launch, which
takes 10 to 50 us on the host of an H200. A call writes the addresses of its tensors and has the driver launch.

A placeholder is a meta tensor whose address says which tensor of the call it stands for, so launches
are built from shapes alone, and two arguments are never confused because they happen to be the same tensor.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, reduce
from operator import or_
from threading import RLock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ... import settings
from ...errors import AttentionError
from ...request import MAX_HEAD_DIM, BackwardInputs, Request, Spec, heads_are_queries
from ...torch_internals import current_stream, empty_strided_cuda
from . import launch as launcher
from .device.structs import View
from .launch import (
    COUNTERS,
    INTERPRETED,
    Build,
    Built,
    CompiledLaunch,
    DeviceMemory,
    Launch,
    Memory,
    Slot,
    Target,
    TensorMap,
    all_arguments,
    compile_launches,
    target_of,
)

KNOBS = triton.knobs.runtime
MAP_BYTES = 1 << 19  # of the TMA descriptors that one set of parameters keeps
SPAN = 1 << 48  # bytes of the address space that belong to one placeholder
COUNTERS_START = 1 << 61

COUNTERS_BYTES = 4 * COUNTERS
COUNTERS_AT_ONCE = 512  # that are allocated: 2 MB, the granularity of the driver

_locks: dict[tuple[int, int], Any] = {}  # (device, stream) -> held while the launches of a call are enqueued


class CallShape(NamedTuple):
    """The shapes of one call. Packed sequences are tiled together: n_q and n_k are the tokens of all."""

    batch: int
    n_q: int
    n_k: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    packed: bool

    def tiles(self, n: int, block: int) -> int:
        return n // block + self.batch if self.packed else -(-n // block)

    def programs(self, n: int, heads: int, block: int) -> int:
        return self.tiles(n, block) * heads * (1 if self.packed else self.batch)

    def grid(self, n: int, heads: int, block: int) -> tuple[int, int, int]:
        """The arguments `tiles`, `heads` and `batch` of a kernel (structs.Grid)."""
        return self.tiles(n, block), heads, self.batch

    def in_rows(self, heads: int) -> CallShape:
        """The same with `heads` query heads of a group as one head with more queries."""
        return self._replace(n_q=self.n_q * heads, heads=self.heads // max(heads, 1))


def call_shape(request: Request) -> CallShape:
    *_, n_q, heads, d = request.q.shape
    n_k, kv_heads, dv = request.v.shape[-3:]
    batch = request.q.shape[0] if request.cu_q is None else request.cu_q.shape[0] - 1
    return CallShape(batch, n_q, n_k, heads, kv_heads, d, dv, packed=request.cu_q is not None)


def sequences_and_window(request: Request) -> tuple[Any, ...]:
    """The arguments cu_q, cu_k, n_q, n_k, before and after of a kernel."""
    size, spec = call_shape(request), request.spec
    return request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after


def by_group(request: Request, out: Tensor, lse: Tensor) -> tuple[Request, Tensor, Tensor]:
    """The same forward with the heads of a group as queries, if `heads_are_queries`."""
    q, kv_heads = request.q, request.k.shape[-2]
    group, plain = q.shape[-2] // kv_heads, request.cu_q is None and request.is_plain
    if not plain or not heads_are_queries(q.shape[1], group, request.spec.before):
        return request, out, lse
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    lse = lse.unflatten(1, (kv_heads, group)).squeeze(-1)
    return request._replace(q=q, spec=request.spec._replace(after=None)), out, lse


def view(x: Tensor) -> View:
    """The View of a (batch, token, head, dim) or packed (token, head, dim) tensor. Axes of size 1 have stride 0."""
    outer = (0 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride(), strict=False))
    strides = (*outer, x.stride(-1)) if x.dim() == 4 else (0, *outer, x.stride(-1))
    is_large = (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31
    remainders = {stride % 16 for stride in strides[:3]}
    return View(x, (*strides, 1 if is_large else None, 1 if not is_large and remainders in ({8}, {0, 8}) else None))


def new_results(request: Request, memory: Memory) -> tuple[Tensor, Tensor]:
    """Memory for out and lse."""
    *outer, tokens, heads, _ = request.q.shape
    out = memory.empty((*outer, tokens, heads, request.v.shape[-1]), request.result_dtype)
    return out, memory.empty((*outer, heads, tokens), torch.float32)


def new_max_logit(request: Request, memory: Memory) -> Tensor | None:
    """Memory for the largest score of each head, (batch, heads) or packed (heads,), if the call returns it."""
    if not request.spec.max_logit:
        return None
    return memory.empty((*request.q.shape[:-3], request.q.shape[-2]), torch.float32)


def new_gradients(request: Request, memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v."""
    dq, dk, dv = (memory.empty(x.shape, request.result_dtype) for x in request[:3])
    return dq, dk, dv


class Buffer(NamedTuple):
    """A tensor that a call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Placeholders:
    """Meta tensors for the tensors of a call, in one address space: the address says which tensor, and where in it."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.starts: list[int] = []
        self.buffers: list[Buffer] = []  # what the call allocates
        self.has_counters = False
        self.inputs = [
            self._next() if x is None else self._next(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors
        ]

    def _next(
        self, shape: Sequence[int] = (), strides: Sequence[int] = (), dtype: torch.dtype | None = None, low: int = 0
    ) -> Tensor | None:
        """`low` are the lowest bits of the address, on which Triton specialises a kernel."""
        self.starts.append((len(self.starts) + 1) * SPAN + low)
        if dtype is None:
            return None
        space = torch.empty(1 << 62, dtype=torch.uint8, device="meta").view(dtype)
        return space.as_strided(tuple(shape), tuple(strides), self.starts[-1] // dtype.itemsize)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        strides = torch.empty(tuple(shape), device="meta").stride()
        self.buffers.append(Buffer(tuple(shape), strides, dtype))
        x = self._next(shape, strides, dtype)
        assert x is not None
        return x

    def counters(self) -> Tensor:
        """The last of a call's tensors, whatever is allocated after it: see `slot`."""
        self.has_counters = True
        space = torch.empty(1 << 62, dtype=torch.uint8, device="meta").view(torch.int32)
        return space.as_strided((COUNTERS,), (1,), COUNTERS_START // 4)

    def slot(self, x: Tensor) -> Slot:
        """The tensor that a placeholder, or a view of one, stands for, and how many bytes into it."""
        address = int(x.storage_offset()) * x.element_size()  # data_ptr() of a tensor without elements is 0
        if address >= COUNTERS_START:
            return Slot(len(self.starts), address - COUNTERS_START)
        index = address // SPAN - 1
        if index < 0:
            raise RuntimeError("a launch takes a tensor that does not belong to the call")
        return Slot(index, address - self.starts[index])

    def slots(self, x: Any) -> Any:
        """A launch's argument with a Slot in place of every placeholder."""
        if isinstance(x, Tensor):
            return self.slot(x)
        if isinstance(x, tuple):
            items = [self.slots(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        if hasattr(x, "block_shape"):  # a TMA descriptor
            return Descriptor(self.slot(x.base), tuple(x.shape), tuple(x.strides))
        return x


class Descriptor(NamedTuple):
    """A TMA descriptor of a placeholder."""

    base: Slot
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Parameters:
    """The parameters of the launches of one call, in place except for the addresses of the call's tensors.

    Args:
        launches: in order.
        tensors: how many addresses a call has.
        device: where the kernels are loaded.
    """

    __slots__ = ("addresses", "cells", "configured", "lock", "maps", "offsets", "stream", "write")

    def __init__(self, launches: Sequence[CompiledLaunch], tensors: int, device: int) -> None:
        self.stream = -1  # of the latest call
        self.lock: Any = None  # of this stream
        self.addresses: Sequence[int] = ()  # of the latest call, whose parameters are in place
        parameters = [[*launcher.parameters_of(x.binary, x.args)] for x in launches]
        count = sum(map(len, parameters))
        # addresses of the tensors, a null pointer for scratch memory, other values, and pointers to all of these
        self.cells = array("Q", bytes(8 * (tensors + 1 + 2 * count + 2 * len(launches))))
        self.write = struct.Struct(f"={tensors}Q").pack_into
        self.offsets: list[tuple[int, int, int]] = []  # a cell, a tensor, and how many bytes into it the cell points
        self.maps: list[tuple[int, int, TensorMap]] = []  # a cell, and the tensor and the descriptor it points to
        self.configured: list[tuple[Any, Any, int]] = []  # config, function, address of the pointers to its parameters
        start, _ = self.cells.buffer_info()
        value, pointer = tensors + 1, tensors + 1 + count  # the next cells
        for launch, items in zip(launches, parameters, strict=True):
            function = launcher.load_function(launch.binary, device)
            self.configured.append((launcher.launch_config(launch), function, start + 8 * pointer))
            for item in items:
                at = value
                if isinstance(item, TensorMap):
                    self.maps.append((pointer, item.number, item))
                elif isinstance(item, Slot) and item.offset == 0:
                    at = item.number
                elif isinstance(item, Slot):
                    self.offsets.append((value, *item))
                else:
                    self.cells[value] = item.bits
                self.cells[pointer] = start + 8 * at
                value, pointer = value + 1, pointer + 1
            self.cells[pointer] = self.cells[pointer + 1] = start + 8 * tensors
            pointer += 2
        for _, _, descriptors in self.maps:
            descriptors.keep(MAP_BYTES // len(self.maps))


class PreparedLaunches:
    """The launches of one call, in order.

    A call takes a set of parameters and gives it back when everything is launched. So threads do not wait for each
    other, and a signal handler or `__del__` that calls attention within a launch takes another set. A set whose call
    was interrupted is not used again.

    A lock for each stream keeps the launches of one call together: the calls of a KvPlan share its workspace. A thread
    may take it again.
    """

    def __init__(
        self, launches: Sequence[CompiledLaunch], tensors: int, device: int, low_bits: tuple[int, ...] | None
    ) -> None:
        self.compiled, self.tensors, self.device, self.low_bits = launches, tensors, device, low_bits
        self.idle = [Parameters(launches, tensors, device)]

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        """Launch everything on a stream of the current device. The address of an absent tensor is 0.

        Returns False, and launches nothing, if the addresses have other lowest bits than the kernels are for."""
        try:
            mine = self.idle.pop()
        except IndexError:
            mine = Parameters(self.compiled, self.tensors, self.device)
        if addresses != mine.addresses:
            if self.low_bits is not None and low_bits(addresses) != self.low_bits:
                self.idle.append(mine)
                return False
            cells = mine.cells
            mine.write(cells, 0, *addresses)
            for cell, tensor, offset in mine.offsets:
                cells[cell] = addresses[tensor] + offset
            for cell, tensor, descriptors in mine.maps:
                cells[cell] = descriptors[addresses[tensor]]
            mine.addresses = addresses
        if stream != mine.stream:
            mine.lock = _locks.get((self.device, stream)) or _locks.setdefault((self.device, stream), RLock())
            for config, _, _ in mine.configured:
                config.hStream = launcher.driver.CUstream(stream)
            mine.stream = stream
        launch = launcher.driver.cuLaunchKernelEx
        with mine.lock:
            for config, function, parameters in mine.configured:
                (status,) = launch(config, function, parameters, 0)
                if status:
                    if status == launcher.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used CUDA
                        launcher.use_context(self.device)
                        (status,) = launch(config, function, parameters, 0)
                    launcher.checked((status,))
        self.idle.append(mine)
        return True


def prepared(
    launches: Sequence[CompiledLaunch], tensors: int, device: int, low_bits: tuple[int, ...] | None = None
) -> PreparedLaunches | None:
    """None where Triton has to launch. `low_bits`: see the function; None: not compared."""
    return PreparedLaunches(launches, tensors, device, low_bits) if launcher.can_prepare(launches, device) else None


class KernelCall:
    """A function from the tensors of a call to its results. The tensors must have the layouts of the first ones."""

    def __init__(self, build: Build, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.build, self.device, self.target = build, device, target_of(device)
        self.launches: PreparedLaunches | None = None
        self.buffers: list[Buffer] = []
        self.results: list[int] = []
        self.has_counters = False
        self.low_bits = low_bits([0 if x is None else x.data_ptr() for x in tensors])
        if device.type == "cuda" and not INTERPRETED and torch.version.hip is None:
            self.is_only_device = torch.cuda.device_count() == 1
            with torch.cuda.device(device):
                self._prepare(tensors)

    def _prepare(self, tensors: Sequence[Tensor | None]) -> None:
        memory = Placeholders(tensors)
        built = self.build(memory.inputs, self.target, memory)
        launches = [x for x in built.launches if x.programs]
        compiled = [
            CompiledLaunch(binary, launch.programs, [memory.slots(x) for x in all_arguments(launch)])
            for launch, binary in zip(launches, compile_launches(launches), strict=True)
        ]
        count = len(memory.starts) + memory.has_counters
        self.launches = prepared(compiled, count, self.device.index, self.low_bits)
        self.buffers, self.has_counters = memory.buffers, memory.has_counters
        if self.has_counters and settings.checks_contents():
            check_counters(self.device.index, current_stream(self.device.index))
        self.results = [memory.slot(x).number for x in built.results]

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        launches = self.launches
        if launches is None or has_launch_hook():
            return self._launch_with_triton(tensors)
        if not self.is_only_device and launches.device != torch.cuda.current_device():
            with torch.cuda.device(launches.device):
                return self(tensors)
        stream = current_stream(launches.device)
        every = [*tensors, *[empty_strided_cuda(*buffer) for buffer in self.buffers]]
        addresses = [0 if x is None else x.data_ptr() for x in every]
        if self.has_counters:
            free, counters = take_counters(launches.device, stream)
            addresses.append(counters)
            launched = launches(addresses, stream)
            free.append(counters)
        else:
            launched = launches(addresses, stream)
        if launched:
            return [every[n] for n in self.results]
        # misaligned: a saved-tensor hook replaced a tensor, or dlse is a view
        if self.low_bits:
            return self._launch_with_triton(tensors)
        return self([x if x is None or x.data_ptr() & 15 == 0 else aligned_copy(x) for x in tensors])

    def _launch_with_triton(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """In the interpreter, on AMD, without `cuda.bindings`, with a Triton launch hook, for misaligned tensors, and
        for kernels that need more than prepared launches give (see `launch.can_prepare`)."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            built = self.build(tensors, self.target, DeviceMemory(self.device))
            for launch in built.launches:
                launch()
        return list(built.results)


def build_backward(named_launches: Callable[..., dict[str, Launch]], spec: Spec) -> Build:
    """From a backend's launches of a backward by name. Tensors: `Request.tensors()`, out, lse, dout, dlse. Results: dq,
    dk, dv."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:])
        grads = new_gradients(request, memory)
        return Built(grads, list(named_launches(request, bwd_inputs, grads, target, memory).values()))

    return build


# Counters: COUNTERS int32 zeros, which the launches of a call leave at zero. Launches on one stream run one after
# another, so its calls share counters. While the launches of a call are enqueued, no other call has its counters:
# another thread or a signal handler that calls in between takes others. Counters of a call that did not launch
# everything may be left above zero and are not used again.
#
# Launches that are captured into a CUDA graph may be replayed beside any other launch, but not beside those of their
# own graph and stream. So a graph has counters of its own for each stream, from its capture to its end.


class Graph(NamedTuple):
    """A captured graph: the address of a semaphore that CUDA posts when the graph is gone, and its counters."""

    ended: int
    streams: dict[int, list[int]]


_counters: dict[tuple[int, int], list[int]] = {}  # (device, stream) -> addresses that no call has at the moment
_graphs: dict[tuple[int, int], Graph] = {}  # (device, number of the capture)
_spare: dict[int, list[int]] = {}  # device -> addresses that no stream and no graph has
_semaphores: list[int] = []  # addresses of those that no graph has


def take_counters(device: int, stream: int) -> tuple[list[int], int]:
    """The address of counters for a call on a stream of the current device, and the list that gets it back when
    everything is launched."""
    if torch.cuda.is_current_stream_capturing():
        free = _counters_of_capture(device, stream)
    else:
        free = _counters.get((device, stream)) or _counters.setdefault((device, stream), [])
    try:
        return free, free.pop()
    except IndexError:
        return free, _new_counters(device)


def check_counters(device: int, stream: int) -> None:
    """Raises AttentionError if the counters of a stream are not zero: the next kernel would leave out tiles. Waits for
    the stream."""
    if torch.cuda.is_current_stream_capturing():
        return
    driver = launcher.driver
    for address in [*_counters.get((device, stream), ())]:
        memory = (ctypes.c_int32 * COUNTERS)()
        launcher.checked(driver.cuStreamSynchronize(driver.CUstream(stream)))
        launcher.checked(driver.cuMemcpyDtoH(ctypes.addressof(memory), address, COUNTERS_BYTES))
        if any(memory):
            found = "above zero: a kernel was stopped before its end (by a debugger, or an error of the GPU)"
            raise AttentionError("counters of the stream", found, "zeros, which a new process has")


def _new_counters(device: int) -> int:
    """Counters that no stream and no graph has. Lists are read and changed in single steps: a lock that a signal
    handler takes again would never be released."""
    spare = _spare.setdefault(device, [])
    try:
        return spare.pop()
    except IndexError:
        _reclaim_counters(device, spare)
    try:
        return spare.pop()
    except IndexError:
        first = launcher.zeros(device, COUNTERS_AT_ONCE * COUNTERS_BYTES)
        spare.extend(range(first + COUNTERS_BYTES, first + COUNTERS_AT_ONCE * COUNTERS_BYTES, COUNTERS_BYTES))
        return first


def _counters_of_capture(device: int, stream: int) -> list[int]:
    """The counters of the graph that a stream is captured into."""
    driver = launcher.driver
    result = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    launcher.checked(result)
    _, _, number, graph, *_ = result
    key = device, int(number)
    if key not in _graphs:
        _graphs[key] = Graph(_semaphore_of(graph), {})
    return _graphs[key].streams.setdefault(stream, [])


def _reclaim_counters(device: int, spare: list[int]) -> None:
    """Append the counters of graphs that are gone."""
    for key, graph in list(_graphs.items()):
        if key[0] == device and graph.ended and _semaphore_functions().sem_trywait(graph.ended) == 0:
            del _graphs[key]
            _semaphores.append(graph.ended)
            for addresses in graph.streams.values():
                spare.extend(addresses)


def _semaphore_of(graph: Any) -> int:
    """The address of a new semaphore that is posted when a CUDA graph, and all that was instantiated from it, is gone.
    0 if that is not possible: the graph's counters are not used again.

    CUDA calls sem_post itself. A Python function would need the GIL, in a thread of the driver and after the
    interpreter has ended. The memory of semaphores is never freed, because graphs may end after the interpreter.
    """
    functions = _semaphore_functions()
    if functions is None:
        return 0
    try:
        ended = _semaphores.pop()
    except IndexError:
        ended = functions.calloc(1, 64)
        functions.sem_init(ended, 0, 0)
    driver = launcher.driver
    flags = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    post = driver.CUhostFn(ctypes.cast(functions.sem_post, ctypes.c_void_p).value)
    owned = launcher.checked(driver.cuUserObjectCreate(ended, post, 1, int(flags)))
    move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    (status,) = driver.cuGraphRetainUserObject(graph, owned, 1, int(move))
    return 0 if status else int(ended)


@cache
def _semaphore_functions() -> Any:
    """The C library, with its types set, or None without POSIX semaphores."""
    try:
        library = ctypes.CDLL(None)
        pointer = ctypes.c_void_p
        library.calloc.restype, library.calloc.argtypes = pointer, (ctypes.c_size_t, ctypes.c_size_t)
        library.sem_init.argtypes = pointer, ctypes.c_int, ctypes.c_uint
        library.sem_post.argtypes = library.sem_trywait.argtypes = (pointer,)
    except (TypeError, OSError, AttributeError):
        return None
    return library


def low_bits(addresses: Sequence[int]) -> tuple[int, ...]:
    """Addresses modulo 16, on which Triton specialises kernels; () if all are 0. Tensors that a call allocates come
    last and are aligned."""
    if not reduce(or_, addresses) & 15:
        return ()
    found = [address & 15 for address in addresses]
    while not found[-1]:
        found.pop()
    return tuple(found)


def aligned_copy(x: Tensor) -> Tensor:
    """The same values and strides at an aligned address. (`clone` makes a tensor with gaps contiguous.)"""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def has_launch_hook() -> bool:
    """Whether a Triton launch hook is set, which only Triton's launcher calls."""
    enter, leave = KNOBS.launch_enter_hook, KNOBS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
