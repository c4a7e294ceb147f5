"""transformers within `tilewise.distributed.use(plan)`: each rank has some of the tokens, and its layers see all.

    with tilewise.distributed.use(plan):
        model(input_ids=plan.shard(tokens), position_ids=plan.positions()[None])

The plan knows the documents; a model's layers say how far they see, which may differ from layer to layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed import Plan
from ..distributed import attention as attention_over
from ..errors import AttentionError


def whole_padding(plan: Plan, padding: Tensor | None) -> Tensor | None:
    """A padding mask of all tokens, from that of this rank's; None if nothing is hidden, on every rank alike."""
    if padding is None:
        return None
    whole = plan.unshard(padding.to(torch.uint8)).bool()
    if bool(whole.all()):
        return None
    if plan.packed:
        raise AttentionError("attention_mask", "padding, with a plan of packed documents", "documents without padding")
    return whole


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], refused: dict[str, Any]) -> Tensor:
    """(B, H, S, D) of this rank -> (B, S, H, D). `refused`: what a plan does not take, None where it is not there."""
    for name, value in refused.items():
        if value is not None:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise AttentionError(f"{name} of a layer in use(plan)", found, f"none: {WHY[name]}")
    if q.shape[2] != k.shape[2]:
        raise AttentionError(
            "keys of a layer in use(plan)",
            k.shape[2],
            f"this rank's {q.shape[2]} tokens alone: no cache; layers that see something else belong in use(None)",
        )
    out: Tensor = attention_over(q, k, v, plan=plan, layout="bhsd", **options)
    return out.transpose(1, 2)


WHY = {
    "cu_seq_lens_q": "plan(cu_seqlens=...) knows the documents",
    "cache": "a paged cache is not sharded",
    "position_bias": "it was made of positions on this rank",
    "attention_mask": "a mask of pairs knows this rank's tokens alone; plan(mask=...) takes a mask mod of all",
}


def check_positions(plan: Plan, given: Any) -> None:
    """Raises for positions that are not the plan's: RoPE and documents would be wrong without an error."""
    if not isinstance(given, Tensor) or given.dim() != 2 or torch.compiler.is_compiling():
        return
    expected = plan.positions(device=given.device)
    if given.shape[1] != len(expected) or not bool((given == expected).all()):
        found = f"{given[0, :4].tolist()}, ..." if given.numel() else tuple(given.shape)
        raise AttentionError(
            "position_ids",
            found,
            f"plan.positions()[None], here {expected[:4].tolist()}, ... (others only beside an attention_mask)",
        )
