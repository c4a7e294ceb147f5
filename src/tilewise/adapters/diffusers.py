"""Hugging Face diffusers on tilewise: `pipe.transformer.set_attention_backend("tilewise")`.

    import tilewise.integrations.diffusers    # calls register()

Tested with diffusers 0.42; with others it warns once, and works or raises.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models import attention_dispatch
from torch import Tensor

from ..errors import AttentionError
from ..validation.versions import check_version
from .sdpa import scaled_dot_product_attention

NAME = "tilewise"
TESTED = (0, 42)


def register() -> None:
    """Register the attention backend "tilewise" with diffusers. Importing the module calls it."""
    check_version("diffusers", diffusers.__version__, TESTED, TESTED)
    names: Any = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:  # an Enum, which offers no way to add to it
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME.upper())
    attention_dispatch._AttentionBackendRegistry.register(names(NAME))(attention)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention of a layer. diffusers calls it.

    Args:
        query: (B, Sq, H, D).
        key: (B, Sk, Hk, D).
        value: (B, Sk, Hk, Dv).
        attn_mask: as in `scaled_dot_product_attention`, or (B, Sk) of keys. Default: none.
        return_lse: must be False: diffusers' context parallelism is not supported.
        _parallel_config: must be None: diffusers' context parallelism is not supported.
        others: as in `tilewise.scaled_dot_product_attention`.

    Returns:
        (B, Sq, H, Dv).

    Raises:
        AttentionError: an argument is not as above.
    """
    if return_lse or _parallel_config is not None:
        raise AttentionError(
            "diffusers' context parallelism", "return_lse or _parallel_config", "neither: not supported"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)


register()
