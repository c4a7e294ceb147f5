"""Models of transformers on a GPU with tilewise and with what transformers offers: time, memory, agreement.

    python bench/hf.py                          # all of it, in at most 95 seconds; the table comes last
    python bench/hf.py train-4k gemma2 --keep   # two of the cases, kept in bench/results

A Llama of 8B's width with 4 layers and random weights, bfloat16: a training step (forward and backward) at 4k and 16k
tokens, and `generate` with a static cache. The attention modules of a Gemma 2 (softcap) and of a gpt-oss (sinks,
windows), beside eager and FlexAttention. Each answer is compared before it is timed; measurements are taken in turns,
by the clock on the wall, and only ratios are meant. On a CPU it is small: to see that it runs.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from bounded import DEVICE, OURS, SMALL, Row, main, row
from torch import Tensor
from transformers import masking_utils

import tilewise.integrations.transformers
from tilewise_lab.bench.measure import rounds
from tilewise_lab.clock import StepClock, synchronize

DTYPE = torch.float32 if SMALL else torch.bfloat16
LLAMA: dict[str, Any] = {
    "hidden_size": 64 if SMALL else 4096, "intermediate_size": 128 if SMALL else 14336, "num_hidden_layers": 4,
    "num_attention_heads": 4 if SMALL else 32, "num_key_value_heads": 2 if SMALL else 8, "vocab_size": 8192,
    "max_position_embeddings": 32768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PEERS = ("sdpa", OURS)


def in_turns(calls: dict[str, Callable[[], Any]], in_a_row: int, limit: float = 8.0) -> dict[str, float]:
    """Medians of the wall clock, in milliseconds: a step of training or of decoding includes its host."""
    clock = StepClock(DEVICE)
    clock.in_a_row = in_a_row
    found = rounds(calls, clock, count=7, burst=0.1, limit=limit, rng=random.Random(0))
    return {name: 1e3 * statistics.median(each) for name, each in found.items()}


def peak(call: Callable[[], Any]) -> float:
    """MiB beyond what was there."""
    if DEVICE.type != "cuda":
        return 0.0
    synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(DEVICE)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def away(a: Tensor, b: Tensor) -> float:
    """The distance of two answers, relative to their size."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def agreed(what: str, found: dict[str, float], budget: float) -> dict[str, float]:
    if not max(found.values()) <= budget:
        raise RuntimeError(f"{what} disagrees: {found}")
    return found


def build(implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA)
    config._attn_implementation = implementation
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config).to(DTYPE)


def train(tokens: int) -> Callable[[], list[Row]]:
    models = {name: build(name).train() for name in PEERS}
    ids = torch.randint(3, LLAMA["vocab_size"], (1, tokens), device=DEVICE)

    def step(name: str) -> Tensor:
        models[name].zero_grad(set_to_none=True)
        loss: Tensor = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    loss = {name: step(name).item() for name in PEERS}
    grads = {name: models[name].model.layers[0].self_attn.q_proj.weight.grad for name in PEERS}
    found = {"loss": abs(loss[OURS] - loss["sdpa"]) / loss["sdpa"], "dq_proj": away(grads[OURS], grads["sdpa"])}
    agreed(f"training at {tokens} tokens", found, 0.1)
    memory = {name: peak(partial(step, name)) for name in PEERS}

    def measure() -> list[Row]:
        times = in_turns({name: partial(step, name) for name in PEERS}, in_a_row=3)
        return [row(f"training step, {tokens} tokens", times, bar=1.03, peak_mib=memory, away=found)]

    return measure


