"""What the host decides from shapes and options alone: the tile, rows (queries times the heads of a group) by keys; how
keys are divided among programs; whether sequences share prefixes. Imports no Triton.

TILEWISE_KV_TILE=MxNxWARPSxSTAGESxPROGRAMS[xPREFETCH[xREGISTERS[xSPLITS]]] overrides the tables, for measurements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import settings
from ....kv_formats import format_of, has_token_scales, head_dim, is_deepseek_fp8, is_latent, scale_groups
from ....kv_request import KvRequest
from ....mods.builtin import softcap
from ....request import Gpu, padded
from ..tiles import Arch

MIN_DIVIDED = 512  # keys of a work item that is divided, into splits of at least half as many
COUNTS, RECORD, ITEM = 4, 16, 8  # int64 numbers of the schedule's parts: see schedule.py
CLASSES = 16  # of work items: those that are divided, then from long to short
MAX_BATCH = 2048  # sequences that are divided into groups
# Found prefixes are shared from so many keys on, and if that saves so many bytes: what is read again comes from the L2
# cache in part, and two launches take longer than one (H200: 62 MB saved 0.94 of the speed, 126 MB 1.11).
MIN_SHARED = 256
MIN_SAVED = 96 << 20
MAX_SOFTCAP = 2.0**16  # larger ones are "large scores", whose partial results are not (out, lse)


class KvTile(NamedTuple):
    """`prefetch_pages`: page numbers are loaded one iteration before their keys, 1 or 0. `max_registers` of a thread; 0
    for no limit. `splits` of sequences of different lengths, for each program that runs at once."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    prefetch_pages: int = 1
    max_registers: int = 0
    splits: int = 2


INTERPRETER = KvTile(16, 16, 4, 1, 1)
INTERPRETED_PROCESSORS = 5


def tile_override() -> KvTile | None:
    """The tile that the environment variable TILEWISE_KV_TILE names, if it is set."""
    override = settings.kv_tile()
    return KvTile(*map(int, override.split("x"))) if override else None


def decode_tile(
    arch: Arch, itemsize: int, padded_dim: int, rows: int, quantised: str | None = None, one_query: bool = False
) -> KvTile:
    """The tile for sequences with at most so many rows (0 if unknown), of one query each or more. `quantised`: None if
    K and V are not; "groups" if K or V has more than two scales a token, "int4" if both are, "token" if scales are by
    token and numbers have 8 bits, "one" if K or V is a 16-bit float, "both" otherwise.

    >>> decode_tile(90, 2, 128, 4)
    KvTile(block_m=64, block_n=64, warps=4, stages=3, programs_per_sm=2, prefetch_pages=1, max_registers=0, splits=3)
    """
    override = tile_override()
    if override is not None:
        return override
    fits_16 = 0 < rows <= 16  # the smallest tile of tl.dot has 16 rows
    large = arch in (90, 100, 103)
    if quantised == "groups" and itemsize == 2:
        # the products of a pair of groups are tiles of their own: 64 rows, or 64 keys, spill registers in the loop
        return KvTile(16, 32, 4, 2, 2) if padded_dim <= 128 else KvTile(16, 16, 8, 1, 1)
    if quantised is not None and itemsize == 2:
        if arch == 90 and padded_dim == 128 and one_query and rows <= 8 and quantised != "one":
            return _eight_rows(quantised)
        return _quantised_tile(quantised, large, padded_dim, fits_16)
    if large:
        return _large_tile(itemsize, padded_dim, fits_16)
    return _small_tile(itemsize, padded_dim, fits_16)


