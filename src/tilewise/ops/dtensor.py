"""Attention on DTensors: each rank calls the registered ops on whole batch rows or whole heads, never on a part of a
sequence (tilewise.distributed does that). Imported by the first call with a DTensor.

    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))    # heads, as in tensor parallel models
    out = tilewise.attention(q, k, v, causal=True)                           # out: Shard(2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..errors import AttentionError
from ..mods import PROGRAMS
from ..request import BackwardInputs, Request, arguments
from .dense import forward_op, registered

ALL = Replicate()


def _ways(request: Request, ranks: int) -> list[tuple[Any, list[Any], Any]]:
    """The ways to shard a call along one axis of the mesh, the last the best: placements of q, k, v and out, of the
    other tensors, and of lse."""
    given = request.tensors()[3:]
    ways: list[tuple[Any, list[Any], Any]] = [(ALL, [None if x is None else ALL for x in given], ALL)]
    keys = (request.spec.score_mod, request.spec.mask_mod)
    asked = frozenset().union(*(PROGRAMS[key].root.deps for key in keys if key is not None))
    if request.seed is not None or request.blocks or request.position_offsets is not None:
        return ways  # they count batch rows and heads from 0
    packed, kv_heads = request.cu_q is not None, request.k.shape[-2]
    if not packed and "b" not in asked and request.q.shape[0] % ranks == 0:
        ways.append((Shard(0), _placed(request, 0, None), Shard(0)))
    if "h" not in asked and kv_heads % ranks == 0:
        ways.append((Shard(1 if packed else 2), _placed(request, 1, 0), Shard(0 if packed else 1)))
    return ways


def _placed(request: Request, bias_axis: int, sinks_axis: int | None) -> list[Any]:
    """Where the tensors beside q, k and v lie, if these are sharded along the bias's axis."""
    bias, sinks = request.bias, request.sinks
    rest = [None if x is None else ALL for x in request.tensors()[5:]]
    own: Any = None
    if bias is not None:
        own = Shard(bias_axis) if bias.shape[bias_axis] > 1 else ALL
    return [own, None if sinks is None else ALL if sinks_axis is None else Shard(sinks_axis), *rest]


class _Placements:
    """Where the tensors of a call that each rank computes by itself lie: for each axis of the mesh as q does there, or
    else by the last of `_ways`. `rows` of q, k, v and out, `lines` of lse, `others` of the other tensors."""

    def __init__(self, request: Request) -> None:
        q: Any = request.q
        ways = _ways(request, q.device_mesh.size())
        chosen = [next((way for way in ways if way[0] == place), ways[-1]) for place in q.placements]
        self.mesh = q.device_mesh
        self.rows, self.lines = [way[0] for way in chosen], [way[2] for way in chosen]
        self.others = [[way[1][n] for way in chosen] for n in range(len(request.tensors()) - 3)]

    def call(self, request: Request) -> tuple[Any, ...]:
        """The arguments of an op on this rank's part of a call."""
        places = [self.rows] * 3 + self.others
        tensors = [_local(x, p) for x, p in zip(request.tensors(), places, strict=True)]
        return arguments(Request.of(request.spec, tensors))

    def bwd_inputs(self, bwd_inputs: BackwardInputs) -> list[Any]:
        return [_local(x, p) for x, p in zip(bwd_inputs, (self.rows, self.lines) * 2, strict=True)]

    def wrapped(self, x: Any, places: list[Any]) -> Any:
        return DTensor.from_local(x, self.mesh, places, run_check=False)


def _local(x: Any, places: list[Any]) -> Any:
    """This rank's part. A plain tensor of one element, such as a seed, is the same on every rank."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=places).to_local()
    if x is not None and x.numel() > 1:
        raise AttentionError("arguments", f"a plain tensor {tuple(x.shape)} beside DTensors", "distribute_tensor(...)")
    return x


def forward(request: Request) -> Any:
    """(out, lse), and the largest score of each head if the call returns it, placed as lse."""
    at = _Placements(request)
    out, *by_head = registered(forward_op(request.spec))(*at.call(request))
    return at.wrapped(out, at.rows), *(at.wrapped(x, at.lines) for x in by_head)


def backward(bwd_inputs: BackwardInputs, request: Request) -> Any:
    """[dq, dk, dv]"""
    at = _Placements(request)
    return [at.wrapped(x, at.rows) for x in registered("backward")(*at.bwd_inputs(bwd_inputs), *at.call(request))]


def term_gradients(bwd_inputs: BackwardInputs, wanted: list[bool], request: Request) -> list[Any]:
    """The gradients of the wanted terms. Of a replicated term each rank computes a part; the parts are summed."""
    at = _Placements(request)
    found = torch.ops.tilewise.term_gradients(*at.bwd_inputs(bwd_inputs), wanted, *at.call(request))
    grads = []
    terms = zip((request.bias, request.sinks, *request.score), at.others, wanted, strict=False)
    for g, (x, of_x) in zip(found, ((x, p) for x, p, wants in terms if wants), strict=True):
        sums = [Partial() if p == ALL and place != ALL else p for p, place in zip(of_x, at.rows, strict=True)]
        grads.append(at.wrapped(g, sums).redistribute(placements=x.placements))  # type: ignore[union-attr]
    return grads
