"""The launches of the portable forward with precision="fp8"."""

import torch
from torch import Tensor

from ...request import Request, padded
from ..common import tiles
from ..common.clear import clear_launches, clear_max_logit
from ..common.device.attend import Tensors
from ..common.fp8_launches import quantise
from ..common.kernel_call import call_shape, sequences_and_window, view
from ..common.kernel_config import flag_count, launch_options
from ..common.launch import INTERPRETED, Launch, Memory, Target, can_overlap, named
from ..common.repair import repair_forward_kernel
from ..common.repair_launches import repairs
from ..common.score_terms import device_terms, mask_mod, score_mod
from .fp8_forward import Fp8Operands, fp8_forward_kernel

LEAST_DIM = 32  # of a product of fp8 operands
PROMOTED = 128  # values of a row that tensor cores add before the sum becomes float32


def fp8_tile(d: int) -> tiles.Tile:
    """The tile for padded head dims up to d."""
    if INTERPRETED:
        return tiles.Tile(64, 32, 4, 1)
    if d <= 128:
        return tiles.Tile(128, 64, 8, 3)
    return tiles.Tile(64, 64, 8, 2) if d <= 256 else tiles.Tile(64, 32, 8, 2)


def fp8_forward_launches(
    request: Request, out: Tensor, lse: Tensor, target: Target, memory: Memory, max_logit: Tensor | None = None
) -> dict[str, Launch]:
    """The launches by name: the quantising pass, the forward, and the NaN repair pass, which reads q, k and v
    themselves."""
    gpu, size = target.gpu, call_shape(request)
    quantised = quantise(request, gpu, memory, LEAST_DIM, ordered=False)
    tile = fp8_tile(padded(max(size.d, size.dv)))
    flags = flag_count(request)
    flag = memory.empty((flags,), torch.int32) if flags else None
    overlap = can_overlap(gpu)
    args = (
        Tensors(view(request.q), view(request.k), view(request.v), view(out), lse, flag, max_logit),
        *sequences_and_window(request),
        request.spec.scale,
        *size.grid(size.n_q, size.heads, tile.block_m),
        None,
        device_terms(request, gpu, tile.block),
    )
    options = launch_options(
        request,
        tile,
        gpu,
        SCORE_MOD=score_mod(request, gpu),
        MASK_MOD=mask_mod(request),
        MAX_LOGIT=max_logit is not None,
        FOLD=request.spec.is_linear(request.bias is not None),
        OVERLAP=overlap,
    )
    d, dv = padded(size.d, LEAST_DIM), padded(size.dv, LEAST_DIM)
    own = options | {"CONFIG": options["CONFIG"]._replace(BLOCK_D=d, BLOCK_DV=dv, CHUNK=min(PROMOTED, d))}
    programs = size.programs(size.n_q, size.heads, tile.block_m)
    first = Launch(fp8_forward_kernel, programs, (*args, Fp8Operands(*quantised[:4])), own)
    plain = Launch(repair_forward_kernel, programs, args, options)
    cleared = clear_launches(out, lse, None, request.cu_q, request.cu_q, gpu, -torch.inf)
    return (
        named("(forward max logit)", clear_max_logit(max_logit))
        | quantised.launches
        | {"forward": first}
        | named("(forward repair)", repairs(repair_forward_kernel, plain, target))
        | named("(forward clear)", cleared)
    )
