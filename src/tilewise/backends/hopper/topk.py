"""Top-k attention of multi-head latent attention (MLA) on Hopper. The consumers are those of `mla`; other warps gather
the keys. A key has 576 columns, and its first 512 are the value. A program computes 64 heads of one query."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..common.device.structs import Sinks
from ..common.kernel_call import view
from ..common.kv.combine import Buffers
from ..common.launch import Launch
from .gluon_compat import fence_async_shared, gl, gluon
from .mla import LATENT_ROWS, LatentParams, NamedKeys, consume_latent, latent_shared, latent_tiles, produce_named

COPYING_WARPS: gl.constexpr = gl.constexpr(4)


class HopperTopkConfig(NamedTuple):
    """What the kernel is compiled for, as in `HopperLatentConfig`. NAMED: queries name their keys."""

    GROUP: int
    KV_HEADS: int
    D: int = 576
    DV: int = 512
    FLAG_NAN: bool = False
    LARGE_SCORES: bool = False
    MERGE_PREFIX: bool = False
    NAMED: bool = True


class TopkSizes(NamedTuple):
    """Batch rows."""

    batch: tl.tensor


@gluon.jit(do_not_specialize=["n_q", "n_k", "count", "batch"])
def hopper_topk_kernel(q, k, indices, buffers, sinks, scale, n_q, n_k, count, batch, CONFIG: gl.constexpr):
    shared = latent_shared(latent_tiles(q.ptr.dtype.element_ty), 32 * COPYING_WARPS)
    fence_async_shared()
    params = LatentParams(NamedKeys(indices, n_q, n_k, count), None, scale, None, TopkSizes(batch), sinks)
    gl.warp_specialize(
        [
            (consume_latent, (shared, q, buffers, params, 1, CONFIG)),
            (consume_latent, (shared, q, buffers, params, 0, CONFIG)),
            (produce_named, (shared, k, params, CONFIG)),
        ],
        [4, COPYING_WARPS],
        [216, 40],
    )


def supports(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the kernel runs a forward. Copies take 16 bytes: strides must be multiples of as much."""
    halves = q.dtype in (torch.float16, torch.bfloat16)
    latent = q.shape[3] == 576 and v.shape[3] == 512 and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    aligned = k.data_ptr() % 16 == 0 and k.stride(3) == 1 and all(s % 16 == 0 for s in k.stride()[:3])
    return halves and latent and aligned and k.shape[1] > 0 and q.shape[2] // k.shape[2] > 32 and scale > 0.0


def topk_launch(q: Tensor, k: Tensor, indices: Tensor, results: tuple[Tensor, Tensor], scale: float) -> Launch:
    """`results`: out (B, Sq, H, 512) and lse (B, H, Sq)."""
    out, lse = results
    config = HopperTopkConfig(q.shape[2] // k.shape[2], k.shape[2])
    buffers = Buffers(view(out), view(lse.transpose(1, 2).unsqueeze(-1)), None, None)
    numbers = q.shape[1], k.shape[1], indices.shape[3], q.shape[0]
    programs = q.shape[0] * q.shape[1] * k.shape[2] * -(-config.GROUP // LATENT_ROWS.value)
    args = view(q), view(k), indices, buffers, Sinks(), scale, *numbers
    return Launch(hopper_topk_kernel, programs, args, {"CONFIG": config, "num_warps": 4})


def forward(q: Tensor, k: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse): (B, Sq, H, 512) and (B, H, Sq)."""
    batch, n_q, heads, _ = q.shape
    out = torch.empty((batch, n_q, heads, 512), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
    topk_launch(q, k, indices, (out, lse), scale)()
    return out, lse
