"""The launches of the portable backward: row statistics, the gradients, and the NaN repair pass."""

import torch
from torch import Tensor

from ...request import BackwardInputs, Gpu, Request
from ..common.clear import clear_launches
from ..common.device.structs import KernelConfig
from ..common.kernel_call import call_shape, sequences_and_window, view
from ..common.kernel_config import costly_term, flag_count, is_even, launch_options, tile_of
from ..common.launch import Launch, Memory, Target, can_overlap, named, overlapped
from ..common.preprocess import preprocess_launch, row_statistics
from ..common.renormalise import renormalised
from ..common.repair import LINE, repair_backward_kernel
from ..common.repair_launches import WHOLE, repair
from ..common.score_terms import device_terms, folded, mask_mod
from .backward import key_kernel, query_kernel

FEW_ROWS = 32  # queries or keys that are repaired at a time
Grads = tuple[Tensor, Tensor, Tensor]


def named_launches(
    request: Request, bwd_inputs: BackwardInputs, grads: Grads, target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches by name, in order. Names in parentheses are of small kernels."""
    first, bwd_inputs = renormalised(request, bwd_inputs, target.gpu, memory)
    flags = flag_count(request, both=True)
    flag = memory.empty((flags,), torch.int32) if flags else None
    passes = backward_launches(request, bwd_inputs, grads, row_statistics(request, memory), flag, target.gpu)
    names = ("preprocess", "key", *["value"] * (len(passes) > 3), "query")
    cleared = clear_launches(*grads, request.cu_q, request.cu_k, target.gpu)
    return (
        named("(renormalise)", first)
        | dict(zip(names, passes, strict=True))
        | named("(backward repair)", backward_repairs(passes, target))
        | named("(backward clear)", cleared)
    )


def backward_launches(
    request: Request,
    bwd_inputs: BackwardInputs,
    grads: Grads,
    statistics: tuple[Tensor, Tensor],
    flags: Tensor | None,
    gpu: Gpu,
) -> list[Launch]:
    """The launches of the row statistics, of dK and dV (one kernel or two), and of dQ."""
    q, size = request.q, call_shape(request)
    dq, dk, dv = grads
    overlap = can_overlap(gpu)
    preprocess, saved = preprocess_launch(request, bwd_inputs, statistics, overlap)
    scoring, scale, rate = folded(request, gpu, derivative=True)
    scalars = *sequences_and_window(request), scale, rate
    program = scoring | {"MASK_MOD": mask_mod(request)} | overlapped(overlap)
    term = costly_term(request, gpu)
    tile = tile_of("query", q.element_size(), size, gpu, term)
    query = Launch(
        query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            saved._replace(dq=view(dq), flags=flags),
            *scalars,
            *size.grid(size.n_q, size.heads, tile.block_m),
            device_terms(request, gpu, tile.block),
        ),
        launch_options(request, tile, gpu, **program, EVEN=is_even(size, size.n_k, tile.block_n)),
    )
    tile = tile_of("key", q.element_size(), size, gpu, term)
    programs = size.programs(size.n_k, size.kv_heads, tile.block_n)
    even = is_even(size, size.n_q, tile.block_m)
    sums = [(True, False), (False, True)] if tile.apart else [(True, True)]
    starts = (_padded(query.programs) + n * _padded(programs) for n in range(len(sums)))
    keys = [
        Launch(
            key_kernel,
            programs,
            (
                saved._replace(dk=view(dk), dv=view(dv), flags=None if flags is None else flags[start:]),
                *scalars,
                *size.grid(size.n_k, size.kv_heads, tile.block_n),
                device_terms(request, gpu, tile.block, by_key=True),
            ),
            launch_options(request, tile, gpu, **program, EVEN=even, SUM_K=sum_k, SUM_V=sum_v),
        )
        for (sum_k, sum_v), start in zip(sums, starts, strict=True)
    ]
    return [preprocess, *keys, query]


def _padded(flags: int) -> int:
    """The flags of a kernel, rounded up to a multiple of LINE."""
    return int(-(-flags // LINE.value) * LINE.value)


def backward_repairs(passes: list[Launch], target: Target) -> list[Launch]:
    """The NaN repair pass of the launches of `backward_launches`, if they set flags."""
    _, key, *values, query = passes
    tensors, *scalars, q_tiles, heads, batch, q_terms = query.args
    of_keys, *_, k_tiles, kv_heads, _, k_terms = key.args
    if tensors.flags is None:
        return []
    totals = query.programs, key.programs
    counts = *totals, q_tiles, k_tiles, heads, kv_heads, batch
    args = tensors._replace(dk=of_keys.dk, dv=of_keys.dv), *scalars, *counts, q_terms, k_terms
    made = repair(repair_backward_kernel, max(totals), args, target, query, key)
    configs = {
        name: x.options["CONFIG"] for name, x in zip(("QUERY", "KEY", "VALUE"), (query, key, *values), strict=False)
    }
    options = {name: x for name, x in made.options.items() if name != "CONFIG"} | {"VALUE": None}
    options |= {"QUERIES": configs["QUERY"].BLOCK_M, "KEYS": configs["KEY"].BLOCK_N}
    return [made._replace(options=options | {name: _few_rows(name, config) for name, config in configs.items()})]


def _few_rows(name: str, config: KernelConfig) -> KernelConfig:
    """The same with at most FEW_ROWS rows: too few for the matrix instructions of a warpgroup (wgmma)."""
    side = "BLOCK_M" if name == "QUERY" else "BLOCK_N"
    return config._replace(PIECE=WHOLE, **{side: min(FEW_ROWS, getattr(config, side))})
