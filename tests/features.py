"""Random combinations of score terms, and the truth about them: the whole matrix, in float64, by torch's autograd.

The mods of `MODS` and `MASKS` are written twice: once for tilewise, once as plain torch for the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tilewise

Leaves = dict[str, Tensor]


@tilewise.score_mod
def relative(score, b, h, q_idx, kv_idx, slopes):
    return score + slopes[h] * (kv_idx - q_idx) / 64


@tilewise.score_mod
def distance_table(score, b, h, q_idx, kv_idx, table):
    return score + table[h, torch.clamp(q_idx - kv_idx, -8, 7) + 8]


@tilewise.score_mod
def gated(score, b, h, q_idx, kv_idx, sharpness, gate):
    x = score * torch.sigmoid(gate[q_idx % 5])
    return torch.where(kv_idx <= q_idx, x, x * torch.exp(-abs(sharpness)))


@tilewise.score_mod
def per_key(score, b, h, q_idx, kv_idx, weight):
    return score + torch.sin(weight[b, kv_idx % 7]) if h % 2 == 0 else min(score, 1.5) - weight[b, kv_idx % 7] ** 2


# name -> (shapes of its tensors, tilewise's, torch's); shapes may name H and B
MODS: dict[str, tuple[dict[str, tuple[Any, ...]], Callable[..., Any], Callable[..., Tensor]]] = {
    "relative": (
        {"slopes": ("H",)},
        relative,
        lambda s, b, h, i, j, slopes: s + slopes[h] * (j - i) / 64,
    ),
    "distance_table": (
        {"table": ("H", 16)},
        distance_table,
        lambda s, b, h, i, j, table: s + table[h, (i - j).clamp(-8, 7) + 8],
    ),
    "gated": (
        {"sharpness": (), "gate": (5,)},
        gated,
        lambda s, b, h, i, j, sharpness, gate: (
            s * gate[i % 5].sigmoid() * torch.where(j <= i, 1.0, torch.exp(-sharpness.abs()).to(s.dtype))
        ),
    ),
    "per_key": (
        {"weight": ("B", 7)},
        per_key,
        lambda s, b, h, i, j, weight: torch.where(
            h % 2 == 0, s + weight[b, j % 7].sin(), s.clamp(max=1.5) - weight[b, j % 7] ** 2
        ),
    ),
    "t5": (
        {"table": (8, "H")},
        lambda table: tilewise.mods.t5_relative(table, max_distance=12),
        lambda s, b, h, i, j, table: s + table[_t5_bucket((j - i).clamp(-12, 12)), h],
    ),
}


def _t5_bucket(distance: Tensor) -> Tensor:
    """8 buckets, both ways, from the formula of the paper's code."""
    n = distance.abs()
    large = 2 + (torch.log(n.clamp(min=1).float() / 2) / torch.log(torch.tensor(6.0)) * 2).long()
    return torch.where(n < 2, n, large.clamp(max=3)) + 4 * (distance > 0)


