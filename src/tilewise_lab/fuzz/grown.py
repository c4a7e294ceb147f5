"""Block masks that are cut (`BlockMask.queries`) or grow (`BlockMask.grown`): the lists of their tiles, and attention
with them, against all pairs of the mask mod in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise_lab.fuzz.budget import attended, excess
from tilewise_lab.fuzz.family import Drawn, options
from tilewise_lab.fuzz.twins import MASK, MASK_BY_INDEX, Place

TWINS = MASK | MASK_BY_INDEX
BAD = (
    "mask.grown(-1)", "mask.grown(1.5)", "mask.grown('1')", "mask.grown(True)", "mask.queries(2, 2)",
    "mask.queries(-1, 2)", "mask.queries(0, 1.0)", "mask.queries(0, 1, n_k=0)", "mask.queries(0, None)",
    "mask.grown(1, mod=3)", "mask.grown(1, mod=tilewise.mods.block_diagonal(99))",
    "mask.queries(0, 1, mod=tilewise.mods.softcap(1.0))", "mask.queries(0, 1, mod=lambda i, j: i > j)",
)  # fmt: skip
SIMPLER = (
    "mode", "dtype", "heads", "group", "batch", "window", "causal", "longer", "kept", "return_lse", "block", "d", "dv",
)  # fmt: skip


class Part(NamedTuple):
    """The queries from `start` on of a sequence with `whole` (queries, keys), in calls with `own` ones."""

    start: int
    whole: tuple[int, int]
    own: tuple[int, int]


@dataclass(frozen=True)
class GrownCase(Drawn):
    """steps: (tokens,) by which the mask grows; (start, stop, keys) of the queries that it is cut to, keys 0 where they
    are not given. longer: the tensors of the mod grow with the sequence. kept: the mask is saved and loaded after each
    step. The defaults are the simplest."""

    batch: int = 1
    n_q: int = 16
    n_k: int = 16
    heads: int = 1
    group: int = 1
    d: int = 4
    dv: int = 4
    block: tuple[int, int] = (16, 16)
    mask_mod: str = "diagonal"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    steps: tuple[tuple[int, ...], ...] = ((1,),)
    longer: bool = False
    kept: bool = False
    return_lse: bool = False
    bad: tuple[str, str] | None = None

    hidden: ClassVar[Any] = None
    deterministic: ClassVar[bool] = False

    def features(self) -> frozenset[str]:
        return super().features() | {f"steps {len(step)}" for step in self.steps}

    @property
    def parts(self) -> list[Part]:
        """What the mask is of, before the steps and after each."""
        found, is_cut = [Part(0, (self.n_q, self.n_k), (self.n_q, self.n_k))], False
        for step in self.steps:
            start, whole, (n_q, n_k) = found[-1]
            if len(step) == 1:
                own = n_q + step[0], n_k + step[0]
            else:
                first, stop, keys = step
                more = max(0, stop - n_q)
                own = stop - first, keys or stop + n_k - n_q
                start, n_q, n_k = start + first, n_q + more, n_k + more
                whole, is_cut = whole if is_cut else (n_q, n_k), True
            found.append(Part(start, whole if is_cut else own, own))
        return found

    def tokens(self, part: Part) -> int:
        """The length of the mod's tensors that a part needs."""
        (n_q, n_k), (own_q, own_k) = part.whole, part.own
        return max(n_q, n_k, own_k, part.start + own_q, part.start + own_q + n_k - n_q)


def draw(r: random.Random, dtypes: tuple[str, ...], small: bool) -> GrownCase:
    """A call that is right, or steps with an argument that is wrong; `small` for the interpreter."""
    most = 24 if small else 70
    name = r.choice(list(TWINS))
    n_q = r.randint(1, most)
    n_k = n_q if r.random() < 0.5 else r.randint(1, most)
    case = GrownCase(
        mode=r.choice(("call", "no_grad", "backward")), dtype=r.choice(dtypes), batch=r.choice((1, 1, 2)), n_q=n_q,
        n_k=n_k, heads=r.choice((1, 2)), group=r.choice((1, 2)), d=r.choice((2, 4, 8)), dv=r.choice((2, 4, 8)),
        block=(r.choice((16, 32)), r.choice((16, 32) if small else (16, 32, 48))), mask_mod=name,
        steps=(), longer=r.random() < 0.4, kept=r.random() < 0.1, **options(r, "causal", "window", "return_lse"),
    )  # fmt: skip
    if "h" in TWINS[name].reads and case.heads * case.group == 1:
        case = replace(case, heads=2)
    if r.random() < 0.12:
        return replace(case, bad=("", r.choice(BAD)), n_k=n_q, mode="call")
    for _ in range(r.choice((1, 1, 2, 3))):
        case = replace(case, steps=(*case.steps, _step(r, case, 8 if small else 40)))
    if not small and r.random() < 0.03:
        case = replace(case, mode="compile", longer=False, kept=False)
    return case


