import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def first_block(s: Tensor, v: Tensor) -> State:
    m = s.amax(-1)
    p = torch.exp(s - m[:, None])
    return m, p.sum(-1), p @ v


def step(state: State, s: Tensor, v: Tensor) -> State:
    m_old, l, o = state
    m = torch.maximum(m_old, s.amax(-1))
    pivot = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - pivot[:, None])
    factor = torch.exp(m_old - pivot)
    return m, factor * l + p.sum(-1), factor[:, None] * o + p @ v


def lazy_step(state: State, s: Tensor, v: Tensor, threshold: float) -> State:
    r_old, l, o = state
    most = s.amax(-1)
    r = torch.where(most > r_old + threshold, most, r_old)
    p = torch.exp(s - r[:, None])
    factor = torch.exp(r_old - r)
    return r, l * factor + p.sum(-1), o * factor[:, None] + p @ v
