"""From tiles to calls of attention: the request of each call, the rows it reads, and where its results are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..mods import PROGRAMS
from ..request import Request, Spec
from .layout import merge_ranges, starts
from .partition import Partition
from .tiles import Call, Tile


class Rows(NamedTuple):
    """Ranges of rows, of `total` rows. `indices`: the rows on the device of the tensors, None if there is one range."""

    ranges: tuple[tuple[int, int], ...]
    total: int
    indices: Tensor | None = None

    @staticmethod
    def of(ranges: Sequence[tuple[int, int]], total: int, device: torch.device | str = "cpu") -> Rows:
        """Adjacent ranges become one.

        >>> Rows.of([(0, 2), (2, 5), (7, 8)], 9)
        Rows(ranges=((0, 5), (7, 8)), total=9, indices=tensor([0, 1, 2, 3, 4, 7]))
        """
        merged = merge_ranges(ranges)
        if len(merged) == 1:
            return Rows(merged, total)
        indices = torch.cat([torch.arange(0, device="cpu"), *(torch.arange(a, b, device="cpu") for a, b in merged)])
        return Rows(merged, total, indices.to(device))

    @property
    def is_all(self) -> bool:
        return self.ranges == ((0, self.total),)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """x[rows]; a view of x if there is one range."""
        if self.is_all:
            return x
        if self.indices is not None:
            return x.index_select(dim, self.indices)
        a, b = self.ranges[0]
        return x.narrow(dim, a, b - a)

    def add(self, total: Tensor, part: Tensor, dim: int = 1) -> None:
        """total[rows] += part"""
        if self.indices is None:
            self.take(total, dim).add_(part)
        elif self.ranges:
            total.index_add_(dim, self.indices, part)


class AttentionCall(NamedTuple):
    """One call of a plan, without its q, k and v: found once, for all layers and steps."""

    queries: Rows  # of q
    keys: Rows  # of k and v
    spec: Spec  # with the window of the tiles
    columns: slice  # of a bias over all tokens
    cu_q: Tensor | None  # if it has several tiles
    cu_k: Tensor | None
    position_offsets: Tensor | None  # its position in the whole sequence, for mods and dropout

    def request(self, whole: Request) -> Request:
        """The request of this call. `whole` has the ring rank's q, k and v as `Partition.key_runs` orders them, and the
        bias of all keys; a packed plan has one batch row."""
        q, k, v = self.queries.take(whole.q), self.keys.take(whole.k), self.keys.take(whole.v)
        if self.cu_q is not None:
            q, k, v = q[0], k[0], v[0]
        bias = None if whole.bias is None else self.bias_of(whole.bias)
        found = whole._replace(q=q, k=k, v=v, spec=self.spec, bias=bias, sinks=None)
        return found._replace(cu_q=self.cu_q, cu_k=self.cu_k, position_offsets=self.position_offsets)

    def bias_of(self, bias: Tensor) -> Tensor:
        """The view of a bias (B, H, rows or 1, tokens or 1), or of its gradient, that this call reads."""
        if bias.shape[2] > 1:
            bias = self.queries.take(bias, 2)
        return bias[..., self.columns] if bias.shape[3] > 1 else bias


def attention_calls(
    plan: Partition, ring_rank: int, sources: tuple[int, ...], whole: Request, first_head: int
) -> list[AttentionCall]:
    """The calls of a ring rank's queries with the keys of some sources. `whole` is as `AttentionCall.request` takes it;
    `first_head` is the number of its first head among all heads."""
    batch, n_q, heads, _ = whole.q.shape
    if 0 in (batch, heads):
        return []
    terms = needs_positions(whole, plan), whole.bias is not None
    shape = batch, n_q, whole.k.shape[1], first_head
    given = ring_rank, sources, whole.spec, terms, shape, whole.q.device
    return plan.tensors.get(("calls", *given), whole.q.device, lambda: _calls(plan, *given))


def _calls(
    plan: Partition,
    ring_rank: int,
    sources: tuple[int, ...],
    spec: Spec,
    terms: tuple[bool, bool],
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> list[AttentionCall]:
    positions, biased = terms
    batch, n_q, n_k, first_head = shape
    found = []
    for tiles in plan.calls(ring_rank, sources, positions, biased):
        queries = Rows.of([(x.q0, x.q1) for x in tiles], n_q, device)
        keys = Rows.of([(x.k0, x.k1) for x in tiles], n_k, device)
        before, after = tiles[0].window
        cu_q, cu_k = _cu_seqlens(tiles, device) if len(tiles) > 1 else (None, None)
        position_offsets = _position_offsets(plan, tiles, first_head, batch, device) if positions else None
        own = spec._replace(before=before, after=after, partial=True)
        found.append(AttentionCall(queries, keys, own, _columns(plan, tiles[0]), cu_q, cu_k, position_offsets))
    return found


def needs_positions(request: Request, plan: Partition) -> bool:
    """Whether dropout or a mod needs the position of a pair in the whole sequence, or a sharded head's number."""
    if request.seed is not None:
        return True
    indices = {"i", "j", "n_q", "n_k"} | ({"b"} if plan.packed else set()) | ({"h"} if plan.ulysses_size > 1 else set())
    score, mask = request.spec.score_mod, request.spec.mask_mod
    read = [] if mask is None else [PROGRAMS[mask].root]
    read += [] if score is None else [PROGRAMS[score].root, PROGRAMS[score].derivative]
    return any(not indices.isdisjoint(x.deps) for x in read)


