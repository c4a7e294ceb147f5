"""Other libraries' functions, same names and arguments, computed by tilewise.

    # flash-attn 2.8; its `install()` replaces the package
    from tilewise.compat.flash_attn import flash_attn_func

    # FlashAttention-3's flash_attn_interface
    from tilewise.compat.flash_attn_3 import flash_attn_func

    # DeepSeek's FlashMLA
    from tilewise.compat.flash_mla import flash_mla_with_kvcache

    # torch.nn.attention.flex_attention; create_block_mask is torch's own
    from tilewise.compat import create_block_mask, flex_attention

    from tilewise.compat.xformers import memory_efficient_attention

Each module is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..adapters.flex import and_masks, create_block_mask, flex_attention, or_masks

__all__ = ["and_masks", "create_block_mask", "flex_attention", "or_masks"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        found: Any = getattr(import_module("tilewise.adapters.flex"), name)
    elif name in ("bert_padding", "flash_attn", "flash_attn_3", "flash_mla", "rotary", "xformers"):
        found = import_module(f"tilewise.compat.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
