"""The backend "torch": torch's own fused attention on a CPU, where the result keeps the contract of `attention`.

Its loops skip no masked key of a tile: such a key has weight 0, and 0 * NaN = NaN reaches rows that do not see it. So
where a result is not finite everywhere, the reference computes it again. That costs only time where the NaN is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..request import INTERPRETER, BackwardInputs, Gpu, Request
from ..torch_internals import cpu_flash, cpu_flash_backward
from . import reference
from .protocol import KvBackend, Runner
from .reference import ReferenceBackend
from .reference.tiled import LARGE_LSE

# Elements of a row's keys from which one query is computed by matrix products: torch's kernel multiplies it with one
# key after another, 1 to 2 ns for an element, and the products start 8 operations.
LEAST_KEYS = 1 << 15


def hides_nothing(request: Request) -> bool:
    """Whether every query sees every key. Query 0 is at key position n_k - n_q, the last query at n_k - 1."""
    before, after = request.spec.before, request.spec.after
    return (after is None or after >= request.q.shape[1] - 1) and (before is None or before >= request.k.shape[1] - 1)


def is_causal(request: Request) -> bool:
    """Whether query i sees the keys 0 to i: torch's causal mask, which begins top left."""
    return request.spec.before is None and request.spec.after == 0 and request.q.shape[1] == request.k.shape[1]


# Each says what keeps a call from these kernels, and how it is seen. The first that holds is the error of
# backend="torch".
RULES: tuple[tuple[str, Callable[[Request], bool]], ...] = (
    ("the tensors are not on a CPU", lambda x: x.q.device.type != "cpu"),
    ("this torch has no fused attention for CPUs", lambda x: cpu_flash is None or cpu_flash_backward is None),
    ("packed sequences", lambda x: x.cu_q is not None),
    ("a bias, sinks, mods or dropout", lambda x: not x.is_plain),
    (
        "return_max_logit, precision or a part of a larger call",
        lambda x: x.spec.max_logit or x.spec.precision is not None or x.spec.partial or bool(x.spec.token_boxes),
    ),
    ("no queries, keys, heads or batch", lambda x: 0 in (*x.q.shape, *x.k.shape)),  # torch 2.13 divides by zero
    ("values of another head dim than keys", lambda x: x.q.shape[-1] != x.v.shape[-1]),
    ("a window, or causal with other numbers of queries and keys", lambda x: not (is_causal(x) or hides_nothing(x))),
)


class TorchBackend(ReferenceBackend):
    """It has the reference's derivatives of higher order, and no KV cache."""

    name = "torch"
    reason = "torch's fused kernels for CPUs"
    kv: KvBackend | None = None

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        if gpu is not None and gpu != INTERPRETER:
            return "the tensors are on a GPU"
        return next((message for message, holds in RULES if holds(request)), None)

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        spec = request.spec
        return forward_runner(request, lambda tensors: reference.forward(Request.of(spec, tensors)), needs_lse)

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        """That of the reference where lse has a gradient: torch's kernel does not take one."""
        runner = super().backward_runner(request, bwd_inputs)
        return runner if bwd_inputs.dlse is not None else backward_runner(request, runner)


def forward_runner(request: Request, reference: Runner, needs_lse: bool) -> Runner:
    """Tensors: q, k, v. Results: out, lse. If lse is needed, 16-bit inputs are computed in float32: torch's kernel has
    a fast exp for them, which leaves an error of 6e-5 in lse."""
    q, spec = request.q, request.spec
    causal, scale, dtype = is_causal(request), spec.scale, q.dtype
    if q.shape[1] == 1 and request.k[0].numel() * (q.shape[2] // request.k.shape[2]) >= LEAST_KEYS:
        return one_query_runner(request, reference)
    inner = torch.promote_types(dtype, torch.float32) if needs_lse else dtype
    total = torch.float32 if inner == torch.float16 else inner  # a sum in float16 may overflow
    is_ready = inner == dtype and all(x.stride(-1) == 1 for x in request[:3])  # a plan is for these strides

    def run(tensors: Sequence[Any]) -> Sequence[Tensor]:
        q, k, v = tensors if is_ready else [x.to(inner).contiguous() for x in tensors]
        out, lse = cpu_flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale)
        out = out.transpose(1, 2).contiguous()  # it has q's layout: usually this one already
        if not math.isfinite(out.sum(dtype=total)):
            return reference(tensors)
        return (out.to(dtype), lse.contiguous()) if needs_lse else (out, lse)

    return run


def one_query_runner(request: Request, reference: Runner) -> Runner:
    """`forward_runner` of one query in each batch row: the query heads of a KV head are the rows of one product."""
    q, k, scale = request.q, request.k, request.spec.scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, _, heads, d = q.shape
    group = heads // k.shape[2]

    def run(tensors: Sequence[Any]) -> Sequence[Tensor]:
        q, k, v = tensors
        out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, 1), dtype=dtype)
        with torch.autocast("cpu", enabled=False):
            for b in range(batch):
                q_b = (q[b].to(dtype) * scale).view(-1, group, d)  # (Hk, G, D)
                s = torch.bmm(q_b, k[b].to(dtype).permute(1, 2, 0))
                lse[b] = s.logsumexp(-1).view(-1, 1)
                out[b] = torch.bmm(s.softmax(-1), v[b].to(dtype).transpose(0, 1)).view(1, heads, d)
        return (out, lse) if math.isfinite(out.sum(dtype=dtype)) else reference(tensors)

    return run


def backward_runner(request: Request, reference: Runner) -> Runner:
    """Tensors: q, k, v, out, lse, dout, None. Results: dq, dk, dv. In float32 at least: in 16 bits torch's kernel sums
    dk and dv in 16 bits, with three times the error of its unfused attention, and is slower."""
    causal, scale, dtype = is_causal(request), request.spec.scale, request.q.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def run(tensors: Sequence[Any]) -> Sequence[Tensor]:
        q, k, v, out, lse, dout, _ = tensors
        if not bool(lse.abs().amax() < LARGE_LSE):  # exp(s - lse) of larger ones has the rounding of lse
            return reference(tensors)
        q, k, v, out, dout = (heads_first(x.to(wide)) for x in (q, k, v, out, dout))
        grads = cpu_flash_backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        grads = [x.transpose(1, 2).contiguous() for x in grads]
        if not all(math.isfinite(x.sum()) for x in grads):
            return reference(tensors)
        return [x.to(dtype) for x in grads]

    return run


def heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) -> (B, H, S, D), whose rows are contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)
