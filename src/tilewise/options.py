"""What may be said of a call beside q, k and v: names, defaults, how help() shows them, and what others call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from .errors import AttentionError
from .mods.blocks import BlockMask
from .mods.program import Mod
from .request import Window


class Options(TypedDict, total=False):
    """What may be asked of attention beside q, k and v."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | BlockMask | None
    dropout_p: float
    seed: int | Tensor | None
    return_lse: bool
    deterministic: bool | None
    backend: str


def _defaults() -> Options:
    """Written out here, not kept in a global: the numbers of a global are variables to torch.compile."""
    return {
        "causal": False, "window": None, "scale": None, "softcap": None, "bias": None, "alibi_slopes": None,
        "sinks": None, "score_mod": None, "mask_mod": None, "dropout_p": 0.0, "seed": None, "return_lse": False,
        "deterministic": None, "backend": "auto",
    }  # fmt: skip


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Show `**options` by name, type and default, in help() and wherever signatures are read."""
    return shown(function, Options, _defaults())


def shown(function: F, options: Any, defaults: Any) -> F:
    """The same of any options."""
    own = inspect.signature(function)
    *first, _ = own.parameters.values()
    kinds = get_type_hints(options)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in defaults.items()
    ]
    function.__signature__ = own.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
    return function


# What other libraries call it, and how it is said here.
FOREIGN = {
    "is_causal": "causal=True (here a query sits at key position i + Sk - Sq: torch's top-left only where Sq == Sk)",
    "attn_mask": "mask_mod= for a bool mask, bias= for a float one",
    "attn_bias": "bias=",
    "key_padding_mask": "attention_varlen, or mask_mod=",
    "softmax_scale": "scale=",
    "window_size": "window=(left, right), with None where flash-attn writes -1",
    "dropout": "dropout_p=",
    "block_mask": "mask_mod=tilewise.block_mask(...)",
    "enable_gqa": "nothing: heads of q may be a multiple of those of k",
    "return_attn_probs": "return_lse=True",
    "return_softmax_lse": "return_lse=True",
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "layout": "packed tensors, (tokens, heads, dim), without it",
}


def options_of(given: Options) -> Options:
    """The options, with defaults where nothing is said."""
    options: Options = completed(given, _defaults(), FOREIGN)
    return options


def completed(given: Any, defaults: Any, foreign: dict[str, str]) -> Any:
    """The same of any options; `foreign` says what other libraries' names are called here."""
    options = defaults | given
    if len(options) != len(defaults):
        name = next(name for name in given if name not in defaults)
        near = get_close_matches(name, defaults, n=1)
        hint = foreign.get(name) or (f"{near[0]}=" if near else f"one of {', '.join(defaults)}")
        raise AttentionError("argument", f"{name}=", hint)
    return options
