"""Sparse attentions on the kernels of `tilewise.attention`: exact over the pairs that each of them names."""

from .moba_attention import mean_key_gate, moba
from .neighborhood_attention import neighborhood
from .nsa_attention import nsa, selected_blocks
from .topk_attention import topk

__all__ = ["mean_key_gate", "moba", "neighborhood", "nsa", "selected_blocks", "topk"]
