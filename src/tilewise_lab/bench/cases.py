"""What is measured: the sizes of one attention call, its inputs, and the arithmetic it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import AttentionError

PASSES = ("forward", "backward")


class Inputs(NamedTuple):
    """q, k (B, S, H, D), v, dout (B, S, H, Dv), q and dout with S of their own; or packed (T, H, D), the ends in cu."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu: Tensor | None = None

    def leaves(self) -> Inputs:
        q, k, v = (x.detach().requires_grad_() for x in self[:3])
        return Inputs(q, k, v, self.dout, self.cu)


@dataclass(frozen=True)
class Case:
    """The sizes of one call. `lengths` pack sequences one after the other, in place of batch and seq.

    >>> case = Case(batch=2, seq=8192, heads=16, kv_heads=16, dim=128, causal=True)
    >>> case.key
    'b2 s8192 h16 d128 causal bfloat16'
    >>> case.flops("forward") == 4 * 2 * 16 * 8192 * 8192 * 128 / 2
    True
    >>> Case(16, 8192, 32, 8, 192, queries=1, value_dim=128).key
    'b16 q1 s8192 h32/8 d192/128 full bfloat16'
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = False
    window: int | None = None  # keys a query sees to its left, besides its own; only with causal
    lengths: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    deterministic: bool = False  # the backward gives the same bits in every run
    queries: int | None = None  # tokens of q, where they are not seq; only with the full mask
    value_dim: int | None = None  # head dim of v and out, where it is not that of q and k

    def __post_init__(self) -> None:
        if self.queries is not None and (self.causal or self.lengths):
            raise AttentionError("queries", self.queries, "None where sequences are causal or packed")

    @property
    def n_q(self) -> int:
        return self.seq if self.queries is None else self.queries

    @property
    def dv(self) -> int:
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def mask(self) -> str:
        return f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"

    @property
    def key(self) -> str:
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        queries = "" if self.n_q == self.seq else f"q{self.queries} "
        tokens = f"n{len(self.lengths)} t{sum(self.lengths)}" if self.lengths else f"b{self.batch} {queries}s{self.seq}"
        dims = f"d{self.dim}" if self.dv == self.dim else f"d{self.dim}/{self.dv}"
        same_bits = " deterministic" if self.deterministic else ""
        return f"{tokens} {heads} {dims} {self.mask} {self.dtype}{same_bits}"

    @property
    def before(self) -> int:
        """The window as flash-attn writes it: -1 is unbounded."""
        return -1 if self.window is None else self.window

    @property
    def after(self) -> int:
        return 0 if self.causal else -1

    @property
    def longest(self) -> int:
        return max(self.lengths, default=self.seq)

    def pairs(self) -> float:
        """(query, key) pairs per head. Causal counts half the square, as every library's benchmark does."""
        if self.queries is not None:
            return self.batch * self.n_q * self.seq
        lengths = self.lengths or (self.seq,) * self.batch
        if self.window is not None and self.window < self.longest:
            seen = [min(self.window + 1, n) for n in lengths]
            return sum(n * most - most * (most - 1) / 2 for n, most in zip(lengths, seen, strict=True))
        return sum(n * n for n in lengths) / (2 if self.causal else 1)

    def flops(self, which: str) -> float:
        """Two operations for each pair and column. Forward: S (D), out (Dv); backward: S, dq, dk (D), dP, dv (Dv)."""
        columns = 3 * self.dim + 2 * self.dv if which == "backward" else self.dim + self.dv
        return 2 * self.heads * columns * self.pairs()

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        packed = (sum(self.lengths),) if self.lengths else None
        rows, keys = packed or (self.batch, self.n_q), packed or (self.batch, self.seq)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype))

        ends = torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32) if self.lengths else None
        q, k = normal(*rows, self.heads, self.dim), normal(*keys, self.kv_heads, self.dim)
        v, dout = normal(*keys, self.kv_heads, self.dv), normal(*rows, self.heads, self.dv)
        return Inputs(q, k, v, dout, ends)


def grid(
    dims: tuple[int, ...], masks: tuple[str, ...], seqs: tuple[int, ...], *, tokens: int, hidden: int, dtype: str
) -> list[Case]:
    """A fixed number of tokens and a fixed hidden size, however they are cut into sequences and heads.

    >>> [case.key for case in grid((128,), ("full", "causal"), (4096,), tokens=16384, hidden=2048, dtype="float16")]
    ['b4 s4096 h16 d128 full float16', 'b4 s4096 h16 d128 causal float16']
    """
    return [
        Case(max(1, tokens // seq), seq, hidden // dim, hidden // dim, dim, mask == "causal", dtype=dtype)
        for dim in dims
        for mask in masks
        for seq in seqs
    ]


def random_lengths(count: int, most: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths as they come, so that few of them are multiples of a tile.

    >>> random_lengths(3, 100)
    (50, 98, 54)
    """
    rng = random.Random(seed)
    return tuple(rng.randint(1, most) for _ in range(count))
