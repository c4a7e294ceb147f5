"""Mods for random calls, each written twice: as a mod, and as plain torch for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise


@tilewise.score_mod
def relative(score, b, h, q_idx, kv_idx, slopes):  # type: ignore[no-untyped-def]
    return score + slopes[h] * (kv_idx - q_idx) / 64


@tilewise.score_mod
def table_of_distances(score, b, h, q_idx, kv_idx, table):  # type: ignore[no-untyped-def]
    return score + table[h, torch.clamp(q_idx - kv_idx, -8, 7) + 8]


@tilewise.score_mod
def gated(score, b, h, q_idx, kv_idx, sharpness, gate):  # type: ignore[no-untyped-def]
    x = score * torch.sigmoid(gate[q_idx % 5])
    return torch.where(kv_idx <= q_idx, x, x * torch.exp(-sharpness))


@tilewise.score_mod
def waves(score, b, h, q_idx, kv_idx, weight, pitch):  # type: ignore[no-untyped-def]
    return score + pitch * torch.sin(weight[b, kv_idx % 7]) if h % 2 == 0 else score - weight[b, kv_idx % 7] ** 2


@tilewise.mask_mod
def odd_heads_look_back(b, h, q_idx, kv_idx, *, q_pos):  # type: ignore[no-untyped-def]
    return (h % 2 == 0) | (kv_idx <= q_pos)


@tilewise.mask_mod
def nobody(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx < 0


@tilewise.mask_mod
def by_row(b, h, q_idx, kv_idx, ids):  # type: ignore[no-untyped-def]
    return ids[b, q_idx] == ids[b, kv_idx]


@tilewise.mask_mod
def by_lengths(b, h, q_idx, kv_idx, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    return (q_idx * kv_len + kv_idx * q_len) % 7 < 4


@tilewise.mask_mod
def by_query(b, h, q_idx, kv_idx, every, reach):  # type: ignore[no-untyped-def]
    return ((q_idx + kv_idx) % every == 0) | (kv_idx * 1.0 <= q_idx * reach - h)


@tilewise.mask_mod
def by_end(b, h, q_idx, kv_idx, steps, *, q_pos, kv_len):  # type: ignore[no-untyped-def]
    return (steps[kv_idx] % 3 == 0) | ((kv_len - kv_idx < 5) & (q_pos >= 0))


SEGMENT = 3  # tokens of a segment of `tree`


def parents_of(steps: Tensor) -> Tensor:
    """A parent for each SEGMENT tokens, from any numbers."""
    numbers = torch.arange(-(-len(steps) // SEGMENT), device=steps.device)
    return steps[: len(numbers)] % (numbers + 1) - 1


def tree(steps: Tensor) -> tilewise.mods.Mod:
    """A prefix tree of as many tokens as there are steps."""
    parents = parents_of(steps)
    ends = (torch.arange(len(parents) + 1, device=steps.device) * SEGMENT).clamp(max=len(steps))
    return tilewise.mods.prefix_tree(parents, ends)


def on_path(p: Place, steps: Tensor) -> Tensor:
    """Walks from each segment to its root."""
    parents = parents_of(steps).tolist()
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool, device=steps.device)
    for s in range(len(parents)):
        at = s
        while at >= 0:
            ancestors[s, at] = True
            at = parents[at]
    own = p.at.clamp(min=0)
    return (p.j <= p.at) & ancestors[own // SEGMENT, p.j // SEGMENT]


class Place(NamedTuple):
    """Of one sequence: its number, the heads (H, 1, 1), queries (n_q, 1) and keys (n_k,), and both lengths."""

    b: int
    h: Tensor
    i: Tensor
    j: Tensor
    n_q: int
    n_k: int

    @property
    def at(self) -> Tensor:
        """The key positions at which the queries sit."""
        return self.i + (self.n_k - self.n_q)


class Twin(NamedTuple):
    """call: its Python; tensors: name -> axes, of B, H, S (the longest sequence) and numbers; reads: b, h, or both."""

    call: str
    tensors: dict[str, tuple[Any, ...]]
    torch: Callable[..., Tensor]
    reads: str = ""


def _t5_bucket(distance: Tensor) -> Tensor:
    n = distance.abs()
    large = 2 + (torch.log(n.clamp(min=1).double() / 2) / torch.log(torch.tensor(6.0).double()) * 2 + 1e-9).long()
    return torch.where(n < 2, n, large.clamp(max=3)) + 4 * (distance > 0)


SCORE = {
    "relative": Twin(
        "twins.relative(slopes)", {"slopes": ("H",)}, lambda s, p, slopes: s + slopes[p.h] * (p.j - p.i) / 64
    ),
    "table": Twin(
        "twins.table_of_distances(table)", {"table": ("H", 16)},
        lambda s, p, table: s + table[p.h, (p.i - p.j).clamp(-8, 7) + 8],
    ),
    "gated": Twin(
        "twins.gated(sharpness, gate)", {"sharpness": (), "gate": (5,)},
        lambda s, p, sharpness, gate: (
            s * gate[p.i % 5].sigmoid() * torch.where(p.j <= p.i, 1.0, torch.exp(-sharpness)).to(s.dtype)
        ),
    ),
    "waves": Twin(
        "twins.waves(weight, 0.5)", {"weight": ("B", 7)},
        lambda s, p, weight: torch.where(
            p.h % 2 == 0, s + 0.5 * weight[p.b, p.j % 7].sin(), s - weight[p.b, p.j % 7] ** 2
        ),
    ),
    "t5": Twin(
        "tilewise.mods.t5_relative(table, max_distance=12)", {"table": (8, "H")},
        lambda s, p, table: s + table[_t5_bucket((p.j - p.at).clamp(-12, 12)), p.h],
    ),
    "softcap": Twin("tilewise.mods.softcap(2.0)", {}, lambda s, p: 2.0 * torch.tanh(s / 2.0)),
}  # fmt: skip

MASK = {
    "document": Twin(
        "tilewise.mods.document(ids=ids)", {"ids": ("B", "S")},
        lambda p, ids: ids[p.b, p.at.clamp(min=0)] == ids[p.b, p.j], "b",
    ),
    "prefix_lm": Twin(
        "tilewise.mods.prefix_lm(prefix)", {"prefix": ("B",)},
        lambda p, prefix: (p.j < prefix[p.b]) | (p.j <= p.at), "b",
    ),
    "globals": Twin(
        "tilewise.mods.window_with_globals(2, 1)", {},
        lambda p: ((p.at - p.j).abs() <= 2) | (p.j < 1) | (p.at < 1),
    ),
    "dilated": Twin(
        "tilewise.mods.dilated_window(2, 3)", {}, lambda p: ((p.at - p.j).abs() <= 6) & ((p.at - p.j) % 3 == 0)
    ),
    "neighbourhood": Twin(
        "tilewise.mods.neighbourhood_2d(4, 1)", {},
        lambda p: ((p.at // 4 - p.j // 4).abs() <= 1) & ((p.at % 4 - p.j % 4).abs() <= 1),
    ),
    "diagonal": Twin("tilewise.mods.block_diagonal(3)", {}, lambda p: p.at // 3 == p.j // 3),
    "strided": Twin(
        "tilewise.mods.strided_sparse(3)", {}, lambda p: (p.j <= p.at) & ((p.at - p.j < 3) | (p.j % 3 == 2))
    ),
    "tree": Twin("twins.tree(steps)", {"steps": ("S",)}, on_path),
    "odd heads": Twin(
        "twins.odd_heads_look_back()", {}, lambda p: (p.h % 2 == 0) | (p.j <= p.at), "h"
    ),
    "nobody": Twin("twins.nobody()", {}, lambda p: p.j < 0),
}  # fmt: skip

# These read the number of a query, or both lengths: those of the whole sequence, for a block mask that is cut.
MASK_BY_INDEX = {
    "row": Twin("twins.by_row(ids)", {"ids": ("B", "S")}, lambda p, ids: ids[p.b, p.i] == ids[p.b, p.j], "b"),
    "lengths": Twin("twins.by_lengths()", {}, lambda p: (p.i * p.n_k + p.j * p.n_q) % 7 < 4),
    "query": Twin(
        "twins.by_query(3, 0.5)", {}, lambda p: ((p.i + p.j) % 3 == 0) | (p.j * 1.0 <= p.i * 0.5 - p.h), "h"
    ),
    "end": Twin(
        "twins.by_end(steps)", {"steps": ("S",)},
        lambda p, steps: (steps[p.j] % 3 == 0) | ((p.n_k - p.j < 5) & (p.at >= 0)),
    ),
}  # fmt: skip
