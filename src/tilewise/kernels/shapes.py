"""The shapes of a request, as kernels see them: how many of what, and where a row lies in memory."""

from typing import NamedTuple

import triton
from torch import Tensor

from ..spec import MAX_HEAD_DIM, Request, heads_are_queries
from .tile import View


class Problem(NamedTuple):
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


def problem(request: Request) -> Problem:
    *_, n_q, heads, d = request.q.shape
    n_k, kv_heads, dv = request.v.shape[-3:]
    packed = request.cu_q is not None
    batch = request.cu_q.shape[0] - 1 if packed else request.q.shape[0]
    return Problem(batch, n_q, n_k, heads, kv_heads, d, dv, packed)


def by_group(request: Request, out: Tensor, lse: Tensor) -> tuple[Request, Tensor, Tensor]:
    """A forward with the heads of a group as queries, where `heads_are_queries`."""
    q, kv_heads = request.q, request.k.shape[-2]
    group = q.shape[-2] // kv_heads
    if not (
        request.cu_q is None and request.is_plain and heads_are_queries(q.shape[1], group, request.spec.before)
    ):  # fmt: skip
        return request, out, lse
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    lse = lse.unflatten(1, (kv_heads, group)).squeeze(-1)
    return request._replace(q=q, spec=request.spec._replace(after=None)), out, lse


def view(x: Tensor) -> View:
    """(batch, token, head, dim) strides; packed sequences have one batch row."""
    strides = x.stride() if x.dim() == 4 else (0, *x.stride())
    return View(x, strides, 1 if (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31 else None)


def row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def padded(d: int, least: int = 16) -> int:
    """The power of two in which a head dim is computed."""
    return max(least, triton.next_power_of_2(d))
