"""From tensors to launches of the Hopper forward: descriptors, the schedule's numbers, the compile-time plan."""

from functools import lru_cache, partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import LIMIT, Request, Spec, Upstream
from ...torch_private import current_stream
from .. import replay
from ..gpu import Gpu
from ..launch import INTERPRETED, Launch, multiprocessors, on
from ..portable.launch import (
    ahead,
    clear_launches,
    every_sink_launch,
    jvp,
    new_gradients,
    new_results,
    term_gradients,
)
from ..portable.launch import every_launch as portable_launches
from ..portable.launch import forward as portable_forward
from ..portable.launch import offline as portable_offline
from ..portable.repair import repair_forward_kernel
from ..shapes import Problem, by_group, padded, problem, view
from ..terms import device_terms, mask_mod, score_mod
from . import tiles
from .backward_launch import backward, backward_launches, copies, new_space, spread
from .careful import STEP, careful
from .descriptors import both, descriptor, full
from .forward import forward_kernel
from .forward_tiles import ROWS, Plan
from .limits import GPU, has_backward, is_uneven
from .pipeline import Cached, Held

__all__ = ["backward", "every_launch", "forward", "jvp", "offline", "term_gradients"]
L2_BYTES = 16 << 20  # of K and V that may be alive at once: a third of an H100's L2, through which Q and O pass too


PROCESSORS = 132  # of an H100 and an H200, where none is here to ask
NO_CACHE = Cached(*Held(), *[0] * 6)


class State(NamedTuple):
    """Zeros that a launch counts with and leaves at zero: the next piece of work; a flag and who has looked at it."""

    counter: Tensor
    flag: Tensor


def forward_launches(
    request: Request, out: Tensor, lse: Tensor, state: State, processors: int, **overrides: Any
) -> list[Launch]:
    """The forward, and the repair of what a matrix product cannot leave out where some rows do not see some keys."""
    request, out, lse = by_group(request, out, lse)
    q, k, v, spec = request[:4]
    cu_q, cu_k = request.cu_q, request.cu_k
    size, masked = problem(request), request.is_masked
    plan = plan_of(size, spec, request.bias is not None)._replace(**overrides)
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
            *(view(x) for x in (q, k, v, out)), lse, state.flag, cu_q, cu_k, size.n_q, size.n_k,
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
def plan_of(size: Problem, spec: Spec, biased: bool) -> Plan:
    worth_is_product = spec.score_mod is None and not biased
    plain = worth_is_product and spec.mask_mod is None
    row = tiles.forward_tile(size.d, size.dv, banded=is_uneven(spec), keys=size.n_k, plain=plain)
    return Plan(
        BLOCK_DV=padded(size.dv, 64), WIDTHS=tiles.widths(size.dv),
        BLOCK_N=row.block_n, GROUP=size.heads // size.kv_heads, WARPGROUPS=row.warpgroups, STAGES=row.stages,
        FOLD=spec.scale > 0 and worth_is_product,
        PARTS=row.parts, TURNS=row.turns, LAZY=row.lazy,
    )  # fmt: skip


def forward(request: Request, recordings: dict[Any, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse). `recordings` remembers the launches of calls that look alike."""
    q, k, cu_q = request.q, request.k, request.cu_q
    if k.numel() == 0:  # of which TMA wants some
        return portable_forward(request, recordings)
    out, lse = new_results(request)
    if out.numel():

        def build(*zeros: Tensor) -> list[Launch]:
            return [
                *forward_launches(request, out, lse, State(*zeros), multiprocessors(q.device)),
                *clear_launches(out, lse, None, cu_q, cu_q, GPU, -torch.inf),
            ]

        with on(q):
            following = partial(ahead, request, GPU, every_launch)
            replay.whole("forward", request.tensors(), (out, lse), build, recordings, following, state)
    return out, lse


def offline(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """The launches of a call by name, for a compiler: nothing runs, and the tensors may be meta."""
    q = request.q
    out, lse = new_results(request)
    launches = {"hopper forward": forward_launches(request, out, lse, new_state(q.device), PROCESSORS)[0]}
    if backward and has_backward(request):
        grads = new_gradients(request)
        space = new_space(q, problem(request))
        passes = backward_launches(request, Upstream(out, lse, out, None), grads, space, PROCESSORS)
        launches["hopper backward"] = passes[1]
    elif backward:
        launches |= {name: one for name, one in portable_offline(request, gpu, True).items() if name != "forward"}
    return launches


def every_launch(request: Request, gpu: Gpu, backward: bool) -> list[Launch]:
    """All launches of a call, as `offline` gives the main ones."""
    q = request.q
    out, lse = new_results(request)
    launches = [
        *forward_launches(request, out, lse, new_state(q.device), PROCESSORS),
        *clear_launches(out, lse, None, request.cu_q, request.cu_q, gpu, -torch.inf),
    ]
    if not backward:
        return launches
    if not has_backward(request):
        return launches + portable_launches(request, gpu, True)
    launches += every_sink_launch(request, out, lse, gpu)
    request = spread(request, copies(request, PROCESSORS))
    dq, dk, dv = new_gradients(request)
    upstream, space = Upstream(out, lse, out, None), new_space(q, problem(request))
    launches += backward_launches(request, upstream, (dq, dk, dv), space, PROCESSORS)
    return launches + clear_launches(dq, dk, dv, request.cu_q, request.cu_k, gpu)


def state(device: int) -> State:
    """Launches on one stream follow one another, so they share one; a captured launch may be replayed beside any other
    and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return new_state(torch.device("cuda", device))
    key = device, current_stream(device)
    if key not in _states:
        _states[key] = _kept(torch.device("cuda", device))
    return _states[key]


def _kept(device: torch.device) -> State:
    """Zeros that outlive the call. They are made by another thread, on its own stream: this one's memory may come from
    a pool that somebody counts (torch.compile's, before it captures a graph) or gives back."""
    made: list[State] = []

    def make() -> None:
        with torch.cuda.device(device):
            made.append(new_state(device))
            torch.cuda.current_stream().synchronize()

    thread = Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def new_state(device: torch.device) -> State:
    zeros = torch.zeros(8, dtype=torch.int32, device=device)
    return State(zeros, zeros[4:])


_states: dict[tuple[int, int], State] = {}
