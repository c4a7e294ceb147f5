"""xformers' memory_efficient_attention, and its bias classes for programs without xformers. xformers' own classes are
known by their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api import attention, attention_varlen
from ..errors import AttentionError, shown
from ..mods.dropout import is_whole
from ..mods.modifier import mask_mod
from ..validation.dense import tensor
from ..validation.versions import check_version
from .arguments import sliding, top_left, used, window

FAR = 2**30
TESTED = (0, 0, 35)


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
            window_size: keys that a query sees, its own included.
            others: as in `tilewise.compat.xformers.BlockDiagonalPaddedKeysMask.from_seqlens`.

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
            window_left: keys before the query; below 0: all.
            window_right: keys after the query; below 0: all.
            others: as in `tilewise.compat.xformers.BlockDiagonalPaddedKeysMask.from_seqlens`.

        Returns:
            A mask of this class.

        Raises:
            AttentionError: the lengths are not lists of ints.
        """
        return cls(SeqInfo.of(q_seqlen), SeqInfo.of(kv_seqlen, kv_padding), window_left, window_right)


@mask_mod
def from_top_left(b, h, q_idx, kv_idx, window):  # type: ignore[no-untyped-def]
    """Causal, with query i at key i, and a window.

    Args:
        window: keys that a query sees, its own included.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `window` is not a number or a tensor.
    """
    return (kv_idx <= q_idx) & (kv_idx > q_idx - window)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """xformers' function, computed by tilewise.

    >>> q = torch.randn(1, 7, 4, 16)
    >>> mask = BlockDiagonalMask.from_seqlens([3, 4]).make_causal()
    >>> memory_efficient_attention(q, q, q, mask).shape
    torch.Size([1, 7, 4, 16])

    Args:
        query: (B, M, H, K), or (B, M, K) of one head, or (B, M, G, H, K) of grouped heads.
        key: (B, N, H, K), with the axes of query.
        value: (B, N, H, Kv), with the axes of query.
        attn_bias: a tensor that is added to the scores and broadcasts to (B, H, M, N), or one of the classes of this
            module or of xformers. Default: none.
        p: probability that a softmax weight is dropped. Default 0.
        scale: factor of the scores. Default: 1 / sqrt(K).
        op: a kernel of xformers: ignored.
        output_dtype: dtype of the result. Default: that of query.

    Returns:
        A tensor with the axes of query and the last size of value.

    Raises:
        AttentionError: an argument is not as above, or attn_bias is of another class (pages are not supported).
    """
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise AttentionError("output_dtype", shown(output_dtype), "a torch.dtype, or None")
    if query.dim() == 5 and k.shape[2] == q.shape[2] and key.stride(3) == value.stride(3) == 0:
        k, v = key[:, :, :, 0], value[:, :, :, 0]  # heads of a group, which share what is expanded
    options: dict[str, Any] = {"scale": scale, "dropout_p": p}
    named = type(attn_bias).__name__ in BANDS  # some of xformers' classes were tensors once
    if attn_bias is None or (isinstance(attn_bias, Tensor) and not named):
        options["bias"] = None if attn_bias is None else _bias(attn_bias, query)
        out = attention(q, k, v, layout="bshd", **options)
    else:
        if type(attn_bias).__module__.startswith("xformers."):
            check_version("xformers", sys.modules["xformers"].__version__, TESTED, TESTED)
        out = _of_class(q, k, v, attn_bias, options, query)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype)  # type: ignore[no-any-return]


def _four_axes(name: str, x: Tensor) -> Tensor:
    if tensor(name, x).dim() not in (3, 4, 5):
        raise AttentionError(f"shape of {name}", tuple(x.shape), "3 to 5 axes, (B, M, [G,] [H,] K)")
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _bias(x: Tensor, query: Tensor) -> Tensor:
    """(B, H, M, N) of a tensor that has the axes of the query: (B, M, N) of one head, (B, G, H, M, N) of groups."""
    if query.dim() == 3:
        return x[:, None]
    if x.dim() != 5:
        return x
    own, wanted = x.shape[1:3], query.shape[2:4]
    if 1 in own and own != (1, 1) and all(n in (1, m) for n, m in zip(own, wanted, strict=False)):
        x = x.expand(-1, *wanted, -1, -1)
    return x.flatten(1, 2)


