"""Ours in torch's registry of flash attentions, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import attention

from tilewise.adapters import torch_registry


@contextmanager
def active() -> Iterator[None]:
    """Torch's flash attention is ours. The registry of torch 2.10 activates for good, and is gone around."""
    if not hasattr(attention, "restore_flash_attention_impl"):
        handle = torch_registry.activate()
    else:
        handle = None
        attention.activate_flash_attention_impl("tilewise")
    try:
        yield
    finally:
        if handle is None:
            attention.restore_flash_attention_impl()
        else:
            handle.remove()
