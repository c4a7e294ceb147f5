"""From tensors to launches: views, grids and compile-time choices of the portable kernels."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from math import isfinite
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ... import config
from ...dispatch import capability_of
from ...mods.dropout import threshold
from ...spec import LIMIT, MAX_HEAD_DIM, NO_TERMS, AttentionError, Spec, Terms, heads_are_queries
from .. import mods, replay
from .. import tile as device
from ..repair import LINE, repair_backward_kernel, repair_forward_kernel, repair_jvp_kernel
from ..tile import PAD, Plan, View
from .backward import Saved, key_kernel, prepare_kernel, query_kernel
from .clear import Tail, clear_kernel
from .forward import forward_kernel, merge_kernel
from .forward_mode import Moving, jvp_kernel

LARGEST = 55.0  # exp(55) is 2^79: of the 127 powers of two that a float has, 48 are left for values and their sums
SMALLEST = 16  # rows of a tile
INTERPRETED = triton.knobs.runtime.interpret
HIP = torch.version.hip is not None  # no PTX, no launch before the kernel ahead has ended, no products of TF32


class Launch(NamedTuple):
    """A kernel, its grid, its arguments and its compile-time options: launched here, compiled offline by the tests."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        """The compiled kernel, launched; None where there was nothing to launch or it was interpreted."""
        return self.kernel[(self.programs,)](*self.args, **self.options) if self.programs else None


class Problem(NamedTuple):
    """The shapes of one call. Packed sequences count as one batch row of `tokens`, tiled together."""

    batch: int
    n_q: int
    n_k: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    packed: bool

    def tiles(self, n: int, block: int) -> int:
        return n // block + self.batch if self.packed else -(-n // block)

    def programs(self, n: int, heads: int, block: int) -> int:
        return self.tiles(n, block) * heads * (1 if self.packed else self.batch)


def problem(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None) -> Problem:
    *_, n_q, heads, d = q.shape
    n_k, kv_heads, dv = v.shape[-3:]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    return Problem(batch, n_q, n_k, heads, kv_heads, d, dv, cu_q is not None)


def by_group(
    q: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, kv_heads: int, spec: Spec, terms: Terms
) -> tuple[Tensor, Tensor, Tensor, Spec]:
    """q, out and lse of a forward, with the heads of a group as queries, where `heads_are_queries`."""
    group = q.shape[-2] // kv_heads
    if cu_q is not None or not heads_are_queries(q.shape[1], group, spec.before) or not terms.is_empty(spec):
        return q, out, lse, spec
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    return q, out, lse.unflatten(1, (kv_heads, group)).squeeze(-1), replace(spec, after=None)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, capability: int, terms: Terms = NO_TERMS,
    parts: int = 1, flags: Tensor | None = None,
) -> Launch:  # fmt: skip
    """`parts` of the keys by a program each: out and lse then have that many times the batch, part by part."""
    flags = new_flags(q, k, v, cu_q, spec, parts) if flags is None else flags
    q, out, lse, spec = by_group(q, out, lse, cu_q, k.shape[-2], spec, terms)
    size = problem(q, k, v, cu_q)
    tile = tile_of("forward", q.element_size(), size, capability)
    tiles = size.tiles(size.n_q, tile.block_m)
    scoring, scale, _ = folded(spec, q, terms, slope=False)
    return Launch(
        forward_kernel,
        parts * size.programs(size.n_q, size.heads, tile.block_m),
        (
            *(view(x) for x in (q, k, v, out)), row_view(lse), flags, cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, scale, tiles, size.heads, size.batch, parts if parts > 1 else None,
            device_terms(spec, terms, size, tile),
        ),
        planned(options_of(size, spec, tile, q, terms) | scoring | {
            "MASK_MOD": mask_mod(spec),
            "BOUNDED": scoring["FOLD"] and _is_bounded(spec, q, terms, scale),
            "OVERLAP": (size.packed or parts > 1 or flags is not None) and can_overlap(capability),
            "EVEN": _even(size, size.n_k, tile.block_n),
        }),
    )  # fmt: skip


def is_hiding(spec: Spec, n_q: int, packed: bool) -> bool:
    """Whether some query may not see some key, as far as the kernels that are compiled for it can tell."""
    if spec.before is not None or spec.mask_mod is not None:
        return True
    return spec.after is not None and (packed or n_q > 1)


def new_flags(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, spec: Spec, parts: int = 1, both: bool = False
) -> Tensor | None:
    """Room for a flag for each tile of queries or, of `both` sides, also for those of keys and of values."""
    size = problem(q, k, v, cu_q)
    if not is_hiding(spec, size.n_q, size.packed):
        return None
    room = parts * size.programs(size.n_q, size.heads, SMALLEST)
    if both:
        room += 2 * size.programs(size.n_k, size.kv_heads, SMALLEST) + 2 * LINE.value
    return q.new_empty(room, dtype=torch.int32)


def repairs(of: Launch) -> list[Launch]:
    """What follows a forward or a jvp that raises flags."""
    kernel = {forward_kernel: repair_forward_kernel, jvp_kernel: repair_jvp_kernel}[of.kernel]
    return [] if of.args[5] is None else [_repair(kernel, of.programs, (*of.args, of.programs), of)]


def backward_repairs(passes: list[Launch]) -> list[Launch]:
    """What follows the launches of a backward, `backward_launches`, that raise flags."""
    _, key, *values, query = passes
    saved, dq, flags, *scalars, q_tiles, heads, batch, q_terms = query.args
    _, dk, dv, *_, k_tiles, kv_heads, _, k_terms = key.args
    if flags is None:
        return []
    totals = query.programs, key.programs
    counts = *totals, q_tiles, k_tiles, heads, kv_heads, batch
    plans = {"QUERY": query, "KEY": key, "VALUE": values[0] if values else None}
    made = _repair(
        repair_backward_kernel, max(totals), (saved, dq, dk, dv, flags, *scalars, *counts, q_terms, k_terms), query, key
    )
    options = {name: x for name, x in made.options.items() if name != "PLAN"}
    return [made._replace(options=options | {name: x and x.options["PLAN"] for name, x in plans.items()})]


def _repair(kernel: Any, tiles: int, args: tuple[Any, ...], *of: Launch) -> Launch:
    options = {name: of[0].options[name] for name in ("SCORE_MOD", "MASK_MOD", "PLAN") if name in of[0].options}
    overlap = of[0].options["PLAN"].OVERLAP
    warps = max(x.options["num_warps"] for x in of)
    options |= {"EACH": True, "num_warps": warps, "num_stages": 1} | ({"launch_pdl": True} if overlap else {})
    return Launch(kernel, min(tiles, processors_of(args)), args, options)


def processors_of(args: tuple[Any, ...]) -> int:
    """Of the device where a launch's first tensor lies."""
    first = args[0]
    while not isinstance(first, Tensor):
        first = first[0]
    return multiprocessors(first.device) if first.is_cuda else config.INTERPRETED_PROCESSORS


