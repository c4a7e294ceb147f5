"""The portable forward on fp8 operands, as the quantising pass writes them (`common/fp8_quantise.py`)."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.attend import store_max_logit
from ..common.device.fp8 import LEAST_TOP, MAX_FP8, key_scales_at, padded_block, row_scales
from ..common.device.mask import masked
from ..common.device.matmul import raise_flag
from ..common.device.score import scores
from ..common.device.softmax import log2_scale, row_logsumexp, sink_maximum, softmax_step
from ..common.device.structs import ANY_SIZE, PAD, Grid, Pairs, Rows, ScoreParams, Sequences
from ..common.device.tile_io import row_pointers, store_rows
from ..common.device.tile_range import key_range, locate, loop_range, tile_at
from ..common.pdl import gdc_launch_dependents, gdc_wait


class Fp8Operands(NamedTuple):
    """q, k, v and scales of `fp8_launches.Quantised`."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    scales: tl.tuple


@triton.jit(**ANY_SIZE)
def fp8_forward_kernel(
    tensors,  # attend.Tensors; q, k and v are not read
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    tiles,
    heads,
    batch,
    splits,
    terms,
    fp8,  # Fp8Operands
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """o and lse of a tile of queries; flags as in `forward_kernel`."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if tensors.flags is not None:
        tl.store(tensors.flags + pid, 0)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    w = locate(pid, Grid(tiles, heads, batch), seqs, cu_q, CONFIG.BLOCK_M)
    if w.first < w.n_q:
        acc, m, l, top = fp8_stream_keys(
            fp8, w, seqs, heads, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG
        )
        if tensors.flags is not None:
            raise_flag(tensors.flags + pid, acc)
        o_rows = Rows(tensors.o, w.b, w.h, w.q0, w.first, w.n_q)
        store_rows(o_rows, acc / tl.where(l == 0.0, 1.0, l)[:, None], CONFIG.DV)
        i = w.first + tl.arange(0, CONFIG.BLOCK_M)
        lse = row_logsumexp(m, l, terms.large_scores)
        if fp8.scales.shift is not None:
            block = padded_block(w.q0, w.b, n_q, cu_q) + i // PAD
            lse += tl.load(row_scales(fp8.scales, block, w.h, heads) + PAD + i % PAD)  # -inf stays
        exists = i < w.n_q
        if tensors.max_logit is not None:
            store_max_logit(tensors.max_logit, top, w, w.h, exists, heads, CONFIG)
        tl.store(row_pointers(tensors.lse, n_q, heads, w.b, w.h, w.q0, i, CONFIG.PACKED), lse, mask=exists)


@triton.jit
def fp8_stream_keys(fp8, w, seqs, heads, params, CONFIG: tl.constexpr):
    """(acc, m, l, top) as `attend.stream_keys`. The products of a tile of keys have sums of their own, which are added
    in float32: tensor cores add fp8 products with 13 bits."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    terms = params.terms
    i = w.first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, CONFIG.BLOCK_D)
    e = tl.arange(0, CONFIG.BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    h_kv = w.h // CONFIG.GROUP
    kv_heads = heads // CONFIG.GROUP
    q_block = padded_block(w.q0, w.b, seqs.n_q, seqs.cu_q)
    k_block = padded_block(w.k0, w.b, seqs.n_k, seqs.cu_k)
    q_line = (q_block + i // PAD).to(tl.int64) * heads + w.h
    q_tile = tl.load(fp8.q + (q_line * PAD + i % PAD)[:, None] * CONFIG.BLOCK_D + d[None, :])
    q_factor = tl.load(row_scales(fp8.scales, q_block + i // PAD, w.h, heads) + i % PAD)
    qk_scale = log2_scale(params.scale, CONFIG.FOLD)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, CONFIG.BLOCK_DV], 0.0, tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if terms.sinks.ptr is not None:
        sink = tl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(tl.float32)
        m = l + sink_maximum(sink, terms.large_scores)
        l += tl.where(sink == float("-inf"), 0.0, 1.0)
    span = key_range(w, params.before, params.after, BLOCK_M, BLOCK_N)
    lo, hi = loop_range(span, w, w.h, terms.blocks, BLOCK_N)
    for at in tl.range(lo, hi, BLOCK_N):
        first, edge, partial = tile_at(at, span, terms.blocks, BLOCK_N, False)
        pairs = Pairs(w, w.h, i[:, None], (first + n)[None, :])
        first = tl.cast(first, tl.int32)
        line = (k_block + first // PAD).to(tl.int64) * kv_heads + h_kv
        k_tile = tl.load(fp8.k + (line * PAD + first % PAD + n[:, None]) * CONFIG.BLOCK_D + d[None, :])
        product = tl.dot(q_tile, tl.trans(k_tile), max_num_imprecise_acc=CONFIG.CHUNK)
        scales = key_scales_at(fp8.scales, line)
        k_factor = tl.load(scales)
        if fp8.scales.own is not None:
            if k_factor < 0.0:  # -1: each key has a scale of its own
                product *= tl.load(scales + 2 + first % PAD + n)[None, :]
            k_factor = tl.abs(k_factor)
        s = scores(product * (q_factor * k_factor)[:, None], pairs, params.scale, terms, params.SCORE_MOD, CONFIG.FOLD)
        s = masked(s, float("-inf"), pairs, edge, partial, params)
        if CONFIG.MAX_LOGIT:
            top = tl.maximum(top, tl.max(s, 1))
        p, alpha, m, l = softmax_step(m, l, s, qk_scale, terms.large_scores, False)
        v_tile = tl.load(fp8.v + (line * CONFIG.BLOCK_DV + e[:, None]) * PAD + first % PAD + n[None, :])
        if fp8.scales.own is not None:
            v_scale = tl.load(scales + 1)
            unit = tl.full([BLOCK_M], 1.0, tl.float32)
            if v_scale < 0.0:  # then P is multiplied by the scales of the values, and a row of it has a maximum of 1
                p *= tl.load(scales + 2 + PAD + first % PAD + n)[None, :]
                unit = tl.max(p, 1)
                unit = tl.where(unit > LEAST_TOP, unit, 1.0)
                p = p / unit[:, None]
            found = tl.dot((p * MAX_FP8).to(tl.float8e4nv), tl.trans(v_tile))
            acc = acc * alpha[:, None] + found * (unit * (tl.abs(v_scale) / MAX_FP8))[:, None]
        else:
            found = tl.dot((p * MAX_FP8).to(tl.float8e4nv), tl.trans(v_tile))
            acc = acc * alpha[:, None] + found * (tl.load(scales + 1) / MAX_FP8)
    if CONFIG.FOLD:
        top *= params.scale
    return acc, m, l, top
