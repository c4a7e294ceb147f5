"""What is true of a call of `features`, and how wrong a kernel may be: the rule of `budget`, for every term.

    error <= 2 * error of torch's own arithmetic in the same dtype + rounding

`rounding` is drawn: the truth is computed with the roundings that a tiled kernel cannot do without, several times, and
three standard deviations of what that does to an element are allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise
from tests.budget import Yardstick
from tests.features import (
    ALIGNED,
    CAP,
    MASKS,
    MODS,
    SEED,
    Call,
    Leaves,
    P,
    capped,
    fast_tanh,
    run,
    score_error,
    sequences,
)

DRAWS, DEVIATIONS = 8, 3.0
UNIT = torch.finfo(torch.float32).eps / 2


def check(call: Call, backend: str) -> None:
    """Every result is within its budget."""
    _, faults = judge(call, backend)
    assert not faults, f"{call.features} {call.lengths}: {'; '.join(faults)}"


def judge(call: Call, backend: str) -> tuple[list[tuple[str, float]], list[str]]:
    """The error of each result (out, lse, dq, dk, dv, terms) over torch's, and what is wrong."""
    ours, sticks = run(call, backend), yardsticks(call)
    faults = [fault for stick in sticks if (fault := stick.fault(ours[stick.name])) is not None]
    names = {"out": "out", "lse": "lse", "max_logit": "max_logit", "q": "dq", "k": "dk", "v": "dv"}
    return [(names.get(stick.name, "terms"), stick.ratio(ours[stick.name])) for stick in sticks], faults


def yardsticks(call: Call) -> list[Yardstick]:
    dtype = getattr(torch, call.features.dtype)
    exact, peer = truth(call, torch.float64), truth(call, dtype)
    if dtype != torch.float32:
        peer |= {name: x for name, x in truth(call, torch.float32).items() if name in ("lse", "max_logit")}
    draws = [rounded(call, exact) for _ in range(DRAWS)]
    sticks = []
    for name in call.results:
        y = exact[name]
        variance = sum((draw[name] - y)[y.isfinite()].square() for draw in draws) / DRAWS
        rounding = DEVIATIONS * variance.max().sqrt().item() if variance.numel() else 0.0
        sticks.append(Yardstick(name, y, peer[name], rounding))
    return sticks


def truth(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and the gradient of every leaf by torch's autograd, all of it in one dtype."""
    x = {name: t.detach().to(dtype).requires_grad_() for name, t in call.leaves.items()}
    outs, logs, most = [], [], []
    for b, _, _, q, k, v in sequences(call, x):
        s = _masked(call, b, sum(_parts(call, x, b, capped(call, q, k))))
        most.append(_largest(s.detach()))
        sink = s.new_full((*s.shape[:-1], 1), -torch.inf)
        if "sinks" in x:
            sink = x["sinks"][:, None, None].expand(sink.shape)
        s = torch.cat([s, sink], -1)
        m = s.detach().amax(-1, keepdim=True)
        m = m.masked_fill(m == -torch.inf, 0.0)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True)
        some = l.masked_fill(l == 0, 1.0)
        outs.append(((p / some)[..., :-1] * _kept(call, b, v, q.shape[1])) @ v)
        logs.append((m + some.log()).masked_fill(l == 0, -torch.inf).squeeze(-1))
    out, lse = _joined(call, outs, logs)
    loss = (out * call.dout.to(dtype).nan_to_num(0.0)).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * call.dlse.to(dtype)).sum()
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
    found = {"out": out.detach(), "lse": lse.detach(), "max_logit": _largest_of(call, most)}
    return found | dict(zip(x, grads, strict=True))


