"""Attention with nothing clever in it: whole score matrices, sequence by sequence, differentiable by autograd.

In float64 it is the truth; in a call's own dtype, torch's own arithmetic; and with `Noise` the truth with the roundings
that a tiled kernel cannot do without, drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise_lab.fuzz.case import Case
from tilewise_lab.fuzz.twins import MASK, SCORE, Place

Tensors = dict[str, Tensor]


class Noise(NamedTuple):
    """Roundings. half: of what is kept in the inputs' dtype, relative; tiny: the same of numbers near 0, absolute;
    unit: of what is kept in float32 (or float64); tanh: of a softcap, where the hardware's is taken."""

    half: float
    unit: float
    tanh: float
    tiny: float = 0.0

    def off(self, x: Tensor, bound: Tensor | float) -> Tensor:
        return x + bound * (2 * torch.rand_like(x) - 1)

    def cut(self, x: Tensor) -> Tensor:
        return self.off(x, (self.half * x.abs()).clamp_min(self.tiny) * (x != 0.0))


def attend(case: Case, x: Tensors, fixed: Tensors, dtype: torch.dtype, noise: Noise | None = None) -> Tensors:
    """out, lse and the largest score of each head, from the call's floating-point tensors `x` in `dtype` and the
    others."""
    outs, logs, tops = [], [], []
    for b, q, k, v in _sequences(case, x):
        o, lse, top = _one(case, b, q, k, v, x, fixed, dtype, noise)
        outs.append(o.transpose(0, 1))
        logs.append(lse)
        tops.append(top)
    device = x["q"].device
    nothing = torch.full((case.heads,), -torch.inf, dtype=dtype, device=device)
    if case.packed:
        rest = case.slack[0]
        outs.append(torch.zeros(rest, case.heads, case.dv, dtype=dtype, device=device))
        logs.append(torch.full((case.heads, rest), -torch.inf, dtype=dtype, device=device))
        return {"out": torch.cat(outs), "lse": torch.cat(logs, -1), "max_logit": torch.stack([nothing, *tops]).amax(0)}
    if not outs:
        empty = {n: torch.zeros(shape, dtype=dtype, device=device) for n, shape in case.outputs().items()}
        return {"lse": torch.zeros(0, case.heads, case.n_q, dtype=dtype, device=device)} | empty
    return {"out": torch.stack(outs), "lse": torch.stack(logs), "max_logit": torch.stack(tops)}


def _sequences(case: Case, x: Tensors) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Number, q, k and v of every sequence, (H, n, D), the keys once for each head."""
    group = case.heads // case.kv_heads
    start_q = start_k = 0
    for b, (n_q, n_k) in enumerate(case.sequences):
        at, of = (slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)) if case.packed else (b, b)
        start_q, start_k = start_q + n_q, start_k + n_k
        k, v = (x[name][of].repeat_interleave(group, 1)[:, : case.heads] for name in "kv")
        yield b, x["q"][at].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def _one(
    case: Case, b: int, q: Tensor, k: Tensor, v: Tensor, x: Tensors, fixed: Tensors, dtype: torch.dtype,
    noise: Noise | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h, i, j = (torch.arange(n, device=q.device) for n in (case.heads, q.shape[1], k.shape[1]))
    place = Place(b, h[:, None, None], i[:, None], j, len(i), len(j))
    scale = case.d**-0.5 if case.scale is None else case.scale
    s = scale * (q @ k.mT)
    sizes = s.detach().abs()
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    if case.score_mod is not None:
        twin = SCORE[case.score_mod]
        s = twin.torch(s, place, *(x[name] for name in twin.tensors))
    if case.alibi is not None:
        slopes = x["slopes_of_alibi"]
        slopes = slopes[b] if case.alibi == "bh" else slopes
        term = slopes[:, None, None] * (i[:, None] + len(j) - len(i) - j).abs()
        s, sizes = s - term, sizes + term.detach().abs()
    if case.bias is not None:
        bias = x["bias"][(None,) * (4 - x["bias"].dim())]
        bias = bias[b if bias.shape[0] > 1 else 0]
        bias = bias[:, : len(i) if bias.shape[1] > 1 else 1, : len(j) if bias.shape[2] > 1 else 1]
        s, sizes = s + bias, sizes + bias.detach().abs()
    keep: Tensor | float = 1.0
    if case.dropout_p:
        kept = tilewise.dropout_mask(
            b + 1, case.heads, len(i), len(j), p=case.dropout_p, seed=case.dropout_seed, device=q.device
        )[b]
        keep = kept.to(dtype) * 2**16 / (2**16 - round(case.dropout_p * 2**16))
    s = s.expand(case.heads, len(i), len(j))
    hide = ~seen(case, place, fixed)
    sink = (
        x["sinks"][:, None, None].expand(-1, len(i), 1) if case.sinks else s.new_full((len(h), len(i), 1), -torch.inf)
    )
    if noise is None:
        return *_plain(s, hide, sink, keep, v), _top(s, hide)
    bound = noise.unit * (4 + sizes + abs(scale) * (q.abs() @ k.abs().mT).detach())
    s = _Cut.apply(s, bound + noise.tanh * s.detach().abs(), noise)  # type: ignore[no-untyped-call]
    out, lse = _Noisy.apply(s, hide, sink, keep, v, noise)  # type: ignore[no-untyped-call]
    return out, lse, _top(s, hide)


def _top(s: Tensor, hide: Tensor) -> Tensor:
    """(H,): the largest visible score of each head."""
    visible = s.detach().masked_fill(hide, -torch.inf).flatten(1)
    return visible.amax(1) if visible.shape[1] else visible.new_full((len(s),), -torch.inf)


def seen(case: Case, place: Place, fixed: Tensors) -> Tensor:
    """(H, n_q, n_k): which keys a query sees, by the band and by the mask mod."""
    at = place.i + place.n_k - place.n_q
    mask = torch.ones(case.heads, place.n_q, place.n_k, dtype=torch.bool, device=place.j.device)
    before, after = case.window or (None, None)
    if before is not None and before < 2**31:
        mask = mask & (place.j >= at - before)
    if case.causal:
        after = 0
    if after is not None and after < 2**31:
        mask = mask & (place.j <= at + after)
    if case.mask_mod is not None:
        twin = MASK[case.mask_mod]
        mask = mask & twin.torch(place, *(fixed[name] for name in twin.tensors))
    return mask


def _plain(s: Tensor, hide: Tensor, sink: Tensor, keep: Any, v: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.cat([s.masked_fill(hide, -torch.inf), sink.to(s.dtype)], -1)
    m = s.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    some = l.masked_fill(l == 0, 1.0)
    out = ((p / some)[..., :-1] * keep) @ v
    return out, (m + some.log()).masked_fill(l == 0, -torch.inf).squeeze(-1)


class _Cut(torch.autograd.Function):
    """A value that is off by up to a bound, and its gradient by one rounding."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, bound: Tensor, noise: Noise) -> Tensor:
        ctx.noise = noise
        return noise.off(s, bound)

    @staticmethod
    def backward(ctx: Any, ds: Tensor) -> Any:
        return ctx.noise.cut(ds), None, None


