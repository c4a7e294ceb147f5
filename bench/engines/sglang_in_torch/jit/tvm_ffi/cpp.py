"""`load_inline` returns functions in torch, with the names of the compiled ones. They write their results in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def run_activation(x: Tensor, out: Tensor, name: str) -> None:
    a, b = x.float().chunk(2, -1)
    out.copy_(ACTIVATIONS[name](a) * b)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(_norm(x.float(), weight, eps))


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_norm(total, weight, eps))


def qknorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(_norm(x.float(), weight, eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> None:
    """x (T, H, D), cos and sin (T, 1, D / 2)."""
    y = x.float()
    a, b = y.chunk(2, -1) if neox else (y[..., ::2], y[..., 1::2])
    c, d = a * cos - b * sin, b * cos + a * sin
    x.copy_(torch.cat((c, d), -1) if neox else torch.stack((c, d), -1).flatten(-2))


class Rope:
    def __init__(self, neox: bool) -> None:
        self.neox = neox

    def run_rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin.float()[positions].unsqueeze(1).chunk(2, -1)
        _rotate(q, cos, sin, self.neox)
        _rotate(k, cos, sin, self.neox)

    def run_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        self.run_rope(q, k, cos_sin, positions)
        k_cache[slots.long()], v_cache[slots.long()] = k.flatten(1), v.flatten(1)


def store_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, splits: int, limit: int, skipped: int
) -> None:
    """Slot `skipped` is that of padding. It is written here too: a CUDA graph cannot choose the tokens."""
    k_cache[slots.long()], v_cache[slots.long()] = k, v


def load_inline(name: str, *given: Any, **words: Any) -> Any:
    functions = {"run_activation": run_activation, "rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm}
    functions |= {"qknorm": qknorm, "store_cache": store_cache}
    if name.startswith("sgl_kernel_jit_fused_rope_"):
        rope = Rope(neox=name.startswith("sgl_kernel_jit_fused_rope_true"))
        functions |= {"run_rope": rope.run_rope, "run_rope_store": rope.run_rope_store}
    return SimpleNamespace(**functions)


def load(name: str, *given: Any, **words: Any) -> NoReturn:
    raise NotImplementedError(f"{name} is not written in torch")
