"""From a request to launches of the portable kernels. The functions of the backend are here."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from ...spec import LIMIT, AttentionError, Request, Upstream
from .. import replay
from ..gpu import Gpu
from ..launch import Launch, can_overlap, gpu_for, multiprocessors, on, overlapped
from ..shapes import Problem, lined, padded, problem, view
from ..terms import device_terms, folded, is_bounded, mask_mod
from . import tiles
from .backward_launch import backward_launches, backward_repairs, row_statistics
from .clear import clear_kernel
from .forward import forward_kernel, merge_kernel
from .forward_mode import Moving, jvp_kernel
from .options import (
    by_precision,
    costly_term,
    forward_tile,
    is_even,
    new_flags,
    options_of,
    shares_tiles,
    tile_of,
)
from .repair import repair_forward_kernel, repair_jvp_kernel
from .repair_launch import repair
from .sinks import sink_launches, sink_rooms
from .term_gradients import term_gradients

__all__ = ["backward", "every_launch", "forward", "jvp", "offline", "term_gradients"]


def forward(request: Request, recordings: dict[Any, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse). `recordings` remembers the launches of calls that look alike."""
    q, cu_q = request.q, request.cu_q
    out, lse = new_results(request)
    gpu, parts = gpu_for(q), parts_of_keys(request)
    rooms: tuple[Tensor, ...] = ()
    if parts > 1:
        rooms = tuple(x.new_empty((parts * x.shape[0], *x.shape[1:]), dtype=torch.float32) for x in (out, lse))
    flags = new_flags(request, parts)

    def build() -> list[Launch]:
        made = forward_launch(request, *(rooms or (out, lse)), gpu, parts, flags)
        if rooms:
            return [made, *repairs(made), merge_launch(*rooms, out, lse, parts, gpu)]
        return [made, *repairs(made), *clear_launches(out, lse, None, cu_q, cu_q, gpu, -torch.inf)]

    with on(q):
        name, following = by_precision("forward", q, gpu), partial(ahead, request, gpu, every_launch)
        replay.whole(name, request.tensors(), (out, lse, *rooms, flags), build, recordings, following)
    return out, lse


