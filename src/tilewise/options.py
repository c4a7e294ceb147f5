"""The options of a call: names, types, defaults, how help() shows them, and their names in other libraries."""

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


class OtherOptions(TypedDict, total=False):
    """The options of `attention` except return_lse and return_max_logit, on which the type of the result depends."""

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
    deterministic: bool | None
    backend: str


class Options(OtherOptions, total=False):
    """The options of `attention`."""

    return_lse: bool
    return_max_logit: bool


def _defaults() -> Options:
    """A new dict each time: torch.compile treats the numbers of a global dict as variables."""
    return {
        "causal": False,
        "window": None,
        "scale": None,
        "softcap": None,
        "bias": None,
        "alibi_slopes": None,
        "sinks": None,
        "score_mod": None,
        "mask_mod": None,
        "dropout_p": 0.0,
        "seed": None,
        "return_lse": False,
        "return_max_logit": False,
        "deterministic": None,
        "backend": "auto",
    }


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Decorator: help() and inspect.signature show each of `**options` with its type and default."""
    return show_options(function, Options, _defaults())


def show_options(function: F, options: Any, defaults: Any) -> F:
    """`takes_options` for the TypedDict `options` with these defaults."""
    own = inspect.signature(function)
    *first, _ = own.parameters.values()
    kinds = get_type_hints(options)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in defaults.items()
    ]
    function.__signature__ = own.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
    return function


# Names of other libraries, and what to write instead.
OTHER_LIBRARIES = {
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
    """The given options, completed with the defaults."""
    options: Options = completed(given, _defaults(), OTHER_LIBRARIES)
    return options


def completed(given: Any, defaults: Any, foreign: dict[str, str]) -> Any:
    """Returns the given options completed with `defaults`.

    Raises:
        AttentionError: an option has no default, so its name is unknown. `foreign` maps the names of other libraries to
            a hint; otherwise the message suggests the closest name.
    """
    options = defaults | given
    if len(options) != len(defaults):
        name = next(name for name in given if name not in defaults)
        near = get_close_matches(name, defaults, n=1)
        hint = foreign.get(name) or (f"{near[0]}=" if near else f"one of {', '.join(defaults)}")
        raise AttentionError("keyword argument", f"{name}=", hint)
    return options
