"""From tensors to the launches of the Hopper backward: statistics, the sums, dQ from its sums, repair."""

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import BackwardInputs, Request, Spec
from ..common.clear import clear_launches
from ..common.device.gradients import BackwardTensors
from ..common.device.structs import LOG2E, PAD, View
from ..common.kernel_call import KernelCall
from ..common.launch import INTERPRETED, Build, Built, Launch, Memory, Target, named, target_of
from ..common.renormalise import renormalised
from ..common.repair import repair_backward_kernel
from ..common.score_terms import device_terms, folded, is_far, mask_mod, slope_mod
from ..common.shapes import Problem, new_gradients, padded, problem, view
from .backward import backward_kernel
from .backward_tiles import Plan
from .backward_wide import backward_wide_kernel
from .descriptors import descriptor, full
from .gluon_compat import TensorDescriptor, gl
from .postprocess import finish_kernel, start_kernel
from .repair_config import STEP, careful
from .support import GPU, is_uneven
from .tiles import backward_tile

ROWS = 32  # of a tile that is repaired
L2_BYTES = 16 << 20  # of Q, dO and dQ that may be alive at once
COPY = 350  # queries that a program could see in the time it takes to copy its keys, to store and add its gradients
PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Space(NamedTuple):
    """What a call needs beside its arguments, and gives back, all in one memory: the row statistics (line of a head,
    padded token); and, zero once `start_kernel` has run, dQ in float32 in rows of 256 and counts: of the tickets drawn,
    in its place 16 a flag, and from 32 on a semaphore for each dQ tile."""

    lse2: Tensor
    delta: Tensor
    sums: Tensor
    counts: Tensor
    flag: Tensor
    semaphores: Tensor

    @property
    def tokens(self) -> int:
        return self.lse2.shape[1]


def new_space(memory: Memory, size: Problem) -> Space:
    sizes = space_sizes(size)
    lse2, delta, sums, counts = memory.empty((sum(sizes),), torch.float32).split(sizes)
    lines, counts = lines_of(size), counts.view(torch.int32)
    return Space(lse2.view(lines, -1), delta.view(lines, -1), sums.view(-1, 256), counts, counts[16:], counts[32:])


