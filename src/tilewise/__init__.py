"""Exact attention for PyTorch, computed tile by tile."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from . import mods
from .api import attention, attention_varlen, check
from .errors import AttentionError
from .kv_cache import append_kv, attention_kv, check_kv, plan_kv
from .kv_request import KvPlan, Rotary
from .merge import merge
from .mods import block_mask, block_mask_varlen, mask_mod, score_mod
from .mods.dropout import dropout_mask
from .warmup import warmup

if TYPE_CHECKING:
    from tilewise_lab.costs.explanation import Explanation
    from tilewise_lab.costs.kv import KvExplanation

    from . import compat, integrations
    from .integrations.sdpa import replace_sdpa, replaces_sdpa, scaled_dot_product_attention

    __version__: str

__all__ = [
    "AttentionError",
    "KvPlan",
    "Rotary",
    "append_kv",
    "attention",
    "attention_kv",
    "attention_varlen",
    "block_mask",
    "block_mask_varlen",
    "check",
    "check_kv",
    "compat",
    "dropout_mask",
    "explain",
    "explain_kv",
    "integrations",
    "mask_mod",
    "merge",
    "mods",
    "plan_kv",
    "replace_sdpa",
    "replaces_sdpa",
    "scaled_dot_product_attention",
    "score_mod",
    "warmup",
]

# Imported when they are first asked for: names, and the modules that have them.
_LATER = {
    "__version__": "tilewise.version",
    "compat": "tilewise.compat",
    "distributed": "tilewise.distributed",
    "integrations": "tilewise.integrations",
    "replace_sdpa": "tilewise.integrations.sdpa",
    "replaces_sdpa": "tilewise.integrations.sdpa",
    "scaled_dot_product_attention": "tilewise.integrations.sdpa",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if module.__name__.endswith("." + name) else getattr(module, name)
    globals()[name] = found
    return found


def _activate() -> Any:
    from .integrations.flash_registry import activate

    return activate()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):  # it is active when somebody says so
    torch.nn.attention.register_flash_attention_impl("tilewise", register_fn=_activate)


# The only functions, with `Plan.simulate`, that import the laboratory, and only when they are called.


def explain(*args: Any, show: bool = True, **options: Any) -> "Explanation":
    """What a call would run, what it costs and what would make it faster; printed (unless show=False) and returned.

        tilewise.explain(q, k, v, causal=True)                                          where the tensors are
        tilewise.explain((4, 4096, 16, 128), (4, 4096, 4, 128), (4, 4096, 4, 128), device="H200")   shapes will do

    The arguments are those of `attention` or `attention_varlen`, and `device`, `backward`, `dtype`, `compiled`:
    see `tilewise_lab.costs.explain.explain`. Nothing is launched.
    """
    from tilewise_lab.costs.explain import explain

    explanation = explain(*args, **options)
    if show:
        print(explanation)
    return explanation


def explain_kv(*args: Any, show: bool = True, **options: Any) -> "KvExplanation":
    """What a call with a KV cache reads, how its keys are divided among SMs, what binds it; printed and returned.

        tilewise.explain_kv((64, 1, 32, 128), (64, 8192, 8, 128), None, [4096] * 64, device="H200", backend="triton")

    The arguments are those of `attention_kv` (shapes will do), and `device`, `dtype`: see `tilewise_lab.costs.kv`.
    Nothing is launched.
    """
    from tilewise_lab.costs.kv import explain_kv

    explanation = explain_kv(*args, **options)
    if show:
        print(explanation)
    return explanation
