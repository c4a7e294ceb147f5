"""Random combinations of score terms, with data, run by tilewise; `features_budget` knows the truth about them.

The mods of `MODS` and `MASKS` are written twice: once for tilewise, once as plain torch for the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tests.cases import laid_out

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
        lambda s, b, h, at, j, table: s + table[_t5_bucket((j - at).clamp(-12, 12)), h],
    ),
}


ALIGNED = ("t5",)  # mods that are built in, and count queries as the masks below do
# mods whose derivative jumps: where, as a score at which the heads of odd number bend
KINKS = {"per_key": 1.5}


def _t5_bucket(distance: Tensor) -> Tensor:
    """8 buckets, both ways, from the formula of the paper's code."""
    n = distance.abs()
    large = 2 + (torch.log(n.clamp(min=1).float() / 2) / torch.log(torch.tensor(6.0)) * 2).long()
    return torch.where(n < 2, n, large.clamp(max=3)) + 4 * (distance > 0)


# name -> (tilewise's, torch's); all are built in, and count queries by the key position `at` which they sit
MASKS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "document": (
        lambda ids, prefix: tilewise.mods.document(ids=ids),
        lambda b, h, at, j, ids, prefix: ids[b, at.clamp(min=0)] == ids[b, j],
    ),
    "prefix_lm": (
        lambda ids, prefix: tilewise.mods.prefix_lm(prefix),
        lambda b, h, at, j, ids, prefix: (j < prefix[b]) | (j <= at),
    ),
    "window_with_globals": (
        lambda ids, prefix: tilewise.mods.window_with_globals(9, 3),
        lambda b, h, at, j, ids, prefix: ((at - j).abs() <= 9) | (j < 3) | (at < 3),
    ),
    "dilated_window": (
        lambda ids, prefix: tilewise.mods.dilated_window(5, 3),
        lambda b, h, at, j, ids, prefix: ((at - j).abs() <= 15) & ((at - j) % 3 == 0),
    ),
    "neighbourhood_2d": (
        lambda ids, prefix: tilewise.mods.neighbourhood_2d(6, 1),
        lambda b, h, at, j, ids, prefix: ((at // 6 - j // 6).abs() <= 1) & ((at % 6 - j % 6).abs() <= 1),
    ),
    "block_diagonal": (
        lambda ids, prefix: tilewise.mods.block_diagonal(11),
        lambda b, h, at, j, ids, prefix: at // 11 == j // 11,
    ),
    "strided_sparse": (
        lambda ids, prefix: tilewise.mods.strided_sparse(5),
        lambda b, h, at, j, ids, prefix: (j <= at) & ((at - j < 5) | (j % 5 == 4)),
    ),
}


# each term by itself, as fields of Features
ALONE: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": True},
    **{f"mod-{name}": {"mod": name} for name in MODS},
    **{f"alibi-{axes}": {"alibi": axes} for axes in ("h", "bh")},
    **{f"bias-{axes}": {"bias": axes} for axes in ("bhij", "hij", "ij", "bj", "hi", "h", "")},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    **{f"mask-{name}": {"mask": name, "blocks": 16} for name in MASKS},
}


@dataclass(frozen=True)
class Features:
    """What a call has: compile-time choices only, so that many calls share the kernels."""

    softcap: bool = False
    mod: str | None = None
    alibi: str | None = None  # the axes of the slopes, "h" or "bh"
    bias: str | None = None  # the axes that do not broadcast, of "bhij"
    turned: bool = False  # the memory of the bias runs along the queries, not along the keys
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
    scale: float | None = None
    layout: str = "bshd"  # of q, k, v and dout: one of `cases.LAYOUTS`
    max_logit: bool = False
    wanted: tuple[str, ...] = ()  # the leaves that get gradients; all if there is none of these

    @property
    def factor(self) -> float:
        """What q.k is multiplied by."""
        return self.d**-0.5 if self.scale is None else self.scale

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
            blocks=blocks if mask and r.random() < 0.5 else 0,
            band=r.choice([(False, False), (False, True), (True, True), (True, False)]),
            packed=packed,
            heads=r.choice([(2, 2), (4, 2), (3, 1)]),
            d=r.choice(dims),
            dv=r.choice(dims),
            dtype=r.choice(dtypes),
            turned=r.random() < 0.5,
        )

    def having(self, n: int) -> Features:
        """The same with the n-th of the terms in ALONE, so that as many combinations as there are terms have all."""
        term = list(ALONE.values())[n % len(ALONE)]
        return replace(self, **{name: x for name, x in term.items() if name != "blocks"})

    @property
    def names(self) -> list[str]:
        """What the call has, in words: ["float32", "softcap", "mod relative", ...]"""
        named = {"mod": self.mod, "mask": self.mask}
        plain = {"softcap": self.softcap, "alibi": self.alibi, "bias": self.bias, "sinks": self.sinks,
                 "dropout": self.dropout, "block mask": self.blocks, "packed": self.packed}  # fmt: skip
        return [
            self.dtype,
            *(f"{kind} {x}" for kind, x in named.items() if x),
            *(name for name, x in plain.items() if x),
        ]


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

    @property
    def results(self) -> list[str]:
        """The names of what `run` returns."""
        return ["out", "lse", *(["max_logit"] if self.features.max_logit else []), *self.wanted]

    @property
    def wanted(self) -> list[str]:
        """The leaves that get gradients."""
        return [name for name in self.leaves if name in self.features.wanted] or list(self.leaves)


