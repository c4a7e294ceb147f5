"""A serving engine that is not installed: modules with its interface in sys.modules. `vllm_stub` and `sglang_stub` have
the interfaces and the names of the modules (`MODULES`, the package first)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


def modules(interface: ModuleType, version: str) -> dict[str, ModuleType]:
    """What to put into sys.modules."""
    public = {name: x for name, x in vars(interface).items() if not name.startswith("_")}
    made: dict[str, Any] = {name: ModuleType(name) for name in interface.MODULES}
    for module in made.values():
        vars(module).update(public, __path__=[])
    made[interface.MODULES[0]].__version__ = version
    return made


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, interface: ModuleType, version: str, adapter: str) -> Iterator[None]:
    """The modules are there, and the module `adapter` is imported anew."""
    for name, module in modules(interface, version).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    yield
    monkeypatch.delitem(sys.modules, adapter, raising=False)
