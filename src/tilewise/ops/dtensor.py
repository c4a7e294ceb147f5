"""How the registered ops are computed on DTensors: whole batch rows or whole heads to a rank, never parts of a sequence
(that is for tilewise.distributed). Imported when a DTensor is first met.

    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))    # heads, as in tensor parallel models
    out = tilewise.attention(q, k, v, causal=True)                           # out: Shard(2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..mods import PROGRAMS
from ..request import ARGUMENTS, BackwardInputs, Request, arguments, request_of
from ..torch_internals import register_sharding

ALL = Replicate()


def _ways(request: Request, ranks: int) -> list[tuple[Any, list[Any], Any]]:
    """Placements of q, k, v and out, of the other tensors, and of lse: for each way."""
    given = request.tensors()[3:]
    ways: list[tuple[Any, list[Any], Any]] = [(ALL, [None if x is None else ALL for x in given], ALL)]
    keys = (request.spec.score_mod, request.spec.mask_mod)
    asked = frozenset().union(*(PROGRAMS[key].root.deps for key in keys if key is not None))
    if request.seed is not None or request.blocks or request.origin is not None:
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


def _forward(*call: Any) -> Any:
    request = request_of(*call)
    scalars = [None] * (ARGUMENTS - 4)
    return [([qkv, lse], [qkv, qkv, qkv, *others, *scalars]) for qkv, others, lse in _ways(request, _ranks(request))]


def _backward(out: Any, lse: Any, dout: Any, dlse: Any, *call: Any) -> Any:
    request = request_of(*call)
    scalars = [None] * (ARGUMENTS - 4)
    return [
        ([qkv] * 3, [qkv, row, qkv, None if dlse is None else row, qkv, qkv, qkv, *others, *scalars])
        for qkv, others, row in _ways(request, _ranks(request))
    ]


def _ranks(request: Request) -> int:
    mesh = request.q.device_mesh if isinstance(request.q, DTensor) else request.q.mesh  # type: ignore[attr-defined]
    return int(mesh.size())


def term_gradients(bwd_inputs: BackwardInputs, wanted: list[bool], request: Request) -> list[Any]:
    """The op of this name, which gives a list that torch has no rules for: each rank computes its part. What all ranks
    have of a term, they have parts of its gradient; their sum is taken."""
    q: Any = request.q
    ways = _ways(request, _ranks(request))
    # for each axis of the mesh: as q lies there, if that is a way
    chosen = [next((way for way in ways if way[0] == place), ways[0]) for place in q.placements]

    def local(x: Any, places: list[Any]) -> Any:
        return None if x is None else x.redistribute(placements=places).to_local()

    rows, lines = [way[0] for way in chosen], [way[2] for way in chosen]
    places = [[way[1][n] for way in chosen] for n in range(len(request.tensors()) - 3)]
    own = BackwardInputs(*(local(x, p) for x, p in zip(bwd_inputs, (rows, lines) * 2, strict=True)))
    tensors = [local(x, p) for x, p in zip(request.tensors(), [rows] * 3 + places, strict=True)]
    call = arguments(Request.of(request.spec, tensors))
    found = torch.ops.tilewise.term_gradients(*own, wanted, *call)
    grads = []
    terms = zip((request.bias, request.sinks, *request.score), places, wanted, strict=False)
    for g, (x, of_x) in zip(found, ((x, p) for x, p, wants in terms if wants), strict=True):
        sums = [Partial() if p == ALL and q_place != ALL else p for p, q_place in zip(of_x, rows, strict=True)]
        part = DTensor.from_local(g, q.device_mesh, sums, run_check=False)
        grads.append(part.redistribute(placements=x.placements))  # type: ignore[union-attr]
    return grads


def register() -> None:
    register_sharding(torch.ops.tilewise.forward.default, _forward)
    register_sharding(torch.ops.tilewise.backward.default, _backward)


register()
