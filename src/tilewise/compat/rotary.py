"""flash_attn.layers.rotary: rotary embeddings in plain torch, with gradients, on any device.

Angles and products are computed in float32 and rounded to the dtype of the input. Positions past the tables are not
rotated, as in flash-attn.
"""

from ..adapters import publish
from ..adapters.rotary import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]
publish(__name__)
