"""Hugging Face transformers on tilewise: `attn_implementation="tilewise"`.

    import tilewise.integrations.transformers    # calls register()
    model = AutoModel.from_pretrained(name, attn_implementation="tilewise")
    model.set_attn_implementation("tilewise")    # or change an existing model
    serve(model).generate_batch(prompts)         # continuous batching

Tested with transformers 5.17, 5.22 and 5.23; with others it warns once, and works or raises. Anything
that is not supported (attention weights, a mask of unknown kind) raises AttentionError.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import transformers
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor

from ..api import attention, attention_varlen
from ..distributed import current
from ..errors import AttentionError
from ..validation.versions import check_version, version
from . import hf_cache
from .bands import table
from .hf_masks import Mask, make_mask
from .hf_sharded import attend, check_positions

NAME = "tilewise"
SERVING = "tilewise_flash3"  # names with "flash" in them may serve with CUDA graphs; with 3, from a table of blocks
TESTED = ((5, 17), (5, 23))


def register(*, look: bool = True) -> None:
    """Register "tilewise" with transformers (and, for continuous batching, "paged|tilewise": see `serve`).

    Importing the module calls it.

    Args:
        look: if True (default), the padding mask is read once a forward pass, and dropped if there is no padding, as
            transformers' own mask functions do. This synchronizes with the GPU. If False, the mask is applied to every
            pair.
    """
    check_version("transformers", transformers.__version__, *TESTED)
    for name in (NAME, f"paged|{NAME}", SERVING, f"paged|{SERVING}"):
        transformers.AttentionInterface.register(name, attention_forward)
        transformers.AttentionMaskInterface.register(name, partial(make_mask, look=False) if not look else make_mask)


def serve(model: Any) -> Any:
    """Use tilewise for a model's continuous batching (`generate_batch`, `continuous_batching_context_manager`).

    transformers decides by the name whether CUDA graphs and its path for decoding are available. Call this before each
    new batching manager if other models of the process use flash attention: transformers remembers one of them.

    Give the manager `ContinuousBatchingConfig(use_async_batching=False)`: asynchronous batching of transformers 5.17 to
    5.23 can compute the first steps with inputs that are being reset, with any attention.

    Args:
        model: a transformers model. Its config is changed.

    Returns:
        The model.
    """
    name = SERVING if version(transformers.__version__) >= (5, 22) else f"paged|{SERVING}"
    model.config._attn_implementation = name  # set_attn_implementation would look for a kernel of that name on the Hub
    flash._loaded_implementation, flash._flash_with_kvcache_fn = name, attention_forward  # not called: not None
    return model


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: q (B, H, Sq, D), k and v (B, Hk, Sk, D); returns (B, Sq, H, Dv) and None.

    transformers calls it. With cu_seq_lens (padding-free batches, continuous batching) sequences are packed, and the
    mask adds nothing.

    Args:
        module: the attention layer.
        query: (B, H, Sq, D).
        key: (B, Hk, Sk, D).
        value: (B, Hk, Sk, Dv).
        attention_mask: the mask that tilewise made for transformers, or a tensor that broadcasts to (B, H, Sq, Sk):
            bools (True is visible) or floats (added). None: no padding; the layer decides whether it is causal.
        dropout: probability that a softmax weight is dropped.
        scaling: factor of the scores. Default: 1 / sqrt(D).
        is_causal: whether the layer is causal. Default: what the module says.
        softcap: bound of the scores. Default: none.
        s_aux: (H,), sinks. Default: none.
        position_bias: added to the scores. Default: none.
        sliding_window: keys that a query sees. Default: that of the module.
        cu_seq_lens_q: offsets of packed queries. Default: a batch.
        cu_seq_lens_k: offsets of packed keys, or a dict of them by the type of layer.
        cache: transformers' paged cache, in continuous batching.
        output_attentions: must be false: the weights are not kept.
        others: further arguments of transformers, such as position_ids.

    Returns:
        out (B, Sq, H, Dv), and None in place of the weights.

    Raises:
        AttentionError: an argument is not supported; the message names it.
    """
    if output_attentions:
        raise AttentionError("output_attentions", True, 'attn_implementation="eager", which keeps the weights')
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plan = attention_mask.plan if isinstance(attention_mask, Mask) else current()
    if plan is not None:
        refused = {"cu_seq_lens_q": cu_seq_lens_q, "cache": cache, "position_bias": position_bias}
        if isinstance(attention_mask, Mask):
            options["mask_mod"] = attention_mask.mod
            if not attention_mask.checked:
                check_positions(plan, others.get("position_ids"))
                attention_mask.checked = True  # once a forward
        else:
            plan = plan.banded(causal=causal, window=_window(sliding_window, causal))
            refused["attention_mask"] = attention_mask
        return attend(plan, query, key, value, options | {"dropout_p": dropout}, refused), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        _check_packed(attention_mask, cache, position_bias)
        if cache is not None:
            named = others | {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            return _served(module, (query, key, value), cache, sliding_window, named, options | {"dropout_p": dropout})
        options |= {"dropout_p": dropout, "causal": causal, "window": _window(sliding_window or None, causal)}
        return _packed(query, key, value, (cu_seq_lens_q, cu_seq_lens_k), **options), None
    if cache is not None:
        raise AttentionError("cache", "no cu_seq_lens_q or cu_seq_lens_k", "both, with a paged cache")
    if isinstance(attention_mask, Mask) and not attention_mask.checked and others.get("use_cache"):
        _warn_if_packed(others.get("position_ids"))
        attention_mask.checked = True  # once a forward
    return _batch(query, key, value, attention_mask, causal, position_bias, options | {"dropout_p": dropout}), None


def _warn_if_packed(positions: Any) -> None:
    """A warning if the positions of a forward with a new cache go back: transformers takes them for packed sequences
    only without a cache. Waits for the GPU."""
    if isinstance(positions, Tensor) and positions.dim() == 2 and bool((positions.diff() < 0).any()):
        found = "some that go back, with use_cache=True: tokens see the tokens of the sequences before theirs"
        expected = "use_cache=False, with which transformers takes them for packed sequences; or cu_seq_lens_q"
        warnings.warn(f"position_ids: found {found}; expected {expected} and cu_seq_lens_k", stacklevel=2)


def _served(
    module: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    cache: Any,
    sliding_window: int | None,
    named: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Continuous batching: new tokens of several sequences over a paged cache."""
    window = sliding_window or getattr(module, "sliding_window", None)
    cu_k = named["cu_seq_lens_k"]
    if isinstance(cu_k, dict):
        cu_k = cu_k["full_attention" if window is None else "sliding_attention"]
    offsets = named["cu_seq_lens_q"], cu_k
    options |= {"causal": True, "window": _window(window, True)}
    pool = hf_cache.pool_of(cache, module.layer_idx)
    if pool is not None:
        on_cache = {name: x for name, x in options.items() if name != "dropout_p"}
        found = hf_cache.attend(cache, pool, tensors, offsets, named, **on_cache)
        if found is not None:
            return found, None
    key, value = hf_cache.gathered(cache, tensors[1], tensors[2], module.layer_idx, named)
    return _packed(tensors[0], key, value, offsets, **options), None


def _batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    causal: bool,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """(B, Sq, H, Dv) of a batch, padded or not."""
    n_q, n_k = query.shape[2], key.shape[2]
    keys = n_k
    if position_bias is not None:
        options["bias"] = position_bias
    if mask is None:
        causal = n_q > 1 and causal
        keys = n_q if causal and n_k > n_q else n_k  # as "sdpa": the keys of a static cache that are written
        options["window"] = (None, n_q - keys) if causal else None
    elif isinstance(mask, Mask):
        if mask.sizes[2] != n_q or mask.sizes[3] != n_k:
            raise AttentionError("queries and keys of the attention mask", mask.sizes[2:], f"the layer's {(n_q, n_k)}")
        if mask.segments is not None and position_bias is None and not torch.compiler.is_compiling():
            return _packed(query, key, value, mask.segments, window=mask.window, **options)
        keys = n_k if mask.keys is None else mask.keys
        options |= {"window": mask.window, "mask_mod": mask.mod}
    else:
        options |= _of_tensor(mask, n_k, position_bias)
    if keys != n_k:
        key, value = key[:, :, :keys], value[:, :, :keys]
        if position_bias is not None and position_bias.shape[-1] != 1:
            options["bias"] = position_bias[..., :keys]
    out: Tensor = attention(query, key, value, layout="bhsd", **options)
    return out.transpose(1, 2)


def _window(size: int | None, causal: bool) -> tuple[int, int | None] | None:
    return None if size is None else (size - 1, None if causal else size - 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """Attention of the rows of a batch as one row of packed sequences with these offsets."""
    tensors = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Tensor = attention_varlen(*tensors, *(x.int() for x in offsets), **options)
    return out.view(q.shape[0], q.shape[2], *out.shape[1:])


def _check_packed(mask: Any, cache: Any, position_bias: Tensor | None) -> None:
    """Raises for what packed sequences do not have: a position bias, or a mask beside their offsets."""
    if position_bias is not None:
        raise AttentionError(
            "position_bias", "a tensor with cu_seq_lens", "None: packed sequences have no position bias"
        )
    if isinstance(mask, Mask) and mask.mod is not None and mask.mod.name in ("valid_keys", "table"):
        raise AttentionError("attention_mask", f"{mask!r} with cu_seq_lens", "one of the two")
    if isinstance(mask, Tensor) and cache is None:
        raise AttentionError("attention_mask", f"{tuple(mask.shape)} with cu_seq_lens", "one of the two")


def _of_tensor(mask: Any, n_k: int, position_bias: Tensor | None) -> dict[str, Any]:
    """The option for a mask tensor of the user or the model. It is cut to the keys, as transformers does."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or 1 < mask.shape[-1] < n_k:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise AttentionError("attention_mask", found, f"None, or a tensor that broadcasts to (B, H, Sq, {n_k})")
    mask = mask[..., :n_k]
    if mask.dtype == torch.bool:
        return {"mask_mod": table(mask)}
    if not mask.is_floating_point():
        raise AttentionError("dtype of attention_mask", mask.dtype, "bool (True is visible), or float to add")
    return {"bias": mask if position_bias is None else mask + position_bias}


register()
