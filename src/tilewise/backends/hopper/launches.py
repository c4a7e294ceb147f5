"""From a request to the launches of the Hopper forward: TMA descriptors, the tile schedule, the compile-time config."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import LIMIT, BackwardInputs, Request, Spec
from ..common.clear import clear_launches
from ..common.device.attend import Tensors
from ..common.gpu import Gpu
from ..common.launch import INTERPRETED, Build, Built, DeviceMemory, Launch, Memory, Target
from ..common.repair import repair_forward_kernel
from ..common.score_terms import device_terms, mask_mod, score_mod
from ..common.shapes import Problem, by_group, new_gradients, new_results, padded, problem, view
from ..common.sinks import named_sink_launches
from . import tiles
from .backward_launches import named_launches
from .descriptors import both, descriptor, full
from .forward import forward_kernel
from .forward_tiles import ROWS, Plan
from .pipeline import Cached, Held
from .repair_config import STEP, careful
from .support import GPU, is_uneven

L2_BYTES = 16 << 20  # of K and V that may be alive at once: a third of an H100's L2, through which Q and O pass too
OFFLINE_PROCESSORS = 132  # of an H100 and an H200, where no GPU is here to ask
NO_CACHE = Cached(*Held(), *[0] * 6)


class State(NamedTuple):
    """Zeros that the launches leave at zero: the tile scheduler's counter; the flag of the NaN repair pass, and the
    number of programs that have read it."""

    counter: Tensor
    flag: Tensor


def new_state(memory: Memory) -> State:
    zeros = memory.counters()
    return State(zeros, zeros[4:])


def build_forward(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`. Results: out, lse."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request = Request.of(spec, tensors)
        out, lse = new_results(request, memory)
        return Built((out, lse), all_forward_launches(request, out, lse, target, memory))

    return build


def all_forward_launches(request: Request, out: Tensor, lse: Tensor, target: Target, memory: Memory) -> list[Launch]:
    cleared = clear_launches(out, lse, None, request.cu_q, request.cu_q, GPU, -torch.inf)
    return [*forward_launches(request, out, lse, new_state(memory), target.processors), *cleared]


def offline_launches(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """All launches of a forward or backward by name. Nothing runs, and the tensors may be meta tensors."""
    target, memory = Target(gpu, OFFLINE_PROCESSORS), DeviceMemory(request.q.device)
    out, lse = new_results(request, memory)
    if backward:
        bwd_inputs = BackwardInputs(out, lse, out, None)
        found = named_launches(request, bwd_inputs, new_gradients(request, memory), target, memory)
        return found | named_sink_launches(request, bwd_inputs, target, memory)
    repaired, packed = request.is_masked, request.cu_q is not None
    names = ["hopper forward", *["(forward repair)"] * repaired, *["(forward clear)"] * packed]
    return dict(zip(names, all_forward_launches(request, out, lse, target, memory), strict=False))


def forward_launches(
    request: Request, out: Tensor, lse: Tensor, state: State, processors: int, **overrides: Any
) -> list[Launch]:
    """The forward, and the repair of what a matrix product cannot leave out where some rows do not see some keys."""
    request, out, lse = by_group(request, out, lse)
    q, k, v, spec = request[:4]
    cu_q, cu_k = request.cu_q, request.cu_k
    size, masked = problem(request), request.is_masked
    plan = config_of(size, spec, request.bias is not None)._replace(**overrides)
    keys = *both(k, plan.BLOCK_N), *both(v, plan.BLOCK_N)
    forward = forward_launch(request, keys, out, lse, state, processors, size, plan)
    if not masked:
        return [forward]
    block_m = 64
    total = size.programs(size.n_q, size.heads, block_m)
    repair = Launch(
        repair_forward_kernel,
        min(total, processors),
        (
            Tensors(view(q), view(k), view(v), view(out), lse, state.flag), cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, size.tiles(size.n_q, block_m), size.heads, size.batch, None,
            device_terms(request, GPU, (block_m, STEP)), total,
        ),
        {
            "SCORE_MOD": score_mod(request, GPU), "MASK_MOD": mask_mod(request),
            "PLAN": careful(size, block_m, padded(size.d, 64), padded(size.dv, 64)), "EACH": False, "num_warps": 4,
            "launch_pdl": not INTERPRETED,
        },
    )  # fmt: skip
    return [forward, repair]


def forward_launch(
    request: Request, keys: Any, out: Tensor, lse: Tensor, state: State, processors: int, size: Problem, plan: Plan,
    cache: Cached = NO_CACHE,
) -> Launch:  # fmt: skip
    """`keys`: the descriptors of K and V; of a `cache`, from which nothing is left out that the flag would tell of."""
    q, spec, cu_q, cu_k = request.q, request.spec, request.cu_q, request.cu_k
    tiles = size.tiles(size.n_q, ROWS.value * plan.WARPGROUPS)
    lines = size.heads * (1 if size.packed else size.batch)
    in_l2 = L2_BYTES // (size.n_k * (size.d + size.dv) * 2) if is_uneven(spec) else 1
    rows = ROWS.value
    terms = device_terms(request, GPU, (rows * plan.WARPGROUPS, plan.BLOCK_N))
    return Launch(
        forward_kernel,
        min(tiles * lines, processors),
        (
            *both(q, rows), *keys,
            # of results in float32 the descriptor is not used, and says no more than the dtype of the weights
            descriptor(q if spec.partial else out, rows, plan.BLOCK_DV // plan.PARTS), full(out, spec), lse,
            state.counter, state.flag if request.is_masked and cache.lengths is None else None, cu_q, cu_k,
            size.n_q, size.n_k, spec.before, spec.after, spec.scale, tiles * lines, lines, tiles, size.heads,
            size.batch, max(1, in_l2) * plan.GROUP, terms, Held(*cache[:4]), *cache[4:],
        ),
        {"SCORE_MOD": score_mod(request, GPU), "MASK_MOD": mask_mod(request), "PLAN": plan, "num_warps": 4},
    )  # fmt: skip


@lru_cache(LIMIT)
def config_of(size: Problem, spec: Spec, biased: bool) -> Plan:
    worth_is_product = spec.score_mod is None and not biased
    plain = worth_is_product and spec.mask_mod is None
    row = tiles.forward_tile(size.d, size.dv, banded=is_uneven(spec), keys=size.n_k, plain=plain)
    return Plan(
        BLOCK_DV=padded(size.dv, 64), WIDTHS=tiles.widths(size.dv),
        BLOCK_N=row.block_n, GROUP=size.heads // size.kv_heads, WARPGROUPS=row.warpgroups, STAGES=row.stages,
        FOLD=spec.scale > 0 and worth_is_product,
        PARTS=row.parts, TURNS=row.turns, LAZY=row.lazy,
    )  # fmt: skip