# name -> (tilewise's, torch's), both of (lengths, batch, device)
MASKS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "document": (
        lambda ids, prefix: tilewise.mods.document(ids=ids),
        lambda b, h, i, j, ids, prefix: ids[b, i] == ids[b, j],
    ),
    "prefix_lm": (
        lambda ids, prefix: tilewise.mods.prefix_lm(prefix),
        lambda b, h, i, j, ids, prefix: (j < prefix[b]) | (j <= i),
    ),
    "window_with_globals": (
        lambda ids, prefix: tilewise.mods.window_with_globals(9, 3),
        lambda b, h, i, j, ids, prefix: ((i - j).abs() <= 9) | (j < 3) | (i < 3),
    ),
    "dilated_window": (
        lambda ids, prefix: tilewise.mods.dilated_window(5, 3),
        lambda b, h, i, j, ids, prefix: ((i - j).abs() <= 15) & ((i - j) % 3 == 0),
    ),
    "neighbourhood_2d": (
        lambda ids, prefix: tilewise.mods.neighbourhood_2d(6, 1),
        lambda b, h, i, j, ids, prefix: ((i // 6 - j // 6).abs() <= 1) & ((i % 6 - j % 6).abs() <= 1),
    ),
    "block_diagonal": (
        lambda ids, prefix: tilewise.mods.block_diagonal(11),
        lambda b, h, i, j, ids, prefix: i // 11 == j // 11,
    ),
    "strided_sparse": (
        lambda ids, prefix: tilewise.mods.strided_sparse(5),
        lambda b, h, i, j, ids, prefix: (j <= i) & ((i - j < 5) | (j % 5 == 4)),
    ),
}


@dataclass(frozen=True)
class Features:
    """What a call has: compile-time choices only, so that many calls share the kernels."""

    softcap: bool = False
    mod: str | None = None
    alibi: str | None = None  # the axes of the slopes, "h" or "bh"
    bias: str | None = None  # the axes that do not broadcast, of "bhij"
    sinks: bool = False
    dropout: bool = False
    mask: str | None = None
    blocks: int = 0  # of a block mask, or 0
    band: tuple[bool, bool] = (False, False)  # whether (before, after) are bounded
    packed: bool = False
    heads: tuple[int, int] = (4, 2)
    d: int = 64
    dv: int = 64
    dtype: str = "float32"

    @staticmethod
    def random(seed: int, dims: tuple[int, ...], dtypes: tuple[str, ...], blocks: int) -> Features:
        r = random.Random(seed)
        maybe = lambda options, odds: r.choice(options) if r.random() < odds else None  # noqa: E731
        packed, mask = r.random() < 0.3, maybe(list(MASKS), 0.5)
        return Features(
            softcap=r.random() < 0.3,
            mod=maybe(list(MODS), 0.5),
            alibi=maybe(["h", "bh"], 0.3),
            bias=maybe(["bhij", "hij", "ij", "bj", "hi", "bij", "h", "j"], 0.4),
            sinks=r.random() < 0.3,
            dropout=r.random() < 0.25,
            mask=mask,
            blocks=blocks if mask and not packed and r.random() < 0.5 else 0,
            band=r.choice([(False, False), (False, True), (True, True), (True, False)]),
            packed=packed,
            heads=r.choice([(2, 2), (4, 2), (3, 1)]),
            d=r.choice(dims),
            dv=r.choice(dims),
            dtype=r.choice(dtypes),
        )


@dataclass
class Call:
    """Features with data: `leaves` get gradients, `fixed` do not."""

    features: Features
    lengths: list[tuple[int, int]]
    leaves: Leaves
    fixed: dict[str, Tensor]
    window: tuple[int | None, int | None]
    dout: Tensor
    dlse: Tensor
    cu: tuple[Tensor, Tensor] | None = field(default=None)


def make(features: Features, seed: int, longest: int, device: str) -> Call:
    r = random.Random(seed)
    torch.manual_seed(seed)
    f = features
    dtype = getattr(torch, f.dtype)
    odd = lambda: r.randrange(1, longest, 2)  # noqa: E731 - strides that divide by 16 would be other kernels
    batch = r.choice([2, 3])
    n_q, n_k = odd(), odd()
    lengths = [(odd() - 1, odd() - 1) for _ in range(batch)] if f.packed else [(n_q, n_k)] * batch
    if f.packed:
        lengths[0] = (odd(), odd())
    max_q, max_k = (max(x) for x in zip(*lengths, strict=True))
    h, hk = f.heads
    size = {"B": batch, "H": h}

    def data(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device) * scale

    def cut(*shape: int) -> Tensor:
        return data(*shape).to(dtype)

    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    lead_q, lead_k = ((total_q,), (total_k,)) if f.packed else ((batch, n_q), (batch, n_k))
    leaves = {"q": cut(*lead_q, h, f.d), "k": cut(*lead_k, hk, f.d), "v": cut(*lead_k, hk, f.dv)}
    if f.mod:
        for name, shape in MODS[f.mod][0].items():
            leaves[name] = data(*(size.get(n, n) for n in shape), scale=0.5)
    if f.alibi:
        leaves["alibi"] = data(*([batch] if f.alibi == "bh" else []), h, scale=0.1).abs()
    if f.bias is not None:
        axes = zip("bhij", (batch, h, max_q, max_k), strict=True)
        leaves["bias"] = cut(*(n if axis in f.bias else 1 for axis, n in axes))
    if f.sinks:
        leaves["sinks"] = data(h)
    longer = max(max_q, max_k, 1)
    fixed = {
        "ids": torch.randint(0, 3, (batch, longer), device=device).sort(-1).values.to(torch.int32),
        "prefix": torch.randint(0, longer + 1, (batch,), device=device).to(torch.int32),
    }
    window = tuple(r.randrange(0, longest) if bounded else None for bounded in f.band)
    dout = cut(*lead_q, h, f.dv)
    dlse = data(*((h, total_q) if f.packed else (batch, h, n_q)))
    cu = None
    if f.packed:
        cu = tuple(
            torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device)
            for x in zip(*lengths, strict=True)
        )
    return Call(f, lengths, leaves, fixed, window, dout, dlse, cu)


