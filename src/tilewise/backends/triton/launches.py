"""The launches of the portable forward."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ...request import Gpu, Request, Spec, padded
from ..common import tiles
from ..common.clear import clear_launches, clear_max_logit
from ..common.device.attend import Tensors
from ..common.kernel_call import call_shape, new_max_logit, new_results, sequences_and_window, view
from ..common.kernel_config import (
    costly_term,
    flag_count,
    forward_tile,
    is_even,
    launch_options,
    shares_tiles,
)
from ..common.launch import Build, Built, Launch, Memory, Target, can_overlap, named, pdl_option
from ..common.repair import repair_forward_kernel
from ..common.repair_launches import repairs
from ..common.score_terms import device_terms, folded, has_large_scores, is_bounded, mask_mod
from .forward import MergeConfig, MergeTensors, forward_kernel, merge_kernel


def build_forward(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`. Results: out, lse, and the largest score of each head if the call returns it."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request = Request.of(spec, tensors)
        out, lse = new_results(request, memory)
        max_logit = new_max_logit(request, memory)
        if spec.precision is not None:
            from .fp8_launches import fp8_forward_launches

            launches = fp8_forward_launches(request, out, lse, target, memory, max_logit)
        else:
            splits = splits_of_keys(request, target)
            launches = forward_launches(request, out, lse, target, memory, splits, max_logit)
        return Built((out, lse) if max_logit is None else (out, lse, max_logit), list(launches.values()))

    return build


def forward_launches(
    request: Request,
    out: Tensor,
    lse: Tensor,
    target: Target,
    memory: Memory,
    splits: int,
    max_logit: Tensor | None = None,
) -> dict[str, Launch]:
    """The launches by name, in order: the forward over all keys, or over parts of them which are then merged; and the
    NaN repair pass if a mask may hide keys. Names in parentheses are of small kernels."""
    gpu = target.gpu
    flags = flag_count(request, splits)
    flag = memory.empty((flags,), torch.int32) if flags else None
    if splits == 1:
        first = forward_launch(request, out, lse, gpu, 1, flag, max_logit)
        clear = clear_launches(out, lse, None, request.cu_q, request.cu_q, gpu, -torch.inf)
        last = named("(forward clear)", clear)
    else:
        large_scores = has_large_scores(request)  # then m and l are stored instead of lse
        out_splits = memory.empty((splits * out.shape[0], *out.shape[1:]), torch.float32)
        lse_splits = memory.empty(((2 if large_scores else 1) * splits * lse.shape[0], *lse.shape[1:]), torch.float32)
        first = forward_launch(request, out_splits, lse_splits, gpu, splits, flag, max_logit)
        last = {"merge": merge_launch(out_splits, lse_splits, out, lse, splits, gpu, large_scores)}
    repair = repairs(repair_forward_kernel, first, target)
    cleared = named("(forward max logit)", clear_max_logit(max_logit))
    return cleared | {"forward": first} | named("(forward repair)", repair) | last


def forward_launch(
    request: Request,
    out: Tensor,
    lse: Tensor,
    gpu: Gpu,
    splits: int = 1,
    flags: Tensor | None = None,
    max_logit: Tensor | None = None,
) -> Launch:
    """The forward over all keys, or over `splits` parts of them: out and lse then have splits * batch rows."""
    q, k, v, _ = request[:4]
    size = call_shape(request)
    tile, heads = forward_tile(q.element_size(), size, gpu, costly_term(request, gpu), shares_tiles(request))
    rows = size.in_rows(heads)
    scoring, scale, _ = folded(request, gpu, derivative=False)
    return Launch(
        forward_kernel,
        splits * rows.programs(rows.n_q, rows.heads, tile.block_m),
        (
            Tensors(view(q), view(k), view(v), view(out), lse, flags, max_logit),
            *sequences_and_window(request),
            scale,
            *rows.grid(rows.n_q, rows.heads, tile.block_m),
            splits if splits > 1 else None,
            device_terms(request, gpu, tile.block),
        ),
        launch_options(
            request,
            tile,
            gpu,
            **scoring,
            MASK_MOD=mask_mod(request),
            HEADS=heads,
            MAX_LOGIT=max_logit is not None,
            BOUNDED=scoring["FOLD"] and is_bounded(request, scale),
            OVERLAP=(size.packed or splits > 1 or flags is not None) and can_overlap(gpu),
            EVEN=is_even(size, size.n_k, tile.block_n),
        ),
    )


def merge_launch(
    out_splits: Tensor, lse_splits: Tensor, out: Tensor, lse: Tensor, splits: int, gpu: Gpu, large_scores: bool = False
) -> Launch:
    batch, n_q, heads, dv = out.shape
    rows, columns = triton.next_power_of_2(splits), padded(dv)
    overlap = can_overlap(gpu)
    options: dict[str, Any] = {"CONFIG": MergeConfig(dv, rows, columns, large_scores, overlap)}
    options |= {"num_warps": 4 if rows * columns <= 8192 else 8, **pdl_option(overlap)}
    tensors = MergeTensors(out_splits, lse_splits, out, lse)
    return Launch(merge_kernel, batch * n_q * heads, (tensors, splits, batch, n_q, heads), options)


def splits_of_keys(request: Request, target: Target) -> int:
    """The number of splits of the keys: more than 1 if the queries alone would leave most of the GPU idle."""
    q = request.q
    if request.cu_q is not None or q.shape[1] > tiles.FEW_QUERIES or request.blocks:
        return 1
    size = call_shape(request)
    tile, heads = forward_tile(q.element_size(), size, target.gpu, None, shares_tiles(request))
    size = size.in_rows(heads)
    programs = size.programs(size.n_q, size.heads, tile.block_m)
    return tiles.parts_of_keys(programs, size.n_k, tile.block_n, target.num_sms)
