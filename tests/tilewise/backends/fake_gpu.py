"""A GPU whose memory is that of the CPU, for tests of what happens around a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise.backends.common import kernel_call
from tilewise.backends.common.launch import COUNTERS, Target
from tilewise.request import Gpu

CUDA = torch.device("cuda", 0)


class OnDevice:
    """`torch.cuda.device`"""

    def __init__(self, driver: Any, device: Any) -> None:
        self.driver, self.to = driver, device if isinstance(device, int) else device.index

    def __enter__(self) -> None:
        self.before, self.driver.device = self.driver.device, self.to

    def __exit__(self, *_: Any) -> None:
        self.driver.device = self.before


def stand_in_for_gpu(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Calls of kernels find a GPU whose stream, device and capture are those of `found`."""
    monkeypatch.setattr(kernel_call, "INTERPRETED", False)
    monkeypatch.setattr(kernel_call, "target_of", lambda device: Target(Gpu("cuda", 90), 132))
    monkeypatch.setattr(kernel_call, "current_stream", lambda device: found.stream)
    monkeypatch.setattr(kernel_call, "empty_strided_cuda", lambda *x: torch.empty_strided(*x[:2], dtype=x[2]))
    monkeypatch.setattr(torch.cuda, "device", lambda device: OnDevice(found, device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.devices)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.graph is not None)
    monkeypatch.setattr(
        kernel_call, "DeviceMemory", lambda device: SimpleNamespace(
            empty=lambda shape, dtype: torch.empty(*shape, dtype=dtype),
            counters=lambda: torch.zeros(COUNTERS, dtype=torch.int32),
        ),
    )  # fmt: skip
