"""Wrong arguments of other libraries' functions get one AttentionError that names them, never an error from inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise
from tilewise.compat import bert_padding, flash_attn_3, flex_attention
from tilewise.compat import flash_attn as fa
from tilewise.compat import xformers as xf

I32 = torch.int32
Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
PACKED, CU = torch.zeros(5, 4, 8), torch.tensor([0, 2, 5], dtype=I32)
CACHE, LENGTHS, TABLE = torch.zeros(3, 16, 2, 8), torch.tensor([3, 4], dtype=I32), torch.zeros(2, 2, dtype=I32)
ONE, NEW, ANGLES = Q[:, :1], K[:, :1], torch.zeros(32, 4)


def two(window: Any) -> Any:
    return fa.flash_attn_func(Q, K, K, window_size=window)


def three(**words: Any) -> Any:
    return flash_attn_3.flash_attn_func(Q, K, K, **words)


def grown(*args: Any, **words: Any) -> Any:
    return flash_attn_3.flash_attn_with_kvcache(ONE, CACHE, CACHE, *args, **{"cache_seqlens": LENGTHS} | words)


def used(cu: Any, lengths: Any) -> Any:
    return flash_attn_3.flash_attn_varlen_func(PACKED, PACKED, PACKED, cu, cu, 5, 5, seqused_k=lengths)


def turned(**words: Any) -> Any:
    return grown(NEW, NEW, rotary_cos=ANGLES, rotary_sin=ANGLES, **words)


WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "no window": ("window_size", lambda: two(None)),
    "half a window": ("window_size", lambda: two((1,))),
    "a window of strings": ("window_size", lambda: two(("a", "b"))),
    "a list for kv": ("kv", lambda: fa.flash_attn_kvpacked_func(Q, [K, K])),  # type: ignore[arg-type]
    "numpy": ("qkv", lambda: fa.flash_attn_qkvpacked_func(np.zeros((1, 2, 3, 4, 5)))),  # type: ignore[arg-type]
    "lengths of pages": (
        "cu_seqlens_k",
        lambda: fa.flash_attn_varlen_func(PACKED, CACHE, CACHE, CU, None, 5, 5, block_table=TABLE),  # type: ignore[arg-type]
    ),
    "a list for k": ("k", lambda: fa.flash_attn_with_kvcache(ONE, CACHE, CACHE, [1], [1])),  # type: ignore[arg-type]
    "a sine alone": ("rotary_sin", lambda: fa.flash_attn_with_kvcache(ONE, CACHE, CACHE, NEW, NEW, rotary_sin=ANGLES)),
    "a sine alone, 3": ("rotary_sin", lambda: grown(NEW, NEW, rotary_sin=ANGLES)),
    "a cosine alone": ("rotary_sin", lambda: grown(NEW, NEW, rotary_cos=ANGLES)),
    "values alone": ("k and v", lambda: grown(None, NEW)),
    "angles for nothing": ("k and v", lambda: grown(rotary_cos=ANGLES, rotary_sin=ANGLES)),
    "a chunk below 0": ("attention_chunk", lambda: three(attention_chunk=-1)),
    "part of a chunk": ("attention_chunk", lambda: three(attention_chunk=1.5)),
    "qv of another batch": ("shape of qv", lambda: three(qv=Q[:1])),
    "qv of no tensor": ("qv", lambda: three(qv=[1])),
    "more heads than there are": (
        "shape of qkv",
        lambda: flash_attn_3.flash_attn_qkvpacked_func(torch.zeros(2, 5, 8, 8), num_heads_q=10),
    ),
    "used, a list": ("seqused_k", lambda: used(CU, [1, 2])),
    "used, of one sequence": ("seqused_k", lambda: used(CU, LENGTHS[:1])),
    "used, of what": ("cu_seqlens_q", lambda: used(None, LENGTHS)),
    "parts without lse": ("shape of lse_partial", lambda: flash_attn_3.flash_attn_combine(Q, Q)),
    "rows, a list": ("cache_batch_idx", lambda: grown(page_table=TABLE, cache_batch_idx=[0, 1])),
    "another's schedule": ("scheduler_metadata", lambda: grown(scheduler_metadata=torch.zeros(3))),
    "lengths to turn by": ("rotary counts from", lambda: turned(rotary_seqlens=torch.zeros(3, dtype=I32))),
    "flex of none": ("query", lambda: flex_attention(None, K, K)),  # type: ignore[arg-type]
    "flex of one axis": ("shape of query", lambda: flex_attention(ANGLES, K, K)),
    "flex, more": ("return_aux", lambda: flex_attention(Q, Q, Q, return_aux=3)),
    "xformers of none": ("query", lambda: xf.memory_efficient_attention(None, K, K)),  # type: ignore[arg-type]
    "xformers' lengths": ("lengths of an attn_bias", lambda: xf.BlockDiagonalMask.from_seqlens(["a"])),  # type: ignore[list-item]
    "xformers' window": (
        "window of attn_bias",
        lambda: xf.memory_efficient_attention(Q, Q, Q, xf.LocalAttentionFromBottomRightMask("a", 1)),  # type: ignore[arg-type]
    ),
    "a mask of other tokens": ("shape of attention_mask", lambda: bert_padding.unpad_input(Q, torch.ones(2, 6))),
    "lengths in a list": (
        "attention_mask_in_length",
        lambda: bert_padding.unpad_input_for_concatenated_sequences(Q, [[5], [5]]),  # type: ignore[arg-type]
    ),
    "lengths of other rows": (
        "shape of attention_mask_in_length",
        lambda: bert_padding.unpad_input_for_concatenated_sequences(Q, torch.ones(2, 6, dtype=I32)),
    ),
    "a list to pad": ("hidden_states", lambda: bert_padding.pad_input([1], CU, 2, 5)),  # type: ignore[arg-type]
    "more rows than places": ("shape of indices", lambda: bert_padding.pad_input(PACKED, CU, 2, 5)),
    "causal?": (
        "is_causal",
        lambda: tilewise.scaled_dot_product_attention(Q, Q, Q, is_causal="yes"),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_error(name: str) -> None:
    words, call = WRONG[name]
    with pytest.raises(tilewise.AttentionError, match=words):
        call()