def generate(compiled: bool) -> Callable[[], list[Row]]:
    prompt, new = (16, 8) if SMALL else (2048, 128)
    models = {name: build(name).eval() for name in PEERS}
    ids = torch.randint(3, LLAMA["vocab_size"], (1 if SMALL else 4, prompt), device=DEVICE)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def run(name: str) -> Tensor:
        models[name].generation_config.eos_token_id = None
        tokens: Tensor = models[name].generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, cache_implementation="static",
            disable_compile=not compiled,
        )  # fmt: skip
        return tokens[:, prompt:]

    with torch.no_grad():
        logits = {name: models[name](ids).logits[:, -1] for name in PEERS}
    what = f"generate, {len(ids)} x ({prompt} + {new}) tokens, static cache{', compiled' if compiled else ''}"
    found = agreed(what, {"logits": away(logits[OURS], logits["sdpa"])}, 0.05)
    tokens = {name: run(name) for name in PEERS}
    same = (tokens[OURS] == tokens["sdpa"]).float().mean().item()  # near ties part ways in bfloat16
    memory = {name: peak(partial(run, name)) for name in PEERS}

    def measure() -> list[Row]:
        times = in_turns({name: partial(run, name) for name in PEERS}, in_a_row=1)
        bar = 1.0 if compiled else None
        return [row(what, times, bar=bar, peak_mib=memory, away=found | {"other tokens": 1 - same})]

    return measure


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


def attention_module(kind: str, layer_type: str, implementation: str, tokens: int) -> Callable[[], list[Tensor]]:
    """One attention module of the model, as its layer calls it: out and the gradient of its input."""
    torch.manual_seed(0)
    words = dict(LAYERS[kind], layer_types=[layer_type])
    if SMALL:
        words |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**words)
    config._attn_implementation = implementation
    with torch.device(DEVICE):
        model = getattr(transformers, f"{kind}Model")(config).to(DTYPE)
    x = torch.randn(1, tokens, config.hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)
    place = torch.arange(tokens, device=DEVICE)[None]
    rotary = tuple(y.detach() for y in model.rotary_emb(x, place))
    make = "create_sliding_window_causal_mask" if "sliding" in layer_type else "create_causal_mask"
    mask = getattr(masking_utils, make)(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=place
    )
    module = model.layers[0].self_attn

    def run() -> list[Tensor]:
        x.grad = None
        out = module(hidden_states=x, position_embeddings=rotary, attention_mask=mask, position_ids=place)[0]
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        return [out.detach(), x.grad]

    return run


def layer(kind: str, layer_type: str) -> Callable[[], list[Row]]:
    tokens = 64 if SMALL else 4096
    calls, answers, memory, refused = {}, {}, {}, {}
    for name in ("eager", OURS, "flex_attention"):
        try:
            call = attention_module(kind, layer_type, name, tokens)
            answers[name] = call()
            memory[name] = peak(call)
            calls[name] = call
        except Exception as error:  # what transformers cannot do is part of the answer
            refused[name] = f"{type(error).__name__}: {error}"[:200]
    if OURS in refused or "eager" in refused:
        raise RuntimeError(f"refused: {refused}")
    pairs = zip(("out", "dx"), answers[OURS], answers["eager"], strict=True)
    found = agreed(f"{kind}, {layer_type}", {what: away(a, b) for what, a, b in pairs}, 0.03)

    def measure() -> list[Row]:
        times = in_turns(calls, in_a_row=5)
        what = f"{kind} attention, {layer_type}, {tokens} tokens, forward and backward"
        return [row(what, times, bar=1.5, away=found, peak_mib=memory, refused=refused)]

    return measure


CASES: dict[str, Callable[[], Callable[[], list[Row]]]] = {
    "train-4k": lambda: train(64 if SMALL else 4096),
    "train-16k": lambda: train(128 if SMALL else 16384),
    "generate-compiled": lambda: generate(compiled=True),
    "gemma2": lambda: layer("Gemma2", "full_attention"),
    "gpt-oss": lambda: layer("GptOss", "full_attention"),
    "gpt-oss-window": lambda: layer("GptOss", "sliding_attention"),
    "generate": lambda: generate(compiled=False),
}


def prepare(case: str) -> Callable[[], list[Row]]:
    tilewise.integrations.transformers.register()
    transformers.logging.set_verbosity_error()
    return CASES[case]()


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    main(__doc__, "hf", prepare, list(CASES), {"transformers": transformers.__version__})
