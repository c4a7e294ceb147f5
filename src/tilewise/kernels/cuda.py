"""The launches of compiled kernels through CUDA's driver library.

Triton's own launcher is a C extension that a C compiler makes for every signature when a kernel first runs, and that
takes longer to read its arguments than the driver to launch. Here they are written once, into cells of eight bytes;
a launch changes those that hold addresses.

What is assumed of Triton: a kernel's parameters are its arguments in order, tuples flattened, those known at compile
time left out, and behind them pointers to scratch memory. The PTX tells whether that holds; where not, Triton launches.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from threading import Lock
from typing import Any, NamedTuple

PLACES = 256  # addresses for which a TMA descriptor is kept, and kernels whose parameters are known
MAP_CELLS = 16  # of a TMA descriptor
FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d", "f64": "d",
}  # fmt: skip
ELEMENTS = {"fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2)}  # CUtensorMapDataType, bytes
UNUSUAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
L2_128B, PDL, MAX_SHARED = 2, 6, 8  # CUtensorMapL2promotion, CUlaunchAttributeID, CUfunction_attribute
NO_CONTEXT = 201  # CUresult
ADDRESSES = (0x7123456789A0, 0x0EDCBA987650)  # that differ in every byte but the lowest's lower half; nothing is there

Addresses = Sequence[int]


class Slot(NamedTuple):
    """Where the address of the call's n-th tensor goes, or of what begins so many bytes behind it."""

    n: int
    offset: int = 0


class Attribute(ctypes.Structure):
    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", c_void_p), ("count", c_uint),
    )  # fmt: skip


class Job(NamedTuple):
    """A compiled kernel, how many programs of it run, and its arguments, addresses among them being slots."""

    binary: Any
    programs: int
    args: Sequence[Any]


