"""Hugging Face transformers on tilewise: `attn_implementation="tilewise"`.

    import tilewise.integrations.transformers    # calls register()
    model = AutoModel.from_pretrained(name, attn_implementation="tilewise")
    model.set_attn_implementation("tilewise")    # or change an existing model
    serve(model).generate_batch(prompts)         # continuous batching

Tested with transformers 5.17, 5.22 and 5.23; with others it warns once, and works or raises. Anything
that is not supported (attention weights, a mask of unknown kind) raises AttentionError.
"""

from ..adapters import publish
from ..adapters.transformers import attention_forward, register, serve

__all__ = ["attention_forward", "register", "serve"]
publish(__name__)
