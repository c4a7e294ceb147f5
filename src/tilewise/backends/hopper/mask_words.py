"""The partial tiles of a block mask as bits, evaluated once for all heads before the forward, and before the backward.

A row of 128 keys is four words of 32 bits: bit 2 i + e of word l tells whether key 8 i + 2 l + e is visible. These are
the keys that lane l of a row holds in the accumulator of a wgmma, in the order of its registers. Causal and window are
part of the bits. A block then costs two loads, issued before its scores are waited for, and a select for each score,
whatever the mask mod computes. The backward computes S^T: there a row is a key, and its bits are those of queries.

The forward also learns which 64 queries see nothing of a tile: a warpgroup leaves out such tiles at both ends of a
list.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import Request
from ..common.device.mask import visible
from ..common.device.structs import ANY_SIZE, Pairs, ScoreParams, Sequences, Terms, Work
from ..common.device.tile_range import packed_tile
from ..common.kernel_call import sequences_and_window
from ..common.launch import Launch, Memory
from ..common.score_terms import device_terms, mask_mod
from .gluon_compat import gl, gluon, load_row_words
from .pipeline import block_range
from .support import GPU

TILE: tl.constexpr = tl.constexpr(128)  # keys of a row of words
ROWS: tl.constexpr = tl.constexpr(32)  # queries of a program, one warp: a lane then has four keys, and loads are few
WARPGROUP_ROWS: tl.constexpr = tl.constexpr(64)
WORDS: tl.constexpr = tl.constexpr(4)  # of a row of TILE keys
MAX_WORDS = 1 << 24  # 64 MB; the forward evaluates the mod of longer lists itself
ENDS: tl.constexpr = tl.constexpr(32)  # tiles at an end of a list that a warpgroup may leave out
LISTS = 4  # tensors of a block mask before its words
MIN_SHARING = 4  # (batch, head) rows that share a list, below which the forward evaluates the mod itself


class KeyBlock(NamedTuple):
    """A block of keys of a consumer. `start`: its first key; `may_be_partial`: whether the mask mod may hide pairs of
    it. If so, and if the mask mod was evaluated ahead: `mask_words`, the bits of visible pairs, and `shift`, how many
    bits of a word belong to keys before the block."""

    start: tl.tensor
    may_be_partial: tl.tensor
    mask_words: tl.tensor
    shift: tl.tensor


@triton.jit
def list_row(entry, offsets, rows):
    """The row whose list has this entry."""
    row = 0
    above = rows
    while above - row > 1:
        mid = (row + above) // 2
        past = tl.load(offsets + mid) > entry
        row = tl.where(past, row, mid)
        above = tl.where(past, mid, above)
    return row


@triton.jit(**ANY_SIZE)
def mask_words_kernel(
    words,
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    rows,
    heads,
    terms,
    MASK_MOD: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """The words of ROWS queries by TILE keys of a listed tile, if it is partial; BY_KEY, those of keys by queries. And
    terms.mask_seen, if it is not None. `rows` of tiles have lists; a list is of one of `heads` heads."""
    blocks = terms.blocks
    own_log = blocks.own - 5
    other_log = blocks.other - 7
    part = tl.program_id(0) & ((1 << own_log) - 1)  # of the rows of the tile
    column = tl.program_id(0) >> own_log  # TILE columns of the lists, concatenated
    index = column >> other_log
    entry = tl.load(blocks.entries + index)
    seen = 1
    if entry & 3 == 1:  # an entry past the end of a padded list is 0
        row = list_row(index, blocks.offsets, rows)
        rows_each = blocks.rows // 16
        b = row // rows_each // heads
        h = row // rows_each % heads
        first = (row % rows_each << blocks.own) + part * ROWS
        if cu_q is None:
            w = Work(b, h, first, 0, n_q, 0, n_k, 0)
        else:
            w = packed_tile(b, h, first, Sequences(cu_q, cu_k, n_q, n_k))
        other = (entry >> 2 << blocks.other) + (column & ((1 << other_log) - 1)) * TILE
        c = tl.arange(0, TILE)
        i = (first + tl.arange(0, ROWS))[:, None]
        j = (other + c)[None, :]
        all_pairs = (i == i) & (j == j)
        if BY_KEY:
            keep = visible(Pairs(w, h, j, i), ScoreParams(before, after, None, terms, None, MASK_MOD)) & all_pairs
        else:
            keep = visible(Pairs(w, h, i, j), ScoreParams(before, after, None, terms, None, MASK_MOD)) & all_pairs
        bit = tl.where(keep, (1 << ((c >> 3) * 2 + (c & 1)))[None, :], 0)
        bits = tl.sum(tl.sum(bit.reshape(ROWS, TILE // 8, WORDS, 2), 3), 1).reshape(ROWS * WORDS)
        word = tl.arange(0, ROWS * WORDS)
        tl.store(words + ((column << blocks.own) + part * ROWS) * WORDS + word, bits)
        seen = tl.max((bits != 0).to(tl.int32), 0)
    if terms.mask_seen is not None:
        tl.store(terms.mask_seen + (column << own_log) + part, seen)


@gluon.jit
def load_key_block(n, found, first, terms, BLOCK: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Block n of keys with its mask words, for the 64 queries from `first` on. `found`: what `find_block` returned for
    the block. The scores have this layout, WIDTH keys at a time."""
    start, may_be_partial = found
    if terms.mask_words is None:
        return KeyBlock(start, may_be_partial, 0, 0)
    else:
        may_be_partial = may_be_partial & (n >= 0)
        words, shift = row_words(n * BLOCK, first, may_be_partial, terms, WIDTH, layout)
        return KeyBlock(start, may_be_partial, words, shift)


