"""From a request to launches of the portable kernels: grids and compile-time choices. The functions of the backend."""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...spec import LIMIT, AttentionError, Request, Upstream, heads_are_queries
from .. import replay
from ..gpu import Gpu
from ..launch import INTERPRETED, Launch, can_overlap, gpu_for, multiprocessors, on
from ..shapes import Problem, by_group, padded, problem, row_view, view
from ..terms import device_terms, folded, is_bounded, is_linear, mask_mod
from ..tile import PAD, View
from . import tiles
from .backward import key_kernel, prepare_kernel, query_kernel
from .clear import Rows, clear_kernel
from .forward import forward_kernel, merge_kernel
from .forward_mode import jvp_kernel
from .tiles import Tile


def forward_launch(request: Request, out: Tensor, lse: Tensor, gpu: Gpu, parts: int = 1) -> Launch:
    """`parts` of the keys by a program each: out and lse then have that many times the batch, part by part."""
    request, out, lse = by_group(request, out, lse)
    q, k, v, spec = request[:4]
    size = problem(request)
    tile = tile_of("forward", q.element_size(), size, gpu)
    scoring, scale, _ = folded(request, slope=False)
    return Launch(
        forward_kernel,
        parts * size.programs(size.n_q, size.heads, tile.block_m),
        (
            *(view(x) for x in (q, k, v, out)), row_view(lse), request.cu_q, request.cu_k, size.n_q, size.n_k,
            spec.before, spec.after, scale, size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
            parts if parts > 1 else None, device_terms(request, tile),
        ),
        options_of(request, size, tile) | scoring | {
            "MASK_MOD": mask_mod(request),
            "BOUNDED": scoring["FOLD"] and is_bounded(request, scale),
            "OVERLAP": (size.packed or parts > 1) and can_overlap(gpu),
            "EVEN": _even(size, size.n_k, tile.block_n),
        },
    )  # fmt: skip


def merge_launch(out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor, parts: int, gpu: Gpu) -> Launch:
    batch, n_q, heads, dv = out.shape
    overlap = can_overlap(gpu)
    rows, columns = triton.next_power_of_2(parts), padded(dv)
    options = {
        "DV": dv, "BLOCK_P": rows, "BLOCK_DV": columns, "OVERLAP": overlap, "launch_pdl": overlap,
        "num_warps": 4 if rows * columns <= 8192 else 8,
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
    before = request.spec.before if request.is_plain else 0  # with terms, which may know its number, a head is a head
    return _parts_of_keys(problem(request), q.element_size(), before, gpu_for(q), processors)


@lru_cache(LIMIT)
def _parts_of_keys(size: Problem, itemsize: int, before: int | None, gpu: Gpu, processors: int) -> int:
    tile = tile_of("forward", itemsize, size, gpu)
    group = size.heads // size.kv_heads
    if heads_are_queries(size.n_q, group, before):
        size = size._replace(n_q=group, heads=size.kv_heads)
    return tiles.parts_of_keys(size.programs(size.n_q, size.heads, tile.block_m), size.n_k, tile.block_n, processors)


def backward_launches(
    request: Request, upstream: Upstream, grads: tuple[Tensor, Tensor, Tensor], statistics: tuple[Tensor, Tensor],
    gpu: Gpu,
) -> list[Launch]:  # fmt: skip
    q, spec = request.q, request.spec
    dq, dk, dv = grads
    size = problem(request)
    overlap = can_overlap(gpu)
    prepare, shared = prepare_launch(request, upstream, statistics, overlap)
    scoring, scale, rate = folded(request, slope=True)
    scalars = request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after, scale, rate
    program = scoring | {"MASK_MOD": mask_mod(request), "OVERLAP": overlap}
    tile = tile_of("query", q.element_size(), size, gpu)
    query = Launch(
        query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            *shared, view(dq), *scalars, size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
            device_terms(request, tile),
        ),
        options_of(request, size, tile) | program | {
            "EVEN": _even(size, size.n_k, tile.block_n), "launch_pdl": overlap,
        },
    )  # fmt: skip
    tile = tile_of("key", q.element_size(), size, gpu)
    sums = [(True, False), (False, True)] if tile.apart else [(True, True)]
    keys = [
        Launch(
            key_kernel,
            size.programs(size.n_k, size.kv_heads, tile.block_n),
            (
                *shared, view(dk), view(dv), *scalars, size.tiles(size.n_k, tile.block_n), size.kv_heads, size.batch,
                device_terms(request, tile, by_key=True),
            ),
            options_of(request, size, tile) | program | {
                "EVEN": _even(size, size.n_q, tile.block_m), "SUM_K": sum_k, "SUM_V": sum_v,
                "launch_pdl": overlap,
            },
        )
        for sum_k, sum_v in sums
    ]  # fmt: skip
    return [prepare, *keys, query]


def clear_launches(
    x: Tensor, y: Tensor, z: Tensor | None, cu_x: Tensor | None, cu_y: Tensor | None, y_value: float = 0.0
) -> list[Launch]:
    """Of packed results, whatever lies past the last sequence: 0, in y (head, token) or (token, head, dim) y_value."""
    if cu_x is None or cu_y is None:
        return []
    rows = (_rows(x), _rows(y), Rows(None, 0, 0, 0) if z is None else _rows(z))
    overlap = can_overlap(gpu_for(x))
    options = {"Y": y_value, "BLOCK": 1024, "OVERLAP": overlap, "launch_pdl": overlap}
    return [Launch(clear_kernel, 128, (*rows, cu_x, cu_y, cu_x.shape[0] - 1), options)]


