"""The built-in mods. Each is an ordinary mod.

The position of a query is `q_pos`, its key position: i + Sk - Sq, as in `causal` and `window`. So a query that is
decoded alone, with a cache of keys, sees the same keys as in the whole sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import AttentionError
from .modifier import mask_mod, score_mod
from .program import Mod


def _softcap_slope(score, b, h, q_idx, kv_idx, cap):  # type: ignore[no-untyped-def]
    t = torch.tanh(score / cap)
    return 1 - t * t


@score_mod(grad=_softcap_slope)
def softcap(score, b, h, q_idx, kv_idx, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(score / cap): scores stay within (-cap, cap).

    >>> softcap(2.0)(torch.tensor([-50.0, 0.0, 1.0]), 0, 0, 0, 0)
    tensor([-2.0000,  0.0000,  0.9242])

    Args:
        cap: the bound, a float above 0. It is passed to the kernel: another value does not compile again.

    Returns:
        A score mod.

    Raises:
        AttentionError: `cap` is not a number or a tensor.
    """
    return cap * torch.tanh(score / cap)


@score_mod
def alibi(score, b, h, q_idx, kv_idx, slopes, *, q_pos):  # type: ignore[no-untyped-def]
    """score - slopes[h] * |distance|: ALiBi. The last query is at the position of the last key.

    >>> from tilewise_lab.picture import heat
    >>> heat(alibi(torch.tensor([0.5])), 2, 3).values
    tensor([[-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])

    Args:
        slopes: (H,) floats, one for each query head. Differentiable.

    Returns:
        A score mod. The option alibi_slopes of `attention` computes the same.

    Raises:
        AttentionError: `slopes` is not a tensor that a mod can read.
    """
    return score - slopes[h] * abs(q_pos - kv_idx)


@score_mod
def alibi_per_batch(score, b, h, q_idx, kv_idx, slopes, *, q_pos):  # type: ignore[no-untyped-def]
    """score - slopes[b, h] * |distance|."""
    return score - slopes[b, h] * abs(q_pos - kv_idx)


@mask_mod
def _same_document(b, h, q_idx, kv_idx, ids, *, q_pos):  # type: ignore[no-untyped-def]
    return ids[q_pos] == ids[kv_idx]


@mask_mod
def _same_document_per_batch(b, h, q_idx, kv_idx, ids, *, q_pos):  # type: ignore[no-untyped-def]
    return ids[b, q_pos] == ids[b, kv_idx]


def document(*, ids: Tensor | None = None, cu_seqlens: Tensor | None = None, tokens: int | None = None) -> Mod:
    """Tokens see the tokens of their own document.

    >>> sees = document(cu_seqlens=torch.tensor([0, 2, 5]), tokens=5)
    >>> sees(0, 0, torch.tensor([1]), torch.arange(5))
    tensor([ True,  True, False, False, False])

    Args:
        ids: (S,) or (B, S) integers: the document of each key, in any order. S is at least the number of keys.
        cu_seqlens: instead of ids: integers (documents + 1,), the boundaries of the documents as in `attention_varlen`.
        tokens: with cu_seqlens: S, the number of keys or more.

    Returns:
        A mask mod.

    Raises:
        AttentionError: neither ids nor cu_seqlens and tokens are given, or they are not integers.
    """
    for name, x in (("ids", ids), ("cu_seqlens", cu_seqlens)):
        if x is not None and not isinstance(x, Tensor):
            raise AttentionError(f"{name} of documents", type(x).__name__, "a tensor of ints")
    if cu_seqlens is not None and tokens is not None and ids is None:
        position = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        ids = torch.bucketize(position, cu_seqlens[1:], right=True, out_int32=True)
    if ids is None or ids.dim() not in (1, 2) or ids.is_floating_point():
        found = "none" if ids is None else f"{ids.dtype} {tuple(ids.shape)}"
        raise AttentionError("documents", found, "ids, integers (S,) or (B, S); or cu_seqlens and tokens")
    return _same_document(ids) if ids.dim() == 1 else _same_document_per_batch(ids)


@mask_mod
def prefix_lm(b, h, q_idx, kv_idx, prefix, *, q_pos):  # type: ignore[no-untyped-def]
    """Every query sees the first `prefix[b]` keys, and the others causally.

    >>> mod = prefix_lm(torch.tensor([2]))
    >>> mod(0, 0, torch.arange(3)[:, None], torch.arange(4)).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0]], dtype=torch.int32)

    Args:
        prefix: (B,) integers: the length of the prefix of each batch row.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `prefix` is not a tensor that a mod can read.
    """
    return (kv_idx < prefix[b]) | (kv_idx <= q_pos)


@mask_mod
def window_with_globals(b, h, q_idx, kv_idx, width, global_tokens, *, q_pos):  # type: ignore[no-untyped-def]
    """Keys within `width` of the query, and all pairs in which the query or the key is one of the first `global_tokens`
    tokens.

    >>> window_with_globals(1, 1)(0, 0, torch.tensor([4]), torch.arange(7)).int()
    tensor([1, 0, 0, 1, 1, 1, 0], dtype=torch.int32)

    Args:
        width: int >= 0, the largest distance from the query to a key of its window.
        global_tokens: int >= 0, the number of tokens at the start that see all and are seen by all.

    Returns:
        A mask mod.

    Raises:
        AttentionError: an argument is not a number or a tensor.
    """
    return (abs(q_pos - kv_idx) <= width) | (kv_idx < global_tokens) | (q_pos < global_tokens)


