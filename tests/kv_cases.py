"""Calls with a KV cache, built from a few words, and their answers by brute force in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

GARBAGE = 2147480000  # what nobody may look at


@dataclass(frozen=True)
class KvCase:
    """lengths: keys in the cache; queries and new tokens of every sequence (an int: of each). page 0: a dense cache."""

    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1
    new: int | tuple[int, ...] = 0
    page: int = 16
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dim_v: int = 0
    csr: bool = False
    starts: tuple[int, ...] = ()
    padding: int = 0  # rows of a packed q past the last sequence
    layout: str = "plain"  # of the pool: interleaved (K and V of a page side by side), heads_first, wide
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = {name: x for name, x in vars(self).items() if x != getattr(KvCase((1,)), name)}
        return " ".join(f"{name}={x}" for name, x in shown.items())

    def but(self, **changes: Any) -> KvCase:
        return replace(self, **changes)

    def each(self, n: int | tuple[int, ...]) -> list[int]:
        return [n] * len(self.lengths) if isinstance(n, int) else list(n)


@dataclass
class KvInputs:
    case: KvCase
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    options: dict[str, Any]
    keys: list[Tensor]  # of every sequence, (n, Hk, D), new ones included
    values: list[Tensor]
    rows: list[Tensor]  # queries of every sequence


def pool(case: KvCase, pages: int, page: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """K and V pools full of NaN."""
    dims = case.dim, case.dim_v or case.dim
    if case.layout == "interleaved":
        both = torch.full((pages, page, case.kv_heads, sum(dims)), torch.nan, dtype=dtype, device=device)
        return both[..., : dims[0]], both[..., dims[0] :]
    if case.layout == "heads_first":
        k, v = (torch.full((pages, case.kv_heads, page, d), torch.nan, dtype=dtype, device=device) for d in dims)
        return k.transpose(1, 2), v.transpose(1, 2)
    if case.layout == "wide":  # all layers within one block
        k, v = (torch.full((pages, 3, page, case.kv_heads, d), torch.nan, dtype=dtype, device=device) for d in dims)
        return k[:, 1], v[:, 2]
    k, v = (torch.full((pages, page, case.kv_heads, d), torch.nan, dtype=dtype, device=device) for d in dims)
    return k, v


def inputs(case: KvCase, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> KvInputs:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device=device, dtype=dtype)

    queries, new = case.each(case.queries), case.each(case.new)
    totals = [a + b for a, b in zip(case.lengths, new, strict=True)]
    dims = case.dim, case.dim_v or case.dim
    keys, values = ([randn(n, case.kv_heads, d) for n in totals] for d in dims)
    rows = [randn(n, case.heads, case.dim) for n in queries]
    batch = len(case.lengths)
    options: dict[str, Any] = dict(case.options)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if case.page:
        needed = [-(-n // case.page) for n in totals]
        order = torch.randperm(sum(needed) + 3, generator=g)
        k, v = pool(case, len(order), case.page, dtype, device)
        ids, entries = iter(order.tolist()), []
        for n in needed:
            entries.append([next(ids) for _ in range(n)])
        if case.csr:
            flat = torch.tensor([x for row in entries for x in row], dtype=torch.int32, device=device)
            indptr = torch.tensor([0, *needed]).cumsum(0).int().to(device)
            options["page_table"] = indptr, flat
        else:
            width = max([*needed, 1]) + 2
            table = torch.full((batch, width), GARBAGE, dtype=torch.int32)
            for b, row in enumerate(entries):
                table[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
                table[b, len(row) + 1 :] = -1
            options["page_table"] = table.to(device)

        def place(b: int, j: int) -> tuple[int, int]:
            return entries[b][j // case.page], j % case.page

    else:
        k, v = pool(case, batch + 2, max([*totals, 1]) + 5, dtype, device)
        order = torch.randperm(batch + 2, generator=g)[:batch]
        options["cache_rows"] = order.int().to(device)

        def place(b: int, j: int) -> tuple[int, int]:
            return int(order[b]), j

    starts = case.starts or (0,) * batch
    for b, length in enumerate(case.lengths):
        for j in range(starts[b], length):
            row, at = place(b, j)
            k[row, at], v[row, at] = keys[b][j], values[b][j]
    if case.starts:
        options["starts"] = torch.tensor(case.starts, dtype=torch.int32, device=device)
    if isinstance(case.new, tuple):
        options["k_new"], options["v_new"] = (
            torch.cat([x[b][n:] for b, n in enumerate(case.lengths)]) for x in (keys, values)
        )
        options["cu_seqlens_new"] = torch.tensor([0, *new]).cumsum(0).int().to(device)
    elif case.new:
        options["k_new"], options["v_new"] = (
            torch.stack([x[b][n:] for b, n in enumerate(case.lengths)]) for x in (keys, values)
        )
    if isinstance(case.queries, tuple):
        q = torch.cat([*rows, torch.full((case.padding, case.heads, case.dim), torch.nan, dtype=dtype, device=device)])
        options["cu_seqlens_q"] = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    else:
        q = torch.stack(rows) if rows else randn(0, 1, case.heads, case.dim)
    return KvInputs(case, q, k, v, lengths, options, keys, values, rows)


Hides = Callable[[int, int, int], bool]  # (sequence, query, key)
Score = Callable[[Tensor, int], Tensor]  # of the scores (H, n_q, n_k) of a sequence


def expected(
    x: KvInputs, *, causal: bool = True, window: Any = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi: Tensor | None = None, hides: Hides | None = None, tree: Any = None,
    score: Score | None = None, plain: torch.dtype = torch.float64, most: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of every query in order, (T, H, Dv) and (H, T), computed in the dtype `plain`. `most` gets the
    largest score of each head (H,) of every sequence."""
    case = x.case
    group = case.heads // case.kv_heads
    outs, logs = [], []
    for b, (q, k, v) in enumerate(zip(x.rows, x.keys, x.values, strict=True)):
        n_q, n_k = q.shape[0], k.shape[0]
        q, k, v = (t.to(plain).transpose(0, 1) for t in (q, k, v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        s = (q @ k.mT) * (case.dim**-0.5 if scale is None else scale)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if score is not None:
            s = score(s, b)
        at = torch.arange(n_q, device=q.device)[:, None] + n_k - n_q
        j = torch.arange(n_k, device=q.device)[None]
        if alibi is not None:
            s = s - alibi.to(plain)[:, None, None] * (at - j).abs()
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
        if causal:
            seen &= j <= at
        if window is not None:
            seen &= (j >= at - window[0]) if window[0] is not None else seen
            seen &= (j <= at + window[1]) if window[1] is not None else seen
        if case.starts:
            seen &= j >= case.starts[b]
        if hides is not None:
            seen &= ~torch.tensor(
                [[hides(b, i, key) for key in range(n_k)] for i in range(n_q)], dtype=torch.bool
            ).view(n_q, n_k).to(seen.device)
        if tree is not None:
            first = max(n_k - n_q, 0)
            drafts = torch.tensor(tree[b], dtype=torch.bool, device=q.device)
            seen[:, first:] &= drafts[:n_q, n_q - (n_k - first) : n_q]
        s = s.masked_fill(~seen, -torch.inf)
        if most is not None:
            most.append(s.flatten(1).amax(1) if s[0].numel() else s.new_full(s.shape[:1], -torch.inf))
        column = s.new_full((case.heads, n_q, 1), -torch.inf)
        if sinks is not None:
            column = sinks.to(plain)[:, None, None].expand(column.shape)
        s = torch.cat([s, column], -1)
        m = s.amax(-1, keepdim=True)
        m = m.masked_fill(m == -torch.inf, 0.0)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True)
        log = (m + l.log()).squeeze(-1)
        weights = (p / l.masked_fill(l == 0, 1))[..., :-1]
        outs.append((weights.nan_to_num() @ v.nan_to_num()).transpose(0, 1))
        logs.append(log)
    padding = x.q.new_zeros(case.padding, case.heads, case.dim_v or case.dim).to(plain)
    return torch.cat([*outs, padding]), torch.cat([*logs, padding[..., 0].mT - torch.inf], 1)


def flat(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Sq, H, D), (B, H, Sq) -> (T, H, D), (H, T)"""
    if out.dim() == 3:
        return out, lse
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def compare(found: tuple[Tensor, Tensor], x: KvInputs, **options: Any) -> None:
    """Errors against float64 are at most twice those of plain torch in the same dtype, and a rounding."""
    out, lse = flat(*found)
    exact, logs = expected(x, **options)
    plain_out, _ = expected(x, plain=out.dtype if out.dtype != torch.float64 else torch.float64, **options)
    _, plain_lse = expected(x, plain=torch.float32, **options)
    assert torch.equal(lse.isfinite(), logs.isfinite()), "lse is not finite where it should be, or the other way round"
    assert out.isfinite().all(), "out is not finite"
    unit = torch.finfo(out.dtype).eps
    size = exact.abs().max().item() if exact.numel() else 0.0
    error, theirs = _largest(out, exact), _largest(plain_out, exact)
    assert error <= 2 * theirs + 2 * unit * size, f"out: error {error:.1e}, torch's {theirs:.1e}"
    error, theirs = _largest(lse, logs), _largest(plain_lse, logs)
    rounding = 4 * torch.finfo(torch.float32).eps * 8
    if out.element_size() == 2:  # tanh of the hardware: 11 bits, as fine as the inputs
        rounding += (x.options | options).get("softcap", 0.0) * 2.0**-11
    assert error <= 2 * theirs + rounding, f"lse: error {error:.1e}, torch's {theirs:.1e}"
    assert (out[(lse == -torch.inf).mT] == 0).all()


def _largest(x: Tensor, exact: Tensor) -> float:
    error = (x.double() - exact.double()).abs()[exact.isfinite()]
    return error.max().item() if error.numel() else 0.0
