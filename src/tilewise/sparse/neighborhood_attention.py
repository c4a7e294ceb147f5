"""Neighbourhood attention (NATTEN) in 1, 2 and 3 dimensions: each token sees a window of kernel_size tokens an axis.

Row by row, the window of an image's token is kernel_size short runs far apart, and a tile of queries needs many tiles
of keys. So tokens are permuted into boxes of TILE tokens, shaped so that a box of queries sees few boxes of keys, and
the results are permuted back. With dilation d, tokens whose coordinates differ by multiples of d form an axis of their
own: they come next to each other first, and a window is again a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..autograd import first_gradients
from ..backends.protocol import Backend
from ..backends.registry import supporting
from ..call.options import BackendName, Options
from ..errors import AttentionError, shown
from ..mods import BlockMask, block_mask, mask_mod
from ..ops.dense import registered
from ..plan_cache import can_use_plan
from ..request import BackwardInputs, Request, Spec, arguments
from ..tensor_cache import TensorCache
from ..torch_internals import constant, num_dispatch_modes
from ..validation.dense import checked_request, is_cast
from .checks import named

TILE = 128  # tokens of a box: those of a block mask's tile
LAYOUTS, WORDS = (TensorCache(2 << 30, max_entries=64) for _ in range(2))  # grids whose orders and masks are kept


@mask_mod
def _near_1d(b, h, q_idx, kv_idx, x, x_lo, x_hi):  # type: ignore[no-untyped-def]
    return (x_lo[q_idx] <= x[kv_idx]) & (x[kv_idx] <= x_hi[q_idx])


@mask_mod
def _near_2d(b, h, q_idx, kv_idx, x, x_lo, x_hi, y, y_lo, y_hi):  # type: ignore[no-untyped-def]
    in_x = (x_lo[q_idx] <= x[kv_idx]) & (x[kv_idx] <= x_hi[q_idx])
    return in_x & (y_lo[q_idx] <= y[kv_idx]) & (y[kv_idx] <= y_hi[q_idx])


@mask_mod
def _near_3d(b, h, q_idx, kv_idx, x, x_lo, x_hi, y, y_lo, y_hi, z, z_lo, z_hi):  # type: ignore[no-untyped-def]
    in_x = (x_lo[q_idx] <= x[kv_idx]) & (x[kv_idx] <= x_hi[q_idx])
    in_y = (y_lo[q_idx] <= y[kv_idx]) & (y[kv_idx] <= y_hi[q_idx])
    return in_x & in_y & (z_lo[q_idx] <= z[kv_idx]) & (z[kv_idx] <= z_hi[q_idx])


NEAR = {1: _near_1d, 2: _near_2d, 3: _near_3d}


class Window(NamedTuple):
    """One axis: its length, and the window."""

    length: int
    kernel_size: int
    dilation: int
    causal: bool


class Axis(NamedTuple):
    """By coordinate: the place of the token when tokens of equal remainder by the dilation come next to each other; and
    the first and last place that it sees."""

    place: Tensor
    first: Tensor
    last: Tensor


class Layout(NamedTuple):
    """The orders of queries and of keys in their boxes, the inverses, the mask in these orders, and
    `Spec.token_boxes`, () if the boxes do not divide the grid."""

    queries: Tensor
    queries_inverse: Tensor
    keys: Tensor
    keys_inverse: Tensor
    mask: BlockMask
    token_boxes: tuple[int, ...]


@named
def neighborhood(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    scale: float | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Attention of each token of a grid over the kernel_size nearest tokens along every axis.

    >>> q, k, v = (torch.randn(1, 16, 16, 2, 32) for _ in range(3))
    >>> neighborhood(q, k, v, kernel_size=7).shape
    torch.Size([1, 16, 16, 2, 32])

    As in NATTEN, the window is centred on the query (an even one has one more token before it), and shifted at borders
    so that it keeps its size. Along a causal axis it ends with the query, and is cut off at the border.

    Args:
        q: queries (B, *space, H, D), 1 to 3 axes of space.
        k: keys (B, *space, Hk, D).
        v: values (B, *space, Hk, Dv).
        kernel_size: tokens of a window, one number for all axes or one for each.
        dilation: the step between tokens of a window. kernel_size * dilation is at most the length of the axis.
        causal: if True, a token sees no later token along the axis.
        scale: as in `tilewise.attention`.
        backend: as in `tilewise.attention`.

    Returns:
        out (B, *space, H, Dv) in q's dtype, differentiable.

    Raises:
        AttentionError: an argument is not as above.
    """
    space = _checked_space(q, k, v)
    sizes = _each("kernel_size", kernel_size, len(space), int)
    steps = _each("dilation", dilation, len(space), int)
    ends = _each("causal", causal, len(space), bool)
    windows = tuple(map(Window, map(int, space), sizes, steps, ends))
    for n, (length, size, step, _) in enumerate(windows):
        if size * step > length:
            raise AttentionError(
                f"kernel_size of neighborhood along axis {n}",
                f"{size} with dilation {step}",
                f"at most {length} tokens",
            )
    rows = [x.flatten(1, len(space)) for x in (q, k, v)]
    if q.is_meta or _is_fake(q):  # shapes alone: the order of tokens and the mask do not change them
        shaped: Tensor = attention(*rows, scale=scale, backend=backend).unflatten(1, space)
        return shaped
    layout = Layout(*_layout(windows, str(q.device)))
    if layout.token_boxes and q.is_cuda and can_use_plan() and not is_cast(q, k, v):
        options: Options = {"mask_mod": layout.mask, "scale": scale, "backend": backend}
        request = checked_request(rows[0], rows[1], rows[2], (), (), options)
        spec = request.spec._replace(token_boxes=layout.token_boxes)
        backend_in_boxes = supporting(request, request._replace(spec=spec))
        if backend_in_boxes is not None:
            made = backend_in_boxes, spec, windows
            in_place: Tensor = InBoxes.apply(*made, *request[:3]).unflatten(1, space)  # type: ignore[no-untyped-call]
            return in_place
    query_rows = _permuted(rows[0], layout.queries, layout.queries_inverse)
    key_rows = [_permuted(x, layout.keys, layout.keys_inverse) for x in rows[1:]]
    out: Tensor = attention(query_rows, *key_rows, mask_mod=layout.mask, scale=scale, backend=backend)
    found: Tensor = _permuted(out, layout.queries_inverse, layout.queries).unflatten(1, space)
    return found


