"""SGLang's attention backend on `attention_kv`. `tilewise.integrations.sglang` registers it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from ..errors import AttentionError
from ..kv_warmup import StepLimits
from .steps import Memory, Step

MIN_TABLE = 1024  # tokens


class TilewiseBackend(AttentionBackend):  # type: ignore[misc]
    """Decoding and prefill over SGLang's pool of tokens, in pages of the server's page size.

    The lengths and tables of a step are written on the device; the host reads no length. A CUDA graph of decoding reads
    them from `graph_memory`, which is written before every replay: SGLang may change `req_to_token` for the next batch
    as soon as the replay has started.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.pool, self.page = runner.token_to_kv_pool, runner.page_size
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        if getattr(runner, "use_mla_backend", False):
            raise AttentionError("the model's attention", "MLA", "keys and values of every head")
        if hasattr(self.pool, "translate_loc_from_full_to_swa"):
            raise AttentionError(
                "the KV pool", "a hybrid pool with separate memory for windows", "--disable-hybrid-swa-memory"
            )
        requests, length = self.req_to_token.shape
        self.limits = StepLimits(tokens=length, sequences=requests, length=length)
        self.one_each = torch.arange(requests + 1, dtype=torch.int32, device=self.req_to_token.device)
        self.memory: Memory = {}
        self.graph_memory: tuple[Tensor, Tensor, Tensor] | None = None
        self.forward_metadata: Step | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        new = self.req_to_token.new_zeros
        pages = -(-self.req_to_token.shape[1] // self.page)
        lengths, table = new(max_bs, dtype=torch.int32), new((max_bs, pages), dtype=torch.int32)
        self.graph_memory = lengths, table, self.offsets(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step of a forward that is not a CUDA graph."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_target_verify():
            raise AttentionError(
                "the step", "one that verifies drafts", "decoding or prefill: tree masks are not supported"
            )
        known, most, cu = forward_batch.seq_lens_cpu, 1, self.offsets(batch)
        longest = self.req_to_token.shape[1] if known is None else max([*known.tolist(), MIN_TABLE])
        if not mode.is_decode():
            cu = torch.zeros_like(cu)
            cu[1:].copy_(forward_batch.extend_seq_lens.cumsum(0))
            most = max([*forward_batch.extend_seq_lens_cpu, 0])
        tokens = 1 << (longest - 1).bit_length()  # of few sizes: calls of a known shape are prepared once
        self.begin(forward_batch.seq_lens.int(), self.table(forward_batch, tokens), cu, most)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The step of a CUDA graph, before its capture and before each of its replays."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle():
            self.forward_metadata = None
            return
        if not mode.is_decode():
            raise AttentionError("a CUDA graph", f"one of the mode {mode.name}", "decoding, or prefill in pieces")
        assert self.graph_memory is not None, "init_cuda_graph_state comes first"
        lengths, table, offsets = self.graph_memory
        lengths, table = lengths[:batch], table[:batch]
        lengths.copy_(forward_batch.seq_lens)
        self.table(forward_batch, self.req_to_token.shape[1], out=table)
        self.begin(lengths, table, offsets[: batch + 1], 1)

    def offsets(self, batch: int) -> Tensor:
        """Of one query of each sequence."""
        if batch >= self.one_each.shape[0]:
            self.one_each = torch.arange(2 * batch + 1, dtype=torch.int32, device=self.one_each.device)
        return self.one_each[: batch + 1]

    def table(self, forward_batch: Any, tokens: int, out: Tensor | None = None) -> Tensor:
        """The page table for this many tokens of each sequence."""
        first = self.req_to_token[:, :tokens][:, :: self.page]  # of every page, the slot of its first token
        found = torch.index_select(first, 0, forward_batch.req_pool_indices, out=out)
        return found if self.page == 1 else found.floor_divide_(self.page)

    def begin(self, lengths: Tensor, table: Tensor, cu: Tensor, most: int) -> None:
        """The step whose attention the layers compute next."""
        most = self.limits.max_seqlen_q(most)
        self.forward_metadata = Step(lengths, cu, table, most, self.limits.backend(most), self.memory)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """q (tokens, H D) -> (tokens, H Dv)."""
        _check(layer, others)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        k_cache, v_cache = (x.unflatten(0, (-1, self.page)) for x in self.pool.get_kv_buffer(layer.layer_id))
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        window = layer.sliding_window_size
        options: dict[str, Any] = {"scale": layer.scaling, "softcap": layer.logit_cap or None, "sinks": sinks}
        options["causal"] = layer.attn_type.value == "decoder"
        options["window"] = None if window is None or window < 0 else (window, 0)
        assert self.forward_metadata is not None, "init_forward_metadata comes first"
        self.forward_metadata.attend(q, k_cache, v_cache, out, **options)
        return out.flatten(1)

    forward_extend = forward_decode  # the step has the number of queries


def _check(layer: Any, others: dict[str, Any]) -> None:
    """Raises if the layer needs something that is not supported."""
    if layer.is_cross_attention or layer.attn_type.value == "encoder_only":
        raise AttentionError("the layer", "a layer of an encoder", "a layer of a decoder")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise AttentionError("logit_capping_method", layer.logit_capping_method, "tanh")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise AttentionError("xai_temperature_len", layer.xai_temperature_len, "-1: not supported")
    unknown = [name for name, x in others.items() if x is not None and x is not False]
    if unknown:
        raise AttentionError("arguments of the attention layer", ", ".join(unknown), "no argument but sinks")
