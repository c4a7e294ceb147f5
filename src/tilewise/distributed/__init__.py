"""Exact context parallelism on torch.distributed: attention over sequences that do not fit on one GPU.

plan = tilewise.distributed.plan(mesh, seqlen=1_000_000, causal=True)
q, k, v = plan.shard(q, k, v)
out = tilewise.distributed.attention(q, k, v, plan=plan)
"""

from .api import attention, current, rehearse, use
from .plans import Plan, plan
from .probe import check

__all__ = ["Plan", "attention", "check", "current", "plan", "rehearse", "use"]
