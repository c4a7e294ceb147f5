"""The shapes of a request and the views of its tensors, as kernels take them."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...request import MAX_HEAD_DIM, Request, heads_are_queries
from .device.structs import View
from .launch import Memory


class CallShape(NamedTuple):
    """The shapes of one call. Packed sequences count as one batch row of `tokens`, tiled together."""

    batch: int
    n_q: int
    n_k: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    packed: bool

    def tiles(self, n: int, block: int) -> int:
        return n // block + self.batch if self.packed else -(-n // block)

    def programs(self, n: int, heads: int, block: int) -> int:
        return self.tiles(n, block) * heads * (1 if self.packed else self.batch)

    def grid(self, n: int, heads: int, block: int) -> tuple[int, int, int]:
        """The arguments `tiles`, `heads` and `batch` of a kernel (structs.Grid)."""
        return self.tiles(n, block), heads, self.batch

    def in_rows(self, heads: int) -> "CallShape":
        """The same with `heads` query heads of a group as one head with more queries."""
        return self._replace(n_q=self.n_q * heads, heads=self.heads // max(heads, 1))


def call_shape(request: Request) -> CallShape:
    *_, n_q, heads, d = request.q.shape
    n_k, kv_heads, dv = request.v.shape[-3:]
    batch = request.q.shape[0] if request.cu_q is None else request.cu_q.shape[0] - 1
    return CallShape(batch, n_q, n_k, heads, kv_heads, d, dv, packed=request.cu_q is not None)


def sequences_and_window(request: Request) -> tuple[Any, ...]:
    """The arguments cu_q, cu_k, n_q, n_k, before and after of a kernel."""
    size, spec = call_shape(request), request.spec
    return request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after


def by_group(request: Request, out: Tensor, lse: Tensor) -> tuple[Request, Tensor, Tensor]:
    """The same forward with the heads of a group as queries, if `heads_are_queries`."""
    q, kv_heads = request.q, request.k.shape[-2]
    group, plain = q.shape[-2] // kv_heads, request.cu_q is None and request.is_plain
    if not plain or not heads_are_queries(q.shape[1], group, request.spec.before):
        return request, out, lse
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    lse = lse.unflatten(1, (kv_heads, group)).squeeze(-1)
    return request._replace(q=q, spec=request.spec._replace(after=None)), out, lse


def view(x: Tensor) -> View:
    """The View of a (batch, token, head, dim) or packed (token, head, dim) tensor. Axes of size 1 have stride 0."""
    outer = (0 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride(), strict=False))
    strides = (*outer, x.stride(-1)) if x.dim() == 4 else (0, *outer, x.stride(-1))
    is_large = (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31
    remainders = {stride % 16 for stride in strides[:3]}
    return View(x, (*strides, 1 if is_large else None, 1 if not is_large and remainders in ({8}, {0, 8}) else None))


def padded(d: int, least: int = 16) -> int:
    """The power of two in which a head dim is computed."""
    return max(least, int(triton.next_power_of_2(d)))


def new_results(request: Request, memory: Memory) -> tuple[Tensor, Tensor]:
    """Memory for out and lse."""
    *outer, tokens, heads, _ = request.q.shape
    out = memory.empty((*outer, tokens, heads, request.v.shape[-1]), request.result_dtype)
    return out, memory.empty((*outer, heads, tokens), torch.float32)


def new_max_logit(request: Request, memory: Memory) -> Tensor | None:
    """Memory for the largest score of each head, (batch, heads) or packed (heads,), if the call returns it."""
    if not request.spec.max_logit:
        return None
    return memory.empty((*request.q.shape[:-3], request.q.shape[-2]), torch.float32)


def new_gradients(request: Request, memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v."""
    dq, dk, dv = (memory.empty(x.shape, request.result_dtype) for x in request[:3])
    return dq, dk, dv
