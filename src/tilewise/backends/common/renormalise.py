"""Row statistics of the backward where scores are far out, as those of a row that is all torch.finfo(dtype).min.

The backward computes p = exp(s - lse) again, with lse = m + log l in float32. Where |m| is large, rounding m + log l
takes away some of log l, or all of it: of n equal scores of -1e9, lse is m and each p would be 1, not 1 / n. For such
rows m and l are computed once more, and the backward is given

    lse = m        dO / l        dlse / l

instead. With e = exp(s - m), p = e / l, and all gradients are linear in the dO and dlse of a row:

    dV = P^T dO = E^T (dO / l)        dS = P * (dP - delta) = E * ((dO / l) V^T - delta / l)

so no other kernel knows of it. Other rows keep what they have. Only calls with `has_large_scores` have this launch, and
only tiles with such a row read keys.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...request import BackwardInputs, Gpu, Request, padded
from .device.attend import stream_keys
from .device.structs import ANY_SIZE, Grid, Rows, ScoreParams, Sequences, View
from .device.tile_io import load_rows, row_pointers, store_rows
from .device.tile_range import locate
from .kernel_call import call_shape, sequences_and_window, view
from .kernel_config import launch_options
from .launch import INTERPRETED, Launch, Memory
from .score_terms import device_terms, has_large_scores, mask_mod, score_mod
from .tiles import INTERPRETER, Tile

LARGE_LSE: tl.constexpr = tl.constexpr(256.0)  # below, rounding lse to float32 changes p by less than 8e-6 of it


class RenormaliseTensors(NamedTuple):
    """Views of q, k, no v, and do; lse and dlse; and what replaces do, lse and dlse."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    do: tl.tuple
    lse: tl.tensor
    dlse: tl.tensor
    new_do: tl.tuple
    new_lse: tl.tensor
    new_dlse: tl.tensor


@triton.jit(**ANY_SIZE)
def renormalise_kernel(
    tensors,  # RenormaliseTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    tiles,
    heads,
    batch,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """new_do, new_lse and new_dlse of a tile of queries. The programs of the last packed sequence also copy the rows
    after its end."""
    PACKED: tl.constexpr = cu_q is not None
    grid = Grid(tiles, heads, batch)
    w = locate(tl.program_id(0), grid, Sequences(cu_q, cu_k, n_q, n_k), cu_q, CONFIG.BLOCK_M)
    end = w.n_q
    if PACKED:
        end = tl.where(w.b == batch - 1, n_q - w.q0, end)
    if w.first < end:
        i = w.first + tl.arange(0, CONFIG.BLOCK_M)
        exists = i < end
        lse_pointers = row_pointers(tensors.lse, n_q, heads, w.b, w.h, w.q0, i, PACKED)
        lse_i = tl.load(lse_pointers, mask=exists, other=float("-inf"))
        large = (tl.abs(lse_i) >= LARGE_LSE) & (tl.abs(lse_i) < float("inf"))
        factor = tl.full([CONFIG.BLOCK_M], 1.0, tl.float32)
        if tl.max(large.to(tl.int32), 0) > 0:
            _, m, l, _ = stream_keys(
                tensors, w, 0, None, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG, False
            )
            large = large & (l > 0.0)
            lse_i = tl.where(large, m, lse_i)
            factor = tl.where(large, 1.0 / l, factor)
        tl.store(row_pointers(tensors.new_lse, n_q, heads, w.b, w.h, w.q0, i, PACKED), lse_i, mask=exists)
        if tensors.dlse is not None:
            dlse_pointers = row_pointers(tensors.dlse, n_q, heads, w.b, w.h, w.q0, i, PACKED)
            dlse_i = tl.load(dlse_pointers, mask=exists, other=0.0)
            new_dlse_pointers = row_pointers(tensors.new_dlse, n_q, heads, w.b, w.h, w.q0, i, PACKED)
            tl.store(new_dlse_pointers, dlse_i * factor, mask=exists)
        do_rows = Rows(tensors.do, w.b, w.h, w.q0, w.first, end)
        do_tile = load_rows(do_rows, CONFIG.DV, CONFIG.BLOCK_M, CONFIG.BLOCK_DV, False).to(tl.float32) * factor[:, None]
        store_rows(Rows(tensors.new_do, w.b, w.h, w.q0, w.first, end), do_tile, CONFIG.DV)


def is_renormalised(request: Request) -> bool:
    """Whether the backward of a call has this launch. The lse of a partial call counts keys that the call does not
    have: there p stays as it is."""
    return has_large_scores(request) and not request.spec.partial


def _tile(row_bytes: int) -> Tile:
    """Small ones: most programs copy dO and read no key. The largest that spill nothing with a bias; not timed."""
    if INTERPRETED:
        return INTERPRETER
    return Tile(64, 32, 4, 2) if row_bytes <= 256 else Tile(32, 32, 8, 1, chunk=64)


def renormalised(
    request: Request, bwd_inputs: BackwardInputs, gpu: Gpu, memory: Memory
) -> tuple[list[Launch], BackwardInputs]:
    """The launch, if there is one, and what the backward starts from after it. lse and dlse must be contiguous."""
    if not is_renormalised(request):
        return [], bwd_inputs
    q, k, spec, size = request.q, request.k, request.spec, call_shape(request)
    tile = _tile(padded(max(size.d, size.dv)) * q.element_size())
    out, lse, dout, dlse = bwd_inputs
    new_do, new_lse = (memory.empty(x.shape, x.dtype) for x in (dout, lse))
    new_dlse = None if dlse is None else memory.empty(dlse.shape, dlse.dtype)
    old = view(q), view(k), View(None, ()), view(dout), lse, dlse
    tensors = RenormaliseTensors(*old, view(new_do), new_lse, new_dlse)
    launch = Launch(
        renormalise_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            tensors,
            *sequences_and_window(request),
            spec.scale,
            *size.grid(size.n_q, size.heads, tile.block_m),
            device_terms(request, gpu, tile.block),
        ),
        launch_options(request, tile, gpu, SCORE_MOD=score_mod(request, gpu), MASK_MOD=mask_mod(request)),
    )
    return [launch], BackwardInputs(out, new_lse, new_do, new_dlse)
