"""Whether a sharded model computes what one rank would, and nothing leaks: asked of the model itself, not of its
parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionError
from .api import attention, use
from .layout import starts
from .plan import Plan
from .planning import plan as plan_of


class Report(NamedTuple):
    """The largest difference from one rank, as a part of the largest value; and the tokens that were perturbed."""

    error: float
    perturbed: tuple[int, ...]


def check(
    plan: Plan, call: Callable[..., Tensor] | None = None, *inputs: Tensor, layers: int = 1, tolerance: float = 1e-3,
    probes: int = 3, seed: int = 0, **options: Any,
) -> Report:  # fmt: skip
    """Compare a sharded computation with one rank's, and change one token at a time to see who notices.

        tilewise.distributed.check(plan, softcap=30.0)                       attention itself, on random numbers
        tilewise.distributed.check(plan, model, tokens, layers=model.layers)  a model, called as model(plan, tokens)

    call(plan, *parts) gets this rank's parts of `inputs` (whole, the same on every rank, tokens along dim 1) and
    returns its outputs, tokens along dim 1; attention within it finds the plan in use. It must be deterministic.
    Raises where the outputs differ by more than `tolerance` of the largest, or where an output changes with a token
    that it cannot see, through so many `layers`, or where none changes that sees it. All ranks must call it; use a
    small copy.
    """
    if call is None:
        call, inputs = _attention(plan, seed, options)
    if plan.strategy == "tree":
        raise AttentionError("a plan to check", "strategy='tree'", "one whose queries are sharded")
    before, after = plan.band
    cu = starts(plan.lengths)
    given: dict[str, Any] = {"cu_seqlens": cu} if plan.packed else {"seqlen": plan.tokens}
    alone = plan_of(1, **given, window=(before, after), mask=plan.mask)
    with torch.no_grad():
        sharded, whole = _run(plan, call, inputs), _run(alone, call, inputs)
        scale = whole.float().abs().max().clamp(min=1e-30)
        error = float((sharded.float() - whole.float()).abs().max() / scale) if whole.numel() else 0.0
        if not error <= tolerance:
            raise AttentionError("the difference from one rank", f"{error:.1e}", f"at most {tolerance:.1e}")
        generator = torch.Generator().manual_seed(seed)
        perturbed = tuple(int(x) for x in torch.randint(plan.tokens, (probes,), generator=generator)) if cu[-1] else ()
        for token in perturbed:
            _probe(plan, call, inputs, sharded, token, layers)
    return Report(error, perturbed)


def _run(plan: Plan, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    with use(plan):
        return plan.unshard(call(plan, *(plan.shard(x) for x in inputs)))


def _probe(
    plan: Plan, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], sharded: Tensor, token: int, layers: int
) -> None:
    changed = []
    for x in inputs:
        y = x.clone()
        y[:, token] = y[:, token] + 1 if y.is_floating_point() else y[:, (token + 1) % y.shape[1]] + 1
        changed.append(y)
    other = _run(plan, call, tuple(changed))
    moved = (other != sharded).movedim(1, 0).flatten(1).any(1)
    document = next(d for d, end in enumerate(starts(plan.lengths)[1:]) if token < end)
    first, last = starts(plan.lengths)[document : document + 2]
    before, after = plan.band  # a query before + layers away still sees it, through others
    low = first if after is None else max(first, token - after * layers)
    high = last if before is None else min(last, token + before * layers + 1)
    outside = moved.clone()
    outside[low:high] = False
    if outside.any():
        where = outside.nonzero().flatten()[:5].tolist()
        raise AttentionError(
            f"outputs that change with token {token}", where, f"only {low} to {high - 1}, which see it"
        )
    if not moved.any() and plan.mask is None:
        raise AttentionError(f"outputs that change with token {token}", "none", f"some of {low} to {high - 1}")


def _attention(plan: Plan, seed: int, options: dict[str, Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    device = options.pop("device", None)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, plan.tokens, 4, 64, generator=generator).to(device)

    def call(_plan: Plan, part: Tensor) -> Tensor:
        found: Tensor = attention(part, part[:, :, ::2], part[:, :, 1::2], **options)
        return found

    return call, (x,)
