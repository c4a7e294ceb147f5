"""flash_attn.bert_padding: from padded batches to packed sequences and back. As in flash-attn, unpadding synchronizes
with the GPU: the number of tokens is a shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import AttentionError
from ..validation.arguments import tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices].

    >>> index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    tensor([[4, 5],
            [0, 1]])
    """
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of first_axis_dim rows with the values at the indices and zeros elsewhere.

    >>> index_put_first_axis(torch.ones(2), torch.tensor([0, 2]), 4)
    tensor([1., 0., 1., 0.])
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """input[indices], and the input as it is, without its gradient."""
    return input[indices], input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch (B, S, ...) one after the other: (T, ...), their places in the flattened batch,
    cu_seqlens, the longest length, and the lengths of attention_mask alone.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> tokens, places, cu, longest, lengths = unpad_input(x, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    >>> tokens, places.tolist(), cu.tolist(), longest
    (tensor([0., 1., 3., 4., 5.]), [0, 1, 3, 4, 5], [0, 2, 5], 3)

    unused_mask: tokens that are allocated and not attended to; they are kept.
    """
    _check_shape("attention_mask", attention_mask, hidden_states, 2)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    places = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[places], places, _ends(lengths), longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same where each row holds several sequences: attention_mask_in_length (B, S) has their lengths, then zeros.

    >>> x = torch.arange(8.0).view(2, 4)
    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> tokens, places, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    >>> tokens, cu.tolist(), longest
    (tensor([0., 1., 2., 4., 5., 6.]), [0, 2, 3, 6], 3)
    """
    _check_shape("attention_mask_in_length", attention_mask_in_length, hidden_states, 2)
    n = attention_mask_in_length.shape[-1]
    total = attention_mask_in_length.sum(-1)
    kept = torch.arange(n, device=total.device) < total[:, None]
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()].int()
    places = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[places], places, _ends(lengths), longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of `unpad_input`: (T, ...) to (B, S, ...), zeros in between.

    >>> pad_input(torch.ones(3), torch.tensor([0, 1, 3]), 2, 3)
    tensor([[1., 1., 0.],
            [1., 0., 0.]])
    """
    _check_shape("indices", indices, hidden_states, 1)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _check_shape(name: str, x: Tensor, hidden_states: Tensor, axes: int) -> None:
    wanted = tuple(tensor("hidden_states", hidden_states).shape[:axes])
    if tensor(name, x).shape != wanted:
        raise AttentionError(f"shape of {name}", tuple(x.shape), f"{wanted}, the first axes of hidden_states")


def _ends(lengths: Any) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
