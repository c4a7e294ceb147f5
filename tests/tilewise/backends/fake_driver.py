"""Stands for `cuda.bindings.driver`: it reads the memory that a launch is given, and launches nothing."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_LAUNCH_FAILED = 719


class CUtensorMapDataType(IntEnum):
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9


class CUtensorMapInterleave(IntEnum):
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0


class CUtensorMapSwizzle(IntEnum):
    CU_TENSOR_MAP_SWIZZLE_NONE = 0
    CU_TENSOR_MAP_SWIZZLE_32B = 1
    CU_TENSOR_MAP_SWIZZLE_64B = 2
    CU_TENSOR_MAP_SWIZZLE_128B = 3


class CUtensorMapL2promotion(IntEnum):
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2


class CUtensorMapFloatOOBfill(IntEnum):
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class CUfunction_attribute(IntEnum):  # noqa: N801 - NVIDIA's name
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUstream_flags(IntEnum):  # noqa: N801 - NVIDIA's name
    CU_STREAM_NON_BLOCKING = 1


class CUuserObject_flags(IntEnum):  # noqa: N801 - NVIDIA's name
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1


class CUuserObjectRetain_flags(IntEnum):  # noqa: N801 - NVIDIA's name
    CU_GRAPH_USER_OBJECT_MOVE = 1


class Graph:
    """A graph that is captured, and what it owns."""

    numbers = count(1)

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.owned: list[tuple[int, int]] = []  # a C function, and its argument

    def end(self) -> None:
        """As if the graph and all that was instantiated from it were destroyed."""
        while self.owned:
            function, argument = self.owned.pop()
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


class CUlaunchAttribute:
    def __init__(self) -> None:
        self.id: Any = None
        self.value = SimpleNamespace(programmaticStreamSerializationAllowed=0)


class CUlaunchConfig:
    def __init__(self) -> None:
        self.gridDimX = self.gridDimY = self.gridDimZ = 0
        self.blockDimX = self.blockDimY = self.blockDimZ = 0
        self.sharedMemBytes = self.numAttrs = 0
        self.attrs: list[Any] = []
        self.hStream: Any = 0


class TensorMap:
    """128 bytes whose address is known, and what they were encoded from."""

    def __init__(self, **fields: Any) -> None:
        self.memory = ctypes.create_string_buffer(128)
        self.fields = fields

    def getPtr(self) -> int:  # noqa: N802 - NVIDIA's name
        return ctypes.addressof(self.memory)


class FakeDriver:
    """Functions return what NVIDIA's do: a tuple that begins with the status.

    Attributes:
        sizes: bytes of the parameters of each function, by the name of its kernel.
        launches: what each launch was given.
        statuses: what the next launches return; then they succeed.
        current: the context of this thread, 0 for none.
        mode: of captures. What another thread's capture forbids asserts that it is relaxed.
        graph: that is captured at the moment.
    """

    CUresult = CUresult
    CUtensorMapDataType = CUtensorMapDataType
    CUtensorMapInterleave = CUtensorMapInterleave
    CUtensorMapSwizzle = CUtensorMapSwizzle
    CUtensorMapL2promotion = CUtensorMapL2promotion
    CUtensorMapFloatOOBfill = CUtensorMapFloatOOBfill
    CUlaunchAttributeID = CUlaunchAttributeID
    CUfunction_attribute = CUfunction_attribute
    CUlaunchAttribute = CUlaunchAttribute
    CUlaunchConfig = CUlaunchConfig
    CUstreamCaptureMode = CUstreamCaptureMode
    CUstream_flags = CUstream_flags
    CUuserObject_flags = CUuserObject_flags
    CUuserObjectRetain_flags = CUuserObjectRetain_flags
    CUstream = CUhostFn = cuuint64_t = cuuint32_t = int

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        self.launches: list[SimpleNamespace] = []
        self.statuses: list[CUresult] = []
        self.current, self.contexts = 0, []
        self.encoded = 0
        self.maps: weakref.WeakValueDictionary[int, TensorMap] = weakref.WeakValueDictionary()
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[str, int, int]] = []
        self.memory: list[Any] = []
        self.mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.graph: Graph | None = None

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[Any]:  # noqa: N802
        assert extra == 0
        if self.statuses and (status := self.statuses.pop(0)):
            return (status,)
        sizes = self.sizes[function]
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(params)
        read = [
            self.maps[pointer] if size == 128 else ctypes.string_at(pointer, size)
            for pointer, size in zip(pointers, sizes, strict=True)
        ]
        self.launches.append(
            SimpleNamespace(
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes, stream=int(config.hStream), attrs=config.attrs[: config.numAttrs],
                function=function, read=read,
            )
        )  # fmt: skip
        return (CUresult.CUDA_SUCCESS,)

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, element: Any, rank: int, address: int, shape: Any, strides: Any, box: Any, steps: Any, interleave: Any,
        swizzle: Any, promotion: Any, fill: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        if address % 16:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        self.encoded += 1
        made = TensorMap(
            element=element, rank=rank, address=address, shape=shape, strides=strides, box=box, steps=steps,
            swizzle=swizzle,
        )  # fmt: skip
        self.maps[made.getPtr()] = made
        return CUresult.CUDA_SUCCESS, made

    def cuFuncGetParamInfo(self, function: str, n: int) -> tuple[Any, ...]:  # noqa: N802
        sizes = self.sizes[function]
        if n >= len(sizes):
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return CUresult.CUDA_SUCCESS, sum(sizes[:n]), sizes[n]

    def cuThreadExchangeStreamCaptureMode(self, mode: CUstreamCaptureMode) -> tuple[Any, ...]:  # noqa: N802
        before, self.mode = self.mode, mode
        return CUresult.CUDA_SUCCESS, before

    def allows_during_capture(self) -> bool:
        return self.mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert self.allows_during_capture()
        self.loaded.append(image)
        return CUresult.CUDA_SUCCESS, len(self.loaded)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        if name.decode() not in self.sizes:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return CUresult.CUDA_SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any]:  # noqa: N802
        self.attributes.append((function, attribute, value))
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return CUresult.CUDA_SUCCESS, self.current

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:  # noqa: N802
        self.current = context
        self.contexts.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return CUresult.CUDA_SUCCESS, 100 + device

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.current
        assert self.allows_during_capture()
        self.memory.append(ctypes.create_string_buffer(b"\xff" * size, size))
        return CUresult.CUDA_SUCCESS, ctypes.addressof(self.memory[-1])

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        return CUresult.CUDA_SUCCESS, 77

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any]:  # noqa: N802
        assert stream == 77
        ctypes.memset(address, value, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:  # noqa: N802
        assert stream != 77 or self.allows_during_capture()
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, to: int, address: int, size: int) -> tuple[Any]:  # noqa: N802
        ctypes.memmove(to, address, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamDestroy(self, stream: int) -> tuple[Any]:  # noqa: N802
        assert stream == 77
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.graph is not None
        return CUresult.CUDA_SUCCESS, 1, self.graph.number, self.graph, [], [], 0

    def cuUserObjectCreate(self, argument: int, function: int, count: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert (count, flags) == (1, CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUresult.CUDA_SUCCESS, (function, argument)

    def cuGraphRetainUserObject(self, graph: Graph, owned: Any, count: int, flags: int) -> tuple[Any]:  # noqa: N802
        assert (count, flags) == (1, CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
        graph.owned.append(owned)
        return (CUresult.CUDA_SUCCESS,)

    def cuGetErrorString(self, status: Any) -> tuple[Any, ...]:  # noqa: N802
        if status == CUresult.CUDA_ERROR_LAUNCH_FAILED:
            return CUresult.CUDA_SUCCESS, b"unspecified launch failure"
        return CUresult.CUDA_ERROR_INVALID_VALUE, None


@contextmanager
def installed(monkeypatch: Any) -> Iterator[FakeDriver]:
    """`launch` with a fake driver and nothing loaded."""
    from tilewise.backends.common import kernel_call
    from tilewise.backends.common import launch as launcher

    found = FakeDriver()
    monkeypatch.setattr(launcher, "driver", found)
    monkeypatch.setattr(launcher, "_functions", {})
    for name in ("_counters", "_graphs", "_spare"):
        monkeypatch.setattr(kernel_call, name, {})
    monkeypatch.setattr(kernel_call, "COUNTERS_AT_ONCE", 4)
    launcher.primary_context.cache_clear()
    try:
        yield found
    finally:
        launcher.primary_context.cache_clear()


def binary(
    driver: FakeDriver, name: str, signature: dict[str, Any], sizes: list[int], maps: Any = (), **metadata: Any
) -> Any:
    """A compiled kernel whose parameters have these sizes."""
    driver.sizes[name] = sizes
    fields = {"num_warps": 4, "shared": 0, "name": name, "tensordesc_meta": [*maps]} | metadata
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(**fields), asm={"cubin": name.encode()},
        hash=name,
    )  # fmt: skip
