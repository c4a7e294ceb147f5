"""FlashMLA's functions (deepseek-ai/FlashMLA): the same names and arguments, on any GPU and on a CPU.

    from tilewise.compat.flash_mla import (
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

Beyond FlashMLA: any page size, 1 to 128 heads, float16 and float32, the fp8 cache without indices and indices without
fp8. As there, the lse of a query without keys is +inf, and `attn_sink` does not change lse. Not supported: the cache of
448 + 64 numbers, and the dense prefill functions (use tilewise.attention).
"""

from ..adapters import publish
from ..adapters.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
publish(__name__)
