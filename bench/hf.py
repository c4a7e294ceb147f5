"""Models of transformers on a GPU with tilewise and with what transformers offers: time, memory, agreement.

    python bench/hf.py                          # all of it, about three minutes; numbers on the screen
    python bench/hf.py train layers --out hf.json
    python bench/hf.py generate                 # with a static cache, eager and compiled (most of the three minutes)

A Llama of 8B's width with 4 layers and random weights, bfloat16: a training step (forward and backward) at 4k and 16k
tokens, and `generate`. The attention modules of a Gemma 2 (softcap) and of a gpt-oss (sinks, windows). Each answer is
compared before it is timed; measurements are taken in turns, and only ratios are meant.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import sample as random_order
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils

import tilewise.integrations.transformers

OURS, ROUNDS, WARM = "tilewise", 7, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = DEVICE.type == "cpu"  # to see that it runs
DTYPE = torch.float32 if SMALL else torch.bfloat16
LLAMA: dict[str, Any] = {
    "hidden_size": 64 if SMALL else 4096, "intermediate_size": 128 if SMALL else 14336, "num_hidden_layers": 4,
    "num_attention_heads": 4 if SMALL else 32, "num_key_value_heads": 2 if SMALL else 8, "vocab_size": 8192,
    "max_position_embeddings": 32768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def sync() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any]) -> float:
    sync()
    start = time.perf_counter()
    call()
    sync()
    return 1e3 * (time.perf_counter() - start)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS, warm: int = WARM) -> dict[str, float]:
    """Medians of the wall clock, each call waited for: a step of training or of decoding includes its host."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(warm + rounds):
        for name in random_order(list(calls), len(calls)):
            took = milliseconds(calls[name])
            if n >= warm:
                times[name].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def peak(call: Callable[[], Any]) -> float:
    """MiB beyond what was there."""
    if DEVICE.type != "cuda":
        return 0.0
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    sync()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def away(a: Tensor, b: Tensor) -> float:
    """The distance of two answers, relative to their size."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def build(implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA)
    config._attn_implementation = implementation
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config).to(DTYPE)
    return model


def row(what: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    others = {name: ms for name, ms in times.items() if name != OURS}
    best = min(others, key=others.__getitem__)
    found = {"what": what, "ms": times, "best": best, "ratio": others[best] / times[OURS], **more}
    print(json.dumps(found), flush=True)
    return found


def train() -> list[dict[str, Any]]:
    model = build("sdpa").train()
    rows = []
    for tokens in (64, 128) if SMALL else (4096, 16384):
        ids = torch.randint(3, LLAMA["vocab_size"], (1, tokens), device=DEVICE)

        def step(implementation: str, ids: Tensor = ids) -> Tensor:
            model.set_attn_implementation(implementation)
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        answers, memory = {}, {}
        for name in ("sdpa", OURS):
            step(name)
            memory[name] = peak(lambda name=name: step(name))
            weight = model.model.layers[0].self_attn.q_proj.weight
            answers[name] = step(name), weight.grad.clone()
        (loss, grad), (their_loss, their_grad) = answers[OURS], answers["sdpa"]
        agreement = {"loss": abs(loss - their_loss).item(), "dq_proj": away(grad, their_grad)}
        if agreement["loss"] > 0.02 or agreement["dq_proj"] > 0.1:
            raise SystemExit(f"training at {tokens} tokens disagrees: {agreement}")
        times = in_turns({name: (lambda name=name: step(name)) for name in ("sdpa", OURS)})
        rows.append(row(f"training step, {tokens} tokens", times, peak_mib=memory, away=agreement))
    return rows


def generate() -> list[dict[str, Any]]:
    rows = []
    prompt, new = (16, 8) if SMALL else (2048, 128)
    ids = torch.randint(3, LLAMA["vocab_size"], (1 if SMALL else 4, prompt), device=DEVICE)
    for compiled in (False, True):
        models = {name: build(name).eval() for name in ("sdpa", OURS)}
        for model in models.values():
            model.generation_config.eos_token_id = None

        def run(name: str, models: dict[str, Any] = models, compiled: bool = compiled) -> Tensor:
            found: Tensor = models[name].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                cache_implementation="static", disable_compile=not compiled,
            )  # fmt: skip
            return found

        with torch.no_grad():
            logits = {name: models[name](ids).logits[:, -1] for name in models}
            if away(logits[OURS], logits["sdpa"]) > 0.05:
                raise SystemExit(f"generate disagrees: {away(logits[OURS], logits['sdpa'])}")
            tokens = {name: run(name)[:, prompt:] for name in models}
            same = (tokens[OURS] == tokens["sdpa"]).float().mean().item()
            memory = {name: peak(lambda name=name: run(name)) for name in models}
            times = in_turns({name: (lambda name=name: run(name)) for name in models}, rounds=5, warm=1)
        what = f"generate, {prompt} + {new} tokens, static cache" + (", compiled" if compiled else "")
        rows.append(row(what, times, same_tokens=same, peak_mib=memory))
        del models
    return rows


LAYERS: dict[str, dict[str, Any]] = {
    "Gemma2": {
        "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 4096, "intermediate_size": 256, "layer_types": ["full_attention"], "num_hidden_layers": 1,
        "vocab_size": 128,
    },
    "GptOss": {
        "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention"], "num_hidden_layers": 1, "vocab_size": 128,
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


def layers() -> list[dict[str, Any]]:
    rows = []
    for kind, layer_type in (
        ("Gemma2", "full_attention"),
        ("GptOss", "full_attention"),
        ("GptOss", "sliding_attention"),
    ):
        for tokens in (64,) if SMALL else (4096, 8192):
            calls, answers, memory, refused = {}, {}, {}, {}
            for name in ("eager", "flex_attention", OURS):
                try:
                    call = attention_module(kind, layer_type, name, tokens)
                    answers[name] = call()
                    memory[name] = peak(call)
                    calls[name] = call
                except Exception as error:  # what transformers cannot do is part of the answer
                    refused[name] = f"{type(error).__name__}: {error}"[:200]
            if OURS in refused or "eager" in refused:
                raise SystemExit(f"{kind}, {layer_type}: {refused}")
            agreement = [away(a, b) for a, b in zip(answers[OURS], answers["eager"], strict=True)]
            if max(agreement) > 0.03:
                raise SystemExit(f"{kind}, {layer_type} disagrees with eager: {agreement}")
            times = in_turns(calls)
            what = f"{kind} attention, {layer_type}, {tokens} tokens, forward and backward"
            rows.append(row(what, times, away=agreement, peak_mib=memory, refused=refused))
    return rows


PARTS = {"train": train, "layers": layers, "generate": generate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out, "hf.json") if out else None, help="a file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    found: dict[str, Any] = {
        "machine": machine, "torch": torch.__version__, "transformers": transformers.__version__,
        "tilewise": tilewise.__version__,
    }  # fmt: skip
    for part in args.parts:
        found[part] = PARTS[part]()
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
