"""Launching through CUDA's driver: what the cells hold, where the parameters point; when Triton launches instead."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.kernels import cuda
from tilewise.kernels.cuda import Job, Slot

DESCRIPTOR = "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout()>"


class Driver:
    """Stands for libcuda: it reads what a launch was given."""

    def __init__(self, repeats_address: bool) -> None:
        self.launches: list[dict[str, Any]] = []
        self.repeats_address, self.maps = repeats_address, 0
        self.contexts = 0
        self.without_context = 0

    def cuLaunchKernelEx(self, config: int, function: int, params: int, extra: None) -> int:  # noqa: N802
        if self.without_context:
            self.without_context -= 1
            return cuda.NO_CONTEXT
        given = cuda.Config.from_address(config)
        places = (ctypes.c_uint64 * 8).from_address(params)
        self.launches.append({
            "grid": tuple(given.grid), "block": tuple(given.block), "stream": given.stream, "count": given.count,
            "cells": [ctypes.string_at(place, 8) for place in places],
            "map": ctypes.string_at(places[1], 128), "map_at": places[1],
        })  # fmt: skip
        return 0

    def cuTensorMapEncodeTiled(self, place: Any, element: int, rank: int, address: Any, *_: Any) -> int:  # noqa: N802
        again = address.value if self.repeats_address else 0
        words = struct.pack("<QII", address.value, element, rank) + struct.pack("<QII", again, element, rank) * 7
        ctypes.memmove(place.value, words, 128)
        self.maps += 1
        return 0

    def cuModuleLoadData(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cuModuleGetFunction(self, function: Any, *_: Any) -> int:  # noqa: N802
        function._obj.value = 77
        return 0

    def cuCtxGetCurrent(self, found: Any) -> int:  # noqa: N802
        return 0

    def cuDevicePrimaryCtxRetain(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, *_: Any) -> int:  # noqa: N802
        self.contexts += 1
        return 0

    def cuFuncSetAttribute(self, *_: Any) -> int:  # noqa: N802
        return 0


PTX = """.visible .entry f(
    .param .u64 .ptr .global .align 1 a, .param .align 64 .b8 b[128], .param .u32 c, .param .u32 d, .param .u64 e,
    .param .u64 f, .param .f32 g, .param .u64 h
)"""


def kernel(name: str, ptx: str = PTX, **unusual: Any) -> Any:
    """A compiled kernel of (pointer, descriptor of two axes, None, (1.5,)) and one pointer to scratch memory."""
    signature = {"x": "*fp32", "d": DESCRIPTOR, "n": "constexpr", "t": ("fp32",)}
    metadata = SimpleNamespace(
        launch_pdl=True, num_warps=4, shared=50_000, name="f", tensordesc_meta=[{"swizzle": 3, "block_size": [8, 8]}],
        **unusual,
    )  # fmt: skip
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), metadata=metadata, asm={"ptx": ptx, "cubin": b""}, hash=name
    )


def arguments() -> list[Any]:
    descriptor = SimpleNamespace(base=Slot(1), shape=[3, 5], strides=[8, 1], block_shape=[8, 8])
    return [Slot(0, 16), descriptor, None, (1.5,)]


@pytest.fixture(params=[False, True], ids=["address first", "address anywhere"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(request.param)
    monkeypatch.setattr(cuda, "_driver", lambda: found)
    return found


def test_a_launch_gives_the_driver_its_arguments(driver: Driver) -> None:
    run = cuda.direct([Job(kernel("one"), 9, arguments())], 2, 0)
    assert run is not None
    run([1000, 2048], 5)
    run([3000, 4096], 6)
    first, second = driver.launches
    assert first["grid"] == (9, 1, 1)
    assert first["block"] == (128, 1, 1)
    assert (first["stream"], second["stream"], first["count"]) == (5, 6, 1)
    pointer, _, rows, columns, stride, one, number, scratch = first["cells"]
    assert struct.unpack("<Q", pointer) == (1016,)
    assert [struct.unpack("<i", x[:4])[0] for x in (rows, columns)] == [3, 5]
    assert [struct.unpack("<q", x)[0] for x in (stride, one)] == [8, 1]
    assert struct.unpack("<f", number[:4]) == (1.5,)
    assert scratch == bytes(8)
    assert struct.unpack("<Q", second["cells"][0]) == (3016,)
    assert struct.unpack("<QII", first["map"][:16]) == (2048, 9, 2)  # bfloat16, two axes
    assert struct.unpack("<Q", second["map"][:8]) == (4096,)
    assert first["map_at"] % 64 == 0


def test_a_descriptor_is_made_for_each_address_only_where_it_must(driver: Driver) -> None:
    run = cuda.direct([Job(kernel("one"), 9, arguments())], 2, 0)
    assert run is not None
    for address in (2048, 4096, 2048):
        run([1000, address], 5)
        given = driver.launches[-1]["map"]
        again = address if driver.repeats_address else 0
        assert struct.unpack("<QIIQII", given[:32]) == (address, 9, 2, again, 9, 2)
    assert driver.maps == 2 + 2 * driver.repeats_address  # two to see whether it must


def test_launches_of_a_call_share_its_addresses(driver: Driver) -> None:
    """Each has its own place in a tensor, its own descriptors and numbers."""
    descriptor = SimpleNamespace(base=Slot(0), shape=[7, 9], strides=[16, 1], block_shape=[8, 8])
    jobs = [Job(kernel("first"), 9, arguments()), Job(kernel("then"), 3, [Slot(2), descriptor, None, (2.5,)])]
    run = cuda.direct(jobs, 3, 0)
    assert run is not None
    for addresses, stream in (([1000, 2048, 5000], 5), ([3000, 4096, 6000], 6)):
        run(addresses, stream)
        one, two = driver.launches[-2:]
        assert (one["grid"], two["grid"]) == ((9, 1, 1), (3, 1, 1))
        assert [x["stream"] for x in (one, two)] == [stream, stream]
        pointers = [struct.unpack("<Q", x["cells"][0])[0] for x in (one, two)]
        assert pointers == [addresses[0] + 16, addresses[2]]
        assert [struct.unpack("<Q", x["map"][:8])[0] for x in (one, two)] == [addresses[1], addresses[0]]
        assert [struct.unpack("<f", x["cells"][6][:4])[0] for x in (one, two)] == [1.5, 2.5]
        assert two["map_at"] % 64 == 0
    assert len(driver.launches) == 4


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    run = cuda.direct([Job(kernel("two"), 1, arguments())], 2, 0)
    assert run is not None
    before, driver.without_context = driver.contexts, 1
    run([1000, 2048], 0)
    assert driver.contexts == before + 1
    assert len(driver.launches) == 1


def test_an_error_of_the_driver_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cuda.direct([Job(kernel("three"), 1, arguments())], 2, 0)
    assert run is not None
    run.launch = lambda *_: 719
    monkeypatch.setattr(driver, "cuGetErrorString", lambda *_: 0, raising=False)
    with pytest.raises(RuntimeError, match="719"):
        run([1000, 2048], 0)


@pytest.mark.parametrize(
    "other",
    [
        kernel("more parameters", PTX.replace(".param .f32 g", ".param .f32 g, .param .u32 more")),
        kernel("other sizes", PTX.replace(".u32 c", ".u64 c")),
        kernel("too many behind", PTX.replace("u64 h", "u64 h, .param .u64 i, .param .u64 j")),
        kernel("scratch", global_scratch_size=16),
        kernel("clusters", num_ctas=2),
    ],
    ids=lambda x: x.hash,
)
def test_what_is_not_known_is_left_to_triton(other: Any, driver: Driver) -> None:
    known = Job(kernel("known"), 1, arguments())
    assert cuda.direct([known, Job(other, 1, arguments())], 2, 0) is None
