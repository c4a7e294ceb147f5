"""The registered ops of block attention: rows gathered, merged and multiplied, small blocks, and gradients added to the
rows of their queries. Kernels are imported when an op runs on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..request import BackwardInputs, Request, Spec

_library = torch.library.Library("tilewise_sparse", "FRAGMENT")
_library.define(
    "combine(Tensor? base, Tensor? lse, Tensor parts, Tensor? part_lse, Tensor positions, ScalarType dtype)"
    " -> (Tensor, Tensor)"
)
_library.define("gather(Tensor x, Tensor lines) -> Tensor")
_library.define("row_dots(Tensor a, Tensor b) -> Tensor")
_choices = "Tensor lines, Tensor cu_q, Tensor starts, SymInt choosers, SymInt block_size, float scale"
_library.define(f"block_parts(Tensor q, Tensor k, Tensor v, {_choices}) -> (Tensor, Tensor)")
_library.define(
    f"block_parts_backward(Tensor[] saved, Tensor q, Tensor k, Tensor v, {_choices}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "scattered_backward(Tensor[] rows, Tensor lines, Tensor cu_q, Tensor cu_k, SymInt count, bool even, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("add_sums(Tensor base, Tensor sums, float scale) -> Tensor")


def combined(
    base: Tensor | None,
    lse: Tensor | None,
    parts: Tensor,
    part_lse: Tensor | None,
    positions: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """base (lines, G, D), if any, and the parts (count, G, D) of each line, merged by their lse (lines, G) and
    (G, count), or added. Returns (out in `dtype`, lse)."""
    found: tuple[Tensor, Tensor] = torch.ops.tilewise_sparse.combine(base, lse, parts, part_lse, positions, dtype)
    return found


@torch.library.impl(_library, "combine", "CompositeExplicitAutograd")
def _combine(
    base: Tensor | None, lse: Tensor | None, parts: Tensor, part_lse: Tensor | None, positions: Tensor, dtype: Any
) -> tuple[Tensor, Tensor]:
    if parts.is_cuda and parts.dtype != torch.float64:
        from ..backends.common import combine_parts

        own, own_lse, parts_lse = (None if x is None else x.contiguous() for x in (base, lse, part_lse))
        with torch.cuda.device_of(parts):
            return combine_parts.combine(own, own_lse, parts.contiguous(), parts_lse, positions.contiguous(), dtype)
    wide = torch.promote_types(parts.dtype, torch.float32)
    shape = len(positions), *parts.shape[1:]
    total = parts.new_zeros(shape, dtype=wide) if base is None else base.to(wide)
    padded = torch.cat([parts, parts.new_zeros(1, *shape[1:])])
    if part_lse is None:
        for slot in range(positions.shape[1]):
            total = total + padded.index_select(0, positions[:, slot]).to(wide)
        return total.to(dtype).contiguous(), total.new_empty(0)
    first = part_lse.new_full(shape[:2], -torch.inf) if lse is None else lse
    logs = torch.cat([part_lse.mT, part_lse.new_full((1, len(part_lse)), -torch.inf)])[positions.long()]
    logs = torch.cat([first[:, None], logs], 1)  # (lines, 1 + most, G)
    merged = torch.logsumexp(logs, 1)
    weights = torch.exp(logs - merged.masked_fill(merged == -torch.inf, 0.0)[:, None])[..., None]
    total = total * weights[:, 0]
    for slot in range(positions.shape[1]):
        total = total + padded.index_select(0, positions[:, slot]).to(wide) * weights[:, 1 + slot]
    return total.to(dtype).contiguous(), merged.contiguous()


@torch.library.register_fake("tilewise_sparse::combine", lib=_library)
def _combine_fake(base: Any, lse: Any, parts: Tensor, part_lse: Tensor | None, positions: Tensor, dtype: Any) -> Any:
    shape = positions.shape[0], *parts.shape[1:]
    logs = parts.new_empty(0) if part_lse is None else part_lse.new_empty(shape[:2])
    return parts.new_empty(shape, dtype=dtype), logs


@torch.library.impl(_library, "gather", "CompositeExplicitAutograd")
def _gather(x: Tensor, lines: Tensor) -> Tensor:
    if x.is_cuda and x.numel():
        from ..backends.common import combine_parts

        with torch.cuda.device_of(x):
            return combine_parts.gather(x.contiguous(), lines)
    return x.index_select(0, lines)


@torch.library.register_fake("tilewise_sparse::gather", lib=_library)
def _gather_fake(x: Tensor, lines: Tensor) -> Tensor:
    return x.new_empty((lines.shape[0], *x.shape[1:]))


@torch.library.impl(_library, "row_dots", "CompositeExplicitAutograd")
def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float64:
        from ..backends.common import combine_parts

        with torch.cuda.device_of(a):
            return combine_parts.row_dots(a.contiguous(), b.contiguous())
    dtype = torch.promote_types(a.dtype, torch.float32)
    return (a.to(dtype) * b.to(dtype)).sum(-1).contiguous()


@torch.library.register_fake("tilewise_sparse::row_dots", lib=_library)
def _row_dots_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[:-1], dtype=torch.promote_types(a.dtype, torch.float32))


@torch.library.impl(_library, "block_parts", "CompositeExplicitAutograd")
def _block_parts(q: Tensor, k: Tensor, v: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    from ..backends.common import block_parts

    with torch.cuda.device_of(q):
        return block_parts.forward(q, k, v, block_parts.Choices(*choices))


@torch.library.register_fake("tilewise_sparse::block_parts", lib=_library)
def _block_parts_fake(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    count, group = lines.shape[0], q.shape[1] // choices[2]
    return q.new_empty(count, group, v.shape[2]), q.new_empty(group, count, dtype=torch.float32)


@torch.library.impl(_library, "block_parts_backward", "CompositeExplicitAutograd")
def _block_parts_backward(
    saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, *choices: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from ..backends.common import block_parts

    with torch.cuda.device_of(q):
        return block_parts.backward(q, k, v, block_parts.Choices(*choices), tuple(saved))


@torch.library.register_fake("tilewise_sparse::block_parts_backward", lib=_library)
def _block_parts_backward_fake(saved: Any, q: Tensor, k: Tensor, v: Tensor, lines: Tensor, *choices: Any) -> Any:
    dq = q.new_empty(lines.shape[0], q.shape[1] // choices[2], q.shape[2])
    return dq, k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.impl(_library, "scattered_backward", "CompositeExplicitAutograd")
def _scattered_backward(
    rows: list[Tensor], lines: Tensor, cu_q: Tensor, cu_k: Tensor, count: int, even: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows`: q, k, v, dout, lse and -delta of packed sequences. Returns the sums of dq, (count, D), dk and dv. `even`:
    every key is in some sequence; others get zeros."""
    from ..backends.common.launch import DeviceMemory, multiprocessors
    from ..backends.hopper.backward_launches import scattered_launches

    q, k, v, dout, lse, dlse = rows
    request = Request(q, k, v, Spec(scale), cu_q=cu_q, cu_k=cu_k)
    sums = torch.zeros(64 + count, q.shape[2], dtype=torch.float32, device=q.device)
    new = torch.empty_like if even else torch.zeros_like
    grads = sums, new(k), new(v)
    memory = DeviceMemory(q.device)
    bwd_inputs = BackwardInputs(dout, lse, dout, dlse)  # out is not read
    with torch.cuda.device_of(q):
        for launch in scattered_launches(request, bwd_inputs, grads, lines, multiprocessors(q.device), memory):
            launch()
    return sums[64:], *grads[1:]


@torch.library.register_fake("tilewise_sparse::scattered_backward", lib=_library)
def _scattered_backward_fake(rows: list[Tensor], lines: Any, cu_q: Any, cu_k: Any, count: int, *numbers: Any) -> Any:
    q, k, v, *_ = rows
    return q.new_empty((count, q.shape[2]), dtype=torch.float32), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.impl(_library, "add_sums", "CompositeExplicitAutograd")
def _add_sums(base: Tensor, sums: Tensor, scale: float) -> Tensor:
    """base + scale * sums of `scattered_backward`."""
    from ..backends.common import combine_parts

    with torch.cuda.device_of(base):
        return combine_parts.add_sums(base.contiguous(), sums, scale)


@torch.library.register_fake("tilewise_sparse::add_sums", lib=_library)
def _add_sums_fake(base: Tensor, sums: Tensor, scale: float) -> Tensor:
    return base.new_empty(base.shape)
