"""The partial tiles of a block mask as bits, evaluated once for all heads before the forward.

A row of 128 keys is four words of 32 bits: bit 2 i + e of word l tells whether key 8 i + 2 l + e is visible. These are
the keys that lane l of a row holds in the accumulator of a wgmma, in the order of its registers. Causal and window are
part of the bits. In the forward a block then costs two loads, issued before its scores are waited for, and a select for
each score, whatever the mask mod computes.
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
from ..common.launch import Launch, Memory
from ..common.score_terms import device_terms, mask_mod
from ..common.shapes import sequences_and_window
from .gluon_compat import gl, gluon, load_row_words
from .support import GPU

TILE: tl.constexpr = tl.constexpr(128)  # queries and keys of a program
WORDS: tl.constexpr = tl.constexpr(4)  # of a row of TILE keys
MAX_WORDS = 1 << 24  # 64 MB; the forward evaluates the mod of longer lists itself
MIN_SHARING = 4  # (batch, head) rows that share a list, below which the forward evaluates the mod itself


class KeyBlock(NamedTuple):
    """A block of keys of a consumer: its first key, and whether the mask mod may hide pairs. If so, with mask words:
    these, and how many bits of a word belong to keys before the block."""

    start: tl.tensor
    has_mask_mod: tl.tensor
    words: tl.tensor
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
def mask_words_kernel(words, cu_q, cu_k, n_q, n_k, before, after, rows, heads, terms, MASK_MOD: tl.constexpr):
    """The words of TILE queries by TILE keys of a listed tile, if it is partial. `rows` of tiles have lists; a list is
    of one of `heads` heads."""
    blocks = terms.blocks
    queries_log = blocks.own - 7
    keys_log = blocks.other - 7
    part = tl.program_id(0) & ((1 << queries_log) - 1)  # of the queries of the tile
    column = tl.program_id(0) >> queries_log  # TILE keys of the lists, concatenated
    index = column >> keys_log
    entry = tl.load(blocks.entries + index)
    if entry & 2 == 0:
        row = list_row(index, blocks.offsets, rows)
        rows_each = blocks.rows // 16
        b = row // rows_each // heads
        h = row // rows_each % heads
        first = (row % rows_each << blocks.own) + part * TILE
        if cu_q is None:
            w = Work(b, h, first, 0, n_q, 0, n_k, 0)
        else:
            w = packed_tile(b, h, first, Sequences(cu_q, cu_k, n_q, n_k))
        key = (entry >> 2 << blocks.other) + (column & ((1 << keys_log) - 1)) * TILE
        word = tl.arange(0, TILE * WORDS)
        bit = tl.arange(0, 32)[None, :]
        i = (first + word // WORDS)[:, None]
        j = key + (bit >> 1) * 8 + (word % WORDS * 2)[:, None] + (bit & 1)
        keep = visible(Pairs(w, h, i, j), ScoreParams(before, after, None, terms, None, MASK_MOD)) & (j == j)
        bits = tl.sum(tl.where(keep, 1 << bit, 0), 1)
        tl.store(words + ((column << blocks.own) + part * TILE) * WORDS + word, bits)


@gluon.jit
def key_block(n, found, first, terms, BLOCK: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Block n of keys, which `first_key` found, for the queries from `first` on. Their scores have this layout, WIDTH
    keys at a time."""
    start, has_mask_mod = found
    if terms.mask_words is None:
        return KeyBlock(start, has_mask_mod, 0, 0)
    else:
        own = terms.blocks.own
        has_mask_mod = has_mask_mod & (n >= 0)
        at = n * BLOCK
        row = ((at >> 7) << own) + (first & ((1 << own) - 1))
        words = load_row_words(terms.mask_words + row * WORDS, has_mask_mod, WIDTH, layout)
        return KeyBlock(start, has_mask_mod, words, (at & (TILE - 1)) >> 2)


@gluon.jit
def part_of(block, start):
    """The same block from key `start` on, a multiple of 16 after its first key."""
    return KeyBlock(start, block.has_mask_mod, block.words, block.shift + ((start - block.start) >> 2))


def uses_words(request: Request) -> bool:
    """Whether the partial tiles of a call are evaluated ahead: several heads share them, and they are not too many."""
    if not request.blocks or request.position_offsets is not None:
        return False
    _, _, lists_batch, lists_heads = request.spec.mask_block
    batch = request.q.shape[0] if request.cu_q is None else lists_batch
    shared = batch * request.q.shape[-2] >= MIN_SHARING * lists_batch * lists_heads
    return shared and 0 < _size(request) <= MAX_WORDS


def _size(request: Request) -> int:
    """Words of all listed tiles."""
    block_q, block_k, *_ = request.spec.mask_block
    return request.blocks[1].shape[0] * block_q * block_k // 32


def new_words(request: Request, memory: Memory) -> Tensor | None:
    """Memory for the words, or None if the forward evaluates the mod."""
    return memory.empty((_size(request),), torch.int32) if uses_words(request) else None


def words_launches(request: Request, words: Tensor | None) -> list[Launch]:
    """The launch that evaluates the partial tiles, if there are words."""
    if words is None:
        return []
    terms = device_terms(request, GPU, (TILE.value, TILE.value))
    terms = Terms(mask=terms.mask, blocks=terms.blocks)
    rows, heads = request.blocks[0].shape[0] - 1, request.spec.mask_block[3]
    args = words, *sequences_and_window(request), rows, heads, terms
    programs = words.numel() // (TILE.value * WORDS.value)
    return [Launch(mask_words_kernel, programs, args, {"MASK_MOD": mask_mod(request), "num_warps": 8})]