class Direct:
    """Launches with all their arguments but the addresses, which are written under a lock: threads share the cells. The
    first cells are the addresses of the call's tensors, for all of its launches; 0 stands for a tensor that is not
    there."""

    __slots__ = ("cells", "configs", "device", "kept", "launch", "launches", "lock", "maps", "parts", "stream", "write")

    def __init__(self, jobs: Sequence[Job], tensors: int, device: int) -> None:
        fields = [list(_fields(job.binary, job.args)) for job in jobs]
        sizes = (MAP_CELLS + 8 if isinstance(x, Maps) else 1 for every in fields for x in every)
        memory = (c_uint64 * (tensors + 1 + sum(sizes)))()
        base = ctypes.addressof(memory)
        self.device, self.launch, self.lock, self.stream = device, _driver().cuLaunchKernelEx, Lock(), 0
        self.cells: Any = memoryview(memory).cast("B").cast("Q")
        self.write = struct.Struct(f"={tensors}Q").pack_into
        self.parts: list[tuple[int, int, int]] = []  # (cell, tensor, bytes behind its beginning)
        self.maps: list[tuple[int, Maps]] = []
        self.configs: list[Config] = []
        self.launches: list[tuple[int, int, int]] = []
        self.kept: list[Any] = [memory]
        scratch, at = base + 8 * tensors, tensors + 1  # of scratch memory there is none
        for job, every in zip(jobs, fields, strict=True):
            places = []
            for x in every:
                if isinstance(x, Slot) and x.offset == 0:
                    places.append(base + 8 * x.n)
                    continue
                if isinstance(x, Maps):
                    at += -(base // 8 + at) % 8  # where one may stand
                    if x.begins_with_address():
                        self.cells[at : at + MAP_CELLS] = x[ADDRESSES[0]]
                        self.parts.append((at, x.n, x.offset))
                    else:
                        self.maps.append((at, x))
                elif isinstance(x, Slot):
                    self.parts.append((at, *x))
                else:
                    self.cells[at] = x.cell
                places.append(base + 8 * at)
                at += MAP_CELLS if isinstance(x, Maps) else 1
            self._add(job, [*places, scratch, scratch])

    def _add(self, job: Job, places: list[int]) -> None:
        metadata = job.binary.metadata
        params, attribute = (c_void_p * len(places))(*places), Attribute(id=PDL, value=(1,))
        config = Config(
            grid=(job.programs, 1, 1), block=(32 * metadata.num_warps, 1, 1), shared=metadata.shared,
            attributes=ctypes.addressof(attribute), count=int(bool(metadata.launch_pdl)),
        )  # fmt: skip
        function = _function(job.binary, self.device)
        self.launches.append((ctypes.addressof(config), function, ctypes.addressof(params)))
        self.configs.append(config)
        self.kept += params, attribute

    def __call__(self, addresses: Addresses, stream: int) -> None:
        with self.lock:
            self.write(self.cells, 0, *addresses)
            for at, n, offset in self.parts:
                self.cells[at] = addresses[n] + offset
            for at, maps in self.maps:
                self.cells[at : at + MAP_CELLS] = maps[addresses[maps.n] + maps.offset]
            if stream != self.stream:
                self.stream = stream
                for config in self.configs:
                    config.stream = stream
            launch = self.launch
            for config_at, function, params_at in self.launches:
                failed = launch(config_at, function, params_at, None)
                if failed == NO_CONTEXT:  # as in a thread of autograd whose memory was all there before
                    attach(self.device)
                    failed = launch(config_at, function, params_at, None)
                if failed:
                    check(failed)


class Number:
    """An argument that no call changes, as its cell."""

    __slots__ = ("cell",)

    def __init__(self, kind: str, value: Any) -> None:
        self.cell = int.from_bytes(struct.pack("<" + FORMATS[kind], value).ljust(8, b"\0"), "little")


class Maps(dict[int, Any]):
    """TMA descriptors by address, where each needs its own: a step of training sees its addresses again, if not always
    in the same company."""

    def __init__(self, kind: str, descriptor: Any, metadata: dict[str, Any]) -> None:
        self.n, self.offset = descriptor.base
        self.element, size = ELEMENTS[kind]
        *outer, _ = descriptor.strides
        rank = len(descriptor.shape)
        self.rank, self.swizzle = rank, int(metadata["swizzle"])
        self.shape = (c_uint64 * rank)(*reversed([int(n) for n in descriptor.shape]))
        self.strides = (c_uint64 * rank)(*(size * int(stride) for stride in reversed(outer)))
        self.box = (c_uint32 * rank)(*reversed([int(n) for n in metadata["block_size"]]))
        self.steps = (c_uint32 * rank)(*(1 for _ in range(rank)))

    def begins_with_address(self) -> bool:
        """Whether nothing but the first cell of a descriptor depends on the address, which stands there: then one
        serves all addresses. NVIDIA does not say so, but it can be seen."""
        one, other = (self[x] for x in ADDRESSES)
        return bool(one[1:] == other[1:] and (one[0], other[0]) == ADDRESSES)

    def __missing__(self, address: int) -> Any:
        if len(self) >= PLACES:
            self.clear()
        memory = (c_uint64 * (2 * MAP_CELLS))()
        first = -ctypes.addressof(memory) % 64 // 8
        place = c_void_p(ctypes.addressof(memory) + 8 * first)
        sizes = self.shape, self.strides, self.box, self.steps
        plain = 0  # neither interleaved nor NaN outside
        encode = _driver().cuTensorMapEncodeTiled
        check(encode(place, self.element, self.rank, c_void_p(address), *sizes, plain, self.swizzle, L2_128B, plain))
        found = self[address] = memoryview(memory).cast("B").cast("Q")[first : first + MAP_CELLS]
        return found


def direct(jobs: Sequence[Job], tensors: int, device: int) -> Direct | None:
    """The launches of a call with so many tensors; None where Triton has to make them."""
    return Direct(jobs, tensors, device) if all(_is_known(job.binary, job.args) for job in jobs) else None


def _is_known(binary: Any, args: Sequence[Any]) -> bool:
    metadata = binary.metadata
    if any(getattr(metadata, name, 0) for name in UNUSUAL) or getattr(metadata, "num_ctas", 1) != 1:
        return False
    try:
        sizes = list(_sizes(binary, args))
    except (KeyError, AttributeError, TypeError, ValueError):
        return False
    found = parameter_sizes(binary.asm["ptx"])
    return found[: len(sizes)] == sizes and found[len(sizes) :] in ([], [8], [8, 8])


@lru_cache(PLACES)
def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel.

    >>> parameter_sizes(".entry f(.param .u64 .ptr .global .align 16 a, .param .align 64 .b8 b[128], .param .f32 c)")
    [8, 128, 4]
    """
    entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", ptx, re.DOTALL)
    sizes = []
    for words in entry.group(1).split(",") if entry else ():
        bits, array = re.search(r"\.[usbf](\d+)\b", words), re.search(r"\[(\d+)\]", words)
        sizes.append((int(bits.group(1)) if bits else 0) // 8 * (int(array.group(1)) if array else 1))
    return sizes


def _leaves(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """(type, value) of the arguments that a compiled kernel takes."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, str):
            if kind != "constexpr":
                yield kind, value
        else:
            yield from _leaves(kind, value)


def _fields(binary: Any, args: Sequence[Any]) -> Iterator[Slot | Number | Maps]:
    metadata = iter(binary.metadata.tensordesc_meta or ())
    for kind, value in _leaves(binary.src.signature.values(), args):
        if kind.startswith("tensordesc"):
            yield Maps(kind[len("tensordesc<") :].partition("[")[0], value, next(metadata))
            yield from (Number("i32", n) for n in value.shape)
            yield from (Number("i64", n) for n in value.strides)
        elif kind.startswith("*"):
            yield Slot(*value)
        else:
            yield Number(kind, value)


def _sizes(binary: Any, args: Sequence[Any]) -> Iterator[int]:
    for kind, value in _leaves(binary.src.signature.values(), args):
        if kind.startswith("tensordesc"):
            yield 8 * MAP_CELLS
            yield from (4 for _ in value.shape)
            yield from (8 for _ in value.strides)
        else:
            yield 8 if kind.startswith("*") else struct.calcsize("<" + FORMATS[kind])


_functions: dict[tuple[int, str], int] = {}


def _function(binary: Any, device: int) -> int:
    """The kernel on the current device; what was loaded stays."""
    key = device, binary.hash
    if key not in _functions:
        attach(device)
        driver, module, function = _driver(), c_void_p(), c_void_p()
        check(driver.cuModuleLoadData(byref(module), binary.asm["cubin"]))
        check(driver.cuModuleGetFunction(byref(function), module, binary.metadata.name.encode()))
        if binary.metadata.shared > 48 << 10:
            check(driver.cuFuncSetAttribute(function, c_int(MAX_SHARED), c_int(binary.metadata.shared)))
        assert function.value is not None
        _functions[key] = function.value
    return _functions[key]


def attach(device: int) -> None:
    """Let this thread use the context in which torch works on a device, if it uses none."""
    found = c_void_p()
    check(_driver().cuCtxGetCurrent(byref(found)))
    if not found:
        check(_driver().cuCtxSetCurrent(_context(device)))


@cache
def _context(device: int) -> c_void_p:
    found = c_void_p()
    check(_driver().cuDevicePrimaryCtxRetain(byref(found), c_int(device)))
    return found


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    return driver


def check(status: int) -> None:
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(c_int(status), byref(words))
        raise RuntimeError(f"CUDA: {(words.value or b'unknown error').decode()} ({status})")
