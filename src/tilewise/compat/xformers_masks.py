"""The bias classes of xformers, for programs without xformers. `tilewise.compat.xformers` has them, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import AttentionError, shown
from ..mods.dropout import is_whole
from ..validation.dense import tensor


@dataclass
class SeqInfo:
    """Where sequences begin.

    Attributes:
        seqstart: (sequences + 1,) int32: their offsets.
        seqstart_py: seqstart as a list of ints.
        seqlen: (sequences,) int32: how many tokens of each are used. Default None: all.
    """

    seqstart: Tensor
    seqstart_py: list[int]
    seqlen: Tensor | None = None

    @staticmethod
    def of(lengths: Sequence[int], padding: int | None = None) -> SeqInfo:
        """The offsets of sequences of these lengths.

        Args:
            lengths: ints >= 0.
            padding: tokens of room for each sequence. Default None: its length.

        Returns:
            Their SeqInfo, on the CPU.

        Raises:
            AttentionError: the lengths are not a list of ints.
        """
        if not isinstance(lengths, Sequence) or not all(is_whole(n) and n >= 0 for n in lengths):
            raise AttentionError("lengths of an attn_bias", shown(lengths), "a list of ints")
        sizes = torch.tensor(list(lengths), dtype=torch.int32, device="cpu")
        whole = sizes if padding is None else torch.full_like(sizes, padding)
        starts = pad(whole.cumsum(0, dtype=torch.int32), (1, 0))
        return SeqInfo(starts, starts.tolist(), None if padding is None else sizes)


class LowerTriangularMask:
    """Causal, aligned top left: query i sees the keys up to i."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """The mask with a bias.

        Args:
            bias: a tensor that is added to the scores.

        Returns:
            A new mask.
        """
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, aligned top left, with a bias.

    Attributes:
        _bias: a tensor that is added to the scores.
    """

    _bias: Tensor


