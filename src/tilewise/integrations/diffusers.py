"""Hugging Face diffusers on tilewise: `pipe.transformer.set_attention_backend("tilewise")`.

    import tilewise.integrations.diffusers    # calls register()

Tested with diffusers 0.42; with others it warns once, and works or raises.
"""

from ..adapters import publish
from ..adapters.diffusers import attention, register

__all__ = ["attention", "register"]
publish(__name__)
