"""Every kernel of the KV cache is watched here: it stays within its tensors, no program writes what another touches,
and memory that nobody wrote holds NaN and the largest of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.conftest import INTERPRETED


def watch(races: bool) -> Any:
    if not INTERPRETED:
        return nullcontext()
    from tilewise_lab import guard

    return guard.watched(races)


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        with watch(races=request.node.get_closest_marker("meets") is None):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
