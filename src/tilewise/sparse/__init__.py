"""Sparse attentions on the kernels of `tilewise.attention`: exact over the pairs that each of them names."""

from .moba import mean_key_gate, moba
from .neighborhood import neighborhood

__all__ = ["mean_key_gate", "moba", "neighborhood"]