def _columns(plan: Partition, tile: Tile) -> slice:
    """The columns of a tile in a bias over all tokens."""
    begin = starts(plan.lengths)[tile.document] + tile.j_0
    return slice(begin, begin + tile.step * (tile.k1 - tile.k0 - 1) + 1, max(1, tile.step))


def _cu_seqlens(tiles: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([(0, 0), *((x.q1 - x.q0, x.k1 - x.k0) for x in tiles)], dtype=torch.int32, device="cpu")
    ends = lengths.cumsum(0, dtype=torch.int32).to(device)
    return ends[:, 0].contiguous(), ends[:, 1].contiguous()


def _position_offsets(plan: Partition, tiles: Call, first_head: int, batch: int, device: torch.device) -> Tensor:
    """See tilewise.request.POSITION_OFFSETS. In a packed plan b is the number of the document."""

    def row(tile: Tile, b: int) -> list[int]:
        n_k = plan.lengths[tile.document]
        n_q = plan.queries or n_k
        return [b, first_head, tile.i_0 - (n_k - n_q), tile.j_0, tile.step, n_q, n_k]

    rows = [row(x, x.document) for x in tiles] if plan.packed else [row(tiles[0], b) for b in range(batch)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def merge_(out: Tensor, lse: Tensor, rows: Rows, out_part: Tensor, lse_part: Tensor) -> None:
    """`tilewise.merge` in place, by lse: (out, lse)[rows] becomes the attention over its keys and those of the part.

    One pass over out; on a GPU one kernel. out (B, n, H, D), lse (B, H, n); the part has as many rows as `rows`.
    """
    if not out_part.numel():
        return
    if out.is_cuda and out.dtype == torch.float32:
        from ..backends.common.merge_kernel import join_

        join_(out, lse, out_part, lse_part, rows.ranges[0][0], rows.indices)
        return
    own_out, own_lse = rows.take(out), rows.take(lse, 2)
    # the part's share of the weights: exp(lse_part) / (exp(lse) + exp(lse_part)); 0 where both are -inf
    share = (lse_part - own_lse).sigmoid_().masked_fill_(lse_part == -torch.inf, 0.0)
    own_out.lerp_(out_part, share.mT[..., None])
    torch.logaddexp(own_lse, lse_part, out=own_lse)
    if rows.indices is not None:  # then `take` has copied
        out.index_copy_(1, rows.indices, own_out)
        lse.index_copy_(2, rows.indices, own_lse)


def accumulate(total: Tensor | None, like: Tensor, rows: Rows, part: Tensor) -> Tensor:
    """`total` (None: zeros in the shape of `like`) with the part added at these rows; may be the part itself."""
    if total is None and rows.is_all:
        return part
    if total is None:
        total = part.new_zeros(like.shape)
    rows.add(total, part)
    return total
