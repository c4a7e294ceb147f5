"""From tiles to calls of attention: which rows they take, where their results go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mods import PROGRAMS
from ..request import Request, Spec
from .division import Division
from .layout import lasting, starts
from .tiles import Call, Tile


class Rows(NamedTuple):
    """Some rows of `total`: a stretch, or stretches taken together."""

    ranges: tuple[tuple[int, int], ...]
    total: int

    @staticmethod
    def of(ranges: Sequence[tuple[int, int]], total: int) -> Rows:
        """Neighbours become one.

        >>> Rows.of([(0, 2), (2, 5), (7, 8)], 9).ranges
        ((0, 5), (7, 8))
        """
        found: list[tuple[int, int]] = []
        for a, b in ranges:
            if found and found[-1][1] == a:
                found[-1] = found[-1][0], b
            else:
                found.append((a, b))
        return Rows(tuple(found), total)

    @property
    def is_all(self) -> bool:
        return self.ranges == ((0, self.total),)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """These rows; a view, if they are a stretch."""
        if self.is_all:
            return x
        if len(self.ranges) == 1:
            a, b = self.ranges[0]
            return x.narrow(dim, a, b - a)
        return x.index_select(dim, _index(self.ranges, x.device))

    def add(self, total: Tensor, part: Tensor, dim: int = 1) -> None:
        """total[rows] += part"""
        if len(self.ranges) == 1:
            self.take(total, dim).add_(part)
        elif self.ranges:
            total.index_add_(dim, _index(self.ranges, total.device), part)

    def put(self, total: Tensor, part: Tensor, dim: int = 1) -> None:
        """total[rows] = part, which `take` has given and which may be a view of it."""
        if len(self.ranges) != 1:
            total.index_copy_(dim, _index(self.ranges, total.device), part)


@lru_cache(4096)
@lasting
def _index(ranges: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in ranges)]).to(device)


class Part(NamedTuple):
    """One call: the request, the rows of its queries and keys, and what of the bias it takes."""

    request: Request
    rows: Rows
    keys: Rows
    bias: tuple[slice, ...]


def is_placed(request: Request, packed: bool, heads: bool) -> bool:
    """Whether mods or dropout ask where a pair lies in the whole."""
    if request.seed is not None:
        return True
    asked = {"i", "j", "n_q", "n_k"} | ({"b"} if packed else set()) | ({"h"} if heads else set())
    keys = (request.spec.score_mod, request.spec.mask_mod)
    return any(key is not None and not asked.isdisjoint(PROGRAMS[key].root.deps) for key in keys)


class Recipe(NamedTuple):
    """What the calls of a plan have in common, whatever their tensors hold: found once, for all layers and steps."""

    tile: Tile
    rows: Rows
    keys: Rows
    spec: Spec
    cu_q: Tensor | None
    cu_k: Tensor | None
    origin: Tensor | None


def parts(plan: Division, station: int, sources: tuple[int, ...], whole: Request, first_head: int) -> Iterator[Part]:
    """The calls of a station with the keys of some others. `whole`: q of the station, k and v as `Division.buffer` has
    them, the bias with all keys; dense tensors (a packed plan has one batch row)."""
    q, k, v, spec, bias, _, score, _, _, seed, mask, blocks, _ = whole
    batch, n_q, heads, _ = q.shape
    if 0 in (batch, heads):
        return
    placed = is_placed(whole, plan.packed, plan.width > 1)
    # the columns of a bias jump where the runs do
    shape = n_q, k.shape[1], batch, first_head
    for tile, rows, keys, own, cu_q, cu_k, origin in _recipes(
        plan, station, sources, spec, placed, bias is not None, shape, q.device
    ):
        q_part, k_part, v_part = rows.take(q), keys.take(k), keys.take(v)
        if cu_q is not None:
            q_part, k_part, v_part = q_part[0], k_part[0], v_part[0]
        at = _bias_at(plan, tile, bias)
        some = None if bias is None else bias[at]
        request = Request(
            q_part, k_part, v_part, own, some, None, score, cu_q, cu_k, seed, mask, blocks, origin
        )  # fmt: skip
        yield Part(request, rows, keys, at)


@lru_cache(4096)
@lasting
def _recipes(
    plan: Division, station: int, sources: tuple[int, ...], spec: Spec, placed: bool, biased: bool,
    shape: tuple[int, int, int, int], device: torch.device,
) -> list[Recipe]:  # fmt: skip
    n_q, n_k, batch, first_head = shape
    found = []
    for call in plan.calls(station, sources, placed or biased, biased):
        rows = Rows.of([(x.q0, x.q1) for x in call.tiles], n_q)
        keys = Rows.of([(x.k0, x.k1) for x in call.tiles], n_k)
        before, after = call.window
        cu_q, cu_k = _ends(call, device) if len(call.tiles) > 1 else (None, None)
        origin = _origin(plan, call, first_head, batch, device) if placed else None
        own = spec._replace(before=before, after=after, partial=True)
        found.append(Recipe(call.tiles[0], rows, keys, own, cu_q, cu_k, origin))
    return found


def _bias_at(plan: Division, tile: Tile, bias: Tensor | None) -> tuple[slice, ...]:
    """Of a bias (B, H, rows of the station, all tokens), what a tile takes."""
    if bias is None:
        return ()
    begin = starts(plan.lengths)[tile.document] + tile.j_0
    keys = slice(begin, begin + tile.step * (tile.k1 - tile.k0 - 1) + 1, tile.step)
    everything = slice(None)
    return (
        everything, everything, slice(tile.q0, tile.q1) if bias.shape[2] > 1 else everything,
        keys if bias.shape[3] > 1 else everything,
    )  # fmt: skip


def _ends(call: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([(0, 0), *((x.q1 - x.q0, x.k1 - x.k0) for x in call.tiles)], dtype=torch.int32)
    ends = lengths.cumsum(0, dtype=torch.int32).to(device)
    return ends[:, 0].contiguous(), ends[:, 1].contiguous()


def _origin(plan: Division, call: Call, first_head: int, batch: int, device: torch.device) -> Tensor:
    """See tilewise.request.ORIGIN. Of packed documents b is the document's number."""

    def row(tile: Tile, b: int) -> list[int]:
        n_k = plan.lengths[tile.document]
        n_q = plan.queries or n_k
        return [b, first_head, tile.i_0 - (n_k - n_q), tile.j_0, tile.step, n_q, n_k]

    rows = [(x, x.document) for x in call.tiles] if plan.packed else [(call.tiles[0], b) for b in range(batch)]
    found = [row(*x) for x in rows]
    return torch.tensor(found, dtype=torch.int32, device=device)


