"""Random calls of the library: shapes, layouts, bands and data from a seed, tiny or large.

>>> case = random_case(7, TINY)
>>> inputs = make(case, "cpu")
>>> out, lse, dq, dk, dv = run(inputs, backend="reference")
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise.request import Spec

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("bshd", "bhsd", "bdsh", "qkv", "strided", "batch", "heads")
BANDS = ((None, None), (None, 0), (0, 0), (7, 3), (0, None), (None, 20), (40, 0), (1000, 1000))
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Size:
    """How large a random case may become."""

    batch: int
    tokens: int
    groups: tuple[tuple[int, int], ...]  # (heads, kv heads)
    dims: tuple[int, ...]


TINY = Size(2, 40, ((1, 1), (2, 2), (2, 1), (3, 1)), (1, 3, 8, 16, 24, 40))
LARGE = Size(4, 1100, ((4, 4), (8, 2), (6, 1), (5, 5)), (1, 8, 33, 40, 64, 64, 96, 128, 128, 192, 256, 512))


@dataclass(frozen=True)
class Case:
    """One call. `lengths`, (n_q, n_k) of each sequence, makes it a packed one; then batch is their number."""

    batch: int = 1
    n_q: int = 37
    n_k: int = 37
    heads: int = 2
    kv_heads: int = 2
    d: int = 16
    dv: int = 16
    dtype: str = "float32"
    before: int | None = None
    after: int | None = None
    scale: float | None = None
    layouts: tuple[str, str, str, str] = ("bshd",) * 4  # of q, k, v and dout
    lengths: tuple[tuple[int, int], ...] | None = None
    lse_gradient: bool = True
    seed: int = 0

    def __str__(self) -> str:
        size = f"{self.n_q}x{self.n_k}" if self.lengths is None else "+".join(f"{a}x{b}" for a, b in self.lengths)
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        dims = f"d{self.d}" if self.d == self.dv else f"d{self.d}/{self.dv}"
        band = f"{'' if self.before is None else self.before}..{'' if self.after is None else self.after}"
        layout = self.layouts[0] if len(set(self.layouts)) == 1 else "/".join(self.layouts)
        scale = "" if self.scale is None else f"-scale{self.scale:g}"
        return f"{self.seed}-{self.dtype}-b{self.batch}-{size}-{heads}-{dims}-{band}-{layout}{scale}"

    @property
    def spec(self) -> Spec:
        return Spec.of(head_dim=self.d, window=(self.before, self.after), scale=self.scale)


class Inputs(NamedTuple):
    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None


def random_case(seed: int, size: Size, dtypes: tuple[str, ...] = DTYPES) -> Case:
    r = random.Random(seed)
    heads, kv_heads = r.choice(size.groups)
    d = r.choice(size.dims)
    dv = d if r.random() < 0.6 else r.choice(size.dims)
    if max(d, dv) > 256:
        size = Size(min(size.batch, 2), size.tokens // 2, size.groups, size.dims)
    batch = r.randint(1, size.batch)
    n_q = r.choice((1, r.randint(1, size.tokens), r.randint(1, size.tokens), 16 * r.randint(1, size.tokens // 16)))
    n_k = n_q if r.random() < 0.5 else r.randint(1, size.tokens)
    lengths = None
    if r.random() < 0.35:
        batch = r.randint(1, 2 * size.batch)
        lengths = tuple((length(r, size), length(r, size)) for _ in range(batch))
        if r.random() < 0.5:
            lengths = tuple((a, a) for a, _ in lengths)
        n_q, n_k = (sum(x) for x in zip(*lengths, strict=True))
    before, after = r.choice(BANDS)
    return Case(
        batch, n_q, n_k, heads, kv_heads, d, dv, r.choice(dtypes), before, after,
        r.choice((None, None, None, 0.3, 0.0, -0.2)),
        tuple(r.choice(LAYOUTS) if r.random() < 0.6 else "bshd" for _ in range(4)),
        lengths, r.random() < 0.5, seed,
    )  # fmt: skip


def length(r: random.Random, size: Size) -> int:
    return r.choice((0, 1, r.randint(1, size.tokens), r.randint(1, size.tokens)))


def make(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(case.seed)
    rows, keys = (case.n_q, case.heads), (case.n_k, case.kv_heads)
    shapes = ((*rows, case.d), (*keys, case.d), (*keys, case.dv), (*rows, case.dv))
    batch = case.batch if case.lengths is None else 1
    tensors = []
    for shape, layout in zip(shapes, case.layouts, strict=True):
        x = laid_out((batch, *shape), layout, getattr(torch, case.dtype), device, generator)
        tensors.append(x if case.lengths is None else x[0])
    q, k, v, dout = tensors
    lse_shape = (batch, case.heads, case.n_q) if case.lengths is None else (case.heads, case.n_q)
    dlse = torch.randn(lse_shape, device=device, generator=generator) if case.lse_gradient else None
    return Inputs(case, q, k, v, dout, dlse, *bounds(case, device))


def bounds(case: Case, device: str) -> tuple[Tensor | None, Tensor | None]:
    if case.lengths is None:
        return None, None
    ends = torch.tensor([(0, 0), *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_q, cu_k = ends.T.contiguous().to(device)
    return cu_q, cu_k


def laid_out(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> Tensor:
    """A normal (B, S, H, D) tensor whose memory is laid out in one of LAYOUTS."""
    b, s, h, d = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, generator=generator).to(dtype)

    match layout:
        case "bshd":
            return normal(b, s, h, d)
        case "bhsd":
            return normal(b, h, s, d).transpose(1, 2)
        case "bdsh":
            return normal(b, d, s, h).permute(0, 2, 3, 1)
        case "qkv":
            return normal(b, s, 3, h, d)[:, :, 1]
        case "strided":
            return normal(b, s, h, 2 * d)[..., ::2]
        case "batch":
            return normal(1, s, h, d).expand(shape)
        case "heads":
            return normal(b, s, 1, d).expand(shape)
    raise ValueError(layout)


def run(inputs: Inputs, backend: str, **options: Any) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the public function, for the loss (out * dout).sum() + (lse * dlse).sum()."""
    case, *tensors, dout, dlse, cu_q, cu_k = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    options = {"scale": case.scale, "return_lse": True, "backend": backend} | options
    if case.after == 0:
        options |= {"causal": True, "window": None if case.before is None else (case.before, None)}
    elif (case.before, case.after) != (None, None):
        options["window"] = case.before, case.after
    if cu_q is None:
        out, lse = tilewise.attention(*leaves, **options)
    else:
        out, lse = tilewise.attention_varlen(*leaves, cu_q, cu_k, **options)
    results, cotangents = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, cotangents)
