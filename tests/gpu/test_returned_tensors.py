"""The same as `tests/tilewise/test_returned_tensors.py`, with tensors on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.tilewise.test_returned_tensors import CALLS, NAMES, check_call


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(x) for x in NAMES])
def test_a_changed_result_changes_no_later_call(module, name):
    with torch.device("cuda"):
        check_call(CALLS[module][name])
