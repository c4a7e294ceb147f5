"""From tensors to launches of the Hopper forward: descriptors, the schedule's numbers, the compile-time plan."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ... import config
from ...spec import Spec
from .. import replay
from ..launch import Launch, Problem, problem
from ..launch import _row_view as row_view
from ..launch import _view as view
from .compat import TensorDescriptor, gl
from .forward import ROWS, Plan, forward_kernel
from .pipeline import FAR
from .repair import repair_kernel

L2_BYTES = 16 << 20  # of K and V that may be alive at once: a third of an H100's L2, through which Q and O pass too


class State(NamedTuple):
    """Zeros that a launch counts with and leaves at zero: the next piece of work; a flag and who has looked at it."""

    counter: Tensor
    flag: Tensor


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    spec: Spec, state: State, processors: int, **overrides: Any,
) -> list[Launch]:  # fmt: skip
    """The forward, and the repair of what a matrix product cannot leave out where some rows do not see some keys."""
    size = problem(q, k, v, cu_q)
    banded = spec.before is not None or spec.after is not None
    plan = plan_of(size, spec)._replace(**overrides)
    tiles = size.tiles(size.n_q, ROWS.value * plan.WARPGROUPS)
    lines = size.heads * (1 if size.packed else size.batch)
    in_l2 = L2_BYTES // (size.n_k * (size.d + size.dv) * 2) if spec.after is not None else 1
    boxes = (ROWS.value, plan.BLOCK_D), (plan.BLOCK_N, plan.BLOCK_D), (plan.BLOCK_N, plan.BLOCK_DV), (64, plan.BLOCK_DV)
    forward = Launch(
        forward_kernel,
        min(tiles * lines, processors),
        (
            *(descriptor(x, *box) for x, box in zip((q, k, v, out), boxes, strict=True)), row_view(lse),
            state.counter, state.flag if banded else None, cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, tiles * lines, lines, tiles, size.heads, size.batch,
            max(1, in_l2) * plan.GROUP,
        ),
        {"PLAN": plan, "num_warps": 4},
    )  # fmt: skip
    if not banded:
        return [forward]
    return [forward, repair_launch(q, k, v, out, lse, cu_q, cu_k, spec, state, size, processors)]


def repair_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    spec: Spec, state: State, size: Problem, processors: int,
) -> Launch:  # fmt: skip
    block_m = 64
    total = size.programs(size.n_q, size.heads, block_m)
    return Launch(
        repair_kernel,
        min(total, processors),
        (
            *(view(x) for x in (q, k, v, out)), row_view(lse), state.flag, cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, total, size.tiles(size.n_q, block_m), size.heads, size.batch,
        ),
        {
            "GROUP": size.heads // size.kv_heads, "D": size.d, "DV": size.dv, "BLOCK_D": padded(size.d),
            "BLOCK_DV": padded(size.dv), "BLOCK_M": block_m, "BLOCK_N": 16, "num_warps": 4,
        },
    )  # fmt: skip


@cache
def plan_of(size: Problem, spec: Spec) -> Plan:
    d, dv = padded(size.d), padded(size.dv)
    row = config.hopper_tile(max(d, dv), banded=spec.after is not None, keys=size.n_k)
    return Plan(
        D=size.d, DV=size.dv, BLOCK_D=d, BLOCK_DV=dv, TAIL=tail(size.d, d), BLOCK_N=row.block_n,
        GROUP=size.heads // size.kv_heads, WARPGROUPS=row.warpgroups, STAGES=2, FOLD=spec.scale > 0,
        SHARE=d == dv == 256, TURNS=row.turns,
    )  # fmt: skip


def padded(d: int) -> int:
    return max(64, triton.next_power_of_2(d))


def tail(d: int, block: int) -> int:
    """Of the second half of `block` columns, the power of two that holds what there is of d: 64 of 128 for d = 192."""
    return min(max(16, triton.next_power_of_2(d - block // 2)), block // 2)


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
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, _terms: Any = None
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel():
        with torch.cuda.device(q.device):
            zeros = state(q.device)

            def build() -> list[Launch]:
                return forward_launches(q, k, v, out, lse, cu_q, cu_k, spec, zeros, sms(q.device))

            inputs = q, k, v, cu_q, cu_k
            if replay.shares(inputs):
                for launch in build():
                    launch()
            else:
                key = "hopper", q.get_device(), spec, *replay.signature(*inputs)
                replay.launch(key, (*inputs, out, lse, *zeros), build)
    return out, lse


def state(device: torch.device) -> State:
    """Launches on one stream follow one another, so they share one; a captured launch may be replayed beside any other
    and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return new_state(device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _states:
        _states[key] = new_state(device)
    return _states[key]


def new_state(device: torch.device) -> State:
    zeros = torch.zeros(8, dtype=torch.int32, device=device)
    return State(zeros, zeros[4:])


_states: dict[tuple[torch.device, int], State] = {}


@cache
def sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
