"""Running a compiled kernel's Python source: its functions, with Gluon's words replaced by the emulator's."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .language import NAMES, WORDS
from .machine import Machine, Partition, Program
from .values import Descriptor, Int, Pointer


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    options: dict[str, Any],
    *,
    seed: int = 0,
    replace: dict[str, Any] | None = None,
    **machine_options: Any,
) -> Machine:
    """Run `programs` programs of a Gluon kernel on CPU tensors, side by side.

    The arguments are those of a launch on a GPU. `replace` maps names that the kernel's functions use to other values:
    so a test takes out a barrier and sees the emulator object.
    """
    machine = Machine(seed, **machine_options)
    function = emulated(kernel, {}, replace or {})
    names = [name for name in kernel.arg_names if name not in options]
    values = [argument(name, x) for name, x in zip(names, args, strict=True)]
    constants = {name: translated(x, {}, replace or {}) for name, x in options.items() if name in kernel.arg_names}
    for index in range(programs):
        program = Program(machine, index, programs)
        Partition(program, "main", options["num_warps"], lambda *a: function(*a, **constants), tuple(values))
    machine.run()
    return machine


def argument(name: str, x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        return Descriptor(name, x)
    if isinstance(x, tuple):
        items = [argument(name, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return Int(x) if isinstance(x, int) and not isinstance(x, bool) else x


def emulated(kernel: Any, done: dict[int, Callable[..., Any]], replace: dict[str, Any]) -> Callable[..., Any]:
    """The Python function under a jit decorator, every global it names translated, and so on for those it calls."""
    if id(kernel) not in done:
        source = kernel.fn
        names: dict[str, Any] = {"__builtins__": builtins}
        copy = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
        done[id(kernel)] = copy
        for name in source.__code__.co_names:
            if name in replace:
                names[name] = replace[name]
            elif name in NAMES:
                names[name] = NAMES[name]
            elif name in source.__globals__:
                names[name] = translated(source.__globals__[name], done, replace)
    return done[id(kernel)]


def translated(x: Any, done: dict[int, Callable[..., Any]], replace: dict[str, Any]) -> Any:
    if hasattr(x, "fn") and hasattr(x, "arg_names"):
        return emulated(x, done, replace)
    if isinstance(x, types.ModuleType):
        return WORDS
    return x.value if type(x).__name__ == "constexpr" else x
