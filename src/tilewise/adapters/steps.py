"""One step of a serving engine, for all its layers: shared by the adapters of vLLM, SGLang and FlashAttention-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.options import BackendName
from ..kv_cache import PlanMemory, append_kv, attention_kv, plan_kv, plan_kv_in
from ..kv_request import KvPlan

Memory = dict[Any, PlanMemory]


class Plans(dict[Any, KvPlan]):
    """The plans of one step. Made by the first of the layers with equal shapes and band, used by the others.

    >>> plans, lengths = Plans(), torch.tensor([5, 20], dtype=torch.int32)
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> for window in ((15, 0), None, (15, 0), None):
    ...     plan = plans.of(q, cache, cache, lengths, {"window": window})
    >>> len(plans)
    2

    During the capture of a CUDA graph new plans are made, as part of the graph.

    Args:
        memory: where the plans of one kind of layer after another step are made; None: each plan has its own.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory

    def of(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, options: dict[str, Any]) -> KvPlan:
        captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        caches = k_cache.shape[1:], v_cache.shape[3], k_cache.dtype, v_cache.dtype
        kind = q.shape[1:], caches, options.get("causal"), options.get("window")
        plan = self.get((q.shape, captured, kind))
        if plan is None:
            if self.memory is None:
                plan = plan_kv(q, k_cache, v_cache, lengths, **options)
            else:
                memory = self.memory.setdefault(kind, PlanMemory())
                plan = plan_kv_in(memory, q, k_cache, v_cache, lengths, **options)
            self[q.shape, captured, kind] = plan
        return plan


class Step:
    """A batch of sequences in pages. Everything but `max_seqlen_q` stays on the device.

    Args:
        lengths: tokens of each sequence, with the new ones unless `attend` is given these.
        cu_seqlens_q: offsets of the queries.
        page_table: the pages of each sequence.
        max_seqlen_q: the largest number of queries of one sequence.
        backend: as in `attention_kv`, on a GPU.
        memory: as in `Plans`.
    """

    def __init__(
        self,
        lengths: Tensor,
        cu_seqlens_q: Tensor,
        page_table: Any,
        max_seqlen_q: int,
        backend: BackendName = "triton",
        memory: Memory | None = None,
    ) -> None:
        self.lengths = lengths
        self.options = {
            "cu_seqlens_q": cu_seqlens_q,
            "page_table": page_table,
            "max_seqlen_q": max_seqlen_q,
            "backend": backend if lengths.is_cuda else "auto",
        }
        self.plans = Plans(memory)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, **options: Any) -> None:
        """Writes the attention of a layer into out."""
        options = self.options | options
        plan = self.plans.of(q, k_cache, v_cache, self.lengths, options)
        attention_kv(q, k_cache, v_cache, self.lengths, out=out, plan=plan, **options)


class Writer:
    """Writes new tokens (T, Hk, D) at slots of a cache (pages, page, Hk, D). Tokens with a slot below 0 are skipped."""

    def __init__(self) -> None:
        self.zeros: dict[torch.device, Tensor] = {}

    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **scales: Tensor) -> None:
        lengths = self.zeros.get(k.device)
        if lengths is None:  # not used with slots; allocated once, not in every layer of every step
            lengths = self.zeros[k.device] = torch.zeros(1, dtype=torch.int32, device=k.device)
        append_kv(k[None], v[None], k_cache, v_cache, lengths, slots=slots, backend=_backend(k), **scales)


def _backend(x: Tensor) -> BackendName:
    """By name on a GPU: "auto" may choose the reference, which reads lengths, and no CUDA graph can."""
    return "triton" if x.is_cuda else "auto"
