"""The launches of second derivatives: forward mode, the row statistics, and the tangents of dq, dk and dv."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import BackwardInputs, Request, Spec
from .clear import clear_launches
from .device.structs import View
from .hvp import (
    HvpTensors,
    hvp_key_kernel,
    hvp_query_kernel,
    repair_hvp_key_kernel,
    repair_hvp_query_kernel,
    zero_kernel,
)
from .jvp_launches import jvp_launch
from .kernel_call import call_shape, new_gradients, sequences_and_window, view
from .kernel_config import SMALLEST, flag_count, is_even, launch_options, tile_of
from .launch import Build, Built, Launch, Memory, Target
from .preprocess import preprocess_launch, row_statistics
from .repair import repair_jvp_kernel
from .repair_launches import repairs
from .score_terms import device_terms, folded, mask_mod
from .tiles import Tile

ROUNDING = Tile(64, 64, 4, 1)  # of the programs that round sums
ZEROS = 8192  # that a program writes
FEW_ROWS = 32  # queries or keys that are repaired at a time
Grads = tuple[Tensor, Tensor, Tensor]


class OnePass(NamedTuple):
    """One pass for dq. and for sums of dk. and dv.

    new_sums(request, dout, tangents, target, memory): memory for the sums, (2, batch, KV head, token, dim), or None for
    a call that it does not support; launch(request, tensors): that of the pass; tile: that of its programs.
    """

    new_sums: Callable[..., Tensor | None]
    launch: Callable[[Request, HvpTensors], Launch]
    tile: Tile


def build_hvp(spec: Spec, one_pass: OnePass | None = None) -> Build:
    """Tensors: `Request.tensors()`, out, lse, dout, dlse, and tangents of q, k and v. Results: the tangents of out,
    lse, dq, dk and dv."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-7]), BackwardInputs(*tensors[-7:-3])
        tout = memory.empty(bwd_inputs.out.shape, bwd_inputs.out.dtype)
        tlse = memory.empty(bwd_inputs.lse.shape, torch.float32)
        grads = new_gradients(request, memory)
        moved = BackwardInputs(tout, tlse, bwd_inputs.dout, None)
        inputs = request, bwd_inputs, tensors[-3:]
        launches = hvp_launches(*inputs, moved, grads, target, memory, one_pass)
        return Built((tout, tlse, *grads), launches)

    return build


def hvp_launches(
    request: Request,
    bwd_inputs: BackwardInputs,
    tangents: Sequence[Tensor],
    moved: BackwardInputs,
    grads: Grads,
    target: Target,
    memory: Memory,
    one_pass: OnePass | None,
) -> list[Launch]:
    """All launches in order. `moved` holds the tangents of out and lse, which the first of them computes."""
    jvp = jvp_launch(request, bwd_inputs.out, bwd_inputs.lse, tangents, moved.out, moved.lse, target, memory)
    lse2, delta = row_statistics(request, memory)
    _, tdelta = row_statistics(request, memory)
    preprocess, saved = preprocess_launch(request, bwd_inputs, (lse2, delta))
    again, _ = preprocess_launch(request, moved._replace(lse=bwd_inputs.lse), (lse2, tdelta))
    tq, tk, tv = map(view, tangents)
    inputs = saved.q, saved.k, saved.v, saved.do, saved.lse2, saved.delta
    tensors = HvpTensors(*inputs, tq, tk, tv, moved.lse, View(tdelta, tdelta.stride()[:2]), *map(view, grads))
    if one_pass is not None:
        sums = one_pass.new_sums(request, bwd_inputs.dout, tangents, target, memory)
        one_pass = None if sums is None else one_pass
        tensors = tensors if sums is None else tensors._replace(dk_acc=sums[0], dv_acc=sums[1])
    passes = hvp_passes(request, tensors, target, memory, one_pass)
    last = [
        *clear_launches(moved.out, moved.lse, None, request.cu_q, request.cu_q, target.gpu),
        *clear_launches(*grads, request.cu_q, request.cu_k, target.gpu),
    ]
    return [jvp, *repairs(repair_jvp_kernel, jvp, target), preprocess, again, *passes, *last]


def hvp_passes(
    request: Request, tensors: HvpTensors, target: Target, memory: Memory, one_pass: OnePass | None
) -> list[Launch]:
    """The launches of dq., and of dk. and dv. (one kernel or two), each followed by its NaN repair pass."""
    q, size, gpu = request.q, call_shape(request), target.gpu
    scoring, scale, rate = folded(request, gpu, derivative=True)
    scalars = *sequences_and_window(request), scale, rate
    program = scoring | {"MASK_MOD": mask_mod(request)}
    tile = tile_of("hvp query", q.element_size(), size, gpu) if one_pass is None else one_pass.tile
    query = Launch(
        hvp_query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            tensors._replace(flags=_flags(request, memory, size.n_q, size.heads)),
            *scalars,
            *size.grid(size.n_q, size.heads, tile.block_m),
            device_terms(request, gpu, tile.block),
        ),
        launch_options(request, tile, gpu, **program, EVEN=is_even(size, size.n_k, tile.block_n)),
    )
    made = [query] if one_pass is None else [_zero(tensors), one_pass.launch(request, query.args[0])]
    made += _repairs(repair_hvp_query_kernel, query, "BLOCK_M", target)
    tile = tile_of("hvp key", q.element_size(), size, gpu) if one_pass is None else ROUNDING
    for sum_k, sum_v in [(True, False), (False, True)] if tile.apart else [(True, True)]:
        key = Launch(
            hvp_key_kernel,
            size.programs(size.n_k, size.kv_heads, tile.block_n),
            (
                tensors._replace(flags=_flags(request, memory, size.n_k, size.kv_heads)),
                *scalars,
                *size.grid(size.n_k, size.kv_heads, tile.block_n),
                device_terms(request, gpu, tile.block, by_key=True),
            ),
            launch_options(
                request,
                tile,
                gpu,
                **program,
                EVEN=is_even(size, size.n_q, tile.block_m),
                SUM_K=sum_k,
                SUM_V=sum_v,
            ),
        )
        made += [key, *_repairs(repair_hvp_key_kernel, key, "BLOCK_N", target)]
    return made


def _zero(tensors: HvpTensors) -> Launch:
    """Sets the sums to 0; those of dv. follow those of dk."""
    count = 2 * tensors.dk_acc.numel()
    return Launch(zero_kernel, -(-count // ZEROS), (tensors.dk_acc, count), {"BLOCK": ZEROS, "num_warps": 4})


def _repairs(kernel: Any, of: Launch, side: str, target: Target) -> list[Launch]:
    """The NaN repair pass, at most FEW_ROWS rows of `side` at a time: NAN_SAFE products need more registers."""
    config = of.options["CONFIG"]
    rows = getattr(config, side)
    few = config._replace(**{side: min(FEW_ROWS, rows)})
    return repairs(kernel, of, target, ROWS=rows, CONFIG=few)


def _flags(request: Request, memory: Memory, rows: int, heads: int) -> Tensor | None:
    """The flags of a pass over `rows` queries or keys, one for each tile; None if no mask hides a key."""
    if not flag_count(request):
        return None
    return memory.empty((max(1, call_shape(request).programs(rows, heads, SMALLEST)),), torch.int32)
