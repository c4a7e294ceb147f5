"""A launch of a kernel: what it is and where it runs, how it is compiled, and its parameters as NVIDIA's
`cuda.bindings` takes them (`kernel_call.py` launches).

Kernels are compiled in parallel threads, with cache keys that every process agrees on. A compiled kernel's parameters
are its arguments in order: tuples are flattened, compile-time constants are left out, and pointers to scratch memory
follow. `cuFuncGetParamInfo` confirms the sizes. Where they differ, or where `cuda.bindings` is not installed, Triton
launches the kernel.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ... import settings
from ...bounded import Bounded
from ...errors import AttentionError
from ...request import INTERPRETER, Gpu, gpu_of, older_target

try:
    from cuda.bindings import driver as driver
except ImportError:  # torch for CPU or AMD
    driver = None

INTERPRETED = settings.interprets()
if isinstance(triton.language.sum, InterpretedFunction) != INTERPRETED:
    raise AttentionError("TRITON_INTERPRET", "another value than when Triton was imported", settings.BEFORE_TRITON)
INTERPRETED_PROCESSORS = 16
OFFLINE_PROCESSORS = 132  # of an H100 and an H200
COUNTERS = 1024  # int32 numbers


class Launch(NamedTuple):
    """A kernel, the number of programs, its arguments and its compile-time options."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        """Launch through Triton. Returns the compiled kernel, or None if it was interpreted or has no programs.

        Triton compiles for the GPU that is here, so code for an older one (`older_target`) is launched without it."""
        if not self.programs:
            return None
        if older_target() is not None and not INTERPRETED:
            return launch_older(self)
        return self.kernel[(self.programs,)](*self.args, **self.options)


def in_order(kernel: Any, **values: Any) -> tuple[Any, ...]:
    """The first arguments of a kernel, given by name, in the order of its parameters. A missing or wrong name is a
    KeyError."""
    return tuple(values[name] for name in kernel.arg_names[: len(values)])


def named(name: str, launches: Sequence[Launch]) -> dict[str, Launch]:
    """At most one launch, by its name."""
    return {name: launches[0]} if launches else {}


class Target(NamedTuple):
    """Where launches run: the kind of GPU and the number of its streaming multiprocessors."""

    gpu: Gpu
    num_sms: int


class Memory(Protocol):
    """What a call allocates: its results and workspaces."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        ...

    def counters(self) -> Tensor:
        """COUNTERS int32 zeros, which the launches leave at zero."""
        ...


class Built(NamedTuple):
    """What a call returns, and its launches in order."""

    results: Sequence[Tensor]
    launches: Sequence[Launch]


# (the call's tensors, where it runs, what allocates) -> results and launches. The tensors may be placeholders.
Build = Callable[[Sequence[Any], Target, Memory], Built]


class DeviceMemory(NamedTuple):
    """Allocates with torch."""

    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def counters(self) -> Tensor:
        return torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)


def target_of(device: torch.device) -> Target:
    """Where the launches for tensors on a device run."""
    return Target(gpu_of(device) or INTERPRETER, multiprocessors(device))


def overlaps() -> bool:
    """Whether a kernel may start before the previous one has ended (pdl.py), on a GPU that can. TILEWISE_NO_OVERLAP=1
    disables this, to find out whether a fault is a race between launches."""
    return not INTERPRETED and settings.allows_overlap()


def can_overlap(gpu: Gpu) -> bool:
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch)."""
    return gpu.kind == "cuda" and gpu.capability >= 90 and overlaps()


def pdl_option(overlap: bool) -> dict[str, bool]:
    """The option of a launch that may overlap. AMD's launches do not know `launch_pdl`."""
    return {"launch_pdl": True} if overlap else {}


def overlapped(overlap: bool) -> dict[str, bool]:
    """The same, for a kernel with an argument OVERLAP."""
    return {"OVERLAP": overlap} | pdl_option(overlap)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


THREADS = 8
LOG_AFTER_SECONDS = 1.0  # seconds before a message says what is being compiled
log = logging.getLogger("tilewise")


def compile_launches(launches: Sequence[Launch]) -> list[Any]:
    """The compiled kernels of launches, from Triton's cache or built now. Logs a message if that takes long."""
    for launch in launches:
        compute_cache_keys(launch)
    with ThreadPoolExecutor(THREADS, "tilewise-compile") as pool, async_mode(pool):
        kernels = [start_compiling(launch, pool) for launch in launches]
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


def start_compiling(launch: Launch, pool: ThreadPoolExecutor | None = None) -> Any:
    older = older_target()
    if older is None:
        return launch.kernel.warmup(*launch.args, grid=(1,), **compile_options(launch))
    return compile_older(launch, older) if pool is None else Pending(pool.submit(compile_older, launch, older))


class Pending(NamedTuple):
    """A kernel that another thread compiles."""

    future: Future[Any]

    def result(self) -> Any:
        return self.future.result()


