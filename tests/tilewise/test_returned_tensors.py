"""No public function returns a tensor that a cache holds: a caller who changes it would change later calls.

Each function is called twice with equal arguments, and the results of the first call are changed in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.tilewise.test_docstrings import installed, public
from tilewise.compat import bert_padding, flash_attn, flash_attn_3, flash_mla, rotary, xformers
from tilewise.distributed import plan

TABLE_MODULES = [*installed(), "tilewise.compat.flash_mla", "tilewise.compat.rotary"]
NO_TENSORS = {  # functions that return none, or what they were given; and classes, whose fields are arguments
    "tilewise": "AttentionError KvPlan QkNorm Rotary check check_kv explain explain_kv mask_mod score_mod replace_sdpa"
    " replaces_sdpa warmup",
    "tilewise.mods": "BlockMask BlockMask.density Mod Program Program.after",
    "tilewise.nn": "MultiheadAttention",
    "tilewise.distributed": "Plan Plan.banded check current plan use",
    "tilewise.compat.flash_attn": "install",
    "tilewise.compat.flash_mla": "FlashMLASchedMeta",
    "tilewise.compat.xformers": "BlockDiagonalCausalFromBottomRightMask BlockDiagonalMask BlockDiagonalCausalMask"
    " BlockDiagonalCausalLocalAttentionFromBottomRightMask BlockDiagonalCausalLocalAttentionMask"
    " BlockDiagonalCausalLocalAttentionPaddedKeysMask BlockDiagonalCausalWithOffsetPaddedKeysMask"
    " BlockDiagonalLocalAttentionPaddedKeysMask BlockDiagonalPaddedKeysMask LocalAttentionFromBottomRightMask"
    " LowerTriangularFromBottomRightLocalAttentionMask LowerTriangularFromBottomRightMask LowerTriangularMask"
    " LowerTriangularFromBottomRightMask.make_local_attention LowerTriangularMaskWithTensorBias SeqInfo",
    "tilewise.integrations.sglang": "register create",
    "tilewise.integrations.vllm": "register",
    "tilewise.integrations.transformers": "register serve",
    "tilewise.integrations.diffusers": "register",
}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(tokens: int = 12, heads: int = 2, dim: int = 16) -> list[Tensor]:
    return [normal(1, tokens, heads, dim) for _ in range(3)]


def caches(rows: int = 16) -> list[Tensor]:
    """q of one token, the caches, the lengths."""
    return [normal(2, 1, 2, 16), normal(2, rows, 2, 16), normal(2, rows, 2, 16), ints(5, 9)]


def mla() -> list[Tensor]:
    return [normal(2, 1, 2, 576), normal(4, 16, 1, 576), ints(5, 9)]


def pages() -> Tensor:
    return ints([0, 1], [2, 3])


def appended() -> list[Tensor]:
    _, k_cache, v_cache, lengths = caches()
    tilewise.append_kv(normal(2, 1, 2, 16), normal(2, 1, 2, 16), k_cache, v_cache, lengths)
    return [k_cache, v_cache]


def tree() -> tuple[Tensor, Tensor]:
    return ints(-1, 0, 0), ints(0, 2, 4, 5)


def made_plan() -> Any:
    return plan(4, seqlen=21, causal=True)


def block_mask() -> Any:
    return tilewise.block_mask(tilewise.mods.dilated_window(9, 2), 40, 40, block=(16, 16))


def blocks(kind: str = "BlockDiagonalMask") -> Any:
    return getattr(xformers, kind).from_seqlens([5, 7])


def of_transformers() -> Any:
    from tilewise.integrations.transformers import attention_forward

    return attention_forward(torch.nn.Linear(1, 1), *(x.transpose(1, 2) for x in qkv()), None)


def rotated(name: str, *shape: int) -> Any:
    return getattr(rotary, name)(normal(*shape), normal(12, 8), normal(12, 8))


def of_rotary_module() -> Any:
    return rotary.RotaryEmbedding(16)(normal(2, 12, 3, 2, 16))


PADDED = "PaddedKeysMask"
CALLS: dict[str, dict[str, Callable[[], Any]]] = {
    "tilewise": {
        "append_kv": appended,
        "attention": lambda: tilewise.attention(*qkv(), causal=True, return_lse=True, return_max_logit=True),
        "attention_kv": lambda: tilewise.attention_kv(*caches(), return_lse=True),
        "attention_mla": lambda: tilewise.attention_mla(*mla(), page_table=pages(), return_lse=True),
        "attention_varlen": lambda: tilewise.attention_varlen(
            *(x[0] for x in qkv()), ints(0, 5, 12), ints(0, 5, 12), return_lse=True
        ),
        "block_mask": block_mask,
        "block_mask_varlen": lambda: tilewise.block_mask_varlen(
            tilewise.mods.dilated_window(9, 2), ints(0, 20, 40), ints(0, 20, 40), block=(16, 16)
        ),
        "dropout_mask": lambda: tilewise.dropout_mask(1, 2, 9, 9, p=0.5, seed=3),
        "merge": lambda: tilewise.merge(
            tilewise.attention(*qkv(), return_lse=True), tilewise.attention(*qkv(), return_lse=True)
        ),
        "pack_mla": lambda: tilewise.pack_mla(normal(3, 16, 576)),
        "plan_kv": lambda: tilewise.plan_kv(*caches()).schedule,  # the others are memory that calls overwrite
        "scaled_dot_product_attention": lambda: tilewise.scaled_dot_product_attention(*qkv()),
        "weights": lambda: tilewise.weights(*qkv(), causal=True),
    },
    "tilewise.mods": {
        "BlockMask.to": lambda: block_mask().to(torch.get_default_device()),
        "BlockMask.queries": lambda: block_mask().queries(16, 32),
        "BlockMask.grown": lambda: block_mask().grown(8),
        "Mod.to": lambda: tilewise.mods.alibi(torch.rand(2)).to(torch.get_default_device()),
        "alibi": lambda: tilewise.mods.alibi(torch.rand(2)),
        "block_diagonal": lambda: tilewise.mods.block_diagonal(4),
        "dilated_window": lambda: tilewise.mods.dilated_window(9, 2),
        "document": lambda: tilewise.mods.document(cu_seqlens=ints(0, 5, 12), tokens=12),
        "neighbourhood_2d": lambda: tilewise.mods.neighbourhood_2d(4, 1),
        "prefix_lm": lambda: tilewise.mods.prefix_lm(ints(3, 4)),
        "prefix_tree": lambda: tilewise.mods.prefix_tree(*tree()),
        "softcap": lambda: tilewise.mods.softcap(3.0),
        "strided_sparse": lambda: tilewise.mods.strided_sparse(3),
        "t5_relative": lambda: tilewise.mods.t5_relative(normal(8, 2)),
        "tree_positions": lambda: tilewise.mods.tree_positions(*tree()),
        "window_with_globals": lambda: tilewise.mods.window_with_globals(4, 2),
    },
    "tilewise.nn": {
        "MultiheadAttention.forward": lambda: tilewise.nn.MultiheadAttention(16, 2)(*3 * [normal(1, 9, 16)])
    },
    "tilewise.sparse": {
        "mean_key_gate": lambda: tilewise.sparse.mean_key_gate(*qkv(32)[:2], 16),
        "moba": lambda: tilewise.sparse.moba(*qkv(64), block_size=16, top_k=2),
        "neighborhood": lambda: tilewise.sparse.neighborhood(*(x.unflatten(1, (8, 8)) for x in qkv(64)), kernel_size=3),
        "nsa": lambda: tilewise.sparse.nsa(
            *qkv(64), tuple(torch.rand(1, 64, 2) for _ in range(3)), block_size=16, num_blocks=2, window=16
        ),
        "selected_blocks": lambda: tilewise.sparse.selected_blocks(
            normal(1, 64, 2, 16), normal(1, 4, 2, 16), normal(1, 2, 64), block_size=16, num_blocks=2
        ),
        "topk": lambda: tilewise.sparse.topk(
            *qkv(32), torch.arange(8, dtype=torch.int32).expand(1, 32, 2, 8).contiguous(), return_lse=True
        ),
    },
    "tilewise.distributed": {
        "Plan.index": lambda: made_plan().index(rank=1),
        "Plan.positions": lambda: made_plan().positions(rank=1),
        "Plan.shard": lambda: made_plan().shard(torch.arange(21.0), dim=0, rank=1),
        "Plan.unshard": lambda: made_plan().unshard([torch.arange(float(n)) for n in made_plan().counts()], dim=0),
        "Plan.labels": lambda: made_plan().labels(torch.arange(21), dim=0, rank=1),
        "Plan.simulate": lambda: made_plan().simulate(),
        "attention": lambda: tilewise.distributed.attention(*qkv(), plan=plan(1, seqlen=12), return_lse=True),
        "rehearse": lambda: tilewise.distributed.rehearse(*qkv(21), plan=made_plan(), return_lse=True),
    },
    "tilewise.compat": {
        "flex_attention": lambda: tilewise.compat.flex_attention(*(x.transpose(1, 2) for x in qkv()), return_lse=True),
    },
    "tilewise.compat.flash_attn": {
        "flash_attn_func": lambda: flash_attn.flash_attn_func(*qkv(), return_attn_probs=True),
        "flash_attn_kvpacked_func": lambda: flash_attn.flash_attn_kvpacked_func(qkv()[0], normal(1, 12, 2, 2, 16)),
        "flash_attn_qkvpacked_func": lambda: flash_attn.flash_attn_qkvpacked_func(normal(1, 12, 3, 2, 16)),
        "flash_attn_varlen_func": lambda: flash_attn.flash_attn_varlen_func(
            *(x[0] for x in qkv()), ints(0, 5, 12), ints(0, 5, 12), 7, 7
        ),
        "flash_attn_varlen_kvpacked_func": lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            qkv()[0][0], normal(12, 2, 2, 16), ints(0, 5, 12), ints(0, 5, 12), 7, 7
        ),
        "flash_attn_varlen_qkvpacked_func": lambda: flash_attn.flash_attn_varlen_qkvpacked_func(
            normal(12, 3, 2, 16), ints(0, 5, 12), 7
        ),
        "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
            *caches()[:3], cache_seqlens=ints(5, 9), return_softmax_lse=True
        ),
    },
    "tilewise.compat.flash_attn_3": {
        "same_chunk": lambda: flash_attn_3.same_chunk(4),
        "same_chunk_since": lambda: flash_attn_3.same_chunk_since(4, ints(0, 1)),
        "flash_attn_func": lambda: flash_attn_3.flash_attn_func(*qkv(), return_attn_probs=True),
        "flash_attn_qkvpacked_func": lambda: flash_attn_3.flash_attn_qkvpacked_func(normal(1, 12, 3, 2, 16)),
        "flash_attn_varlen_func": lambda: flash_attn_3.flash_attn_varlen_func(
            *(x[0] for x in qkv()), ints(0, 5, 12), ints(0, 5, 12), 7, 7
        ),
        "flash_attn_combine": lambda: flash_attn_3.flash_attn_combine(normal(3, 2, 12, 2, 16), normal(3, 2, 12, 2)),
        "flash_attn_with_kvcache": lambda: flash_attn_3.flash_attn_with_kvcache(
            *caches()[:3], cache_seqlens=ints(5, 9), return_softmax_lse=True
        ),
        "get_scheduler_metadata": lambda: flash_attn_3.get_scheduler_metadata(2, 1, 16, 2, 2, 16, ints(5, 9)),
    },
    "tilewise.compat.flash_mla": {
        "get_mla_metadata": lambda: flash_mla.get_mla_metadata(),
        "flash_mla_with_kvcache": lambda: flash_mla.flash_mla_with_kvcache(
            normal(2, 1, 2, 576), normal(4, 64, 1, 576), pages(), ints(5, 9), 512, flash_mla.get_mla_metadata()[0]
        ),
        "flash_mla_sparse_fwd": lambda: flash_mla.flash_mla_sparse_fwd(
            normal(3, 2, 576), normal(8, 1, 576), torch.arange(6, dtype=torch.int32).view(3, 1, 2), 0.1
        ),
    },
    "tilewise.compat.rotary": {
        "rotate_half": lambda: rotary.rotate_half(normal(2, 12, 2, 16)),
        "apply_rotary_emb_torch": lambda: rotated("apply_rotary_emb_torch", 2, 12, 2, 16),
        "apply_rotary": lambda: rotated("apply_rotary", 2, 12, 2, 16),
        "apply_rotary_emb": lambda: rotated("apply_rotary_emb", 2, 12, 2, 16),
        "apply_rotary_emb_func": lambda: rotated("apply_rotary_emb_func", 2, 12, 2, 16),
        "apply_rotary_emb_qkv_": lambda: rotated("apply_rotary_emb_qkv_", 2, 12, 3, 2, 16),
        "apply_rotary_emb_kv_": lambda: rotated("apply_rotary_emb_kv_", 2, 12, 2, 2, 16),
        "RotaryEmbedding": lambda: list(rotary.RotaryEmbedding(16).buffers()),
        "RotaryEmbedding.forward": of_rotary_module,
    },
    "tilewise.compat.bert_padding": {
        "index_first_axis": lambda: bert_padding.index_first_axis(normal(5, 3), torch.tensor([0, 2])),
        "index_put_first_axis": lambda: bert_padding.index_put_first_axis(normal(2, 3), torch.tensor([0, 2]), 5),
        "index_first_axis_residual": lambda: bert_padding.index_first_axis_residual(normal(5, 3), torch.tensor([0, 2])),
        "unpad_input": lambda: bert_padding.unpad_input(normal(2, 3, 4), ints([1, 1, 0], [1, 0, 0])),
        "unpad_input_for_concatenated_sequences": lambda: bert_padding.unpad_input_for_concatenated_sequences(
            normal(2, 3, 4), ints([1, 2, 0], [2, 0, 0])
        ),
        "pad_input": lambda: bert_padding.pad_input(normal(2, 3), torch.tensor([0, 2]), 2, 3),
    },
    "tilewise.compat.xformers": {
        "BlockDiagonalMask.from_seqlens": blocks,
        "BlockDiagonalMask.from_tensor_list": lambda: xformers.BlockDiagonalMask.from_tensor_list(
            [normal(1, n, 2, 16) for n in (5, 7)]
        ),
        "BlockDiagonalMask.split": lambda: blocks().split(normal(1, 12, 2, 16)),
        "BlockDiagonalMask.make_causal": lambda: blocks().make_causal(),
        "BlockDiagonalMask.make_causal_from_bottomright": lambda: blocks().make_causal_from_bottomright(),
        "BlockDiagonalMask.make_local_attention": lambda: blocks().make_local_attention(3),
        "BlockDiagonalMask.make_local_attention_from_bottomright": lambda: (
            blocks().make_local_attention_from_bottomright(3)
        ),
        f"BlockDiagonal{PADDED}.from_seqlens": lambda: xformers.BlockDiagonalPaddedKeysMask.from_seqlens(
            [1, 1], 8, [5, 7]
        ),
        f"BlockDiagonalLocalAttention{PADDED}.from_seqlens_local": lambda: (
            xformers.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local([1, 1], 8, [5, 7], 2, 2)
        ),
        f"BlockDiagonalCausalLocalAttention{PADDED}.from_seqlens_local": lambda: (
            xformers.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1, 1], 8, [5, 7], 2)
        ),
        "LowerTriangularMask.add_bias": lambda: xformers.LowerTriangularMask().add_bias(normal(1, 2, 12, 12)),
        "SeqInfo.of": lambda: xformers.SeqInfo.of([5, 7]),
        "memory_efficient_attention": lambda: xformers.memory_efficient_attention(*qkv(), blocks()),
    },
    "tilewise.integrations.transformers": {"attention_forward": of_transformers},
    "tilewise.integrations.diffusers": {
        "attention": lambda: import_module("tilewise.integrations.diffusers").attention(*qkv())
    },
}


def tensors_of(x: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """The tensors of a result: of tuples, lists, dicts and the attributes of objects."""
    if isinstance(x, Tensor):
        yield x
    elif id(x) not in seen:
        parts: Any = ()
        if isinstance(x, tuple | list):
            parts = x
        elif isinstance(x, dict):
            parts = x.values()
        elif type(x).__module__.startswith("tilewise") and not isinstance(x, tilewise.distributed.Plan):
            slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
            parts = [*vars(x).values()] if hasattr(x, "__dict__") else [getattr(x, name, None) for name in slots]
        for part in parts:
            yield from tensors_of(part, seen | {id(x)})


def results(call: Callable[[], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return [x.detach() for x in tensors_of(call())]


def check_call(call: Callable[[], Any]) -> int:
    """The number of tensors that a function returns; fails if a change of one is seen by the next call."""
    first = results(call)
    expected = [x.clone() for x in first]
    for x in first:
        if not x.is_meta and x.numel():
            bits(x.untyped_storage()).bitwise_not_()
    again = results(call)
    assert len(again) == len(expected)
    assert all(torch.equal(bits(x.clone()), bits(y)) for x, y in zip(again, expected, strict=True))
    return len(expected)


def bits(x: Tensor | torch.UntypedStorage) -> Tensor:
    """The bytes of a contiguous tensor, or of the memory that one views: nan is equal to nan."""
    storage = x.contiguous().untyped_storage() if isinstance(x, Tensor) else x
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


NAMES = [(module, name) for module in CALLS if module in TABLE_MODULES for name in CALLS[module]]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(x) for x in NAMES])
def test_a_changed_result_changes_no_later_call(module, name):
    check_call(CALLS[module][name])


def test_every_public_function_is_in_the_table():
    found, listed = {}, set()
    for module in TABLE_MODULES:
        for name, x in public(import_module(module)):
            own = inspect.unwrap(x) if inspect.isfunction(x) else x
            found.setdefault(getattr(own, "__func__", own), []).append((module, name))
            if name in CALLS.get(module, {}) or name in NO_TENSORS.get(module, "").split():
                listed.add((module, name))
    missing = [names for names in found.values() if not listed & set(names)]
    assert not missing, "a new function: add a call to CALLS, or its name to NO_TENSORS"
    unknown = {(m, n) for m in CALLS if m in TABLE_MODULES for n in CALLS[m]}
    unknown |= {(m, n) for m, names in NO_TENSORS.items() if m in TABLE_MODULES for n in names.split()}
    assert unknown <= listed, "a name of the table that no module has"


def test_a_cached_tensor_is_found():
    kept = torch.arange(3)
    with pytest.raises(AssertionError):
        check_call(lambda: (1, [kept]))
    assert check_call(lambda: {"a": torch.arange(3), "b": blocks()}) > 2