class LowerTriangularFromBottomRightMask:
    """Causal, with the last query at the last key."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The mask with a window.

        Args:
            window_size: keys that a query sees, its own included.

        Returns:
            A new mask.
        """
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal with a window, with the last query at the last key.

    Attributes:
        _window_size: keys that a query sees, its own included.
    """

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask:
    """A window around each query, with the last query at the last key.

    Attributes:
        window_left: keys before the query; below 0: all.
        window_right: keys after the query; below 0: all.
    """

    window_left: int
    window_right: int


@dataclass
class BlockDiagonalMask:
    """Packed sequences. A query sees only the keys of its own sequence.

    >>> from tilewise.compat.xformers import memory_efficient_attention
    >>> texts = [torch.randn(1, 3, 4, 16), torch.randn(2, 5, 4, 16)]
    >>> mask, x = BlockDiagonalMask.from_tensor_list(texts)
    >>> x.shape
    torch.Size([1, 13, 4, 16])
    >>> out = memory_efficient_attention(x, x, x, mask)
    >>> [y.shape for y in mask.split(out)]
    [torch.Size([1, 3, 4, 16]), torch.Size([2, 5, 4, 16])]

    Attributes:
        q_seqinfo: `SeqInfo` of the queries.
        k_seqinfo: `SeqInfo` of the keys.
        _batch_sizes: how many sequences each tensor of `from_tensor_list` had. Default: 1 each.
    """

    q_seqinfo: Any
    k_seqinfo: Any
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> Self:
        """The mask of sequences of these lengths.

        Args:
            q_seqlen: the number of queries of each sequence.
            kv_seqlen: the number of keys of each. Default: as q_seqlen.

        Returns:
            A mask of this class.

        Raises:
            AttentionError: the lengths are not lists of ints.
        """
        queries = SeqInfo.of(q_seqlen)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(queries, queries if same or kv_seqlen is None else SeqInfo.of(kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """The mask of tensors of several lengths, and all of their sequences in one tensor.

        Args:
            tensors: (B, M, ...) each, with any B and M.

        Returns:
            The mask, and a tensor (1, tokens, ...).

        Raises:
            AttentionError: a tensor has fewer than 2 axes.
        """
        for n, x in enumerate(tensors):
            if tensor(f"tensors[{n}]", x).dim() < 2:
                raise AttentionError(f"shape of tensors[{n}]", tuple(x.shape), "(B, M, ...)")
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, torch.cat([x.flatten(0, 1) for x in tensors])[None]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The reverse of `from_tensor_list`.

        Args:
            tensor: (1, tokens, ...).

        Returns:
            Tensors (B, M, ...), as many as `from_tensor_list` got.

        Raises:
            AttentionError: the tensor does not have the tokens of the mask.
        """
        lengths = self.q_seqinfo.seqstart.diff().tolist()
        if tensor.shape[:2] != (1, sum(lengths)):
            raise AttentionError("shape of what is split", tuple(tensor.shape), f"(1, {sum(lengths)}, ...)")
        batches = self._batch_sizes or [1] * len(lengths)
        each = iter(tensor[0].split(lengths))
        return [torch.stack([next(each) for _ in range(n)]) for n in batches]

    def make_causal(self) -> BlockDiagonalCausalMask:
        """The same sequences, each causal and aligned top left.

        Returns:
            A new mask.
        """
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """The same sequences, each causal with its last query at its last key.

        Returns:
            A new mask.
        """
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """The same sequences, each causal with a window, aligned top left.

        Args:
            window_size: keys that a query sees, its own included.

        Returns:
            A new mask.
        """
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """The same sequences, each causal with a window, with its last query at its last key.

        Args:
            window_size: keys that a query sees, its own included.

        Returns:
            A new mask.
        """
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Sequences one after the other, each causal and aligned top left."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Sequences one after the other, each causal with its last query at its last key."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Sequences one after the other, each causal with a window, aligned top left.

    Attributes:
        _window_size: keys that a query sees, its own included.
    """

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Sequences one after the other, each causal with a window, with its last query at its last key.

    Attributes:
        _window_size: keys that a query sees, its own included.
    """

    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask:
    """Sequences one after the other. The keys of each have room for `kv_padding` tokens; the first of them are used.

    Attributes:
        q_seqinfo: `SeqInfo` of the queries.
        k_seqinfo: `SeqInfo` of the keys, with the number that is used.
    """

    q_seqinfo: Any
    k_seqinfo: Any

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int]) -> Self:
        """The mask of sequences of these lengths.

        Args:
            q_seqlen: the number of queries of each sequence.
            kv_padding: tokens of room for the keys of each.
            kv_seqlen: how many keys of each are used.

        Returns:
            A mask of this class.

        Raises:
            AttentionError: the lengths are not lists of ints.
        """
        return cls(SeqInfo.of(q_seqlen), SeqInfo.of(kv_seqlen, kv_padding))


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, each sequence causal with its last query at its last used key."""


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, each sequence causal with a window.

    Attributes:
        _window_size: keys that a query sees, its own included.
    """

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        """The mask of sequences of these lengths.

        Args:
            q_seqlen: the number of queries of each sequence.
            kv_padding: tokens of room for the keys of each.
            kv_seqlen: how many keys of each are used.
            window_size: keys that a query sees, its own included.

        Returns:
            A mask of this class.

        Raises:
            AttentionError: the lengths are not lists of ints.
        """
        return cls(SeqInfo.of(q_seqlen), SeqInfo.of(kv_seqlen, kv_padding), window_size)


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, with a window around each query.

    Attributes:
        window_left: keys before the query; below 0: all.
        window_right: keys after the query; below 0: all.
    """

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Self:
        """The mask of sequences of these lengths.

        Args:
            q_seqlen: the number of queries of each sequence.
            kv_padding: tokens of room for the keys of each.
            kv_seqlen: how many keys of each are used.
            window_left: keys before the query; below 0: all.
            window_right: keys after the query; below 0: all.

        Returns:
            A mask of this class.

        Raises:
            AttentionError: the lengths are not lists of ints.
        """
        return cls(SeqInfo.of(q_seqlen), SeqInfo.of(kv_seqlen, kv_padding), window_left, window_right)
