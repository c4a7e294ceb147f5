"""Calls of `tilewise.sparse`: drawn, written as Python, and judged by dense attention in float64 over the pairs that
each function's definition names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

FUNCTIONS = ("moba", "nsa", "topk", "neighborhood")
TIE = 1e-3  # two blocks whose weights differ by less may be chosen the other way round
BAD = {
    "moba": ("block_size=0", "top_k=0", "top_k=True", "block_size=5"),
    "nsa": ("window=0", "num_blocks=0", "block_size=5", "block_size=-4"),
    "topk": ("indices=indices.float()", "indices=indices[:, :, :, :, None]", "indices=torch.full_like(indices, 99)"),
    "neighborhood": ("kernel_size=99", "kernel_size=0", "dilation=(1, 1, 1, 1)", "causal=1"),
}


@dataclass(frozen=True)
class SparseCase:
    """space: tokens along each axis, of all but neighborhood one; lengths: those of packed sequences, () for a batch.
    size: the block or the window's kernel; most: blocks or keys of a query. The defaults are the simplest."""

    seed: int = 0
    backend: str = "auto"
    device: str = "cpu"
    function: str = "moba"
    mode: str = "call"
    dtype: str = "float32"
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
    bad: tuple[str, str] | None = None

    hidden: ClassVar[Any] = None
    deterministic: ClassVar[bool] = False

    def dict(self) -> dict[str, Any]:
        """What differs from the simplest case."""
        simplest = asdict(SparseCase())
        return {name: x for name, x in asdict(self).items() if x != simplest[name]}

    def features(self) -> frozenset[str]:
        return frozenset(self.dict()) - {"seed", "space", "lengths", "kv_heads", "d", "dv", "device", "backend", "size"}

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.lengths else prod(self.space)

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before heads."""
        return (self.tokens,) if self.lengths else (self.batch, *self.space)


def draw(r: random.Random, dtypes: tuple[str, ...], small: bool) -> SparseCase:
    """A call that is right, or one with an argument that is wrong; `small` for the interpreter."""
    function, most = r.choice(FUNCTIONS), 16 if small else 60
    case = SparseCase(
        function=function, mode=r.choice(("call", "backward", "backward", "no_grad")), dtype=r.choice(dtypes),
        batch=r.choice((1, 1, 2)), kv_heads=r.choice((1, 2)), group=r.choice((1, 2, 3)), d=r.choice((2, 4, 8, 16)),
        dv=r.choice((2, 4, 8, 16)), scale=r.choice((0.3, -0.5)) if r.random() < 0.2 else None,
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
        case = replace(case, space=(r.randint(1, most),), most=r.choice((1, 3, 8, 20)))
    else:
        block = r.choice((1, 2, 4, 7))
        case = replace(case, size=(block,), space=(block * r.randint(1, most // block),))
        if r.random() < 0.4:
            case = replace(case, batch=1, lengths=tuple(r.choice((0, 1, r.randint(1, most))) for _ in range(3)))
            case = case if sum(case.lengths) else replace(case, lengths=(3,))
    if r.random() < 0.15 and not (function in ("moba", "nsa") and case.lengths):
        name, _, value = r.choice(BAD[function]).partition("=")
        case = replace(case, space=(12,)) if name == "block_size" else case
        return replace(case, bad=(name, value), mode="call")
    return case


def code(case: SparseCase) -> str:
    """The Python of a case, which leaves `outs` and, in mode "backward", `grads`."""
    heads, cast = case.kv_heads * case.group, "" if case.dtype == "float32" else f".to(torch.{case.dtype})"
    lines = ["import torch, tilewise", "from tilewise import sparse"]
    if case.device != "cpu":
        lines.append(f"torch.set_default_device({case.device!r})")
    lines.append(f"torch.manual_seed({case.seed})")
    shapes = {"q": (heads, case.d), "k": (case.kv_heads, case.d), "v": (case.kv_heads, case.dv)}
    lines += [f"{name} = torch.randn{(*case.lead, *shape)}{cast}" for name, shape in shapes.items()]
    leaves, arguments = ["q", "k", "v"], ["q", "k", "v"]
    options: dict[str, Any]
    if case.function == "moba":
        options = {"block_size": case.size[0], "top_k": case.most}
    elif case.function == "nsa":
        lines.append(f"gates = tuple(torch.rand{(*case.lead, heads)}{cast} for _ in range(3))")
        arguments.append("gates")
        leaves.append("*gates")
        options = {"block_size": case.size[0], "num_blocks": case.most, "window": case.window}
    elif case.function == "topk":
        n = case.space[0]
        lines.append(f"order = torch.rand{(case.batch, n, case.kv_heads, n)}.argsort(-1)[..., :{case.most}]")
        lines.append("indices = torch.where(torch.rand(order.shape) < 0.2, -1, order)")
        options = {"indices": "indices"}
    else:
        options = {"kernel_size": case.size, "dilation": case.dilation, "causal": case.causal}
    if case.lengths:
        ends = [sum(case.lengths[:n]) for n in range(len(case.lengths) + 1)]
        options["cu_seqlens"] = f"torch.tensor({ends}, dtype=torch.int32)"
    if case.scale is not None:
        options["scale"] = case.scale
    if case.backend != "auto":
        options["backend"] = repr(case.backend)
    if case.bad is not None:
        options[case.bad[0]] = case.bad[1]
    said = ", ".join([*arguments, *(f"{name}={x}" for name, x in options.items())])
    call = f"outs = (sparse.{case.function}({said}),)"
    if case.mode == "no_grad":
        return "\n".join([*lines, "with torch.no_grad():", f"    {call}"])
    if case.mode == "call":
        return "\n".join([*lines, call])
    names = ", ".join(leaves)
    return "\n".join(
        [
            *lines,
            f"leaves = [x.requires_grad_() for x in ({names},)]",
            call,
            f"dout = torch.randn(outs[0].shape){cast}",
            "grads = torch.autograd.grad(outs[0], leaves, dout, allow_unused=True, materialize_grads=True)",
        ]
    )


def fault(case: SparseCase, found: dict[str, Any]) -> tuple[str, str] | None:
    """The first result that is wrong, and how: an error above twice that of dense attention in the call's own dtype."""
    dtype = getattr(torch, case.dtype)
    pairs = visible(case, found)
    if pairs is None:  # a choice between equals
        return None
    exact, peer = (results(case, found, pairs, x) for x in (torch.float64, dtype))
    ours = dict(zip(exact, (*found["outs"], *found.get("grads", ())), strict=True))
    for name, x in ours.items():
        if x.shape != exact[name].shape or x.dtype != dtype:
            return name, f"{name}: {x.dtype} {tuple(x.shape)}, not {dtype} {tuple(exact[name].shape)}"
        error, torchs = ((y.detach().double() - exact[name]).abs().max().item() for y in (x, peer[name]))
        small = 16 * torch.finfo(dtype).eps * max(1.0, exact[name].abs().max().item())
        if not error <= 2 * torchs + small:
            return name, f"{name}: error {error:.1e}, torch's {torchs:.1e}"
    return None