@cache
def space_sizes(size: Problem) -> list[int]:
    """Of the statistics, the sums and the counts."""
    rows = lines_of(size) * size.tiles(size.n_q, PAD.value) * PAD.value
    return [rows, rows, rows * block_dims(size)[0], rows // PAD.value * 4 + 64]


def lines_of(size: Problem) -> int:
    return size.heads * (1 if size.packed else size.batch)


def block_dims(size: Problem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V and dO: dV leaves through memory made for dQ; in the wide form each of
    two warpgroups has a multiple of 64 of them."""
    d, dv = max(padded(size.d, 64), padded(size.dv, 64)), padded(size.dv, 64)
    return d, max(dv, 128) if d > 128 else dv


def backward_launches(
    request: Request, bwd_inputs: BackwardInputs, grads: tuple[Tensor, Tensor, Tensor], space: Space, processors: int
) -> list[Launch]:
    request = request._replace(sinks=None)  # which are in lse
    q, k, v, spec = request[:4]
    out, lse, dout, dlse = bwd_inputs
    dq, dk, dv = grads
    size = problem(request)
    block_d, block_dv = block_dims(size)
    group = size.heads // size.kv_heads
    masked = request.is_masked
    flag = space.flag if masked else None
    with_terms = not request.is_plain
    score, unit, rate = folded(request, GPU, slope=True)
    if with_terms and not score["FOLD"]:  # then the scores have been multiplied
        unit = 1.0
    mask = {"MASK_MOD": mask_mod(request)}
    packing = request.cu_q, request.cu_k, size.n_q, size.n_k
    statistics = [View(x, (size.heads * space.tokens, space.tokens)) for x in (space.lse2, space.delta)]
    dims = {"D": size.d, "BLOCK_D": block_d}
    overlap = {"OVERLAP": not INTERPRETED, "launch_pdl": not INTERPRETED}

    pads = space.tokens // PAD.value
    prepare = Launch(
        start_kernel,
        size.programs(size.n_q, size.heads, PAD.value),
        (
            view(out), view(dout), lse, dlse,
            *statistics, space.sums, space.counts, *packing, pads, size.heads, size.batch,
        ),
        {
            "DV": size.dv, "BLOCK_M": PAD.value, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
            "NATURAL": is_far(request), "OVERLAP": not INTERPRETED, "num_warps": 8 if size.dv > 128 else 4,
        },
    )  # fmt: skip

    wide = block_d > 128
    row = backward_tile(block_d, plain=not with_terms)
    plan = Plan(
        block_d, block_dv, row.block_m, row.block_n, group, ORDERED=spec.deterministic,
        COPIED=row.copied or (spec.deterministic and not wide), TERMS=with_terms, FOLD=score["FOLD"],
        LATE=with_terms and block_d > 64,
    )  # fmt: skip
    tiles = size.tiles(size.n_k, plan.BLOCK_N)
    lines = size.kv_heads * (1 if size.packed else size.batch)
    cohort = max(1, L2_BYTES // (size.n_q * (size.d * 6 + size.dv * 2)) if is_uneven(spec) else 1)
    if spec.deterministic:  # so that few programs wait for one another's sums; a power of two, as the heads mostly are
        cohort = max(cohort, 1 << (processors // tiles).bit_length())
    rising = max(0, lines // cohort - 1) * cohort if spec.deterministic else 0
    sums = Launch(
        backward_wide_kernel if wide else backward_kernel,
        min(tiles * lines, processors),
        (
            descriptor(q, plan.BLOCK_M, block_d), descriptor(k, 64, block_d), descriptor(v, 64, block_dv),
            descriptor(dout, plan.BLOCK_M, block_dv),
            *(TensorDescriptor(x, x.shape, x.stride(), [1, plan.BLOCK_M], PLAIN) for x in (space.lse2, space.delta)),
            space.sums,
            TensorDescriptor(space.sums, space.sums.shape, (256, 1), [plan.BLOCK_M * block_d // 512, 256], PLAIN),
            # of gradients in float32 the descriptors are not used, and say no more than the shapes of tiles
            descriptor(k if spec.partial else dk, 64, block_d // 2 if wide else block_d),
            descriptor(v if spec.partial else dv, 64, block_dv // 2 if wide else block_dv),
            full(dk, spec), full(dv, spec), flag, space.semaphores, *packing,
            spec.before, spec.after, unit * LOG2E.value, rate, space.tokens, rising,
            space.counts, tiles * lines, lines, tiles, size.kv_heads, size.batch, cohort,
            device_terms(request, GPU, (plan.BLOCK_M, plan.BLOCK_N), by_key=True),
        ),
        mask | {"SCORE_MOD": score["SCORE_MOD"], "PLAN": plan, "num_warps": 4, "launch_pdl": not INTERPRETED},
    )  # fmt: skip

    finish = Launch(
        finish_kernel,
        2 * size.programs(size.n_q, size.heads, PAD.value),
        (space.sums, view(dq), flag, *packing, rate, space.tokens, pads, size.heads, size.batch),
        dims | overlap | {"num_warps": 8},
    )
    if not masked:
        return [prepare, sums, finish]

    plain = careful(size, ROWS, block_d, block_dv)
    q_total = size.programs(size.n_q, size.heads, ROWS)
    k_total = size.programs(size.n_k, size.kv_heads, ROWS)
    repair = Launch(
        repair_backward_kernel,
        min(max(q_total, k_total), processors),
        (
            BackwardTensors(
                view(q), view(k), view(v), view(dout), statistics[0], statistics[1], view(dq), view(dk), view(dv), flag
            ), *packing,
            spec.before, spec.after, spec.scale, spec.scale, q_total, k_total, size.tiles(size.n_q, ROWS),
            size.tiles(size.n_k, ROWS), size.heads, size.kv_heads, size.batch,
            device_terms(request, GPU, (ROWS, STEP)), device_terms(request, GPU, (STEP, ROWS), by_key=True),
        ),
        mask | {
            "SCORE_MOD": slope_mod(request, GPU), "EACH": False, "QUERIES": ROWS, "KEYS": ROWS, "QUERY": plain,
            "KEY": plain, "VALUE": None,
            "num_warps": 8, "launch_pdl": not INTERPRETED,
        },
    )  # fmt: skip
    return [prepare, sums, finish, repair]


def copies(request: Request, processors: int) -> int:
    """Into how many parts the query heads of a KV head are best divided, each with a copy of it. A program owns a tile
    of keys of a KV head: of few keys and KV heads there are fewer programs than processors, or, of a triangle, the
    longest are still at work when the others are done. Only where the gradients are float32: the parts are then added
    without a rounding in between."""
    spec, size = request.spec, problem(request)
    if not spec.partial or size.heads == size.kv_heads:
        return 1
    return _copies(size, spec.before, spec.after, request.is_plain, processors)


@cache
def _copies(size: Problem, before: int | None, after: int | None, plain: bool, processors: int) -> int:
    row = backward_tile(block_dims(size)[0], plain=plain)
    group = size.heads // size.kv_heads
    programs = size.programs(size.n_k, size.kv_heads, row.block_n)
    queries = -(-size.n_q // size.batch) if size.packed else size.n_q
    triangle = (before is None) != (after is None)
    if before is not None and after is not None:
        queries = min(queries, before + after + row.block_n)

    def time(n: int) -> float:
        """In queries that a program sees; estimated, not measured. Four more launches are worth three copies."""
        share = n * programs / processors
        rounds = max(1.0, (share + 1) / 2) if triangle else ceil(share)
        return rounds * queries * group / n + COPY * (3 + share) * (n > 1)

    return min((n for n in (1 << e for e in range(group.bit_length())) if group % n == 0), key=time)


def spread(request: Request, n: int) -> Request:
    """The same call with n copies of each KV head, one after the other."""
    if n == 1:
        return request
    k, v = (x.unsqueeze(-2).expand(*x.shape[:-1], n, -1).flatten(-3, -2) for x in request[1:3])
    return request._replace(k=k, v=v)


def backward(request: Request, bwd_inputs: BackwardInputs) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor]]:
    """A runner (see `backends.protocol`). Tensors: `request.tensors()`, out, lse, dout, dlse. Results: dq, dk, dv."""
    spec, device = request.spec, request.q.device
    n = copies(request, target_of(device).processors)
    if n == 1:
        return KernelCall(build_backward(spec), (*request.tensors(), *bwd_inputs), device)
    split = KernelCall(build_backward(spec), (*spread(request, n).tensors(), *bwd_inputs), device)

    def run(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        copied = spread(Request.of(spec, tensors[:-4]), n).tensors()
        dq, dk, dv = split((*copied, *tensors[-4:]))
        return dq, *(x.unflatten(-2, (-1, n)).sum(-2) for x in (dk, dv))

    return run


def build_backward(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`, out, lse, dout, dlse. Results: dq, dk, dv."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:])
        grads = new_gradients(request, memory)
        return Built(grads, list(named_launches(request, bwd_inputs, grads, target, memory).values()))

    return build


def named_launches(
    request: Request, bwd_inputs: BackwardInputs, grads: tuple[Tensor, Tensor, Tensor], target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches by name, in order. Names in parentheses are of small kernels."""
    first, bwd_inputs = renormalised(request, bwd_inputs, GPU, memory)
    space = new_space(memory, problem(request))
    passes = [*first, *backward_launches(request, bwd_inputs, grads, space, target.processors)]
    names = (*["(renormalise)"] * len(first), "(preprocess)", "hopper backward", "(postprocess)", "(backward repair)")
    cleared = clear_launches(*grads, request.cu_q, request.cu_k, GPU)
    return dict(zip(names, passes, strict=False)) | named("(backward clear)", cleared)
