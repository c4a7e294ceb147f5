"""How the registered ops are computed on DTensors: whole batch rows or whole heads to a rank, never parts of a sequence
(that is for tilewise.distributed). Imported when a DTensor is first met.

    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))    # heads, as in tensor parallel models
    out = tilewise.attention(q, k, v, causal=True)                           # out: Shard(2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ..mods import PROGRAMS
from ..spec import ARGUMENTS, Request, request_of
from ..torch_private import register_sharding

ALL = Replicate()


def _ways(request: Request, ranks: int) -> list[tuple[Any, list[Any], Any, Any]]:
    """(placement of q, k, v, out), those of the other tensors, of lse, and what a term's sum becomes: for each way."""
    given = request.tensors()[3:]
    ways: list[tuple[Any, list[Any], Any, Any]] = [(ALL, [None if x is None else ALL for x in given], ALL, ALL)]
    keys = (request.spec.score_mod, request.spec.mask_mod)
    asked = frozenset().union(*(PROGRAMS[key].root.deps for key in keys if key is not None))
    if request.seed is not None or request.blocks or request.origin is not None:
        return ways  # they count batch rows and heads from 0
    packed, kv_heads = request.cu_q is not None, request.k.shape[-2]
    if not packed and "b" not in asked and request.q.shape[0] % ranks == 0:
        ways.append((Shard(0), _placed(request, 0, None), Shard(0), 0))
    if "h" not in asked and kv_heads % ranks == 0:
        ways.append((Shard(1 if packed else 2), _placed(request, 1, 0), Shard(0 if packed else 1), 1))
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
    return [([qkv, lse], [qkv, qkv, qkv, *others, *scalars]) for qkv, others, lse, _ in _ways(request, _ranks(request))]


def _backward(out: Any, lse: Any, dout: Any, dlse: Any, *call: Any) -> Any:
    request = request_of(*call)
    scalars = [None] * (ARGUMENTS - 4)
    return [
        ([qkv] * 3, [qkv, row, qkv, None if dlse is None else row, qkv, qkv, qkv, *others, *scalars])
        for qkv, others, row, _ in _ways(request, _ranks(request))
    ]


def _ranks(request: Request) -> int:
    return int(request.q.mesh.size())  # type: ignore[attr-defined]


def register() -> None:
    register_sharding(torch.ops.tilewise.forward.default, _forward)
    register_sharding(torch.ops.tilewise.backward.default, _backward)


register()
