"""What TMA needs to know of a tensor."""

from functools import cache

import torch
from torch import Tensor

from ...request import Spec
from ..common.shapes import view
from .gluon_compat import TensorDescriptor, gl
from .pipeline import FAR, Full
from .tiles import widths


def both(x: Tensor, rows: int, in_a_row: bool = False) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The descriptors of one or two parts of the columns; `in_a_row`: of a cache's tokens."""
    make = lined_up if in_a_row else descriptor
    first, *rest = (make(x, rows, width) for width in widths(x.shape[-1]))
    return first, rest[0] if rest else None


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """What TMA needs to know of a (batch, token, head, dim) or packed (token, head, dim) tensor; see pipeline.at."""
    if x.dim() == 3:
        return lined_up(x, rows, width)
    batch, token, head, one = x.stride()
    b, t, h, d = x.shape
    box = (1, 1, rows, width)
    return TensorDescriptor(x, [b, h, t, d], [batch, head, token, one], list(box), layout(box, x.dtype))


def lined_up(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Of tokens in a row, as packed ones are, and those of a cache, whose pages are whole numbers of tokens apart."""
    *_, token, head, one = x.stride()
    *_, heads, dim = x.shape
    far = FAR.value
    shape = [2 * far - 1, 2 * far - 1, heads, far, dim]
    box = (1, 1, 1, rows, width)
    return TensorDescriptor(x, shape, [2**34 - token, token, head, token, one], list(box), layout(box, x.dtype))


def full(x: Tensor, spec: Spec) -> Full:
    """Where results go in float32, if they do."""
    if not spec.partial:
        return Full()
    strides = view(x).strides
    return Full(x, strides[:3], x.shape[-1])


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
