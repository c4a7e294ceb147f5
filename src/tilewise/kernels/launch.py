"""From tensors to launches: views, grids and compile-time choices of the portable kernels."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import config
from ..spec import MAX_HEAD_DIM, NO_TERMS, AttentionError, Spec, Terms
from .backward import key_kernel, prepare_kernel, query_kernel
from .forward import forward_kernel
from .tile import PAD, View

INTERPRETED = triton.knobs.runtime.interpret


class Launch(NamedTuple):
    """A kernel, its grid, its arguments and its compile-time options: launched here, compiled offline by the tests."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](*self.args, **self.options)


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


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, capability: int,
) -> Launch:  # fmt: skip
    size = problem(q, k, v, cu_q)
    tile = _tile("forward", q, size, capability)
    tiles = size.tiles(size.n_q, tile.block_m)
    return Launch(
        forward_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (
            *(_view(x) for x in (q, k, v, out)), _row_view(lse), cu_q, cu_k, size.n_q, size.n_k,
            spec.before, spec.after, spec.scale, tiles, size.heads, size.batch,
        ),
        _options(size, spec, tile, q) | {"EVEN": _even(size, size.n_k, tile.block_n)},
    )  # fmt: skip


def backward_launches(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, capability: int,
) -> list[Launch]:  # fmt: skip
    size = problem(q, k, v, cu_q)
    pad = PAD.value
    padded = size.tiles(size.n_q, pad)
    statistics = q.new_empty((2, 1 if size.packed else size.batch, size.heads, padded * pad), dtype=torch.float32)
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    prepare = Launch(
        prepare_kernel,
        size.programs(size.n_q, size.heads, pad),
        (
            _view(out), _view(dout), _row_view(lse), None if dlse is None else _row_view(dlse), lse2, delta,
            cu_q, cu_k, size.n_q, size.n_k, padded, size.heads, size.batch,
        ),
        {"DV": size.dv, "BLOCK_M": pad, "BLOCK_DV": _padded(size.dv), "num_warps": 8 if size.dv > 128 else 4},
    )  # fmt: skip
    shared = *(_view(x) for x in (q, k, v, dout)), lse2, delta
    scalars = cu_q, cu_k, size.n_q, size.n_k, spec.before, spec.after, spec.scale
    tile = _tile("query", q, size, capability)
    query = Launch(
        query_kernel,
        size.programs(size.n_q, size.heads, tile.block_m),
        (*shared, _view(dq), *scalars, size.tiles(size.n_q, tile.block_m), size.heads, size.batch),
        _options(size, spec, tile, q) | {"EVEN": _even(size, size.n_k, tile.block_n)},
    )
    tile = _tile("key", q, size, capability)
    key = Launch(
        key_kernel,
        size.programs(size.n_k, size.kv_heads, tile.block_n),
        (*shared, _view(dk), _view(dv), *scalars, size.tiles(size.n_k, tile.block_n), size.kv_heads, size.batch),
        _options(size, spec, tile, q) | {"EVEN": _even(size, size.n_q, tile.block_m)},
    )
    return [prepare, key, query]


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS
) -> tuple[Tensor, Tensor]:
    if not terms.is_empty(spec):
        raise AttentionError("backend='triton'", "a term beside q, k, v and the band", "backend='reference'")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    with _on(q):
        forward_launch(q, k, v, out, lse, cu_q, cu_k, spec, _capability(q))()
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    with _on(q):
        for launch in backward_launches(dout, dlse, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, spec, _capability(q)):
            launch()
    return dq, dk, dv


def _view(x: Tensor) -> View:
    """(batch, token, head, dim) strides; packed sequences have one batch row."""
    strides = x.stride() if x.dim() == 4 else (0, *x.stride())
    return View(x, strides, 1 if (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31 else None)


def _row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def _padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def _tile(which: str, q: Tensor, size: Problem, capability: int) -> config.Tile:
    if INTERPRETED:
        return config.INTERPRETER
    return config.tile(which, capability, q.element_size(), _padded(max(size.d, size.dv)))


def _even(size: Problem, n: int, block: int) -> bool:
    return not size.packed and n % block == 0


def _options(size: Problem, spec: Spec, tile: config.Tile, q: Tensor) -> dict[str, Any]:
    return {
        "GROUP": size.heads // size.kv_heads,
        "D": size.d,
        "DV": size.dv,
        "BLOCK_D": _padded(size.d),
        "BLOCK_DV": _padded(size.dv),
        "FOLD": spec.scale > 0,
        "PRECISION": "tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        **tile.options(),
    }


def _capability(q: Tensor) -> int:
    if not q.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(q.device)
    return major * 10 + minor


def _on(q: Tensor) -> Any:
    return torch.cuda.device(q.device) if q.is_cuda else _Nowhere()


class _Nowhere:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
