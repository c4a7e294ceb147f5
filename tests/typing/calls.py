"""Sixty calls as the documentation makes them. `test_calls.py` has mypy and pyright check this file, and runs it.

Each result goes through `assert_type`, which fails if the type is another one or Any. The calls in `mistakes` must be
rejected: an ignored error that is none is an error too.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import tilewise
from tilewise import distributed, mods, sparse
from tilewise.compat import create_block_mask, flex_attention
from tilewise.compat.bert_padding import pad_input
from tilewise.compat.flash_mla import flash_mla_sparse_fwd
from tilewise.compat.xformers import LowerTriangularMask, memory_efficient_attention
from tilewise_lab.costs.context_parallel import Simulation
from tilewise_lab.costs.explanation import Explanation
from tilewise_lab.costs.kv import KvExplanation

q, k, v = torch.randn(1, 32, 4, 16), torch.randn(1, 32, 2, 16), torch.randn(1, 32, 2, 16)
heads_first = torch.randn(1, 2, 32, 16)
packed, cu = torch.randn(10, 4, 16), torch.tensor([0, 3, 10], dtype=torch.int32)


def dense() -> None:
    assert_type(tilewise.attention(q, k, v, causal=True), Tensor)
    assert_type(tilewise.attention(q, k, v, window=(128, 0), softcap=30.0), Tensor)
    assert_type(tilewise.attention(heads_first, heads_first, heads_first, layout="bhsd"), Tensor)
    assert_type(tilewise.attention(q, k, v, causal=True, backend="reference"), Tensor)
    assert_type(tilewise.attention(q, k, v, precision="fp8"), Tensor)
    assert_type(tilewise.attention(q, k, v, bias=torch.randn(32, 32), sinks=torch.randn(4)), Tensor)
    assert_type(tilewise.attention(q, k, v, dropout_p=0.1, seed=7, deterministic=True), Tensor)
    assert_type(tilewise.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tilewise.attention(q, k, v, return_max_logit=True), tuple[Tensor, Tensor])
    assert_type(tilewise.attention(q, k, v, return_lse=True, return_max_logit=True), tuple[Tensor, Tensor, Tensor])
    assert_type(tilewise.attention_varlen(packed, packed, packed, cu, cu, causal=True), Tensor)
    assert_type(tilewise.attention_varlen(packed, packed, packed, cu, cu, return_lse=True), tuple[Tensor, Tensor])
    parts = [tilewise.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 16), slice(16, 32))]
    assert_type(tilewise.merge(*parts), tuple[Tensor, Tensor])
    assert_type(tilewise.check(q, k, v, causal=True), None)
    assert_type(tilewise.weights(q, k, v, rows=[0, 1], causal=True), Tensor)
    assert_type(tilewise.dropout_mask(1, 4, 32, 32, p=0.1, seed=7), Tensor)
    torchs = tilewise.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    assert_type(torchs, Tensor)


def of_mods() -> None:
    @tilewise.score_mod
    def decay(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, rate: Tensor, *, q_pos: Tensor
    ) -> Tensor:
        return score - rate[h] * torch.log(1.0 + abs(q_pos - kv_idx))

    @tilewise.score_mod
    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(score / cap)

    @tilewise.mask_mod
    def even_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % 2 == 0

    @tilewise.mask_mod
    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, ids: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    def plain(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx) % 3 == 0

    ids = torch.arange(32) // 8
    assert_type(decay(torch.rand(4)), mods.Mod)
    assert_type(capped(2.0), mods.Mod)
    assert_type(even_keys(), mods.Mod)
    assert_type(same_document(ids), mods.Mod)
    assert_type(tilewise.attention(q, k, v, score_mod=capped(2.0)), Tensor)
    assert_type(tilewise.attention(q, k, v, mask_mod=even_keys), Tensor)
    assert_type(tilewise.attention(q, k, v, mask_mod=plain), Tensor)
    assert_type(tilewise.attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j)), Tensor)
    mask = tilewise.block_mask(same_document(ids), 32, 32, causal=True)
    assert_type(mask, mods.BlockMask)
    assert_type(mask.density(), float)
    assert_type(mask.queries(16, 32), mods.BlockMask)
    assert_type(tilewise.attention(q, k, v, causal=True, mask_mod=mask), Tensor)
    assert_type(tilewise.block_mask_varlen(even_keys(), cu, cu), mods.BlockMask)
    assert_type(mods.softcap(2.0), mods.Mod)
    assert_type(mods.alibi(torch.rand(4)), mods.Mod)
    assert_type(mods.document(ids=ids), mods.Mod)
    assert_type(mods.t5_relative(torch.randn(8, 4)), mods.Mod)


def with_a_cache() -> None:
    k_cache, v_cache = torch.randn(2, 8, 16, 2, 64).unbind(0)
    table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    step, new = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64)
    plan = tilewise.plan_kv(step, k_cache, v_cache, lengths, page_table=table)
    assert_type(plan, tilewise.KvPlan)
    assert_type(tilewise.attention_kv(step, k_cache, v_cache, lengths, page_table=table, plan=plan), Tensor)
    appended = tilewise.attention_kv(step, k_cache, v_cache, lengths, k_new=new, v_new=new, page_table=table)
    assert_type(appended, Tensor)
    both = tilewise.attention_kv(step, k_cache, v_cache, lengths, page_table=table, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    most = tilewise.attention_kv(step, k_cache, v_cache, lengths, page_table=table, return_max_logit=True)
    assert_type(most, tuple[Tensor, Tensor])
    angles = torch.outer(torch.arange(64.0), torch.rand(32))
    rotary = tilewise.Rotary(angles.cos(), angles.sin())
    assert_type(rotary, tilewise.Rotary)
    assert_type(tilewise.QkNorm(torch.ones(64), torch.ones(64), eps=1e-6), tilewise.QkNorm)
    rotated = tilewise.append_kv(new, new, k_cache, v_cache, lengths, q=step, rotary=rotary, page_table=table)
    assert_type(rotated, Tensor | None)
    assert_type(tilewise.check_kv(step, k_cache, v_cache, lengths, page_table=table), None)
    latent, pages = torch.randn(2, 1, 16, 576), torch.randn(8, 64, 1, 576)
    assert_type(tilewise.attention_mla(latent, pages, lengths, page_table=table), Tensor)
    assert_type(
        tilewise.attention_mla(latent, pages, lengths, page_table=table, return_lse=True), tuple[Tensor, Tensor]
    )


def on_many_gpus() -> None:
    plan = distributed.plan(2, seqlen=32, causal=True, strategy="ring", layout="zigzag")
    assert_type(plan, distributed.Plan)
    assert_type(plan.shard(q, rank=0), Tensor)
    assert_type(plan.shard(q, k, v, rank=1), tuple[Tensor, ...])
    assert_type(plan.positions(rank=0), Tensor)
    assert_type(plan.banded(window=(15, 0)), distributed.Plan)
    assert_type(distributed.rehearse(q, k, v, plan=plan), Tensor)
    assert_type(distributed.rehearse(q, k, v, plan=plan, return_lse=True), tuple[Tensor, Tensor])
    alone = distributed.plan(1, seqlen=32, causal=True)
    assert_type(distributed.attention(q, k, v, plan=alone, softcap=30.0), Tensor)
    assert_type(plan.simulate("8xH200+400G", heads=8, kv_heads=8, dim=128), Simulation)


def sparsely() -> None:
    gates = tuple(torch.rand(1, 32, 4) for _ in range(3))
    indices = torch.zeros(1, 32, 2, 1, dtype=torch.int32)
    assert_type(sparse.topk(q, k, v, indices), Tensor)
    assert_type(sparse.topk(q, k, v, indices, return_lse=True), tuple[Tensor, Tensor])
    assert_type(sparse.moba(q, k, v, block_size=16, top_k=2), Tensor)
    assert_type(sparse.nsa(q, k, v, gates, block_size=16, num_blocks=2, window=8), Tensor)
    assert_type(
        sparse.neighborhood(q.view(1, 4, 8, 4, 16), *(x.view(1, 4, 8, 2, 16) for x in (k, v)), kernel_size=3), Tensor
    )


def of_other_libraries() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
    assert_type(mask, TorchBlockMask)
    assert_type(flex_attention(heads_first, heads_first, heads_first), Tensor)
    assert_type(flex_attention(heads_first, heads_first, heads_first, block_mask=mask), Tensor)
    assert_type(flex_attention(heads_first, heads_first, heads_first, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tilewise.compat.flex_attention(heads_first, heads_first, heads_first), Tensor)
    assert_type(memory_efficient_attention(q, q, q, LowerTriangularMask()), Tensor)
    assert_type(pad_input(torch.randn(3, 4), torch.tensor([0, 1, 4]), 2, 3), Tensor)
    every = flash_mla_sparse_fwd(torch.randn(2, 16, 576), torch.randn(4, 1, 576), torch.zeros(2, 1, 1).int(), 0.1)
    assert_type(every, tuple[Tensor, Tensor, Tensor])
    module = tilewise.nn.MultiheadAttention(64, 4, batch_first=True)
    assert_type(
        module.forward(torch.randn(1, 8, 64), torch.randn(1, 8, 64), torch.randn(1, 8, 64)),
        tuple[Tensor, Tensor | None],
    )


def explained() -> None:
    shape, cache = (4, 4096, 16, 128), (64, 8192, 8, 128)
    assert_type(tilewise.explain(shape, shape, shape, device="H200", show=False), Explanation)
    told = tilewise.explain_kv((64, 1, 32, 128), cache, None, [4096] * 64, device="H200", show=False)
    assert_type(told, KvExplanation)


def mistakes() -> None:
    @tilewise.mask_mod
    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, ids: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    tilewise.attention(q, k, v, layout="bsdh")  # type: ignore
    tilewise.attention(q, k, v, backend="cuda")  # type: ignore
    tilewise.attention(q, k, v, precision="fp4")  # type: ignore
    tilewise.attention(q, k, v, is_causal=True)  # type: ignore
    tilewise.attention_kv(q, k, v, 3, shared_prefix="all")  # type: ignore
    tilewise.attention(q, k, v, mask_mod=lambda b, h, i, j: "no")  # type: ignore
    distributed.plan(2, seqlen=32, strategy="rings")  # type: ignore
    distributed.plan(2, seqlen=32, layout="zigzags")  # type: ignore
    same_document()  # type: ignore
    same_document(3)  # type: ignore
    flex_attention(q, q, q, return_lse="yes")  # type: ignore
