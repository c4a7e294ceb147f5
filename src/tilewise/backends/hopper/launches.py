"""From a request to the launches of the Hopper forward: TMA descriptors, the tile schedule, the compile-time config."""

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...request import LIMIT, Request, Spec, padded
from ..common.clear import clear_launches, clear_max_logit
from ..common.device.fp8 import Fp8Scales
from ..common.device.structs import Terms
from ..common.fp8_format import KEY_BLOCK
from ..common.kernel_call import CallShape, by_group, call_shape, new_max_logit, new_results, view
from ..common.launch import COUNTERS, Build, Built, Launch, Memory, Target, in_order, named, overlaps, pdl_option
from ..common.score_terms import device_terms, mask_mod, score_mod
from .forward import ROWS, ForwardConfig, RepairPointers, forward_kernel
from .gluon_compat import TensorDescriptor, gl
from .mask_words import new_words, with_words, words_launches
from .pipeline import TMA_EXTENT, CachePointers, GlobalTensor, KvCache
from .support import GPU, forward_tile, is_uneven, rows_together, widths, window_size
from .tile_table import FP8_FORWARD, MAX_WHOLE_ROWS

L2_BYTES = 16 << 20  # of K and V that may be in use at once: a third of an H100's L2, through which Q and O pass too
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
REGISTERS = 65536  # of an SM
NO_CACHE = KvCache(*CachePointers(), *[0] * 6)
FIRST_FLAG = 8  # of the zeros of a call: the tile scheduler's counter comes before, in a 32-byte sector of its own


class State(NamedTuple):
    """Zeros that the launches leave at zero: the tile scheduler's counter; the flags of the NaN repair. And memory for
    the repair's lists of tiles, a number for each tile, or None without a repair; and for the bits of a block mask, or
    None."""

    counter: Tensor
    flags: Tensor
    tiles: Tensor | None = None
    mask_words: Tensor | None = None


class Operands(NamedTuple):
    """The TMA descriptors of Q, K and V, two each, and the scales of fp8 operands."""

    descriptors: tuple[Any, ...]
    fp8: Fp8Scales = Fp8Scales()


def new_state(memory: Memory, request: Request | None) -> State:
    """`request`: the call, whose results are repaired where a mask may hide keys. None: a call with a KV cache."""
    zeros = memory.counters()
    state = State(zeros, zeros[FIRST_FLAG:])
    if request is None or not request.is_masked:
        return state
    size = call_shape(request)
    most_tiles = size.programs(size.n_q, size.heads, ROWS.value)
    return state._replace(tiles=memory.empty((most_tiles,), torch.int32))


