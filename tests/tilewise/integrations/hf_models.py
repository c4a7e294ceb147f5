"""Tiny models of transformers with random weights, by name: how to build one, what to feed it, what to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

VOCABULARY, PAD, BOS, EOS = 101, 0, 1, 2
WIDTH, HEADS, KV_HEADS, LAYERS, TOKENS, WINDOW = 32, 4, 2, 2, 21, 6

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "initializer_range": 0.3,
}  # fmt: skip
ENCODER = {name: x for name, x in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
VISION = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "image_size": 16, "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip


class Model(NamedTuple):
    config: str
    kind: str
    words: dict[str, Any]
    generates: bool = True


def text(config: str, kind: str, **words: Any) -> Model:
    return Model(config, kind, TEXT | words)


LAYER_TYPES = ["sliding_attention", "full_attention"]
MODELS: dict[str, Model] = {
    "llama": text("LlamaConfig", "LlamaForCausalLM"),
    "mistral": text("MistralConfig", "MistralForCausalLM", sliding_window=WINDOW),
    "qwen3": text("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": text(
        "Gemma2Config", "Gemma2ForCausalLM", sliding_window=WINDOW, attn_logit_softcapping=3.0,
        query_pre_attn_scalar=8, layer_types=LAYER_TYPES,
    ),
    "gemma3": text("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=WINDOW, layer_types=LAYER_TYPES),
    "gpt_oss": text(
        "GptOssConfig", "GptOssForCausalLM", sliding_window=WINDOW, layer_types=LAYER_TYPES, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "doge": text("DogeConfig", "DogeForCausalLM", keep_window_size=8),  # computes with the mask in every layer
    "phi": text("PhiConfig", "PhiForCausalLM"),
    "olmo2": text("Olmo2Config", "Olmo2ForCausalLM"),
    "mixtral": text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "bert": Model("BertConfig", "BertForMaskedLM", ENCODER | {"attention_probs_dropout_prob": 0.0}, False),
    "modernbert": Model(
        "ModernBertConfig", "ModernBertForMaskedLM",
        ENCODER | {"local_attention": WINDOW, "global_attn_every_n_layers": 2, "num_hidden_layers": 3,
                   "cls_token_id": BOS, "sep_token_id": EOS}, False,
    ),
    "t5": Model(
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": HEADS,
         "dropout_rate": 0.0, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": BOS,
         "initializer_factor": 1.0, "tie_word_embeddings": False},
    ),
    "bart": Model(
        "BartConfig", "BartForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
         "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": BOS,
         "eos_token_id": EOS, "decoder_start_token_id": BOS, "forced_eos_token_id": None, "init_std": 0.3,
         "dropout": 0.0},
    ),
    "whisper": Model(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
         "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64,
         "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS,
         "suppress_tokens": None, "begin_suppress_tokens": None, "init_std": 0.3, "dropout": 0.0},
    ),
    "vit": Model("ViTConfig", "ViTForImageClassification", VISION, False),
    "clip": Model(
        "CLIPConfig", "CLIPModel",
        {"text_config": {k: x for k, x in ENCODER.items() if k != "tie_word_embeddings"}, "vision_config": VISION,
         "projection_dim": 16}, False,
    ),
}  # fmt: skip


def build(name: str, implementation: str) -> Any:
    """The model, in float32, the same weights whatever the implementation; in training mode without dropout."""
    made = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, made.config)(**made.words)
    config._attn_implementation, config._experts_implementation = implementation, "eager"
    model = getattr(transformers, made.kind)(config)
    for module in model.modules():  # sinks and biases that begin at 0 would hide a mistake
        for which, x in module.named_parameters(recurse=False):
            if which in ("sinks", "bias"):
                torch.nn.init.normal_(x, std=0.5)
    return model.eval()


def inputs(name: str, padding: str | None = None) -> tuple[dict[str, Tensor], Callable[[Any], Tensor]]:
    """What to feed it, and which of its outputs to look at: those of tokens that are no padding."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, TOKENS))
    lengths = torch.tensor([[TOKENS], [TOKENS - 5], [7]])
    place = torch.arange(TOKENS).expand(3, -1)
    mask = {"left": place >= TOKENS - lengths, "right": place < lengths}.get(padding or "", place >= 0)
    given: dict[str, Tensor] = {"input_ids": ids}
    if padding is not None:
        given |= {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}
    pixels, sounds = torch.randn(3, 3, 16, 16), torch.randn(3, 8, 40)
    match name:
        case "vit":
            return {"pixel_values": pixels}, lambda out: out.logits
        case "clip":
            return given | {"pixel_values": pixels}, lambda out: out.logits_per_image
        case "whisper":
            return {"input_features": sounds, "decoder_input_ids": ids[:, :9]}, lambda out: out.logits
        case "bart":  # as many queries as keys, in cross attention too
            return given | {"decoder_input_ids": ids}, lambda out: out.logits
        case "t5":
            return given | {"decoder_input_ids": ids[:, :9]}, lambda out: out.logits
    return given, lambda out: out.logits[mask]
