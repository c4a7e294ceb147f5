"""The launches of second derivatives: forward mode, the row statistics, and the tangents of dq, dk and dv."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...request import BackwardInputs, Request, Spec
from .clear import clear_launches
from .device.structs import View
from .hvp import HvpTensors, hvp_key_kernel, hvp_query_kernel, repair_hvp_key_kernel, repair_hvp_query_kernel
from .jvp_launches import jvp_launch
from .kernel_call import call_shape, new_gradients, sequences_and_window, view
from .kernel_config import SMALLEST, flag_count, is_even, launch_options, tile_of
from .launch import Build, Built, Launch, Memory, Target
from .preprocess import prepare_launch, row_statistics
from .repair import repair_jvp_kernel
from .repair_launches import repairs
from .score_terms import device_terms, folded, mask_mod

FEW_ROWS = 32  # queries or keys that are repaired at a time
Grads = tuple[Tensor, Tensor, Tensor]


def build_hvp(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`, out, lse, dout, dlse, and tangents of q, k and v. Results: the tangents of out,
    lse, dq, dk and dv."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-7]), BackwardInputs(*tensors[-7:-3])
        tout = memory.empty(bwd_inputs.out.shape, bwd_inputs.out.dtype)
        tlse = memory.empty(bwd_inputs.lse.shape, torch.float32)
        grads = new_gradients(request, memory)
        moved = BackwardInputs(tout, tlse, bwd_inputs.dout, None)
        launches = hvp_launches(request, bwd_inputs, tensors[-3:], moved, grads, target, memory)
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
) -> list[Launch]:
    """All launches in order. `moved` holds the tangents of out and lse, which the first of them computes."""
    jvp = jvp_launch(request, bwd_inputs.out, bwd_inputs.lse, tangents, moved.out, moved.lse, target, memory)
    lse2, delta = row_statistics(request, memory)
    _, tdelta = row_statistics(request, memory)
    prepare, saved = prepare_launch(request, bwd_inputs, (lse2, delta))
    again, _ = prepare_launch(request, moved._replace(lse=bwd_inputs.lse), (lse2, tdelta))
    tq, tk, tv = map(view, tangents)
    inputs = saved.q, saved.k, saved.v, saved.do, saved.lse2, saved.delta
    tensors = HvpTensors(*inputs, tq, tk, tv, moved.lse, View(tdelta, tdelta.stride()[:2]), *map(view, grads))
    passes = hvp_passes(request, tensors, target, memory)
    last = [
        *clear_launches(moved.out, moved.lse, None, request.cu_q, request.cu_q, target.gpu),
        *clear_launches(*grads, request.cu_q, request.cu_k, target.gpu),
    ]
    return [jvp, *repairs(repair_jvp_kernel, jvp, target), prepare, again, *passes, *last]


def hvp_passes(request: Request, tensors: HvpTensors, target: Target, memory: Memory) -> list[Launch]:
    """The launches of dk. and dv. (one kernel or two) and of dq., each followed by its NaN repair pass."""
    q, size, gpu = request.q, call_shape(request), target.gpu
    scoring, scale, rate = folded(request, gpu, derivative=True)
    scalars = *sequences_and_window(request), scale, rate
    program = scoring | {"MASK_MOD": mask_mod(request)}
    made = []
    tile = tile_of("hvp key", q.element_size(), size, gpu)
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
    tile = tile_of("hvp query", q.element_size(), size, gpu)
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
    return [*made, query, *_repairs(repair_hvp_query_kernel, query, "BLOCK_M", target)]


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
