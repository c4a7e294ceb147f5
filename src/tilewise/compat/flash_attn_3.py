"""FlashAttention-3's functions (`flash_attn_interface`), same names and arguments."""

from ..adapters import publish
from ..adapters.flash import same_chunk, same_chunk_since
from ..adapters.flash_attn_3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "same_chunk",
    "same_chunk_since",
]
publish(__name__)
