"""What a serving engine tells of a step, once for all layers: shared by the backends of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kv_cache import append_kv, attention_kv
from .kv_plans import Plans


class Step:
    """A batch of sequences in pages: `lengths` tokens of each, with the new ones; `cu` offsets of their queries among
    the tokens; `table` of their pages; `most` queries of one sequence. All but `most` stay on the device."""

    def __init__(self, lengths: Tensor, cu: Tensor, table: Any, most: int) -> None:
        self.lengths = lengths
        backend = "triton" if lengths.is_cuda else "auto"  # by name: the reference reads lengths, which no graph can
        self.words = {"cu_seqlens_q": cu, "page_table": table, "max_seqlen_q": most, "backend": backend}
        self.plans = Plans()

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, **options: Any) -> Tensor:
        """Attention of a layer."""
        words = self.words | options
        plan = self.plans.of(q, k_cache, v_cache, self.lengths, words)
        attention_kv(q, k_cache, v_cache, self.lengths, out=out, plan=plan, **words)
        return out


class Writer:
    """Writes new tokens (T, Hk, D) at slots of a cache (pages, page, Hk, D); below 0: not at all."""

    def __init__(self) -> None:
        self.nowhere: dict[torch.device, Tensor] = {}

    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        lengths = self.nowhere.get(k.device)
        if lengths is None:  # the slots say all; made once, not in every layer of every step
            lengths = self.nowhere[k.device] = torch.zeros(1, dtype=torch.int32, device=k.device)
        backend = "triton" if k.is_cuda else "auto"
        append_kv(k[None], v[None], k_cache, v_cache, lengths, slots=slots, backend=backend)
