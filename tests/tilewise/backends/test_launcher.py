"""Prepared launches: what the driver is given, and when Triton launches instead."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from enum import EnumMeta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.tilewise.backends import fake_driver
from tests.tilewise.backends.fake_driver import CUresult, FakeDriver, binary
from tilewise.backends.common import kernel_call
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.kernel_call import Descriptor, prepared
from tilewise.backends.common.launch import CompiledLaunch, Scalar, Slot

DESCRIPTOR = "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout()>"
SIGNATURE = {"x": "*fp32", "d": DESCRIPTOR, "n": "constexpr", "t": ("fp32", ("i64", "constexpr"))}
SIZES = [8, 128, 4, 4, 8, 8, 4, 8]  # pointer, descriptor with shape and strides, fp32, i64
MAP = {"swizzle": 3, "block_size": [8, 16]}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with fake_driver.installed(monkeypatch) as found:
        yield found


def kernel(driver: FakeDriver, name: str = "f", scratch: int = 1, **metadata: Any) -> Any:
    return binary(driver, name, SIGNATURE, [*SIZES, *[8] * scratch], [MAP], **metadata)


def arguments(pointer: Slot = Slot(0, 16), described: Slot = Slot(1), number: float = 1.5) -> list[Any]:  # noqa: B008
    return [pointer, Descriptor(described, (3, 5), (8, 1)), None, (number, (7, 9))]


def of(bits: bytes, kind: str) -> Any:
    return struct.unpack("<" + kind, bits)[0]


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_a_launch_gives_the_driver_its_arguments(scratch: int, driver: FakeDriver) -> None:
    run = prepared([CompiledLaunch(kernel(driver, scratch=scratch), 9, arguments())], 2, 0)
    assert run is not None
    run([1000, 2048], 5)
    run([3000, 4096], 6)
    for launch, addresses, stream in zip(driver.launches, ((1000, 2048), (3000, 4096)), (5, 6), strict=True):
        assert (launch.function, launch.grid, launch.block, launch.stream) == ("f", (9, 1, 1), (128, 1, 1), stream)
        pointer, described, rows, columns, stride, one, number, integer, *null = launch.read
        assert of(pointer, "Q") == addresses[0] + 16
        assert [of(x, "i") for x in (rows, columns)] == [3, 5]
        assert [of(x, "q") for x in (stride, one)] == [8, 1]
        assert (of(number, "f"), of(integer, "q")) == (1.5, 7)
        assert null == [bytes(8)] * scratch
        fields = described.fields
        assert (fields["address"], fields["rank"]) == (addresses[1], 2)
        assert fields["element"].name == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"
        assert (fields["shape"], fields["strides"]) == ([5, 3], [16])  # the last axis first; bytes
        assert (fields["box"], fields["steps"], fields["swizzle"]) == ([16, 8], [1, 1], 3)


@pytest.mark.parametrize(
    ("kind", "size", "value"),
    [
        ("i1", 1, True), ("i8", 1, -5), ("i16", 2, -300), ("i32", 4, -(2**31)), ("i64", 8, -(2**63)), ("u1", 1, False),
        ("u8", 1, 250), ("u16", 2, 65000), ("u32", 4, 2**32 - 1), ("u64", 8, 2**64 - 1), ("fp32", 4, -0.0),
        ("f32", 4, 0.1), ("fp64", 8, 0.1), ("f64", 8, -1e300),
    ],
)  # fmt: skip
def test_scalars(kind: str, size: int, value: Any, driver: FakeDriver) -> None:
    found = binary(driver, "f", {"a": kind, "x": "*i8", "b": kind}, [size, 8, size])
    run = prepared([CompiledLaunch(found, 1, [value, Slot(0), value])], 1, 0)
    assert run is not None
    run([4096], 0)
    first, pointer, second = driver.launches[0].read
    expected = struct.pack("<" + launcher.FORMATS[kind], value)
    assert (first, second, of(pointer, "Q")) == (expected, expected, 4096)
    assert Scalar.of(kind, value).bits.to_bytes(8, "little")[:size] == expected


def test_offsets_aliases_and_absent_tensors(driver: FakeDriver) -> None:
    """Two arguments may point into one tensor, and two tensors of the call may be at one address."""
    found = binary(driver, "f", dict.fromkeys("abcd", "*fp16"), [8] * 4)
    run = prepared([CompiledLaunch(found, 1, [Slot(0), Slot(0, 64), Slot(2), Slot(1, 2)])], 3, 0)
    assert run is not None
    for addresses in ([1024, 2048, 0], [4096, 4096, 4096], [0, 0, 0]):
        run(addresses, 0)
        a, b, c = addresses
        assert [of(x, "Q") for x in driver.launches[-1].read] == [a, a + 64, c, b + 2]


def test_launches_of_a_call_share_its_addresses(driver: FakeDriver) -> None:
    """Each has its own offsets, descriptors and numbers. They run in order on one stream."""
    launches = [
        CompiledLaunch(kernel(driver, "first"), 9, arguments()),
        CompiledLaunch(kernel(driver, "then"), 3, arguments(Slot(2), Slot(0, 32), 2.5)),
    ]
    run = prepared(launches, 3, 0)
    assert run is not None
    for addresses, stream in (([1024, 2048, 5000], 5), ([3072, 4096, 6000], 6), ([1024, 2048, 5000], 6)):
        run(addresses, stream)
        one, two = driver.launches[-2:]
        assert (one.function, two.function) == ("first", "then")
        assert (one.grid, two.grid) == ((9, 1, 1), (3, 1, 1))
        assert (one.stream, two.stream) == (stream, stream)
        assert [of(x.read[0], "Q") for x in (one, two)] == [addresses[0] + 16, addresses[2]]
        assert [x.read[1].fields["address"] for x in (one, two)] == [addresses[1], addresses[0] + 32]
        assert [of(x.read[6], "f") for x in (one, two)] == [1.5, 2.5]
    assert len(driver.launches) == 6


def test_a_descriptor_is_encoded_once_for_each_address(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are kept as a plan's bytes allow; then the oldest eighth is dropped."""
    monkeypatch.setattr(kernel_call, "MAP_BYTES", 16 * launcher.TENSOR_MAP_ENTRY)
    run = prepared([CompiledLaunch(kernel(driver), 9, arguments())], 2, 0)

    def encoded(numbers: Any) -> int:
        assert run is not None
        before = driver.encoded
        for n in numbers:
            run([1000, 1024 * n], 0)
            assert driver.launches.pop().read[1].fields["address"] == 1024 * n
        return driver.encoded - before

    assert encoded((*range(1, 17), *range(1, 17))) == 16
    assert encoded([17, *range(3, 18)]) == 1
    assert len(driver.maps) == 15
    assert encoded([1, 2]) == 2
    assert encoded(range(18, 200)) == 182
    assert len(driver.maps) <= 16
    run = prepared([CompiledLaunch(kernel(driver), 9, arguments())] * 2, 2, 0)  # two share the bytes
    assert run is not None
    for n in range(1, 30):
        run([1000, 1024 * n], 0)
    driver.launches.clear()
    assert len(driver.maps) <= 16


