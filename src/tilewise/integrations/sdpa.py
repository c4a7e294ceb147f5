"""torch's scaled_dot_product_attention, its signature and its meaning, computed by tilewise; and in its place."""

from ..adapters import publish
from ..adapters.sdpa import replace_sdpa, replaces_sdpa, scaled_dot_product_attention

__all__ = ["replace_sdpa", "replaces_sdpa", "scaled_dot_product_attention"]
publish(__name__)
