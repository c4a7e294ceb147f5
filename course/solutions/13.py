import math

import torch
from torch import Tensor


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(scale * q @ k.mT - lse[:, None])
    ds = p * (do @ v.mT - delta[:, None])
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ do
