"""What a plan of a KV cache depends on, and whether it is that of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..errors import AttentionError
from ..kv_formats import scale_groups
from ..kv_request import KvPlan, KvRequest

# The names of the numbers that `shape_of` returns, after the axes of q.
Q_AXES = ("batch of q", "tokens of q", "heads of q", "head dim of q")
NAMES = (
    *("tokens of a page or row of k_cache", "heads of k_cache", "last axis of k_cache", "last axis of v_cache"),
    *("dtype of q", "dtype of k_cache", "dtype of v_cache", "device of q"),
    *("keys before a query in the window", "keys after a query in the window", "backend=", "split", "max_seqlen_q"),
    *(settings.KV_TILE, "cu_seqlens_q given", "cu_seqlens_new given", "starts given", "token_table given"),
    *("groups of k_scale by token", "groups of v_scale by token"),
    *("keys that the cache or page table can hold", "new tokens of a sequence"),
    *("shared_prefix given", "mask_mod", "score_mod", "return_max_logit"),
    *("k_scale by sequence", "v_scale by sequence"),
)


def shape_of(request: KvRequest) -> tuple[Any, ...]:
    """Everything that a plan depends on except the contents of tensors."""
    (q, k, v, spec, *_), places = request.dense, request.places
    tensors = *q.shape, *k.shape[1:], v.shape[3], q.dtype, k.dtype, v.dtype, q.device
    options = spec.before, spec.after, spec.backend, request.split, request.max_seqlen_q, settings.kv_tile()
    present = request.dense.cu_q is not None, places.cu_new is not None, places.starts is not None, places.by_token
    scales = scale_groups(request.k_scale), scale_groups(request.v_scale)
    own = *tensors, *options, *present, *scales, places.capacity(k), places.new, request.shared_prefix is not None
    if request.shared_prefix is None:
        return own
    # what kernels that share prefixes depend on beside the above
    constant = [isinstance(x, Tensor) and x.dim() == 2 for x in (request.k_scale, request.v_scale)]
    return (*own, spec.mask_mod, spec.score_mod, spec.max_logit, *constant)


def check_shape(plan: KvPlan, request: KvRequest) -> None:
    """Raises AttentionError with what differs, if a plan was made for other shapes or options."""
    shape = shape_of(request)
    if plan.shape == shape:
        return
    made, own = named(plan.shape), named(shape)
    differs = [name for name in own if name in made and made[name] != own[name]]
    found, expected = (", ".join(f"{name} {x[name]}" for name in differs) for x in (made, own))
    raise AttentionError("plan", f"one made for {found}", f"{expected}, as in this call: one plan_kv call for each")


def named(shape: tuple[Any, ...]) -> dict[str, Any]:
    """The numbers of `shape_of` by their names."""
    axes = next(n for n, x in enumerate(shape) if isinstance(x, torch.dtype)) - 4
    return dict(zip((*Q_AXES[-axes:], *NAMES), shape, strict=False))