def _is_fake(x: Tensor) -> bool:
    """Whether x is a fake tensor, outside of a recording such as that of torch.export or make_fx."""
    return not torch.compiler.is_compiling() and hasattr(x, "fake_mode") and num_dispatch_modes() <= 1


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[:, order]"""
    if torch.compiler.is_compiling():  # torch.compile does not trace functions with a forward mode of their own
        return x.index_select(1, order)
    found: Tensor = Permute.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found


class Permute(torch.autograd.Function):
    """x[:, order]. Its gradient is a permutation too; torch's own of index_select adds rows with atomics."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return _permuted(grad, inverse, order), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _permuted(tangent, *ctx.saved_tensors)


class InBoxes(torch.autograd.Function):
    """out (B, S, H, Dv). The forward's TMA reads boxes of tokens where they lie; the backward permutes."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, spec: Spec, windows: tuple[Window, ...], *tensors: Tensor) -> Tensor:
        q, k, v = tensors
        request = _request(backend, windows, spec, q, k, v)
        out: Tensor
        out, lse = registered("forward")(*arguments(request))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec, ctx.windows, ctx.backend = spec._replace(token_boxes=()), windows, backend
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout = _kept_layout(ctx.windows, q.device)
        orders = (layout.queries, layout.queries_inverse), (layout.keys, layout.keys_inverse)
        rows = [_permuted(x, *orders[is_key]) for x, is_key in ((q, False), (k, True), (v, True))]
        request = _request(ctx.backend, ctx.windows, ctx.spec, *rows)
        out, dout = _permuted(out.detach(), *orders[0]), _permuted(dout, *orders[0])
        grads = first_gradients(request, BackwardInputs(out, lse, dout, None))
        found = zip(grads, (False, True, True), strict=True)
        return None, None, None, *(_permuted(g, *orders[is_key][::-1]) for g, is_key in found)


def _request(backend: Backend, windows: tuple[Window, ...], spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> Request:
    """The request of a call with a layout's mask, which the backend evaluates once."""
    mask, words = _kept_layout(windows, q.device).mask, _kept_words(backend, windows, q.device)
    return Request(q, k, v, spec, mask=mask.mod.tensors, blocks=(*mask.lists, *words))


