"""Tiny models of transformers whose tokens are sharded: loss and every gradient are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import tilewise.integrations.transformers  # noqa: F401 - registers
from tests.tilewise.integrations.hf_models import MODELS, VOCABULARY
from tilewise import AttentionError
from tilewise.distributed import Plan, check, plan, use

DOCUMENTS = [0, 14, 15, 33]


def model(name: str, **words: Any) -> Any:
    kind = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, kind.config)(**kind.words | words)
    return getattr(transformers, kind.kind)._from_config(config, attn_implementation="tilewise").train()


def text(n: int, rows: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(1))


def step(one: Any, made: Plan, tokens: Tensor, padding: Tensor, **words: Any) -> list[Tensor]:
    """This rank's part of the loss and of the gradients of all weights."""
    one.zero_grad()
    labels = made.labels(tokens.masked_fill(padding == 0, -100)).masked_fill(made.shard(padding) == 0, -100)
    if not padding.all():
        words["attention_mask"] = made.shard(padding)
    found = one(
        input_ids=made.shard(tokens), position_ids=made.positions()[None], labels=labels, shift_labels=labels,
        num_items_in_batch=tokens.numel(), **words,
    )  # fmt: skip
    with use(None):  # layers that are computed again know their plan
        found.loss.backward()
    return [found.loss.detach(), *(w.grad.clone() for w in one.parameters())]


def same(
    name: str, given: dict[str, Any], tokens: Tensor, padding: Tensor | None = None, again: bool = False
) -> list[str]:
    """As transformers itself computes it in one process, "eager"; `again`: layers are computed again."""
    one, made, alone = model(name), plan(**given), plan(1, **given)
    padding = torch.ones_like(tokens) if padding is None else padding
    if again:
        one.gradient_checkpointing_enable()
    with use(made):
        ours = step(one, made, tokens, padding)
    for x in ours:
        dist.all_reduce(x)
    one.set_attn_implementation("eager")
    expected = step(one, alone, tokens, padding, use_cache=False)
    apart = max(float((x - y).abs().max() / (1e-3 + y.abs().max())) for x, y in zip(ours, expected, strict=True))
    return [f"{name}, {made}: {apart:.1e} from one process"] if apart > 1e-4 else []


def models(rank: int, ranks: int) -> list[str]:
    tokens, packed = text(33, 2), text(33, 1)
    left = (torch.arange(33) >= torch.tensor([[0], [5]])).long()
    causal = {"seqlen": 33, "causal": True}
    found = same("llama", causal, tokens)
    found += same("llama", causal, tokens, left)
    found += same("llama", {"cu_seqlens": DOCUMENTS, "causal": True}, packed)
    found += same("gemma2", causal | {"strategy": "ulysses"}, tokens)  # windows in every other layer, and a softcap
    found += same("gpt_oss", causal, tokens)  # sinks; of its own transformers finds no documents here
    found += same("mistral", {"seqlen": 33, "window": (5, 0)}, tokens, again=True)
    return found + refusals(tokens) + probed(packed)


def refusals(tokens: Tensor) -> list[str]:
    """Said before anything is sent, on every rank."""
    one, made = model("llama"), plan(seqlen=33, causal=True)
    pairs = torch.ones(2, 1, len(made.index()), len(made.index()), dtype=torch.bool)
    wrong: Sequence[tuple[str, dict[str, Any]]] = (
        ("position_ids", {}),  # counted from 0 on this rank
        ("attention_mask of a layer", {"position_ids": made.positions()[None], "attention_mask": pairs}),
    )
    found = []
    for name, words in wrong:
        with use(made), suppress(AttentionError):
            try:
                one(input_ids=made.shard(tokens), **words)
            except AttentionError as error:
                if not str(error).startswith(name):
                    found.append(f"{name}: {error}")
                raise
            found.append(f"{name}: nothing was said")
    return found


def probed(tokens: Tensor) -> list[str]:
    """The probe, asked of a model."""
    one = model("gemma2").eval()

    def logits(made: Plan, part: Tensor) -> Tensor:
        found: Tensor = one(input_ids=part, position_ids=made.positions()[None]).logits
        return found

    report = check(plan(cu_seqlens=DOCUMENTS, causal=True), logits, tokens, layers=2)
    return [] if report.error < 1e-5 and len(report.perturbed) == 3 else [str(report)]


def models_compiled(rank: int, ranks: int) -> list[str]:
    """One graph without a break, which serves a plan again; loss and gradients are those without compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    found, tokens = [], text(33, 1)
    one = model("gemma2")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(one, backend=counter, fullgraph=True)
    made = plan(cu_seqlens=DOCUMENTS, causal=True)
    expected = compiled_step(one, one, made, tokens)
    for _ in range(2):
        ours = compiled_step(compiled, one, made, tokens)
        if not all(torch.allclose(x, y, atol=1e-6) for x, y in zip(ours, expected, strict=True)):
            found.append("the compiled model computes something else")
    return found if counter.frame_count == 1 else [*found, f"{counter.frame_count} graphs"]


def compiled_step(call: Any, one: Any, made: Plan, tokens: Tensor) -> list[Tensor]:
    """As `step`, of a model and of what compilation made of it."""
    one.zero_grad()
    labels = made.labels(tokens)
    with use(made):
        found = call(
            input_ids=made.shard(tokens), position_ids=made.positions()[None], labels=labels, shift_labels=labels,
            num_items_in_batch=tokens.numel(), use_cache=False,
        )  # fmt: skip
        found.loss.backward()
    return [found.loss.detach(), *(w.grad.clone() for w in one.parameters())]
