"""Which weights dropout keeps: a hash of (seed, batch, head, query, key), the same on every backend and for every tile.

A generator of the SplitMix family: the seed, the batch row (or packed sequence), the head and the query are mixed into
the start of a stream, and the key is a step of it. A step yields 64 bits for the four pairs of the queries i and i + 8
and the keys j and j + 8 (of each 16): the tensor cores leave these four in the registers of one thread, S = Q K^T in
the forward as well as S^T in the backward, so that a thread computes one hash for four weights. 32-bit integers, here
in int64, because torch has no 32-bit integers that wrap around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError, shown

GOLDEN = 0x9E3779B9
LOW = 0xFFFFFFFF
BIT = 8  # of queries and of keys: tells the pairs of one hash apart


def threshold(p: float) -> int:
    """A weight is kept if its 16 random bits are not below this: p is rounded to n / 65536, n <= 65535."""
    return min(round(p * 2**16), 2**16 - 1)


def kept_factor(p: float) -> float:
    """The factor of a kept weight, 1 / (1 - p) for the rounded p: the mean of out over seeds is out without dropout.

    >>> kept_factor(0.5), kept_factor(0.99999), kept_factor(1e-6)
    (2.0, 65536.0, 1.0)
    """
    return 2**16 / (2**16 - threshold(p))


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every bit of x changes about half the bits of the result."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & LOW
    return x ^ (x >> 16)


def keep(p: float, seed: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
    """True where the weight of query i and key j is kept; the indices broadcast."""
    word = mix(seed & LOW)
    for part in ((seed >> 32) & LOW, b, h):
        word = mix(word ^ part)
    i, j = torch.as_tensor(i, device=seed.device), torch.as_tensor(j, device=seed.device)
    row = step(word ^ (i & ~BIT), 0x7FEB352D)
    first = mix((row + (j & ~BIT) * GOLDEN) & LOW)
    bits = torch.where(i & BIT == 0, first, step(first, 0x2C1B3C6D))
    return torch.where(j & BIT == 0, bits >> 16, bits & 0xFFFF) >= threshold(p)


def step(x: Tensor, factor: int) -> Tensor:
    """Half of `mix`."""
    x = (x * factor) & LOW
    return x ^ (x >> 16)


def dropout_mask(
    batch: int, heads: int, n_q: int, n_k: int, *, p: float, seed: int | Tensor, device: torch.device | str = "cpu"
) -> Tensor:
    """The weights that `attention(..., dropout_p=p, seed=seed)` keeps: (batch, heads, n_q, n_k) bools.

    >>> dropout_mask(1, 2, 100, 100, p=0.25, seed=0).float().mean()
    tensor(0.7450)

    For packed sequences, `batch` counts sequences and positions count within them.

    Args:
        batch: number of batch rows, or of packed sequences.
        heads: number of query heads.
        n_q: number of queries.
        n_k: number of keys.
        p: the probability that a weight is dropped, 0 <= p < 1, rounded as in `attention`.
        seed: as in `attention`: an int of 64 bits, or an int64 tensor of one element.
        device: device of the result. Default: the CPU.

    Returns:
        A bool tensor (batch, heads, n_q, n_k), True where the weight is kept.

    Raises:
        AttentionError: p, the seed or a size is not as above.
    """
    if not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise AttentionError("dropout_p", shown(p), "0 <= p < 1")
    if not all(is_whole(n) and n >= 0 for n in (batch, heads, n_q, n_k)):
        raise AttentionError("sizes of a dropout mask", (batch, heads, n_q, n_k), "ints >= 0")
    b, h, i, j = (torch.arange(n, device=device) for n in (batch, heads, n_q, n_k))
    return keep(p, as_seed(seed, b.device), b[:, None, None, None], h[:, None, None], i[:, None], j)


def is_whole(x: Any) -> bool:
    """Whether x is an int or counts as one, as numpy's do; an array does not, though it may have one element.

    >>> is_whole(3), is_whole(True), is_whole(3.0), is_whole([3])
    (True, False, False, False)
    """
    if isinstance(x, (int, float, Tensor)):  # first: torch.compile's symbols support no other test
        return isinstance(x, int) and not isinstance(x, bool)
    return hasattr(x, "__index__") and not hasattr(x, "__len__")


def as_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A seed on the device, without a sync: the caller's, or the next of torch's own generator."""
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise AttentionError("seed", f"{seed.dtype} {tuple(seed.shape)}", "an int, or one torch.int64")
        return seed.reshape(()).to(device)
    if not is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise AttentionError("seed", shown(seed), "an int of 64 bits, or one torch.int64")
    return torch.full((), seed, dtype=torch.int64, device=device)
