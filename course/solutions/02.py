import torch
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def masked_softmax(x: Tensor, seen: Tensor) -> Tensor:
    x = torch.where(seen, x, -torch.inf)
    m = x.amax(-1, keepdim=True)
    e = torch.exp(x - torch.where(m == -torch.inf, 0.0, m))
    l = e.sum(-1, keepdim=True)
    return e / torch.where(l == 0, 1.0, l)
