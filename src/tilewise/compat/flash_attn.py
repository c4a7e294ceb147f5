"""flash-attn 2.8's functions, same names and arguments.

    from tilewise.compat.flash_attn import flash_attn_func       in the place of `from flash_attn import ...`
    tilewise.compat.flash_attn.install()                         or once, before whoever imports flash_attn

What differs: any dtype, head dims to 512, a CPU will do; queries that see no key give 0 and lse -inf; the lse has a
gradient. What cannot be honoured raises.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..cache.api import attention_kv
from ..cache.plans import Plans
from ..cache.request import Rotary
from ..checks import tensor
from ..mods.dropout import is_whole
from ..spec import AttentionError
from . import bert_padding

Window = tuple[int, int]
BOTH_WAYS: Window = (-1, -1)
VERSION = "2.8.3"
NOT_TURNED: dict[str, Any] = {"cos": None, "sin": None}


def options_of(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """flash-attn's words in tilewise's: -1 is no bound, a softcap of 0 none."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(side is None or is_whole(side) for side in window_size):
        raise AttentionError("window_size", repr(window_size), "(left, right), two ints, -1 for no bound")
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return {
        "scale": softmax_scale, "causal": causal, "window": None if left is right is None else (left, right),
        "softcap": softcap or None, "dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "return_lse": True,
        "deterministic": True if deterministic else None,
    }  # fmt: skip


def _returned(out: Tensor, lse: Tensor, probs: bool, dropout_p: float) -> Any:
    """(out, lse, None) if they are asked for: of the weights flash-attn gives none either, unless there is dropout."""
    if probs and dropout_p:
        raise AttentionError(
            "return_attn_probs", "True beside dropout_p", "one of them; tilewise.dropout_mask says what is dropped"
        )
    return (out, lse, None) if probs else out


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = BOTH_WAYS, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q (B, Sq, H, D), k and v (B, Sk, Hk, D) -> (B, Sq, H, D); causal aligned bottom right.

    >>> import torch
    >>> q = torch.randn(1, 5, 4, 16)
    >>> flash_attn_func(q, q, q, causal=True, window_size=(2, -1)).shape
    torch.Size([1, 5, 4, 16])
    """
    words = options_of(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes, deterministic)
    out, lse = attention(q, k, v, **words)
    return _returned(out, lse, return_attn_probs, dropout_p)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = BOTH_WAYS, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """kv (B, Sk, 2, Hk, D); the rest as `flash_attn_func`."""
    k, v = _parts(kv, "kv", 2, 2)
    words = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *words)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = BOTH_WAYS, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv (B, S, 3, H, D); the rest as `flash_attn_func`."""
    q, k, v = _parts(qkv, "qkv", 2, 3)
    words = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *words)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = BOTH_WAYS,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q (T, H, D), k and v (Tk, Hk, D), sequences one after the other.

    >>> import torch
    >>> q, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=True).shape
    torch.Size([7, 4, 16])
    """
    words = options_of(softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes, deterministic)
    if block_table is not None:
        if dropout_p:
            raise AttentionError("dropout_p", f"{dropout_p} beside block_table", "0: over a cache there is none")
        pages = {"page_table": block_table, "cu_seqlens_q": cu_seqlens_q}
        out, lse = over_cache(
            q, k, v, None, None, tensor("cu_seqlens_k", cu_seqlens_k).diff(), NOT_TURNED, words | pages
        )
    else:
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **words)
    return _returned(out, lse, return_attn_probs, dropout_p)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = BOTH_WAYS, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """kv (Tk, 2, Hk, D); the rest as `flash_attn_varlen_func`."""
    k, v = _parts(kv, "kv", 1, 2)
    words = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *words)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = BOTH_WAYS, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv (T, 3, H, D); the rest as `flash_attn_varlen_func`, with one cu_seqlens and one max_seqlen."""
    q, k, v = _parts(qkv, "qkv", 1, 3)
    words = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *words)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = BOTH_WAYS, softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention over a KV cache, after new keys and values were written into it: see `tilewise.attention_kv`, which has
    no gradient. cache_seqlens: tokens in the cache before the call; without, it is full. With num_splits=1 the keys of
    a sequence are never divided; other numbers say how to compute, and are not needed.

    >>> cache, q, new = torch.zeros(2, 2, 32, 2, 16), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    >>> lengths = torch.tensor([5, 20], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 4, 16])
    """
    words = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes=alibi_slopes)
    new = k, v, rotary_cos, rotary_sin
    plain = all(x is None for x in (*new, cache_seqlens, cache_batch_idx, cache_leftpad, block_table))
    if plain:  # with a gradient
        out, lse = attention(q, k_cache, v_cache, **words)
    else:
        cache: dict[str, Any] = {"cache_rows": cache_batch_idx, "starts": cache_leftpad, "page_table": block_table}
        cache["split"] = 0 if num_splits == 1 else None
        turned = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
        out, lse = over_cache(q, k_cache, v_cache, k, v, cache_seqlens, turned, words | cache)
    return (out, lse) if return_softmax_lse else out


def over_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, lengths: Any,
    rotary: dict[str, Any], words: dict[str, Any], plans: Plans | None = None, rotary_lengths: Any = None,
) -> Any:  # fmt: skip
    """(out, lse) of tilewise.attention_kv. flash-attn turns the i-th query by the place of the i-th new key if there is
    a band (also where new keys are more or fewer than queries), and all of them by that of the first if there is none;
    places count from `rotary_lengths`, where they are not the cache's."""
    cos, sin = rotary["cos"], rotary["sin"]
    if (k is None) != (v is None) or (k is None and cos is not None):
        raise AttentionError("k and v", "one of them, or none beside rotary_cos", "both")
    if (cos is None) != (sin is None):
        raise AttentionError("rotary_cos and rotary_sin", "one of them", "both, or neither")
    for name, x in (("q", q), ("k_cache", k_cache), *((("k", k), ("v", v)) if k is not None else ())):
        tensor(name, x)
    if plans is not None and not isinstance(plans, Plans):
        raise AttentionError("scheduler_metadata", type(plans).__name__, "what get_scheduler_metadata returns")
    if lengths is None:
        table = words.get("page_table")
        pages = 1 if table is None else tensor("page_table", table).shape[-1]
        lengths = pages * k_cache.shape[1] - (0 if k is None else k.shape[1])
    words = {name: x for name, x in words.items() if name not in ("dropout_p", "deterministic") and x is not None}
    if k is not None:
        words |= {"k_new": k, "v_new": v}
    if cos is not None:
        banded = words["causal"] or "window" in words
        alike = k is not None and q.shape[:-2] == k.shape[:-2] and "cu_seqlens_new" not in words
        if rotary_lengths is not None or not banded or not alike:
            cu_q, cu_new = words.get("cu_seqlens_q"), words.get("cu_seqlens_new", words.get("cu_seqlens_q"))
            batch = q.shape[0] if cu_q is None else tensor("cu_seqlens_q", cu_q).shape[0] - 1
            own = _starts(lengths if rotary_lengths is None else rotary_lengths, q, batch)
            rotary = rotary | {"positions": _places(k, cu_new, own), "q_positions": _places(q, cu_q, own, banded)}
        words["rotary"] = Rotary(**rotary)
    if plans is not None:
        words["plan"] = plans.of(q, k_cache, v_cache, lengths, words)
    return attention_kv(q, k_cache, v_cache, lengths, **words)


