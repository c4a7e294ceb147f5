"""Compares a sharded model with the same model on one rank, and perturbs tokens to find outputs that depend on tokens
they must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError
from .api import attention, use
from .layout import starts
from .plans import Plan, replan


class Report(NamedTuple):
    """The largest difference from one rank, relative to the largest value; and the tokens that were perturbed."""

    error: float
    perturbed: tuple[int, ...]


def check(
    plan: Plan,
    call: Callable[..., Tensor] | None = None,
    *inputs: Tensor,
    layers: int = 1,
    tolerance: float = 1e-3,
    probes: int = 3,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Compare a sharded computation with one rank's, and perturb one token at a time.

    >>> import torch, tilewise
    >>> import torch.distributed as dist
    >>> store = dist.HashStore()  # as torchrun does it, here for one rank
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> plan = tilewise.distributed.plan(mesh, seqlen=10, causal=True)
    >>> tilewise.distributed.check(plan, softcap=30.0).error <= 1e-5
    True
    >>> dist.destroy_process_group()

        # a model, called as model(plan, tokens)
        tilewise.distributed.check(plan, model, tokens, layers=model.layers)

    All ranks must call it. Use a small copy of the model.

    Args:
        plan: how tokens are sharded.
        call: `call(plan, *shards)` takes this rank's shards of `inputs` and returns its outputs, tokens along dim 1.
            Attention within it finds the plan in use. It must be deterministic. None: attention itself.
        inputs: whole tensors, the same on every rank, tokens along dim 1.
        layers: how many layers of attention the model has.
        tolerance: tolerance of the difference from one rank, relative to the largest output.
        probes: how many tokens are perturbed.
        seed: seed of the choice of tokens, and of the random inputs of attention itself.
        options: options of attention itself.

    Returns:
        The largest difference from one rank, relative to the largest output, and the tokens that were perturbed.

    Raises:
        AttentionError: outputs differ by more than `tolerance`, an output changes with a token that it cannot see
            through `layers` layers, or no output changes with a perturbed token.
    """
    if call is None:
        call, inputs = _attention(plan, seed, options)
    if plan.strategy == "tree":
        raise AttentionError("a plan to check", "strategy='tree'", "one whose queries are sharded")
    with torch.no_grad():
        sharded, whole = _run(plan, call, inputs), _run(replan(plan, ranks=1), call, inputs)
        if not whole.numel():
            return Report(0.0, ())
        error = _compared(plan, sharded.float(), whole.float(), tolerance)
        generator = torch.Generator().manual_seed(seed)
        perturbed = tuple(int(x) for x in torch.randint(plan.tokens, (probes,), generator=generator, device="cpu"))
        for token in perturbed:
            _probe(plan, call, inputs, sharded, token, layers)
    return Report(error, perturbed)


def _run(plan: Plan, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    with use(plan):
        return plan.unshard(call(plan, *(plan.shard(x) for x in inputs)))


def _compared(plan: Plan, sharded: Tensor, whole: Tensor, tolerance: float) -> float:
    """The largest difference, if it is small enough."""
    apart = (sharded - whole).abs().movedim(1, 0).flatten(1).amax(1) / whole.abs().max().clamp(min=1e-30)
    token = int(apart.argmax())  # nan is the largest
    error = float(apart[token])
    if not error <= tolerance:
        rank = next(r for r in range(plan.ranks) if token in plan.index(r))
        raise AttentionError(
            "the difference from one rank",
            f"{error:.1e}, largest at token {token}, on rank {rank}",
            f"at most {tolerance:.1e}: use plan.positions() for positions, never the number of a token within its rank",
        )
    return error


def _perturbed(x: Tensor, token: int) -> Tensor:
    """The input with one token changed. Token ids change to another id of the input, which every vocabulary has."""
    y = x.clone()
    if x.is_floating_point():
        y[:, token] += 1
        return y
    known = x.unique()
    if len(known) == 1:
        known = torch.cat([known, torch.where(known > 0, known - 1, known + 1)])
    y[:, token] = known[(torch.searchsorted(known, y[:, token]) + 1) % len(known)]
    return y


def _probe(
    plan: Plan, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], sharded: Tensor, token: int, layers: int
) -> None:
    other = _run(plan, call, tuple(_perturbed(x, token) for x in inputs))
    moved = (other != sharded).movedim(1, 0).flatten(1).any(1)
    document = next(d for d, end in enumerate(starts(plan.lengths)[1:]) if token < end)
    first, last = starts(plan.lengths)[document : document + 2]
    before, after = plan.band  # each layer moves information by one band
    low = first if after is None else max(first, token - after * layers)
    high = last if before is None else min(last, token + before * layers + 1)
    outside = moved.clone()
    outside[low:high] = False
    if outside.any():
        where = outside.nonzero().flatten()[:5].tolist()
        raise AttentionError(
            f"outputs that change with token {token}",
            where,
            f"only {low} to {high - 1}, which see it through {layers} layers (layers=...)",
        )
    if not moved.any() and plan.mask is None:
        raise AttentionError(
            f"outputs that change with token {token}", "none", f"some of {low} to {high - 1}, which see it"
        )


def _attention(plan: Plan, seed: int, options: dict[str, Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    if not isinstance(plan, Plan):
        raise AttentionError("plan", type(plan).__name__, "one made by tilewise.distributed.plan")
    device = options.pop("device", None)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, plan.tokens, 4, 64, generator=generator, device="cpu").to(device)

    def call(_plan: Plan, part: Tensor) -> Tensor:
        found: Tensor = attention(part, part[:, :, ::2], part[:, :, 1::2], **options)
        return found

    return call, (x,)
