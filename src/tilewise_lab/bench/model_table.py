"""Attention layers of published models: heads, head dims, masks and lengths, as in their config files.

Rows with `lengths` have sequences of these lengths (pictures, audio, a fixed context); the others have any length up to
`context`. Terms on the scores (softcap, sinks, T5's bias) are left out: the table has shapes.
"""

from __future__ import annotations

from typing import NamedTuple


class ModelLayer(NamedTuple):
    """A kind of attention layer. `window`: keys that a query sees, its own included; None without a window."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    context: int
    causal: bool = True
    window: int | None = None
    value_dim: int | None = None
    lengths: tuple[int, ...] = ()


def _encoder(name: str, heads: int, dim: int, *lengths: int) -> ModelLayer:
    return ModelLayer(name, heads, heads, dim, max(lengths), causal=False, lengths=lengths)


MODELS: tuple[ModelLayer, ...] = (
    ModelLayer("Llama 2 7B", 32, 32, 128, 4096),
    ModelLayer("Llama 2 13B", 40, 40, 128, 4096),
    ModelLayer("Llama 3 8B", 32, 8, 128, 131072),
    ModelLayer("Llama 3 70B", 64, 8, 128, 131072),
    ModelLayer("Llama 3 405B", 128, 8, 128, 131072),
    ModelLayer("Llama 3.2 1B", 32, 8, 64, 131072),
    ModelLayer("Llama 3.2 3B", 24, 8, 128, 131072),
    ModelLayer("Mistral 7B", 32, 8, 128, 32768, window=4096),
    ModelLayer("Mistral Large 2", 96, 8, 128, 131072),
    ModelLayer("Mixtral 8x7B", 32, 8, 128, 32768),
    ModelLayer("Mixtral 8x22B", 48, 8, 128, 65536),
    ModelLayer("Qwen 2.5 0.5B", 14, 2, 64, 32768),
    ModelLayer("Qwen 2.5 1.5B", 12, 2, 128, 32768),
    ModelLayer("Qwen 2.5 7B", 28, 4, 128, 131072),
    ModelLayer("Qwen 2.5 32B", 40, 8, 128, 131072),
    ModelLayer("Qwen 3 0.6B", 16, 8, 128, 32768),
    ModelLayer("Qwen 3 30B-A3B", 32, 4, 128, 40960),
    ModelLayer("Qwen 3 235B-A22B", 64, 4, 128, 40960),
    ModelLayer("Qwen 3 Next 80B", 16, 2, 256, 131072),
    ModelLayer("Gemma 2B", 8, 1, 256, 8192),
    ModelLayer("Gemma 7B", 16, 16, 256, 8192),
    ModelLayer("Gemma 2 9B", 16, 8, 256, 8192),
    ModelLayer("Gemma 2 27B, local", 32, 16, 128, 8192, window=4096),
    ModelLayer("Gemma 3 4B, local", 8, 4, 256, 131072, window=1024),
    ModelLayer("Gemma 3 27B, local", 32, 16, 128, 131072, window=1024),
    ModelLayer("Gemma 3 27B, global", 32, 16, 128, 131072),
    ModelLayer("Phi-2", 32, 32, 80, 2048),
    ModelLayer("Phi-3 mini", 32, 32, 96, 4096, window=2048),
    ModelLayer("Phi-3.5 mini", 32, 32, 96, 131072),
    ModelLayer("Phi-4", 40, 10, 128, 16384),
    ModelLayer("DeepSeek V2 Lite", 16, 16, 192, 32768, value_dim=128),
    ModelLayer("DeepSeek V3", 128, 128, 192, 131072, value_dim=128),
    ModelLayer("Kimi K2", 64, 64, 192, 131072, value_dim=128),
    ModelLayer("GPT-2", 12, 12, 64, 1024),
    ModelLayer("GPT-2 XL", 25, 25, 64, 1024),
    ModelLayer("GPT-J 6B", 16, 16, 256, 2048),
    ModelLayer("GPT-NeoX 20B", 64, 64, 96, 2048),
    ModelLayer("Pythia 2.8B", 32, 32, 80, 2048),
    ModelLayer("Falcon 7B", 71, 1, 64, 2048),
    ModelLayer("Falcon 40B", 128, 8, 64, 2048),
    ModelLayer("StarCoder", 48, 1, 128, 8192),
    ModelLayer("StarCoder 2 15B", 48, 4, 128, 16384, window=4096),
    ModelLayer("gpt-oss 120B, local", 64, 8, 64, 131072, window=128),
    ModelLayer("gpt-oss 120B, global", 64, 8, 64, 131072),
    ModelLayer("OLMo 2 7B", 32, 32, 128, 4096),
    ModelLayer("Command R", 64, 64, 128, 131072),
    ModelLayer("Yi 34B", 56, 8, 128, 4096),
    ModelLayer("BLOOM 176B", 112, 112, 128, 2048),
    ModelLayer("GLM-4 9B", 32, 2, 128, 131072),
    ModelLayer("Nemotron-4 340B", 96, 8, 192, 4096),
    ModelLayer("TinyLlama 1.1B", 32, 4, 64, 2048),
    ModelLayer("SmolLM2 1.7B", 32, 32, 64, 8192),
    _encoder("BERT base", 12, 64, 128, 384, 512),
    _encoder("BERT large", 16, 64, 128, 384, 512),
    _encoder("T5 large, encoder", 16, 64, 512),
    _encoder("T5 11B, encoder", 128, 128, 512),
    _encoder("Whisper base, encoder", 8, 64, 1500),
    _encoder("Whisper large, encoder", 20, 64, 1500),
    _encoder("ViT-B/16", 12, 64, 197, 577),
    _encoder("ViT-L/14", 16, 64, 257, 577),
    _encoder("ViT-H/14", 16, 80, 257, 730),
    _encoder("SigLIP so400m", 16, 72, 256, 729, 1024),
    _encoder("DINOv2 g/14", 24, 64, 257, 1370),
    _encoder("InternViT 6B", 25, 128, 257, 1025),
    _encoder("SAM ViT-H, global", 16, 80, 4096),
    _encoder("Stable Diffusion 3", 24, 64, 1178, 4250),
    _encoder("FLUX.1", 24, 128, 1536, 4608),
    _encoder("Wan 2.1 14B", 40, 128, 32760),
)
