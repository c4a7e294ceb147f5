"""In what order the Hopper backward computes tiles of keys, and how many programs compute one.

A program computes dK and dV of a tile of keys of a KV head, and visits all queries that see it. With few keys and KV
heads there are fewer tiles than SMs, and under a causal mask the longest still run when the others are done. Such tiles
are split: several programs compute one, each for a share of the query heads of the group or, where these are too few,
of their blocks. Each writes a float32 part of dK and dV, and the postprocess kernel adds the parts.
"""

from functools import lru_cache
from heapq import heapreplace
from itertools import repeat
from math import ceil, log2
from typing import NamedTuple

from ...request import LIMIT, Request, Spec, padded
from ..common.kernel_call import CallShape, call_shape
from .mask_words import uses_words_by_key, without_mask_mod
from .support import RowGroups, backward_tile, backward_widths, is_uneven, row_groups, rows_together
from .tile_table import BackwardTile

# Of Q, dO and dQ of one query head of each row that are scheduled together. Of the best peer, causal, with 16 and with
# 64 MB: D 128 32 x 512 1.04 0.88, 32 x 1024 1.02 0.91, 4 x 4096 1.09 1.03; 192 by 128 32 x 512 0.99 0.76.
L2_BYTES = 16 << 20
# The rows of the last group have so many tiles for each SM: the longest tiles of a small one would start when all
# others are nearly done. 4 tiles for packed sequences: six calls have 0.87 to 1.04 of FlashAttention-3 with, 0.78 to
# 1.04 without. 2 tiles for rows of LONG_ROW to L2_BYTES: nine calls take 2 to 7 % less time; two of longer rows took 2
# and 8 % more. Not for others: with more rows together tiles that share queries run at different times (128/8 heads,
# 32 x 1024: 0.93 with 4, 1.01 without).
PACKED_TILES, LONG_TILES = 4, 2
LONG_ROW = 4 << 20
# The estimate of the time, in clock cycles of an SM, fitted to 53 calls on an H200 with and without a split: within
# 10 % of the measured time, except for calls that leave most SMs idle (23 % too long)
FLOPS = 2900.0  # of the five products: 0.7 of the tensor cores' peak
WIDE_FLOPS = 2100.0  # the same for head dims above 128; in two passes within 12 % of 9 measured calls
BYTES = 19.0  # of memory traffic: the share of one SM
TILE_CYCLES = 4400.0  # the first scores and the last dQ of a tile, which nothing overlaps
PART_BYTES = 5.8  # of a value of a part: 4, which programs write at the same time
SPLIT_CYCLES = 1800.0  # of a split, beside the parts' memory
L2_IN_USE = 56 << 20  # L2 holds so many bytes of Q, dO and dQ; a working set of twice the size adds L2_MISS to the time
L2_MISS = 0.1
GAIN = 0.96  # a split that is estimated to take more of the time than this is not worth its memory
ALIKE = 1.02  # of splits whose times are estimated within this factor, the one with the fewest parts is used
MOST_TILES = 16384  # of a split, because the estimate goes through all of them: 10 ms
MOST_ROUNDS = 16  # tiles per SM, with which all SMs are busy nearly to the end; bounds the parts to 300 MB


MAX_SUMMED = 256  # the largest head dim whose dQ is summed in global memory


class Split(NamedTuple):
    """heads * queries programs compute a tile of keys: each visits 1 / `heads` of the group's query heads, and every
    `queries`-th of their blocks."""

    heads: int = 1
    queries: int = 1

    @property
    def parts(self) -> int:
        return self.heads * self.queries


class Schedule(NamedTuple):
    """`rows` (batch, head, part) triples of `tiles_per_row` tiles each, scheduled in `groups`. The tiles of the first
    `ascending_rows` visit their queries in ascending order."""

    tiles_per_row: int
    rows: int
    groups: RowGroups
    ascending_rows: int


class Widths(NamedTuple):
    """Columns of the tiles of Q and K (`d`), and of V and dO (`dv`), each as one or two powers of two. dV is stored
    through memory made for dQ: it has no more columns."""

    d: tuple[int, ...]
    dv: tuple[int, ...]

    @property
    def columns(self) -> tuple[int, int]:
        return sum(self.d), sum(self.dv)


