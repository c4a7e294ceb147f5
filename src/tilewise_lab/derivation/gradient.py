"""The gradient of attention, from the Jacobian of softmax to the tiled form that stores no matrix of weights.

Shapes as in `attention`: q (N, D), k (M, D), v (M, E), o and its gradient do (N, E), lse (N,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise_lab.derivation.attention import scores
from tilewise_lab.derivation.softmax import correction


def softmax_jacobian(p: Tensor) -> Tensor:
    """∂p_j / ∂s_k = p_j (1[j = k] - p_k), that is diag(p) - p pᵀ, for one row p (M,) = softmax(s).

    >>> softmax_jacobian(torch.tensor([0.25, 0.75]))
    tensor([[ 0.1875, -0.1875],
            [-0.1875,  0.1875]])
    """
    return torch.diag(p) - torch.outer(p, p)


def softmax_vjp(p: Tensor, dp: Tensor) -> Tensor:
    """dS = P∘(dP - rowsum(P∘dP)): the Jacobian of every row times its gradient, without the Jacobian."""
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def naive(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by hand, the chain S = Q Kᵀ/√D, P = softmax(S), O = P V read from its end."""
    p = torch.softmax(scores(q, k), -1)
    dv = p.mT @ do
    dp = do @ v.mT
    ds = softmax_vjp(p, dp) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, dv


def block(
    q_i: Tensor, k_j: Tensor, v_j: Tensor, do_i: Tensor, lse_i: Tensor, delta_i: Tensor, hide: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """P and dS of one block, from nothing but its own rows: P = exp(S - lse), dS = P∘(dP - delta)/√D."""
    s = scores(q_i, k_j)
    if hide is not None:
        s = s.masked_fill(hide, -torch.inf)
    p = correction(s, lse_i[:, None])
    return p, p * (do_i @ v_j.mT - delta_i[:, None]) / math.sqrt(q_i.shape[-1])


def tiled(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, block by block. Two facts make it possible:

    P = exp(S - lse), so any block of P can be computed again, alone;
    rowsum(P∘dP) = rowsum(dO∘O), so the sum over a whole row is known before the first block.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (do * o).sum(-1)
    for start_j in range(0, k.shape[0], columns):
        j = slice(start_j, start_j + columns)
        for start_i in range(0, q.shape[0], rows):
            i = slice(start_i, start_i + rows)
            p, ds = block(q[i], k[j], v[j], do[i], lse[i], delta[i])
            dv[j] += p.mT @ do[i]
            dq[i] += ds @ k[j]
            dk[j] += ds.mT @ q[i]
    return dq, dk, dv
