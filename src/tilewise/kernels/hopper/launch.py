"""From tensors to launches of the Hopper forward: descriptors, the schedule's numbers, the compile-time plan."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ... import config
from ...spec import LIMIT, NO_TERMS, Spec, Terms
from .. import replay
from ..portable.launch import (
    INTERPRETED,
    Launch,
    Problem,
    by_group,
    clear_launches,
    device_terms,
    mask_mod,
    multiprocessors,
    on,
    problem,
    row_view,
    score_mod,
    view,
)
from ..repair import repair_forward_kernel
from ..tile import Plan as PortablePlan
from .compat import TensorDescriptor, gl
from .forward import ROWS, Plan, forward_kernel
from .pipeline import FAR

L2_BYTES = 16 << 20  # of K and V that may be alive at once: a third of an H100's L2, through which Q and O pass too


class State(NamedTuple):
    """Zeros that a launch counts with and leaves at zero: the next piece of work; a flag and who has looked at it."""

    counter: Tensor
    flag: Tensor


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    spec: Spec, state: State, processors: int, terms: Terms = NO_TERMS, **overrides: Any,
) -> list[Launch]:  # fmt: skip
    """The forward, and the repair of what a matrix product cannot leave out where some rows do not see some keys."""
    q, out, lse, spec = by_group(q, out, lse, cu_q, k.shape[-2], spec, terms)
    size = problem(q, k, v, cu_q)
    masked = any(x is not None for x in (spec.before, spec.after, spec.mask_mod))
    plan = plan_of(size, spec, terms.bias is not None)._replace(**overrides)
    on_device = device_terms(spec, terms, size)
    mods = {"SCORE_MOD": score_mod(spec, q), "MASK_MOD": mask_mod(spec)}
    tiles = size.tiles(size.n_q, ROWS.value * plan.WARPGROUPS)
    lines = size.heads * (1 if size.packed else size.batch)
    in_l2 = L2_BYTES // (size.n_k * (size.d + size.dv) * 2) if spec.after is not None else 1
    rows = ROWS.value
    forward = Launch(
        forward_kernel,
        min(tiles * lines, processors),
        (
            *both(q, rows), *both(k, plan.BLOCK_N), *both(v, plan.BLOCK_N),
            descriptor(out, rows, plan.BLOCK_DV // plan.PARTS), row_view(lse),
            state.counter, state.flag if masked else None, cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, tiles * lines, lines, tiles, size.heads, size.batch,
            max(1, in_l2) * plan.GROUP, on_device,
        ),
        mods | {"PLAN": plan, "num_warps": 4},
    )  # fmt: skip
    if not masked:
        return [forward]
    block_m = 64
    total = size.programs(size.n_q, size.heads, block_m)
    repair = Launch(
        repair_forward_kernel,
        min(total, processors),
        (
            *(view(x) for x in (q, k, v, out)), row_view(lse), state.flag, cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, size.tiles(size.n_q, block_m), size.heads, size.batch, None,
            on_device, total,
        ),
        mods | {
            "PLAN": careful(size, block_m, padded(size.d), padded(size.dv)), "EACH": False, "num_warps": 4,
            "launch_pdl": not INTERPRETED,
        },
    )  # fmt: skip
    return [forward, repair]


def careful(size: Problem, rows: int, block_d: int, block_dv: int) -> PortablePlan:
    """Of a repair, by tiles of so many rows."""
    return PortablePlan(
        GROUP=size.heads // size.kv_heads, D=size.d, DV=size.dv, BLOCK_M=rows, BLOCK_N=rows, BLOCK_D=block_d,
        BLOCK_DV=block_dv, FOLD=False, PRECISION="ieee", CHUNK=512, PACKED=size.packed, OVERLAP=not INTERPRETED,
    )  # fmt: skip


@lru_cache(LIMIT)
def plan_of(size: Problem, spec: Spec, biased: bool) -> Plan:
    worth_is_product = spec.score_mod is None and not biased
    plain = worth_is_product and spec.mask_mod is None
    row = config.hopper_tile(size.d, size.dv, banded=spec.after is not None, keys=size.n_k, plain=plain)
    return Plan(
        BLOCK_DV=padded(size.dv), WIDTHS=config.widths(size.dv),
        BLOCK_N=row.block_n, GROUP=size.heads // size.kv_heads, WARPGROUPS=row.warpgroups, STAGES=row.stages,
        FOLD=spec.scale > 0 and worth_is_product,
        PARTS=row.parts, TURNS=row.turns, LAZY=row.lazy,
    )  # fmt: skip


def padded(d: int) -> int:
    return max(64, triton.next_power_of_2(d))


def both(x: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The descriptors of one or two parts of the columns."""
    first, *rest = (descriptor(x, rows, width) for width in config.widths(x.shape[-1]))
    return first, rest[0] if rest else None


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """What TMA needs to know of a (batch, token, head, dim) or packed (token, head, dim) tensor; see pipeline.at."""
    *batch, token, head, one = x.stride()
    if x.dim() == 4:
        b, t, h, d = x.shape
        shape, strides, box = [b, h, t, d], [*batch, head, token, one], (1, 1, rows, width)
    else:
        far = FAR.value
        shape = [2 * far - 1, 2 * far - 1, x.shape[1], far, x.shape[2]]
        strides, box = [2**34 - token, token, head, token, one], (1, 1, 1, rows, width)
    return TensorDescriptor(x, shape, strides, list(box), layout(box, x.dtype))


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
    launches: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse). `launches` remembers those of calls that look alike to the kernels."""
    *outer, n_q, heads, d = q.shape
    dv = v.shape[-1]
    if d == dv:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        out = q.new_empty((*outer, n_q, heads, dv))
    lse = torch.empty((*outer, heads, n_q), dtype=torch.float32, device=q.device)
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel():
        with on(q):
            zeros = state(q.get_device())

            def build() -> list[Launch]:
                return [
                    *forward_launches(q, k, v, out, lse, cu_q, cu_k, spec, zeros, multiprocessors(q.device), terms),
                    *clear_launches(out, lse, None, cu_q, cu_q, -torch.inf),
                ]

            replay.launch("hopper", (q, k, v, cu_q, cu_k, *terms.tensors(), out, lse, *zeros), build, launches)
    return out, lse


def state(device: int) -> State:
    """Launches on one stream follow one another, so they share one; a captured launch may be replayed beside any other
    and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return new_state(torch.device("cuda", device))
    key = device, torch._C._cuda_getCurrentRawStream(device)
    if key not in _states:
        _states[key] = new_state(torch.device("cuda", device))
    return _states[key]


def new_state(device: torch.device) -> State:
    zeros = torch.zeros(8, dtype=torch.int32, device=device)
    return State(zeros, zeros[4:])


_states: dict[tuple[int, int], State] = {}
