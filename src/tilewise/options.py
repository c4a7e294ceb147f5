"""The options of a call, without and with a KV cache: names, types, defaults, how help() shows them, and their names in
other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from .errors import AttentionError
from .kv_request import QkNorm, Rotary, Scale, SharedPrefix
from .mods.blocks import BlockMask
from .mods.program import Mod
from .request import Window

PageTable = Tensor | tuple[Tensor, Tensor] | None


class OtherOptions(TypedDict, total=False):
    """The options of `attention` except return_lse and return_max_logit, on which the type of the result depends."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_mod: Mod | Callable[..., Any] | None
    mask_mod: Mod | BlockMask | Callable[..., Any] | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool | None
    precision: str | None
    backend: str


class Options(OtherOptions, total=False):
    """The options of `attention`."""

    return_lse: bool
    return_max_logit: bool


class KvOptions(TypedDict, total=False):
    """The options of `attention_kv`, beside q, the caches and their lengths."""

    k_new: Tensor | None
    v_new: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_new: Tensor | None
    page_table: PageTable
    token_table: Tensor | None
    slots: Tensor | None
    cache_rows: Tensor | None
    starts: Tensor | None
    rotary: Rotary | None
    qk_norm: QkNorm | None
    k_scale: Scale
    v_scale: Scale
    tree: Tensor | None
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    score_mod: Mod | Callable[..., Any] | None
    mask_mod: Mod | Callable[..., Any] | None
    out: Tensor | None
    return_lse: bool
    return_max_logit: bool
    plan: Any
    split: int | None
    shared_prefix: SharedPrefix
    max_seqlen_q: int | None
    backend: str


KV_NAMES = tuple(KvOptions.__annotations__)


# torch.compile would treat a float of a global dict as a variable: dropout_p is an int.
DEFAULTS: Options = {
    "causal": False,
    "window": None,
    "scale": None,
    "softcap": None,
    "bias": None,
    "alibi_slopes": None,
    "sinks": None,
    "score_mod": None,
    "mask_mod": None,
    "dropout_p": 0,
    "seed": None,
    "return_lse": False,
    "return_max_logit": False,
    "deterministic": None,
    "precision": None,
    "backend": "auto",
}


def kv_defaults() -> KvOptions:
    options: Any = dict.fromkeys(KV_NAMES)
    options.update(causal=True, return_lse=False, return_max_logit=False, backend="auto")
    found: KvOptions = options
    return found


# The default of an argument that must be given: without it, the error is about the argument and not about the count.
REQUIRED: Any = type("nothing", (), {})()
F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Decorator: help() and inspect.signature show each of `**options` with its type and default."""
    return show_options(function, Options, DEFAULTS)


def show_options(function: F, options: Any, defaults: Any) -> F:
    """`takes_options` for the TypedDict `options` with these defaults."""
    own = inspect.signature(function)
    *first, _ = (
        x.replace(default=inspect.Parameter.empty) if x.default is REQUIRED else x
        for x in own.parameters.values()
        if x.kind is not inspect.Parameter.VAR_POSITIONAL
    )
    kinds = get_type_hints(options)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in defaults.items()
    ]
    function.__signature__ = own.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
    return function


VARLEN = "attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)"
KV_CACHE = "attention_kv(q, k_cache, v_cache, lengths)"


def _sliding_window(tokens: Any) -> str:
    """
    >>> _sliding_window(4)
    'window=(3, 0): a query sees 4 keys, with its own'
    """
    if not isinstance(tokens, int) or tokens < 1:
        return "window=(left, right), each an int >= 0 or None for unbounded"
    return f"window=({tokens - 1}, 0): a query sees {tokens} keys, with its own"


# Names of other libraries, and what to write instead; or a function of the value that returns it.
OTHER_LIBRARIES: dict[str, Any] = {
    **dict.fromkeys(("query", "queries"), "q=, or the first argument"),
    **dict.fromkeys(("key", "keys"), "k=, or the second argument"),
    **dict.fromkeys(("value", "values"), "v=, or the third argument"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), VARLEN),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), f"{VARLEN}, which has it"),
    **dict.fromkeys(("page_table", "block_table", "cache_seqlens", "kv_cache"), KV_CACHE),
    "alibi": "alibi_slopes=, a tensor (heads,)",
    "sliding_window": _sliding_window,
    "mask": "mask_mod= for a bool mask, bias= for a float one",
    "attention_mask": "mask_mod= for a bool mask, bias= for a float one",
    "need_weights": "tilewise.weights(q, k, v, rows=)",
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

OTHER_KV_LIBRARIES = OTHER_LIBRARIES | {
    "cache_seqlens": "lengths, the tokens in the cache before this call",
    "block_table": "page_table=",
    "cache_batch_idx": "cache_rows=",
    "cache_leftpad": "starts=",
    "rotary_cos": "rotary=tilewise.Rotary(cos, sin, interleaved=)",
    "num_splits": "split=, the number of keys of a split (or None: the load is balanced on the device)",
    "k": "k_new=",
    "v": "v_new=",
    "slot_mapping": "slots=",
    "bias": "score_mod=",
}


def kv_options(given: KvOptions) -> KvOptions:
    """The given options of a call with a KV cache, completed with the defaults."""
    defaults = kv_defaults()
    options: KvOptions = defaults | given
    if len(options) != len(defaults):
        raise unknown(given, defaults, OTHER_KV_LIBRARIES)
    return options


def misplaced(function: str, values: tuple[Any, ...]) -> AttentionError:
    """The error of positional arguments that a function does not have."""
    first = values[0]
    match first:
        case bool():
            hint = f"causal={first}"
        case int() if "varlen" in function:
            names = ("max_seqlen_q", "max_seqlen_k")
            hint = ", ".join(f"{name}={x}" for name, x in zip(names, values, strict=False))
        case BlockMask():
            hint = "mask_mod="
        case Mod():
            hint = f"{first.kind}_mod="
        case Tensor() if first.is_floating_point() or first.dim() != 1:
            hint = "bias=, or mask_mod= for a mask"
        case Tensor():
            hint = VARLEN
        case int() | float():
            hint = f"scale={first}"
        case _ if type(first).__name__ == "BlockMask":  # torch's
            hint = "mask_mod=tilewise.block_mask(...), or tilewise.compat.flex_attention, which takes torch's"
        case _:
            hint = "causal=True"
    found = ", ".join(type(x).__name__ for x in values)
    return AttentionError(f"positional arguments of {function} after its tensors", found, f"options by name: {hint}")


def unknown(given: Any, defaults: Any, foreign: dict[str, Any]) -> AttentionError:
    """The error of an option that has no default. `foreign` maps the names of other libraries to a hint; otherwise the
    message suggests the closest name."""
    name = next(name for name in given if name not in defaults)
    near = get_close_matches(name, defaults, n=1)
    hint = foreign.get(name) or (f"{near[0]}=" if near else f"one of {', '.join(defaults)}")
    if callable(hint):
        hint = hint(given[name])
    return AttentionError("keyword argument", f"{name}=", hint)