@gluon.jit
def row_words(at, first, may_be_partial, terms, WIDTH: gl.constexpr, layout: gl.constexpr):
    """The mask words of the 64 rows from `first` on for the block at position `at` of the loop, if it `may_be_partial`;
    and how many of their bits belong to columns before the block. 0 without mask words."""
    if terms.mask_words is None:
        return 0, 0
    else:
        own = terms.blocks.own
        row = ((at >> 7) << own) + (first & ((1 << own) - 1))
        words = load_row_words(terms.mask_words + row * WORDS, may_be_partial, WIDTH, layout)
        return words, (at & (TILE - 1)) >> 2


@gluon.jit
def seen_blocks(first, w, params, BLOCK: gl.constexpr):
    """`block_range` of the 64 queries from `first` on, without blocks at both ends in whose tiles they see no key."""
    terms = params.terms
    lo, hi, span = block_range(first, w, params, WARPGROUP_ROWS, BLOCK)
    if terms.mask_seen is not None:
        n = gl.arange(0, ENDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        own = terms.blocks.own
        step = 1 << (own - 5)  # flags of a tile
        low = lo * BLOCK >> 7
        high = (hi * BLOCK - 1) >> 7
        inside = (n <= high - low) & (lo >= 0)
        seen = terms.mask_seen + ((first & ((1 << own) - 1)) >> 5)
        left = seen + (low + n) * step
        right = seen + (high - n) * step
        left = gl.load(left, mask=inside, other=1) | gl.load(left + 1, mask=inside, other=1)
        right = gl.load(right, mask=inside, other=1) | gl.load(right + 1, mask=inside, other=1)
        low += ENDS - gl.max(gl.where(left > 0, ENDS - n, 0), 0)
        high -= ENDS - gl.max(gl.where(right > 0, ENDS - n, 0), 0)
        lo = gl.maximum(lo, (low << 7) // BLOCK)
        hi = gl.minimum(hi, ((high + 1) << 7) // BLOCK)
    return lo, hi, span


@gluon.jit
def part_of(block, start):
    """The same block from key `start` on, a multiple of 16 after its first key."""
    return KeyBlock(start, block.may_be_partial, block.mask_words, block.shift + ((start - block.start) >> 2))


def uses_words(request: Request) -> bool:
    """Whether the partial tiles of a call are evaluated ahead: several heads share them, and they are not too many."""
    if not request.blocks or request.position_offsets is not None:
        return False
    if len(request.blocks) > LISTS:
        return True
    _, _, lists_batch, lists_heads = request.spec.mask_block
    batch = request.q.shape[0] if request.cu_q is None else lists_batch
    shared = batch * request.q.shape[-2] >= MIN_SHARING * lists_batch * lists_heads
    return shared and 0 < _size(request) <= MAX_WORDS


def uses_words_by_key(request: Request) -> bool:
    """The same for the backward, whose kernels of head dims above 128 evaluate the mod themselves."""
    return uses_words(request) and max(request.q.shape[-1], request.v.shape[-1]) <= 128


def without_mask_mod(request: Request) -> Request:
    """The request as a kernel sees it that reads words."""
    return request._replace(spec=request.spec._replace(mask_mod=None))


def with_words(terms: Terms, request: Request, words: Tensor) -> Terms:
    """The terms of a kernel that reads these words instead of evaluating the mod."""
    seen = words[_size(request) :] if words.numel() > _size(request) else None
    return terms._replace(mask=(), mask_words=words, mask_seen=seen)


def _size(request: Request) -> int:
    """Words of all listed tiles."""
    block_q, block_k, *_ = request.spec.mask_block
    return request.blocks[1].shape[0] * block_q * block_k // 32


def _flags(request: Request) -> int:
    """One for ROWS queries and TILE keys of the listed tiles."""
    return _size(request) // (ROWS.value * WORDS.value)


def new_words(request: Request, memory: Memory, by_key: bool = False) -> Tensor | None:
    """Memory for the words, in the forward followed by what becomes `mask_seen`; or None if the forward, or `by_key`
    the backward, evaluates the mod."""
    used = uses_words_by_key(request) if by_key else uses_words(request)
    if used and len(request.blocks) > LISTS:
        return request.blocks[LISTS + by_key]
    size = _size(request) + (0 if by_key else _flags(request)) if used else 0
    return memory.empty((size,), torch.int32) if used else None


def words_launches(request: Request, words: Tensor | None, by_key: bool = False) -> list[Launch]:
    """The launch that evaluates the partial tiles, if there are words and the call was not given them; `by_key`: those
    of the lists of keys."""
    if words is None or len(request.blocks) > LISTS:
        return []
    terms = device_terms(request, GPU, (TILE.value, TILE.value), by_key)
    terms = Terms(mask=terms.mask, blocks=terms.blocks, mask_seen=with_words(terms, request, words).mask_seen)
    rows, heads = request.blocks[2 * by_key].shape[0] - 1, request.spec.mask_block[3]
    args = words, *sequences_and_window(request), rows, heads, terms
    programs = _flags(request)
    options = {"MASK_MOD": mask_mod(request), "BY_KEY": by_key, "num_warps": 1}
    return [Launch(mask_words_kernel, programs, args, options)]


def evaluated_words(request: Request) -> tuple[Tensor, ...]:
    """The words of a block mask that never changes, for the forward and the backward of every call that has it; () if
    they are too many."""
    if not 0 < _size(request) <= MAX_WORDS:
        return ()
    device = request.q.device
    forward = torch.empty(_size(request) + _flags(request), dtype=torch.int32, device=device)
    backward = torch.empty(_size(request), dtype=torch.int32, device=device)
    for words, by_key in ((forward, False), (backward, True)):
        for launch in words_launches(request, words, by_key):
            launch()
    return forward, backward
