"""vLLM's attention backend on `attention_kv`. `tilewise.integrations.vllm` registers it."""

from __future__ import annotations

import logging
import time
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .. import settings
from ..errors import AttentionError
from ..kv_warmup import AttentionLayer, StepLimits, compile_steps
from ..mods.modifier import mask_mod
from ..request import MAX_HEAD_DIM
from .arguments import sliding
from .steps import Memory, Step, Writer

log = logging.getLogger("tilewise")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SPLIT = 4096  # keys in a split if vLLM requires results that do not depend on the batch


@mask_mod
def causal_where(b, h, q_idx, kv_idx, causal, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    """causal (B,): nonzero for causal sequences."""
    return (kv_idx - q_idx <= kv_len - q_len) | (causal[b] == 0)


def caches(kv_cache: Tensor, head_size: int, stored: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Views of keys and values (blocks, tokens, Hk, D): of (blocks, Hk, tokens, 2 D), or before vLLM 0.29 of
    (blocks, 2, tokens, Hk, D). vLLM's float8 caches are bytes: `stored` is their dtype."""
    if stored is not None:
        kv_cache = kv_cache.view(stored)
    if kv_cache.dim() == 5:
        k, v = kv_cache.unbind(1)
    else:
        k, v = kv_cache.transpose(1, 2).split(head_size, -1)
    return k, v


def first_rows(x: Tensor, n: int) -> Tensor:
    return x if x.shape[0] == n else x[:n]


def step_limits(vllm_config: Any) -> StepLimits:
    """What vLLM's settings say about its steps."""
    scheduler, drafts = vllm_config.scheduler_config, vllm_config.speculative_config
    most = getattr(drafts, "num_speculative_tokens", None) or 0
    length = vllm_config.model_config.max_model_len
    return StepLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, length, most)


def layers_of(spec: Any, names: list[str], vllm_config: Any) -> list[AttentionLayer]:
    """The kinds of attention layers with this cache. Layers that are not ours, such as those of a draft model with
    another backend, are left out."""
    context, found = vllm_config.compilation_config.static_forward_context, {}
    for name in names:
        impl = getattr(context.get(name), "impl", None)
        if not isinstance(impl, TilewiseImpl):
            continue
        shape = TilewiseBackend.get_kv_cache_shape(2, spec.block_size, spec.num_kv_heads, spec.head_size)
        k, v = caches(torch.empty(shape, dtype=spec.dtype, device="meta"), spec.head_size, impl.stored)
        options = impl.options | impl.scales(context[name])
        kind = impl.num_heads, *[x is not None if isinstance(x, Tensor) else x for x in options.values()]
        found[kind] = AttentionLayer(impl.num_heads, k, v, vllm_config.model_config.dtype, options)
    return [*found.values()]


class Metadata(Step, AttentionMetadata):  # type: ignore[misc]
    def __init__(self, common: Any, limits: StepLimits, memory: Memory) -> None:
        most, lengths = limits.max_seqlen_q(common.max_query_len), common.seq_lens
        offsets = common.query_start_loc[: lengths.shape[0] + 1]
        super().__init__(lengths, offsets, common.block_table_tensor, most, limits.backend(most), memory)
        self.tokens, self.causal, self.slots = common.num_actual_tokens, common.causal, common.slot_mapping


class TilewiseBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes metadata without reading from the device. The first layer of a step plans, in the CUDA graph if there is
    one, into memory that the steps share. Making the builder compiles all kernels that a step can need."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.memory: Memory = {}
        self.limits = step_limits(vllm_config)
        began = time.perf_counter()
        layers = layers_of(kv_cache_spec, layer_names, vllm_config) if device.type == "cuda" else []
        count = compile_steps(layers, self.limits, device)
        if count:
            log.info(f"tilewise: {count} kernels for {len(layer_names)} layers in {time.perf_counter() - began:.1f} s")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        return Metadata(common_attn_metadata, self.limits, self.memory)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """vLLM captures with the largest lengths, which is slow; the graph is the same for any."""
        common_attn_metadata.seq_lens.fill_(1)
        return self.build(0, common_attn_metadata)

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """Metadata of layers that keep the same tokens in other blocks."""
        other = copy(metadata)
        other.options, other.slots = metadata.options | {"page_table": blk_table}, slot_mapping
        return other


class TilewiseImpl(AttentionImpl):  # type: ignore[misc]
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise AttentionError("attn_type", attn_type, "a decoder: encoders have no cache")
        unknown = [name for name, x in others.items() if isinstance(x, Tensor) or x not in (None, False, -1)]
        if unknown:
            raise AttentionError("arguments of the attention layer", unknown, "those of a plain decoder")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.sinks, self.kv_cache_dtype = float(scale), sinks, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.stored = FLOAT8.get(kv_cache_dtype)
        invariant = settings.batch_invariant()
        self.options: dict[str, Any] = {
            "causal": True,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            "scale": self.scale,
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
            "split": SPLIT if invariant else None,
            "window": sliding(sliding_window),
        }
        self.write = Writer()
        self.known: tuple[Tensor, int, tuple[Tensor, Tensor]] | None = None

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The views `caches` of this layer's cache, made again only for another tensor or memory."""
        known = self.known
        if known is None or known[0] is not kv_cache or known[1] != kv_cache.data_ptr():
            views = caches(kv_cache, self.head_size, self.stored)
            known = self.known = kv_cache, kv_cache.data_ptr(), views
        return known[2]

    def scales(self, layer: Any) -> dict[str, Tensor]:
        """The scales of a float8 cache, which the layer has: a stored number times the scale is the key or value."""
        if self.stored is None:
            return {}
        return {"k_scale": layer._k_scale.view(()), "v_scale": layer._v_scale.view(())}

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the tokens that have slots: the first of a padded batch."""
        tokens = slot_mapping.shape[0]
        new = first_rows(key, tokens), first_rows(value, tokens)
        self.write(*new, *self.caches(kv_cache), slot_mapping, **self.scales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query (tokens, H, D) over the cache, written into output. Rows of no sequence become 0."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise AttentionError("output_scale", "a tensor", "None: quantised outputs are not supported")
        slopes = self.options["alibi_slopes"]
        if slopes is not None and slopes.device != query.device:
            self.options["alibi_slopes"] = slopes.to(query.device)
        causal, tokens = attn_metadata.causal, attn_metadata.tokens
        options = self.options if self.stored is None else self.options | self.scales(layer)
        if isinstance(causal, Tensor):
            options = options | {"causal": False, "mask_mod": causal_where(causal.int())}
        elif not causal:
            options = options | {"causal": False}
        out = first_rows(output.view(-1, self.num_heads, self.head_size), tokens)
        attn_metadata.attend(first_rows(query, tokens), *self.caches(kv_cache), out, **options)
        return output


class TilewiseBackend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseBuilder]:
        return TilewiseBuilder

    @staticmethod
    def get_metadata_cls() -> type[Metadata]:
        return Metadata

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Called before vLLM 0.29, which defines the shape itself."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
