"""Calls with an MLA cache and their answers by brute force in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.kv_formats import quantise, token_scales, unpack_latent

GARBAGE = 2147480000  # an unused entry of a page table


@dataclass(frozen=True)
class MlaCase:
    """`packed`: DeepSeek's fp8 format, `exact`: with scales that are powers of two, so that bfloat16 holds the numbers.
    `stored`: a quantised cache of 576 numbers, with the kind of its scale. page 0: a dense cache."""

    lengths: tuple[int, ...]
    heads: int = 4
    queries: int = 1
    page: int = 16
    packed: bool = False
    exact: bool = False
    stored: tuple[torch.dtype, str] | None = None


@dataclass
class MlaInputs:
    q: Tensor
    cache: Tensor
    lengths: Tensor
    options: dict[str, Any]
    keys: list[Tensor]  # of every sequence, (n, 576), float64


def inputs(case: MlaCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> MlaInputs:
    """Unused tokens of the cache, or their scales, are nan, unused entries of the page table out of range."""
    g = torch.Generator().manual_seed(seed)
    batch = len(case.lengths)
    page = case.page or max(case.lengths) + 3
    pages = 1 if not case.page else max(-(-n // page) for n in case.lengths) + 1
    tokens = torch.randn(batch * pages + 1, page, 1, 576, generator=g).to(dtype)
    tokens[..., 128:256] *= 8.0
    cache = tilewise.pack_mla(tokens, power_of_two=case.exact) if case.packed else tokens
    scale: Any = None
    if case.stored is not None:
        stored, kind = case.stored
        scale = token_scales(tokens, stored)  # (.., 1, 1)
        scale = scale[..., 0] if kind == "token" else None if kind == "none" else scale.amax()
        cache = quantise(tokens, torch.ones(1, 1) if scale is None else scale[..., None].view(*scale.shape, 1), stored)
        scale = float(scale) if kind == "float" else scale
    order = torch.randperm(len(cache), generator=g)[: batch * pages].int().view(batch, pages)
    exact = unpack_latent(cache, torch.float64) if case.packed else cache.double()
    if scale is not None:
        exact *= scale[..., None].double() if isinstance(scale, Tensor) else scale
    keys, used = [], torch.zeros(cache.shape[:2], dtype=torch.bool)
    for b, n in enumerate(case.lengths):
        j = torch.arange(n)
        at = order[b, j // page].long(), j % page
        keys.append(exact[at][:, 0].to(device))
        used[at] = True
    if case.stored is None:
        cache[~used] = 255 if case.packed else torch.nan
    else:
        cache.view(torch.uint8)[~used] = 127  # nan in float8
        if kind == "token":
            scale[~used] = torch.nan
    table = order.clone()
    for b, n in enumerate(case.lengths):
        table[b, -(-n // page) :] = GARBAGE
    options: dict[str, Any] = {"page_table": table.to(device)} if case.page else {"cache_rows": order[:, 0].to(device)}
    if scale is not None:
        options["k_scale"] = scale.to(device) if isinstance(scale, Tensor) else scale
    q = torch.randn(batch, case.queries, case.heads, 576, generator=g).to(device, dtype)
    return MlaInputs(q, cache.to(device), torch.tensor(case.lengths).int().to(device), options, keys)


def answer(
    q: Tensor, keys: list[Tensor], dtype: torch.dtype, causal: bool = True, weights: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries (B, Sq, H, 576) in a dtype, by brute force. `weights`: they alone are rounded to it."""
    outs, logs = [], []
    for x, k in zip(q.to(dtype), keys, strict=True):
        k = k.to(dtype)
        n_q, n = x.shape[0], k.shape[0]
        s = (x.transpose(0, 1) @ k.mT) * 576**-0.5
        at = torch.arange(n_q, device=x.device)[:, None] + n - n_q
        hidden = (torch.arange(n, device=x.device) > at) & causal
        s = s.masked_fill(hidden, -torch.inf)
        log = s.logsumexp(-1) if n else s.new_full(s.shape[:2], -torch.inf)
        p = torch.exp(s - log.masked_fill(log == -torch.inf, torch.inf)[..., None])
        outs.append((p.to(weights or dtype).to(dtype) @ k[:, :512]).transpose(0, 1))
        logs.append(log)
    return torch.stack(outs), torch.stack(logs)


HALF_UNIT = torch.finfo(torch.float32).eps / 2


def largest_score(q: Tensor, keys: list[Tensor]) -> float:
    found = ((x.double() @ k.mT).abs().max().item() for x, k in zip(q, keys, strict=True) if len(k))
    return max(found, default=0.0) * 576**-0.5


def truncation(q: Tensor, keys: list[Tensor]) -> float:
    """What tensor cores may lose of a score: they add 16 products of the 576 at a time to a float32 sum and truncate
    it, by half a unit in the last place on average."""
    return 576 / 16 * HALF_UNIT * largest_score(q, keys)


def sum_rounding(q: Tensor, keys: list[Tensor]) -> float:
    """What a float32 sum of 576 products, in the order of a CPU's library, may lose of a score: each addition half a
    unit in the last place, with either sign."""
    return 576**0.5 * HALF_UNIT * largest_score(q, keys)


def compare(
    found: tuple[Tensor, Tensor], q: Tensor, keys: list[Tensor], causal: bool = True, rounded: bool = False
) -> None:
    """Errors against float64 are at most twice those of torch in q's dtype, and a rounding. `rounded`: the kernel
    rounds keys of DeepSeek's fp8 format to q's dtype, and so does torch."""
    out, lse = found
    exact, logs = answer(q, keys, torch.float64, causal)
    plain, _ = answer(q, keys, q.dtype, causal)
    _, plain_lse = answer(q, [k.to(q.dtype) for k in keys] if rounded else keys, torch.float32, causal)
    assert torch.equal(lse.isfinite(), logs.isfinite())
    assert out.isfinite().all()
    size = exact.abs().max().item()
    error, theirs = ((x.double() - exact).abs().max().item() for x in (out, plain))
    rounding = size * (2 * torch.finfo(q.dtype).eps + sum_rounding(q, keys))
    assert error <= 2 * theirs + rounding, f"out: error {error:.1e}, torch's {theirs:.1e}, rounding {rounding:.1e}"
    some = logs.isfinite()
    error, theirs = ((x.double() - logs)[some].abs().max().item() if some.any() else 0.0 for x in (lse, plain_lse))
    rounding = 4e-6 + truncation(q, keys)
    assert error <= 2 * theirs + rounding, f"lse: error {error:.1e}, torch's {theirs:.1e}, rounding {rounding:.1e}"
    assert (out.transpose(1, 2)[~some] == 0).all()
