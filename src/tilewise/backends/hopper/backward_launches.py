"""From tensors to the launches of the Hopper backward: preprocess; dK, dV and the sums of dQ; postprocess."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import LIMIT, BackwardInputs, Request, Spec
from ..common.clear import clear_launches
from ..common.device.gradients import BackwardTensors
from ..common.device.structs import LOG2E, PAD, View
from ..common.launch import INTERPRETED, Build, Built, Launch, Memory, Target, named
from ..common.renormalise import renormalised
from ..common.score_terms import device_terms, folded, has_large_scores, mask_mod, score_mod_with_derivative
from ..common.shapes import CallShape, call_shape, new_gradients, view
from .backward import backward_kernel
from .backward_schedule import Split, block_dims, choose_split, tile_schedule
from .backward_tiles import BackwardConfig
from .descriptors import descriptor
from .gluon_compat import TensorDescriptor, gl
from .postprocess import (
    PostprocessConfig,
    PostprocessTensors,
    PreprocessConfig,
    PreprocessTensors,
    postprocess_kernel,
    preprocess_kernel,
)
from .repair_config import STEP, repair_config
from .support import GPU
from .tiles import backward_tile

REPAIR_ROWS = 16  # few registers: the postprocess has many programs on an SM
UNSWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Workspace(NamedTuple):
    """The memory that a call needs beside its arguments, in one allocation: the row statistics (batch and head, padded
    token); zeroed by `preprocess_kernel`, dQ in float32 in rows of 256 and counters: that of the tile scheduler, the
    flag of the NaN repair at 16, and from 32 on a semaphore for each tile of dQ; and with a `split` the parts of dK and
    dV (see `key_parts.Parts`)."""

    lse2: Tensor
    delta: Tensor
    dq_acc: Tensor
    counters: Tensor
    flag: Tensor
    semaphores: Tensor
    split: Split | None
    dk_parts: Tensor | None
    dv_parts: Tensor | None

    @property
    def padded_tokens(self) -> int:
        return self.lse2.shape[1]


def new_workspace(memory: Memory, size: CallShape, split: Split | None) -> Workspace:
    sizes = workspace_sizes(size, 0 if split is None else split.parts)
    lse2, delta, dq_acc, counters, dk, dv = memory.empty((sum(sizes),), torch.float32).split(sizes)
    rows, counters = statistics_rows(size), counters.view(torch.int32)
    statistics = lse2.view(rows, -1), delta.view(rows, -1)
    parts = (None, None, None) if split is None else (split, dk, dv)
    return Workspace(*statistics, dq_acc.view(-1, 256), counters, counters[16:], counters[32:], *parts)


@lru_cache(LIMIT)
def workspace_sizes(size: CallShape, parts: int) -> tuple[int, ...]:
    """Float32 numbers of lse2, delta, dq_acc, the counters, and the parts of dK and dV."""
    d, dv = block_dims(size)
    tokens = statistics_rows(size) * size.tiles(size.n_q, PAD.value) * PAD.value
    keys = parts * size.programs(size.n_k, size.kv_heads, PAD.value) * PAD.value
    return tokens, tokens, tokens * d, tokens // PAD.value * 4 + 64, keys * d, keys * dv


def statistics_rows(size: CallShape) -> int:
    return size.heads * (1 if size.packed else size.batch)


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
    """Preprocess, backward and postprocess."""
    call = Backward(request._replace(sinks=None), bwd_inputs, grads, space, call_shape(request))
    score, score_scale, scale = folded(call.request, GPU, derivative=True)
    return [
        preprocess_launch(call),
        main_launch(call, score, score_scale, scale, num_sms),
        postprocess_launch(call, scale),
    ]


def preprocess_launch(call: Backward) -> Launch:
    size, space = call.size, call.space
    out, lse, dout, dlse = call.bwd_inputs
    block_d, block_dv = block_dims(size)
    tiles = space.padded_tokens // PAD.value
    tensors = PreprocessTensors(view(out), view(dout), lse, dlse, *call.statistics, space.dq_acc, space.counters)
    config = PreprocessConfig(size.dv, PAD.value, block_d, block_dv, has_large_scores(call.request), not INTERPRETED)
    args = tensors, *call.lengths, tiles, size.heads, size.batch
    options = {"CONFIG": config, "num_warps": 8 if size.dv > 128 else 4}
    return Launch(preprocess_kernel, size.programs(size.n_q, size.heads, PAD.value), args, options)


def backward_config(request: Request, size: CallShape, fold_scale: bool, is_split: bool) -> BackwardConfig:
    block_d, block_dv = block_dims(size)
    has_terms, deterministic = not request.is_plain, request.spec.deterministic
    tile = backward_tile(block_d, plain=not has_terms)
    return BackwardConfig(
        block_d,
        block_dv,
        tile.block_m,
        tile.block_n,
        GROUP=size.heads // size.kv_heads,
        DETERMINISTIC=deterministic,
        DQ_BY_TMA=tile.dq_by_tma or (deterministic and block_d <= 128),
        HAS_TERMS=has_terms,
        FOLD_SCALE=fold_scale,
        SCORES_FIRST=has_terms and block_d > 64,
        SPLIT=is_split,
    )


def main_launch(call: Backward, score: dict[str, Any], score_scale: float, scale: float, num_sms: int) -> Launch:
    """`score`, `score_scale`, `scale`: as `folded` returns them."""
    request, bwd_inputs, (_, dk, dv), space, size = call
    q, k, v, spec = request[:4]
    split = space.split or Split()
    config = backward_config(request, size, score["FOLD"], space.split is not None)
    if config.HAS_TERMS and not config.FOLD_SCALE:
        score_scale = 1.0  # the scores have been multiplied
    schedule = tile_schedule(size, spec, split.parts, config.BLOCK_N, num_sms)
    num_tiles = schedule.tiles_per_row * schedule.rows
    columns = 2 if config.D > 128 else 1  # each warpgroup stores its columns of dK and dV
    statistics = (
        TensorDescriptor(x, x.shape, x.stride(), [1, config.BLOCK_M], UNSWIZZLED) for x in (space.lse2, space.delta)
    )
    dq_box = [config.BLOCK_M * config.D // 512, 256]
    args = (
        *(descriptor(q, config.BLOCK_M, config.D), descriptor(k, 64, config.D), descriptor(v, 64, config.DV)),
        descriptor(bwd_inputs.dout, config.BLOCK_M, config.DV),
        *statistics,
        *(space.dq_acc, TensorDescriptor(space.dq_acc, space.dq_acc.shape, (256, 1), dq_box, UNSWIZZLED)),
        # of parts, only the box shapes of these two are used
        descriptor(k if config.SPLIT else dk, 64, config.D // columns),
        descriptor(v if config.SPLIT else dv, 64, config.DV // columns),
        *(space.dk_parts, space.dv_parts, call.flag, space.semaphores, *call.lengths),
        *(spec.before, spec.after, score_scale * LOG2E.value, scale, space.padded_tokens, schedule.ascending_rows),
        *(config.GROUP // split.heads, split.queries.bit_length() - 1, split.queries * config.BLOCK_M),
        *(
            size.tiles(size.n_k, PAD.value) * PAD.value,
            space.counters,
            num_tiles,
            schedule.rows,
            schedule.tiles_per_row,
        ),
        *(size.kv_heads * split.parts, size.batch, schedule.rows_in_l2),
        device_terms(request, GPU, (config.BLOCK_M, config.BLOCK_N), by_key=True),
    )
    options = {"MASK_MOD": mask_mod(request), "SCORE_MOD": score["SCORE_MOD"], "CONFIG": config}
    options |= {"num_warps": 4, "launch_pdl": not INTERPRETED}
    return Launch(backward_kernel, min(num_tiles, num_sms), args, options)


def postprocess_launch(call: Backward, scale: float) -> Launch:
    request, bwd_inputs, grads, space, size = call
    spec, pad, rows = request.spec, PAD.value, REPAIR_ROWS
    dq, dk, dv = (view(x) for x in grads)
    tensors = PostprocessTensors(space.dq_acc, space.dk_parts, space.dv_parts, dq, dk, dv, call.flag)
    q_total, parts = 2 * size.programs(size.n_q, size.heads, pad), 0 if space.split is None else space.split.parts
    k_total = 2 * size.programs(size.n_k, size.kv_heads, pad)
    repair, plan = None, None
    terms: tuple[Any, Any] = (), ()
    mods: tuple[Any, Any] = None, None
    if request.is_masked:
        q, k, v, dout = (view(x) for x in (*request[:3], bwd_inputs.dout))
        repair = BackwardTensors(q, k, v, dout, *call.statistics, dq, dk, dv)
        terms = device_terms(request, GPU, (rows, STEP)), device_terms(request, GPU, (STEP, rows), by_key=True)
        mods = score_mod_with_derivative(request, GPU), mask_mod(request)
        plan = repair_config(size, rows, *block_dims(size))
    args = (
        *(tensors, repair, *call.lengths, spec.before, spec.after, spec.scale, scale),
        *(size.tiles(size.n_q, pad), size.tiles(size.n_k, pad), size.heads, size.kv_heads, size.batch),
        *(q_total, k_total, parts, *terms),
    )
    config = PostprocessConfig(size.d, size.dv, *block_dims(size), not INTERPRETED)
    options: dict[str, Any] = {"SCORE_MOD": mods[0], "MASK_MOD": mods[1], "REPAIR": plan, "CONFIG": config}
    # as many programs on an SM as without the repair: only that spills
    options |= {"num_warps": 8, "launch_pdl": not INTERPRETED, "maxnreg": 64 if max(block_dims(size)) <= 128 else 128}
    return Launch(postprocess_kernel, q_total + (k_total if parts else 0), args, options)


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
    space = new_workspace(memory, call_shape(request), choose_split(request, target.num_sms))
    passes = [*first, *backward_launches(request, bwd_inputs, grads, space, target.num_sms)]
    names = (*["(renormalise)"] * len(first), "(preprocess)", "hopper backward", "(postprocess)")
    cleared = clear_launches(*grads, request.cu_q, request.cu_k, GPU)
    return dict(zip(names, passes, strict=False)) | named("(backward clear)", cleared)