def make(features: Features, seed: int, longest: int, device: str, queries: int = 0) -> Call:
    """Random lengths and data; other q until no score lies within rounding of a kink, where a slope may be either.
    `queries`: no sequence has more, if there is such a number."""
    call = _draw(features, seed, longest, device, queries)
    return away_from_kinks(call)


def away_from_kinks(call: Call) -> Call:
    """The call with other q, if a score lies near a kink."""
    while _is_near_kink(call):
        q = call.leaves["q"]
        call = replace(call, leaves=call.leaves | {"q": torch.randn_like(q).masked_fill(q.isnan(), torch.nan)})
    return call


def _draw(f: Features, seed: int, longest: int, device: str, queries: int) -> Call:
    r = random.Random(seed)
    odd = lambda: r.randrange(1, longest, 2)  # noqa: E731 - strides that divide by 16 would be other kernels
    batch = r.choice([2, 3])
    n_q, n_k = odd(), odd()
    lengths = [(odd() - 1, odd() - 1) for _ in range(batch)] if f.packed else [(n_q, n_k)] * batch
    if f.packed:
        lengths[0] = (odd(), odd())
    if queries:
        n_q = 1 + n_q % queries
        lengths = [(a % (queries + 1), b) for a, b in lengths] if f.packed else [(n_q, n_k)] * batch
    before, after = (r.randrange(0, longest) if bounded else None for bounded in f.band)
    return data(f, lengths, (before, after), seed, device)


def data(
    f: Features,
    lengths: list[tuple[int, int]],
    window: tuple[int | None, int | None],
    seed: int,
    device: str,
    padding: int = 0,
) -> Call:
    """Random data. `padding`: so many tokens of packed tensors belong to no sequence, and are NaN."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, f.dtype)
    batch = len(lengths)
    max_q, max_k = (max(x) for x in zip(*lengths, strict=True))
    h, hk = f.heads
    size = {"B": batch, "H": h}

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device) * scale

    def tokens(name: str, heads: int, dim: int) -> Tensor:
        n = 1 if name == "k" else 0
        if not f.packed:
            return laid_out((batch, lengths[0][n], heads, dim), f.layout, dtype, device, generator)
        total = sum(x[n] for x in lengths)
        x = laid_out((1, total + padding, heads, dim), f.layout, dtype, device, generator)[0]
        x[total:] = torch.nan
        return x

    leaves = {"q": tokens("q", h, f.d), "k": tokens("k", hk, f.d), "v": tokens("k", hk, f.dv)}
    if f.mod:
        for name, shape in MODS[f.mod][0].items():
            leaves[name] = randn(*(size.get(n, n) for n in shape), scale=0.5)
    if f.alibi:
        leaves["alibi"] = randn(*([batch] if f.alibi == "bh" else []), h, scale=0.1).abs()
    if f.bias is not None:
        axes = zip("bhij", (batch, h, max_q, max_k), strict=True)
        bias = randn(*(n if axis in f.bias else 1 for axis, n in axes)).to(dtype)
        leaves["bias"] = bias.mT.contiguous().mT if f.turned else bias
    if f.sinks:
        leaves["sinks"] = randn(h)
    longer = max(max_q, max_k, 1)
    fixed = {
        "ids": torch.randint(0, 3, (batch, longer), device=device).sort(-1).values.to(torch.int32),
        "prefix": torch.randint(0, longer + 1, (batch,), device=device).to(torch.int32),
    }
    dout = tokens("q", h, f.dv)
    dlse = randn(*dout.shape[:-1]).transpose(-1, -2).contiguous()
    cu = None
    if f.packed:
        cu = tuple(
            torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device)
            for x in zip(*lengths, strict=True)
        )
    return Call(f, lengths, leaves, fixed, window, dout, dlse, cu)


SEED, P, CAP = 11, 0.3, 1.5


class Sequence(NamedTuple):
    """One sequence: where its tokens lie, and its tensors, the keys once for each head: (H, n, D)."""

    b: int
    rows: int | slice
    keys: int | slice
    q: Tensor
    k: Tensor
    v: Tensor


def sequences(call: Call, x: Leaves) -> Iterator[Sequence]:
    group = call.features.heads[0] // call.features.heads[1]
    start_q = start_k = 0
    for b, (n_q, n_k) in enumerate(call.lengths):
        rows, keys = (b, b) if call.cu is None else (slice(start_q, start_q + n_q), slice(start_k, start_k + n_k))
        start_q, start_k = start_q + n_q, start_k + n_k
        k, v = (x[name][keys].repeat_interleave(group, 1) for name in "kv")
        yield Sequence(b, rows, keys, *(t.transpose(0, 1) for t in (x["q"][rows], k, v)))


def score_error(call: Call, q: Tensor, k: Tensor, s: Tensor, sizes: Tensor) -> Tensor:
    """How wrong a kernel's score may be, (H, n_q, n_k), `s` after the softcap and at last of parts of these sizes.

    One rounding of float32 of the terms of q.k and of the parts; four for the hardware's exp2, good to 2^-22; and in
    half precision its tanh, good to 2^-11.
    """
    unit = torch.finfo(torch.float32).eps / 2
    error = unit * (4 + sizes + abs(call.features.factor) * (q.abs() @ k.abs().mT))
    return error + fast_tanh(call) * s.abs()


def fast_tanh(call: Call) -> float:
    """The relative error of tanh where the kernels take the hardware's, or 0."""
    return 2.0**-11 if call.features.softcap and call.features.dtype != "float32" else 0.0