def test_an_address_that_the_driver_refuses(driver: FakeDriver) -> None:
    run = prepared([CompiledLaunch(kernel(driver), 9, arguments())], 2, 0)
    assert run is not None
    run([1000, 2048], 0)
    with pytest.raises(RuntimeError, match="CUDA: unknown error \\(1\\)"):
        run([3000, 2049], 0)
    run([1000, 2048], 0)
    assert [of(x.read[0], "Q") for x in driver.launches] == [1016, 1016]


def test_the_launch_configuration(driver: FakeDriver) -> None:
    plain, large = kernel(driver, "plain", num_warps=8, shared=40_000), kernel(driver, "large", shared=100_000)
    overlapping = kernel(driver, "overlapping", launch_pdl=True)
    launches = [CompiledLaunch(x, n, arguments()) for n, x in enumerate((plain, large, overlapping), 1)]
    run = prepared(launches, 2, 0)
    assert run is not None
    run([1024, 2048], 0)
    assert [x.grid for x in driver.launches] == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert [x.block for x in driver.launches] == [(256, 1, 1), (128, 1, 1), (128, 1, 1)]
    assert [x.shared for x in driver.launches] == [40_000, 100_000, 0]
    assert [len(x.attrs) for x in driver.launches] == [0, 0, 1]
    [attribute] = driver.launches[2].attrs
    assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert [(name, value) for name, _, value in driver.attributes] == [
        ("large", 100_000)
    ]  # above 48 KB it is asked for


def test_kernels_are_loaded_once_for_each_device(driver: FakeDriver) -> None:
    for device in (0, 1, 0, 1):
        assert prepared([CompiledLaunch(kernel(driver), 1, arguments())] * 2, 2, device) is not None
    assert driver.loaded == [b"f"] * 2


def test_a_thread_without_a_context_gets_one(driver: FakeDriver) -> None:
    run = prepared([CompiledLaunch(kernel(driver), 1, arguments())] * 2, 2, 3)
    assert run is not None
    assert driver.contexts == [103]
    driver.current = 0  # as in another thread
    driver.statuses = [CUresult.CUDA_ERROR_INVALID_CONTEXT]
    run([1024, 2048], 0)
    assert driver.contexts == [103, 103]
    assert len(driver.launches) == 2
    run([1024, 2048], 0)
    assert driver.contexts == [103, 103]


@pytest.mark.parametrize(
    "statuses",
    [[CUresult.CUDA_ERROR_LAUNCH_FAILED], [CUresult.CUDA_ERROR_INVALID_CONTEXT, CUresult.CUDA_ERROR_LAUNCH_FAILED]],
    ids=["at once", "after the context"],
)
def test_an_error_of_the_driver_is_raised(statuses: list[CUresult], driver: FakeDriver) -> None:
    run = prepared([CompiledLaunch(kernel(driver), 1, arguments())], 2, 0)
    assert run is not None
    driver.statuses = statuses
    with pytest.raises(RuntimeError, match="CUDA: unspecified launch failure \\(719\\)"):
        run([1024, 2048], 0)
    run([1024, 2048], 0)  # the lock was released
    assert len(driver.launches) == 1


