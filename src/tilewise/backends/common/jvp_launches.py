"""The launches of forward mode."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...request import Request
from .clear import clear_launches
from .jvp import JvpTensors, jvp_kernel
from .kernel_call import call_shape, sequences_and_window, view
from .kernel_config import flag_count, is_even, launch_options, tile_of
from .launch import DeviceMemory, Launch, Memory, Target, can_overlap, target_of
from .repair import repair_jvp_kernel
from .repair_launches import repairs
from .score_terms import device_terms, folded, mask_mod


def jvp(request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse for tangents of q, k and v, of a call with `lacks_jvp` None."""
    device = request.q.device
    target, memory = target_of(device), DeviceMemory(device)
    dout, dlse = memory.empty(out.shape, out.dtype), memory.empty(lse.shape, lse.dtype)
    first = jvp_launch(request, out, lse.contiguous(), tangents, dout, dlse, target, memory)
    cleared = clear_launches(dout, dlse, None, request.cu_q, request.cu_q, target.gpu)
    for launch in (first, *repairs(repair_jvp_kernel, first, target), *cleared):
        launch()
    return dout, dlse


def jvp_launch(
    request: Request,
    out: Tensor,
    lse: Tensor,
    tangents: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor,
    target: Target,
    memory: Memory,
) -> Launch:
    q, k, v = request[:3]
    size, gpu = call_shape(request), target.gpu
    tile = tile_of("jvp", q.element_size(), size, gpu)
    count = flag_count(request)
    flags = memory.empty((count,), torch.int32) if count else None
    dq, dk, dv = map(view, tangents)
    scoring, scale, rate = folded(request, gpu, derivative=True)
    tensors = JvpTensors(view(q), view(k), view(v), dq, dk, dv, view(out), lse, view(dout), dlse, flags)
    return Launch(
        jvp_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            tensors,
            *sequences_and_window(request),
            scale,
            rate,
            *size.grid(size.n_q, size.heads, tile.block_m),
            device_terms(request, gpu, tile.block),
        ),
        launch_options(
            request,
            tile,
            gpu,
            **scoring,
            MASK_MOD=mask_mod(request),
            EVEN=is_even(size, size.n_k, tile.block_n),
            OVERLAP=can_overlap(gpu),
        ),
    )