def results(case: SparseCase, found: dict[str, Any], pairs: list[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, and the gradients of `leaves`, of dense attention over `pairs`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in found.get("leaves", [found[n] for n in "qkv"])]
    q, k, v, *gates = leaves
    if not gates and case.function == "nsa":
        gates = [x.to(dtype) for x in found["gates"]]
    rows = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    keys, values = (x.transpose(0, 1).repeat_interleave(case.group, 0) for x in rows[1:])
    queries, scale = rows[0].transpose(0, 1), case.d**-0.5 if case.scale is None else case.scale
    if case.function != "nsa":
        out = _attended(queries, keys, values, pairs[0], scale)
    else:
        means = pairs[3].to(dtype)
        coarse = _attended(queries, means @ keys, means @ values, pairs[0], scale)
        fine = [_attended(queries, keys, values, seen, scale) for seen in pairs[1:3]]
        every = zip((coarse, *fine), gates, strict=True)
        out = sum((x * g.reshape(-1, g.shape[-1]).T[..., None] for x, g in every), torch.zeros_like(coarse))
    out = out.transpose(0, 1).reshape(*case.lead, *out.transpose(0, 1).shape[1:])
    if "grads" not in found:
        return {"out": out.detach()}
    grads = torch.autograd.grad(out, leaves, found["dout"].to(dtype), allow_unused=True, materialize_grads=True)
    return {"out": out.detach()} | {f"gradient {n}": g for n, g in enumerate(grads)}


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """(H, T, Dv); 0 for rows that see nothing."""
    s = (scale * (q @ k.mT)).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    return s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def visible(case: SparseCase, found: dict[str, Any]) -> list[Any] | None:
    """Which of all tokens, counted through batch rows and sequences, each head of each sees, (H, T, T). Of nsa: which
    means of blocks, which tokens of its selected blocks, which of its window, and the blocks as weights of tokens."""
    heads = case.kv_heads * case.group
    lengths = case.lengths or (case.tokens,) * case.batch
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    q, k = (found[n].detach().double().reshape(-1, *found[n].shape[-2:]).transpose(0, 1).cpu() for n in "qk")
    total = ends[-1]
    seen = torch.zeros(heads, total, total, dtype=torch.bool)
    if case.function == "topk":
        for (b, i, g, _), j in zip(torch.cartesian_prod(*map(torch.arange, found["indices"].shape)).tolist(),
                                   found["indices"].flatten().tolist(), strict=True):  # fmt: skip
            if j >= 0:
                seen[g * case.group : (g + 1) * case.group, ends[b] + i, ends[b] + j] = True
    elif case.function == "neighborhood":
        each = [_axis(*x) for x in zip(case.space, case.size, case.dilation, case.causal, strict=True)]
        grid = each[0]
        for axis in each[1:]:
            grid = (grid[:, None, :, None] & axis[None, :, None, :]).flatten(0, 1).flatten(1, 2)
        for start, end in pairwise(ends):
            seen[:, start:end, start:end] = grid
    if case.function in ("topk", "neighborhood"):
        return [seen.to(found["q"].device)]
    return _blocks(case, q, k, ends, seen, found["q"].device)


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


def _blocks(case: SparseCase, q: Tensor, k: Tensor, ends: list[int], seen: Tensor, device: Any) -> list[Any] | None:
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
    scores = q @ (means @ keys).mT  # (H, T, blocks)
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
    found = [seen] if case.function == "moba" else [coarse, seen, near, means]
    return [x.to(device) for x in found]


def candidates(case: SparseCase) -> Iterator[SparseCase]:
    """Simpler cases: each choice at its simplest, a sequence fewer."""
    if case.bad is not None:
        return
    simplest = SparseCase()
    for name in case.dict():
        if name in ("mode", "dtype", "batch", "kv_heads", "group", "d", "dv", "scale", "window"):
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