def capped(call: Call, q: Tensor, k: Tensor) -> Tensor:
    s = (q @ k.mT) * call.features.factor
    return CAP * torch.tanh(s / CAP) if call.features.softcap else s


def _is_near_kink(call: Call) -> bool:
    kink = KINKS.get(call.features.mod or "")
    if kink is None:
        return False
    doubles = {name: call.leaves[name].double() for name in "qkv"}
    for x in sequences(call, doubles):
        s = capped(call, x.q, x.k)
        if ((s - kink).abs() < score_error(call, x.q, x.k, s, s.abs()))[1::2].any():
            return True
    return False


def attend(call: Call, x: Leaves, backend: str) -> tuple[Tensor, ...]:
    """(out, lse), and max_logit where it is asked for, of the call with these leaves, by tilewise."""
    f = call.features
    options: dict[str, Any] = {"window": call.window, "backend": backend, "return_lse": True}
    if f.scale is not None:
        options["scale"] = f.scale
    if f.softcap:
        options["softcap"] = CAP
    if f.max_logit:
        options["return_max_logit"] = True
    if f.mod:
        options["score_mod"] = MODS[f.mod][1](*(x[name] for name in MODS[f.mod][0]))
    for argument, name in (("alibi_slopes", "alibi"), ("bias", "bias"), ("sinks", "sinks")):
        if name in x:
            options[argument] = x[name]
    if f.dropout:
        options |= {"dropout_p": P, "seed": SEED}
    if f.mask:
        mod = MASKS[f.mask][0](call.fixed["ids"], call.fixed["prefix"])
        if f.blocks and call.cu is not None:
            mod = tilewise.block_mask_varlen(mod, *call.cu, window=call.window, block=(f.blocks, f.blocks))
        elif f.blocks:
            n_q, n_k = call.lengths[0]
            reads_b = f.mask in ("document", "prefix_lm")
            mod = tilewise.block_mask(
                mod, n_q, n_k, batch=len(call.lengths) if reads_b else 1, block=(f.blocks, f.blocks),
                device=call.dout.device,
            )  # fmt: skip
        options["mask_mod"] = mod
    if call.cu is None:
        return tilewise.attention(x["q"], x["k"], x["v"], **options)
    max_q, max_k = map(max, zip(*call.lengths, strict=True))
    return tilewise.attention_varlen(
        x["q"], x["k"], x["v"], *call.cu, max_seqlen_q=max_q, max_seqlen_k=max_k, **options
    )


def run(call: Call, backend: str, compiled: bool = False) -> dict[str, Tensor]:
    """out, lse, perhaps max_logit, and the gradient of every leaf that wants one, by tilewise."""
    wanted = call.wanted
    x = {name: t.detach().requires_grad_(name in wanted) for name, t in call.leaves.items()}
    function = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else attend
    out, lse, *others = function(call, x, backend)
    grads = torch.autograd.grad((out, lse), [x[name] for name in wanted], (call.dout, call.dlse))
    found = {"out": out.detach(), "lse": lse.detach()} | ({"max_logit": others[0]} if others else {})
    return found | dict(zip(wanted, grads, strict=True))
