"""From tensors to the launches of the Hopper backward: preprocess; dK, dV and the sums of dQ; postprocess."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import LIMIT, BackwardInputs, Request, padded
from ..common.clear import clear_launches
from ..common.device.gradients import BackwardTensors
from ..common.device.structs import LOG2E, PAD, Blocks, KernelConfig, View
from ..common.kernel_call import CallShape, call_shape, view
from ..common.launch import Launch, Memory, Target, in_order, named, overlaps, pdl_option
from ..common.renormalise import renormalised
from ..common.score_terms import device_terms, folded, has_large_scores, mask_mod, score_mod_with_derivative
from .backward import backward_kernel
from .backward_common import BackwardConfig
from .backward_rows import COLUMNS, OTHER, OWN, RowsConfig, backward_rows_kernel
from .backward_schedule import Split, Widths, choose_split, column_widths, padded_widths, tile_schedule
from .gluon_compat import TensorDescriptor, gl
from .launches import descriptor, global_tensor, part_descriptors
from .mask_words import new_words, with_words, without_mask_mod, words_launches
from .postprocess import PostprocessConfig, PostprocessTensors, postprocess_kernel
from .preprocess import PreprocessConfig, PreprocessTensors, preprocess_kernel
from .support import GPU, backward_tile

REPAIR_ROWS = 16  # few registers: the postprocess has many programs on an SM
PREPROCESS_ROWS = 64
STEP = 16  # rows of the other side that a repair takes at a time
UNSWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Workspace(NamedTuple):
    """The memory that a call needs beside its arguments, in one allocation: the row statistics (batch and head, padded
    token); zeroed by `preprocess_kernel`, dQ in float32 in rows of 256 and counters: that of the tile scheduler, the
    flag of the NaN repair at 16, and from 32 on a semaphore for each tile of dQ; and with a `split` the parts of dK and
    dV (see `backward_common.Parts`). Tiles have `widths` columns."""

    widths: Widths
    lse2: Tensor
    delta: Tensor
    dq_acc: Tensor
    counters: Tensor
    flag: Tensor
    semaphores: Tensor
    split: Split | None
    dk_parts: Tensor | None
    dv_parts: Tensor | None
    dq_lines: Tensor | None = None  # see `backward_common.Outputs`; dq_acc is then a result, and is not zeroed here

    @property
    def padded_tokens(self) -> int:
        return self.lse2.shape[1]


def new_workspace(
    memory: Memory, size: CallShape, split: Split | None, widths: Widths | None = None, has_dq: bool = True
) -> Workspace:
    """`widths`: by default `column_widths`."""
    widths = widths or column_widths(size)
    sizes = workspace_sizes(size, widths, 0 if split is None else split.parts, has_dq)
    lse2, delta, dq_acc, counters, dk, dv = memory.empty((sum(sizes),), torch.float32).split(sizes)
    rows, counters = statistics_rows(size), counters.view(torch.int32)
    statistics = lse2.view(rows, -1), delta.view(rows, -1)
    parts = (None, None, None) if split is None else (split, dk, dv)
    return Workspace(
        widths, *statistics, dq_acc.view(dq_acc.numel() // 256, 256), counters, counters[16:], counters[32:], *parts
    )


@lru_cache(LIMIT)
def workspace_sizes(size: CallShape, widths: Widths, parts: int, has_dq: bool = True) -> tuple[int, ...]:
    """Float32 numbers of lse2, delta, dq_acc, the counters, and the parts of dK and dV."""
    d, dv = widths.columns
    tokens = statistics_rows(size) * size.tiles(size.n_q, PAD.value) * PAD.value
    keys = parts * size.programs(size.n_k, size.kv_heads, PAD.value) * PAD.value
    return tokens, tokens, tokens * d if has_dq else 0, tokens // PAD.value * 4 + 64, keys * d, keys * dv


def statistics_rows(size: CallShape) -> int:
    return size.heads * (1 if size.packed else size.batch)


class BackwardCall(NamedTuple):
    """A backward call: the request (without sinks, which lse contains), out, lse and their gradients, the results, the
    workspace, and the bits of a block mask or None."""

    request: Request
    bwd_inputs: BackwardInputs
    grads: tuple[Tensor, Tensor, Tensor]
    space: Workspace
    size: CallShape
    mask_words: Tensor | None = None
    lines: Tensor | None = None  # if dQ is scattered, the line of each query

    @property
    def lengths(self) -> tuple[Any, ...]:
        return self.request.cu_q, self.request.cu_k, self.size.n_q, self.size.n_k

    @property
    def flag(self) -> Tensor | None:
        """None where every row sees every key, and nothing is repaired."""
        return self.space.flag if self.request.is_masked else None

    @property
    def statistics(self) -> tuple[View, View]:
        """lse2 and delta."""
        tokens = self.space.padded_tokens
        strides = self.size.heads * tokens, tokens
        return View(self.space.lse2, strides), View(self.space.delta, strides)


def backward_launches(
    request: Request,
    bwd_inputs: BackwardInputs,
    grads: tuple[Tensor, Tensor, Tensor],
    space: Workspace,
    num_sms: int,
    mask_words: Tensor | None = None,
) -> dict[str, Launch]:
    """Preprocess, backward and postprocess, by name. Above head dim 256 the postprocess is only the NaN repair."""
    call = BackwardCall(request._replace(sinks=None), bwd_inputs, grads, space, call_shape(request), mask_words)
    score, score_scale, scale = folded(call.request, GPU, derivative=True)
    found = {"(preprocess)": preprocess_launch(call)}
    if space.widths.d:
        found["hopper backward"] = main_launch(call, score, score_scale, scale, num_sms)
        found["(postprocess)"] = postprocess_launch(call, scale)
        return found
    dq, dk, dv = rows_launches(call, score_scale, scale)
    found |= {"hopper dq": dq, "hopper dk": dk, "hopper dv": dv}
    if call.request.is_masked:
        found["(backward repair)"] = postprocess_launch(call, scale)
    return found


def preprocess_launch(call: BackwardCall) -> Launch:
    size, space = call.size, call.space
    out, lse, dout, dlse = call.bwd_inputs
    d, block_dv = space.widths.d, padded(size.dv, 64)
    tiles = space.padded_tokens // PAD.value
    lines, rows, sums = call.lines, (view(out), view(dout)), space.dq_acc
    tensors = PreprocessTensors(*rows, lse, dlse, *call.statistics, sums, space.counters, lines, space.dq_lines)
    if lines is not None:
        tensors = tensors._replace(o=View(None, ()), do=View(None, ()), dq_acc=None)
    natural = has_large_scores(call.request)
    config = PreprocessConfig(size.dv, PREPROCESS_ROWS, d, sum(d), block_dv, natural, overlaps())
    args = tensors, *call.lengths, tiles, size.heads, size.batch
    options = {"CONFIG": config, "num_warps": 8 if size.dv > 128 else 4, **pdl_option(overlaps())}
    programs = size.programs(size.n_q, size.heads, PAD.value) * (PAD.value // PREPROCESS_ROWS)
    return Launch(preprocess_kernel, programs, args, options)


def backward_config(request: Request, space: Workspace, fold_scale: bool, has_words: bool = False) -> BackwardConfig:
    """`has_words`: the mask mod is evaluated ahead, as words."""
    d, dv = space.widths
    request = without_mask_mod(request) if has_words else request
    plain, deterministic = request.is_plain, request.spec.deterministic
    has_terms = not request._replace(seed=None).is_plain
    tile = backward_tile(sum(d), sum(dv), plain=plain, deterministic=deterministic)
    wide = tile.block_n == 64
    return BackwardConfig(
        d,
        dv,
        dq_pieces(d, by_rows=tile.block_m == 128, wide=wide),
        tile.block_m,
        tile.block_n,
        GROUP=request.q.shape[-2] // request.k.shape[-2],
        DETERMINISTIC=deterministic,
        DQ_BY_TMA=(tile.dq_by_tma and space.dq_lines is None) or (deterministic and not wide),
        HAS_TERMS=has_terms,
        FOLD_SCALE=fold_scale,
        SCORES_FIRST=(has_terms or has_words) and sum(d) > 64,
        TWO_PASSES=sum(d) > 128 and not wide,
        V_IN_REGISTERS=len(d) == 2 and sum(d) < 128 and plain and not has_words,  # 172 bytes would spill
        WIDE=wide,
        SPLIT=space.split is not None,
    )


def dq_pieces(
    parts: tuple[int, ...], *, by_rows: bool = False, wide: bool = False
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """See BackwardConfig.DQ_PIECES. A product of few columns reads as much of dS as one of many, so of two parts each
    warpgroup takes one. In the wide kernel it takes half of each, at most 64 columns at a time, whose registers there
    are.

    >>> dq_pieces((64, 32)), dq_pieces((128,))
    ((((0, 0, 64),), ((1, 0, 32),)), (((0, 0, 64),), ((0, 64, 64),)))
    >>> dq_pieces((128, 64), wide=True)
    (((0, 0, 64), (1, 0, 32)), ((0, 64, 64), (1, 32, 32)))
    """
    if by_rows:
        return tuple(((0, 0, parts[0]),) for _ in range(2))
    if len(parts) == 2 and not wide:
        return tuple(((i, 0, width),) for i, width in enumerate(parts))
    halves = [
        [
            (i, wg * width // 2 + c, min(width // 2, 64))
            for i, width in enumerate(parts)
            for c in range(0, width // 2, 64)
        ]
        for wg in range(2)
    ]
    return tuple(map(tuple, halves))


def main_launch(call: BackwardCall, score: dict[str, Any], score_scale: float, scale: float, num_sms: int) -> Launch:
    """`score`, `score_scale`, `scale`: as `folded` returns them."""
    request, bwd_inputs, (_, dk, dv), space, size, mask_words, _ = call
    q, k, v, spec = request[:4]
    split = space.split or Split()
    config = backward_config(request, space, score["FOLD"], mask_words is not None)
    if config.HAS_TERMS and not config.FOLD_SCALE:
        score_scale = 1.0  # the scores have been multiplied
    schedule = tile_schedule(size, spec, split.parts, config.BLOCK_N, num_sms)
    num_tiles = schedule.tiles_per_row * schedule.rows
    shares = 2 if config.WIDE else 1  # each warpgroup stores its columns of dK and dV
    statistics = (
        TensorDescriptor(x, x.shape, x.stride(), [1, config.BLOCK_M], UNSWIZZLED) for x in (space.lse2, space.delta)
    )
    dq_box = [min(columns for pieces in config.DQ_PIECES for _, _, columns in pieces) // 4, 256]
    terms = device_terms(request, GPU, (config.BLOCK_M, config.BLOCK_N), by_key=True)
    if mask_words is not None:
        terms = with_words(terms, request, mask_words)
    operands = {
        "q": part_descriptors(q, config.BLOCK_M, config.D),
        "k": part_descriptors(k, 64, config.D),
        "v": part_descriptors(v, 64, config.DV),
        "do": part_descriptors(bwd_inputs.dout, config.BLOCK_M, config.DV),
        # of a split, only the box shapes of these two are used
        "dk": part_descriptors(k if config.SPLIT else dk, 64, tuple(x // shares for x in config.D)),
        "dv": part_descriptors(v if config.SPLIT else dv, 64, tuple(x // shares for x in config.DV)),
    }
    query_lists = Blocks()
    if config.DETERMINISTIC:
        query_lists = device_terms(request, GPU, (config.BLOCK_M, config.BLOCK_N)).blocks
    args = in_order(
        backward_kernel,
        **{name: first for name, (first, _) in operands.items()},
        **{f"{name}_rest": rest for name, (_, rest) in operands.items()},
        **dict(zip(("lse2", "delta"), statistics, strict=True)),
        dq_acc=space.dq_acc,
        dq_acc_desc=TensorDescriptor(space.dq_acc, space.dq_acc.shape, (256, 1), dq_box, UNSWIZZLED),
        dq_lines=space.dq_lines,
        dk_parts=space.dk_parts,
        dv_parts=space.dv_parts,
        flag=call.flag,
        semaphores=space.semaphores,
        **dict(zip(("cu_q", "cu_k", "n_q", "n_k"), call.lengths, strict=True)),
        before=spec.before,
        after=spec.after,
        scale_log2=score_scale * LOG2E.value,
        scale=scale,
        padded_tokens=space.padded_tokens,
        ascending_rows=schedule.ascending_rows,
        group=config.GROUP // split.heads,
        query_shift=split.queries.bit_length() - 1,
        query_step=split.queries * config.BLOCK_M,
        padded_keys=size.tiles(size.n_k, PAD.value) * PAD.value,
        counter=space.counters,
        num_tiles=num_tiles,
        rows=schedule.rows,
        tiles_per_row=schedule.tiles_per_row,
        heads=size.kv_heads * split.parts,
        batch=size.batch,
        rows_in_l2=schedule.groups.size,
        grouped_rows=None if config.DETERMINISTIC else schedule.groups.grouped,
        terms=terms,
        query_lists=query_lists,
    )
    mod = mask_mod(request) if mask_words is None else None
    options = {"MASK_MOD": mod, "SCORE_MOD": score["SCORE_MOD"], "CONFIG": config}
    options |= {"num_warps": 4, **pdl_option(overlaps())}
    return Launch(backward_kernel, min(num_tiles, num_sms), args, options)


def rows_launches(call: BackwardCall, score_scale: float, scale: float) -> list[Launch]:
    """dQ, dK and dV of head dims above 256; see `backward_rows`."""
    request, bwd_inputs, grads, space, size, *_ = call
    q, k, v, spec = request[:4]
    columns, group = COLUMNS.value, size.heads // size.kv_heads
    launches = []
    for out, own, other, factor in (
        (grads[0], (q, bwd_inputs.dout), (k, v), scale),
        (grads[1], (k, v), (q, bwd_inputs.dout), scale),
        (grads[2], (k, v), (q, bwd_inputs.dout), 1.0),
    ):
        by_key, has_dp = own[0] is k, out is not grads[2]
        config = RowsConfig(by_key, has_dp, group, STAGES=1 if has_dp else 2)
        sides = (1, 0, 3, 2) if by_key else (0, 1, 2, 3)
        rows, heads = (size.n_k, size.kv_heads) if by_key else (size.n_q, size.heads)
        args = (
            *(descriptor(x, OWN.value, columns) for x in own),
            *(descriptor(x, OTHER.value, columns) for x in other),
            *(global_tensor(out), space.lse2, space.delta, call.flag, *(call.lengths[i] for i in sides)),
            *((spec.after, spec.before) if by_key else (spec.before, spec.after)),
            *(score_scale * LOG2E.value, factor, space.padded_tokens, *size.grid(rows, heads, OWN.value)),
        )
        programs = size.programs(rows, heads, OWN.value)
        launches.append(Launch(backward_rows_kernel, programs, args, {"CONFIG": config, "num_warps": 4}))
    return launches


def postprocess_launch(call: BackwardCall, scale: float) -> Launch:
    request, bwd_inputs, grads, space, size, *_ = call
    spec, pad, rows = request.spec, PAD.value, REPAIR_ROWS
    dq, dk, dv = (view(x) for x in grads)
    dq_acc = space.dq_acc if space.widths.d else None
    tensors = PostprocessTensors(dq_acc, space.dk_parts, space.dv_parts, dq, dk, dv, call.flag)
    q_total, parts = 2 * size.programs(size.n_q, size.heads, pad), 0 if space.split is None else space.split.parts
    k_total = 2 * size.programs(size.n_k, size.kv_heads, pad)
    repair, repair_config = None, None
    terms: tuple[Any, Any] = (), ()
    mods: tuple[Any, Any] = None, None
    widest = max(padded_widths(size).columns)
    if request.is_masked:
        q, k, v, dout = (view(x) for x in (*request[:3], bwd_inputs.dout))
        repair = BackwardTensors(q, k, v, dout, *call.statistics, dq, dk, dv)
        terms = device_terms(request, GPU, (rows, STEP)), device_terms(request, GPU, (STEP, rows), by_key=True)
        mods = score_mod_with_derivative(request, GPU), mask_mod(request)
        repair_config = new_repair_config(size, *padded_widths(size).columns)
    args = (
        *(tensors, repair, *call.lengths, spec.before, spec.after, spec.scale, scale),
        *(size.tiles(size.n_q, pad), size.tiles(size.n_k, pad), size.heads, size.kv_heads, size.batch),
        *(q_total, k_total, parts, *terms),
    )
    config = PostprocessConfig(size.d, size.dv, *space.widths, *space.widths.columns, overlaps())
    options: dict[str, Any] = {"SCORE_MOD": mods[0], "MASK_MOD": mods[1], "REPAIR": repair_config, "CONFIG": config}
    # 128 KB of sums in flight on an SM, with as few registers as without the repair: only that spills
    warps = 4 if widest <= 128 and not parts else 8
    registers = 64 if widest <= 16 * warps else 128 if widest <= 256 else 255
    options |= {"num_warps": warps, "maxnreg": registers, **pdl_option(overlaps())}
    return Launch(postprocess_kernel, q_total + (k_total if parts else 0), args, options)


def new_repair_config(size: CallShape, block_d: int, block_dv: int) -> KernelConfig:
    """With which the postprocess kernel computes NaN gradients again, by the portable device functions."""
    return KernelConfig(
        GROUP=size.heads // size.kv_heads,
        D=size.d,
        DV=size.dv,
        BLOCK_M=REPAIR_ROWS,
        BLOCK_N=REPAIR_ROWS,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        FOLD=False,
        PRECISION="ieee",
        CHUNK=512,
        PACKED=size.packed,
        OVERLAP=overlaps(),
    )


def scattered_launches(
    request: Request,
    bwd_inputs: BackwardInputs,
    grads: tuple[Tensor, Tensor, Tensor],
    lines: Tensor,
    num_sms: int,
    memory: Memory,
) -> list[Launch]:
    """The backward of packed sequences whose queries are copies of rows: head h of query i adds its dq, divided by the
    scale, to row 64 + lines[i] * heads + h of grads[0], float32 zeros whose columns are `in_fours`. -dlse is all of
    delta. Head dims 64 and 128 alone, without terms."""
    size = call_shape(request)
    space = new_workspace(memory, size, None, has_dq=False)
    padded_lines = memory.empty(space.lse2.shape, torch.int32)
    space = space._replace(dq_acc=grads[0].view(-1, 256), dq_lines=padded_lines)
    call = BackwardCall(request, bwd_inputs, grads, space, size, lines=lines)
    score, score_scale, scale = folded(request, GPU, derivative=True)
    return [preprocess_launch(call), main_launch(call, score, score_scale, scale, num_sms)]


def named_launches(
    request: Request, bwd_inputs: BackwardInputs, grads: tuple[Tensor, Tensor, Tensor], target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches by name, in order. Names in parentheses are of small kernels."""
    first: list[Launch] = []
    if not request.is_plain:
        first, bwd_inputs = renormalised(request, bwd_inputs, GPU, memory)
    space = new_workspace(memory, call_shape(request), choose_split(request, target.num_sms))
    found, words = named("(renormalise)", first), None
    if request.blocks:
        words = new_words(request, memory, by_key=True)
        found |= named("(backward mask)", words_launches(request, words, by_key=True))
    found |= backward_launches(request, bwd_inputs, grads, space, target.num_sms, words)
    if request.cu_q is not None:
        found |= named("(backward clear)", clear_launches(*grads, request.cu_q, request.cu_k, GPU))
    return found
