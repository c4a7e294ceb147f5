"""Kernels that run one helper of tilewise.backends.common.device per program, and store what it returned."""

import triton
import triton.language as tl

from tilewise.backends.common.device.attend import Tensors, stream_keys
from tilewise.backends.common.device.mask import in_window
from tilewise.backends.common.device.structs import Grid, ScoreParams, Sequences, Terms, Work
from tilewise.backends.common.device.tile_range import band, locate


@triton.jit
def band_probe(table, out, before, after, BLOCK: tl.constexpr):
    """table (N, 5): first, last, n, before, after -> out (N, 4): a Span. before and after are None or not None."""
    row = table + tl.program_id(0) * 5
    if before is not None:
        before = tl.load(row + 3)
    if after is not None:
        after = tl.load(row + 4)
    span = band(tl.load(row), tl.load(row + 1), tl.load(row + 2), before, after, BLOCK)
    out += tl.program_id(0) * 4
    tl.store(out, span.lo)
    tl.store(out + 1, span.full_lo)
    tl.store(out + 2, span.full_hi)
    tl.store(out + 3, span.hi)


@triton.jit
def visible_probe(table, out, before, after, SIZE: tl.constexpr):
    """table (N, 4): n_q, n_k, before, after -> out (N, SIZE, SIZE): which queries see which keys."""
    row = table + tl.program_id(0) * 4
    if before is not None:
        before = tl.load(row + 2)
    if after is not None:
        after = tl.load(row + 3)
    w = Work(0, 0, 0, 0, tl.load(row), 0, tl.load(row + 1), 0)
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    out += tl.program_id(0) * SIZE * SIZE
    tl.store(out + i * SIZE + j, in_window(i, j, w, before, after).to(tl.int32))


@triton.jit
def locate_probe(out, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu, BLOCK: tl.constexpr):
    """out (programs, 8): the Work of each program."""
    w = locate(tl.program_id(0), Grid(tiles, heads, batch), Sequences(cu_q, cu_k, n_q, n_k), cu, BLOCK)
    out += tl.program_id(0) * 8
    tl.store(out, w.b)
    tl.store(out + 1, w.h)
    tl.store(out + 2, w.first)
    tl.store(out + 3, w.q0)
    tl.store(out + 4, w.n_q)
    tl.store(out + 5, w.k0)
    tl.store(out + 6, w.n_k)
    tl.store(out + 7, w.r0)


@triton.jit
def copy_probe(x, out, n, far, N: tl.constexpr):
    """Each program copies N places of x, masked at n, and puts them `far` behind those of the program before."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tile = tl.load(x + at, mask=at < n, other=0)
    tl.store(out + tl.program_id(0) * far + tl.arange(0, N), tile, mask=at < n)


@triton.jit
def neighbour_probe(x, n):
    """Each program adds to its place what the next one has."""
    me = tl.program_id(0)
    tl.store(x + me, tl.load(x + me) + tl.load(x + me + 1, mask=me + 1 < n, other=0))


@triton.jit
def stream_probe(q, k, v, acc, m, l, bits, n_q, n_k, before, after, scale, parts, CONFIG: tl.constexpr):
    """(acc, m, l) of `stream_keys` over each part of the keys, and the bits of their elements."""
    part = tl.program_id(0)
    w = Work(part * 0, part * 0, part * 0, 0, n_q, 0, n_k, 0)
    tensors = Tensors(q, k, v, None, None, None)
    params = ScoreParams(before, after, scale, Terms(), None, None)
    pieces, top, total, _ = stream_keys(tensors, w, part, parts, params, CONFIG, False)
    found = pieces[0]  # of its columns: there is one
    i = part * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M)
    tl.store(m + i, top)
    tl.store(l + i, total)
    tl.store(acc + i[:, None] * CONFIG.BLOCK_DV + tl.arange(0, CONFIG.BLOCK_DV)[None, :], found)
    tl.store(bits, found.dtype.primitive_bitwidth)
    tl.store(bits + 1, top.dtype.primitive_bitwidth)
    tl.store(bits + 2, total.dtype.primitive_bitwidth)


@triton.jit
def last_program_probe(x, counter, out, SEM: tl.constexpr):
    """Each program writes a place of x; the last one to arrive at the counter adds them all."""
    tl.store(x + tl.program_id(0), tl.program_id(0) + 1)
    if tl.atomic_add(counter, 1, sem=SEM) == tl.num_programs(0) - 1:
        tl.store(out, tl.sum(tl.load(x + tl.arange(0, 4)), 0))
