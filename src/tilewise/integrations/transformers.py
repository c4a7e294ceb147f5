"""Hugging Face transformers on tilewise: `attn_implementation="tilewise"`.

    import tilewise.integrations.transformers                    # registers; or call register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")
    model.set_attn_implementation("tilewise")                    # or a model that is there already
    serve(model).generate_batch(prompts)                         # continuous batching

Tested with transformers 5.17, 5.22 and 5.23; with others it warns once, and works or raises. What a model asks for and
cannot be had (attention weights, a mask of unknown kind) raises; nothing is left out silently.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
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
SERVING = "tilewise_flash"  # since 5.22 only "sdpa", "eager" and names with "flash" in them may serve
TESTED = ((5, 17), (5, 23))


def register(*, look: bool = True) -> None:
    """Make "tilewise" known to transformers (and, for continuous batching, "paged|tilewise": see `serve`).

    look: once a forward, read the padding mask, to leave it out where there is no padding (as transformers' own mask
        functions do): this waits for the GPU. With look=False nothing is read back, and a padding mask is asked about
        every pair.
    """
    check_version("transformers", transformers.__version__, *TESTED)
    for name in (NAME, f"paged|{NAME}", SERVING):
        transformers.AttentionInterface.register(name, attention_forward)
        transformers.AttentionMaskInterface.register(name, partial(make_mask, look=False) if not look else make_mask)


def serve(model: Any) -> Any:
    """Let a model's continuous batching (`generate_batch`, `continuous_batching_context_manager`) attend with tilewise.

    transformers 5.17 takes "paged|tilewise". 5.22 takes no registered name but one with "flash" in it, and where such a
    name is set by `set_attn_implementation` it looks for that kernel on the Hub; so here it is set in the config.
    """
    if version(transformers.__version__) >= (5, 22):
        model.config._attn_implementation = SERVING
    else:
        model.set_attn_implementation(f"paged|{NAME}")
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
    """What transformers calls in every layer: q (B, H, Sq, D), k and v (B, Hk, Sk, D); returns (B, Sq, H, Dv).

    The mask is one of `make_mask`, a 4-D tensor of the user's (bools: True is seen; floats: added), or None. With
    cu_seq_lens (padding-free batches, continuous batching) sequences are packed, and the mask says no more than these.
    """
    if output_attentions:
        raise AttentionError("output_attentions", True, 'attn_implementation="eager", which keeps the weights')
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    plan = attention_mask.plan if isinstance(attention_mask, Mask) else current()
    if plan is not None:
        refused = {"cu_seq_lens_q": cu_seq_lens_q, "cache": cache, "position_bias": position_bias}
        if isinstance(attention_mask, Mask):
            options["mask_mod"] = attention_mask.mod
            if not attention_mask.checked:
                check_positions(plan, others.get("position_ids"))
                attention_mask.checked = True  # once is enough
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            plan = plan.banded(causal=causal, window=_window(sliding_window, causal))
            refused["attention_mask"] = attention_mask
        return attend(plan, query, key, value, options | {"dropout_p": dropout}, refused), None
    sliding_window = sliding_window or (None if cache is None else getattr(module, "sliding_window", None))
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        by_layer = cu_seq_lens_k if isinstance(cu_seq_lens_k, dict) else {}  # of continuous batching
        if by_layer:
            cu_seq_lens_k = by_layer["full_attention" if sliding_window is None else "sliding_attention"]
        offsets = cu_seq_lens_q, cu_seq_lens_k
        causal = cache is not None or (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        options |= {"causal": causal, "window": _window(sliding_window, causal)}
        _check_packed(attention_mask, cache, position_bias)
        if cache is not None:
            pool = hf_cache.pool_of(cache, module.layer_idx)
            found = pool and hf_cache.attend(pool, query, key, value, offsets, others, **options)
            if found is not None:
                return found, None
            named = {"cu_seq_lens_k": by_layer}
            key, value = hf_cache.gathered(cache, key, value, module.layer_idx, others | named)
        return _packed(query, key, value, offsets, dropout_p=dropout, **options), None
    if cache is not None:
        raise AttentionError("a paged cache", "without cu_seq_lens_q and cu_seq_lens_k", "both, of its sequences")
    options["dropout_p"] = dropout
    n_q, n_k = query.shape[2], key.shape[2]
    if position_bias is not None:
        options["bias"] = position_bias
    if attention_mask is None:
        causal = n_q > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        keys = n_q if causal and n_k > n_q else n_k  # as "sdpa": of an empty static cache, what was written
        options["window"] = (None, n_q - keys) if causal else None
    elif isinstance(attention_mask, Mask):
        mask = attention_mask
        if mask.sizes[2] != n_q or mask.sizes[3] != n_k:
            raise AttentionError("queries and keys of the attention mask", mask.sizes[2:], f"the layer's {(n_q, n_k)}")
        if mask.segments is not None and position_bias is None and not torch.compiler.is_compiling():
            return _packed(query, key, value, mask.segments, window=mask.window, **options), None
        keys = n_k if mask.keys is None else mask.keys
        options |= {"window": mask.window, "mask_mod": mask.mod}
    else:
        keys = n_k
        options |= _of_tensor(attention_mask, n_k, position_bias)
    if keys != n_k:
        key, value = key[:, :, :keys], value[:, :, :keys]
        if position_bias is not None and position_bias.shape[-1] != 1:
            options["bias"] = position_bias[..., :keys]
    out: Tensor = attention(query, key, value, layout="bhsd", **options)
    return out.transpose(1, 2), None


def _window(size: int | None, causal: bool) -> tuple[int, int | None] | None:
    return None if size is None else (size - 1, None if causal else size - 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """The rows of the batch after one another, as sequences that begin at the offsets."""
    tensors = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Tensor = attention_varlen(*tensors, *(x.int() for x in offsets), **options)
    return out.view(q.shape[0], q.shape[2], *out.shape[1:])


def _check_packed(mask: Any, cache: Any, position_bias: Tensor | None) -> None:
    """Of packed sequences, what their offsets do not say."""
    if position_bias is not None:
        raise AttentionError("position_bias", "one beside cu_seq_lens", "a padded batch: the bias counts its rows")
    if isinstance(mask, Mask) and mask.mod is not None and mask.mod.name in ("valid_keys", "table"):
        raise AttentionError("attention_mask", f"{mask!r} beside cu_seq_lens", "one of the two")
    if isinstance(mask, Tensor) and cache is None:
        raise AttentionError("attention_mask", f"{tuple(mask.shape)} beside cu_seq_lens", "one of the two")


def _of_tensor(mask: Any, n_k: int, position_bias: Tensor | None) -> dict[str, Any]:
    """A mask that the user or the model has made; one that is wider than the keys is cut, as transformers does."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or 1 < mask.shape[-1] < n_k:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise AttentionError("attention_mask", found, f"None, or a tensor that broadcasts to (B, H, Sq, {n_k})")
    mask = mask[..., :n_k]
    if mask.dtype == torch.bool:
        return {"mask_mod": table(mask)}
    if not mask.is_floating_point():
        raise AttentionError("dtype of attention_mask", mask.dtype, "bools (True is seen), or floats to add")
    return {"bias": mask if position_bias is None else mask + position_bias}


register()
