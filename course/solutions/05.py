import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def step(state: State, s: Tensor, v: Tensor) -> State:
    m_old, l, o = state
    m = torch.maximum(m_old, s.amax(-1))
    pivot = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - pivot[:, None])
    factor = torch.exp(m_old - pivot)
    return m, factor * l + p.sum(-1), factor[:, None] * o + p @ v
