"""Hugging Face transformers on tilewise: the attention of a layer over a batch, packed sequences, the paged cache of
continuous batching, or sharded tokens. `transformers_masks` has the masks."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor

from ..api import attention, attention_varlen
from ..call.fields import ATTENTION
from ..distributed import Plan, current
from ..distributed import attention as attention_over
from ..errors import AttentionError
from ..kv_warmup import StepLimits
from ..torch_internals import version_of
from ..validation.versions import check_version, version
from .arguments import ours, sliding, top_left
from .bool_masks import table
from .steps import Memory, Step
from .transformers_masks import Mask, make_mask

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
    options = ours(ATTENTION, {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}, {})
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plan = attention_mask.plan if isinstance(attention_mask, Mask) else current()
    if plan is not None:
        refused = {"cu_seq_lens_q": cu_seq_lens_q, "cache": cache, "position_bias": position_bias}
        if isinstance(attention_mask, Mask):
            options["mask_mod"] = attention_mask.mod
            if not attention_mask.checked:
                _check_positions(plan, others.get("position_ids"))
                attention_mask.checked = True  # once a forward
        else:
            plan = plan.banded(causal=causal, window=sliding(sliding_window, causal))
            refused["attention_mask"] = attention_mask
        return _sharded(plan, query, key, value, options, refused), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        _check_packed(attention_mask, cache, position_bias)
        if cache is not None:
            named = others | {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            return _served(module, (query, key, value), cache, sliding_window, named, options)
        options |= {"causal": causal, "window": sliding(sliding_window or None, causal)}
        return _packed(query, key, value, (cu_seq_lens_q, cu_seq_lens_k), **options), None
    if cache is not None:
        raise AttentionError("cache", "no cu_seq_lens_q or cu_seq_lens_k", "both, with a paged cache")
    if isinstance(attention_mask, Mask) and not attention_mask.checked and others.get("use_cache"):
        _warn_if_packed(others.get("position_ids"))
        attention_mask.checked = True  # once a forward
    return _batch(query, key, value, attention_mask, causal, position_bias, options), None


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
    options |= {"causal": True, "window": sliding(window)}
    pool = pool_of(cache, module.layer_idx)
    if pool is not None:
        on_cache = {name: x for name, x in options.items() if name != "dropout_p"}
        found = attend_in_pages(cache, pool, tensors, offsets, named, **on_cache)
        if found is not None:
            return found, None
    key, value = _gathered(cache, tensors[1], tensors[2], module.layer_idx, named)
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
        if n_q > 1 and causal:  # as "sdpa": the keys of a static cache that are written
            keys, options["window"] = top_left(n_q, n_k)
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


# Continuous batching: keys and values are attended where they lie, in the pages of transformers' cache, whose own
# functions gather them first, in every layer. A layer with a sliding window writes over keys that the same call still
# reads: there transformers gathers, as always.


class Pool(NamedTuple):
    """A layer's keys and values (pages, page size, Hk, D), and the number of its group among the indices."""

    k: Tensor
    v: Tensor
    group: int


def pool_of(cache: Any, layer: int) -> Pool | None:
    """Of transformers' PagedAttentionCache; None for a layer that has to be gathered."""
    if hasattr(cache, "layer_to_allocator"):  # 5.22
        allocator = cache.layer_to_allocator[layer]
        if allocator.layer_type != "full_attention":
            return None
        k, v = allocator.get_cache_for_block_table(layer)
        return Pool(k, v, allocator.index)
    if cache.sliding_windows[layer] != 1:  # 5.17, where 1 is none
        return None
    group, place = cache.layer_index_to_group_indices[layer]
    k, v = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    return Pool(k, v, group)


