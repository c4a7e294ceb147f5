from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilewise import AttentionError
from tilewise_lab.costs.devices import DEVICES, KB, cpu, device, from_properties
from tilewise_lab.costs.roofline import attainable, curve, roofs


def test_the_facts_that_the_notes_state_wrongly():
    """128 SMs are on the A100's die, 108 in the product; 48 KB of shared memory is only what nobody asks for."""
    assert [device(name).sms for name in ("A100", "H100", "H200")] == [108, 132, 132]
    assert device("A100").shared == 163 * KB
    assert device("H100").shared == device("H200").shared == 227 * KB
    assert {d.shared_static for d in DEVICES.values()} == {48 * KB}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("l4", "L4"),
    ],
)
def test_names_are_found(asked, found):
    assert device(asked).name == found


@pytest.mark.parametrize("name", ["Voodoo 2", "L40S"])
def test_unknown_names_are_refused(name):
    with pytest.raises(AttentionError, match="H200"):
        device(name)


def test_a_gpu_that_nobody_listed():
    properties = SimpleNamespace(
        major=8, minor=6, multi_processor_count=84, total_memory=24 << 30, clock_rate=1.695e6,
        memory_clock_rate=9.751e6, memory_bus_width=384, shared_memory_per_block_optin=99 * KB,
    )  # fmt: skip
    found = from_properties("NVIDIA GeForce RTX 3090", properties)
    assert (found.capability, found.sms) == (86, 84)
    assert found.bandwidth == pytest.approx(936e9, rel=0.01)
    assert found.flops("bfloat16") > found.flops("float32")


def test_a_gpu_that_is_listed_keeps_its_own_sizes():
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=150_000_000_000, L2_cache_size=60 << 20,
        shared_memory_per_block_optin=227 * KB, shared_memory_per_multiprocessor=228 * KB,
    )  # fmt: skip
    found = from_properties("NVIDIA H200", properties)
    assert found.l2 == 60 << 20
    assert found.flops("bfloat16") == device("H200").flops("bfloat16")


def test_this_cpu_is_measured():
    found = cpu()
    assert found.capability == 0
    assert 1e9 < found.flops("float32") < 1e14
    assert 1e8 < found.bandwidth < 1e13


def test_occupancy_is_what_the_scarcest_resource_allows():
    h200 = device("H200")
    assert h200.blocks_per_sm(shared=112 * KB, registers=128, warps=4) == 2
    assert h200.blocks_per_sm(shared=1 * KB, registers=255, warps=8) == 1
    assert h200.blocks_per_sm(shared=0, registers=32, warps=32) == 2
    assert h200.blocks_per_sm(shared=0, registers=16, warps=32) == 2  # 2048 threads of an SM are 64 warps of 32


def test_the_roofline_has_a_slope_and_a_flat():
    h200 = device("H200")
    ridge = h200.ridge("bfloat16")
    assert attainable(ridge / 2, h200, "bfloat16") == pytest.approx(h200.flops("bfloat16") / 2)
    assert attainable(ridge * 2, h200, "bfloat16") == h200.flops("bfloat16")
    points = curve(h200, "bfloat16")
    assert ridge in [x for x, _ in points]
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_the_slowest_roof_comes_first():
    h200 = device("H200")
    assert roofs(1e12, 1e9, 1e9, h200, "bfloat16")[0].name == "matrix units"
    assert roofs(1e9, 1e9, 1e9, h200, "bfloat16")[0].name == "exponentials"
    assert roofs(1e9, 1e10, 1e6, h200, "bfloat16")[0].name == "memory"


@pytest.mark.parametrize(
    ("name", "share"), [("A100", 2), ("H100", 2), ("H200", 2), ("B200", 2), ("RTX 4090", 64), ("L4", 64)]
)
def test_float64_is_half_of_float32_in_data_centres_alone(name, share):
    known = DEVICES[name]
    assert known.flops("float32") / known.flops("float64") == pytest.approx(share)
