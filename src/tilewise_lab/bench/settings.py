"""What a run does on this machine unless it is told otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilewise.errors import AttentionError
from tilewise_lab.bench.cases import Case, grid, random_lengths

MODES = ("eager", "compiled", "graphs")


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    vocabulary: int

    @property
    def name(self) -> str:
        layers = f"{self.layers} layer" + "s" * (self.layers > 1)
        return f"{layers} h{self.heads} d{self.hidden // self.heads} b{self.batch} s{self.seq}"


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: str
    tokens: int
    hidden: int
    dims: tuple[int, ...]
    masks: tuple[str, ...]
    seqs: tuple[int, ...]
    gqa: tuple[Case, ...]
    varlen: tuple[Case, ...]
    window: tuple[Case, ...]
    heads: tuple[Case, ...]
    deterministic: tuple[Case, ...]
    decode: tuple[Case, ...]
    layer: Model
    gpt: tuple[Model, ...]
    modes: tuple[str, ...]  # of gpt: of MODES
    memory: Case  # its seq is replaced by each of memory_lengths
    memory_lengths: tuple[int, ...]
    rounds: int
    burst: float  # seconds
    passes: int  # of a round, at least
    limit: float  # seconds for the rounds of one cell
    samples: int  # KV heads compared with float64 in each case
    seed: int = 0

    def grid(self) -> list[Case]:
        return grid(self.dims, self.masks, self.seqs, tokens=self.tokens, hidden=self.hidden, dtype=self.dtype)

    def recorded(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "hidden": self.hidden,
            "rounds": self.rounds,
            "burst_ms": 1e3 * self.burst,
            "samples": self.samples,
            "seed": self.seed,
            "memory": asdict(self.memory),
        }


def settings(device: torch.device, *, quick: bool = False, dtype: str | None = None) -> Settings:
    if device.type == "cuda":
        dtype = dtype or "bfloat16"
        return Settings(
            device=device, dtype=dtype, tokens=16384, hidden=2048,
            dims=(128,) if quick else (64, 128, 256),
            masks=("full", "causal"),
            seqs=(1024, 4096, 16384) if quick else tuple(2**n for n in range(9, 15)),
            gqa=(Case(2, 8192, 64, 8, 128, True, dtype=dtype),),
            varlen=(Case(1, 0, 16, 16, 128, True, lengths=random_lengths(32, 2048), dtype=dtype),),
            window=(Case(1, 16384, 16, 16, 128, True, 1024, dtype=dtype),),
            heads=tuple(
                Case(16384 // seq, seq, 16, 16, dim, causal, dtype=dtype, value_dim=dv)
                for dim, dv in ((80, 80), (96, 96), (192, 192), (192, 128))
                for causal in (False, True) for seq in (1024, 8192)
            ) + tuple(Case(4, 4096, 4, 4, 512, causal, dtype=dtype) for causal in (False, True)),
            deterministic=tuple(
                Case(16384 // seq, seq, 2048 // dim, 2048 // dim, dim, causal, dtype=dtype, deterministic=True)
                for dim in (64, 128) for causal in (False, True) for seq in (1024, 4096, 16384)
            ),
            decode=tuple(
                Case(batch, keys, heads, 8, 128, dtype=dtype, queries=1)
                for batch, keys, heads in ((1, 8192, 32), (16, 8192, 32), (64, 8192, 64), (128, 2048, 64))
            ),
            layer=Model(1, 2048, 16, 4, 4096, 0),
            gpt=(
                Model(12, 768, 12, 8, 1024, 50304), Model(12, 768, 12, 32, 1024, 50304),
                Model(8, 2048, 16, 4, 4096, 50304), Model(4, 4096, 32, 1, 16384, 50304),
            )[: 1 if quick else 4],
            modes=("eager",) if quick else MODES,
            memory=Case(1, 0, 16, 16, 128, True, dtype=dtype),
            memory_lengths=tuple(2**n for n in (range(10, 15) if quick else range(10, 18))),
            rounds=5 if quick else 9, burst=0.02, passes=3, limit=10.0, samples=4,
        )  # fmt: skip
    dtype = dtype or "float32"
    tokens, most = (1024, 10) if quick else (4096, 12)
    return Settings(
        device=device, dtype=dtype, tokens=tokens, hidden=512,
        dims=(64,) if quick else (64, 128),
        masks=("full", "causal"),
        seqs=tuple(2**n for n in range(7 if quick else 9, most + 1)),
        gqa=(Case(1, tokens // 2, 8, 2, 64, True, dtype=dtype),),
        varlen=(Case(1, 0, 4, 4, 64, True, lengths=random_lengths(32, 64 if quick else 256), dtype=dtype),),
        window=(Case(1, tokens, 4, 4, 64, True, tokens // 16, dtype=dtype),),
        heads=(Case(1, 512, 4, 4, 96, True, dtype=dtype), Case(1, 512, 4, 4, 48, dtype=dtype, value_dim=32)),
        deterministic=(Case(1, tokens // 2, 8, 8, 64, True, dtype=dtype, deterministic=True),),
        decode=tuple(Case(batch, keys, 8, 2, 64, dtype=dtype, queries=1) for batch, keys in ((1, 2048), (4, 1024))),
        layer=Model(1, 256, 4, 1, tokens // 2, 0),
        gpt=(Model(4, 256, 4, 4, 256, 4096),),
        modes=("eager",) if quick else ("eager", "compiled"),
        memory=Case(1, 0, 4, 4, 64, True, dtype=dtype),
        memory_lengths=tuple(2**n for n in range(8, 12 if quick else 14)),
        rounds=5 if quick else 9, burst=0.01 if quick else 0.1, passes=1, limit=1.0 if quick else 8.0,
        samples=2 if quick else 4,
    )  # fmt: skip


def check(chosen: Settings) -> None:
    """Raise where the grid cannot be cut from its tokens and its hidden size."""
    for dim in chosen.dims:
        if dim < 1 or chosen.hidden % dim:
            raise AttentionError("--dims", dim, f"a divisor of the hidden size {chosen.hidden}")
    for seq in chosen.seqs:
        if not 1 <= seq <= chosen.tokens or chosen.tokens % seq:
            raise AttentionError("--seqs", seq, f"a divisor of the {chosen.tokens} tokens (--tokens)")
