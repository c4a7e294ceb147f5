"""The launches of forward mode."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import AttentionError
from ...request import Request
from .clear import clear_launches
from .jvp import JvpTensors, jvp_kernel
from .kernel_config import flag_count, options_of, tile_of
from .launch import DeviceMemory, Launch, Memory, Target, can_overlap, target_of
from .repair import repair_jvp_kernel
from .repair_launches import repairs
from .shapes import call_shape, sequences_and_window, view


def jvp(request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse for tangents of q, k and v.

    Raises:
        AttentionError: the call has a bias, sinks, a mod or dropout, which these kernels do not differentiate.
    """
    if not request.is_plain:
        raise AttentionError("forward mode on these kernels", "a score term", "backend='reference', or no score terms")
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
    q, k, v, spec = request[:4]
    size, gpu = call_shape(request), target.gpu
    tile = tile_of("jvp", q.element_size(), size, gpu)
    count = flag_count(request)
    flags = memory.empty((count,), torch.int32) if count else None
    dq, dk, dv = map(view, tangents)
    tensors = JvpTensors(view(q), view(k), view(v), dq, dk, dv, view(out), lse, view(dout), dlse, flags)
    return Launch(
        jvp_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (tensors, *sequences_and_window(request), spec.scale, *size.grid(size.n_q, size.heads, tile.block_m)),
        options_of(request, tile, gpu, OVERLAP=can_overlap(gpu)),
    )
