"""Calls of `tilewise.sparse`: drawn, written as Python, and judged by dense attention in float64 over the pairs that
each function's definition names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise_lab.fuzz.budget import attended, excess
from tilewise_lab.fuzz.family import Drawn, options

Shapes = dict[str, tuple[int, ...]]
SIMPLER = (
    "mode", "dtype", "batch", "kv_heads", "group", "d", "dv", "scale", "window", "strided", "keys", "narrow",
    "return_lse", "extra",
)  # fmt: skip
FUNCTIONS = ("moba", "nsa", "topk", "neighborhood")
TIE = 1e-3  # two blocks whose weights differ by less may be chosen the other way round
ODD = "k=k.long()", "q=q.long()", "k=torch.cat([k, k], -1)", "k=k[:, :1, :, :0]", "v=k[..., :1, :0]"
BAD = {
    "moba": (
        *ODD, "block_size=0", "top_k=0", "top_k=True", "block_size=5", "gate=3",
    ),
    "nsa": (
        *ODD, "window=0", "num_blocks=0", "block_size=5", "block_size=-4", "gates=gates[:2]",
        "blocks=torch.full((*q.shape[:2], k.shape[2], 1), 2**32)",
        "blocks=torch.full((*q.shape[:2], k.shape[2], 1), 12)",
        "blocks=torch.zeros(*q.shape[:2], k.shape[2], 2, dtype=torch.int32)",
    ),
    "topk": (
        *ODD, "indices=indices.float()", "indices=indices[:, :, :, :, None]", "indices=torch.full_like(indices, 99)",
        "indices=torch.zeros_like(indices).repeat(1, 1, 1, 2)", "v=True", "v=99",
    ),
    "neighborhood": (*ODD, "kernel_size=99", "kernel_size=0", "dilation=(1, 1, 1, 1)", "causal=1"),
}  # fmt: skip
TRANSFORMS = ("func.grad", "jvp", "jvp of grad")
MODES = ("call", "no_grad", "backward", "backward", "create_graph", "create_graph", *TRANSFORMS)
EXTRAS = {"moba": ("gate",), "nsa": ("compressed", "blocks"), "topk": ("columns", "poison"), "neighborhood": ()}

SECOND = (
    "total = sum(g.sum() for g in grads) + 0 * sum(x.sum() for x in leaves)",
    "grads = *grads, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)",
)


@dataclass(frozen=True)
class SparseCase(Drawn):
    """space: tokens along each axis, of all but neighborhood one; lengths: those of packed sequences, () for a batch.
    size: the block or the window's kernel; most: blocks or keys of a query; keys: those of topk, 0 for as many as
    queries; extra: "gate" of moba; "compressed" or "blocks" of nsa; of topk "columns" (v is a number) or "poison" (NaN
    in keys that no query names). The defaults are the simplest."""

    function: str = "moba"
    batch: int = 1
    space: tuple[int, ...] = (4,)
    lengths: tuple[int, ...] = ()
    kv_heads: int = 1
    group: int = 1
    d: int = 4
    dv: int = 4
    size: tuple[int, ...] = (2,)
    most: int = 1
    window: int = 1
    dilation: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()
    scale: float | None = None
    strided: bool = False
    keys: int = 0
    narrow: bool = False
    return_lse: bool = False
    extra: str = ""
    bad: tuple[str, str] | None = None

    hidden: ClassVar[Any] = None
    deterministic: ClassVar[bool] = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.lengths else prod(self.space)

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before heads."""
        return (self.tokens,) if self.lengths else (self.batch, *self.space)

    @property
    def key_lead(self) -> tuple[int, ...]:
        return (self.batch, self.keys) if self.keys else self.lead

    @property
    def shapes(self) -> Shapes:
        heads, dv = self.kv_heads * self.group, min(self.dv, self.d) if self.extra == "columns" else self.dv
        return {
            "q": (*self.lead, heads, self.d),
            "k": (*self.key_lead, self.kv_heads, self.d),
            "v": (*self.key_lead, self.kv_heads, dv),
            "out": (*self.lead, heads, dv),
        }


