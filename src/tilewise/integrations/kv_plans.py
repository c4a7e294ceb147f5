"""The plans of a step, for engines whose layers are not all alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kv_cache import plan_kv
from ..kv_request import KvPlan


class Plans(dict[Any, KvPlan]):
    """Made by the first of the layers that are alike, used by the others. Of one step: the next has its own.

    >>> plans, lengths = Plans(), torch.tensor([5, 20], dtype=torch.int32)
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> for window in ((15, 0), None, (15, 0), None):
    ...     plan = plans.of(q, cache, cache, lengths, {"window": window})
    >>> len(plans)
    2

    Where a CUDA graph is being captured, the plan is part of it, and no plan from before is.
    """

    def of(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, words: dict[str, Any]) -> KvPlan:
        recorded = q.is_cuda and torch.cuda.is_current_stream_capturing()
        alike = q.shape, k_cache.shape[1:], v_cache.shape[3], words.get("causal"), words.get("window"), recorded
        plan = self.get(alike)
        if plan is None:
            plan = self[alike] = plan_kv(q, k_cache, v_cache, lengths, **words)
        return plan