def _starts(given: Any, q: Tensor, batch: int) -> Tensor:
    """Where places begin to be counted, as a tensor."""
    if is_whole(given):
        return torch.full((), given, device=q.device)
    lengths = tensor("lengths that rotary counts from", given)
    if lengths.is_floating_point() or tuple(lengths.shape) not in ((), (1,), (batch,)):
        found = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise AttentionError("lengths that rotary counts from", found, f"{batch} integers, one for each sequence")
    return lengths.to(q.device)


def _places(x: Any, cu: Tensor | None, starts: Tensor, one_by_one: bool = True) -> Tensor:
    """The place of every token, dense or packed, where its sequence's first is at `starts`; or that of the first."""
    if x.dim() == 4:
        step = torch.arange(x.shape[1], device=x.device) * int(one_by_one)
        return starts.expand(x.shape[0])[:, None] + step
    assert cu is not None
    t = torch.arange(x.shape[0], device=x.device)
    b = torch.bucketize(t, cu[1:], right=True).clamp(max=max(cu.shape[0] - 2, 0))
    return starts.expand(cu.shape[0] - 1)[b] + (t - cu[b]) * int(one_by_one)


def _parts(packed: Tensor, name: str, axis: int, n: int) -> tuple[Tensor, ...]:
    if tensor(name, packed).dim() != axis + 3 or packed.shape[axis] != n:
        raise AttentionError(f"shape of {name}", tuple(packed.shape), f"{axis + 3} axes, {n} along axis {axis}")
    return packed.unbind(axis)


FUNCTIONS = (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
)  # fmt: skip


def install() -> None:
    """Let `import flash_attn` (2.8) and `import flash_attn_interface` (3) find these functions; call it before anything
    imports flash-attn.

        tilewise.compat.flash_attn.install()
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import pad_input, unpad_input

    Other parts of that package (its layers, models and fused operations) are not there: importing them fails.
    """
    from . import flash_attn_3

    there = sys.modules.get("flash_attn")
    if there is not None and getattr(there, "__file__", None):
        raise AttentionError("install()", "flash_attn, imported already", "a call before anything imports it")
    interface = _module("flash_attn.flash_attn_interface", {f.__name__: f for f in FUNCTIONS})
    padding = _module("flash_attn.bert_padding", vars(bert_padding))
    names = {f.__name__: f for f in FUNCTIONS} | {
        "__version__": VERSION, "__path__": [], "flash_attn_interface": interface, "bert_padding": padding,
    }  # fmt: skip
    _module("flash_attn", names)
    _module("flash_attn_interface", vars(flash_attn_3))


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    """A module of this name that has the public ones of the names."""
    made = ModuleType(name, "flash-attn's functions, by tilewise: see tilewise.compat.flash_attn")
    vars(made).update({k: x for k, x in names.items() if not k.startswith("_") or k in ("__version__", "__path__")})
    made.__spec__ = ModuleSpec(name, None, is_package="__path__" in names)
    sys.modules[name] = made
    return made