def rounded(call: Call, exact: dict[str, Tensor], size: float = 1.0) -> dict[str, Tensor]:
    """The truth with one draw of roundings, each uniform within its bound times `size`:

    P, dS, out, results    one rounding to their dtype; P and dS are factors of products in the inputs'
    scores                 `score_error`; the slope of tanh, 1 - t^2, is wrong by twice as much as t, times t
    lse, delta, dP, dS     float32: four roundings, or one of the parts they are sums of; lse and delta are off for a
                           whole row at once
    """
    f = call.features
    half = torch.finfo(getattr(torch, f.dtype)).eps / 2
    x = {name: t.detach().double().requires_grad_() for name, t in call.leaves.items()}
    terms = [name for name in x if name not in ("q", "k", "v", "sinks")]
    grads = {name: torch.zeros_like(t) for name, t in x.items()}
    scale = f.factor
    outs, logs, most = [], [], []

    def off(t: Tensor, bound: Tensor | float) -> Tensor:
        return t + size * bound * (2 * torch.rand_like(t) - 1)

    def cut(t: Tensor, eps: float = half) -> Tensor:
        return off(t, eps * t.abs())

    for b, rows, keys, q, k, v in sequences(call, {name: t.detach() for name, t in x.items()}):
        lse, dlse = ((t[b] if call.cu is None else t[:, rows]).double()[..., None] for t in (exact["lse"], call.dlse))
        out, dout = (t[rows].double().transpose(0, 1) for t in (exact["out"], call.dout))
        s_in = capped(call, q, k).requires_grad_()
        parts = _parts(call, x, b, s_in)
        s, keep = sum(parts), _kept(call, b, v, q.shape[1])
        empty = lse == -torch.inf
        sizes = sum(t.detach().abs() for t in parts)
        s_off = off(torch.zeros_like(s), score_error(call, q, k, s_in.detach(), sizes))
        lse_off = off(torch.zeros_like(lse), UNIT * (4 + lse.masked_fill(empty, 0.0).abs()))
        p = torch.exp(_masked(call, b, s.detach()) - lse.masked_fill(empty, torch.inf))
        logs.append((lse + lse_off + (p * s_off).sum(-1, keepdim=True)).squeeze(-1))
        most.append(_largest(_masked(call, b, s.detach()) + s_off))
        p = p * (1 + s_off + lse_off)
        p_cut = cut(p * keep)
        outs.append(cut(p_cut @ v))
        delta = dout * cut(out)
        delta = off(delta.sum(-1, keepdim=True), 4 * UNIT * delta.abs().sum(-1, keepdim=True))
        delta = delta - dlse.masked_fill(empty, 0.0)
        dp = off(dout @ v.mT, UNIT * (dout.abs() @ v.abs().mT))
        g = cut(p * (keep * dp - delta), 4 * UNIT)
        wanted = [s_in, *(x[name] for name in terms)]
        g_in, *g_terms = torch.autograd.grad(s, wanted, g, allow_unused=True, materialize_grads=True)
        if f.softcap:
            t2 = (s_in.detach() / CAP).square()
            g_in = g_in * off(1 - t2, 4 * UNIT + 2 * fast_tanh(call) * t2)
        g_in = cut(g_in)
        grads["q"][rows] += scale * (g_in @ k).transpose(0, 1)
        grads["k"][keys] += scale * _grouped(call, g_in.mT @ q)
        grads["v"][keys] += _grouped(call, p_cut.mT @ dout)
        for name, found in zip(terms, g_terms, strict=True):
            grads[name] += found
        if "sinks" in x:
            sink = torch.exp(x["sinks"].detach()[:, None, None] - lse.masked_fill(empty, torch.inf))
            grads["sinks"] -= cut(sink * delta, 4 * UNIT).sum((1, 2))
    out, lse = _joined(call, outs, logs)
    results = {name: cut(g, torch.finfo(call.leaves[name].dtype).eps / 2) for name, g in grads.items()}
    return {"out": out, "lse": lse, "max_logit": _largest_of(call, most)} | results


def _parts(call: Call, x: Leaves, b: int, s: Tensor) -> list[Tensor]:
    """What is added up to the scores (H, n_q, n_k), from scores after the softcap."""
    f = call.features
    _, n_q, n_k = s.shape
    h, i, j = (torch.arange(n, device=s.device) for n in s.shape)
    h, i = h[:, None, None], i[:, None]
    parts = [s]
    if f.mod:
        at = i + n_k - n_q if f.mod in ALIGNED else i
        parts = [MODS[f.mod][2](s, b, h, at, j, *(x[name] for name in MODS[f.mod][0]))]
    if f.alibi:
        slopes = x["alibi"][b] if f.alibi == "bh" else x["alibi"]
        parts.append(-slopes[:, None, None] * (i + n_k - n_q - j).abs())
    if f.bias is not None:
        bias = x["bias"][b if "b" in f.bias else 0]
        parts.append(bias[:, : n_q if "i" in f.bias else 1, : n_k if "j" in f.bias else 1])
    return parts


def _masked(call: Call, b: int, s: Tensor) -> Tensor:
    """s with -inf where the query does not see the key."""
    _, n_q, n_k = s.shape
    h, i, j = (torch.arange(n, device=s.device) for n in s.shape)
    at, (before, after) = i[:, None] + n_k - n_q, call.window
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=s.device)
    if before is not None:
        seen = seen & (j >= at - before)
    if after is not None:
        seen = seen & (j <= at + after)
    if call.features.mask:
        seen = seen & MASKS[call.features.mask][1](b, h[:, None, None], at, j, **call.fixed)
    return s.masked_fill(~seen, -torch.inf)


def _kept(call: Call, b: int, v: Tensor, n_q: int) -> Tensor | float:
    """What dropout multiplies the weights by."""
    if not call.features.dropout:
        return 1.0
    keep = tilewise.dropout_mask(b + 1, v.shape[0], n_q, v.shape[1], p=P, seed=SEED, device=v.device)[b]
    return keep.to(v.dtype) / (1 - round(P * 2**16) / 2**16)  # p is rounded


def _grouped(call: Call, x: Tensor) -> Tensor:
    """The heads of a group summed: (H, n, D) -> (n, Hk, D)"""
    return x.unflatten(0, (call.features.heads[1], -1)).sum(1).transpose(0, 1)


def _largest(s: Tensor) -> Tensor:
    """(H,): the largest score of each head, of (H, n_q, n_k)."""
    return s.new_full(s.shape[:1], -torch.inf) if s[0].numel() == 0 else s.amax((1, 2))


def _largest_of(call: Call, most: list[Tensor]) -> Tensor:
    return torch.stack(most) if call.cu is None else torch.stack(most).amax(0)


def _joined(call: Call, outs: list[Tensor], logs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of packed sequences with the tokens that belong to none."""
    outs = [x.transpose(0, 1) for x in outs]
    if call.cu is None:
        return torch.stack(outs), torch.stack(logs)
    shape = call.dout.shape[0] - sum(x.shape[0] for x in outs), *outs[0].shape[1:]
    none = outs[0].new_zeros(shape)
    return torch.cat([*outs, none]), torch.cat([*logs, none.sum(-1).mT - torch.inf], -1)
