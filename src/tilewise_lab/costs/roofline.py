"""The roofline: a kernel runs no faster than its matrix units, nor than memory feeds them.

    FLOP/s  <=  min(peak, intensity · bandwidth),        intensity = FLOPs / bytes

>>> from tilewise_lab.costs.devices import device
>>> # left of the ridge at 206: memory-bound
>>> attainable(100.0, device("H200"), "bfloat16") / 1e12
480.0
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise_lab.costs.devices import Device


class Roof(NamedTuple):
    """A resource, and the seconds it alone would need: the largest of them binds."""

    name: str
    seconds: float


def attainable(intensity: float, device: Device, dtype: str) -> float:
    return min(device.flops(dtype), intensity * device.bandwidth)


def roofs(flops: float, moved: float, exps: float, device: Device, dtype: str, operations: float = 0) -> list[Roof]:
    """What binds, slowest first. Exponentials have their own units, and at head dim 64 these can be the roof.

    >>> from tilewise_lab.costs.devices import device
    >>> [roof.name for roof in roofs(1e12, 1e9, 4e9, device("H200"), "bfloat16")]
    ['exponentials', 'matrix units', 'memory']
    """
    found = [
        Roof("matrix units", flops / device.flops(dtype)),
        Roof("memory", moved / device.bandwidth),
    ]
    if device.capability:
        found.append(Roof("exponentials", exps / (device.exps * device.sms * device.clock)))
    if device.capability and operations:
        found.append(Roof("score terms", operations / device.lanes))
    return sorted(found, key=lambda roof: -roof.seconds)


def curve(
    device: Device, dtype: str, lo: float = 0.25, hi: float = 4096.0, points: int = 57
) -> list[tuple[float, float]]:
    """(intensity, FLOP/s) along the roof, evenly spaced on a logarithmic axis, with the ridge among them."""
    step = (hi / lo) ** (1 / (points - 1))
    xs = sorted({*(lo * step**i for i in range(points)), device.ridge(dtype)})
    return [(x, attainable(x, device, dtype)) for x in xs]