def build_forward(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`. Results: out, lse, and the largest score of each head if the call returns it."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request = Request.of(spec, tensors)
        out, lse = new_results(request, memory)
        max_logit = new_max_logit(request, memory)
        launches = named_launches(request, (out, lse, max_logit), target, memory)
        return Built((out, lse) if max_logit is None else (out, lse, max_logit), list(launches.values()))

    return build


def named_launches(
    request: Request, results: tuple[Tensor, Tensor, Tensor | None], target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches by name, in order. Names in parentheses are of small kernels. `results`: out, lse, and the largest
    score of each head or None."""
    out, lse, max_logit = results
    state = new_state(memory, request)
    found: dict[str, Launch] = {}
    if request.blocks:
        state = state._replace(mask_words=new_words(request, memory))
        found |= named("(forward mask)", words_launches(request, state.mask_words))
    if max_logit is not None:
        found |= named("(forward max logit)", clear_max_logit(max_logit))
    if request.spec.precision is not None:
        found |= fp8_forward_launches(request, results, state, target.num_sms, memory)
    else:
        (found["hopper forward"],) = forward_launches(request, out, lse, state, target.num_sms, max_logit)
    if request.cu_q is not None:
        cleared = clear_launches(out, lse, None, request.cu_q, request.cu_q, GPU, -torch.inf)
        found |= named("(forward clear)", cleared)
    return found


def forward_launches(
    request: Request,
    out: Tensor,
    lse: Tensor,
    state: State,
    num_sms: int,
    max_logit: Tensor | None = None,
    **overrides: Any,
) -> list[Launch]:
    """The forward, as a list of one launch. `overrides` replaces fields of the ForwardConfig (for experiments)."""
    if max_logit is None:  # it is computed for each head; `by_group` makes the heads of a group one
        request, out, lse = by_group(request, out, lse)
    size = call_shape(request)
    config = forward_config(size, sequence_keys(size), request.spec, request.bias is not None)._replace(**overrides)
    splits_columns = ROWS.value * config.WARPGROUPS > config.BLOCK_M
    # two warpgroups with the same queries load all columns of V, and each multiplies BLOCK_DV of them
    v_parts = (2 * config.BLOCK_DV,) if splits_columns else config.HEAD_PARTS
    queries, keys = boxes_of(request.spec)
    operands = Operands(
        (
            *column_descriptors(request.q, ROWS.value, boxes=queries),
            *column_descriptors(request.k, config.BLOCK_N, boxes=keys),
            *part_descriptors(request.v, config.BLOCK_N, v_parts, boxes=keys),
        )
    )
    return [forward_launch(request, operands, (out, lse, max_logit), state, num_sms, size, config)]


def fp8_forward_launches(
    request: Request,
    results: tuple[Tensor, Tensor, Tensor | None],
    state: State,
    num_sms: int,
    memory: Memory,
) -> dict[str, Launch]:
    """By name: the quantising pass, and the forward on its results, whose NaN repair reads q, k and v themselves."""
    from ..common.fp8_launches import quantise

    size = call_shape(request)
    quantised = quantise(request, GPU, memory, 64, ordered=True)
    config = fp8_config(size, request.spec, request.bias is not None)
    q, k, v = (x.transpose(1, 2) for x in quantised[:3])
    operands = Operands(
        (
            *column_descriptors(q, ROWS.value),
            *column_descriptors(k, KEY_BLOCK),
            *column_descriptors(v, config.BLOCK_DV),
        ),
        quantised.scales,
    )
    launch = forward_launch(request, operands, results, state, num_sms, size, config)
    return quantised.launches | {"hopper forward": launch}


def forward_launch(
    request: Request,
    operands: Operands,
    results: tuple[Tensor, Tensor, Tensor | None],
    state: State,
    num_sms: int,
    size: CallShape,
    config: ForwardConfig,
    cache: KvCache = NO_CACHE,
) -> Launch:
    """`results`: out, lse and the largest score of each head, or None. With a cache nothing is repaired."""
    q, spec = request.q, request.spec
    out, lse, max_logit = results
    repair = RepairPointers()
    if request.is_masked and cache.lengths is None:
        assert state.tiles is not None, "a call that may need the repair has State.tiles"
        # The repair reads q, k and v. It has their strides from the TMA descriptors, which with fp8 are those of the
        # quantised operands.
        inputs = [global_tensor(x) if config.FP8 else x for x in (q, request.k, request.v)]
        repair = RepairPointers(inputs[0], inputs[1], inputs[2], out, state.flags, state.tiles)
    block_m = config.BLOCK_M
    tiles_per_row = size.tiles(size.n_q, block_m)
    rows = size.heads * (1 if size.packed else size.batch)
    rows_in_l2 = L2_BYTES // (keys_in_use(request, size) * (size.d + size.dv) * 2) if is_uneven(spec) else 1
    rows_in_l2 = rows_together(rows // config.GROUP, rows_in_l2)
    terms, score, mask = Terms(), None, None
    if not request.is_plain:
        terms = device_terms(request, GPU, (block_m, config.BLOCK_N))
        score, mask = score_mod(request, GPU), mask_mod(request)
    if state.mask_words is not None:
        terms, mask = with_words(terms, request, state.mask_words), None
    args = in_order(
        forward_kernel,
        **dict(zip(("q", "q_rest", "k", "k_rest", "v", "v_rest"), operands.descriptors, strict=True)),
        # with float32 results only the dtype of this descriptor is used, that of P
        o=descriptor(q if spec.partial else out, ROWS.value, config.BLOCK_DV // config.O_STORES, boxes_of(spec)[0]),
        o_float32=float32_output(out, spec),
        lse=lse,
        counter=state.counter,
        repair=repair,
        max_logit=max_logit,
        cu_q=request.cu_q,
        cu_k=request.cu_k,
        n_q=size.n_q,
        n_k=size.n_k,
        before=spec.before,
        after=spec.after,
        scale=spec.scale,
        num_tiles=tiles_per_row * rows,
        rows=rows,
        tiles_per_row=tiles_per_row,
        heads=size.heads,
        batch=size.batch,
        rows_in_l2=rows_in_l2 * config.GROUP,
        terms=terms,
        cache=CachePointers(*cache[:4]),
        fp8=operands.fp8,
        **dict(zip(KvCache._fields[4:], cache[4:], strict=True)),
    )
    options = {"SCORE_MOD": score, "MASK_MOD": mask, "CONFIG": config, "num_warps": 4}
    options |= pdl_option(overlaps())
    programs = min(tiles_per_row * rows, config.PROGRAMS * num_sms)
    assert FIRST_FLAG + config.WARPGROUPS * programs <= COUNTERS, "more flags than the zeros of a call"
    if config.PROGRAMS > 1:
        # the producer warp counts as a warpgroup when the driver gives registers to a program
        options["maxnreg"] = REGISTERS // (128 * (config.WARPGROUPS + 1) * config.PROGRAMS) // 8 * 8
    return Launch(forward_kernel, programs, args, options)


def keys_in_use(request: Request, size: CallShape) -> int:
    """The keys of a (batch, head) row that tiles computed at the same time share: all, or with a block mask twice those
    of the mean tile, as many as in a causal call of that mean."""
    if not request.blocks:
        return max(1, size.n_k)
    offsets, entries, *_ = request.blocks
    mean = entries.shape[0] * request.spec.mask_block[1] // (offsets.shape[0] - 1)
    return max(1, min(2 * mean, size.n_k))


def fp8_config(size: CallShape, spec: Spec, has_bias: bool) -> ForwardConfig:
    """The config for fp8 operands, whose blocks have KEY_BLOCK keys."""
    tile, dv = FP8_FORWARD, padded(size.dv, 64)
    return ForwardConfig(
        BLOCK_M=ROWS.value * tile.warpgroups,
        BLOCK_DV=dv,
        HEAD_PARTS=(dv,),
        BLOCK_N=KEY_BLOCK,
        GROUP=size.heads // size.kv_heads,
        WARPGROUPS=tile.warpgroups,
        STAGES=tile.stages,
        FOLD_SCALE=spec.is_linear(has_bias),
        O_STORES=tile.o_stores,
        PING_PONG=tile.ping_pong,
        LAZY_RESCALE=False,
        FP8=True,
    )


def sequence_keys(size: CallShape) -> int:
    """The keys of a sequence; of packed sequences, whose lengths are not known here, the mean."""
    return size.n_k // size.batch if size.packed else size.n_k


@lru_cache(LIMIT)
def forward_config(size: CallShape, keys: int | None, spec: Spec, has_bias: bool) -> ForwardConfig:
    """`keys`: the number of keys of one sequence; None if it is not known."""
    has_score_terms = spec.score_mod is not None or has_bias
    unmodified = not has_score_terms and not spec.dropout_p
    plain, listed = unmodified and spec.mask_mod is None, unmodified and bool(spec.mask_block)
    window = window_size(spec.before, spec.after)
    kind = {"banded": is_uneven(spec), "plain": plain, "listed": listed}
    tile = forward_tile(size.d, size.dv, keys=keys, window=window, **kind)
    splits_columns = max(size.d, size.dv) > MAX_WHOLE_ROWS
    block_dv = padded(size.dv, 64) // (2 if splits_columns else 1)
    return ForwardConfig(
        BLOCK_M=ROWS.value * (1 if splits_columns else tile.warpgroups),
        BLOCK_DV=block_dv,
        HEAD_PARTS=(block_dv,) if splits_columns else widths(size.dv),
        BLOCK_N=tile.block_n,
        GROUP=size.heads // size.kv_heads,
        WARPGROUPS=tile.warpgroups,
        STAGES=tile.stages,
        FOLD_SCALE=spec.is_linear(has_bias),
        O_STORES=tile.o_stores,
        PING_PONG=tile.ping_pong,
        LAZY_RESCALE=tile.lazy_rescale,
        Q_IN_REGISTERS=tile.q_in_registers,
        RESCALE_LATE=tile.rescale_late,
        Q_STAGES=tile.q_stages,
        PROGRAMS=tile.programs,
    )


class Boxes(NamedTuple):
    """A grid of tokens that are counted box by box (`pipeline.grid_place`): lengths of the slow and of the fast axis,
    tokens between neighbours along them, and tokens of a box along the fast axis."""

    slow: int
    fast: int
    slow_step: int
    fast_step: int
    width: int


def boxes_of(spec: Spec) -> tuple[Boxes | None, Boxes | None]:
    """The boxes of queries and of keys."""
    if not spec.token_boxes:
        return None, None
    slow, fast, slow_step, fast_step, *widths = spec.token_boxes
    queries, keys = (Boxes(slow, fast, slow_step, fast_step, width) for width in widths)
    return queries, keys


def column_descriptors(
    x: Tensor, rows: int, is_cache: bool = False, boxes: Boxes | None = None
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The descriptors of one or two parts of the columns, in boxes of `rows` rows; the second is None for one part."""
    return part_descriptors(x, rows, widths(x.shape[-1]), is_cache, boxes)


def part_descriptors(
    x: Tensor, rows: int, parts: tuple[int, ...], is_cache: bool = False, boxes: Boxes | None = None
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The same for parts of these widths."""
    make = packed_descriptor if is_cache else partial(descriptor, boxes=boxes)
    first, *rest = (make(x, rows, width) for width in parts)
    return first, rest[0] if rest else None


def descriptor(x: Tensor, rows: int, width: int, boxes: Boxes | None = None) -> TensorDescriptor:
    """The descriptor of a (batch, token, head, dim) or packed (token, head, dim) tensor; see
    `pipeline.tma_coordinates`."""
    if x.dim() == 3:
        return packed_descriptor(x, rows, width)
    batch, token, head, one = x.stride()
    if boxes is not None:
        part = (1, 1, rows // boxes.width, boxes.width, width)
        shape = [x.shape[0], x.shape[2], boxes.slow, boxes.fast, x.shape[3]]
        strides = [batch, head, boxes.slow_step * token, boxes.fast_step * token, one]
        return TensorDescriptor(x, shape, strides, list(part), layout(part, x.dtype))
    b, t, h, d = x.shape
    box = (1, 1, rows, width)
    return TensorDescriptor(x, [b, h, t, d], [batch, head, token, one], list(box), layout(box, x.dtype))


def packed_descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """The descriptor of packed sequences, or of a KV cache whose pages are whole numbers of tokens apart."""
    *_, token, head, one = x.stride()
    *_, heads, dim = x.shape
    extent = TMA_EXTENT.value
    shape = [2 * extent - 1, 2 * extent - 1, heads, extent, dim]
    box = (1, 1, 1, rows, width)
    return TensorDescriptor(x, shape, [2**34 - token, token, head, token, one], list(box), layout(box, x.dtype))


def float32_output(x: Tensor, spec: Spec) -> GlobalTensor:
    """Where the kernel stores float32 results; absent unless the call is partial."""
    return global_tensor(x) if spec.partial else GlobalTensor()


def global_tensor(x: Tensor) -> GlobalTensor:
    return GlobalTensor(x, view(x).strides[:3], x.shape[-1])


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])