def merge_launch(out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor, parts: int, capability: int) -> Launch:
    batch, n_q, heads, dv = out.shape
    rows, columns = triton.next_power_of_2(parts), _padded(dv)
    options = {
        "DV": dv, "BLOCK_P": rows, "BLOCK_DV": columns, "num_warps": 4 if rows * columns <= 8192 else 8,
        **overlapped(can_overlap(capability)),
    }  # fmt: skip
    return Launch(
        merge_kernel, batch * n_q * heads, (out_parts, lse_parts, out, lse, parts, batch, n_q, heads), options
    )


def parts_of_keys(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, spec: Spec, terms: Terms) -> int:
    """In how many parts the keys are streamed: several where the queries alone would leave most of the GPU idle."""
    if cu_q is not None or q.shape[1] > config.FEW_QUERIES or terms.blocks:
        return 1
    processors = multiprocessors(q.device) if q.is_cuda else config.INTERPRETED_PROCESSORS
    before = spec.before if terms.is_empty(spec) else 0  # with terms, which may know its number, a head stays a head
    return _parts_of_keys(problem(q, k, v, cu_q), q.element_size(), before, compute_capability(q), processors)


@lru_cache(LIMIT)
def _parts_of_keys(size: Problem, itemsize: int, before: int | None, capability: int, processors: int) -> int:
    tile = tile_of("forward", itemsize, size, capability)
    group = size.heads // size.kv_heads
    if heads_are_queries(size.n_q, group, before):
        size = size._replace(n_q=group, heads=size.kv_heads)
    return config.parts_of_keys(size.programs(size.n_q, size.heads, tile.block_m), size.n_k, tile.block_n, processors)


