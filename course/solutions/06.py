import math

import torch
from torch import Tensor


def hbm_bytes(
    n: int, d: int, rows: int, columns: int, order: str, itemsize: int = 4
) -> int:
    matrix, statistic = n * d, n
    if order == "fa1":
        # q in; o, m and l in and out
        each_block_of_keys = matrix + 2 * matrix + 2 * 2 * statistic
        elements = 2 * matrix + n // columns * each_block_of_keys
    else:
        k_and_v = n // rows * 2 * matrix
        elements = matrix + k_and_v + matrix + statistic
    return itemsize * elements


def fa2(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    out, lse = [], []
    for q_i in q.split(rows):
        m = q.new_full((len(q_i),), -torch.inf)
        l, o = torch.zeros_like(m), q.new_zeros(len(q_i), v.shape[1])
        for k_j, v_j in zip(k.split(columns), v.split(columns), strict=True):
            s = q_i @ k_j.mT / math.sqrt(q.shape[1])
            m_new = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - m_new[:, None])
            factor = torch.exp(m - m_new)
            l = factor * l + p.sum(-1)
            o = factor[:, None] * o + p @ v_j
            m = m_new
        out.append(o / l[:, None])
        lse.append(m + l.log())
    return torch.cat(out), torch.cat(lse)


def fa2_causal(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int
) -> tuple[Tensor, int]:
    out, visited = [], 0
    for first in range(0, len(q), rows):
        q_i = q[first : first + rows]
        i = first + torch.arange(len(q_i))
        m = q.new_full((len(q_i),), -torch.inf)
        l, o = torch.zeros_like(m), q.new_zeros(len(q_i), v.shape[1])
        for start in range(0, first + len(q_i), columns):
            k_j, v_j = k[start : start + columns], v[start : start + columns]
            j = start + torch.arange(len(k_j))
            s = q_i @ k_j.mT / math.sqrt(q.shape[1])
            s = s.masked_fill(j > i[:, None], -torch.inf)
            m_new = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - m_new[:, None])
            factor = torch.exp(m - m_new)
            l = l * factor + p.sum(-1)
            o = o * factor[:, None] + p @ v_j
            m = m_new
            visited += 1
        out += [o / l[:, None]]
    return torch.cat(out), visited
