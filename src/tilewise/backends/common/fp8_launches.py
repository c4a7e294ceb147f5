"""The launches of the quantising pass of precision="fp8", and what they write."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import Gpu, Request, padded
from .device.fp8 import Fp8Scales
from .device.structs import PAD
from .fp8_format import FIRST_KEYS, KEY_BLOCK, MEAN_KEYS, MEDIAN_KEYS, is_smoothed
from .fp8_quantise import Fp8Config, Fp8Tensors, mean_keys_kernel, quantise_kernel
from .kernel_call import call_shape, view
from .launch import INTERPRETED, Launch, Memory, can_overlap, pdl_option

PASS: dict[str, Any] = {"num_warps": 8} | ({} if INTERPRETED else {"maxnreg": 128})  # two programs on an SM
BLOCK = PAD.value
assert BLOCK == KEY_BLOCK


class Quantised(NamedTuple):
    """q, k and v in float8_e4m3fn, in blocks of PAD tokens: (blocks, heads, PAD, D) and, of v, (blocks, KV heads, Dv,
    PAD); D and Dv are padded. Their scales, and the launches that write them, by name in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Fp8Scales
    launches: dict[str, Launch]


def quantise(request: Request, gpu: Gpu, memory: Memory, least_dim: int, ordered: bool) -> Quantised:
    """The quantising pass. `least_dim`: to which head dims are padded at least; `ordered`: see `stored_key`."""
    size, spec = call_shape(request), request.spec
    d, dv = padded(size.d, least_dim), padded(size.dv, least_dim)
    q_tiles, k_tiles = size.tiles(size.n_q, BLOCK), size.tiles(size.n_k, BLOCK)
    rows = 1 if size.packed else size.batch
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    q8 = memory.empty((rows * q_tiles, size.heads, BLOCK, d), fp8)
    k8 = memory.empty((rows * k_tiles, size.kv_heads, BLOCK, d), fp8)
    v8 = memory.empty((rows * k_tiles, size.kv_heads, dv, BLOCK), fp8)
    smooth = is_smoothed(request)
    own = request.is_masked
    row_scales = memory.empty((rows * q_tiles, size.heads, 1 + smooth, BLOCK), f32)
    key_scales = memory.empty((rows * k_tiles, size.kv_heads, 2 + 2 * BLOCK * own), f32)
    scales = Fp8Scales(row_scales, key_scales, row_scales if smooth else None, key_scales if own else None)
    means = memory.empty((size.batch, size.kv_heads, d), f32) if smooth else None
    tensors = Fp8Tensors(view(request.q), view(request.k), view(request.v), q8, k8, v8, scales, means)
    overlap = can_overlap(gpu)
    group = size.heads // size.kv_heads
    packed = gpu.has_e4m3 and not INTERPRETED
    config = Fp8Config(group, size.d, size.dv, d, dv, MEAN_KEYS, FIRST_KEYS, MEDIAN_KEYS, ordered, overlap, packed)
    options = {"CONFIG": config, **pdl_option(overlap)}
    k_total = size.programs(size.n_k, size.kv_heads, BLOCK)
    quantising = Launch(
        quantise_kernel,
        2 * k_total + size.programs(size.n_q, size.heads, BLOCK),
        (
            *(tensors, request.cu_q, request.cu_k, size.n_q, size.n_k, spec.scale),
            *(q_tiles, k_tiles, size.heads, size.kv_heads, size.batch, k_total),
        ),
        {**options, **PASS},
    )
    if not smooth:
        return Quantised(q8, k8, v8, scales, {"fp8 quantise": quantising})
    averaging = Launch(
        mean_keys_kernel,
        size.batch * size.kv_heads,
        (tensors, request.cu_q, request.cu_k, size.n_q, size.n_k, spec.after, size.kv_heads),
        {**options, "num_warps": 16},
    )
    return Quantised(q8, k8, v8, scales, {"(fp8 mean key)": averaging, "fp8 quantise": quantising})