def draw(r: random.Random, dtypes: tuple[str, ...], small: bool) -> SparseCase:
    """A call that is right, or one with an argument that is wrong; `small` for the interpreter."""
    function, most = r.choice(FUNCTIONS), 16 if small else 60
    case = SparseCase(
        function=function, mode=r.choice(MODES), dtype=r.choice(dtypes),
        batch=r.choice((1, 1, 2)), kv_heads=r.choice((1, 2)), group=r.choice((1, 2, 3)), d=r.choice((2, 4, 8, 16)),
        dv=r.choice((2, 4, 8, 16)), **options(r, "scale"),
        most=r.choice((1, 2, 3, 9)), window=r.choice((1, 3, 20, 100)),
    )  # fmt: skip
    if function == "neighborhood":
        axes = r.choice((1, 2, 2, 3))
        space = tuple(r.randint(2, {1: most, 2: 9, 3: 5}[axes]) for _ in range(axes))
        size = tuple(r.randint(1, n) for n in space)
        dilation = tuple(r.randint(1, n // m) for n, m in zip(space, size, strict=True))
        causal = tuple(r.random() < 0.3 for _ in space)
        case = replace(case, space=space, size=size, dilation=dilation, causal=causal)
    elif function == "topk":
        keys = r.choice((0, r.randint(1, most)))
        case = replace(case, space=(r.randint(1, most),), most=r.choice((1, 3, 8, 20)), keys=keys)
        case = replace(case, narrow=r.random() < 0.5, return_lse=r.random() < 0.3)
    else:
        block = r.choice((1, 2, 4, 7))
        case = replace(case, size=(block,), space=(block * r.randint(1, most // block),))
        if r.random() < 0.4:
            case = replace(case, batch=1, lengths=tuple(r.choice((0, 1, r.randint(1, most))) for _ in range(3)))
            case = case if sum(case.lengths) else replace(case, lengths=(3,))
    if function == "nsa" and case.scale == 0.0:  # all blocks are equal, and any choice of them is right
        case = replace(case, scale=0.3)
    case = replace(case, strided=r.random() < 0.3)
    if EXTRAS[function] and r.random() < 0.4 and not case.lengths:
        case = replace(case, extra=r.choice(EXTRAS[function]))
    if r.random() < 0.15 and not (function in ("moba", "nsa") and case.lengths):
        name, _, value = r.choice(BAD[function]).partition("=")
        case = replace(case, space=(12,)) if name == "block_size" else case
        return replace(case, bad=(name, value), mode="call")
    return case


def code(case: SparseCase) -> str:
    """The Python of a case, which leaves `outs`; with derivatives `grads`, after which "create_graph" leaves the
    gradients of their sum too."""
    lines = case.begin("from tilewise import sparse")
    names = [name for name in "qkv" if not (name == "v" and case.extra == "columns")]
    lines += [f"{name} = {_random(case, case.shapes[name])}" for name in names]
    arguments = {name: name for name in names} | ({} if "v" in names else {"v": str(case.shapes["v"][-1])})
    said = _said(case, lines, names)
    if case.bad is not None:
        (said if case.bad[0] not in arguments else arguments)[case.bad[0]] = case.bad[1]
    call = f"sparse.{case.function}({', '.join([*arguments.values(), *(f'{name}={x}' for name, x in said.items())])})"
    call = f"outs = {call}" if case.return_lse and case.bad is None else f"outs = ({call},)"
    if case.mode == "no_grad":
        return "\n".join([*lines, "with torch.no_grad():", f"    {call}"])
    if case.mode == "call":
        return "\n".join([*lines, call])
    douts = [f"dout = {_random(case, case.shapes['out'])}", "douts = [dout]"]
    if case.return_lse:
        douts[1] = f"douts = [dout, torch.randn({case.batch}, {case.kv_heads * case.group}, {case.tokens})]"
        douts[1] = douts[1][:-1] + ".double()]" if case.dtype == "float64" else douts[1]
    lines.append(f"leaves = [{', '.join(names)}]")
    if case.mode in TRANSFORMS:
        return "\n".join([*lines, *douts, *_transformed(case, names, call)])
    return "\n".join(
        [
            *lines,
            "leaves = [x.requires_grad_() for x in leaves]",
            call,
            *douts,
            f"more = dict(allow_unused=True, materialize_grads=True, create_graph={case.mode == 'create_graph'})",
            "grads = torch.autograd.grad(outs, leaves, douts, **more)",
            *(SECOND if case.mode == "create_graph" else ()),
        ]
    )


def _transformed(case: SparseCase, names: list[str], call: str) -> list[str]:
    """The lines that differentiate the call by `torch.func`, with tangents `along`."""
    named = [name.removeprefix("*") for name in names]
    counts = {"gates": 3, "compressed": 2}
    starts = [sum(counts.get(name, 1) for name in named[:n]) for n in range(len(named))]
    taken = [
        f"x[{a}:{a + counts[name]}]" if name in counts else f"x[{a}]" for name, a in zip(named, starts, strict=True)
    ]
    lines = ["def f(*x):", f"    {', '.join(named)} = {', '.join(taken)}", f"    {call}", "    return tuple(outs)"]
    lines.append("along = tuple(torch.randn_like(x) for x in leaves)")
    if case.mode == "jvp":
        return [*lines, "outs, grads = torch.func.jvp(f, tuple(leaves), along)"]
    lines.append(
        "grad = torch.func.grad(lambda *x: sum((y * g).sum() for y, g in zip(f(*x), douts)), (*range(len(leaves)),))"
    )
    lines.append("outs = f(*leaves)")
    if case.mode == "func.grad":
        return [*lines, "grads = grad(*leaves)"]
    return [*lines, "_, grads = torch.func.jvp(grad, tuple(leaves), along)"]


def _random(case: SparseCase, shape: tuple[int, ...]) -> str:
    """A tensor of random numbers; if `strided` the axis before heads comes after them in memory."""
    cast = case.cast
    if case.strided:
        return f"torch.randn{(*shape[:-3], shape[-2], shape[-3], shape[-1])}{cast}.transpose(-2, -3)"
    return f"torch.randn{shape}{cast}"


def _said(case: SparseCase, lines: list[str], leaves: list[str]) -> dict[str, Any]:
    """The keyword arguments. Adds the lines that make them, and their tensors that have gradients."""
    heads, cast = case.kv_heads * case.group, case.cast
    said: dict[str, Any]
    if case.function == "moba":
        said = {"block_size": case.size[0], "top_k": case.most}
        if case.extra == "gate":
            said["gate"] = "lambda q, k, n: -sparse.mean_key_gate(q, k, n)"
    elif case.function == "nsa":
        lines.append(f"gates = tuple(torch.rand{(*case.lead, heads)}{cast} for _ in range(3))")
        leaves.append("*gates")
        said = {"gates": "gates", "block_size": case.size[0], "num_blocks": case.most, "window": case.window}
        count = case.tokens // case.size[0]
        if case.extra == "compressed":
            shapes = [(case.batch, count, *case.shapes[name][2:]) for name in "kv"]
            lines.append(f"compressed = {_random(case, shapes[0])}, {_random(case, shapes[1])}")
            leaves.append("*compressed")
        elif case.extra == "blocks":
            lines.append(f"order = torch.rand{(*case.lead, case.kv_heads, count)}.argsort(-1)[..., :{case.most}]")
            lines.append(f"own = torch.arange({case.tokens})[:, None, None] // {case.size[0]}")
            lines.append("blocks = torch.where(order <= own, order, -1)")
        if case.extra:
            said[case.extra] = case.extra
    elif case.function == "topk":
        keys = case.key_lead[1]
        lines.append(f"order = torch.rand{(*case.lead, case.kv_heads, keys)}.argsort(-1)[..., :{case.most}]")
        narrow = ".int()" if case.narrow else ""
        lines.append(f"indices = torch.where(torch.rand(order.shape) < 0.2, -1, order){narrow}")
        said = {"indices": "indices"} | ({"return_lse": True} if case.return_lse else {})
        if case.extra == "poison":
            named = f"torch.where(indices < 0, {keys}, indices).long().transpose(2, 3).flatten(1, 2)"
            zeros = f"torch.zeros({case.batch}, {keys + 1}, {case.kv_heads}, dtype=torch.bool)"
            lines.append(f"unnamed = ~{zeros}.scatter(1, {named}, True)[:, :-1]")
            lines.append("k[unnamed], v[unnamed] = torch.nan, torch.nan")
    else:
        said = {"kernel_size": case.size, "dilation": case.dilation, "causal": case.causal}
    if case.lengths:
        ends = [sum(case.lengths[:n]) for n in range(len(case.lengths) + 1)]
        said["cu_seqlens"] = f"torch.tensor({ends}, dtype=torch.int32)"
    if case.scale is not None:
        said["scale"] = case.scale
    if case.backend != "auto":
        said["backend"] = repr(case.backend)
    return said


def fault(case: SparseCase, found: dict[str, Any]) -> tuple[str, str] | None:
    """The first result that is wrong, and how: an error above twice that of dense attention in the call's own dtype."""
    dtype = getattr(torch, case.dtype)
    pairs = visible(case, found)
    if pairs is None:  # a choice between equals
        return None
    exact, peer = (results(case, found, pairs, x) for x in (torch.float64, dtype))
    ours = dict(zip(exact, (*found["outs"], *found.get("grads", ())), strict=True))
    wrong = excess(ours, exact, peer, dtype)
    return None if wrong is None else (wrong.partition(":")[0], wrong)


def results(case: SparseCase, found: dict[str, Any], pairs: list[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse if it is wanted, and the gradients of `leaves`, of dense attention over `pairs`."""
    names = ["q", "k", *(["v"] if case.extra != "columns" else [])]
    more = [*found.get("gates", ()), *found.get("compressed", ())]
    leaves = [x.detach().to(dtype).nan_to_num(nan=0.0).requires_grad_() for x in (*(found[n] for n in names), *more)]
    x = dict(zip(names, leaves, strict=False))
    x.setdefault("v", x["k"][..., : case.shapes["v"][-1]])
    queries = x["q"].reshape(-1, *x["q"].shape[-2:]).transpose(0, 1)
    keys, values = (_by_head(case, x[name]) for name in "kv")
    scale = case.d**-0.5 if case.scale is None else case.scale
    if case.function != "nsa":
        out, lse = attended(queries, keys, values, pairs[0], scale)
    else:
        gates, compressed = leaves[3:6], leaves[6:]
        means = pairs[3].to(dtype)
        blocks = [_by_head(case, t) for t in compressed] if compressed else [means @ keys, means @ values]
        coarse, lse = attended(queries, blocks[0], blocks[1], pairs[0], scale)
        fine = [attended(queries, keys, values, seen, scale)[0] for seen in pairs[1:3]]
        every = zip((coarse, *fine), gates, strict=True)
        out = sum((o * g.reshape(-1, g.shape[-1]).T[..., None] for o, g in every), torch.zeros_like(coarse))
    out = out.transpose(0, 1).reshape(case.shapes["out"])
    outs = {"out": out}
    if case.return_lse:
        outs["lse"] = lse.unflatten(1, (case.batch, -1)).transpose(0, 1)
    told = {name: y.detach() for name, y in outs.items()}
    if "grads" not in found:
        return told
    if case.mode == "jvp":
        return told | _tangents(case, outs, leaves, [y.to(dtype) for y in found["along"]])
    douts = [y.to(dtype) for y in found["douts"]]
    again = case.mode in ("create_graph", "jvp of grad")
    zeros: Any = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad([*outs.values()], leaves, douts, create_graph=again, **zeros)
    if case.mode == "jvp of grad":  # the Hessian is symmetric
        total = sum((g * t.to(dtype)).sum() for g, t in zip(grads, found["along"], strict=True))
        grads = torch.autograd.grad(total + 0 * sum(x.sum() for x in leaves), leaves, **zeros)
    elif again:
        total = sum(g.sum() for g in grads) + 0 * sum(x.sum() for x in leaves)
        grads = *grads, *torch.autograd.grad(total, leaves, **zeros)
    return told | {f"gradient {n}": g for n, g in enumerate(grads)}


def _tangents(
    case: SparseCase, outs: dict[str, Tensor], leaves: list[Tensor], along: list[Tensor]
) -> dict[str, Tensor]:
    """The tangents of the results: the derivatives, by cotangents, of what these give."""
    found = {}
    for name, y in outs.items():
        y = y.masked_fill(y.detach().isinf(), 0.0)
        weights = torch.zeros_like(y, requires_grad=True)
        grads = torch.autograd.grad(
            y, leaves, weights, create_graph=True, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        total = sum((g * t).sum() for g, t in zip(grads, along, strict=True)) + 0 * weights.sum()
        (found[f"tangent of {name}"],) = torch.autograd.grad(total, weights)
    return found


def _by_head(case: SparseCase, x: Tensor) -> Tensor:
    """Keys or values of all tokens, (H, T, D)."""
    return x.reshape(-1, *x.shape[-2:]).transpose(0, 1).repeat_interleave(case.group, 0)


def visible(case: SparseCase, found: dict[str, Any]) -> list[Any] | None:
    """Which of all tokens, counted through batch rows and sequences, each head of each sees, (H, T, T). Of nsa: which
    means of blocks, which tokens of its selected blocks, which of its window, and the blocks as weights of tokens."""
    heads = case.kv_heads * case.group
    lengths = case.lengths or (case.tokens,) * case.batch
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    q, k = (found[n].detach().double().reshape(-1, *found[n].shape[-2:]).transpose(0, 1).cpu() for n in "qk")
    total = ends[-1]
    each = case.keys or total // case.batch
    seen = torch.zeros(heads, total, len(ends[1:]) * each if case.function == "topk" else total, dtype=torch.bool)
    if case.function == "topk":
        for (b, i, g, _), j in zip(torch.cartesian_prod(*map(torch.arange, found["indices"].shape)).tolist(),
                                   found["indices"].flatten().tolist(), strict=True):  # fmt: skip
            if j >= 0:
                seen[g * case.group : (g + 1) * case.group, ends[b] + i, b * each + j] = True
    elif case.function == "neighborhood":
        axes = [_axis(*x) for x in zip(case.space, case.size, case.dilation, case.causal, strict=True)]
        grid = axes[0]
        for axis in axes[1:]:
            grid = (grid[:, None, :, None] & axis[None, :, None, :]).flatten(0, 1).flatten(1, 2)
        for start, end in pairwise(ends):
            seen[:, start:end, start:end] = grid
    if case.function in ("topk", "neighborhood"):
        return [seen.to(found["q"].device)]
    return _blocks(case, q, k, ends, seen, found)


def _axis(length: int, size: int, step: int, causal: bool) -> Tensor:
    """Which places of an axis each place sees: NATTEN's definition, place by place."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for at in range(length):
        same = list(range(at % step, length, step))
        own = same.index(at)
        first = own - size + 1 if causal else min(max(own - size // 2, 0), len(same) - size)
        last = own if causal else first + size - 1
        seen[at, [same[n] for n in range(max(first, 0), last + 1)]] = True
    return seen


def _blocks(
    case: SparseCase, q: Tensor, k: Tensor, ends: list[int], seen: Tensor, found: dict[str, Any]
) -> list[Any] | None:
    """`visible` of moba and nsa; None where a choice is nearly a tie."""
    size = case.size[0]
    blocks = [(a, min(a + size, end), start) for start, end in pairwise(ends) for a in range(start, end, size)]
    total, heads = seen.shape[1], len(seen)
    means = torch.zeros(len(blocks), total, dtype=torch.float64)
    for n, (a, b, _) in enumerate(blocks):
        means[n, a:b] = 1 / (b - a)
    coarse = torch.zeros(heads, total, len(blocks), dtype=torch.bool)
    near = torch.zeros_like(seen)
    keys = k.repeat_interleave(case.group, 0)
    block_keys = means @ keys
    if "compressed" in found:
        block_keys = _by_head(case, found["compressed"][0].detach().double().cpu())
    scores = q @ block_keys.mT * (-1 if case.extra == "gate" else 1)  # (H, T, blocks)
    scale = case.d**-0.5 if case.scale is None else case.scale
    for i in range(total):
        start = max(x for x in ends[:-1] if x <= i)
        before = [n for n, (a, _, s) in enumerate(blocks) if s == start and a + size <= i + 1]
        own = next(n for n, (a, b, _) in enumerate(blocks) if a <= i < b)
        others = [n for n in before if n != own]
        coarse[:, i, before] = True
        near[:, i, max(start, i - case.window + 1) : i + 1] = True
        for g in range(case.kv_heads if case.function == "nsa" else heads):
            mine = slice(g * case.group, (g + 1) * case.group) if case.function == "nsa" else slice(g, g + 1)
            if "blocks" in found:
                row, at = divmod(i, case.space[0])
                for n in (start // size + c for c in found["blocks"][row, at, g].tolist() if c >= 0):
                    seen[mine, i, blocks[n][0] : min(blocks[n][1], i + 1)] = True
                continue
            weight = scores[mine, i].sum(0)
            if case.function == "nsa" and before:
                weight = torch.zeros(len(blocks), dtype=torch.float64)
                weight[before] = (scale * scores[mine, i][:, before]).softmax(-1).sum(0)
            ordered = sorted(others, key=lambda n: -float(weight[n]))
            count = case.most - 1
            if len(ordered) > count > 0 and weight[ordered[count - 1]] - weight[ordered[count]] < TIE:
                return None
            for n in (*ordered[:count], own):
                a, b, _ = blocks[n]
                seen[mine, i, a : min(b, i + 1)] = True
    every = [seen] if case.function == "moba" else [coarse, seen, near, means]
    return [x.to(found["q"].device) for x in every]


def candidates(case: SparseCase) -> Iterator[SparseCase]:
    """Simpler cases: each choice at its simplest, a sequence fewer."""
    if case.bad is not None:
        return
    simplest = SparseCase()
    for name in case.dict():
        if name in SIMPLER:
            yield replace(case, **{name: getattr(simplest, name)})
    if case.most > 1:
        yield replace(case, most=case.most // 2)
    for n in range(len(case.lengths) if len(case.lengths) > 1 else 0):
        if sum(fewer := case.lengths[:n] + case.lengths[n + 1 :]):
            yield replace(case, lengths=fewer)
    if case.function == "neighborhood":
        yield replace(case, dilation=(1,) * len(case.space))
        yield replace(case, causal=(False,) * len(case.space))
    elif case.space[0] >= 2 * case.size[0] and not case.lengths:
        yield replace(case, space=(case.space[0] // case.size[0] // 2 * case.size[0],))
