"""The facts of a GPU that decide what attention costs on it.

>>> H200 = device("H200")
>>> H200.sms, H200.shared // 1024, round(H200.ridge("bfloat16"))
(132, 227, 206)

The rates are the vendor's for dense matrices at boost clock; what kernels reach of them is in `predict.py`.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from tilewise.errors import AttentionError
from tilewise.request import Gpu, older_target
from tilewise.settings import TARGET

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s, sizes in bytes, clock in Hz. capability 90 is sm_90; 0 is a CPU."""

    name: str
    capability: int
    sms: int
    clock: float
    bandwidth: float
    memory: int
    l2: int
    shared: int  # of one block, at most
    shared_sm: int  # of all blocks on one SM
    rates: dict[str, float] = field(hash=False)
    shared_static: int = 48 * KB  # of one block, without opting in for more
    registers: int = 64 * KB  # per SM, of 4 bytes
    threads: int = 2048  # per SM
    exps: int = 16  # exponentials per SM and clock

    @property
    def gpu(self) -> Gpu:
        """The key of the kernels' tile tables."""
        return Gpu("cuda", self.capability)

    def flops(self, dtype: str) -> float:
        """FLOP/s of a matrix product in `dtype` with float32 sums (float32: exact products, no TF32)."""
        return self.rates[dtype]

    @property
    def lanes(self) -> float:
        """Ordinary float32 operations per second: 128 lanes on each SM."""
        return 128 * self.sms * self.clock

    def ridge(self, dtype: str) -> float:
        """FLOPs per byte at which the memory roof meets the compute roof."""
        return self.flops(dtype) / self.bandwidth

    def blocks_per_sm(self, *, shared: int, registers: int, warps: int) -> int:
        """How many blocks of a kernel one SM holds at once: the least that any resource allows."""
        per_warp = -(-registers * 32 // 256) * 256  # registers are handed out to warps in units of 256
        return min(
            self.shared_sm // (shared + KB),  # 1 KB per block is the driver's
            self.registers // max(per_warp * warps, 1),
            self.threads // (32 * warps),
            32,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _rates(half: float, single: float, capability: int) -> dict[str, float]:
    """float64: half of float32 on the GPUs of data centres, 1/64 on all others (1/32 before sm_86)."""
    share = 2 if capability in (60, 70, 80, 90, 100) else 64 if capability >= 86 else 32
    return {"float16": half, "bfloat16": half, "float32": single, "float64": single / share}


def _gpu(
    name: str,
    capability: int,
    sms: int,
    ghz: float,
    gbps: float,
    memory: int,
    l2: int,
    shared: int,
    half: float,
    single: float,
    threads: int = 2048,
) -> Device:
    """half, single: TFLOP/s of 16-bit tensor cores with float32 sums, and of float32 units."""
    rates = _rates(half * 1e12, single * 1e12, capability)
    return Device(
        name,
        capability,
        sms,
        ghz * 1e9,
        gbps * 1e9,
        memory * GB,
        l2 * MB,
        shared * KB,
        (shared + 1) * KB,
        rates,
        threads=threads,
    )


# The full GA100 die has 128 SMs and the GH100 144: no product ships with all of them.
DEVICES = {
    d.name: d
    for d in (
        _gpu("A100", 80, 108, 1.410, 2039, 80, 40, 163, 312, 19.5),
        _gpu("A100-40GB", 80, 108, 1.410, 1555, 40, 40, 163, 312, 19.5),
        _gpu("H100", 90, 132, 1.830, 3352, 80, 50, 227, 989, 66.9),
        _gpu("H200", 90, 132, 1.830, 4800, 141, 50, 227, 989, 66.9),
        _gpu("RTX 4090", 89, 128, 2.520, 1008, 24, 72, 99, 165, 82.6, threads=1536),
        _gpu("L4", 89, 58, 2.040, 300, 24, 48, 99, 121, 30.3, threads=1536),
        _gpu("B200", 100, 148, 1.965, 7700, 180, 126, 227, 2250, 75),
    )
}


def device(name: str | None = None) -> Device:
    """A device by name ("H200", "rtx4090"); "cpu" or "cuda" for that of this machine; None: cuda if present, else cpu.

    >>> device("rtx-4090").name
    'RTX 4090'
    """
    import torch

    if name is not None and not isinstance(name, str):
        raise AttentionError("device", repr(name), f"{', '.join(DEVICES)}, 'cuda' or 'cpu'")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return cpu()
    if name.partition(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise AttentionError("device", "'cuda', but no GPU is here", f"one by name: {', '.join(DEVICES)}")
        return from_properties(torch.cuda.get_device_name(name), torch.cuda.get_device_properties(name))
    found = DEVICES.get(_match(name))
    if found is None:
        raise AttentionError("device", repr(name), f"{', '.join(DEVICES)}, 'cuda' or 'cpu'")
    return found


def _match(name: str) -> str:
    """The longest name in DEVICES whose parts all appear in `name`, as whole numbers; "" if there is none."""

    def appears(known: str) -> bool:
        return all(re.search(word + r"(?!\d)" * word[-1].isdigit(), name, re.I) for word in re.split("[ -]", known))

    return max(filter(appears, DEVICES), key=len, default="")


def from_properties(name: str, properties: Any) -> Device:
    """The device of torch's properties: rates of the table if its name is there, else estimated from the properties.
    With TILEWISE_TARGET it is one of that architecture."""
    known, older = DEVICES.get(_match(name)), older_target()
    capability = properties.major * 10 + properties.minor
    if older is not None:
        name, capability = f"{name} as {older} ({TARGET})", older.capability
    sms = properties.multi_processor_count
    clock = getattr(properties, "clock_rate", 1.5e6) * 1e3
    bandwidth = (
        getattr(properties, "memory_clock_rate", 1e6) * 1e3 * 2 * getattr(properties, "memory_bus_width", 256) / 8
    )
    half = sms * clock * {80: 2048, 90: 4096, 100: 8192}.get(capability, 1024)  # FLOPs per SM and clock
    single = sms * clock * (128 if capability == 80 else 256)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * KB)
    return Device(
        name=name,
        capability=capability,
        sms=sms,
        clock=known.clock if known else clock,
        bandwidth=known.bandwidth if known else bandwidth,
        memory=properties.total_memory,
        l2=getattr(properties, "L2_cache_size", known.l2 if known else 4 * MB),
        shared=shared,
        shared_sm=getattr(properties, "shared_memory_per_multiprocessor", shared + KB),
        rates=known.rates if known else _rates(half, single, capability),
        threads=getattr(properties, "max_threads_per_multi_processor", 2048),
    )


@cache
def cpu() -> Device:
    """This CPU. A matrix product and a copy are measured, for a fifth of a second in all."""
    import torch

    cores = torch.get_num_threads()
    a = torch.randn(768, 768)
    single = 2 * 768**3 / _best(lambda: a @ a)
    source, target = torch.empty(2, 32 * MB // 4)
    bandwidth = 2 * 32 * MB / _best(lambda: target.copy_(source))
    rates = {"float16": single, "bfloat16": single, "float32": single, "float64": single / 2}
    return Device("this CPU", 0, cores, 3e9, bandwidth, 0, 32 * MB, 1 * MB, 1 * MB, rates)


def _best(work: Any, seconds: float = 0.1) -> float:
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