SEED, P, CAP = 11, 0.3, 1.5


def run(call: Call, backend: str) -> dict[str, Tensor]:
    """out, lse and the gradient of every leaf, by tilewise."""
    f = call.features
    x = {name: t.detach().clone().requires_grad_() for name, t in call.leaves.items()}
    options: dict[str, Any] = {"window": call.window, "backend": backend, "return_lse": True}
    if f.softcap:
        options["softcap"] = CAP
    if f.mod:
        options["score_mod"] = MODS[f.mod][1](*(x[name] for name in MODS[f.mod][0]))
    for argument, name in (("alibi_slopes", "alibi"), ("bias", "bias"), ("sinks", "sinks")):
        if name in x:
            options[argument] = x[name]
    if f.dropout:
        options |= {"dropout_p": P, "seed": SEED}
    if f.mask:
        mod = MASKS[f.mask][0](call.fixed["ids"], call.fixed["prefix"])
        if f.blocks:
            n_q, n_k = call.lengths[0]
            reads_b = f.mask in ("document", "prefix_lm")
            mod = tilewise.block_mask(
                mod, n_q, n_k, batch=len(call.lengths) if reads_b else 1, block=(f.blocks, f.blocks),
                device=call.dout.device,
            )  # fmt: skip
        options["mask_mod"] = mod
    if call.cu is None:
        out, lse = tilewise.attention(x["q"], x["k"], x["v"], **options)
    else:
        longest = {
            n: max(m) for n, m in zip(("max_seqlen_q", "max_seqlen_k"), zip(*call.lengths, strict=True), strict=True)
        }
        out, lse = tilewise.attention_varlen(x["q"], x["k"], x["v"], *call.cu, **longest, **options)
    grads = torch.autograd.grad((out, lse), list(x.values()), (call.dout, call.dlse))
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(x, grads, strict=True))


def truth(call: Call, dtype: torch.dtype, slip: float = 0.0) -> dict[str, Tensor]:
    """The same by torch, all of it in one dtype; with `slip`, every weight and every row of them is off by so much."""
    x = {name: t.detach().to(dtype).requires_grad_() for name, t in call.leaves.items()}
    outs, logs = [], []
    start_q = start_k = 0
    for b, (n_q, n_k) in enumerate(call.lengths):
        if call.cu is None:
            q, k, v = x["q"][b], x["k"][b], x["v"][b]
        else:
            q = x["q"][start_q : start_q + n_q]
            k, v = (x[name][start_k : start_k + n_k] for name in "kv")
            start_q, start_k = start_q + n_q, start_k + n_k
        o, lse = _one(call, x, b, q, k, v, n_q, n_k, slip)
        outs.append(o)
        logs.append(lse)
    out = torch.stack(outs) if call.cu is None else torch.cat(outs)
    lse = torch.stack(logs) if call.cu is None else torch.cat(logs, -1)
    finite = lse.isfinite()
    loss = (out * call.dout.to(dtype)).sum() + (lse.masked_fill(~finite, 0.0) * call.dlse.to(dtype)).sum()
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(x, grads, strict=True))