def compile_older(launch: Launch, gpu: Gpu) -> Any:
    """The kernel of a launch, compiled for a GPU older than the one here. `warmup` compiles for the one here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, target = launch.kernel, GPUTarget("cuda", gpu.arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = compile_options(launch) | {"debug": bool(kernel.debug) or triton.knobs.runtime.debug}
    given["instrumentation_mode"] = triton.knobs.compilation.instrumentation_mode  # as `JITFunction.run`
    bound, specialization, options = bind(*launch.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def launch_older(launch: Launch) -> Any:
    """Compile for an older GPU and launch, for calls that are not prepared; returns the kernel."""
    (binary,) = compile_launches([launch])
    device = torch.cuda.current_device()
    use_context(device)
    parameters = parameters_of(binary, addresses_of(all_arguments(launch)))
    values = [x.bits for x in parameters if isinstance(x, Scalar)]  # all are: a tensor became its address
    cells = array("Q", [*values, 0])
    start, _ = cells.buffer_info()
    pointers = array("Q", [start + 8 * min(n, len(values)) for n in range(len(values) + 2)])  # 2 of scratch memory: 0
    config = launch_config(CompiledLaunch(binary, launch.programs, ()))
    config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
    checked(driver.cuLaunchKernelEx(config, load_function(binary, device), pointers.buffer_info()[0], 0))
    return binary


def addresses_of(x: Any) -> Any:
    """Arguments with the address of every tensor in its place."""
    if isinstance(x, Tensor):
        return Scalar(x.data_ptr())
    if isinstance(x, tuple):
        items = [addresses_of(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return [addresses_of(item) for item in x] if isinstance(x, list) else x


def all_arguments(launch: Launch) -> list[Any]:
    """The arguments of a launch in the order of the kernel's parameters."""
    constants = (launch.options[p.name] for p in launch.kernel.params if p.is_constexpr)
    return [*launch.args, *constants]


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
        older = older_target()
        progress += "" if older is None else f", as {older} code ({settings.TARGET})"
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


KINDS = ["i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp32", "f32", "fp64", "f64"]
FORMATS = dict(zip(KINDS, "?bhiq?BHIQffdd", strict=True))  # of `struct`, by Triton's name of a type
ELEMENTS = {"fp8e4nv": ("UINT8", 1), "fp16": ("FLOAT16", 2), "fp32": ("FLOAT32", 4), "bf16": ("BFLOAT16", 2)}
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ENTRY = 512  # bytes of host memory for the descriptor of one address: 128, its object and two dict entries
UNSUPPORTED_METADATA = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")


class Slot(NamedTuple):
    """A pointer argument: `offset` bytes past the start of the call's tensor `number`."""

    number: int
    offset: int = 0


class Scalar(NamedTuple):
    """An argument that does not depend on the call's tensors, as eight bytes."""

    bits: int

    @classmethod
    def of(cls, kind: str, value: Any) -> Scalar:
        return cls(int.from_bytes(struct.pack("<" + FORMATS[kind], value).ljust(8, b"\0"), "little"))


