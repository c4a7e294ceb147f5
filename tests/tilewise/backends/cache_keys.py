"""Prints the cache keys of all kernels and device functions, computed in the order that the argument says.

A process of its own: Triton caches keys, and tests run with its interpreter.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
from typing import Any

from triton.runtime.jit import JITFunction

import tilewise.backends
from tilewise.backends.common.launch import Launch, compute_cache_keys


def modules() -> list[Any]:
    names = (info.name for info in pkgutil.walk_packages(tilewise.backends.__path__, "tilewise.backends."))
    return [importlib.import_module(name) for name in names]


def functions() -> list[tuple[str, Any]]:
    """Kernels and device functions by name."""
    every = {id(x): x for module in modules() for x in vars(module).values() if isinstance(x, JITFunction)}
    return sorted((f"{x.fn.__module__}.{x.fn.__qualname__}", x) for x in every.values())


def main(order: str) -> None:
    named = functions()
    ordered = {"sorted": named, "reversed": named[::-1]}.get(order) or random.Random(order).sample(named, len(named))
    for _, x in ordered:
        compute_cache_keys(Launch(x, 1, (), {}))
    for name, x in named:
        print(name, x.cache_key)
        constants = {(n, str(v)) for (n, _), (v, _) in x.used_global_vals.items() if "constexpr" in str(type(v))}
        if len(constants) != len({n for n, _ in constants}):
            print(f"{name} reads two constants of one name, whose order is that of addresses", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
