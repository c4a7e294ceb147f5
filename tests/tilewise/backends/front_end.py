"""Runs calls for a GPU that is not here: kernels are not launched, but the front end of Triton's compiler translates
each kind of launch once. The process's Triton must be the compiler's, not the interpreter."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.compiler
from triton.compiler.code_generator import CodeGenerator

from tilewise import request, settings
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.offline import compiling_for
from tilewise.backends.common.tiles import chip
from tilewise.request import Gpu

ON_GPU = ("tilewise.sparse", "tilewise.distributed")  # in these modules `is_cuda` is true


class Failure(NamedTuple):
    """A launch that does not compile, and the end of the compiler's error."""

    kernel: str
    error: str


class FrontEnd:
    """Takes the place of launches.

    Attributes:
        stages: how many stages of the compiler run after the front end: 0 for none, 3 up to LLVM's IR, where the size
            of the shared memory is known.
        kernels: how many kinds of launches compile, by architecture and kernel.
        lines: the lines of device functions that were translated, as (file, number).
        failures: the launches that do not compile.
    """

    def __init__(self, stages: int = 0) -> None:
        self.stages = stages
        self.kernels: Counter[tuple[int | str, str]] = Counter()
        self.lines: set[tuple[str, int]] = set()
        self.failures: list[Failure] = []
        self.arch: int | str = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it kernels are translated and not launched. It must be entered before any kernel is compiled."""
        statements = CodeGenerator.visit_compound_statement
        with (
            mock.patch.object(launcher.Launch, "__call__", lambda launch: self.launch(launch)),
            mock.patch.object(launcher, "INTERPRETED_PROCESSORS", launcher.OFFLINE_PROCESSORS),
            mock.patch.object(triton.compiler, "compile", self.compile),
            mock.patch.object(CodeGenerator, "visit_compound_statement", lambda *x: self.statements(statements, *x)),
            mock.patch.object(torch.cuda, "device", nullcontext),
            mock.patch.object(torch.Tensor, "is_cuda", property(_is_on_gpu), create=True),
            mock.patch.object(torch, "empty", partial(_zeroed, torch.empty)),
            mock.patch.object(torch, "empty_like", partial(_zeroed, torch.empty_like)),
        ):
            yield

    @contextmanager
    def on(self, gpu: Gpu) -> Iterator[None]:
        """Within it, tensors on the CPU are taken for tensors on this GPU."""
        self.arch = gpu.arch
        with (
            compiling_for(gpu.arch),
            mock.patch.object(request, "INTERPRETER", gpu),
            mock.patch.object(settings, "interprets", return_value=True),
        ):
            yield

    def launch(self, launch: Any) -> None:
        """What `Launch.__call__` does here."""
        if not launch.programs:
            return
        try:
            launch.kernel.warmup(*launch.args, grid=(1,), **launcher.compile_options(launch))
        except Exception as error:
            lines = [str(x) for x in (error, error.__cause__) if x is not None]
            self.failures.append(Failure(_name(launch.kernel), "\n".join(lines)[-2000:]))

    def compile(self, src: Any, target: Any, options: dict[str, Any], **_: Any) -> Any:
        """What `triton.compile` does here. Triton keeps the result for launches of the same kind."""
        from triton._C.libtriton import ir

        backend = triton.compiler.make_backend(target)
        parsed = backend.parse_options(options | src.parse_options())
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(parsed)
        module = src.make_ir(target, parsed, functions, backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, src.language)
        metadata = {"target": target, **parsed.__dict__}
        for name in [*stages][[*stages].index(src.ext) :][: self.stages]:
            module = stages[name](module, metadata)
        used, most = metadata.get("shared", 0), chip(self.arch).shared
        if used > most:
            raise MemoryError(f"{used} bytes of shared memory, of at most {most}")
        self.kernels[self.arch, _name(src.fn)] += 1
        return object()

    def statements(self, visit: Any, generator: Any, statements: Any) -> None:
        """What `CodeGenerator.visit_compound_statement` does here."""
        found = statements if isinstance(statements, list) else [statements]
        self.lines |= {(generator.file_name, generator.begin_line + x.lineno) for x in found if isinstance(x, ast.stmt)}
        visit(generator, statements)


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('tilewise.backends.')}.{kernel.fn.__name__}"


def _zeroed(make: Any, *args: Any, **options: Any) -> torch.Tensor:
    """A tensor that holds indices that exist: the kernel that would fill it does not run."""
    x: torch.Tensor = make(*args, **options)
    return x if x.is_meta else x.detach().zero_()


def _is_on_gpu(x: torch.Tensor) -> bool:
    return str(sys._getframe(1).f_globals.get("__name__", "")).startswith(ON_GPU)