def _step(r: random.Random, case: GrownCase, most: int) -> tuple[int, ...]:
    """One more step of the case that is right."""
    n_q, n_k = case.parts[-1].own
    if r.random() < 0.5:
        return (r.choice((0, 1, 1, 2, r.randint(0, most))),)
    least = max(1, n_q - n_k + 1)  # the first stop that leaves a key
    stop = max(least, r.choice((n_q, n_q + 1, r.randint(1, n_q), n_q + r.randint(1, most))))
    start = r.choice((0, stop - 1, r.randint(0, stop - 1)))
    is_bound = case.causal or case.window not in (None, (None, None))
    keys = r.randint(1, max(n_k, stop + n_k - n_q)) if not is_bound and r.random() < 0.3 else 0
    return start, stop, keys


def code(case: GrownCase) -> str:
    """The Python of a case, which leaves `masks`, `made` (the lists of a mask made at once, if it was not cut), `outs`
    and, in the mode "backward", `grads`."""
    twin, parts = TWINS[case.mask_mod], case.parts
    twins = ["from tilewise_lab.fuzz import twins"] * ("twins." in twin.call)
    lines = case.begin(*["import pickle"] * case.kept, *twins)
    longest = max(map(case.tokens, parts)) + (2 if case.bad else 0)
    lines += _tables(case, longest)
    heads = case.heads * case.group
    each = [f"batch={case.batch}"] * ("b" in twin.reads) + [f"heads={heads}"] * ("h" in twin.reads)
    band = [f"causal={case.causal}", f"window={case.window}"]
    each += [*band, f"block={case.block}", f"device={case.device!r}"]
    tail = ", ".join(each)
    n = case.tokens(parts[0]) if case.longer else longest
    lines.append(f"mask = tilewise.block_mask(mod({n}), {case.n_q}, {case.n_k}, {tail})")
    if case.bad is not None:
        return "\n".join([*lines, f"outs = ({case.bad[1]},)"])
    lines.append("masks = [mask]")
    steps, is_cut = [], False
    for step, part in zip(case.steps, parts[1:], strict=True):
        words = []
        if case.longer and not is_cut:  # a mask that was cut keeps the tensors of its mod
            is_cut = len(step) == 3
            words = [f"mod=mod({longest if is_cut else case.tokens(part)})"]
        is_cut |= len(step) == 3
        words = [f"n_k={step[2]}", *words] if len(step) == 3 and step[2] else words
        method = "queries" if len(step) == 3 else "grown"
        steps.append(f"mask = mask.{method}({', '.join([*map(str, step[:2]), *words])})")
        if case.kept:
            steps.append("mask = pickle.loads(pickle.dumps(mask))")
        steps.append("masks.append(mask)")
    n_q, n_k = parts[-1].own
    options = [*band, "mask_mod=mask"] + ["return_lse=True"] * case.return_lse
    options += [f"backend={case.backend!r}"] * (case.backend != "auto")
    call = f"tilewise.attention(q, k, v, {', '.join(options)})"
    cast = case.cast
    shapes = {"q": (n_q, heads, case.d), "k": (n_k, case.heads, case.d), "v": (n_k, case.heads, case.dv)}
    made = [f"{name} = torch.randn{(case.batch, *shape)}{cast}" for name, shape in shapes.items()]
    if case.mode == "compile":
        body = [f"    {line}" for line in steps if not line.startswith("masks")]
        lines += ["def f(q, k, v, mask):", *body, f"    return {call}, mask.lists", *made]
        lines += ["f = torch.compile(f, backend='eager', fullgraph=True)", "outs, lists = f(q, k, v, mask)"]
        steps = []
    else:
        steps += made
        steps += ["leaves = [x.requires_grad_() for x in (q, k, v)]"] if case.mode == "backward" else []
        steps += ["with torch.no_grad():", f"    outs = {call}"] if case.mode == "no_grad" else [f"outs = {call}"]
    steps.append("outs = outs if isinstance(outs, tuple) else (outs,)")
    if case.mode == "backward":
        steps += ["douts = [torch.randn_like(x) for x in outs]", "grads = torch.autograd.grad(outs, leaves, douts)"]
    if not is_cut:
        steps.append(f"made = tilewise.block_mask(mod({longest}), {n_q}, {n_k}, {tail}).lists")
    return "\n".join([*lines, *steps])


def _tables(case: GrownCase, longest: int) -> list[str]:
    """The lines that make the mod's tensors, as long as `longest`, and mod(n): the mod with the first n tokens."""
    twin = TWINS[case.mask_mod]
    lines, cuts = [], []
    for name, axes in twin.tensors.items():
        shape = tuple({"B": case.batch, "H": case.heads * case.group, "S": longest}.get(axis, axis) for axis in axes)
        top = 3 if name == "ids" else longest + 1
        lines.append(f"every_{name} = torch.randint({top}, {shape}, dtype=torch.int32)")
        cuts.append(f"    {name} = every_{name}[{'..., :n' if 'S' in axes else '...'}]")
    return [*lines, "def mod(n):", *cuts, f"    return {twin.call}"]