def _large_tile(itemsize: int, dim: int, fits_16: bool) -> KvTile:
    """wgmma needs 64 rows; most of them are padding in decode, which is bound by memory."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 128 else KvTile(16, 16, 4, 1, 1)
    splits = 3 if fits_16 else 2  # lengths of a normal distribution: 270 us with 3, 278 with 2, 291 with 1 (H200)
    if dim <= 64:
        return KvTile(64, 128, 4, 3, 2, splits=splits)
    if dim <= 128:
        # 32 heads on 8, 4096 keys of 64: 254 us; 16x64x4x3x3x1x168 292 (but 23.9 instead of 25.0 for 8192 of one)
        return KvTile(64, 64, 4, 3, 2, splits=splits)
    if dim <= 256:
        return KvTile(64, 64, 8, 2, 1)
    return KvTile(16, 32, 8, 2, 1)


def _quantised_tile(kind: str, large: bool, dim: int, fits_16: bool) -> KvTile:
    """With 16 rows the matrix product takes both operands from registers, where numbers are unpacked. The operands of
    wgmma go back to shared memory first: one query of 32 heads on 8, 8192 keys of 128 in e4m3: 509 us with 16 rows, 982
    with 64 (H200)."""
    if dim <= 128 and fits_16 and large:
        # 3 programs on an SM take 509 us, 2 take 571; with scales by token 168 registers do not suffice
        programs, registers = (3, 168) if kind in ("both", "int4") else (2, 0)
        return KvTile(16, 128, 4, 2 if kind == "one" else 3, programs, max_registers=registers)
    if dim <= 128:
        return KvTile(16, 64, 4, 2, 2) if fits_16 else KvTile(64, 32, 4, 3 if large else 2, 2)
    if dim <= 256:
        return KvTile(16, 64, 4, 2, 2) if large else KvTile(16, 32, 4, 2, 1)
    return KvTile(16, 32, 4, 2, 1) if large else KvTile(16, 16, 4, 2, 1)


def _eight_rows(kind: str) -> KvTile:
    """Keys are the 16 rows of a matrix instruction, and queries its 8 columns: half the instructions of 16 rows."""
    if kind == "int4":
        return KvTile(8, 128, 2, 3, 4, max_registers=255)
    return KvTile(8, 128, 4, 3, 3, max_registers=168)


def _small_tile(itemsize: int, dim: int, fits_16: bool) -> KvTile:
    """For 100 KB of shared memory and matrix products with operands in registers."""
    if itemsize == 4:
        return KvTile(16, 32, 4, 2, 2) if dim <= 64 else KvTile(16, 16, 4, 1, 2)
    if dim <= 64:
        return KvTile(16 if fits_16 else 64, 64, 4, 3, 2)
    if dim <= 128:
        return KvTile(16 if fits_16 else 64, 64 if fits_16 else 32, 4, 2, 2)
    if dim <= 256:
        return KvTile(16 if fits_16 else 32, 32, 4, 2, 1)
    return KvTile(16, 16, 8, 1, 1)


def latent_tile(arch: Arch, itemsize: int, rows: int, portable: bool) -> KvTile:
    """The tile for sequences with at most so many rows (0 if unknown). `portable`: what the Hopper kernel does not
    read: a token table, DeepSeek's fp8 format with queries that are not bfloat16 or splits of a fixed size, or another
    quantised cache.

    >>> latent_tile(90, 2, 16, False)[:5], latent_tile(90, 2, 16, True)[:5]
    ((64, 64, 8, 2, 1), (16, 64, 8, 2, 1))
    """
    override = tile_override()
    if override is not None:
        return override
    if itemsize == 4:
        return KvTile(16, 16, 8, 1, 1)
    if arch != 90:
        return KvTile(16, 32, 8, 2, 1) if arch in (100, 103) else KvTile(16, 16, 8, 2, 1)
    # 16 heads, 32768 keys of 64 sequences: 561 us with 64 rows in the Hopper kernel, 904 with 16 in the portable one,
    # which read V a second time then (H200)
    return KvTile(16 if portable and 0 < rows <= 16 else 64, 64, 8, 2, 1)


class Partition(NamedTuple):
    """The sizes of a schedule and its workspace. A split has one program for each KV head."""

    tile: KvTile
    items: int  # work items
    tiles: int  # row tiles of a sequence, 0 if packed
    resident: int  # splits that run at once
    least: int  # work items; fewer are few
    wanted_splits: int  # that share the chunks of sequences of different lengths
    kv_heads: int
    chunk_size: int  # keys
    slots: int  # partial results of a split that continues a work item
    rows: int  # of a partial result
    item_cost: int  # of beginning a work item, in chunks
    min_chunks: int = 1  # a work item with more is divided, into splits of at least half as many
    most_splits: int = 0  # if they are known to be fewer than `items` and `wanted_splits` allow

    @property
    def num_splits(self) -> int:
        return self.most_splits or self.items + self.wanted_splits

    @property
    def programs(self) -> int:
        return self.num_splits * self.kv_heads

    @property
    def schedule_numel(self) -> int:
        counters = self.wanted_splits * self.kv_heads
        return COUNTS + RECORD * self.num_splits + counters + self.items + 1 + ITEM * self.items

    @property
    def whole_slots(self) -> int:
        """Splits that may have one partial result: those of divided work items; with splits of a fixed size all."""
        return self.num_splits if self.slots > 1 else min(self.num_splits, 2 * self.wanted_splits)

    @property
    def num_slots(self) -> int:
        return self.kv_heads * (self.whole_slots + self.wanted_splits * (self.slots - 1))

    def workspace_numel(self, dim_v: int) -> int:
        """Partial results with their lse (or m) and l, and a flag for each program."""
        return self.num_slots * self.rows * (dim_v + 2) + self.programs


def _quantised(request: Any) -> str | None:
    """How the caches are quantised, as `decode_tile` tells them apart."""
    found = [format_of(x) for x in (request.k, request.v)]
    if max(map(scale_groups, (request.k_scale, request.v_scale))) > 2:
        return "groups"
    if None in found:
        return None if found[0] is found[1] else "one"
    if max(x.bits for x in found if x is not None) == 4:
        return "int4"
    by_token = has_token_scales(request.k_scale) or has_token_scales(request.v_scale)
    return "token" if by_token else "both"


def blocks_of(scale: Any) -> int:
    """The parts of a head that the decode kernel reads one by one: each has at most two groups of dims."""
    return max(1, scale_groups(scale) // 2)


def columns_of(dim: int, scale: Any) -> int:
    """The columns, a power of two, in which a head dim is computed. A block of int4 has 64 or more."""
    blocks = blocks_of(scale)
    return padded(dim) if blocks == 1 else padded(blocks * max(64, padded(dim // blocks)))


def partition(request: Any, gpu: Gpu, num_sms: int, tile: KvTile | None = None) -> Partition:
    """The partition of a `KvRequest`, from shapes alone, on a GPU with so many multiprocessors."""
    q, k, v = request.q, request.k, request.v
    group = q.shape[-2] // k.shape[-2]
    max_rows = request.max_seqlen_q * group  # of a sequence; 0 if unknown
    if tile is None and is_latent(request):
        portable = format_of(k) is not None and not is_deepseek_fp8(k)
        portable = portable or (is_deepseek_fp8(k) and (q.dtype != torch.bfloat16 or request.split is not None))
        portable = portable or request.places.by_token
        tile = latent_tile(gpu.arch, q.element_size(), max_rows, portable)
    if tile is None:
        dim = max(columns_of(q.shape[-1], request.k_scale), columns_of(head_dim(v), request.v_scale))
        one_query = request.max_seqlen_q == 1
        tile = decode_tile(gpu.arch, q.element_size(), dim, max_rows, _quantised(request), one_query)
    if request.dense.cu_q is None:
        tiles = -(-q.shape[1] * group // tile.block_m)
        items = q.shape[0] * tiles
    else:
        tiles = 0
        items = q.shape[0] * group // tile.block_m + request.places.batch + 1
    rows = min(max_rows or tile.block_m, tile.block_m)  # in this order torch.compile guards "no more than block_m"
    chunk_size = request.split or tile.block_n
    slots = 1 if request.split is None else 1 + -(-request.places.capacity(k) // chunk_size)
    item_cost, min_chunks = (0, 1) if request.split else (1, max(1, MIN_DIVIDED // chunk_size))
    kv_heads = k.shape[-2]
    resident = max(1, num_sms * tile.programs_per_sm // kv_heads)
    quarters = 2 if tile.programs_per_sm > 1 and _quantised(request) is None else 3
    least = max(1, resident * quarters // 4)
    wanted_splits = resident * (1 if request.split else tile.splits)
    sizes = (resident, least, wanted_splits, kv_heads, chunk_size, slots, rows, item_cost, min_chunks)
    return Partition(tile, items, tiles, *sizes)


def bytes_of_key(request: KvRequest) -> int:
    """Bytes of a token in both caches."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in (request.dense.k, request.dense.v))


def shares_prefix(request: KvRequest) -> bool:
    """Whether the kernels read shared prefixes once. Not if rows that share keys have different scores or masks for
    them, nor if results must not depend on the batch."""
    dense, places, spec = request.dense, request.places, request.dense.spec
    if request.shared_prefix is None or places.table is None or places.by_token or is_latent(request):
        return False
    if places.starts is not None or spec.before is not None or spec.mask_mod is not None or spec.max_logit:
        return False
    if request.split is not None or not 1 < places.batch <= MAX_BATCH or not dense.q.numel():
        return False
    most = (places.batch - 1) * places.capacity(dense.k) * bytes_of_key(request)
    if not isinstance(request.shared_prefix, Tensor) and most < MIN_SAVED:
        return False
    scales = (request.k_scale, request.v_scale)
    if any(isinstance(x, Tensor) and x.dim() == 2 for x in scales):
        return False
    is_softcap = spec.score_mod == softcap(1.0).key and spec.score_numbers[0] <= MAX_SOFTCAP
    return spec.score_mod is None or is_softcap