def backward(
    request: Request, upstream: Upstream, recordings: dict[Any, Any] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `recordings` remembers the launches of calls that look alike."""
    q, gpu, upstream = request.q, gpu_for(request.q), lined(upstream)
    dq, dk, dv = new_gradients(request)
    statistics, flags = row_statistics(request), new_flags(request, both=True)

    def build() -> list[Launch]:
        passes = backward_launches(request, upstream, (dq, dk, dv), statistics, flags, gpu)
        return [*passes, *backward_repairs(passes), *clear_launches(dq, dk, dv, request.cu_q, request.cu_k, gpu)]

    tensors = request.tensors()
    name, key = by_precision(replay.of_gradients(upstream), q, gpu), replay.layout_of(upstream, tensors)
    with on(q):
        replay.whole(name, (*tensors, *upstream), (dq, dk, dv, *statistics, flags), build, recordings, key=key)
    return dq, dk, dv


def jvp(request: Request, out: Tensor, lse: Tensor, tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The movement of out and lse; for the band and grouped heads, without score terms."""
    if not request.is_plain:
        raise AttentionError("forward mode on these kernels", "a score term", "backend='reference', or no score terms")
    dout, dlse, lse = out.new_empty(out.shape), lse.new_empty(lse.shape), lse.contiguous()
    gpu = gpu_for(request.q)
    with on(request.q):
        made = jvp_launch(request, out, lse, tangents, dout, dlse, gpu)
        for launch in (made, *repairs(made), *clear_launches(dout, dlse, None, request.cu_q, request.cu_q, gpu)):
            launch()
    return dout, dlse


def offline(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """The launches of a call by name, for a compiler: nothing runs, and the tensors may be meta."""
    out, lse = new_results(request)
    launches = {"forward": forward_launch(request, out, lse, gpu, flags=new_flags(request))}
    if backward:
        dq, dk, dv = new_gradients(request)
        statistics, flags = row_statistics(request), new_flags(request, both=True)
        passes = backward_launches(request, Upstream(out, lse, out, None), (dq, dk, dv), statistics, flags, gpu)
        names = ("prepare", "key", *["value"] * (len(passes) > 3), "query")
        launches |= dict(zip(names, passes, strict=True))
    return launches


def every_launch(request: Request, gpu: Gpu, backward: bool) -> list[Launch]:
    """All launches of a call, as `offline` gives the main ones."""
    out, lse = new_results(request)
    cu_q, cu_k = request.cu_q, request.cu_k
    forward = forward_launch(request, out, lse, gpu, flags=new_flags(request))
    launches = [forward, *repairs(forward), *clear_launches(out, lse, None, cu_q, cu_q, gpu, -torch.inf)]
    if backward:
        dq, dk, dv = new_gradients(request)
        statistics, flags = row_statistics(request), new_flags(request, both=True)
        passes = backward_launches(request, Upstream(out, lse, out, None), (dq, dk, dv), statistics, flags, gpu)
        launches += [*passes, *backward_repairs(passes), *clear_launches(dq, dk, dv, cu_q, cu_k, gpu)]
        launches += every_sink_launch(request, out, lse, gpu)
    return launches


def every_sink_launch(request: Request, out: Tensor, lse: Tensor, gpu: Gpu) -> list[Launch]:
    """Those of the gradient of sinks, if there are any."""
    if request.sinks is None:
        return []
    return sink_launches(request, Upstream(out, lse, out, None), *sink_rooms(request), gpu)


def ahead(request: Request, gpu: Gpu, every: Callable[[Request, Gpu, bool], list[Launch]]) -> list[Launch]:
    """The launches of a call and its gradient, if that will be wanted."""
    if not any(x.requires_grad for x in request[:3]):
        return []
    return every(request.on_meta(), gpu, True)


def new_results(request: Request) -> tuple[Tensor, Tensor]:
    """Room for out and lse."""
    *outer, tokens, heads, _ = request.q.shape
    device = request.q.device
    out = torch.empty((*outer, tokens, heads, request.v.shape[-1]), dtype=request.result_dtype, device=device)
    return out, torch.empty((*outer, heads, tokens), dtype=torch.float32, device=device)


def new_gradients(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Room for those of q, k and v. (empty_like of a meta tensor imports half of torch.)"""
    dtype = request.result_dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in request[:3])
    return dq, dk, dv


def forward_launch(
    request: Request, out: Tensor, lse: Tensor, gpu: Gpu, parts: int = 1, flags: Tensor | None = None
) -> Launch:
    """`parts` of the keys by a program each: out and lse then have that many times the batch, part by part."""
    q, k, v, spec = request[:4]
    size = problem(request)
    tile, heads = forward_tile(q.element_size(), size, gpu, costly_term(request, gpu), shares_tiles(request))
    rows = size.in_rows(heads)
    scoring, scale, _ = folded(request, gpu, slope=False)
    return Launch(
        forward_kernel,
        parts * rows.programs(rows.n_q, rows.heads, tile.block_m),
        (
            *(view(x) for x in (q, k, v, out)), lse, flags, request.cu_q, request.cu_k, size.n_q, size.n_k,
            spec.before, spec.after, scale, rows.tiles(rows.n_q, tile.block_m), rows.heads, size.batch,
            parts if parts > 1 else None, device_terms(request, gpu, tile.block),
        ),
        options_of(
            request, tile, gpu, **scoring, MASK_MOD=mask_mod(request), HEADS=heads,
            BOUNDED=scoring["FOLD"] and is_bounded(request, scale),
            OVERLAP=(size.packed or parts > 1 or flags is not None) and can_overlap(gpu),
            EVEN=is_even(size, size.n_k, tile.block_n),
        ),
    )  # fmt: skip


def repairs(of: Launch) -> list[Launch]:
    """What follows a forward or a jvp that raises flags."""
    kernel = {forward_kernel: repair_forward_kernel, jvp_kernel: repair_jvp_kernel}[of.kernel]
    return [] if of.args[5] is None else [repair(kernel, of.programs, (*of.args, of.programs), of)]


def merge_launch(out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor, parts: int, gpu: Gpu) -> Launch:
    batch, n_q, heads, dv = out.shape
    rows, columns = triton.next_power_of_2(parts), padded(dv)
    options = {
        "DV": dv, "BLOCK_P": rows, "BLOCK_DV": columns, "num_warps": 4 if rows * columns <= 8192 else 8,
        **overlapped(can_overlap(gpu)),
    }  # fmt: skip
    return Launch(
        merge_kernel, batch * n_q * heads, (out_parts, lse_parts, out, lse, parts, batch, n_q, heads), options
    )


def parts_of_keys(request: Request) -> int:
    """In how many parts the keys are streamed: several where the queries alone would leave most of the GPU idle."""
    q = request.q
    if request.cu_q is not None or q.shape[1] > tiles.FEW_QUERIES or request.blocks:
        return 1
    processors = multiprocessors(q.device) if q.is_cuda else tiles.INTERPRETED_PROCESSORS
    return _parts_of_keys(problem(request), q.element_size(), shares_tiles(request), gpu_for(q), processors)


@lru_cache(LIMIT)
def _parts_of_keys(size: Problem, itemsize: int, shares: bool, gpu: Gpu, processors: int) -> int:
    tile, heads = forward_tile(itemsize, size, gpu, None, shares)
    size = size.in_rows(heads)
    return tiles.parts_of_keys(size.programs(size.n_q, size.heads, tile.block_m), size.n_k, tile.block_n, processors)


def clear_launches(
    x: Tensor, y: Tensor, z: Tensor | None, cu_x: Tensor | None, cu_y: Tensor | None, gpu: Gpu, y_value: float = 0.0
) -> list[Launch]:
    """Of packed results, whatever lies past the last sequence: 0, in y (head, token) or (token, head, dim) y_value."""
    if cu_x is None or cu_y is None:
        return []
    lines = y.shape[0] if y.dim() == 2 else 1
    sizes = [0 if t is None else t[0].numel() if t.dim() == 3 and len(t) else 1 for t in (x, y, z)]
    args = x, y, z, cu_x, cu_y, cu_x.shape[0] - 1, x.shape[0], y.shape[-1 if y.dim() == 2 else 0], lines, *sizes
    return [Launch(clear_kernel, 128, args, {"Y": y_value, "BLOCK": 1024} | overlapped(can_overlap(gpu)))]


def jvp_launch(
    request: Request, out: Tensor, lse: Tensor, tangents: list[Tensor], dout: Tensor, dlse: Tensor, gpu: Gpu
) -> Launch:
    q, k, v, spec = request[:4]
    size = problem(request)
    tile = tile_of("jvp", q.element_size(), size, gpu)
    return Launch(
        jvp_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            Moving(*(view(x) for x in (q, k, v, *tangents))), view(out), lse, view(dout), dlse,
            new_flags(request), request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after, spec.scale,
            size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
        ),
        options_of(request, tile, gpu, OVERLAP=can_overlap(gpu)),
    )  # fmt: skip
