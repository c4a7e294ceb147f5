import math

import torch
from torch import Tensor


def weights(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.exp(scale * q @ k.mT - lse[:, None])


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    p = weights(q, k, lse)
    ds = p * (do @ v.mT - delta[:, None])
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ do


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    rows: int, columns: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    delta = (do * o).sum(-1)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for j in (slice(at, at + columns) for at in range(0, len(k), columns)):
        for i in (slice(at, at + rows) for at in range(0, len(q), rows)):
            found = block_gradients(q[i], k[j], v[j], do[i], lse[i], delta[i])
            dq[i] += found[0]
            dk[j] += found[1]
            dv[j] += found[2]
    return dq, dk, dv
