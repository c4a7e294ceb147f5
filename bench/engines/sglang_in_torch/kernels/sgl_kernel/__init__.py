"""The functions of sgl_kernel that a Llama or Qwen 3 layer calls, in torch: for machines where the compiled ones do not
load. Other names exist, and raise when they are called."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

__version__ = "0.4.5"
SUBMODULES = (
    "allreduce", "elementwise", "flash_attn", "flash_mla", "kvcacheio", "mamba", "quantization", "scalar_type",
    "sparse_flash_attn", "speculative", "utils",
)  # fmt: skip


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    x = input.float()
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)
    return y if out is None else out.copy_(y)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """residual += input; input = rmsnorm(residual). The sum is rounded to the dtype of residual, once."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float())


def _act_and_mul(act: Any, x: Tensor, out: Tensor | None) -> Tensor:
    a, b = x.float().chunk(2, -1)
    y = (act(a) * b).to(x.dtype)
    return y if out is None else out.copy_(y)


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    return _act_and_mul(silu, input, out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    return _act_and_mul(gelu, input, out)


def weak_ref_tensor(x: Tensor) -> Tensor:
    return x


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__name__}.{name}")

    def __call__(cls, *given: Any, **words: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{cls.__name__}: not one of the functions that are written in torch")


def _missing(name: str) -> Any:
    return _Meta(name, (), {})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


for _name in SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]

if not torch.cuda.is_available():  # what SGLang calls on a CPU when it starts
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _library.define("init_cpu_threads_env(str cores) -> str")
    _library.define("initialize(int size, int rank) -> ()")
    _library.impl("init_cpu_threads_env", lambda cores: cores, "CompositeExplicitAutograd")
    _library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")
