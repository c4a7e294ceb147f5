"""Compiles the kernels of many cases before anything is timed, in several processes, into Triton's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import registry
from tilewise.call.fields import ATTENTION
from tilewise.request import Gpu, Request
from tilewise.validation import dense as checks
from tilewise_lab.bench.cases import Case


@dataclass(frozen=True)
class Compilation:
    """One kernel: the launch of this name in a call of `case`, forward and backward."""

    case: Case
    gpu: Gpu
    launch: str


def request_of(case: Case) -> Request:
    """The request of a case, of meta tensors."""
    dtype = getattr(torch, case.dtype)

    def some(tokens: int, heads: int, dim: int) -> Tensor:
        outer = (sum(case.lengths),) if case.lengths else (case.batch, tokens)
        return torch.empty(*outer, heads, dim, dtype=dtype, device="meta")

    q = some(case.n_q, case.heads, case.dim)
    k, v = some(case.seq, case.kv_heads, case.dim), some(case.seq, case.kv_heads, case.dv)
    options = ATTENTION.completed({"causal": case.causal, "window": None if case.window is None else (case.window, 0)})
    if not case.lengths:
        return checks.dense(q, k, v, options)  # type: ignore[no-any-return]
    cu = torch.empty(len(case.lengths) + 1, dtype=torch.int32, device="meta")
    return checks.packed(q, k, v, cu, cu, (case.longest, case.longest), options)  # type: ignore[no-any-return]


def compilations(cases: Sequence[Case], gpu: Gpu) -> list[Compilation]:
    """The kernels of these cases, each once, those that take longest first."""
    from tilewise.backends.common.offline import specialised

    binders: dict[int, Any] = {}
    found: dict[str, Compilation] = {}
    for case in cases:
        for name, made in registry.launches_of(request_of(case), gpu, True).items():
            found.setdefault(specialised(gpu.arch, made, binders), Compilation(case, gpu, name))
    return sorted(found.values(), key=lambda x: (x.launch.startswith("("), -x.case.dim))


def compile_kernel(x: Compilation) -> str:
    """Compiles one kernel; returns what went wrong, or an empty string."""
    from tilewise.backends.common.offline import binary_for

    try:
        made = registry.launches_of(request_of(x.case), x.gpu, True)[x.launch]
        binary_for(x.gpu.arch, made.kernel, made.args, made.options)
    except Exception as error:
        return f"{x.launch} of {x.case.key}: {type(error).__name__}: {error}"[:300]
    return ""


def compile_all(cases: Sequence[Case], gpu: Gpu, workers: int) -> Iterator[tuple[int, int, str]]:
    """Yields (done, total, what went wrong or "") after each kernel."""
    wanted = compilations(cases, gpu)
    with ProcessPoolExecutor(max(1, min(workers, len(wanted))), mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed([pool.submit(compile_kernel, x) for x in wanted]), 1):
            yield done, len(wanted), future.result()


def spills(case: Case, gpu: Gpu, which: str) -> int:
    """Bytes of registers that the main kernel of a pass of this case spills."""
    from tilewise_lab.costs.compiled import compile_for

    launches = registry.launches_of(request_of(case), gpu, which == "backward")
    mains = [made for name, made in launches.items() if name.endswith(which) and not name.startswith("(")]
    return sum(compile_for(gpu.arch, made.kernel, made.args, made.options).spills for made in mains)