def _kept_words(backend: Backend, windows: tuple[Window, ...], device: torch.device) -> tuple[Tensor, ...]:
    """What the backend computes of a layout's mask once for all calls."""

    def evaluated() -> tuple[Tensor, ...]:
        mask = _kept_layout(windows, device).mask
        q = torch.empty(1, mask.shape[2], 1, 8, dtype=torch.bfloat16, device=device)
        return backend.evaluated_mask(checked_request(q, q, q, (), (), {"mask_mod": mask}))

    return WORDS.get((backend, windows), device, evaluated)


@constant
def _layout(windows: tuple[Window, ...], device: str) -> tuple[Any, ...]:
    return tuple(_kept_layout(windows, torch.device(device)))


def _kept_layout(windows: tuple[Window, ...], device: torch.device) -> Layout:
    """The same for every call with such a grid and window."""

    def made() -> Layout:
        axes = [_axis(window) for window in windows]
        query_box, key_box = boxes_of(windows)
        # The two halves of a box of queries, along its longest axis, then see the first and the last tiles of its list.
        digits = sorted(range(len(axes)), key=lambda n: -query_box[n])
        queries, keys = (_order([axis.place for axis in axes], box, digits) for box in (query_box, key_box))
        tables = []
        for n, axis in enumerate(axes):
            coordinate = torch.arange(windows[n].length, device="cpu").view(
                [-1 if m == n else 1 for m in range(len(axes))]
            )
            flat = coordinate.expand([w.length for w in windows]).flatten()
            sides = zip(axis, (keys, queries, queries), strict=True)
            tables += [x[flat[order]].int().to(device) for x, order in sides]
        tokens = prod(window.length for window in windows)
        mask = block_mask(NEAR[len(windows)](*tables), tokens, tokens)
        places, inverses = zip(*((x.to(device), x.argsort().to(device)) for x in (queries, keys)), strict=True)
        token_boxes = _token_boxes(windows, digits, query_box, key_box)
        return Layout(places[0], inverses[0], places[1], inverses[1], mask, token_boxes)

    def made_without_modes() -> Layout:
        """In another thread, which has no dispatch modes: tensors of a fake or recording mode must not be kept."""
        with ThreadPoolExecutor(1) as thread:
            layout = thread.submit(made).result()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the thread has a stream of its own
        return layout

    return LAYOUTS.get(windows, device, made_without_modes if num_dispatch_modes() else made)


def _token_boxes(
    windows: Sequence[Window], digits: Sequence[int], query_box: Sequence[int], key_box: Sequence[int]
) -> tuple[int, ...]:
    """`Spec.token_boxes`, or (): TMA reads boxes of a two-dimensional grid, whole ones, 2 to 32 tokens wide."""
    fits = len(windows) == 2 and all(
        w.dilation == 1 and w.length % a == 0 and w.length % b == 0
        for w, a, b in zip(windows, query_box, key_box, strict=True)
    )
    slow, fast = digits if fits else (0, 0)
    if not fits or max(query_box[fast], key_box[fast]) > TILE // 4 or min(query_box[fast], key_box[fast]) < 2:
        return ()
    steps = windows[1].length, 1
    return windows[slow].length, windows[fast].length, steps[slow], steps[fast], query_box[fast], key_box[fast]


