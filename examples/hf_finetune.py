"""Fine-tune a model of Hugging Face transformers on tilewise. On a CPU this takes less than a minute.

    pip install tilewise[hf]
    python examples/hf_finetune.py                      # a tiny Llama with random weights learns to repeat a sentence
    python examples/hf_finetune.py --model gpt2         # or any causal language model that you have

The only lines about tilewise are the import and `attn_implementation`. Sentences of different lengths are padded; what
is hidden by the padding costs nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from torch import Tensor

import tilewise.integrations.transformers  # noqa: F401 - registers "tilewise"

WORDS = 97


def tiny(implementation: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def batch(size: int) -> dict[str, Tensor]:
    """Sentences said twice, of different lengths, padded on the right; the second time is to be predicted."""
    lengths = torch.randint(6, 13, (size,)).tolist()
    ids, labels = torch.zeros(size, 24, dtype=torch.long), torch.full((size, 24), -100)
    for row, n in enumerate(lengths):
        sentence = torch.randint(1, WORDS, (n,))
        ids[row, : 2 * n] = torch.cat([sentence, sentence])
        labels[row, n : 2 * n] = sentence
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def train(implementation: str, steps: int, name: str | None) -> list[float]:
    torch.manual_seed(0)
    if name is None:
        model = tiny(implementation)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, attn_implementation=implementation)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(**{key: x.to(device) for key, x in batch(16).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", help="a model of the Hub, or a folder; by default a tiny one with random weights")
    args = parser.parse_args()
    ours, theirs = (train(x, args.steps, args.model) for x in ("tilewise", "eager"))
    for step in range(0, args.steps, max(1, args.steps // 5)):
        print(f"step {step:4}  loss {ours[step]:.4f} with tilewise, {theirs[step]:.4f} with eager")
    print(f"at the end   {ours[-1]:.4f} and {theirs[-1]:.4f}")


if __name__ == "__main__":
    main()
