"""The portable kernels, on a GPU or in the interpreter; memory that nobody wrote is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def kernels_run(triton_runs: None) -> None: ...


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(kernels_run: None) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