def merge_(out: Tensor, lse: Tensor, rows: Rows, out_part: Tensor, lse_part: Tensor) -> None:
    """`tilewise.merge` in place: (out, lse)[rows] becomes the attention over these keys and those before. One pass over
    out; on a GPU it is one kernel.

    out (B, n, H, D), lse (B, H, n); the parts of as many rows as `rows` has
    """
    if not out_part.numel():
        return
    if out.is_cuda and out.dtype == torch.float32:
        from ..backends.common.merge_kernel import join_

        index = None if len(rows.ranges) == 1 else _index(rows.ranges, out.device)
        join_(out, lse, out_part, lse_part, rows.ranges[0][0], index)
        return
    own, log = rows.take(out), rows.take(lse, 2)
    # its share of the weights; 0 where it saw nothing, even if nobody has seen anything
    share = (lse_part - log).sigmoid_().masked_fill_(lse_part == -torch.inf, 0.0)
    own.lerp_(out_part, share.mT[..., None])
    torch.logaddexp(log, lse_part, out=log)
    rows.put(out, own)
    rows.put(lse, log, 2)


def added(total: Tensor | None, like: Tensor, rows: Rows, part: Tensor) -> Tensor:
    """total, zero if None, with the part added at these rows."""
    if total is None and rows.is_all:
        return part
    if total is None:
        total = part.new_zeros(like.shape)
    rows.add(total, part)
    return total


def zeros(like: Tensor, dtype: Any) -> Tensor:
    return like.new_zeros(like.shape, dtype=dtype)
