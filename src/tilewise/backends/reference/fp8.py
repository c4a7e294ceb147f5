"""precision="fp8" in torch: q, k and v are quantised as `fp8_format` says, and the products are in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...request import Request
from ..common.fp8_format import (
    KEY_BLOCK,
    LARGE_KEY,
    LARGEST_FP8,
    LEAST_MAXIMUM,
    MEAN_KEYS,
    MEDIAN_KEYS,
    OWN_SCALES,
    is_smoothed,
    sampled_keys,
)

Results = tuple[Tensor, ...]


def quantised(x: Tensor, block: int, own: bool = False) -> tuple[Tensor, Tensor]:
    """(stored values, scales) of one sequence x, (tokens, heads, dim), in blocks: (blocks, block, heads, dim), with
    zeros after the last token, and (blocks, 1, heads, 1); with `own`, where blocks may have a scale for each row,
    (blocks, block, heads, 1)."""
    parts = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[0] % block)).unflatten(0, (-1, block))
    finite = parts.isfinite()
    of_row = parts.abs().masked_fill(~finite, 0.0).amax(3, keepdim=True)
    largest = of_row.amax(1, keepdim=True)
    if own:
        least = of_row.masked_fill(of_row == 0, torch.inf).amin(1, keepdim=True)
        largest = torch.where(least < largest * OWN_SCALES, of_row, largest)
    largest = largest.clamp_min(LEAST_MAXIMUM)
    top = torch.full_like(largest, LARGEST_FP8)  # torch multiplies by a reciprocal where one operand is a number
    stored = (parts * (top / largest)).clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(~finite, torch.nan)
    return stored.to(torch.float8_e4m3fn), largest / top


def dequantised(x: Tensor, block: int, own: bool = False) -> Tensor:
    """x, (tokens, heads, dim), as its stored values say, in float32."""
    if x.shape[0] == 0:
        return x.float()
    stored, scale = quantised(x, block, own)
    return (stored.float() * scale).flatten(0, 1)[: x.shape[0]]


def mean_key(k: Tensor) -> Tensor:
    """The mean key, (heads, dim), of keys (tokens, heads, dim). Values that are not finite count as 0."""
    some = k[:: max(1, k.shape[0] // MEAN_KEYS)].float()
    if some.numel() == 0:
        return some.sum(0)
    some = some.masked_fill(~some.isfinite(), 0.0)
    largest = some.abs().amax(-1, keepdim=True)
    median = largest[:: -(-some.shape[0] // MEDIAN_KEYS)].median(0).values
    counts = largest <= LARGE_KEY * median
    return some.masked_fill(~counts, 0.0).sum(0) / counts.sum(0)


def forward(request: Request, attend: Callable[[Request], Results]) -> Results:
    """The results of `attend` for the dequantised request, rounded to the dtype of q."""
    q, k, v, spec = request[:4]
    shift = None
    if request.cu_q is None:
        sequences = [(b, b) for b in range(q.shape[0])]
    else:
        assert request.cu_k is not None
        ends = [x.tolist() for x in (request.cu_q, request.cu_k)]
        sequences = [tuple(slice(*cu[b : b + 2]) for cu in ends) for b in range(len(ends[0]) - 1)]  # type: ignore[misc]
    q8, k8, v8 = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    if is_smoothed(request):
        shift = q.new_zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    for queries, keys in sequences:
        q_all, k_all = q[queries].float(), k[keys].float()
        if shift is not None:
            mean = mean_key(k_all[: sampled_keys(spec.after, q_all.shape[0], k_all.shape[0])])
            k_all = k_all - mean
            group = q.shape[-2] // max(k.shape[-2], 1)
            by_head = torch.einsum("thd,hd->ht", q_all, mean.repeat_interleave(group, 0))
            if request.cu_q is None:
                shift[queries] = spec.scale * by_head
            else:
                shift[:, queries] = spec.scale * by_head
        q8[queries] = dequantised(q_all, 1)
        k8[keys] = dequantised(k_all, KEY_BLOCK, request.is_masked)
        v8[keys] = dequantised(v[keys], KEY_BLOCK, request.is_masked)
    out, lse, *largest = attend(request._replace(q=q8, k=k8, v=v8, spec=spec._replace(precision=None)))
    if shift is not None:
        lse = lse + shift  # -inf stays
    return out.to(request.result_dtype), lse, *largest