class TensorMap(Bounded[int, int]):
    """A TMA descriptor argument: the device address of a tensor finds the host address of its descriptor, which the
    driver encodes when it is first looked up."""

    def __init__(self, slot: Slot, kind: str, descriptor: Any, metadata: dict[str, Any]) -> None:
        name, size = ELEMENTS[kind]
        *outer, _ = descriptor.strides
        rank = len(descriptor.shape)
        self.number, self.offset = slot
        super().__init__(0)
        self.descriptors: Bounded[int, Any] = Bounded(0)  # keeps them in memory
        self.head = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"), rank
        self.tail = (
            [driver.cuuint64_t(int(n)) for n in reversed(descriptor.shape)],
            [driver.cuuint64_t(size * int(stride)) for stride in reversed(outer)],
            [driver.cuuint32_t(int(n)) for n in reversed(metadata["block_size"])],
            [driver.cuuint32_t(1) for _ in range(rank)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(int(metadata["swizzle"])),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def keep(self, size: int) -> None:
        """Keep descriptors of as many bytes."""
        self.limit = self.descriptors.limit = max(8, size // TENSOR_MAP_ENTRY)

    def __missing__(self, address: int) -> int:
        descriptor = checked(driver.cuTensorMapEncodeTiled(*self.head, address + self.offset, *self.tail))
        self.descriptors[address] = descriptor
        pointer: int = descriptor.getPtr()
        self[address] = pointer
        return pointer


class CompiledLaunch(NamedTuple):
    """A compiled kernel, its grid, and its arguments with a Slot for every tensor."""

    binary: Any
    programs: int
    args: Sequence[Any]


def can_prepare(launches: Sequence[CompiledLaunch], device: int) -> bool:
    """False where Triton has to launch: without `cuda.bindings`, or if a kernel's parameters are not as expected."""
    if driver is None or not all(has_only_parameters(x.binary) for x in launches):
        return False
    use_context(device)
    for launch in launches:
        sizes = list(sizes_of(launch.binary, launch.args))
        found = parameter_sizes(load_function(launch.binary, device))
        if found[: len(sizes)] != sizes or found[len(sizes) :] not in ([], [8], [8, 8]):
            return False
    return True


def has_only_parameters(binary: Any) -> bool:
    """Whether a kernel needs no scratch memory, cluster or cooperative launch."""
    metadata = binary.metadata
    return getattr(metadata, "num_ctas", 1) == 1 and not any(getattr(metadata, x, 0) for x in UNSUPPORTED_METADATA)


def launch_config(launch: CompiledLaunch) -> Any:
    metadata = launch.binary.metadata
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32 * metadata.num_warps, 1, 1
    config.sharedMemBytes = metadata.shared
    if getattr(metadata, "launch_pdl", False):  # programmatic dependent launch: see pdl.py
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def leaves(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """(type, value) of the arguments that a compiled kernel takes."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, str):
            if kind != "constexpr":
                yield kind, value
        else:
            yield from leaves(kind, value)


def parameters_of(binary: Any, args: Sequence[Any]) -> Iterator[Slot | Scalar | TensorMap]:
    metadata = iter(binary.metadata.tensordesc_meta or ())
    for kind, value in leaves(binary.src.signature.values(), args):
        if kind.startswith("tensordesc"):
            yield TensorMap(value.base, kind[len("tensordesc<") :].partition("[")[0], value, next(metadata))
            yield from (Scalar.of("i32", n) for n in value.shape)
            yield from (Scalar.of("i64", n) for n in value.strides)
        elif kind.startswith("*"):
            yield value
        else:
            yield Scalar.of(kind, value)


def sizes_of(binary: Any, args: Sequence[Any]) -> Iterator[int]:
    """Bytes of each parameter, as expected."""
    for kind, value in leaves(binary.src.signature.values(), args):
        if kind.startswith("tensordesc"):
            yield TENSOR_MAP_BYTES
            yield from (4 for _ in value.shape)
            yield from (8 for _ in value.strides)
        else:
            yield 8 if kind.startswith("*") else struct.calcsize("<" + FORMATS[kind])


def parameter_sizes(function: Any) -> list[int]:
    """Bytes of each parameter, as the driver says."""
    sizes: list[int] = []
    while True:
        status, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if status:
            return sizes
        sizes.append(int(size))


_functions: dict[tuple[int, str], Any] = {}


def load_function(binary: Any, device: int) -> Any:
    """The kernel on the current device. It stays loaded."""
    key = device, binary.hash
    if key not in _functions:
        with allowed_during_capture():
            # a cubin runs on its own architecture; PTX, which ends in a zero byte, also on later ones
            code = binary.asm["cubin"] if older_target() is None else binary.asm["ptx"].encode() + b"\0"
            module = checked(driver.cuModuleLoadData(code))
            function = checked(driver.cuModuleGetFunction(module, binary.metadata.name.encode()))
            if binary.metadata.shared > 48 << 10:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(function, attribute, binary.metadata.shared))
            if hasattr(driver, "cuFuncLoad"):  # the driver may load a kernel when it is first launched
                checked(driver.cuFuncLoad(function))
        _functions[key] = function
    return _functions[key]


def zeros(device: int, size: int) -> int:
    """The address of zero bytes, which stay allocated. They come from the driver: torch's allocator may be serving a
    CUDA graph's private pool, which must not hold memory that outlives the graph. A stream of its own writes them: a
    context with a stream that is captured cannot be synchronised."""
    use_context(device)
    with allowed_during_capture():
        address = checked(driver.cuMemAlloc(size))
        stream = checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        checked(driver.cuMemsetD8Async(address, 0, size, stream))
        checked(driver.cuStreamSynchronize(stream))
        checked(driver.cuStreamDestroy(stream))
    return int(address)


@contextmanager
def allowed_during_capture() -> Iterator[None]:
    """Within it, this thread may allocate memory, load kernels and synchronise a stream while a CUDA graph is captured,
    by this thread or another. Otherwise the driver returns an error and invalidates the capture. (torch's allocator
    does the same.)"""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))


def use_context(device: int) -> None:
    """Make torch's CUDA context of a device current in this thread, if none is."""
    if not int(checked(driver.cuCtxGetCurrent())):
        checked(driver.cuCtxSetCurrent(primary_context(device)))


@cache
def primary_context(device: int) -> Any:
    return checked(driver.cuDevicePrimaryCtxRetain(device))


def checked(result: tuple[Any, ...]) -> Any:
    """The value that a function of the driver returned, or RuntimeError with the driver's message."""
    status, *values = result
    if status:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA: {(text or b'unknown error').decode()} ({int(status)})")
    return values[0] if values else None
