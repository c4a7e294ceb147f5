"""(out, lse) over some keys becomes that over more, in place: tilewise.merge as one kernel that reads and writes each
number once."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device.softmax import logsumexp
from .device.structs import LOG2E
from .launch import Launch

ELEMENTS = 2048  # of out, for each program


@triton.jit(do_not_specialize=["first", "total", "tokens", "heads", "rows"])
def join_kernel(
    o, lse, o_part, lse_part, index, first, total, tokens, heads, rows,
    DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o (batch, total, heads, DV) and lse (batch, heads, total), of which `tokens` from `first` on, or those of the
    index, are joined by the parts; rows = batch * tokens * heads, BLOCK_R to a program."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_DV)
    exists = r < rows
    h = r % heads
    i = r // heads % tokens
    b = r // heads // tokens
    at = first + i if index is None else tl.load(index + i, mask=exists, other=0)
    own = o + (((b * total + at) * heads + h) * DV)[:, None] + d[None, :]
    log = lse + (b * heads + h) * total + at
    fits = exists[:, None] & (d < DV)[None, :]
    x = tl.load(own, mask=fits, other=0.0)
    x_log = tl.load(log, mask=exists, other=float("-inf"))
    y = tl.load(o_part + (r * DV)[:, None] + d[None, :], mask=fits, other=0.0)
    y_log = tl.load(lse_part + (b * heads + h) * tokens + i, mask=exists, other=float("-inf"))
    top = tl.maximum(x_log, y_log)
    pivot = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    w_x = tl.exp2((x_log - pivot) * LOG2E)
    w_y = tl.exp2((y_log - pivot) * LOG2E)
    l = w_x + w_y
    share = 1.0 / tl.where(l == 0.0, 1.0, l)
    tl.store(own, x * (w_x * share)[:, None] + y * (w_y * share)[:, None], mask=fits)
    tl.store(log, tl.where(tl.abs(top) == float("inf"), top, pivot + logsumexp(0.0, l)), mask=exists)


def join_launch(
    out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor, first: int, index: Tensor | None
) -> Launch:
    """All contiguous and float32. `index`: the tokens of `out` that the parts join, where they are no stretch."""
    batch, tokens, heads, dv = out_part.shape
    rows = batch * tokens * heads
    block_dv = triton.next_power_of_2(dv)
    block_r = max(1, ELEMENTS // block_dv)
    args = out, lse, out_part, lse_part, index, first, out.shape[1], tokens, heads, rows
    return Launch(join_kernel, triton.cdiv(rows, block_r), args, {"DV": dv, "BLOCK_R": block_r, "BLOCK_DV": block_dv})


def join_(out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor, first: int, index: Tensor | None) -> None:
    """See `tilewise.distributed.calls.merge_`."""
    for x in (out, lse):
        assert x.is_contiguous()
        assert x.dtype == torch.float32
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        join_launch(out, lse, out_part.contiguous(), lse_part.contiguous(), first, index)()