def _rows(x: Tensor) -> Rows:
    lines = x.shape[0] if x.dim() == 2 else 1
    return Rows(x, lines, x.numel() // max(lines, 1), x.shape[1] * x.shape[2] if x.dim() == 3 else 1)


def row_statistics(q: Tensor, size: Problem) -> tuple[Tensor, Tensor]:
    """Room for lse2 and delta, padded."""
    shape = 1 if size.packed else size.batch, size.heads, size.tiles(size.n_q, PAD.value) * PAD.value
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def prepare_launch(
    request: Request, upstream: Upstream, statistics: tuple[Tensor, Tensor], overlap: bool = False
) -> tuple[Launch, tuple[Any, ...]]:
    """The launch that computes the row statistics, and the leading arguments of every kernel that uses them."""
    q, k, v, *_ = request
    out, lse, dout, dlse = upstream
    size, pad = problem(request), PAD.value
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    prepare = Launch(
        prepare_kernel,
        size.programs(size.n_q, size.heads, pad),
        (
            view(out), view(dout), row_view(lse), View(None, (0, 0, 0)) if dlse is None else row_view(dlse),
            lse2, delta, request.cu_q, request.cu_k, size.n_q, size.n_k, size.tiles(size.n_q, pad), size.heads,
            size.batch,
        ),
        {
            "DV": size.dv, "BLOCK_M": pad, "BLOCK_DV": padded(size.dv), "OVERLAP": overlap,
            "num_warps": 8 if size.dv > 128 else 4,
        },
    )  # fmt: skip
    return prepare, (*(view(x) for x in (q, k, v, dout)), lse2, delta)


def forward(request: Request, recordings: dict[Any, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse). `recordings` remembers the launches of calls that look alike."""
    q, v, cu_q = request.q, request.v, request.cu_q
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    parts = parts_of_keys(request)
    rooms: tuple[Tensor, ...] = ()
    if parts > 1:
        rooms = tuple(x.new_empty((parts * x.shape[0], *x.shape[1:]), dtype=torch.float32) for x in (out, lse))

    def build() -> list[Launch]:
        gpu = gpu_for(q)
        if rooms:
            return [
                forward_launch(request, *rooms, gpu, parts),
                merge_launch(*rooms, out, lse, parts, gpu),
            ]
        return [
            forward_launch(request, out, lse, gpu),
            *clear_launches(out, lse, None, cu_q, cu_q, -torch.inf),
        ]

    with on(q):
        replay.launch(("forward", _precision(q)), (*request.tensors(), out, lse, *rooms), build, recordings)
    return out, lse


def backward(
    request: Request, upstream: Upstream, recordings: dict[Any, Any] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = request
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    statistics = row_statistics(q, problem(request))

    def build() -> list[Launch]:
        return [
            *backward_launches(request, upstream, (dq, dk, dv), statistics, gpu_for(q)),
            *clear_launches(dq, dk, dv, request.cu_q, request.cu_k),
        ]

    key = "backward", _precision(q), *replay.layout_of(upstream, request.tensors())
    tensors = *request.tensors(), *upstream, dq, dk, dv, *statistics
    with on(q):
        replay.launch(key, tensors, build, recordings)
    return dq, dk, dv


def jvp(request: Request, out: Tensor, lse: Tensor, tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The movement of out and lse; for the band and grouped heads, without score terms."""
    if not request.is_plain:
        raise AttentionError("forward mode on these kernels", "a score term", "backend='reference', or no score terms")
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    with on(request.q):
        jvp_launch(request, out, lse, tangents, dout, dlse, gpu_for(request.q))()
        for clear in clear_launches(dout, dlse, None, request.cu_q, request.cu_q):
            clear()
    return dout, dlse


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
            *(view(x) for x in (q, k, v, *tangents, out)), row_view(lse), view(dout), row_view(dlse),
            request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after, spec.scale,
            size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
        ),
        options_of(request, size, tile),
    )  # fmt: skip


def term_gradients(request: Request, upstream: Upstream, wanted: list[bool]) -> list[Tensor]:
    """Of the wanted ones among bias, sinks and the score mod's tensors."""
    from .term_gradients import term_gradients as found

    return found(request, upstream, wanted)


def offline(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """The launches of a call by name, for a compiler: nothing runs, and the tensors may be meta."""
    q, k, v, *_ = request
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    launches = {"forward": forward_launch(request, out, lse, gpu)}
    if backward:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        statistics = row_statistics(q, problem(request))
        passes = backward_launches(request, Upstream(out, lse, out, None), grads, statistics, gpu)
        names = ("prepare", "key", *["value"] * (len(passes) > 3), "query")
        launches |= dict(zip(names, passes, strict=True))
    return launches


def tile_of(which: str, itemsize: int, size: Problem, gpu: Gpu) -> Tile:
    if INTERPRETED:
        return tiles.INTERPRETER
    return tiles.tile(which, gpu.capability, itemsize, padded(max(size.d, size.dv)))


def _even(size: Problem, n: int, block: int) -> bool:
    return not size.packed and n % block == 0


def options_of(request: Request, size: Problem, tile: Tile) -> dict[str, Any]:
    return {
        "GROUP": size.heads // size.kv_heads,
        "D": size.d,
        "DV": size.dv,
        "BLOCK_D": padded(size.d),
        "BLOCK_DV": padded(size.dv),
        "FOLD": is_linear(request),
        "PRECISION": _precision(request.q),
        **tile.options(),
    }


def _precision(q: Tensor) -> str:
    """float32 is multiplied as three TF32 products, together as exact as one of float32, unless torch may use one."""
    if q.dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
