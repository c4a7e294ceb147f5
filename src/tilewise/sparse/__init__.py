"""Sparse attentions on the kernels of `tilewise.attention`: exact over the pairs that each of them names."""

from .moba import mean_key_gate, moba
from .neighborhood import neighborhood
from .nsa import nsa, selected_blocks
from .topk import topk

__all__ = ["mean_key_gate", "moba", "neighborhood", "nsa", "selected_blocks", "topk"]