def _order(places: Sequence[Tensor], box: Sequence[int], digits: Sequence[int]) -> Tensor:
    """The tokens box by box. Boxes, and tokens in a box, are sorted by their coordinates along the axes `digits`, the
    first of them above all."""
    grid = torch.meshgrid(*places, indexing="ij")
    key = torch.zeros_like(grid[0])
    for part in ("box", "inside"):
        for n in digits:
            count = -(-len(places[n]) // box[n]) if part == "box" else box[n]
            key = key * count + (grid[n] // box[n] if part == "box" else grid[n] % box[n])
    return key.flatten().argsort(stable=True)


def boxes_of(windows: Sequence[Window]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens along each axis of a box of queries and of a box of keys, powers of two: the shapes of TILE tokens of
    which the fewest pairs see each other.

    >>> boxes_of([Window(128, 13, 1, False)] * 2), boxes_of([Window(32, 7, 1, False)] * 2)
    (((8, 16), (16, 8)), ((4, 32), (4, 32)))
    """
    sizes = [[1 << n for n in range(8) if 1 << n < 2 * window.length] for window in windows]
    most = max(prod(box) for box in product(*sizes) if prod(box) <= TILE)
    boxes = [box for box in product(*sizes) if prod(box) == most]
    seen = [
        {both: _visited(axis, *both) for both in product(found, found)}
        for axis, found in zip(map(_axis, windows), sizes, strict=True)
    ]

    def cost(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Any, ...]:
        visited = prod(axis[both] for axis, both in zip(seen, zip(*pair, strict=True), strict=True))
        return visited, max(*pair[0], *pair[1]), pair

    return min(product(boxes, boxes), key=cost)


def _visited(axis: Axis, queries: int, keys: int) -> int:
    """Pairs of ranges along one axis, of so many queries and keys, that see each other."""
    place, first, last = (x.tolist() for x in axis)
    ends: dict[int, tuple[int, int]] = {}
    for at, lo, hi in zip(place, first, last, strict=True):
        low, high = ends.get(at // queries, (lo, hi))
        ends[at // queries] = min(low, lo), max(high, hi)
    return sum(hi // keys - lo // keys + 1 for lo, hi in ends.values())


def _axis(window: Window) -> Axis:
    length, size, step, causal = window
    at = torch.arange(length, device="cpu")
    remainder, index = at % step, at // step
    count = (length - remainder + step - 1) // step  # tokens with this remainder
    counts = torch.tensor([0, *((length - r + step - 1) // step for r in range(step))], device="cpu")
    before = counts.cumsum(0)[remainder]  # tokens with smaller remainders
    if causal:
        first, last = (index - size + 1).clamp(min=0), index
    else:
        first = torch.minimum((index - size // 2).clamp(min=0), count - size)
        last = first + size - 1
    return Axis(before + index, before + first, before + last)


def _each(name: str, value: Any, axes: int, kind: type) -> tuple[Any, ...]:
    """The value of each axis."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
    fits = len(found) == axes and all(type(x) is kind for x in found) and (kind is bool or min(found) >= 1)
    if not fits:
        expected = "True or False" if kind is bool else "an int, at least 1"
        raise AttentionError(f"{name} of neighborhood", shown(value), f"{expected}, or one for each of {axes} axes")
    return found


def _checked_space(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not 4 <= x.dim() <= 6:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name} of neighborhood", found, "(batch, 1 to 3 axes of space, heads, dim)")
        if x.shape[:-2] != q.shape[:-2]:
            raise AttentionError(
                f"batch and space of {name} of neighborhood", tuple(x.shape[:-2]), f"q's {tuple(q.shape[:-2])}"
            )
    return tuple(q.shape[1:-2])
