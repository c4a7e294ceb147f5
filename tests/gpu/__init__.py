"""The ring that needs a CUDA device: many tiles, many configurations, streams, graphs, and very large tensors."""

import pytest
import torch


def need_cuda() -> None:
    """Skip the module that calls this, in one word, where there is no device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here", allow_module_level=True)
