"""Compiled Triton kernels and their parameters, as NVIDIA's `cuda.bindings` launches them (`kernel_call.py`).

A kernel's parameters are its arguments in order: tuples are flattened, compile-time constants are left out, and
pointers to scratch memory follow. `cuFuncGetParamInfo` confirms the sizes. Where they differ, or where `cuda.bindings`
is not installed, Triton launches the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

try:
    from cuda.bindings import driver as driver
except ImportError:  # torch for CPU or AMD
    driver = None

KINDS = ["i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp32", "f32", "fp64", "f64"]
FORMATS = dict(zip(KINDS, "?bhiq?BHIQffdd", strict=True))  # of `struct`, by Triton's name of a type
ELEMENTS = {"fp8e4nv": ("UINT8", 1), "fp16": ("FLOAT16", 2), "fp32": ("FLOAT32", 4), "bf16": ("BFLOAT16", 2)}
TENSOR_MAP_BYTES = 128
TENSOR_MAPS = 1024  # addresses for which one descriptor is kept
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


class TensorMap(dict[int, int]):
    """A TMA descriptor argument: the device address of a tensor finds the host address of its descriptor, which the
    driver encodes when it is first looked up."""

    def __init__(self, slot: Slot, kind: str, descriptor: Any, metadata: dict[str, Any]) -> None:
        name, size = ELEMENTS[kind]
        *outer, _ = descriptor.strides
        rank = len(descriptor.shape)
        self.number, self.offset = slot
        self.descriptors: list[Any] = []  # keeps them in memory
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

    def __missing__(self, address: int) -> int:
        if len(self) >= TENSOR_MAPS:
            self.clear()
            self.descriptors.clear()
        descriptor = checked(driver.cuTensorMapEncodeTiled(*self.head, address + self.offset, *self.tail))
        self.descriptors.append(descriptor)
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
    if driver is None or not all(is_plain(x.binary) for x in launches):
        return False
    use_context(device)
    for launch in launches:
        sizes = list(sizes_of(launch.binary, launch.args))
        found = parameter_sizes(load_function(launch.binary, device))
        if found[: len(sizes)] != sizes or found[len(sizes) :] not in ([], [8], [8, 8]):
            return False
    return True


def is_plain(binary: Any) -> bool:
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
        module = checked(driver.cuModuleLoadData(binary.asm["cubin"]))
        function = checked(driver.cuModuleGetFunction(module, binary.metadata.name.encode()))
        if binary.metadata.shared > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, binary.metadata.shared))
        _functions[key] = function
    return _functions[key]


def zeros(device: int, size: int) -> int:
    """The address of zero bytes, which stay allocated. They come from the driver: torch's allocator may be serving a
    CUDA graph's private pool, which must not hold memory that outlives the graph."""
    use_context(device)
    address = checked(driver.cuMemAlloc(size))
    checked(driver.cuMemsetD8(address, 0, size))
    checked(driver.cuCtxSynchronize())
    return int(address)


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
