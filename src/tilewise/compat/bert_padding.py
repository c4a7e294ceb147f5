"""flash_attn.bert_padding: from padded batches to packed sequences and back. As in flash-attn, unpadding synchronizes
with the GPU, because the number of tokens is part of the result's shape."""

from ..adapters import publish
from ..adapters.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
publish(__name__)
