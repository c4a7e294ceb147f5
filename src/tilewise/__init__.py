"""Exact attention for PyTorch, computed tile by tile."""

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from . import mods
from .api import attention, attention_varlen, check
from .call.fields import ATTENTION, REQUIRED, show_required
from .call.options import Layout, Options
from .debug import weights
from .errors import AttentionError
from .kv_cache import append_kv, attention_kv, check_kv, plan_kv
from .kv_formats import pack_mla
from .kv_request import KvPlan, QkNorm, Rotary
from .merging import merge
from .mla import attention_mla
from .mods import block_mask, block_mask_varlen, mask_mod, score_mod
from .mods.dropout import dropout_mask
from .warmup import warmup

if TYPE_CHECKING:
    from tilewise_lab.costs.explanation import Explanation
    from tilewise_lab.costs.kv import KvExplanation

    from . import compat, distributed, integrations, nn, sparse
    from .integrations.sdpa import replace_sdpa, replaces_sdpa, scaled_dot_product_attention

    __version__: str

__all__ = [
    "AttentionError",
    "KvPlan",
    "QkNorm",
    "Rotary",
    "append_kv",
    "attention",
    "attention_kv",
    "attention_mla",
    "attention_varlen",
    "block_mask",
    "block_mask_varlen",
    "check",
    "check_kv",
    "compat",
    "distributed",
    "dropout_mask",
    "explain",
    "explain_kv",
    "integrations",
    "mask_mod",
    "merge",
    "mods",
    "nn",
    "pack_mla",
    "plan_kv",
    "replace_sdpa",
    "replaces_sdpa",
    "scaled_dot_product_attention",
    "score_mod",
    "sparse",
    "warmup",
    "weights",
]

# Imported when they are first asked for: names, and the modules that have them.
_LATER = {
    "__version__": "tilewise.version",
    "compat": "tilewise.compat",
    "distributed": "tilewise.distributed",
    "integrations": "tilewise.integrations",
    "nn": "tilewise.nn",
    "replace_sdpa": "tilewise.integrations.sdpa",
    "replaces_sdpa": "tilewise.integrations.sdpa",
    "scaled_dot_product_attention": "tilewise.integrations.sdpa",
    "sparse": "tilewise.sparse",
}


# Names of other libraries' functions, and the modules that have them here.
_IN_COMPAT = {
    "flash_attn_func": "tilewise.compat.flash_attn",
    "flash_attn_kvpacked_func": "tilewise.compat.flash_attn",
    "flash_attn_qkvpacked_func": "tilewise.compat.flash_attn",
    "flash_attn_varlen_func": "tilewise.compat.flash_attn",
    "flash_attn_with_kvcache": "tilewise.compat.flash_attn",
    "create_block_mask": "tilewise.compat",
    "flex_attention": "tilewise.compat",
    "memory_efficient_attention": "tilewise.compat.xformers",
}


def __getattr__(name: str) -> Any:
    if name in _IN_COMPAT:
        words = f"module {__name__!r} has no {name!r}; write: from {_IN_COMPAT[name]} import {name}"
        # Python replaces the message of an AttributeError in `from tilewise import name`, which asks through importlib.
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        importing = caller is not None and caller.f_globals.get("__name__") == "importlib._bootstrap"
        raise ImportError(words, name=__name__) if importing else AttributeError(words)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if module.__name__.endswith("." + name) else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def _activate() -> Any:
    from .adapters.torch_registry import activate

    return activate()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):  # activate_flash_attention_impl makes it active
    torch.nn.attention.register_flash_attention_impl("tilewise", register_fn=_activate)


# The only functions, with `Plan.simulate`, that import the laboratory, and only when they are called.


@ATTENTION.shown
def explain(
    q: "Tensor | Sequence[int]" = REQUIRED,
    k: "Tensor | Sequence[int]" = REQUIRED,
    v: "Tensor | Sequence[int]" = REQUIRED,
    cu_seqlens_q: "Tensor | Sequence[int] | None" = None,
    cu_seqlens_k: "Tensor | Sequence[int] | None" = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: Layout | None = None,
    backward: bool | None = None,
    device: str | None = None,
    dtype: str = "bfloat16",
    compiled: bool = False,
    show: bool = True,
    **options: Unpack[Options],
) -> "Explanation":
    """What a call of `attention` or `attention_varlen` would run, what it costs and what would make it faster.

    >>> import tilewise
    >>> q, kv = (4, 4096, 16, 128), (4, 4096, 4, 128)  # or the tensors
    >>> told = tilewise.explain(q, kv, kv, causal=True, device="H200", show=False)
    >>> told.backend  # print(told) shows all of it
    'hopper'

    Args:
        q: a tensor on any device, "meta" included, or a shape.
        k: as q.
        v: as q.
        cu_seqlens_q: as in `attention_varlen`, or a list; None for `attention`.
        cu_seqlens_k: as cu_seqlens_q, which is the default.
        max_seqlen_q: as in `attention_varlen`.
        max_seqlen_k: as in `attention_varlen`.
        layout: as in `attention`.
        backward: count the backward too. Default: if an input requires a gradient.
        device: a name ("A100", "H100", "H200", "RTX 4090", "L4", "B200"), "cuda" or "cpu". Default: that of q.
        dtype: dtype of q, k and v, for those that are given as shapes.
        compiled: read registers and shared memory from the compiled kernels (seconds, once; needs Triton, but no GPU).
        show: print the explanation.
        options: as in `attention`.

    Returns:
        The explanation. Nothing is launched.

    Raises:
        AttentionError: an argument is wrong, or a backend that was named does not support the call.
    """
    from tilewise_lab.costs.explain import explain

    explanation = explain(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        layout=layout,
        backward=backward,
        device=device,
        dtype=dtype,
        compiled=compiled,
        **options,
    )
    if show:
        print(explanation)
    return explanation


@show_required
def explain_kv(
    q: "Tensor | Sequence[int]" = REQUIRED,
    k_cache: "Tensor | Sequence[int]" = REQUIRED,
    v_cache: "Tensor | Sequence[int] | None" = REQUIRED,
    lengths: "Tensor | Sequence[int] | int" = REQUIRED,
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    show: bool = True,
    **options: Any,
) -> "KvExplanation":
    """What a call with a KV cache reads, how its keys are divided among SMs, and what binds it.

    >>> import tilewise
    >>> q, cache, lengths = (64, 1, 32, 128), (64, 8192, 8, 128), [4096] * 64
    >>> told = tilewise.explain_kv(
    ...     q, cache, None, lengths, device="H200", backend="triton", show=False
    ... )
    >>> told.backend  # print(told) shows all of it
    'triton'

    Args:
        q: as in `attention_kv`, or a shape.
        k_cache: as in `attention_kv`, or a shape.
        v_cache: as in `attention_kv`, or a shape. None: as k_cache.
        lengths: as in `attention_kv`, or a list.
        device: as in `explain`.
        dtype: dtype of the tensors that are given as shapes.
        show: print the explanation.
        options: as in `attention_kv`.

    Returns:
        The explanation. Nothing is launched.

    Raises:
        AttentionError: an argument is wrong, or a backend that was named does not support the call.
    """
    from tilewise_lab.costs.kv import explain_kv

    explanation = explain_kv(q, k_cache, v_cache, lengths, device=device, dtype=dtype, **options)
    if show:
        print(explanation)
    return explanation
