"""From tensors to the launches of the Hopper backward: preprocess, dK, dV and the sums of dQ, postprocess, repair."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import LIMIT, BackwardInputs, Request, Spec
from ..common.clear import clear_launches
from ..common.device.gradients import BackwardTensors
from ..common.device.structs import LOG2E, PAD, View
from ..common.kernel_call import KernelCall
from ..common.launch import INTERPRETED, Build, Built, Launch, Memory, Target, named, target_of
from ..common.renormalise import renormalised
from ..common.repair import repair_backward_kernel
from ..common.score_terms import device_terms, folded, has_large_scores, mask_mod, score_mod_with_derivative
from ..common.shapes import CallShape, call_shape, new_gradients, padded, view
from .backward import backward_kernel
from .backward_tiles import BackwardConfig
from .descriptors import float32_output, part_descriptors
from .gluon_compat import TensorDescriptor, gl
from .postprocess import (
    PostprocessConfig,
    PreprocessConfig,
    PreprocessTensors,
    postprocess_kernel,
    preprocess_kernel,
)
from .repair_config import STEP, repair_config
from .support import GPU, is_uneven
from .tiles import backward_tile, backward_widths

REPAIR_ROWS = 32
L2_BYTES = 16 << 20  # of Q, dO and dQ that may be in use at once
TILE_OVERHEAD = 350  # queries that a program could visit in the time it takes to load its keys and store dK and dV
UNSWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


Parts = tuple[tuple[int, ...], tuple[int, ...]]


class Workspace(NamedTuple):
    """The memory that a call needs beside its arguments, in one allocation: the row statistics (batch and head, padded
    token); and, zeroed by `preprocess_kernel`, dQ in float32 in rows of 256 and counters: that of the tile scheduler,
    the flag of the NaN repair at 16, and from 32 on a semaphore for each tile of dQ. `parts`: the columns of the tiles
    of Q, K and dQ and of V and dO."""

    parts: Parts
    lse2: Tensor
    delta: Tensor
    dq_acc: Tensor
    counters: Tensor
    flag: Tensor
    semaphores: Tensor

    @property
    def padded_tokens(self) -> int:
        return self.lse2.shape[1]


def new_workspace(memory: Memory, size: CallShape, parts: Parts | None = None) -> Workspace:
    """`parts`: by default padded to powers of two."""
    parts = parts or padded_parts(size)
    sizes = workspace_sizes(size, sum(parts[0]))
    lse2, delta, dq_acc, counters = memory.empty((sum(sizes),), torch.float32).split(sizes)
    rows, counters = statistics_rows(size), counters.view(torch.int32)
    statistics = lse2.view(rows, -1), delta.view(rows, -1)
    return Workspace(parts, *statistics, dq_acc.view(-1, 256), counters, counters[16:], counters[32:])


@lru_cache(LIMIT)
def workspace_sizes(size: CallShape, columns: int) -> tuple[int, ...]:
    """Float32 numbers of lse2, delta, dq_acc, which has so many columns, and the counters."""
    tokens = statistics_rows(size) * size.tiles(size.n_q, PAD.value) * PAD.value
    return tokens, tokens, tokens * columns, tokens // PAD.value * 4 + 64


def statistics_rows(size: CallShape) -> int:
    return size.heads * (1 if size.packed else size.batch)


def padded_parts(size: CallShape) -> Parts:
    """One power of two each. dV is stored through memory made for dQ: it has no more columns."""
    d, dv = padded(max(size.d, size.dv), 64), padded(size.dv, 64)
    return (d,), (max(dv, 128) if d > 128 else dv,)


def unpadded_parts(size: CallShape) -> Parts:
    """One or two powers of two each, for head dims from 65 to 96 and from 129 to 192. Not chosen for any call: right in
    the emulator, not timed yet (docs/hopper-backward-wide.md)."""
    return backward_widths(max(size.d, size.dv)), backward_widths(size.dv)


class Backward(NamedTuple):
    """A backward call: the request (without sinks, which lse contains), out, lse and their gradients, the results, the
    workspace."""

    request: Request
    bwd_inputs: BackwardInputs
    grads: tuple[Tensor, Tensor, Tensor]
    space: Workspace
    size: CallShape

    @property
    def lengths(self) -> tuple[Any, ...]:
        return self.request.cu_q, self.request.cu_k, self.size.n_q, self.size.n_k

    @property
    def flag(self) -> Tensor | None:
        """None where every row sees every key, and nothing is repaired."""
        return self.space.flag if self.request.is_masked else None

    @property
    def statistics(self) -> tuple[View, View]:
        """lse2 and delta."""
        tokens = self.space.padded_tokens
        strides = self.size.heads * tokens, tokens
        return View(self.space.lse2, strides), View(self.space.delta, strides)


def backward_launches(
    request: Request,
    bwd_inputs: BackwardInputs,
    grads: tuple[Tensor, Tensor, Tensor],
    space: Workspace,
    num_sms: int,
) -> list[Launch]:
    """Preprocess, backward and postprocess; and the NaN repair where some rows do not see some keys."""
    call = Backward(request._replace(sinks=None), bwd_inputs, grads, space, call_shape(request))
    score, score_scale, scale = folded(call.request, GPU, derivative=True)
    launches = [
        preprocess_launch(call),
        main_launch(call, score, score_scale, scale, num_sms),
        postprocess_launch(call, scale),
    ]
    return [*launches, repair_launch(call, num_sms)] if call.request.is_masked else launches


def preprocess_launch(call: Backward) -> Launch:
    size, space = call.size, call.space
    out, lse, dout, dlse = call.bwd_inputs
    parts = space.parts[0]
    tiles = space.padded_tokens // PAD.value
    tensors = PreprocessTensors(view(out), view(dout), lse, dlse, *call.statistics, space.dq_acc, space.counters)
    block_dv = padded(size.dv, 64)
    config = PreprocessConfig(
        size.dv, PAD.value, parts, sum(parts), block_dv, has_large_scores(call.request), not INTERPRETED
    )
    args = tensors, *call.lengths, tiles, size.heads, size.batch
    options = {"CONFIG": config, "num_warps": 8 if size.dv > 128 else 4}
    return Launch(preprocess_kernel, size.programs(size.n_q, size.heads, PAD.value), args, options)


def backward_config(request: Request, size: CallShape, parts: Parts, fold_scale: bool) -> BackwardConfig:
    d, dv = parts
    has_terms, deterministic = not request.is_plain, request.spec.deterministic
    tile = backward_tile(sum(d), sum(dv), plain=not has_terms, deterministic=deterministic)
    wide = tile.block_n == 64
    return BackwardConfig(
        d,
        dv,
        dq_pieces(d, by_rows=tile.block_m == 128),
        tile.block_m,
        tile.block_n,
        GROUP=size.heads // size.kv_heads,
        DETERMINISTIC=deterministic,
        DQ_BY_TMA=tile.dq_by_tma or (deterministic and not wide),
        HAS_TERMS=has_terms,
        FOLD_SCALE=fold_scale,
        SCORES_FIRST=has_terms and sum(d) > 64,
        IN_HALVES=sum(d) > 128 and not wide,
        V_IN_REGISTERS=len(d) == 2 and sum(d) < 128 and not has_terms,
        WIDE=wide,
    )


def dq_pieces(parts: tuple[int, ...], *, by_rows: bool) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """See BackwardConfig.DQ_PIECES. At most 64 columns at a time, whose registers there are; of 64 and fewer, each
    warpgroup takes a part: a product of few columns reads as much of dS as one of many.

    >>> dq_pieces((64, 32), by_rows=False)
    (((0, 0, 64),), ((1, 0, 32),))
    >>> dq_pieces((128, 64), by_rows=False)
    (((0, 0, 64), (1, 0, 32)), ((0, 64, 64), (1, 32, 32)))
    """
    if by_rows:
        return tuple(((0, 0, parts[0]),) for _ in range(2))
    if sum(parts) < 128 and len(parts) == 2:
        return tuple(((i, 0, width),) for i, width in enumerate(parts))
    halves = [
        [
            (i, wg * width // 2 + c, min(width // 2, 64))
            for i, width in enumerate(parts)
            for c in range(0, width // 2, 64)
        ]
        for wg in range(2)
    ]
    return tuple(map(tuple, halves))


def tile_schedule(size: CallShape, spec: Spec, block_n: int, num_sms: int) -> tuple[int, int, int, int]:
    """Tiles per (batch, head) row, rows, rows that are scheduled together, and rows in ascending order."""
    tiles_per_row = size.tiles(size.n_k, block_n)
    rows = size.kv_heads * (1 if size.packed else size.batch)
    rows_in_l2 = max(1, L2_BYTES // (size.n_q * (size.d * 6 + size.dv * 2)) if is_uneven(spec) else 1)
    if not spec.deterministic:
        return tiles_per_row, rows, rows_in_l2, 0
    # So that few programs wait for one another's sums; a power of two, as the number of heads mostly is.
    rows_in_l2 = max(rows_in_l2, 1 << (num_sms // tiles_per_row).bit_length())
    return tiles_per_row, rows, rows_in_l2, max(0, rows // rows_in_l2 - 1) * rows_in_l2


def main_launch(call: Backward, score: dict[str, Any], score_scale: float, scale: float, num_sms: int) -> Launch:
    """`score`, `score_scale`, `scale`: as `folded` returns them."""
    request, bwd_inputs, (_, dk, dv), space, size = call
    q, k, v, spec = request[:4]
    config = backward_config(request, size, space.parts, score["FOLD"])
    if config.HAS_TERMS and not config.FOLD_SCALE:
        score_scale = 1.0  # the scores have been multiplied
    tiles_per_row, rows, rows_in_l2, ascending_rows = tile_schedule(size, spec, config.BLOCK_N, num_sms)
    shares = 2 if config.WIDE else 1  # each warpgroup stores its columns of dK and dV
    statistics = (
        TensorDescriptor(x, x.shape, x.stride(), [1, config.BLOCK_M], UNSWIZZLED) for x in (space.lse2, space.delta)
    )
    dq_box = [min(columns for pieces in config.DQ_PIECES for _, _, columns in pieces) // 4, 256]
    args = (
        *part_descriptors(q, config.BLOCK_M, config.D),
        *part_descriptors(k, 64, config.D),
        *part_descriptors(v, 64, config.DV),
        *part_descriptors(bwd_inputs.dout, config.BLOCK_M, config.DV),
        *statistics,
        *(space.dq_acc, TensorDescriptor(space.dq_acc, space.dq_acc.shape, (256, 1), dq_box, UNSWIZZLED)),
        # with float32 gradients only the box shapes of these two are used
        *part_descriptors(k if spec.partial else dk, 64, tuple(x // shares for x in config.D)),
        *part_descriptors(v if spec.partial else dv, 64, tuple(x // shares for x in config.DV)),
        *(float32_output(dk, spec), float32_output(dv, spec), call.flag, space.semaphores, *call.lengths),
        *(
            spec.before,
            spec.after,
            score_scale * LOG2E.value,
            scale,
            space.padded_tokens,
            ascending_rows,
            space.counters,
        ),
        *(tiles_per_row * rows, rows, tiles_per_row, size.kv_heads, size.batch, rows_in_l2),
        device_terms(request, GPU, (config.BLOCK_M, config.BLOCK_N), by_key=True),
    )
    options = {"MASK_MOD": mask_mod(request), "SCORE_MOD": score["SCORE_MOD"], "CONFIG": config}
    options |= {"num_warps": 4, "launch_pdl": not INTERPRETED}
    return Launch(backward_kernel, min(tiles_per_row * rows, num_sms), args, options)


def postprocess_launch(call: Backward, scale: float) -> Launch:
    size, tokens = call.size, call.space.padded_tokens
    tensors = call.space.dq_acc, view(call.grads[0]), call.flag
    args = tensors, *call.lengths, scale, tokens, tokens // PAD.value, size.heads, size.batch
    parts = call.space.parts[0]
    config = PostprocessConfig(size.d, parts, sum(parts), not INTERPRETED)
    options = {"CONFIG": config, "num_warps": 8, "launch_pdl": not INTERPRETED}
    programs = 2 * size.programs(size.n_q, size.heads, PAD.value)
    return Launch(postprocess_kernel, programs, args, options)


def repair_launch(call: Backward, num_sms: int) -> Launch:
    request, bwd_inputs, grads, _, size = call
    q, k, v, spec = request[:4]
    rows = REPAIR_ROWS
    plan = repair_config(size, rows, padded(size.d, 64), padded(size.dv, 64))
    q_total = size.programs(size.n_q, size.heads, rows)
    k_total = size.programs(size.n_k, size.kv_heads, rows)
    lse2, delta = call.statistics
    views = view(grads[0]), view(grads[1]), view(grads[2])
    args = (
        BackwardTensors(view(q), view(k), view(v), view(bwd_inputs.dout), lse2, delta, *views, call.flag),
        *(*call.lengths, spec.before, spec.after, spec.scale, spec.scale, q_total, k_total),
        *(size.tiles(size.n_q, rows), size.tiles(size.n_k, rows), size.heads, size.kv_heads, size.batch),
        device_terms(request, GPU, (rows, STEP)),
        device_terms(request, GPU, (STEP, rows), by_key=True),
    )
    options = {"MASK_MOD": mask_mod(request), "SCORE_MOD": score_mod_with_derivative(request, GPU), "EACH": False}
    options |= {"QUERIES": rows, "KEYS": rows, "QUERY": plan, "KEY": plan, "VALUE": None}
    options |= {"num_warps": 8, "launch_pdl": not INTERPRETED}
    return Launch(repair_backward_kernel, min(max(q_total, k_total), num_sms), args, options)


def kv_head_repeats(request: Request, num_sms: int) -> int:
    """How often each KV head is best repeated, each copy for a part of its query heads. A program owns a tile of keys
    of a KV head: with few keys and KV heads there are fewer programs than num_sms, and under a causal mask the
    longest still run when the others are done. Only if the gradients are float32: they are added without rounding."""
    spec, size = request.spec, call_shape(request)
    if not spec.partial or size.heads == size.kv_heads:
        return 1
    config = backward_config(request, size, padded_parts(size), True)
    return _kv_head_repeats(size, spec.before, spec.after, config.BLOCK_N, num_sms)


@lru_cache(LIMIT)
def _kv_head_repeats(size: CallShape, before: int | None, after: int | None, block_n: int, num_sms: int) -> int:
    group = size.heads // size.kv_heads
    programs = size.programs(size.n_k, size.kv_heads, block_n)
    queries = -(-size.n_q // size.batch) if size.packed else size.n_q
    triangle = (before is None) != (after is None)
    if before is not None and after is not None:
        queries = min(queries, before + after + block_n)

    def time(n: int) -> float:
        """Estimated, in queries that a program visits. Four more launches cost as much as three tiles."""
        share = n * programs / num_sms
        rounds = max(1.0, (share + 1) / 2) if triangle else ceil(share)
        return rounds * queries * group / n + TILE_OVERHEAD * (3 + share) * (n > 1)

    return min((n for n in (1 << e for e in range(group.bit_length())) if group % n == 0), key=time)


def repeat_kv_heads(request: Request, n: int) -> Request:
    """The same call with each KV head repeated n times."""
    if n == 1:
        return request
    k, v = (x.unsqueeze(-2).expand(*x.shape[:-1], n, -1).flatten(-3, -2) for x in request[1:3])
    return request._replace(k=k, v=v)


def backward(request: Request, bwd_inputs: BackwardInputs) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor]]:
    """A runner (see `backends.protocol`). Tensors: `request.tensors()`, out, lse, dout, dlse. Results: dq, dk, dv."""
    spec, device = request.spec, request.q.device
    n = kv_head_repeats(request, target_of(device).num_sms)
    if n == 1:
        return KernelCall(build_backward(spec), (*request.tensors(), *bwd_inputs), device)
    split = KernelCall(build_backward(spec), (*repeat_kv_heads(request, n).tensors(), *bwd_inputs), device)

    def run(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        repeated = repeat_kv_heads(Request.of(spec, tensors[:-4]), n).tensors()
        dq, dk, dv = split((*repeated, *tensors[-4:]))
        return dq, *(x.unflatten(-2, (-1, n)).sum(-2) for x in (dk, dv))

    return run


def build_backward(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`, out, lse, dout, dlse. Results: dq, dk, dv."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:])
        grads = new_gradients(request, memory)
        return Built(grads, list(named_launches(request, bwd_inputs, grads, target, memory).values()))

    return build


def named_launches(
    request: Request, bwd_inputs: BackwardInputs, grads: tuple[Tensor, Tensor, Tensor], target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches by name, in order. Names in parentheses are of small kernels."""
    first, bwd_inputs = renormalised(request, bwd_inputs, GPU, memory)
    space = new_workspace(memory, call_shape(request))
    passes = [*first, *backward_launches(request, bwd_inputs, grads, space, target.num_sms)]
    names = (*["(renormalise)"] * len(first), "(preprocess)", "hopper backward", "(postprocess)", "(backward repair)")
    cleared = clear_launches(*grads, request.cu_q, request.cu_k, GPU)
    return dict(zip(names, passes, strict=False)) | named("(backward clear)", cleared)
