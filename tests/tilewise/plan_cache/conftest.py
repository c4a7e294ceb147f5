"""CPU tensors in the role of CUDA tensors, whose calls have plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.tilewise.plan_cache.cases import StubBackend
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise.backends import registry
from tilewise.plan_cache import PlanCache, plans


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanCache]:
    """The plan cache, empty, for tensors that say they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    plans.clear()
    yield plans
    plans.clear()


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> ThirdBackend:
    """A backend ahead of all others that computes plain attention."""
    return insert(ThirdBackend(), monkeypatch)


@pytest.fixture
def stub(kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> StubBackend:
    """A backend ahead of all others that computes nothing."""
    backend = StubBackend()
    monkeypatch.setattr(registry, "BACKENDS", (backend, *registry.BACKENDS))
    return backend


def insert(third: ThirdBackend, monkeypatch: pytest.MonkeyPatch) -> ThirdBackend:
    plans.clear()  # those of other tests have other backends
    monkeypatch.setattr(registry, "BACKENDS", (third, *registry.BACKENDS))
    return third
