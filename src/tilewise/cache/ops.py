"""The ops of the KV cache, with what they write declared; and the way past the dispatcher where nobody watches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import choose, serving
from ..dispatch.memory import remembered, signature
from ..kv_spec import (
    APPEND,
    ATTEND,
    AppendRequest,
    KvRequest,
    Ran,
    append_arguments,
    append_request,
    attend_arguments,
    attend_request,
)
from ..ops.flops import count_them, counted, readable, unwatched
from ..spec import Spec
from ..torch_private import is_watched

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(f"new_plan_kv({ATTEND}) -> (Tensor, Tensor)")
_library.define(f"plan_kv(Tensor(a!) ledger, {ATTEND}) -> ()")
_library.define(f"attend_kv(Tensor(a!) out, Tensor(b!) lse, Tensor(c!) room, Tensor ledger, {ATTEND}) -> ()")
_library.define(f"append_kv(Tensor(a!) k, Tensor(b!) v, Tensor(c!)? turned, {APPEND}) -> ()")


def _new_plan_of(request: KvRequest) -> tuple[Tensor, Tensor, Ran | None]:
    ledger, room = _room_of(request)
    return ledger, room, _plan_of(ledger, request) if ledger.numel() else None


def _room_of(request: KvRequest) -> tuple[Tensor, Tensor]:
    """Memory for the numbers of a plan, and for what programs have in common."""
    numbers, floats = serving(choose(request).backend.name).room_for(request)
    q = request.q
    return q.new_empty(numbers, dtype=torch.int64), q.new_empty(floats, dtype=torch.float32)


def _plan_of(ledger: Tensor, request: KvRequest) -> Ran | None:
    call = _call_of(request, request.spec, request.split, request.most, request.places.new)
    ran: Ran | None = call.backend.plan(request, ledger, call.recordings)
    return ran


def _attend_of(out: Tensor, lse: Tensor, room: Tensor, ledger: Tensor, request: KvRequest) -> Ran | None:
    call = _call_of(request, request.spec, request.split, request.most, request.places.new)
    ran: Ran | None = call.backend.attend(request, out, lse, ledger, room, call.recordings)
    return ran


def _append_of(request: AppendRequest, backend: str) -> Ran | None:
    written = Written(request.k_new, request.k, request.v, Spec(1.0, backend=backend), request)
    interleaved = request.rotary is not None and request.rotary.interleaved
    call = _call_of(written, backend, interleaved, request.places.new)
    ran: Ran | None = call.backend.append(request, call.recordings)
    return ran


class Written(NamedTuple):
    """An append as `choose` looks at calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: Spec
    request: AppendRequest

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.request.tensors()


class Call(NamedTuple):
    """How calls that look alike run: the backend's module and the launches it made."""

    backend: Any
    recordings: dict[Any, Any] | None


def _call_of(request: Any, *more: Any) -> Call:
    def made(recordings: Any) -> Call:
        return Call(serving(choose(request).backend.name), recordings)

    if not request.q.is_cuda:
        return made(None)
    call: Call = remembered(("cache", *more, *signature(*request.tensors())), lambda: made({}))
    return call


@torch.library.impl(_library, "new_plan_kv", "CompositeExplicitAutograd")
def _new_plan(*given: Any) -> tuple[Tensor, Tensor]:
    ledger, room, _ = _new_plan_of(attend_request(*given))
    return ledger, room


@torch.library.register_fake("tilewise::new_plan_kv", lib=_library)
def _new_plan_fake(*given: Any) -> tuple[Tensor, Tensor]:
    return _room_of(attend_request(*given))


@torch.library.impl(_library, "plan_kv", "CompositeExplicitAutograd")
def _plan(ledger: Tensor, *given: Any) -> None:
    _plan_of(ledger, attend_request(*given))


@torch.library.impl(_library, "attend_kv", "CompositeExplicitAutograd")
def _attend(out: Tensor, lse: Tensor, room: Tensor, ledger: Tensor, *given: Any) -> None:
    _attend_of(out, lse, room, ledger, attend_request(*given))


@torch.library.impl(_library, "append_kv", "CompositeExplicitAutograd")
def _append(*given: Any) -> None:
    _append_of(*append_request(*given))


for _name in ("plan_kv", "attend_kv", "append_kv"):
    torch.library.register_fake(f"tilewise::{_name}", lambda *given: None, lib=_library)


@counted("attend_kv")
def _flops(out: Tensor, lse: Tensor, room: Tensor, ledger: Tensor, *given: Any, **_: Any) -> int:
    """Two products for each pair of a query and a key in the cache, seen or not; where lengths cannot be read (meta and
    fake tensors), of a cache that is full."""
    request = attend_request(*given)
    places, q, cu_q = request.places, request.q, request.call.cu_q
    if not readable(places.lengths, cu_q, places.cu_new):
        pages = 1 if places.table is None else places.table.shape[-1]
        pairs = q.shape[:-2].numel() * pages * request.k.shape[1]
    else:
        with unwatched():
            queries = q.shape[1] if cu_q is None else cu_q.diff()
            keys = places.lengths + (places.new if places.cu_new is None else places.cu_new.diff())
            pairs = int((keys.long() * queries).sum())
    return 2 * pairs * int(q.shape[-2] * (q.shape[-1] + request.v.shape[-1]))


def new_plan(request: KvRequest) -> tuple[Tensor, Tensor, Ran | None]:
    """The plan's numbers, its workspace; and what ran, here and below, where it was recorded and nobody watched."""
    if is_watched(*request.call[:3]):
        ledger, room = torch.ops.tilewise.new_plan_kv(*attend_arguments(request))
        return ledger, room, None
    return _new_plan_of(request)


def plan(ledger: Tensor, request: KvRequest) -> Ran | None:
    if not is_watched(ledger, *request.call[:3]):
        return _plan_of(ledger, request)
    torch.ops.tilewise.plan_kv(ledger, *attend_arguments(request))
    return None


def attend(out: Tensor, lse: Tensor, room: Tensor, ledger: Tensor, request: KvRequest) -> Ran | None:
    if not is_watched(*request.call[:3]):
        return _attend_of(out, lse, room, ledger, request)
    count_them()
    torch.ops.tilewise.attend_kv(out, lse, room, ledger, *attend_arguments(request))
    return None


def append(request: AppendRequest, backend: str) -> Ran | None:
    if not is_watched(request.k_new, request.v_new, request.k, request.v):
        return _append_of(request, backend)
    torch.ops.tilewise.append_kv(request.k, request.v, request.turned, *append_arguments(request, backend))
    return None
