"""flash-attn 2.8's functions, same names and arguments.

    # in the place of `from flash_attn import flash_attn_func`
    from tilewise.compat.flash_attn import flash_attn_func

    # or once, before anything imports flash_attn
    tilewise.compat.flash_attn.install()

Differences: any dtype, head dims to 512, any device; rows without a visible key give 0 and lse -inf; lse has a
gradient. Arguments that are not supported raise AttentionError.
"""

from ..adapters import publish
from ..adapters.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ..adapters.flash_install import install
from . import bert_padding, flash_attn_3, rotary  # noqa: F401 - install() puts their functions in flash-attn's modules

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
publish(__name__)