def backward_launches(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, capability: int,
    terms: Terms = NO_TERMS, statistics: tuple[Tensor, Tensor] | None = None, flags: Tensor | None = None,
) -> list[Launch]:  # fmt: skip
    size = problem(q, k, v, cu_q)
    statistics = statistics or row_statistics(q, size)
    flags = new_flags(q, k, v, cu_q, spec, both=True) if flags is None else flags
    overlap = can_overlap(capability)
    prepare, shared = prepare_launch(dout, dlse, q, k, v, out, lse, cu_q, cu_k, size, statistics, overlap)
    scoring, scale, rate = folded(spec, q, terms, slope=True)
    scalars = cu_q, cu_k, size.n_q, size.n_k, spec.before, spec.after, scale, rate
    program = scoring | {"MASK_MOD": mask_mod(spec)} | overlapped(overlap)
    tile = tile_of("query", q.element_size(), size, capability)
    tiles = size.tiles(size.n_q, tile.block_m)
    query = Launch(
        query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (*shared, view(dq), flags, *scalars, tiles, size.heads, size.batch, device_terms(spec, terms, size, tile)),
        planned(options_of(size, spec, tile, q, terms) | program | {"EVEN": _even(size, size.n_k, tile.block_n)}),
    )
    tile = tile_of("key", q.element_size(), size, capability)
    tiles = size.tiles(size.n_k, tile.block_n)
    programs = size.programs(size.n_k, size.kv_heads, tile.block_n)
    sums = [(True, False), (False, True)] if tile.apart else [(True, True)]
    starts = (_lined(query.programs) + n * _lined(programs) for n in range(len(sums)))
    keys = [
        Launch(
            key_kernel,
            programs,
            (
                *shared, view(dk), view(dv), None if flags is None else flags[start:], *scalars, tiles, size.kv_heads,
                size.batch, device_terms(spec, terms, size, tile, by_key=True),
            ),
            planned(options_of(size, spec, tile, q, terms) | program | {
                "EVEN": _even(size, size.n_q, tile.block_m), "SUM_K": sum_k, "SUM_V": sum_v,
            }),
        )
        for (sum_k, sum_v), start in zip(sums, starts, strict=True)
    ]  # fmt: skip
    return [prepare, *keys, query]


