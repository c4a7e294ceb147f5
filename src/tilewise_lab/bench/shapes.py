"""Shapes of attention calls, drawn from published models: dense and packed, odd lengths, short and long.

The shape of a number depends on the seed and that number alone: the first hundred of two hundred shapes are the same as
a hundred, and parts of a sweep can run apart. Terms on the scores (softcap, sinks, T5's bias) are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.errors import AttentionError
from tilewise_lab.bench.cases import Case

LEAST, MOST = 100, 131072  # tokens of a sequence
MOST_BATCH = 64
LEAST_HEADS = 8  # left on a GPU, where long sequences divide a model's heads among several
TOKENS = 32768  # of a call, unless one sequence has more
FLOPS = 4e12  # of a forward; about 6 ms on an H200
LONG_FLOPS = 3.6e13  # of every LONG_EVERY-th shape, whose sequences have from LONG tokens on
LONG, LONG_EVERY = 32768, 16
ROUND_LENGTHS = tuple(2**n for n in range(7, 18))
ROUND_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ATTEMPTS = 100  # to draw a shape that was not drawn before


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


class Shape(NamedTuple):
    """A numbered call of a model's layer."""

    number: int
    model: str
    case: Case

    @property
    def key(self) -> str:
        return f"{self.model}: {self.case.key.removesuffix(' ' + self.case.dtype)}"


def shapes(count: int, seed: int = 0, part: tuple[int, int] = (1, 1), dtype: str = "bfloat16") -> list[Shape]:
    """Every part[1]-th of `count` different shapes, from number part[0] - 1 on.

    >>> [shape.number for shape in shapes(8, part=(2, 3))]
    [1, 4, 7]
    >>> shapes(2)[1] == shapes(200)[1]
    True
    """
    found: dict[Case, Shape] = {}
    for number in range(count):
        drawn = (shape(number, seed, attempt, dtype) for attempt in range(ATTEMPTS))
        new = next((x for x in drawn if x.case not in found), None)
        if new is None:
            raise AttentionError("--count", count, f"at most {number}: with seed {seed} there are no more shapes")
        found[new.case] = new
    index, parts = part
    return list(found.values())[index - 1 :: parts]


def part_of(text: str) -> tuple[int, int]:
    """
    >>> part_of("2/3")
    (2, 3)
    """
    index, _, parts = text.partition("/")
    if not (index.isdigit() and parts.isdigit() and 1 <= int(index) <= int(parts)):
        raise AttentionError("--part", repr(text), "the number of a part and how many there are: 1/2")
    return int(index), int(parts)


def shape(number: int, seed: int, attempt: int, dtype: str) -> Shape:
    """One shape. The models come in shuffled turns; every LONG_EVERY-th shape is long, of a model that has such."""
    rng = random.Random(f"{seed} {number} {attempt}")
    turns, place = divmod(number, len(MODELS))
    model = random.Random(f"{seed} turn {turns}").sample(MODELS, len(MODELS))[place]
    if number % LONG_EVERY == LONG_EVERY - 1:
        model = rng.choice([row for row in MODELS if row.context >= LONG and not row.lengths])
        return Shape(number, model.name, _long(model, rng, dtype))
    if attempt >= ATTEMPTS // 2:  # this model has no more
        model = rng.choice(MODELS)
    kind = rng.choices(("round", "odd", "packed"), (4, 3, 3))[0]
    if kind == "packed" and len(model.lengths) != 1:
        return Shape(number, model.name, _packed(model, rng, dtype))
    return Shape(number, model.name, _dense(model, kind == "odd", rng, dtype))


def _case(model: ModelLayer, batch: int, seq: int, dtype: str, lengths: Sequence[int] = (), share: int = 1) -> Case:
    """`share`: the GPUs among which the heads are divided."""
    window = model.window if model.window is not None and model.window <= max((seq, *lengths)) else None
    return Case(
        batch=batch,
        seq=seq,
        heads=model.heads // share,
        kv_heads=max(1, model.kv_heads // share),
        dim=model.dim,
        causal=model.causal,
        window=None if window is None else window - 1,
        lengths=tuple(lengths),
        dtype=dtype,
        value_dim=model.value_dim,
    )


def _dense(model: ModelLayer, odd: bool, rng: random.Random, dtype: str) -> Case:
    """The largest batch that the limits allow, or any smaller one."""
    allowed = model.lengths or _affordable(model, TOKENS)
    seq = rng.choice(allowed)
    if odd and not model.lengths:
        seq = rng.randrange(LEAST, max(allowed)) | 1
    share = _share(model) if model.lengths and _case(model, 1, seq, dtype).flops("forward") > FLOPS else 1
    one = _case(model, 1, seq, dtype, share=share).flops("forward")
    most = max(1, min(MOST_BATCH, TOKENS // seq, int(FLOPS // one)))
    batches = [n for n in ROUND_BATCHES if n <= most]
    return _case(model, rng.choice((batches[-1], rng.choice(batches))), seq, dtype, share=share)


def _affordable(model: ModelLayer, most: int) -> list[int]:
    """Powers of two up to `most` whose forward is not too long."""
    most = min(most, model.context, MOST)
    return [n for n in ROUND_LENGTHS if n <= most and _case(model, 1, n, "bfloat16").flops("forward") <= FLOPS]


def _share(model: ModelLayer) -> int:
    """Among how many GPUs the heads are divided, so that each has LEAST_HEADS at least."""
    return max(n for n in (1, 2, 4, 8, 16) if model.heads % n == 0 and (n == 1 or model.heads // n >= LEAST_HEADS))


def _packed(model: ModelLayer, rng: random.Random, dtype: str) -> Case:
    """Sequences of different lengths, many short and few long, until a call's tokens are there."""
    tokens = rng.choice((4096, 8192, 16384, 32768))
    longest = max(model.lengths or _affordable(model, tokens // 2))
    lengths = [longest]
    while len(lengths) < MOST_BATCH and sum(lengths) < tokens:
        drawn = rng.choice(model.lengths) if model.lengths else round(rng.lognormvariate(6.3, 1.0))
        lengths.append(max(LEAST, min(drawn, longest)))
    rng.shuffle(lengths)
    return _case(model, 1, 0, dtype, lengths)


def _long(model: ModelLayer, rng: random.Random, dtype: str) -> Case:
    """One long sequence, often not a multiple of a tile."""
    lengths = [n - rng.choice((0, 771)) for n in (32768, 65536, 131072) if n <= min(model.context, MOST)]
    cases = [_case(model, 1, n, dtype, share=_share(model)) for n in lengths]
    return rng.choice([case for case in cases if case.flops("forward") <= LONG_FLOPS] or cases[:1])
