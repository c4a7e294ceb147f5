"""tilewise.merge of two results, in place, as one kernel that reads and writes each number once."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device.softmax import logsumexp
from .device.structs import LOG2E
from .launch import Launch

ELEMENTS: tl.constexpr = tl.constexpr(2048)  # of out, for each program


class JoinTensors(NamedTuple):
    """o (batch, total, heads, DV) and lse (batch, heads, total); those of some tokens over other keys; and the indices
    of these tokens, or None. Contiguous."""

    o: tl.tensor
    lse: tl.tensor
    o_part: tl.tensor
    lse_part: tl.tensor
    index: tl.tensor


@triton.jit(do_not_specialize=["first", "total", "tokens", "heads", "rows"])
def join_kernel(tensors, first, total, tokens, heads, rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Merge (o_part, lse_part) into `tokens` tokens of (o, lse): from `first` on, or those of the index.
    rows = batch * tokens * heads."""
    BLOCK_R: tl.constexpr = ELEMENTS // BLOCK_DV
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_DV)
    exists = r < rows
    h = r % heads
    i = r // heads % tokens
    b = r // heads // tokens
    at = first + i if tensors.index is None else tl.load(tensors.index + i, mask=exists, other=0)
    o_pointers = tensors.o + (((b * total + at) * heads + h) * DV)[:, None] + d[None, :]
    lse_pointers = tensors.lse + (b * heads + h) * total + at
    fits = exists[:, None] & (d < DV)[None, :]
    o = tl.load(o_pointers, mask=fits, other=0.0)
    lse = tl.load(lse_pointers, mask=exists, other=float("-inf"))
    o_part = tl.load(tensors.o_part + (r * DV)[:, None] + d[None, :], mask=fits, other=0.0)
    lse_part = tl.load(tensors.lse_part + (b * heads + h) * tokens + i, mask=exists, other=float("-inf"))
    m = tl.maximum(lse, lse_part)
    pivot = tl.where(tl.abs(m) == float("inf"), 0.0, m)
    weight = tl.exp2((lse - pivot) * LOG2E)
    weight_part = tl.exp2((lse_part - pivot) * LOG2E)
    l = weight + weight_part
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    tl.store(o_pointers, o * (weight * factor)[:, None] + o_part * (weight_part * factor)[:, None], mask=fits)
    tl.store(lse_pointers, tl.where(tl.abs(m) == float("inf"), m, pivot + logsumexp(0.0, l)), mask=exists)


def join_launch(
    out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor, first: int, index: Tensor | None
) -> Launch:
    """The launch of `join_kernel`. All tensors are contiguous and float32."""
    batch, tokens, heads, dv = out_part.shape
    rows = batch * tokens * heads
    block_dv = triton.next_power_of_2(dv)
    programs = triton.cdiv(rows, ELEMENTS.value // block_dv)
    args = JoinTensors(out, lse, out_part, lse_part, index), first, out.shape[1], tokens, heads, rows
    return Launch(join_kernel, programs, args, {"DV": dv, "BLOCK_DV": block_dv})


def join_(out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor, first: int, index: Tensor | None) -> None:
    """See `tilewise.distributed.calls.merge_`."""
    for x in (out, lse):
        assert x.is_contiguous()
        assert x.dtype == torch.float32
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        join_launch(out, lse, out_part.contiguous(), lse_part.contiguous(), first, index)()