class _Noisy(torch.autograd.Function):
    """`_plain` as kernels compute it: weights, out, delta and dP each rounded on their own."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, hide: Tensor, sink: Tensor, keep: Any, v: Tensor, noise: Noise) -> Any:
        s, sink = s.masked_fill(hide, -torch.inf), sink.to(s.dtype)
        lse = torch.logsumexp(torch.cat([s, sink], -1), -1, keepdim=True)
        empty = lse == -torch.inf
        lse = noise.off(lse.masked_fill(empty, 0.0), noise.unit * (4 + lse.masked_fill(empty, 0.0).abs()))
        p = torch.exp(s - lse)
        out = noise.cut(noise.cut(p * keep) @ v)
        ctx.save_for_backward(p, torch.exp(sink - lse), v, out)
        ctx.keep, ctx.noise = keep, noise
        return out, lse.masked_fill(empty, -torch.inf).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        p, p_sink, v, out = ctx.saved_tensors
        noise, unit = ctx.noise, ctx.noise.unit
        delta = dout * noise.cut(out)
        delta = noise.off(delta.sum(-1, keepdim=True), 4 * unit * delta.abs().sum(-1, keepdim=True)) - dlse[..., None]
        dp = noise.off(dout @ v.mT, unit * (dout.abs() @ v.abs().mT))
        ds = p * (noise.off(ctx.keep * dp, 4 * unit * (ctx.keep * dp).abs()) - delta)
        return ds, None, -p_sink * delta, None, noise.cut(p * ctx.keep).mT @ dout, None


def hidden_rows(case: Case, fixed: Tensors) -> dict[str, list[tuple[int, ...]]]:
    """The rows of k and v, as indices, that no query sees: (b, j, head) or, packed, (token, head)."""
    rows: list[tuple[int, ...]] = []
    start, group = 0, case.heads // case.kv_heads
    device = fixed["q"].device
    for b, (n_q, n_k) in enumerate(case.sequences):
        h, i, j = (torch.arange(n, device=device) for n in (case.heads, n_q, n_k))
        mask = seen(case, Place(b, h[:, None, None], i[:, None], j, n_q, n_k), fixed)
        unseen = ~mask.any(1).view(case.kv_heads, group, n_k).any(1) if group else mask.new_ones(case.kv_heads, n_k)
        for head, key in unseen.nonzero().tolist():
            rows.append((start + key, head) if case.packed else (b, key, head))
        start += n_k
    if case.packed:
        rows += [(start + n, head) for n in range(case.slack[1]) for head in range(case.kv_heads)]
    return {"k": rows, "v": rows}