@mask_mod
def dilated_window(b, h, q_idx, kv_idx, width, dilation, *, q_pos):  # type: ignore[no-untyped-def]
    """Every dilation-th key, up to `width` of them on each side of the query.

    >>> dilated_window(1, 2)(0, 0, torch.tensor([3]), torch.arange(7)).int()
    tensor([0, 1, 0, 1, 0, 1, 0], dtype=torch.int32)

    Args:
        width: int >= 0, the number of keys on each side.
        dilation: int >= 1, the distance from one of these keys to the next.

    Returns:
        A mask mod.

    Raises:
        AttentionError: an argument is not a number or a tensor.
    """
    distance = abs(q_pos - kv_idx)
    return (distance <= width * dilation) & (distance % dilation == 0)


@mask_mod
def neighbourhood_2d(b, h, q_idx, kv_idx, columns, radius, *, q_pos):  # type: ignore[no-untyped-def]
    """Tokens are the pixels of an image, row by row; a pixel sees those within `radius` in both directions.

    >>> seen = neighbourhood_2d(4, 1)(0, 0, torch.tensor([5]), torch.arange(12))
    >>> seen.int().view(3, 4)
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0]], dtype=torch.int32)

    Args:
        columns: int >= 1, the number of pixels of a row.
        radius: int >= 0, the largest distance in rows and in columns.

    Returns:
        A mask mod.

    Raises:
        AttentionError: an argument is not a number or a tensor.
    """
    near_rows = abs(q_pos // columns - kv_idx // columns) <= radius
    return near_rows & (abs(q_pos % columns - kv_idx % columns) <= radius)


@mask_mod
def block_diagonal(b, h, q_idx, kv_idx, block, *, q_pos):  # type: ignore[no-untyped-def]
    """Every query sees the keys of its own block of `block` tokens.

    >>> block_diagonal(2)(0, 0, torch.tensor([2]), torch.arange(6)).int()
    tensor([0, 0, 1, 1, 0, 0], dtype=torch.int32)

    Args:
        block: int >= 1, the number of tokens of a block.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `block` is not a number or a tensor.
    """
    return q_pos // block == kv_idx // block


@mask_mod
def strided_sparse(b, h, q_idx, kv_idx, stride, *, q_pos):  # type: ignore[no-untyped-def]
    """Causal: the last `stride` keys, and before them the keys at stride - 1, 2 stride - 1, ... (Sparse Transformer).

    >>> strided_sparse(3)(0, 0, torch.tensor([7]), torch.arange(9)).int()
    tensor([0, 0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.int32)

    Args:
        stride: int >= 1, how many of the last keys are seen, and the distance between the seen keys before them.

    Returns:
        A mask mod.

    Raises:
        AttentionError: `stride` is not a number or a tensor.
    """
    return (kv_idx <= q_pos) & ((q_pos - kv_idx < stride) | (kv_idx % stride == stride - 1))


@score_mod
def _t5(score, b, h, q_idx, kv_idx, table, buckets, reach, *, q_pos):  # type: ignore[no-untyped-def]
    return score + table[buckets[torch.clamp(kv_idx - q_pos, -reach, reach) + reach], h]


def t5_relative(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Mod:
    """T5's relative position bias, score + table[bucket(kv_idx - q_pos), h]: near distances have a bucket each, far
    ones share buckets by their logarithm.

    >>> mod = t5_relative(torch.arange(8.0)[:, None], max_distance=8)
    >>> mod(torch.zeros(1), 0, 0, 4, torch.arange(9))
    tensor([3., 2., 2., 1., 0., 5., 6., 6., 7.])

    Args:
        table: (buckets, H) floats, the bias of each bucket and query head. Differentiable.
        bidirectional: if True (encoders), half of the buckets are for keys after the query. If False (decoders), these
            keys have bucket 0.
        max_distance: int, the distance from which on all keys share the last bucket.

    Returns:
        A score mod.

    Raises:
        AttentionError: `table` does not have 2 axes, or max_distance is not above half of one side's buckets.
    """
    if table.dim() != 2:
        raise AttentionError("shape of the T5 table", tuple(table.shape), "(buckets, heads)")
    mod: Mod = _t5(table, t5_buckets(table.shape[0], bidirectional, max_distance, table.device), max_distance)
    return mod


def t5_buckets(buckets: int, bidirectional: bool, reach: int, device: torch.device | str = "cpu") -> Tensor:
    """The bucket of every distance key - query from -reach to reach, (2 * reach + 1,)."""
    distance = torch.arange(-reach, reach + 1, device=device)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    if exact < 1 or reach <= exact:
        raise AttentionError("T5 max_distance", reach, f"more than the {exact} exact buckets")
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    far = torch.log(away.clamp(min=1) / exact) / math.log(reach / exact) * (side - exact)
    shared = (exact + far.long()).clamp(max=side - 1)
    bucket = torch.where(away < exact, away, shared) + (side * (distance > 0) if bidirectional else 0)
    return bucket.to(torch.int32)