def fault(case: GrownCase, found: dict[str, Any]) -> tuple[str, str] | None:
    """The first result that is wrong, and how."""
    parts = case.parts
    masks = found["masks"]
    for n, (mask, part) in enumerate(zip(masks, parts, strict=False)):
        if mask.shape[2:] != part.own:
            return "shape", f"shape: {mask.shape} after {n} steps, not {part.own}"
        kinds = tile_kinds(case, part, found)
        kinds = kinds[: mask.shape[0], : mask.shape[1]]
        if any(not torch.equal(x.cpu(), y) for x, y in zip(mask.lists, lists(kinds), strict=True)):
            return "tiles", f"tiles: other lists after {n} steps"
    if "made" in found:
        newest = found["lists"] if "lists" in found else masks[-1].lists
        if any(not torch.equal(x[: len(y)], y) for x, y in zip(newest, found["made"], strict=True)):
            return "tiles", "tiles: other lists than those made at once"
    dtype = getattr(torch, case.dtype)
    exact = results(case, found, torch.float64)
    ours = dict(zip(exact, (*found["outs"], *found.get("grads", ())), strict=True))
    wrong = excess(ours, exact, results(case, found, dtype), dtype)
    return None if wrong is None else (wrong.partition(":")[0], wrong)


def pairs(case: GrownCase, part: Part, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(B, H, n_q, n_k) of a part: the pairs that the mod shows, and those that causal and window show."""
    twin, (n_q, n_k) = TWINS[case.mask_mod], part.own
    q, k = part.whole
    h = torch.arange(case.heads * case.group)[:, None, None]
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    tables = [found[f"every_{name}"].cpu() for name in twin.tensors]
    shown = [twin.torch(Place(b, h, i + part.start, j, q, k), *tables) for b in range(case.batch)]
    shape = case.batch, len(h), n_q, n_k
    before, after = case.window or (None, None)
    after = 0 if case.causal else after
    near = torch.ones(n_q, n_k, dtype=torch.bool)
    if before is not None:
        near &= j >= i + n_k - n_q - before
    if after is not None:
        near &= j <= i + n_k - n_q + after
    return torch.stack([x.expand(shape[1:]) for x in shown]), near.expand(shape)


def tile_kinds(case: GrownCase, part: Part, found: dict[str, Any]) -> Tensor:
    """(B, H, Tq, Tk): 0 empty, 1 the mod hides pairs that causal and window show, 2 only these hide some, 3 full."""
    shown, near = pairs(case, part, found)
    block_q, block_k = case.block

    def tiles(x: Tensor, fill: bool) -> Tensor:
        rows, columns = -x.shape[2] % block_q, -x.shape[3] % block_k
        x = torch.nn.functional.pad(x, (0, columns, 0, rows), value=fill)
        x = x.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q))
        return x.transpose(3, 4).flatten(4)

    some = tiles(shown & near, False).any(-1)
    every, whole = (tiles(x, True).all(-1) for x in (shown | ~near, near))
    return torch.where(some, torch.where(every, 2 + whole.int(), 1), 0)


def lists(kinds: Tensor) -> tuple[Tensor, ...]:
    """The lists of a block mask with these tiles."""
    found = []
    for x in (kinds.flatten(0, 2), kinds.mT.flatten(0, 2)):
        each = [[4 * at + int(kind) for at, kind in enumerate(row.tolist()) if kind] for row in x]
        ends = [sum(map(len, each[:n])) for n in range(len(each) + 1)]
        found += [torch.tensor(y, dtype=torch.int32) for y in (ends, [entry for row in each for entry in row])]
    return tuple(found)


def results(case: GrownCase, found: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse if it is wanted, and the gradients of q, k and v, of dense attention."""
    leaves = [found[name].detach().to(dtype).requires_grad_() for name in "qkv"]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    shown, near = pairs(case, case.parts[-1], found)
    seen = (shown & near).to(q.device)
    k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
    out, lse = attended(q, k, v, seen, case.d**-0.5)
    outs = {"out": out.transpose(1, 2)} | ({"lse": lse} if case.return_lse else {})
    told = {name: y.detach() for name, y in outs.items()}
    if "grads" not in found:
        return told
    grads = torch.autograd.grad([*outs.values()], leaves, [y.to(dtype) for y in found["douts"]])
    return told | {f"gradient of {name}": g for name, g in zip("qkv", grads, strict=True)}


def candidates(case: GrownCase) -> Iterator[GrownCase]:
    """Simpler cases: fewer steps, each choice at its simplest."""
    if case.bad is not None:
        return
    for n in range(len(case.steps) if len(case.steps) > 1 else 0):
        fewer = replace(case, steps=case.steps[:n] + case.steps[n + 1 :])
        if all(min(part.own) > 0 for part in fewer.parts):
            yield fewer
    simplest = GrownCase()
    for name in case.dict():
        if name in SIMPLER:
            yield replace(case, **{name: getattr(simplest, name)})
    for n, step in enumerate(case.steps):
        for less in sorted({step[0] // 2, step[0] - 1} - {step[0], -1} if len(step) == 1 else ()):
            yield replace(case, steps=(*case.steps[:n], (less,), *case.steps[n + 1 :]))