def _lined(flags: int) -> int:
    return -(-flags // LINE.value) * LINE.value


def clear_launches(
    x: Tensor, y: Tensor, z: Tensor | None, cu_x: Tensor | None, cu_y: Tensor | None, y_value: float = 0.0
) -> list[Launch]:
    """Of packed results, whatever lies past the last sequence: 0, in y (head, token) or (token, head, dim) y_value."""
    if cu_x is None or cu_y is None:
        return []
    tails = (_tail(x), _tail(y), Tail(None, 0, 0, 0) if z is None else _tail(z))
    options = {"Y": y_value, "BLOCK": 1024} | overlapped(can_overlap(compute_capability(x)))
    return [Launch(clear_kernel, 128, (*tails, cu_x, cu_y, cu_x.shape[0] - 1), options)]


def _tail(x: Tensor) -> Tail:
    lines = x.shape[0] if x.dim() == 2 else 1
    return Tail(x, lines, x.numel() // lines, x.shape[1] * x.shape[2] if x.dim() == 3 else 1)


def row_statistics(q: Tensor, size: Problem) -> tuple[Tensor, Tensor]:
    """Room for lse2 and delta, padded."""
    shape = 1 if size.packed else size.batch, size.heads, size.tiles(size.n_q, PAD.value) * PAD.value
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def prepare_launch(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, size: Problem, statistics: tuple[Tensor, Tensor], overlap: bool = False,
) -> tuple[Launch, tuple[Any, ...]]:  # fmt: skip
    """The launch that computes the row statistics, and the leading arguments of every kernel that uses them."""
    pad = PAD.value
    padded = size.tiles(size.n_q, pad)
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    prepare = Launch(
        prepare_kernel,
        size.programs(size.n_q, size.heads, pad),
        (
            view(out), view(dout), row_view(lse), View(None, (0, 0, 0)) if dlse is None else row_view(dlse),
            lse2, delta, cu_q, cu_k, size.n_q, size.n_k, padded, size.heads, size.batch,
        ),
        {
            "DV": size.dv, "BLOCK_M": pad, "BLOCK_DV": _padded(size.dv), "OVERLAP": overlap,
            "num_warps": 8 if size.dv > 128 else 4,
        },
    )  # fmt: skip
    return prepare, (Saved(*(view(x) for x in (q, k, v, dout)), lse2, delta),)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
    launches: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse). `launches` remembers those of calls that look alike to the kernels."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    parts = parts_of_keys(q, k, v, cu_q, spec, terms)
    rooms: tuple[Tensor, ...] = ()
    if parts > 1:
        rooms = tuple(x.new_empty((parts * x.shape[0], *x.shape[1:]), dtype=torch.float32) for x in (out, lse))

    flags = new_flags(q, k, v, cu_q, spec, parts)

    def build() -> list[Launch]:
        capability = compute_capability(q)
        made = forward_launch(q, k, v, *(rooms or (out, lse)), cu_q, cu_k, spec, capability, terms, parts, flags)
        if rooms:
            return [made, *repairs(made), merge_launch(*rooms, out, lse, parts, capability)]
        return [made, *repairs(made), *clear_launches(out, lse, None, cu_q, cu_q, -torch.inf)]

    with on(q):
        replay.launch(_precision(q), (q, k, v, cu_q, cu_k, *terms.tensors(), out, lse, *rooms, flags), build, launches)
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
    launches: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    statistics = row_statistics(q, problem(q, k, v, cu_q))
    flags = new_flags(q, k, v, cu_q, spec, both=True)

    def build() -> list[Launch]:
        passes = backward_launches(
            dout, dlse, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, spec, compute_capability(q), terms, statistics, flags
        )
        return [*passes, *backward_repairs(passes), *clear_launches(dq, dk, dv, cu_q, cu_k)]

    tensors = q, k, v, cu_q, cu_k, dout, dlse, out, lse, *terms.tensors(), dq, dk, dv, *statistics, flags
    with on(q):
        replay.launch(_precision(q), tensors, build, launches)
    return dq, dk, dv


def jvp(
    tangents: list[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The movement of out and lse; for the band and grouped heads, without score terms."""
    if not terms.is_empty(spec):
        raise AttentionError("forward mode on these kernels", "a score term", "backend='reference', or no score terms")
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    with on(q):
        made = jvp_launch(tangents, q, k, v, out, lse, dout, dlse, cu_q, cu_k, spec, compute_capability(q))
        for launch in (made, *repairs(made), *clear_launches(dout, dlse, None, cu_q, cu_q)):
            launch()
    return dout, dlse


def jvp_launch(
    tangents: list[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, capability: int,
) -> Launch:  # fmt: skip
    size = problem(q, k, v, cu_q)
    tile = tile_of("jvp", q.element_size(), size, capability)
    return Launch(
        jvp_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            Moving(*(view(x) for x in (q, k, v, *tangents))), view(out), row_view(lse), view(dout), row_view(dlse),
            new_flags(q, k, v, cu_q, spec), cu_q, cu_k, size.n_q, size.n_k, spec.before, spec.after, spec.scale,
            size.tiles(size.n_q, tile.block_m), size.heads, size.batch,
        ),
        planned(options_of(size, spec, tile, q, NO_TERMS) | {"OVERLAP": can_overlap(capability)}),
    )  # fmt: skip


def device_terms(
    spec: Spec, terms: Terms, size: Problem, tile: config.Tile | None = None, by_key: bool = False
) -> device.Terms:
    """What the kernels know of the terms; with `by_key`, the tile lists of the owner of keys."""
    if terms.is_empty(spec):
        return device.Terms()
    bias = terms.bias
    drops = terms.seed is not None
    return device.Terms(
        bias=device.Bias() if bias is None else device.Bias(bias, _broadcast_strides(bias)),
        sinks=device.Sinks() if terms.sinks is None else device.Sinks(terms.sinks, terms.sinks.stride(0)),
        seed=terms.seed,
        threshold=threshold(spec.dropout_p) if drops else None,
        rescale=1.0 / (1.0 - spec.dropout_p) if drops else None,
        score=mods.captured(terms.score, (*spec.score_numbers, spec.scale)),
        mask=mods.captured(terms.mask, spec.mask_numbers),
        # without the lists the mask mod is asked of every tile; with them Triton cannot translate it for AMD
        blocks=_blocks(spec, terms, tile, by_key) if tile and terms.blocks and not HIP else device.Blocks(),
        steep=1 if spec.score_mod and mods.is_steep(spec.score_mod) else None,
        wild=1 if spec.score_mod and mods.is_wild(spec.score_mod) else None,
    )


def _blocks(spec: Spec, terms: Terms, tile: config.Tile, by_key: bool) -> device.Blocks:
    block_q, block_k, batch, heads = spec.mask_block
    log_q, log_k = block_q.bit_length() - 1, block_k.bit_length() - 1
    if block_q % tile.block_m or block_k % tile.block_n or (1 << log_q, 1 << log_k) != (block_q, block_k):
        raise AttentionError(
            "tiles of the block mask", (block_q, block_k), f"powers of two from ({tile.block_m}, {tile.block_n}) on"
        )
    offsets, entries = terms.blocks[2:] if by_key else terms.blocks[:2]
    own, other = (log_k, log_q) if by_key else (log_q, log_k)
    rows = 16 * ((offsets.shape[0] - 1) // (batch * heads))
    head_rows = rows if heads > 1 else 0
    return device.Blocks(offsets, entries, rows * heads if batch > 1 else 0, head_rows, own, other)


def _broadcast_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))


def is_fast(q: Tensor) -> bool:
    """Whether a hardware approximation as fine as the inputs will do; the interpreter and AMD have none."""
    return q.element_size() == 2 and not INTERPRETED and not HIP


def score_mod(spec: Spec, q: Tensor) -> Any:
    return spec.score_mod and mods.value(spec.score_mod, is_fast(q))


def folded(spec: Spec, q: Tensor, terms: Terms, slope: bool) -> tuple[dict[str, Any], float, float]:
    """How scores are made of q.k: the score mod (with its slope) and whether it takes q.k itself; the factor of what
    comes out; and the factor of the gradients of q.k."""
    if spec.score_mod and terms.bias is None and q.element_size() == 2:
        numbers = *spec.score_numbers, spec.scale
        function, unit, pull = mods.folded(spec.score_mod, is_fast(q), slope)
        scale, rate = mods.value_of(unit, numbers), spec.scale * mods.value_of(pull, numbers)
        if scale > 0 and isfinite(rate):
            return {"SCORE_MOD": function, "FOLD": True}, scale, rate
    plain = slope_mod(spec, q) if slope else score_mod(spec, q)
    return {"SCORE_MOD": plain, "FOLD": _is_linear(spec, terms)}, spec.scale, spec.scale


def _is_bounded(spec: Spec, q: Tensor, terms: Terms, scale: float) -> bool:
    """Whether exp(score) and its sums surely fit into float32 and bfloat16, so that nobody needs a maximum."""
    return (
        q.dtype == torch.bfloat16
        and spec.score_mod is not None
        and terms.bias is None
        and terms.sinks is None
        and 0 < scale * mods.bound(spec.score_mod) <= LARGEST
    )


def _is_linear(spec: Spec, terms: Terms) -> bool:
    """Whether nothing but a positive factor stands between q.k and the softmax."""
    return spec.scale > 0 and spec.score_mod is None and terms.bias is None


def mask_mod(spec: Spec) -> Any:
    return spec.mask_mod and mods.value(spec.mask_mod, False)


def slope_mod(spec: Spec, q: Tensor) -> Any:
    return spec.score_mod and mods.value_and_slope(spec.score_mod, is_fast(q))


def view(x: Tensor) -> View:
    """(batch, token, head, dim) strides; packed sequences have one batch row."""
    strides = x.stride() if x.dim() == 4 else (0, *x.stride())
    return View(x, strides, 1 if (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31 else None)


def row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def _padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def tile_of(which: str, itemsize: int, size: Problem, capability: int) -> config.Tile:
    if INTERPRETED:
        return config.INTERPRETER
    return config.tile(which, capability, itemsize, _padded(max(size.d, size.dv)))


def _even(size: Problem, n: int, block: int) -> bool:
    return not size.packed and n % block == 0


def options_of(size: Problem, spec: Spec, tile: config.Tile, q: Tensor, terms: Terms) -> dict[str, Any]:
    return {
        "GROUP": size.heads // size.kv_heads,
        "D": size.d,
        "DV": size.dv,
        "BLOCK_D": _padded(size.d),
        "BLOCK_DV": _padded(size.dv),
        "FOLD": _is_linear(spec, terms),
        "PRECISION": _precision(q),
        "PACKED": size.packed,
        **tile.options(),
    }


def planned(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a launch, with the fields of a Plan in one."""
    plan = Plan(**{name: x for name, x in options.items() if name in Plan._fields})
    return {name: x for name, x in options.items() if name not in Plan._fields} | {"PLAN": plan}


def _precision(q: Tensor) -> str:
    """float32 is multiplied as three TF32 products, together as exact as one of float32, unless torch may use one; on
    AMD, whose matrix units know float32, as it is."""
    if q.dtype != torch.float32 or HIP:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def can_overlap(capability: config.Arch) -> bool:
    """Whether a kernel may start before the one ahead of it has ended."""
    return isinstance(capability, int) and capability >= 90 and not INTERPRETED


def overlapped(overlap: bool) -> dict[str, bool]:
    """The options of a launch that may; AMD's launches know nothing of it."""
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})


def compute_capability(q: Tensor) -> int:
    return capability_of(q.device) if q.is_cuda else 0


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_ALREADY_THERE = nullcontext()


def on(q: Tensor) -> Any:
    """Triton launches on the current device; changing it costs more than asking."""
    if q.is_cuda and q.get_device() != torch._C._cuda_getDevice():
        return torch.cuda.device(q.device)
    return _ALREADY_THERE
