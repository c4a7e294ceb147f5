"""Models of transformers with tilewise and with what transformers offers: training steps, generate, attention modules.

A Llama of 8B's width with 4 layers and random weights: a training step at 4k and 16k tokens, and `generate` with a
static cache. The attention modules of a Gemma 2 (softcap) and of a gpt-oss (sinks, windows), beside eager and
FlexAttention. Each answer is compared before it is timed, by the clock on the wall. On a CPU it is small.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise_lab.bench.judge import Error, condemn, note
from tilewise_lab.bench.provider import OURS
from tilewise_lab.bench.results import Cell, Entry, Results
from tilewise_lab.bench.runner import Run
from tilewise_lab.clock import StepClock

LAYERS: dict[str, dict[str, Any]] = {
    "Gemma2": {
        "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 4096, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 128,
    },
    "GptOss": {
        "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "num_hidden_layers": 1, "vocab_size": 128,
    },
}  # fmt: skip
MODULES = (("Gemma2", "full_attention"), ("GptOss", "full_attention"), ("GptOss", "sliding_attention"))
Answer = Callable[[], dict[str, Tensor]]
PEERS = ("sdpa", OURS)


def rows(run: Run, results: Results, options: Namespace) -> Iterator[tuple[str, Callable[[], Iterator[Cell]]]]:
    if util.find_spec("transformers") is None:
        raise AttentionError("target", "hf", "transformers, which is not installed")
    transformers = import_module("transformers")
    import_module("tilewise.integrations.transformers").register()
    transformers.logging.set_verbosity_error()
    results.notes["transformers"] = transformers.__version__
    small = run.device.type != "cuda"
    for tokens in (64,) if small else (4096, 16384):
        yield f"training at {tokens} tokens", partial(train, run, tokens)
    for compiled in (False,) if small else (True, False):
        yield "generate" + ", compiled" * compiled, partial(generate, run, compiled)
    for kind, layer_type in MODULES:
        yield f"{kind}, {layer_type}", partial(module, run, kind, layer_type)


def build(run: Run, implementation: str) -> Any:
    transformers, small = import_module("transformers"), run.device.type != "cuda"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64 if small else 4096, intermediate_size=128 if small else 14336, num_hidden_layers=4,
        num_attention_heads=4 if small else 32, num_key_value_heads=2 if small else 8, vocab_size=8192,
        max_position_embeddings=32768, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = implementation
    with torch.device(run.device):
        return transformers.LlamaForCausalLM(config).to(dtype_of(run))


def dtype_of(run: Run) -> torch.dtype:
    return torch.bfloat16 if run.device.type == "cuda" else torch.float32


def compared(
    run: Run, name: str, answers: Mapping[str, Answer], works: Mapping[str, Callable[[], Any]], truth: str,
    limit: float, in_a_row: int,
) -> Iterator[Cell]:  # fmt: skip
    """A cell of those whose answers are near that of `truth`. Who fails is listed with the reason."""
    entries: dict[str, Entry] = {}
    found: dict[str, dict[str, Tensor]] = {}
    for who, answer in answers.items():
        entries[who], told = run.attempt(answer)
        if told is not None:
            found[who] = told
    for who in found:
        if who != truth and truth in found:
            errors = {what: Error(away(found[who][what], x), limit) for what, x in found[truth].items()}
            note(entries[who], errors)
            condemn(entries[who], errors)
    clock = StepClock(run.device)
    clock.in_a_row = in_a_row
    cell = Cell("hf", name, {}, None, OURS, entries, checked=f"beside {truth}, by the norm")
    run.time(cell, {who: works[who] for who in found if entries[who].status == "ok"}, clock=clock)
    yield cell
    run.tidy()


def away(a: Tensor, b: Tensor) -> float | None:
    error = ((a.float() - b.float()).norm() / b.float().norm()).item()
    return error if error < float("inf") else None


def train(run: Run, tokens: int) -> Iterator[Cell]:
    models = {name: build(run, name).train() for name in PEERS}
    ids = torch.randint(3, 8192, (1, tokens), device=run.device)

    def step(name: str) -> Tensor:
        models[name].zero_grad(set_to_none=True)
        loss: Tensor = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def answer(name: str) -> dict[str, Tensor]:
        return {"loss": step(name), "dq_proj": models[name].model.layers[0].self_attn.q_proj.weight.grad.clone()}

    answers = {name: partial(answer, name) for name in PEERS}
    works = {name: partial(step, name) for name in PEERS}
    yield from compared(run, f"training step, {tokens} tokens", answers, works, "sdpa", 0.1, 3)


def generate(run: Run, compiled: bool) -> Iterator[Cell]:
    prompt, new, batch = (2048, 128, 4) if run.device.type == "cuda" else (16, 8, 1)
    models = {name: build(run, name).eval() for name in PEERS}
    ids = torch.randint(3, 8192, (batch, prompt), device=run.device)

    @torch.no_grad()
    def tokens(name: str) -> Tensor:
        models[name].generation_config.eos_token_id = None
        found: Tensor = models[name].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            cache_implementation="static", disable_compile=not compiled,
        )  # fmt: skip
        return found

    @torch.no_grad()
    def answer(name: str) -> dict[str, Tensor]:
        return {"logits": models[name](ids).logits[:, -1]}  # tokens part ways at near ties in bfloat16

    what = f"generate, {batch} x ({prompt} + {new}) tokens, static cache{', compiled' if compiled else ''}"
    answers = {name: partial(answer, name) for name in PEERS}
    works = {name: partial(tokens, name) for name in PEERS}
    yield from compared(run, what, answers, works, "sdpa", 0.05, 1)


def attention_module(run: Run, kind: str, layer_type: str, implementation: str, tokens: int) -> Answer:
    """One attention module of the model, as its layer calls it: out and the gradient of its input."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    words = dict(LAYERS[kind], layer_types=[layer_type])
    if run.device.type != "cuda":
        words |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**words)
    config._attn_implementation = implementation
    with torch.device(run.device):
        model = getattr(transformers, f"{kind}Model")(config).to(dtype_of(run))
    shape = 1, tokens, config.hidden_size
    x = torch.randn(shape, device=run.device, dtype=dtype_of(run), requires_grad=True)
    place = torch.arange(tokens, device=run.device)[None]
    rotary = tuple(y.detach() for y in model.rotary_emb(x, place))
    make = "create_sliding_window_causal_mask" if "sliding" in layer_type else "create_causal_mask"
    mask = getattr(import_module("transformers.masking_utils"), make)(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=place
    )
    layer = model.layers[0].self_attn

    def step() -> dict[str, Tensor]:
        x.grad = None
        out = layer(hidden_states=x, position_embeddings=rotary, attention_mask=mask, position_ids=place)[0]
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        return {"out": out.detach(), "dx": x.grad}

    return step


def module(run: Run, kind: str, layer_type: str) -> Iterator[Cell]:
    tokens = 4096 if run.device.type == "cuda" else 64
    made: dict[str, Answer] = {}

    def answer(name: str) -> dict[str, Tensor]:
        made[name] = attention_module(run, kind, layer_type, name, tokens)
        return made[name]()

    answers = {name: partial(answer, name) for name in ("eager", OURS, "flex_attention")}

    def again(name: str) -> dict[str, Tensor]:
        return made[name]()

    works = {name: partial(again, name) for name in answers}
    what = f"{kind} attention, {layer_type}, {tokens} tokens, forward and backward"
    yield from compared(run, what, answers, works, "eager", 0.03, 5)
