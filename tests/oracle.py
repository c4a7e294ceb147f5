"""Attention with nothing clever in it: the whole score matrix, in float64, differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.request import Spec

Bounds = Tensor | None


def seen(n_q: int, n_k: int, spec: Spec, device: torch.device | str = "cpu") -> Tensor:
    """(n_q, n_k) bools: query i, which sits at key position p = i + n_k - n_q, sees p - before .. p + after."""
    p = torch.arange(n_q, device=device)[:, None] + n_k - n_q
    j = torch.arange(n_k, device=device)
    mask = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    if spec.before is not None:
        mask &= j >= p - spec.before
    if spec.after is not None:
        mask &= j <= p + spec.after
    return mask


def naive(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, cu_q: Bounds = None, cu_k: Bounds = None
) -> tuple[Tensor, Tensor]:
    """out and lse in float64. Dense (B, S, H, D) -> lse (B, H, Sq); packed (T, H, D) with cu_q, cu_k -> lse (H, T)."""
    q, k, v = q.double(), k.double(), v.double()
    if cu_q is None or cu_k is None:
        return _dense(q, k, v, spec)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        o, logs = _dense(q[None, a:b], k[None, c:d], v[None, c:d], spec)
        out[a:b], lse[:, a:b] = o[0], logs[0]
    return out, lse


def naive_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    dout: Tensor,
    dlse: Tensor | None = None,
    cu_q: Bounds = None,
    cu_k: Bounds = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, dq, dk, dv in float64, for the loss (out * dout).sum() + (lse * dlse).sum()."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = naive(*leaves, spec, cu_q, cu_k)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.double()).masked_fill(lse == -torch.inf, 0.0).sum()
    if not loss.requires_grad:
        return out, lse, *(torch.zeros_like(x) for x in leaves)
    dq, dk, dv = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), dq, dk, dv


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = spec.scale * (q @ k.mT)  # (B, H, Sq, Sk)
    s = s.masked_fill(~seen(q.shape[2], k.shape[2], spec, q.device), -torch.inf)
    s, v = (
        pad(s, (0, 1), value=-torch.inf),
        pad(v, (0, 0, 0, 1)),
    )  # one key that nobody sees, so that Sk = 0 needs no case
    m = s.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    lse = (m + l.log()).masked_fill(empty, -torch.inf)
    return (p @ v / l).transpose(1, 2), lse.squeeze(-1)
