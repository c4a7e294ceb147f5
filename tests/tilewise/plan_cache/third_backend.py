"""A backend in a few lines of torch, as somebody else might add one: the whole protocol, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.protocol import Runner
from tilewise.kv_request import AppendRequest, KvCall, KvRequest, PlannedTile, structure_of
from tilewise.request import BackwardInputs, Request


class ThirdBackend:
    """softmax(scale q k^T + bias) v of (B, S, H, D) tensors, as many heads of k as of q, no mask.

    Attributes:
        made: names of the runners that were made.
        ran: names of the runners that ran.
        differentiates: what `has_backward` returns.
        on_auto: what `declines` returns.
    """

    name = "third"
    reason = "it is new"

    def __init__(self, differentiates: bool = True, on_auto: str | None = None, with_cache: bool = True) -> None:
        self.made: list[str] = []
        self.ran: list[str] = []
        self.differentiates, self.on_auto = differentiates, on_auto
        self.kv = ThirdCache(self) if with_cache else None

    def unsupported(self, request: Any, gpu: Any) -> str | None:
        if request.q.shape[-2] != request.k.shape[-2]:
            return "grouped heads"
        if not isinstance(request, Request):
            return None
        terms = request.sinks is request.seed is None and request.spec.score_mod is request.spec.mask_mod is None
        if request.is_masked or not terms or request.cu_q is not None:
            return "a mask, a mod, dropout, sinks or packed sequences"
        return None

    def declines(self, request: Any, gpu: Any) -> str | None:
        return self.on_auto

    def has_backward(self, request: Request) -> bool:
        return self.differentiates

    def runner(self, name: str, run: Runner) -> Runner:
        self.made.append(name)

        def counted(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
            self.ran.append(name)
            return run(tensors)

        return counted

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        spec = request.spec
        return self.runner("forward", lambda tensors: results(Request.of(spec, tensors)))

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        spec = request.spec

        def run(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            request, bwd_inputs = Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:])
            q, k, _ = heads_first(request)
            p, ds = gradients(request, bwd_inputs)
            dv = p.mT @ bwd_inputs.dout.transpose(1, 2)
            return tuple(x.transpose(1, 2) for x in (spec.scale * ds @ k, spec.scale * ds.mT @ q, dv))

        return self.runner("backward", run)

    def term_gradients_runner(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        spec = request.spec

        def run(tensors: Sequence[Tensor | None]) -> list[Tensor]:
            request = Request.of(spec, tensors[:-4])
            _, ds = gradients(request, BackwardInputs(*tensors[-4:]))
            return [ds.sum_to_size(request.bias.shape)]

        return self.runner("term_gradients", run)

    def lacks_jvp(self, request: Request) -> str | None:
        return None if request.bias is None else "a bias"

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        self.ran.append("jvp")
        q, k, v = heads_first(request)
        tq, tk, tv = (x.transpose(1, 2) for x in tangents)
        p = torch.exp(scores(request) - lse[..., None])
        ds = request.spec.scale * (tq @ k.mT + q @ tk.mT)
        tlse = (p * ds).sum(-1)
        return ((p * (ds - tlse[..., None])) @ v + p @ tv).transpose(1, 2), tlse

    def lacks_hvp(self, request: Request) -> str | None:
        return "a backend with one derivative"

    def hvp_runner(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        raise NotImplementedError

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        return ()

    def launches(self, request: Request, gpu: Any, backward: bool) -> dict[str, Any]:
        return {"third backward" if backward else "third forward": "a launch"}


class ThirdCache:
    """A dense cache of one length, (B, S, H, D), with one query for each sequence. Nothing is scheduled."""

    def __init__(self, backend: ThirdBackend) -> None:
        self.backend = backend

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        return 2, 3

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        return []

    def schedule_runner(self, request: KvRequest, schedule: Tensor) -> Runner:
        def run(tensors: Sequence[Tensor | None]) -> list[Tensor]:
            tensors[-1].fill_(7)
            return []

        return self.backend.runner("schedule", run)

    def attend_runner(self, call: KvCall) -> Runner:
        _, structure = structure_of(call)

        def run(tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
            call: KvCall = structure(tensors)
            request = call.request
            if call.append is not None:
                write(call.append)
            assert call.schedule is None or call.schedule.tolist() == [7, 7]
            n = int(request.places.lengths[0]) + request.places.new
            cached = Request(request.q, request.k[:, :n], request.v[:, :n], request.spec)
            out, lse = results(cached)
            return (out if call.out is None else call.out.copy_(out)), lse

        return self.backend.runner("attend", run)

    def append_runner(self, request: AppendRequest) -> Runner:
        _, structure = structure_of(request)
        return self.backend.runner("append", lambda tensors: write(structure(tensors)))


def write(request: AppendRequest) -> list[Tensor]:
    for b, start in enumerate(request.places.lengths.tolist()):
        request.k[b, start : start + request.places.new] = request.k_new[b]
        request.v[b, start : start + request.places.new] = request.v_new[b]
    return []


def heads_first(request: Request) -> list[Tensor]:
    return [x.transpose(1, 2) for x in request[:3]]


def scores(request: Request) -> Tensor:
    q, k, _ = heads_first(request)
    s = request.spec.scale * q @ k.mT
    return s if request.bias is None else s + request.bias


def results(request: Request) -> tuple[Tensor, Tensor]:
    s = scores(request)
    out = (s.softmax(-1) @ request.v.transpose(1, 2)).transpose(1, 2).contiguous()  # as kernels return it: no view
    return out, s.logsumexp(-1)


def gradients(request: Request, bwd_inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """P and dS = P * (dP - delta), delta = rowsum(dO * O) - dlse."""
    out, lse, dout, dlse = bwd_inputs
    p = torch.exp(scores(request) - lse[..., None])
    delta = (out * dout).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    return p, p * (dout.transpose(1, 2) @ request.v.transpose(1, 2).mT - delta[..., None])
