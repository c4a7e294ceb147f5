"""The registered ops of the KV cache: schemas that declare what is written, implementations, fake tensors, FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import Runner
from ..backends.registry import kv_backend
from ..kv_formats import head_dim
from ..kv_request import (
    APPEND,
    ATTEND,
    AppendRequest,
    KvCall,
    KvRequest,
    append_arguments,
    append_request_of_op,
    attend_arguments,
    attend_request_of_op,
    structure_of,
    written_arguments,
    written_tokens,
)
from ..plan_cache import runner_of
from ..request import lse_dtype
from ..validation import kv_contents as contents
from ..validation.kv_new_tokens import check_append
from .flops import counted, readable, register_formulas

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(f"new_plan_kv({ATTEND}) -> (Tensor, Tensor)")
_library.define(f"plan_kv(Tensor(a!) schedule, {ATTEND}) -> ()")
_written = "Tensor(a!) out, Tensor(b!) lse, Tensor(c!) workspace, Tensor(d!)? max_logit"
_library.define(f"attend_kv({_written}, Tensor schedule, {ATTEND}) -> ()")
_library.define(
    "append_kv(Tensor(a!) k, Tensor(b!) v, Tensor(c!)? rotated, Tensor(d!)? k_scales, Tensor(e!)? v_scales,"
    f" {APPEND}) -> ()"
)


def new_schedule(request: KvRequest) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for a schedule and its workspace."""
    numbers, floats = kv_backend(request).schedule_sizes(request)
    q = request.q
    return q.new_empty(numbers, dtype=torch.int64), q.new_empty(floats, dtype=torch.float32)


def run(name: str, call: tuple[Any, ...], make: Callable[[], Runner]) -> Any:
    """Run an op whose arguments are `call`."""
    return runner_of(name, call, make)(structure_of(call)[0])


def schedule(request: KvRequest, memory: Tensor) -> None:
    """Write the schedule of a request."""
    if memory.numel():
        run("schedule", (request, memory), lambda: kv_backend(request).schedule_runner(request, memory))


def _read_request(*given: Any) -> KvRequest:
    """The request of an op. Contents are checked here, where there are some: a trace has none."""
    request = attend_request_of_op(*given)
    if contents.are_read(request.places.lengths):
        contents.check(request)
    return request


@torch.library.impl(_library, "new_plan_kv", "CompositeExplicitAutograd")
def _new_plan(*given: Any) -> tuple[Tensor, Tensor]:
    request = _read_request(*given)
    memory, workspace = new_schedule(request)
    schedule(request, memory)
    return memory, workspace


@torch.library.register_fake("tilewise::new_plan_kv", lib=_library)
def _new_plan_fake(*given: Any) -> tuple[Tensor, Tensor]:
    return new_schedule(attend_request_of_op(*given))


@torch.library.impl(_library, "plan_kv", "CompositeExplicitAutograd")
def _plan(memory: Tensor, *given: Any) -> None:
    schedule(_read_request(*given), memory)


@torch.library.impl(_library, "attend_kv", "CompositeExplicitAutograd")
def _attend(out: Tensor, lse: Tensor, workspace: Tensor, max_logit: Tensor | None, memory: Tensor, *given: Any) -> None:
    request = _read_request(*given)
    if max_logit is not None:
        spec = request.dense.spec._replace(max_logit=True)
        request = request._replace(dense=request.dense._replace(spec=spec))
    call = KvCall(request, None, memory, workspace, out, lse, max_logit)
    run("attend", call, lambda: kv_backend(call.request).attend_runner(call))


@torch.library.impl(_library, "append_kv", "CompositeExplicitAutograd")
def _append(*given: Any) -> None:
    request, backend = append_request_of_op(*given)
    if contents.are_read(request.places.lengths):
        check_append(request)
    run(f"append {backend}", request, lambda: kv_backend(written_tokens(request, backend)).append_runner(request))


for _name in ("plan_kv", "attend_kv", "append_kv"):
    torch.library.register_fake(f"tilewise::{_name}", lambda *given: None, lib=_library)


@counted("attend_kv")
def _flops(
    out: Tensor, lse: Tensor, workspace: Tensor, max_logit: Tensor | None, schedule: Tensor, *given: Any, **_: Any
) -> int:
    """Two products for each pair of a query and a key in the cache, seen or not; where lengths cannot be read (meta and
    fake tensors), of a cache that is full."""
    request = attend_request_of_op(*given)
    places, q, cu_q = request.places, request.q, request.dense.cu_q
    if not readable(places.lengths, cu_q, places.cu_new):
        pairs = q.shape[:-2].numel() * places.capacity(request.k)
    else:
        queries = q.shape[1] if cu_q is None else cu_q.diff()
        keys = places.lengths + (places.new if places.cu_new is None else places.cu_new.diff())
        pairs = int((keys.long() * queries).sum())
    return 2 * pairs * int(q.shape[-2] * (q.shape[-1] + head_dim(request.v)))


def traced_append(request: AppendRequest, backend: str) -> Tensor | None:
    """The op `append_kv`. Returns the rotated queries, if there are any."""
    q = request.q
    rotated = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    request = request._replace(rotated=rotated)
    torch.ops.tilewise.append_kv(*written_arguments(request), *append_arguments(request, backend))
    return rotated


def traced_attend(call: KvCall) -> tuple[Tensor, ...]:
    """The ops of a traced call. Everything that they write is allocated here."""
    request, memory, workspace = call.request, call.schedule, call.workspace
    if call.append is not None:
        rotated = traced_append(call.append, request.dense.spec.backend)
        if rotated is not None:
            request = request._replace(dense=request.dense._replace(q=rotated))
    given = attend_arguments(request)
    if memory is None or workspace is None:
        memory, workspace = torch.ops.tilewise.new_plan_kv(*given)
    q, v = request.dense.q, request.dense.v
    out = q.new_empty((*q.shape[:-1], head_dim(v))) if call.out is None else call.out
    lse = new_lse(q)
    max_logit = lse.new_empty(lse.shape[:-1], dtype=torch.float32) if request.dense.spec.max_logit else None
    register_formulas()
    torch.ops.tilewise.attend_kv(out, lse, workspace, max_logit, memory, *given)
    return (out, lse) if max_logit is None else (out, lse, max_logit)


def scratch_lse(q: Tensor) -> Tensor:
    """Memory for an lse that is not returned, with strides that do not depend on the number of tokens: Triton compiles
    another kernel for a stride that is 1 or a multiple of 16."""
    return q.new_empty(q.shape[:-1], dtype=lse_dtype(q)).transpose(-1, -2)


def new_lse(q: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype(q))
