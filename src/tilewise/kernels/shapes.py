"""The shapes of a request, as kernels see them: how many of what, and where a row lies in memory."""

from typing import NamedTuple

import triton
from torch import Tensor

from ..spec import MAX_HEAD_DIM, Request, Upstream, heads_are_queries
from .tile.tuples import View


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

    def in_rows(self, heads: int) -> "Problem":
        """With the queries of so many heads of a group as those of one."""
        return self._replace(n_q=self.n_q * heads, heads=self.heads // max(heads, 1))


def problem(request: Request) -> Problem:
    *_, n_q, heads, d = request.q.shape
    n_k, kv_heads, dv = request.v.shape[-3:]
    packed = request.cu_q is not None
    batch = request.cu_q.shape[0] - 1 if packed else request.q.shape[0]
    return Problem(batch, n_q, n_k, heads, kv_heads, d, dv, packed)


def by_group(request: Request, out: Tensor, lse: Tensor) -> tuple[Request, Tensor, Tensor]:
    """A forward with the heads of a group as queries, where `heads_are_queries`."""
    q, kv_heads = request.q, request.k.shape[-2]
    group, plain = q.shape[-2] // kv_heads, request.cu_q is None and request.is_plain
    if not plain or not heads_are_queries(q.shape[1], group, request.spec.before):
        return request, out, lse
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    lse = lse.unflatten(1, (kv_heads, group)).squeeze(-1)
    return request._replace(q=q, spec=request.spec._replace(after=None)), out, lse


def view(x: Tensor) -> View:
    """(batch, token, head, dim) strides; packed sequences have one batch row, and an axis of one place any stride."""
    outer = (0 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride(), strict=False))
    strides = (*outer, x.stride(-1)) if x.dim() == 4 else (0, *outer, x.stride(-1))
    return View(x, strides, 1 if (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31 else None)


def lined(upstream: Upstream) -> Upstream:
    """lse and its gradient as `row_pointers` finds them."""
    lse, dlse = upstream.lse, upstream.dlse
    if lse.is_contiguous() and (dlse is None or dlse.is_contiguous()):
        return upstream
    return upstream._replace(lse=lse.contiguous(), dlse=None if dlse is None else dlse.contiguous())


def padded(d: int, least: int = 16) -> int:
    """The power of two in which a head dim is computed."""
    return max(least, triton.next_power_of_2(d))