def _of_class(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any], query: Tensor) -> Any:
    name = type(bias).__name__
    if name.startswith("BlockDiagonal") and name in BANDS:
        return _packed(q, k, v, bias, options | BANDS[name](bias))
    if name in BANDS:
        options = options | BANDS[name](bias)
        if "bias" in options:
            options["bias"] = _bias(tensor("bias of attn_bias", options["bias"]), query)
        if "mask_mod" not in options:
            return attention(q, k, v, layout="bshd", **options)
        n, options["window"] = top_left(q.shape[1], k.shape[1])
        added = options.get("bias")
        options["bias"] = added if added is None or added.shape[-1] == 1 else added[..., :n]
        del options["mask_mod"]
        return attention(q, k[:, :n], v[:, :n], layout="bshd", **options)
    raise AttentionError("attn_bias", name, f"None, a tensor, or one of {', '.join(BANDS)}")


def _packed(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any]) -> Tensor:
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise AttentionError("batch beside a block-diagonal bias", q.shape[0], "1: sequences one after the other")
    for name, x, info in (("query", q, bias.q_seqinfo), ("key", k, bias.k_seqinfo)):
        ends = getattr(info, "seqstart_py", None)
        if ends and ends[-1] != x.shape[1]:
            raise AttentionError(f"tokens of {name}", x.shape[1], f"the {ends[-1]} of attn_bias")
    cu_q, cu_k = (x.seqstart.to(q.device, torch.int32) for x in (bias.q_seqinfo, bias.k_seqinfo))
    lengths = getattr(bias.k_seqinfo, "seqlen", None)
    if lengths is not None:  # of padded keys: what is used of each
        cu_q, cu_k = used(cu_q, cu_k, None, lengths.to(q.device))
    out: Tensor = attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)
    return out[None]


def _window(bias: Any) -> dict[str, Any]:
    left, right = bias.window_left, bias.window_right
    if not is_whole(left) or not is_whole(right):
        raise AttentionError("window of attn_bias", (left, right), "two ints, below 0 for no bound")
    return {"window": window(left, right)}


def _top_left(bias: Any) -> dict[str, Any]:
    if getattr(bias, "q_seqinfo", None) is getattr(bias, "k_seqinfo", bias):  # as many queries as keys: both corners
        return _bottom_right(bias)
    return {"mask_mod": from_top_left(_size(bias) or FAR)}


def _bottom_right(bias: Any) -> dict[str, Any]:
    return {"causal": True, "window": sliding(_size(bias))}


def _size(bias: Any) -> int | None:
    size: int | None = getattr(bias, "_window_size", None)
    if size is not None and (not is_whole(size) or size < 1):
        raise AttentionError("window_size of attn_bias", shown(size), "an int above 0")
    return size


# What each class says in tilewise's options.
BANDS: dict[str, Any] = {
    "LowerTriangularMaskWithTensorBias": lambda bias: _top_left(bias) | {"bias": bias._bias},
    **dict.fromkeys(("BlockDiagonalMask", "BlockDiagonalPaddedKeysMask"), lambda bias: {}),
    **dict.fromkeys(
        ("LowerTriangularMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask"), _top_left
    ),
    **dict.fromkeys(
        (
            "LowerTriangularFromBottomRightMask",
            "LowerTriangularFromBottomRightLocalAttentionMask",
            "BlockDiagonalCausalFromBottomRightMask",
            "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
            "BlockDiagonalCausalWithOffsetPaddedKeysMask",
            "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        ),
        _bottom_right,
    ),
    **dict.fromkeys(("LocalAttentionFromBottomRightMask", "BlockDiagonalLocalAttentionPaddedKeysMask"), _window),
}