class Steps:
    """The step of a cache that its layers share, by their group. transformers makes new indices for every step, or
    writes those of the step before; a CUDA graph that is captured after a run with the same indices has a step of its
    own."""

    def __init__(self, most_tokens: int) -> None:
        self.limits = StepLimits(most_tokens, most_tokens, most_tokens)
        self.memory: Memory = {}
        self.indices: Any = None
        self.versions: list[int] = []
        self.steps: dict[tuple[int, bool], Step] = {}

    def of(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Step:
        indices, table = named["read_index"], named.get("block_table")
        versions = [version_of(x) for x in (*indices, *offsets, *(() if table is None else table))]
        if self.indices is not indices or self.versions != versions:
            self.indices, self.versions, self.steps = indices, versions, {}
        key = pool.group, pool.k.is_cuda and torch.cuda.is_current_stream_capturing()
        step = self.steps.get(key)
        if step is None:
            step = self.steps[key] = self.new(pool, offsets, named)
        return step

    def new(self, pool: Pool, offsets: tuple[Tensor, Tensor], named: dict[str, Any]) -> Step:
        """With a block table all sequences have one query; otherwise there are the slots of all keys."""
        cu_q, cu_k = (x.int() for x in offsets)
        most, table = 1, named.get("block_table")
        if table is not None:
            table = table[pool.group]
        else:
            name = "max_seqlen" if "max_seqlen_q" in named else "max_length"  # 5.17, 5.22
            longest = named[f"{name}_k"]
            if isinstance(longest, dict):
                longest = longest["full_attention"]
            most = self.limits.max_seqlen_q(named[f"{name}_q"])
            table = page_table(named["read_index"][pool.group], cu_k, pool.k.shape[1], longest)
        memory = None if torch.compiler.is_compiling() else self.memory
        return Step(cu_k.diff() - cu_q.diff(), cu_q, table, most, self.limits.backend(most), memory)


def steps_of(cache: Any) -> Steps:
    """Kept on the cache, except by torch.compile, which traces every step."""
    steps: Steps | None = None if torch.compiler.is_compiling() else vars(cache).get("tilewise")
    if steps is None:
        steps = Steps(cache.max_batch_tokens)
        if not torch.compiler.is_compiling():
            cache.tilewise = steps
    return steps


def page_table(read: Tensor, cu_k: Tensor, page: int, longest: int) -> Tensor:
    """The pages of each sequence, from the slots of its keys: a page's first slot is a multiple of its size.

    >>> slots = torch.tensor([12, 13, 14, 15, 4, 8, 9])
    >>> page_table(slots, torch.tensor([0, 5, 7]), page=4, longest=5)
    tensor([[3, 1],
            [2, 2]], dtype=torch.int32)
    """
    first = cu_k[:-1, None] + torch.arange(0, longest, page, device=read.device)
    return (read[first.clamp_(max=read.shape[0] - 1)] // page).int()  # entries past a sequence's end are not read


def attend_in_pages(
    cache: Any,
    pool: Pool,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    named: dict[str, Any],
    **options: Any,
) -> Tensor | None:
    """q (1, H, T, D), new k and v (1, Hk, T, D) -> (1, T, H, Dv), written and attended in place; None if nothing was
    cached before, and the new keys are the only ones."""
    if named.get("block_table") is None and not named["read_index"][pool.group].numel():
        return None
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    steps_of(cache).of(pool, offsets, named).attend(q, pool.k, pool.v, out, k_new=k, v_new=v, **options)
    return out[None]


def _gathered(cache: Any, key: Tensor, value: Tensor, layer: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values of the sequences, (1, Hk, T, D), after the new ones were written."""
    if named.get("block_table") is not None:
        raise AttentionError("block_table", "that of a layer with a window", "None: max_blocks_per_request=0")
    if "kwargs" in inspect.signature(cache.update).parameters:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=named)
        return k, v
    places = {"read_index": named["read_index"], "write_index": named["write_index"]}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, **places)  # before 5.22: (T, Hk, D)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


# Within `tilewise.distributed.use(plan)` each rank has some of the tokens, and its layers see all. The plan knows the
# documents; a model's layers say how far they see, which may differ from layer to layer.


def _sharded(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], refused: dict[str, Any]) -> Tensor:
    """(B, H, S, D) of this rank -> (B, S, H, D). `refused`: what a plan does not take, None where it is not there."""
    for name, value in refused.items():
        if value is not None:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise AttentionError(f"{name} of a layer in use(plan)", found, f"none: {WHY[name]}")
    if q.shape[2] != k.shape[2]:
        raise AttentionError(
            "keys of a layer in use(plan)",
            k.shape[2],
            f"this rank's {q.shape[2]} tokens alone: no cache; layers that see something else belong in use(None)",
        )
    out: Tensor = attention_over(q, k, v, plan=plan, layout="bhsd", **options)
    return out.transpose(1, 2)


WHY = {
    "cu_seq_lens_q": "plan(cu_seqlens=...) knows the documents",
    "cache": "a paged cache is not sharded",
    "position_bias": "it was made of positions on this rank",
    "attention_mask": "a mask of pairs knows this rank's tokens alone; plan(mask=...) takes a mask mod of all",
}


def _check_positions(plan: Plan, given: Any) -> None:
    """Raises for positions that are not the plan's: RoPE and documents would be wrong without an error."""
    if not isinstance(given, Tensor) or given.dim() != 2 or torch.compiler.is_compiling():
        return
    expected = plan.positions(device=given.device)
    if given.shape[1] != len(expected) or not bool((given == expected).all()):
        found = f"{given[0, :4].tolist()}, ..." if given.numel() else tuple(given.shape)
        raise AttentionError(
            "position_ids",
            found,
            f"plan.positions()[None], here {expected[:4].tolist()}, ... (others only beside an attention_mask)",
        )


register()
