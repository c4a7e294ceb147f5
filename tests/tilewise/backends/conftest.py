"""The portable kernels, on a GPU or in the interpreter; memory that nobody wrote is NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def kernels_run(triton_runs: None) -> None: ...


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of every NaN that a test puts in."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        yield


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(kernels_run: None) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