def column_widths(size: CallShape) -> Widths:
    """The columns of a call's tiles: head dims from 65 to 96 and from 129 to 192 as two powers of two; none above 256,
    where nothing is summed in global memory (`backward_rows`)."""
    d = max(size.d, size.dv)
    if d > MAX_SUMMED:
        return Widths((), ())
    return Widths(backward_widths(d), backward_widths(size.dv) if (d > 128) == (size.dv > 128) else padded_dv(size.dv))


def padded_widths(size: CallShape) -> Widths:
    """One power of two each."""
    d = padded(max(size.d, size.dv), 64)
    return Widths((d,), padded_dv(size.dv) if d > 128 else (padded(size.dv, 64),))


def padded_dv(dv: int) -> tuple[int, ...]:
    """In the wide kernel each of two warpgroups has a multiple of 64 columns."""
    return (max(padded(dv, 64), 128),)


def tile_schedule(size: CallShape, spec: Spec, parts: int, block_n: int, num_sms: int) -> Schedule:
    """The order of the tiles of a call, each of them split into `parts`."""
    tiles_per_row = size.tiles(size.n_k, block_n)
    rows = parts * size.kv_heads * (1 if size.packed else size.batch)
    # One query head of each row, not the group: with fewer rows together the longest tiles of the last come too late
    # (32/8 heads, 4 x 4096: 2832 us against 2540; 64/8, D 64, 2 x 8192: 5575 against 5292; 32/8, 16384: the same).
    row_bytes = size.n_q * (size.d * 6 + size.dv * 2)
    rows_in_l2 = max(1, L2_BYTES // row_bytes if is_uneven(spec) else 1)
    if spec.deterministic:
        # So that few programs wait for one another's sums; a power of two, as the number of heads mostly is.
        rows_in_l2 = max(rows_in_l2, 1 << (num_sms // tiles_per_row).bit_length())
        whole = rows // rows_in_l2 * rows_in_l2
        return Schedule(tiles_per_row, rows, RowGroups(rows_in_l2, whole), max(0, whole - rows_in_l2))
    if not is_uneven(spec):
        return Schedule(tiles_per_row, rows, RowGroups(1, rows), 0)
    if size.heads > size.kv_heads and not size.packed:  # 96/8 heads, 16 x 1519: 16 rows are 4 % faster than 10
        rows_in_l2 = rows_together(rows, rows_in_l2)
    last = PACKED_TILES if size.packed else LONG_TILES if LONG_ROW < row_bytes < L2_BYTES else 0
    return Schedule(tiles_per_row, rows, row_groups(rows, rows_in_l2, ceil(last * num_sms / tiles_per_row)), 0)


def choose_split(request: Request, num_sms: int) -> Split | None:
    """How tiles of keys are split; None where one program computes a tile and rounds its dK and dV. Float32 gradients
    (`spec.partial`) are always stored as parts, be it one."""
    size, spec = call_shape(request), request.spec
    if not column_widths(size).d:
        return None
    if request.blocks and spec.mask_block[3] > 1 and size.heads > size.kv_heads:
        return Split(size.heads // size.kv_heads)  # every query head has lists of its own
    plain = request.is_plain or (uses_words_by_key(request) and without_mask_mod(request).is_plain)
    tile = backward_tile(*column_widths(size).columns, plain=plain, deterministic=spec.deterministic)
    split = _fastest_split(size, spec, tile, num_sms)
    return split if spec.partial or split.parts > 1 else None


@lru_cache(LIMIT)
def _fastest_split(size: CallShape, spec: Spec, tile: BackwardTile, num_sms: int) -> Split:
    splits = possible_splits(size, tile.block_n, num_sms)
    if len(splits) == 1:
        return Split()
    whole, *others = (estimated_cycles(size, spec, tile, split, num_sms) for split in splits)
    best = min(others)
    if best >= GAIN * whole:
        return Split()
    return next(split for split, cycles in zip(splits[1:], others, strict=True) if cycles <= ALIKE * best)


def possible_splits(size: CallShape, block_n: int, num_sms: int) -> list[Split]:
    """For each number of parts the split with the most shares of query heads; the first is none. Splits into more tiles
    than the SMs need are left out, unless they divide query heads and their parts are no larger than the sums of dQ:
    with fewer heads for each tile, tiles that run at once share more of Q, dO and dQ in L2. (us of 1, 2, 4, 6 or 8, 12
    or 16 parts: D 192, 96/8 heads, 8 x 3573: 28312, 26023, 24259, 24059, 25515; D 128, 128/8 heads, 4 x 4096: 11925,
    10738, 9908, 10209, 10700.)"""
    group, tiles = size.heads // size.kv_heads, size.programs(size.n_k, size.kv_heads, block_n)
    most = max(1, MOST_ROUNDS * num_sms // tiles)
    dq_size = size.programs(size.n_q, size.heads, 1) * size.d
    part_size = size.programs(size.n_k, size.kv_heads, 1) * (size.d + size.dv)
    most_heads = max(most, min(dq_size // part_size, MOST_TILES // tiles))
    heads = [n for n in range(1, group + 1) if group % n == 0]
    splits = [Split(n) for n in heads if n <= most_heads]
    splits += [Split(n, queries) for queries in (2, 4, 8) for n in heads if n * queries <= most]
    found: dict[int, Split] = {}
    for split in splits:
        found.setdefault(split.parts, split)
    return [found[parts] for parts in sorted(found)]


def estimated_cycles(size: CallShape, spec: Spec, tile: BackwardTile, split: Split, num_sms: int) -> float:
    """The time of the backward and of adding the parts: each SM takes the next tile of the schedule when it is done
    with one. Of packed sequences the lengths are not known: see `sequence_lengths`."""
    d, dv = column_widths(size).columns
    has_parts = spec.partial or split.parts > 1
    heads = size.heads // size.kv_heads // split.heads
    blocks = blocks_of_tiles(size, spec, tile)
    schedule = tile_schedule(size, spec, split.parts, tile.block_n, num_sms)
    rows_at_once = min(schedule.rows * num_sequences(size), max(1.0, num_sms * num_sequences(size) / len(blocks)))
    in_use = bytes_in_use(size, spec, heads, rows_at_once)
    products = 2 * tile.block_m * tile.block_n * (3 * d + 2 * dv) / (FLOPS if d <= 128 else WIDE_FLOPS)
    products *= 1 + L2_MISS * max(0.0, log2(in_use / L2_IN_USE))
    fixed = TILE_CYCLES + tile.block_n * (d + dv) * (PART_BYTES if has_parts else 2) / BYTES
    cycles = [ceil(n / split.queries) * heads * products + fixed for n in blocks]
    busy = [0.0] * num_sms
    for rows in schedule.groups.sizes(schedule.rows):
        for tile_cycles in cycles:
            for _ in repeat(None, rows):
                heapreplace(busy, busy[0] + tile_cycles)
    parts_bytes = size.programs(size.n_k, size.kv_heads, 1) * split.parts * (d + dv) * 4
    return max(busy) + has_parts * (SPLIT_CYCLES + parts_bytes / BYTES / num_sms)


def bytes_in_use(size: CallShape, spec: Spec, heads: int, rows_at_once: float) -> float:
    """Of Q, dO and dQ that the tiles visit which are computed at once. With tiles of different lengths, as under a
    causal mask, these are at different query heads of the `heads` that each visits."""
    is_triangle = (spec.before is None) != (spec.after is None)
    queries = size.n_q / num_sequences(size) * (heads if is_triangle else 1)
    return rows_at_once * queries * (size.d * 6 + size.dv * 2)


def num_sequences(size: CallShape) -> int:
    """Of a row of tiles."""
    return size.batch if size.packed else 1


def sequence_lengths(tokens: int, sequences: int) -> list[int]:
    """The lengths that packed sequences are assumed to have: from 0 to twice the mean, at equal distances. With equal
    ones the longest tiles of a real batch, which run at the end, would not be split.

    >>> sequence_lengths(1024, 4)
    [64, 192, 320, 448]
    """
    return [tokens * (n + 1) ** 2 // sequences**2 - tokens * n**2 // sequences**2 for n in range(sequences)]


def blocks_of_tiles(size: CallShape, spec: Spec, tile: BackwardTile) -> list[int]:
    """The blocks of queries of one head that see each tile of keys of a row."""
    lengths = (sequence_lengths(n, num_sequences(size)) for n in (size.n_q, size.n_k))
    found = []
    for n_q, n_k in zip(*lengths, strict=True):
        for first in range(n_q - n_k, n_q, tile.block_n):
            lo = 0 if spec.after is None else max(first - spec.after, 0)
            hi = n_q if spec.before is None else min(first + tile.block_n + spec.before, n_q)
            found.append(max(-(-hi // tile.block_m) - lo // tile.block_m, 0))
    return found