UNEXPECTED = {
    "one more parameter": {"sizes": [*SIZES, 8, 4]},
    "one less": {"sizes": SIZES[:-1]},
    "another size": {"sizes": [8, 128, 8, 4, 8, 8, 4, 8]},
    "another order": {"sizes": [8, 128, 4, 4, 8, 8, 8, 4]},
    "three pointers behind": {"sizes": [*SIZES, 8, 8, 8]},
    "global scratch": {"global_scratch_size": 16},
    "profile scratch": {"profile_scratch_size": 16},
    "cluster": {"num_ctas": 2},
    "cooperative": {"launch_cooperative_grid": True},
}


@pytest.mark.parametrize("case", UNEXPECTED)
def test_kernels_that_are_not_as_expected_are_left_to_triton(case: str, driver: FakeDriver) -> None:
    metadata: dict[str, Any] = dict(UNEXPECTED[case])
    other = binary(driver, "other", SIGNATURE, metadata.pop("sizes", SIZES), [MAP], **metadata)
    expected = CompiledLaunch(kernel(driver), 1, arguments())
    assert prepared([expected], 2, 0) is not None
    assert prepared([expected, CompiledLaunch(other, 1, arguments())], 2, 0) is None


def test_without_cuda_bindings_triton_launches(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = CompiledLaunch(kernel(driver), 1, arguments())
    monkeypatch.setattr(launcher, "driver", None)
    assert prepared([launch], 2, 0) is None


def test_a_call_without_launches(driver: FakeDriver) -> None:
    """For example without queries."""
    run = prepared([], 2, 0)
    assert run is not None
    run([0, 0], 0)
    assert driver.launches == []


def test_threads_do_not_mix_their_addresses(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launches with parameters of its own. The launches of one call follow each other on their stream."""
    run = prepared([CompiledLaunch(kernel(driver), 1, arguments())] * 2, 2, 0)
    assert run is not None
    launch = driver.cuLaunchKernelEx

    def slowly(*x: Any) -> Any:
        time.sleep(0.002)
        return launch(*x)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", slowly)

    def work(n: int) -> None:
        for _ in range(10):
            run([1024 * n, 1024 * n], n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 80
    for x in driver.launches:
        assert of(x.read[0], "Q") == 1024 * x.stream + 16
        assert x.read[1].fields["address"] == 1024 * x.stream
    driver.launches.clear()

    def on_one_stream(n: int) -> None:
        for _ in range(10):
            run([1024 * n, 1024 * n], 5)

    threads = [threading.Thread(target=on_one_stream, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [of(x.read[0], "Q") for x in driver.launches]
    assert found[::2] == found[1::2]
    assert sorted(found) == sorted(1024 * n + 16 for n in range(1, 5) for _ in range(20))


def test_an_interrupt_while_the_stream_is_set(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C: the next call launches on its stream, with its addresses."""
    run = prepared([CompiledLaunch(kernel(driver), 1, arguments())] * 2, 2, 0)
    assert run is not None
    run([1024, 2048], 5)

    def interrupt(stream: int) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver, "CUstream", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run([1024, 2048], 6)
    run([4096, 8192], 6)
    assert [x.stream for x in driver.launches] == [5, 5, 6, 6]
    assert [of(x.read[0], "Q") for x in driver.launches[2:]] == [4096 + 16] * 2


def test_the_bindings_have_the_names_that_are_used() -> None:
    """Those of the fake driver, where NVIDIA's package is installed."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name, x in vars(FakeDriver).items():
        if name.startswith("cu"):
            assert hasattr(real, name)
        elif isinstance(x, EnumMeta):
            assert all(int(getattr(getattr(real, name), item.name)) == item.value for item in x)
        elif name in ("CUlaunchConfig", "CUlaunchAttribute"):
            made = getattr(real, name)()
            assert all(hasattr(made, field) for field in vars(x()))


def test_arguments_are_named_by_the_signature() -> None:
    """Tuples are flattened, and constants are left out, at any depth."""
    kinds = ("*fp32", ("constexpr", ("i32", "constexpr"), ()), "constexpr", "fp32")
    assert list(launcher.leaves(kinds, ("p", (1, (2, 3), ()), (4, 5), 6.0))) == [
        ("*fp32", "p"),
        ("i32", 2),
        ("fp32", 6.0),
    ]
    with pytest.raises(ValueError, match="zip"):
        list(launcher.leaves(kinds, ("p", (1, (2, 3)), None, 6.0)))


def test_a_kernel_without_descriptors_may_say_none(driver: FakeDriver) -> None:
    found = binary(driver, "f", {"x": "*fp32"}, [8])
    found.metadata.tensordesc_meta = None
    assert prepared([CompiledLaunch(found, 1, [Slot(0)])], 1, 0) is not None
    found.metadata = SimpleNamespace(num_warps=4, shared=0, name="f", tensordesc_meta=None, num_ctas=1)
    assert launcher.has_only_parameters(found)
