"""TMA descriptors of tensors."""

from functools import cache

import torch
from torch import Tensor

from ...request import Spec
from ..common.shapes import view
from .gluon_compat import TensorDescriptor, gl
from .pipeline import TMA_EXTENT, GlobalTensor
from .tiles import widths

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def column_descriptors(
    x: Tensor, rows: int, is_cache: bool = False
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The descriptors of one or two parts of the columns, in boxes of `rows` rows; the second is None for one part."""
    return part_descriptors(x, rows, widths(x.shape[-1]), is_cache)


def part_descriptors(
    x: Tensor, rows: int, parts: tuple[int, ...], is_cache: bool = False
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The same for parts of these widths."""
    make = packed_descriptor if is_cache else descriptor
    first, *rest = (make(x, rows, width) for width in parts)
    return first, rest[0] if rest else None


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """The descriptor of a (batch, token, head, dim) or packed (token, head, dim) tensor; see
    `pipeline.tma_coordinates`."""
    if x.dim() == 3:
        return packed_descriptor(x, rows, width)
    batch, token, head, one = x.stride()
    b, t, h, d = x.shape
    box = (1, 1, rows, width)
    return TensorDescriptor(x, [b, h, t, d], [batch, head, token, one], list(box), layout(box, x.dtype))


def packed_descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """The descriptor of packed sequences, or of a KV cache whose pages are whole numbers of tokens apart."""
    *_, token, head, one = x.stride()
    *_, heads, dim = x.shape
    extent = TMA_EXTENT.value
    shape = [2 * extent - 1, 2 * extent - 1, heads, extent, dim]
    box = (1, 1, 1, rows, width)
    return TensorDescriptor(x, shape, [2**34 - token, token, head, token, one], list(box), layout(box, x.dtype))


def float32_output(x: Tensor, spec: Spec) -> GlobalTensor:
    """Where the kernel stores float32 results; absent unless the call is partial."""
    return output(x) if spec.partial else GlobalTensor()


def output(x: Tensor) -> GlobalTensor:
    return GlobalTensor(x, view(x).strides[:3], x.shape[-1])


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])