def _one(
    call: Call, x: Leaves, b: int, q: Tensor, k: Tensor, v: Tensor, n_q: int, n_k: int, slip: float
) -> tuple[Tensor, Tensor]:
    """One sequence: q (n_q, H, D) -> out (n_q, H, Dv), lse (H, n_q)."""
    f = call.features
    group = f.heads[0] // f.heads[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    device = q.device
    h = torch.arange(f.heads[0], device=device)[:, None, None]
    i, j = torch.arange(n_q, device=device)[:, None], torch.arange(n_k, device=device)
    s = (q @ k.mT) * f.d**-0.5
    if f.softcap:
        s = CAP * torch.tanh(s / CAP)
    if f.mod:
        s = MODS[f.mod][2](s, b, h, i, j, *(x[name] for name in MODS[f.mod][0]))
    if f.alibi:
        slopes = x["alibi"][b] if f.alibi == "bh" else x["alibi"]
        s = s - slopes[:, None, None] * (i + n_k - n_q - j).abs()
    if f.bias is not None:
        bias = x["bias"][b if "b" in f.bias else 0]
        s = s + bias[:, : n_q if "i" in f.bias else 1, : n_k if "j" in f.bias else 1]
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    before, after = call.window
    if before is not None:
        seen = seen & (j >= i + n_k - n_q - before)
    if after is not None:
        seen = seen & (j <= i + n_k - n_q + after)
    if f.mask:
        seen = seen & MASKS[f.mask][1](b, h, i, j, **call.fixed)
    s = s.masked_fill(~seen, -torch.inf)
    sink = x["sinks"][:, None, None].expand(-1, n_q, 1) if f.sinks else s.new_full((f.heads[0], n_q, 1), -torch.inf)
    s = torch.cat([s, sink], -1)
    m = s.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    some = l.masked_fill(l == 0, 1.0)
    p = (p / some)[..., :-1]
    if slip:
        p = p * (1 + slip * torch.randn_like(p)) * (1 + slip * torch.randn_like(p[..., :1]))
    if f.dropout:
        keep = tilewise.dropout_mask(b + 1, f.heads[0], n_q, n_k, p=P, seed=SEED, device=device)[b]
        p = p * keep / (1 - P)
    lse = (m + some.log()).masked_fill(l == 0, -torch.inf).squeeze(-1)
    return (p @ v).transpose(0, 1), lse


def check(call: Call, backend: str, ulps: int = 8) -> None:
    """Every result within twice the error of torch's own in the same dtype, and a few roundings.

    The roundings: of the result, and of scores and lse in float32, from which the backward recomputes each weight, by
    so many `ulps`: more where float32 products are made of three tf32 ones.
    lse itself is held to torch in float32, except where tanh is the hardware's, as fine as half precision.
    """
    dtype = getattr(torch, call.features.dtype)
    ours, exact, peer = run(call, backend), truth(call, torch.float64), truth(call, dtype)
    slipped = truth(call, torch.float64, slip=ulps * torch.finfo(torch.float32).eps)
    if not (call.features.softcap and backend == "triton"):
        peer["lse"] = truth(call, torch.float32)["lse"]
    for name, x in ours.items():
        y = exact[name]
        assert x.shape == y.shape, name
        assert torch.equal(x.isfinite(), y.isfinite()), f"{name} of {call.features}: not finite"
        if not y.isfinite().any():
            continue
        each = (((t.double() - y).abs()[y.isfinite()]).max().item() for t in (x, peer[name], slipped[name]))
        error, theirs, slip = each
        noise = ulps * torch.finfo(torch.float32).eps
        unit = noise if name == "lse" else max(noise, torch.finfo(dtype).eps)
        floor = slip + unit * max(1.0, y[y.isfinite()].abs().max().item())
        assert error <= 2 * theirs + floor, f"{name} of {call.features}: {error:.2e}, torch {theirs:.2e}"
