"""From a request to the launches of the portable backward: row statistics, the sums, and their repair."""

import torch
from torch import Tensor

from ...spec import Request, Upstream
from ..gpu import Gpu
from ..launch import Launch, can_overlap, overlapped
from ..shapes import padded, problem, view
from ..terms import device_terms, folded, is_far, mask_mod
from ..tile.tuples import PAD, Plan, View
from .backward import Saved, key_kernel, prepare_kernel, query_kernel
from .options import costly_term, is_even, options_of, tile_of
from .repair import LINE, repair_backward_kernel
from .repair_launch import repair

FEW_ROWS = 32  # that are repaired at a time
Grads = tuple[Tensor, Tensor, Tensor]


def row_statistics(request: Request) -> tuple[Tensor, Tensor]:
    """Room for lse2 and delta, padded."""
    q, size = request.q, problem(request)
    shape = 1 if size.packed else size.batch, size.heads, size.tiles(size.n_q, PAD.value) * PAD.value
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def prepare_launch(
    request: Request, upstream: Upstream, statistics: tuple[Tensor, Tensor], overlap: bool = False
) -> tuple[Launch, Saved]:
    """The launch that computes the row statistics, and what every kernel that uses them reads."""
    q, k, v, *_ = request
    out, lse, dout, dlse = upstream
    size, pad = problem(request), PAD.value
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    prepare = Launch(
        prepare_kernel,
        size.programs(size.n_q, size.heads, pad),
        (
            view(out), view(dout), lse, dlse,
            lse2, delta, request.cu_q, request.cu_k, size.n_q, size.n_k, size.tiles(size.n_q, pad), size.heads,
            size.batch,
        ),
        {
            "DV": size.dv, "BLOCK_M": pad, "BLOCK_DV": padded(size.dv), "NATURAL": is_far(request),
            "OVERLAP": overlap, "num_warps": 8 if size.dv > 128 else 4,
        },
    )  # fmt: skip
    return prepare, Saved(*(view(x) for x in (q, k, v, dout)), lse2, delta)


def backward_launches(
    request: Request, upstream: Upstream, grads: Grads, statistics: tuple[Tensor, Tensor], flags: Tensor | None,
    gpu: Gpu,
) -> list[Launch]:  # fmt: skip
    q, spec, size = request.q, request.spec, problem(request)
    dq, dk, dv = grads
    overlap = can_overlap(gpu)
    prepare, saved = prepare_launch(request, upstream, statistics, overlap)
    scoring, scale, rate = folded(request, gpu, slope=True)
    scalars = request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after, scale, rate
    program = scoring | {"MASK_MOD": mask_mod(request)} | overlapped(overlap)
    term = costly_term(request, gpu)
    tile = tile_of("query", q.element_size(), size, gpu, term)
    query = Launch(
        query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            saved, view(dq), flags, *scalars, size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
            device_terms(request, gpu, tile.block),
        ),
        options_of(request, tile, gpu, **program, EVEN=is_even(size, size.n_k, tile.block_n)),
    )  # fmt: skip
    tile = tile_of("key", q.element_size(), size, gpu, term)
    programs = size.programs(size.n_k, size.kv_heads, tile.block_n)
    sums = [(True, False), (False, True)] if tile.apart else [(True, True)]
    starts = (_lined(query.programs) + n * _lined(programs) for n in range(len(sums)))
    keys = [
        Launch(
            key_kernel,
            programs,
            (
                saved, view(dk), view(dv), None if flags is None else flags[start:], *scalars,
                size.tiles(size.n_k, tile.block_n), size.kv_heads, size.batch,
                device_terms(request, gpu, tile.block, by_key=True),
            ),
            options_of(
                request, tile, gpu, **program, EVEN=is_even(size, size.n_q, tile.block_m), SUM_K=sum_k, SUM_V=sum_v
            ),
        )
        for (sum_k, sum_v), start in zip(sums, starts, strict=True)
    ]  # fmt: skip
    return [prepare, *keys, query]


def _lined(flags: int) -> int:
    return -(-flags // LINE.value) * LINE.value


def backward_repairs(passes: list[Launch]) -> list[Launch]:
    """What follows the launches of a backward, `backward_launches`, that raise flags."""
    _, key, *values, query = passes
    saved, dq, flags, *scalars, q_tiles, heads, batch, q_terms = query.args
    _, dk, dv, *_, k_tiles, kv_heads, _, k_terms = key.args
    if flags is None:
        return []
    totals = query.programs, key.programs
    counts = *totals, q_tiles, k_tiles, heads, kv_heads, batch
    args = saved, dq, dk, dv, flags, *scalars, *counts, q_terms, k_terms
    made = repair(repair_backward_kernel, max(totals), args, query, key)
    plans = {name: x.options["PLAN"] for name, x in zip(("QUERY", "KEY", "VALUE"), (query, key, *values), strict=False)}
    options = {name: x for name, x in made.options.items() if name != "PLAN"} | {"VALUE": None}
    options |= {"QUERIES": plans["QUERY"].BLOCK_M, "KEYS": plans["KEY"].BLOCK_N}
    return [made._replace(options=options | {name: _few_rows(name, plan) for name, plan in plans.items()})]


def _few_rows(name: str, plan: Plan) -> Plan:
    """For so few rows of its own side that the product is no warpgroup's."""
    side = "BLOCK_M" if name == "QUERY" else "BLOCK_N"
    return plan._replace(**{side: min(FEW_ROWS, getattr(plan, side))})
