"""SGLang's interface of attention backends, as far as one backend sees it: names, signatures and defaults of
`sglang/srt/layers/attention/base_attn_backend.py`, `radix_attention.py`, `forward_batch_info.py` and the pools in
SGLang 0.5.23 (0.5.15 has the same)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None


class RadixAttention(SimpleNamespace):
    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int, logit_cap: float = 0.0,
        v_head_dim: int = -1, sliding_window_size: int = -1, is_cross_attention: bool = False,
        attn_type: AttentionType = AttentionType.DECODER, logit_capping_method: str = "tanh",
    ) -> None:  # fmt: skip
        super().__init__(
            tp_q_head_num=num_heads, tp_k_head_num=num_kv_heads, tp_v_head_num=num_kv_heads, qk_head_dim=head_dim,
            v_head_dim=v_head_dim if v_head_dim != -1 else head_dim, scaling=scaling, layer_id=layer_id,
            logit_cap=logit_cap, sliding_window_size=sliding_window_size or -1, is_cross_attention=is_cross_attention,
            attn_type=attn_type, logit_capping_method=logit_capping_method, xai_temperature_len=-1,
        )  # fmt: skip


class MHATokenToKVPool:
    """Buffers (slots, heads, dim) of every layer; slots are those of the pages, one after another."""

    def __init__(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        self.k_buffer, self.v_buffer = k, v

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:  # fmt: skip
        self.k_buffer[layer.layer_id][loc_info], self.v_buffer[layer.layer_id][loc_info] = cache_k, cache_v


class AttentionBackend:
    needs_cpu_seq_lens: bool = True

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        raise NotImplementedError

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        raise NotImplementedError

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        raise NotImplementedError


ATTENTION_BACKENDS: dict[str, Any] = {}
CHOICES: list[str] = []


def register_attention_backend(name: str) -> Any:
    def decorator(fn: Any) -> Any:
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


def add_attention_backend_choices(choices: list[str]) -> None:
    CHOICES.extend(choices)


MODULES = (
    "sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.server_args",
    "sglang.srt.layers.attention.attention_registry", "sglang.srt.layers.attention.base_attn_backend",
)  # fmt: skip
