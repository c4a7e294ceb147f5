"""The launch of second derivatives in one pass."""

import torch
from torch import Tensor

from ...request import Gpu, Request
from ..common.device.structs import LOG2E
from ..common.hvp import HvpTensors
from ..common.hvp_launches import OnePass
from ..common.kernel_call import call_shape
from ..common.launch import Launch, Memory, Target
from ..common.tiles import Tile
from .gluon_compat import TensorDescriptor, gl
from .hvp import KEYS, QUERIES, hvp_kernel
from .launches import descriptor
from .support import is_aligned

HEAD_DIMS = 64, 128
SUM_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)


def new_sums(
    request: Request, dout: Tensor, tangents: tuple[Tensor, ...], target: Target, memory: Memory
) -> Tensor | None:
    """Memory for the sums of dk. and dv., (2, batch, KV head, token, dim). None for calls that the kernel does not
    support."""
    size = call_shape(request)
    plain = request.is_plain and request.cu_q is None and not request.spec.deterministic
    fits = size.d == size.dv and size.d in HEAD_DIMS and request.q.element_size() == 2
    if not (plain and fits and target.gpu == Gpu("cuda", 90) and min(size.n_q, size.n_k) > 0):
        return None
    if not all(_is_loaded_by_tma(x) for x in (*request[:3], dout, *tangents)):
        return None
    return memory.empty((2, size.batch, size.kv_heads, size.n_k, size.d), torch.float32)


def _is_loaded_by_tma(x: Tensor) -> bool:
    return is_aligned(x) and x.stride(3) == 1 and not any(n % 8 or n == 0 for n in x.stride()[:3])


def hvp_launch(request: Request, tensors: HvpTensors) -> Launch:
    """`tensors` with the sums, which are 0, and with flags or None."""
    size, spec = call_shape(request), request.spec
    dk_sums, dv_sums = tensors.dk_acc, tensors.dv_acc
    by_query = (descriptor(x.ptr, QUERIES.value, size.d) for x in (tensors.q, tensors.tq, tensors.do))
    by_key = (descriptor(x.ptr, KEYS.value, size.d) for x in (tensors.k, tensors.tk, tensors.v, tensors.tv))
    box = [1, 1, KEYS.value, size.d]
    args = (
        *(*by_query, *by_key, descriptor(tensors.dq.ptr, QUERIES.value, size.d)),
        *(TensorDescriptor(x, list(x.shape), list(x.stride()), box, SUM_LAYOUT) for x in (dk_sums, dv_sums)),
        *(tensors.lse2.ptr, tensors.delta.ptr, tensors.tdelta.ptr, tensors.tlse, tensors.flags),
        *(size.n_q, size.n_k, spec.before, spec.after, tensors.lse2.ptr.shape[-1]),
        *(size.heads, size.heads // size.kv_heads, spec.scale * LOG2E.value, spec.scale),
    )
    programs = size.programs(size.n_q, size.heads, QUERIES.value)
    return Launch(hvp_kernel, programs, args, {"D": size.d, "EVEN": size.n_k % KEYS.value == 0, "num_warps": 8})


ONE_PASS = OnePass(new_sums, hvp_launch, Tile(QUERIES.value, KEYS.value, 8, 1))
