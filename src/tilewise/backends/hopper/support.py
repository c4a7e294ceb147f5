"""Which calls the Hopper kernels support, and how they are cut into tiles. Imports torch alone."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import settings
from ...kv_formats import is_deepseek_fp8, is_latent, shares_memory
from ...kv_request import MIN_PREFILL_QUERIES
from ...mods.expr import const
from ...mods.program import PROGRAMS, rows
from ...request import Gpu, Request, Spec, has_address, older_target, triton_version
from ..common.kv.partition import latent_tile
from ..common.tiles import FEW_QUERIES, MANY_KEYS
from .tile_table import BACKWARD, FORWARD, LISTED, BackwardTile, ForwardTile

GPU = Gpu("cuda", 90)
MAX_HEAD_DIM = 512  # of the forward
MAX_FP8_HEAD_DIM = 128  # O and the product that is added to it are both in registers
MAX_CACHE_HEAD_DIM = 256
MAX_LISTED_HEAD_DIM = 256  # with a block mask
MAX_TERMS_HEAD_DIM = 256  # of the backward with score terms
MIN_MASK_BLOCK = 128  # queries and keys of the smallest supported tile of a block mask
MIN_PAGE = 8  # tokens of the smallest supported page: the swizzle pattern of shared memory repeats every 8 rows
MAX_CACHE_TOKENS = 2**30
MLA_TILE = (64, 64)  # rows and keys of a tile with an MLA cache


def unsupported(request: Any, gpu: Gpu | None) -> str | None:
    """Returns why a call is not supported, or None. TMA needs strides and addresses of multiples of 16 bytes."""
    q, k, v = request.q, request.k, request.v
    if gpu is None or gpu.kind == "interpreter":
        return f"the tensors are on {q.device.type}"
    if gpu.kind != "cuda":
        return f"the GPU is a {gpu.arch}, not NVIDIA's"
    if gpu.capability != 90 and gpu == older_target():
        return f"{settings.TARGET}={gpu} asks for the code of an older GPU"
    if gpu.capability != 90:
        return f"the GPU has compute capability {gpu.capability / 10}, not 9.0"
    if q.is_cuda and triton_version() < (3, 6):
        return "no triton >= 3.6 installed"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype}; float16 and bfloat16 are supported"
    if q.numel() == 0 or k.numel() == 0:
        return "no queries or no keys"
    if isinstance(request, Request) and request.seed is not None and (found := unsupported_dropout(request)):
        return found
    if isinstance(request, Request) and request.blocks and (found := unsupported_block_mask(request)):
        return found
    spec = request.spec
    if any(key is not None and rows(key) for key in (spec.score_mod, spec.mask_mod)):
        return "a mod that sums over a row"  # whose loop would spill a thousand bytes of registers
    if getattr(request, "places", None) is not None and is_latent(request):
        return unsupported_latent(request)
    most = MAX_HEAD_DIM if isinstance(request, Request) else MAX_CACHE_HEAD_DIM
    if max(q.shape[-1], v.shape[-1]) > most:
        return f"head dim {max(q.shape[-1], v.shape[-1])}; at most {most} is supported"
    if v.shape[-1] % 8:
        return f"head dim {v.shape[-1]} of v; multiples of 8 are supported"
    if spec.precision is not None:
        return unsupported_fp8(request)
    for x in (q, k, v):
        *outer, inner = x.stride()
        if inner != 1 or any(stride % 8 or stride == 0 for stride in outer) or not is_aligned(x):
            return "strides that are not multiples of 16 bytes, or a last dim that is not contiguous"
    return None if isinstance(request, Request) else unsupported_cache(request)


def unsupported_latent(request: Any) -> str | None:
    """Returns why a call with an MLA cache is not supported, or None."""
    q, k, v, spec, places = request.q, request.k, request.v, request.spec, request.places
    packed = is_deepseek_fp8(k) and q.dtype == torch.bfloat16
    if not packed and (k.dtype != q.dtype or v.dtype != q.dtype):
        return f"a cache of {k.dtype} and {v.dtype}; q's {q.dtype} is supported"
    if has_address(k) and not packed and not shares_memory(k, v):
        return "v that is not the first columns of k"
    if places.by_token or places.starts is not None or request.tree is not None or request.split is not None:
        return "token_table=, starts=, tree= or split="
    if spec.score_mod is not None or spec.mask_mod is not None or spec.before is not None or spec.max_logit:
        return "a mod, window= or return_max_logit="
    if spec.scale <= 0:
        return f"scale={spec.scale}; positive numbers are supported"
    tile = latent_tile(90, q.element_size(), request.max_seqlen_q * (q.shape[-2] // k.shape[-2]), False)
    if tile[:2] != MLA_TILE:
        return f"a tile of {tile.block_m} rows (queries times heads) by {tile.block_n} keys; {MLA_TILE} is supported"
    if packed:
        return None
    if places.table is not None and k.shape[1] % MIN_PAGE:
        return f"pages of {k.shape[1]} tokens; multiples of {MIN_PAGE} are supported"
    *outer, inner = k.stride()
    if inner != 1 or any(stride % 8 or stride == 0 for stride in outer) or not is_aligned(k):
        return "strides that are not multiples of 16 bytes, or a last dim that is not contiguous"
    if k.shape[0] > 1 and (k.stride(0) % k.stride(1) or k.stride(0) // k.stride(1) * k.shape[0] > MAX_CACHE_TOKENS):
        return "pages that are not a whole number of tokens apart, or too far"
    return None


def unsupported_fp8(request: Request) -> str | None:
    """Returns why a call with precision="fp8" is not supported, or None. The quantising pass reads any strides."""
    d, dv = request.q.shape[-1], request.v.shape[-1]
    if max(d, dv) > MAX_FP8_HEAD_DIM:
        return f"head dim {max(d, dv)} with precision='fp8'; at most {MAX_FP8_HEAD_DIM} is supported"
    if request.blocks:
        return "a block mask with precision='fp8'"
    if (
        request.spec.max_logit and request.is_masked
    ):  # the maximum that the kernel keeps may be lower than the largest score
        return "return_max_logit= with precision='fp8' where keys are hidden"
    return None


def unsupported_dropout(request: Request) -> str | None:
    """Why dropout is not supported, or None. A hash serves four pairs of a tile, whose positions must be multiples of
    16; the backward stores in the sign of P which weights are dropped."""
    spec, dim = request.spec, max(request.q.shape[-1], request.v.shape[-1])
    if dim > MAX_TERMS_HEAD_DIM:
        return f"dropout with head dim {dim}; at most {MAX_TERMS_HEAD_DIM} is supported"
    if spec.precision is not None:
        return "dropout with precision='fp8'"
    if request.position_offsets is not None:
        return "dropout of a part of a larger call"
    if spec.score_mod is not None and PROGRAMS[spec.score_mod].derivative is not const(1.0):
        return "dropout with a score mod whose derivative is not 1"
    return None


def unsupported_block_mask(request: Request) -> str | None:
    """Returns why a block mask is not supported, or None."""
    if (dim := max(request.q.shape[-1], request.v.shape[-1])) > MAX_LISTED_HEAD_DIM:
        return f"a block mask with head dim {dim}; at most {MAX_LISTED_HEAD_DIM} is supported"
    block = request.spec.mask_block[:2]
    if any(x < MIN_MASK_BLOCK or x & (x - 1) for x in block):
        return (
            f"a block mask with tiles of {block[0]} x {block[1]}; powers of two from {MIN_MASK_BLOCK} on are supported"
        )
    return None


def unsupported_cache(request: Any) -> str | None:
    """Returns why a call with a KV cache is not supported, or None. An append has no places; common kernels compute
    it."""
    places = getattr(request, "places", None)
    if places is None:
        return None
    if places.by_token:
        return f"token_table= with head dim {request.q.shape[-1]}; more than {MAX_CACHE_HEAD_DIM} (MLA) are supported"
    if any(x.dtype != request.q.dtype for x in (request.k, request.v)):
        return f"a cache of {request.k.dtype} and {request.v.dtype}; q's {request.q.dtype} is supported"
    if request.tree is not None or request.split is not None:
        return "tree=" if request.tree is not None else "split="
    if places.starts is not None or places.indptr is not None:
        return "starts=" if places.starts is not None else "page_table=(indptr, pages)"
    page = request.k.shape[1]
    if places.table is not None and page % MIN_PAGE:
        return f"pages of {page} tokens; multiples of {MIN_PAGE} are supported"
    for x in (request.k, request.v):
        if x.shape[0] > 1 and (x.stride(0) % x.stride(1) or x.stride(0) // x.stride(1) * x.shape[0] > MAX_CACHE_TOKENS):
            return "pages that are not a whole number of tokens apart, or too far"
    return None


def declines(request: Any, gpu: Gpu | None) -> str | None:
    """Returns why "auto" should choose another backend, or None: a call that is bound by memory, as in decoding."""
    q, k = request.q, request.k
    if not isinstance(request, Request):
        places = getattr(request, "places", None)
        if places is None:
            return "append only, which is bound by memory"
        if is_latent(request):
            return None
        most = request.max_seqlen_q or q.shape[0] // max(places.batch, 1)  # unknown: the average
        return "few queries, which are bound by memory" if most < MIN_PREFILL_QUERIES else None
    if q.dim() == 4 and q.shape[1] <= FEW_QUERIES and k.shape[1] >= MANY_KEYS:
        return "few queries, whose keys the portable kernels divide among programs"
    return None


def has_backward(request: Request) -> bool:
    """Whether the Hopper backward supports a call; otherwise the portable one computes it."""
    d, dv = request.q.shape[-1], request.v.shape[-1]
    return supports_backward(d, dv) and (max(d, dv) <= MAX_TERMS_HEAD_DIM or request.is_plain)


def supports_backward(d: int, dv: int) -> bool:
    """Whether the Hopper backward supports these head dims."""
    return max(d, dv) <= MAX_HEAD_DIM and d % 8 == 0


def is_uneven(spec: Spec) -> bool:
    """Whether some queries may see many more keys than others."""
    return spec.after is not None or bool(spec.mask_block)


def is_aligned(x: Tensor) -> bool:
    """Whether the address, or for a tensor without one the offset in its storage, is a multiple of 16 bytes."""
    return (x.data_ptr() if has_address(x) else x.storage_offset() * x.element_size()) % 16 == 0


def forward_tile(
    d: int,
    dv: int,
    *,
    banded: bool,
    keys: int | None,
    window: int | None = None,
    plain: bool = True,
    listed: bool = False,
) -> ForwardTile:
    """The tile of the Hopper forward; `banded`: causal or with a block mask; `keys`: the number of keys of a sequence
    (packed: the mean; None: not known, taken as many); `plain`: no score terms and no mask mod; `listed`: no score
    terms and a block mask. A window counts as the causal call in which a query sees as many keys on average: that of
    twice its size.

    >>> tile = forward_tile(128, 128, banded=True, keys=4096)
    >>> tile.block_n, tile.warpgroups, tile.ping_pong
    (128, 2, True)
    """
    if listed and max(d, dv) <= 64:
        return LISTED
    most_keys = min(sys.maxsize if keys is None else keys, sys.maxsize if window is None else 2 * window)
    return next(
        row
        for most_d, most_dv, most, only_banded, only_plain, row in FORWARD
        if d <= most_d
        and dv <= most_dv
        and (most is None or most_keys <= most)
        and (banded or not only_banded)
        and (plain or not only_plain)
        and (keys is not None or row.programs == 1)  # pages take more registers of the producer
    )


def window_size(before: int | None, after: int | None) -> int | None:
    """The number of keys in a window, None if it is not bounded on both sides."""
    return None if before is None or after is None else before + after + 1


def backward_tile(d: int, dv: int, *, plain: bool, deterministic: bool) -> BackwardTile:
    """The tile of the Hopper backward; `plain`: without score terms.

    >>> backward_tile(128, 128, plain=True, deterministic=False)
    BackwardTile(block_m=64, block_n=128, dq_by_tma=True)
    """
    return next(
        row
        for most_d, most_dv, only_fast, row in BACKWARD
        if d <= most_d and dv <= most_dv and ((plain and not deterministic) or not only_fast)
    )


def widths(d: int) -> tuple[int, ...]:
    """Head dim d as one power of two, or as two if they add up to less.

    >>> widths(64), widths(80), widths(192), widths(200)
    ((64,), (64, 16), (128, 64), (256,))
    """
    half = 32
    while 2 * half < d:
        half *= 2
    rest = 16
    while rest < d - half:
        rest *= 2
    return (2 * half,) if half == 32 or rest >= half else (half, rest)


def backward_widths(d: int) -> tuple[int, ...]:
    """`widths` for the backward: above 128 the second part is halved between two warpgroups.

    >>> backward_widths(80), backward_widths(136), backward_widths(192)
    ((64, 16), (128, 32), (128, 64))
    """
    first, *rest = widths(d)
    return (first, *(max(x, 32) for x in rest)) if d > 128 else (first, *rest)


def rows_together(rows: int, least: int) -> int:
    """How many rows of tiles are scheduled together: from `least` to twice as many, so that the last group is as full
    as possible. The longest tiles of a small last group would start when the others are nearly done (D 192, 16 heads of
    4096 tokens, forward: 0.73 of FlashAttention-3 with groups of 5 rows, 0.95 with groups of 8).

    >>> rows_together(16, 5), rows_together(64, 10), rows_together(3, 8)
    (8, 16, 3)
    """
    least = max(least, 1)
    if rows <= least:
        return rows
    return max(range(least, min(2 * least, rows) + 1), key=lambda n: (((rows - 1) % n + 1) / n, -n))


class RowGroups(NamedTuple):
    """Rows of tiles that are scheduled together: `size` each of the first `grouped` rows, and all others at the end."""

    size: int
    grouped: int

    def sizes(self, rows: int) -> list[int]:
        """The rows of each group."""
        return [*[self.size] * (self.grouped // self.size), rows - self.grouped]


def row_groups(rows: int, size: int, last: int) -> RowGroups:
    """Groups of `size` rows; the last has `last` rows at least, if there are so many.

    >>> row_groups(100, 8, 0), row_groups(100, 8, 10)
    (RowGroups(size=8, grouped=88), RowGroups(size=8, grouped=88))
    >>> row_groups(10, 4, 10).sizes(10)
    [10]
    """
    size = max(1, min(size, rows))
    return RowGroups(size, max(0, rows - max(last, size)) // size * size)
