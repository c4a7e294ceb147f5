"""flash_attn.bert_padding: from padded batches to packed sequences and back. As in flash-attn, unpadding synchronizes
with the GPU, because the number of tokens is part of the result's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import AttentionError
from ..validation.dense import tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices].

    >>> index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    tensor([[4, 5],
            [0, 1]])

    Args:
        input: (N, ...).
        indices: (n,) integers below N.

    Returns:
        (n, ...), differentiable.
    """
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of first_axis_dim rows with the values at the indices and zeros elsewhere.

    >>> index_put_first_axis(torch.ones(2), torch.tensor([0, 2]), 4)
    tensor([1., 0., 1., 0.])

    Args:
        values: (n, ...).
        indices: (n,) integers below first_axis_dim, each at most once.
        first_axis_dim: the number of rows of the result.

    Returns:
        (first_axis_dim, ...), differentiable.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """input[indices], and the input without its gradient.

    Args:
        input: (N, ...).
        indices: (n,) integers below N.

    Returns:
        (n, ...), and the detached input.
    """
    return input[indices], input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, packed one after the other.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> tokens, places, cu, longest, lengths = unpad_input(x, mask)
    >>> tokens, places.tolist(), cu.tolist(), longest
    (tensor([0., 1., 3., 4., 5.]), [0, 1, 3, 4, 5], [0, 2, 5], 3)

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) bools or integers: 1 for tokens, 0 for padding.
        unused_mask: (B, S), 1 for tokens that are allocated and not attended to. They are kept. Default: none.

    Returns:
        The tokens (T, ...); their indices (T,) in the flattened batch; cu_seqlens (B + 1,) int32; the largest length;
        and the lengths (B,) int32 by attention_mask alone.

    Raises:
        AttentionError: attention_mask does not have the shape (B, S).
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
    """`unpad_input` where each row holds several sequences one after the other.

    >>> x = torch.arange(8.0).view(2, 4)
    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> found = unpad_input_for_concatenated_sequences(x, lengths)
    >>> tokens, places, cu, longest = found
    >>> tokens, cu.tolist(), longest
    (tensor([0., 1., 2., 4., 5., 6.]), [0, 2, 3, 6], 3)

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S) integers: the lengths of a row's sequences, then zeros.

    Returns:
        The tokens (T, ...); their indices (T,) in the flattened batch; cu_seqlens of all sequences, int32; the largest
        length.

    Raises:
        AttentionError: attention_mask_in_length does not have the shape (B, S).
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
    """The reverse of `unpad_input`.

    >>> pad_input(torch.ones(3), torch.tensor([0, 1, 3]), 2, 3)
    tensor([[1., 1., 0.],
            [1., 0., 0.]])

    Args:
        hidden_states: tokens (T, ...).
        indices: (T,) integers: where each token is in the flattened batch.
        batch: the batch size B.
        seqlen: the length S of the padded rows.

    Returns:
        (B, S, ...), zeros where there is no token.

    Raises:
        AttentionError: indices does not have the shape (T,).
    """
    _check_shape("indices", indices, hidden_states, 1)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _check_shape(name: str, x: Tensor, hidden_states: Tensor, axes: int) -> None:
    wanted = tuple(tensor("hidden_states", hidden_states).shape[:axes])
    if tensor(name, x).shape != wanted:
        raise AttentionError(f"shape of {name}", tuple(x.shape), f"{wanted}, the first axes of hidden_states")


def _ends(lengths: Any) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
