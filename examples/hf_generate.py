"""Generate text with a model of Hugging Face transformers on tilewise. On a CPU this takes a quarter of a minute.

    pip install tilewise[hf]
    python examples/hf_generate.py                      # a tiny Mistral (sliding windows) with random weights
    python examples/hf_generate.py --model Qwen/Qwen3-0.6B --prompt "The sea" --prompt "Attention, said she,"

Prompts of different lengths are padded on the left. The tokens are the same as those of eager attention, with a cache
that grows and with a static one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

import tilewise.integrations.transformers  # noqa: F401 - registers "tilewise"


def tiny() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=16, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    ids = torch.randint(1, 97, (3, 20))
    mask = torch.arange(20).expand(3, -1) >= torch.tensor([[0], [6], [13]])
    inputs = {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}
    return transformers.MistralForCausalLM(config).eval(), inputs


def named(name: str, prompts: list[str]) -> tuple[Any, dict[str, Any]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    return model, dict(tokenizer(prompts, return_tensors="pt", padding=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24, help="how many to generate")
    parser.add_argument("--model", help="a model of the Hub, or a folder; by default a tiny one with random weights")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    args = parser.parse_args()
    model, inputs = tiny() if args.model is None else named(args.model, args.prompt or ["The sea"])
    found = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        for cache in ("dynamic", "static"):
            words = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
            out = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False, **words)
            found[implementation, cache] = out[:, inputs["input_ids"].shape[1] :]
    first = found["eager", "dynamic"]
    for (implementation, cache), tokens in found.items():
        same = "the same tokens" if torch.equal(tokens, first) else "other tokens"
        print(f"{implementation:8} {cache:8} {same}: {tokens[0, :8].tolist()} ...")


if __name__ == "__main__":
    main()
