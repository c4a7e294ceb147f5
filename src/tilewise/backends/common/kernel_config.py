"""The compile-time choices of the portable kernels: tile, KernelConfig, and whether they set flags."""

from typing import Any

import torch
from torch import Tensor

from ...request import Gpu, Request, padded
from . import tiles
from .device.structs import KernelConfig
from .kernel_call import CallShape, call_shape
from .launch import INTERPRETED
from .repair import LINE
from .score_terms import lists_tiles
from .tiles import Tile

SMALLEST = 16  # the fewest rows of a tile


def tile_of(which: str, itemsize: int, size: CallShape, gpu: Gpu, *terms: str | None) -> Tile:
    if INTERPRETED:
        return tiles.INTERPRETER
    return tiles.tile(which, gpu.arch, itemsize, padded(max(size.d, size.dv)), *terms)


def forward_tile(itemsize: int, size: CallShape, gpu: Gpu, term: str | None, shares: bool) -> tuple[Tile, int]:
    """The tile, and how many query heads share one (1 unless `shares`)."""
    tile = tile_of("forward", itemsize, size, gpu, term)
    queries = -(-size.n_q // max(size.batch, 1)) if size.packed else size.n_q  # an average
    heads = tiles.heads_of_a_tile(queries, size.heads // size.kv_heads, tile.block_m) if shares else 1
    return tile_of("forward", itemsize, size, gpu, "groups", term) if heads > 1 else tile, heads


def costly_term(request: Request, gpu: Gpu) -> str | None:
    """The score term that has tiles of its own in the tables, if the request has one."""
    if request.blocks and lists_tiles(gpu):
        return "blocks"
    return None if request.bias is None else "bias"


def shares_tiles(request: Request) -> bool:
    """Whether several heads may share a tile of queries: not with a block mask, whose lists are per head."""
    return not request.blocks


def launch_options(request: Request, tile: Tile, gpu: Gpu, **more: Any) -> dict[str, Any]:
    """The options of a launch: its KernelConfig, and the other options."""
    size = call_shape(request)
    options = {
        "GROUP": size.heads // size.kv_heads,
        "D": size.d,
        "DV": size.dv,
        "BLOCK_D": padded(size.d),
        "BLOCK_DV": padded(size.dv),
        "FOLD": request.spec.is_linear(request.bias is not None),
        "PRECISION": precision(request.q, gpu),
        "PACKED": size.packed,
        **tile.options(),
        **more,
    }
    config = KernelConfig(**{name: x for name, x in options.items() if name in KernelConfig._fields})
    return {name: x for name, x in options.items() if name not in KernelConfig._fields} | {"CONFIG": config}


def precision(q: Tensor, gpu: Gpu) -> str:
    """The precision of tl.dot. A float32 product is three TF32 products, together as exact as float32, or one if torch
    allows TF32. AMD's matrix units multiply float32."""
    if q.dtype != torch.float32 or gpu.kind == "hip":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def is_even(size: CallShape, n: int, block: int) -> bool:
    return not size.packed and n % block == 0


def is_hiding(request: Request) -> bool:
    """Whether a compiled kernel may have to hide a key from a query."""
    spec = request.spec
    if spec.before is not None or spec.mask_mod is not None:
        return True
    return spec.after is not None and (request.cu_q is not None or request.q.shape[-3] > 1)


def flag_count(request: Request, splits: int = 1, both: bool = False) -> int:
    """The number of int32 flags of the NaN repair pass: one for each tile of queries and, for `both` sides, also of
    keys and of values. 0 if no mask hides a key."""
    if not is_hiding(request):
        return 0
    size = call_shape(request)
    count = splits * size.programs(size.n_q, size.heads, SMALLEST)
    if both:
        count += 2 * size.programs(size.n_k, size.kv_heads, SMALLEST) + 2 * LINE.value
    return max(count, 1)
