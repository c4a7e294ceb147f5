"""Calls with a KV cache: drawn, written as Python, and judged by a loop over sequences in float64.

What no query may see holds NaN: tokens before `starts`, places that were not written, rows of q past
the last sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from tilewise_lab.fuzz import stored
from tilewise_lab.fuzz.family import Drawn, options
from tilewise_lab.fuzz.twins import MASK, SCORE, Twin

NAN = "float('nan')"
TERMS = ("window", "scale", "softcap", "split", "return_lse")
DRAWN = (*TERMS, "sinks", "score_mod", "mask_mod", "tree", "plan", "out")


@dataclass(frozen=True)
class KvCase(Drawn):
    """lengths, queries, new: tokens in the cache, queries and new tokens of each sequence; new: () for none. page 0: a
    dense cache. The defaults are the simplest.

    slots: which of the new tokens, counted through all sequences, are not written. k_store, v_store: dtypes of the
    caches, "" for that of q; k_scale, v_scale: the kinds of their scales (`stored`). shared: leading pages that each
    sequence has in common with the one before it, if they are full without new tokens; with `shared_prefix`. latent:
    the cache of MLA, whose values are the first columns of the keys, with the same numbers and scales.
    """

    lengths: tuple[int, ...] = (1,)
    queries: tuple[int, ...] = (1,)
    new: tuple[int, ...] = ()
    packed: bool = False
    slack: int = 0
    page: int = 0
    csr: bool = False
    starts: tuple[int, ...] = ()
    kv_heads: int = 1
    group: int = 1
    d: int = 4
    dv: int = 4
    latent: bool = False
    heads_first: bool = False
    k_store: str = ""
    v_store: str = ""
    k_scale: str = ""
    v_scale: str = ""
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    split: int | None = None
    alibi: bool = False
    sinks: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    tree: bool = False
    rotary: str = ""
    slots: tuple[int, ...] | None = None
    shared: tuple[int, ...] = ()
    plan: bool = False
    out: bool = False
    return_lse: bool = False

    bad: ClassVar[Any] = None
    hidden: ClassVar[Any] = None
    deterministic: ClassVar[bool] = False

    @property
    def totals(self) -> list[int]:
        return [n + new for n, new in zip(self.lengths, self.new or (0,) * len(self.lengths), strict=True)]

    def table(self) -> list[list[int]]:
        """The pages of every sequence, or the row of a dense cache."""
        each = [-(-n // self.page) for n in self.totals] if self.page else [1] * len(self.lengths)
        ids = iter(random.Random(self.seed).sample(range(sum(each) + 2), sum(each)))
        rows = [[next(ids) for _ in range(n)] for n in each]
        for b, common in enumerate(self.common()):
            rows[b][:common] = rows[b - 1][:common]
        return rows

    def common(self) -> list[int]:
        """Leading pages that each sequence has in common with the one before it."""
        if not self.shared or not self.page:
            return []
        full = [n // self.page for n in self.lengths]
        return [0, *(min(n, *full[b : b + 2]) for b, n in enumerate(self.shared[1:]))]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the cache, and tokens of each."""
        return sum(map(len, self.table())) + 2, self.page or max(self.totals) + 2

    def place(self, b: int, j: int) -> tuple[int, int]:
        row = self.table()[b]
        return (row[j // self.page], j % self.page) if self.page else (row[0], j)


def draw(r: random.Random, dtypes: tuple[str, ...], small: bool) -> KvCase:
    """A call that is right; `small` for the interpreter."""
    most = 12 if small else 40
    batch, packed = r.randint(1, 3), r.random() < 0.5
    each = [r.choice((1, 1, 2, r.randint(0, 7))) for _ in range(batch)]
    queries = tuple(each) if packed else (max(each[0], 1),) * batch
    lengths = tuple(0 if r.random() < 0.15 else r.randint(1, most) for _ in range(batch))
    new = queries if r.random() < 0.6 else ()
    d = r.choice((2, 4, 8, 12, 16, 18) if small else (2, 4, 6, 16, 36, 40, 64))
    dv = d if r.random() < 0.6 else r.choice((1, 3, 8, 20))
    stores = [_store(r, n) for n in (d, dv)]

    case = KvCase(
        mode="compile" if r.random() < 0.03 and not small else r.choice(("call", "no_grad", "inference", "append")),
        dtype=r.choice(dtypes), lengths=lengths, queries=queries, new=new, packed=packed,
        slack=r.choice((0, 0, 3)) if packed else 0, page=r.choice((0, 1, 2, 3, 8, 16, 24)), csr=r.random() < 0.3,
        starts=tuple(r.randint(0, n) for n in lengths) if r.random() < 0.25 else (), kv_heads=r.choice((1, 2)),
        group=r.choice((1, 2, 3, 4)), d=d, dv=dv,
        k_store=stores[0][0], k_scale=stores[0][1], v_store=stores[1][0], v_scale=stores[1][1],
        heads_first=r.random() < 0.2, causal=r.random() < 0.75, alibi="alibi_slopes" in options(r, "alibi_slopes"),
        **options(r, "rotary") if new and not stores[0][0] else {},
        **options(r, *DRAWN),
        slots=tuple(n for n in range(sum(new)) if r.random() < 0.3) if new and r.random() < 0.2 else None,
        shared=tuple(r.choice((0, 1, 3, 40)) for _ in lengths) if r.random() < 0.2 else (),
    )  # fmt: skip
    if r.random() < 0.05:
        store, kind = case.k_store, case.k_scale
        store, kind = ("", "") if store == "uint8" else (store, kind)
        case = replace(
            case, latent=True, d=576, dv=512, rotary="", k_store=store, v_store=store, k_scale=kind, v_scale=kind
        )
    return replace(case, lengths=tuple(n + 40 for n in lengths)) if case.shared and not case.starts else case


def _store(r: random.Random, dim: int) -> tuple[str, str]:
    """A dtype of a cache and the kind of its scale: of two dims in three, that of q."""
    if r.random() < 0.6:
        return "", ""
    name = r.choice(["float16", "bfloat16", *(n for n in stored.LARGEST if n != "uint8" or dim % 4 == 0)])
    if name not in stored.LARGEST:
        return name, ""
    groups = {
        kind: stored.groups_of(kind) for kind in stored.KINDS
    }  # the kernels take groups of an even number of dims
    kinds = [kind for kind, n in groups.items() if n < 2 or (name == "uint8" and dim % (2 * n) == 0)]
    return name, r.choice([*kinds, ""] if name.startswith("float") else kinds)


def code(case: KvCase) -> str:
    """The Python of a case, which leaves `outs`."""
    heads, tokens, batch = case.kv_heads * case.group, sum(case.queries), len(case.lengths)

    def randn(*shape: int) -> str:
        return f"torch.randn({', '.join(map(str, shape))}){case.cast}"

    mods = list(mods_of(case))
    twins = any("twins." in twin.call for _, twin in mods)
    lines = case.begin(*["from tilewise_lab.fuzz import twins"] * twins)
    rows, page = case.shape
    if case.k_store in stored.LARGEST or case.v_store in stored.LARGEST:
        lines.append("from tilewise_lab.fuzz import stored")
    for name, dim, store in (("k_cache", case.d, case.k_store), ("v_cache", case.dv, case.v_store)):
        if case.latent and name == "v_cache":
            lines.append(f"v_cache = k_cache[..., :{case.dv}]")
            continue
        inner = (case.kv_heads, page) if case.heads_first else (page, case.kv_heads)
        made = f"{randn(rows, *inner, dim)}{f'.to(torch.{store})' if store else ''}"
        if store in stored.LARGEST:
            shape = rows, *inner, dim // 2 if store == "uint8" else dim
            made = f"stored.random_bytes({shape}, {store!r})"
        lines.append(f"{name} = {made}{'.transpose(1, 2)' if case.heads_first else ''}")
    starts = case.starts or (0,) * batch
    used = {case.place(b, j) for b, n in enumerate(case.lengths) for j in range(starts[b], n)}
    if case.slots is not None:  # what is not written is what was there
        used |= {case.place(b, j) for b, n in enumerate(case.totals) for j in range(starts[b], n)}
    dead = [(row, at) for row in range(rows) for at in range(page) if (row, at) not in used]
    if dead:
        at = ", ".join(str(list(axis)) for axis in zip(*dead, strict=True))
        for name, store in (("k_cache", case.k_store), ("v_cache", case.v_store)):
            lines.append(f"{name}[{at}] = {127 if store in stored.LARGEST else NAN}")
    scales, scale_lines = _scales(case, f"[{at}]" if dead else "")
    lines += scale_lines
    lines.append("before = k_cache.clone(), v_cache.clone()")
    lead = (tokens + case.slack,) if case.packed else (batch, case.queries[0])
    lines.append(f"q = {randn(*lead, heads, case.d)}")
    if case.slack:
        lines.append(f"q[{tokens}:] = float('nan')")
    args = scales | ({"causal": "False"} if not case.causal else {})
    if case.packed:
        args["cu_seqlens_q"] = ends(case.queries)
    args |= placement(case)
    if case.common():  # given, because "auto" does not share so little
        args["shared_prefix"] = ints(n * case.page for n in case.common())
    if case.starts:
        args["starts"] = ints(case.starts)
    args |= {n: repr(x) for n in TERMS if (x := getattr(case, n)) is not None and x is not False}
    for name, wanted in (("sinks", case.sinks), ("alibi_slopes", case.alibi)):
        if wanted:
            lines.append(f"{name} = torch.rand({heads})")
            args[name] = name
    for kind, twin in mods:
        lines += [f"{name} = {_table(case, name, axes, kind)}" for name, axes in twin.tensors.items()]
        args[f"{kind}_mod"] = twin.call
    if case.tree:
        shape = (*lead, max(case.queries))
        lines.append(f"tree = torch.rand{shape} < 0.6")
        args["tree"] = "tree"
    new = {}
    if case.new:
        lead = (sum(case.new),) if case.packed else (batch, case.new[0])
        values = f"k_new[..., :{case.dv}]" if case.latent else randn(*lead, case.kv_heads, case.dv)
        lines += [f"k_new = {randn(*lead, case.kv_heads, case.d)}", f"v_new = {values}"]
        new = {"k_new": "k_new", "v_new": "v_new"}
        if case.rotary:
            lines.append(f"angles = 6 * torch.rand({max(case.totals) + 1}, {case.d // 2})")
            new["rotary"] = f"tilewise.Rotary(angles.cos(), angles.sin(), interleaved={case.rotary == 'pairs'})"
        if case.slots is not None:
            places = [case.place(b, case.lengths[b] + i) for b in range(batch) for i in range(case.new[b])]
            slots = [-1 if n in case.slots else row * page + at for n, (row, at) in enumerate(places)]
            new["slots"] = f"torch.tensor({slots}, dtype=torch.int64)"
    if case.out:
        lines.append(f"out = torch.empty(*q.shape[:-1], {case.dv}, dtype=q.dtype)")
        args["out"] = "out"
    if case.backend != "auto":
        args["backend"] = repr(case.backend)
    lines.append(f"lengths = {ints(case.lengths)}")
    return "\n".join([*lines, *_use(case, args, new)])


def _scales(case: KvCase, dead: str) -> tuple[dict[str, str], list[str]]:
    """The arguments k_scale and v_scale, and the lines that make them. `dead`: indices of tokens that the call
    does not read."""
    args: dict[str, str] = {}
    lines: list[str] = []
    (rows, page), heads = case.shape, case.kv_heads
    for name, store, kind in (("k", case.k_store, case.k_scale), ("v", case.v_store, case.v_scale)):
        if store not in stored.LARGEST:
            continue
        if case.latent and name == "v":
            lines.append(f"v_cache = k_cache[..., :{case.dv}]")
            if kind == "number":
                args["v_scale"] = args["k_scale"]
            elif kind:
                args["v_scale"] = "v_scale"
                lines.append("v_scale = k_scale")
            continue
        lines.append(f"{name}_cache = {name}_cache.view(torch.{store})")
        size = 2.0 / stored.LARGEST[store]
        shapes = {"scalar": (), "head": (heads,), "batch": (len(case.lengths), heads), "token": (rows, page, heads)}
        groups = stored.groups_of(kind)
        if kind == "number":
            args[f"{name}_scale"] = repr(size)
        elif kind:
            args[f"{name}_scale"] = f"{name}_scale"
            shape = (rows, page, heads, groups) if groups > 1 else shapes[kind]
            lines.append(f"{name}_scale = (torch.rand({shape}) + 0.5) * {size!r}")
            if groups and dead:
                lines.append(f"{name}_scale{dead} = float('nan')")
            lines.append(f"before_{name}_scale = {name}_scale.clone()")
    return args, lines


def mods_of(case: KvCase) -> Iterator[tuple[str, Twin]]:
    if case.score_mod is not None:
        yield "score", SCORE[case.score_mod]
    if case.mask_mod is not None:
        yield "mask", MASK[case.mask_mod]


def _table(case: KvCase, name: str, axes: tuple[Any, ...], kind: str) -> str:
    longest = max(1, *case.totals, *case.queries)
    named = {"B": len(case.lengths), "H": case.kv_heads * case.group, "S": longest}
    shape = tuple(named.get(axis, axis) for axis in axes)
    if kind == "score":
        return f"torch.randn({shape})"
    return f"torch.randint({3 if name == 'ids' else longest + 1}, {shape}, dtype=torch.int32)"


def _use(case: KvCase, args: dict[str, str], new: dict[str, str]) -> list[str]:
    if case.mode == "append" and new:
        where: dict[str, str] = {
            n: args[n]
            for n in ("page_table", "cache_rows", "cu_seqlens_q", "backend", "k_scale", "v_scale")
            if n in args
        }
        where |= {"cu_seqlens_new": args["cu_seqlens_q"]} if case.packed else {}
        words = {n: x for n, x in new.items() if n not in ("k_new", "v_new")} | where
        first = f"turned = tilewise.append_kv(k_new, v_new, k_cache, v_cache, lengths, q=q, {keywords(words)})"
        call = f"tilewise.attention_kv(turned, k_cache, v_cache, lengths + {ints(case.new)}, {keywords(args)})"
        return [first, f"outs = {call}", "outs = outs if isinstance(outs, tuple) else (outs,)"]
    words = args | new
    lines = []
    if case.plan:
        lines.append(f"plan = tilewise.plan_kv(q, k_cache, v_cache, lengths, {keywords(words)})")
        words = words | {"plan": "plan"}
    call = f"tilewise.attention_kv(q, k_cache, v_cache, lengths, {keywords(words)})"
    lines += ["def f(q, k_cache, v_cache, lengths):", f"    return {call}"]
    if case.mode == "compile":
        lines.append("f = torch.compile(f, backend='eager', fullgraph=True)")
    guard = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}.get(case.mode)
    call = "outs = f(q, k_cache, v_cache, lengths)"
    lines += [f"with {guard}:", f"    {call}"] if guard else [call]
    return [*lines, "outs = outs if isinstance(outs, tuple) else (outs,)"]


def placement(case: KvCase) -> dict[str, str]:
    """The argument that says where the tokens of each sequence are."""
    table = case.table()
    if not case.page:
        return {"cache_rows": ints(row[0] for row in table)}
    if case.csr:
        return {"page_table": f"({ends([len(row) for row in table])}, {ints(x for row in table for x in row)})"}
    width = max(map(len, table)) + 1
    padded = [[*row, *[-1] * (width - len(row))] for row in table]
    return {"page_table": f"torch.tensor({padded}, dtype=torch.int32)"}


def keywords(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def ints(x: Any) -> str:
    return f"torch.tensor({list(x)}, dtype=torch.int32)"


def ends(x: Any) -> str:
    return ints(sum(x[:n]) for n in range(len(x) + 1))


def candidates(case: KvCase) -> Iterator[KvCase]:
    """Simpler cases: each choice at its simplest, a sequence fewer, shorter ones."""
    simplest = KvCase()
    for name in case.dict():
        if name not in ("seed", "backend", "device", "lengths", "queries"):
            changes: dict[str, Any] = {name: getattr(simplest, name)}
            if case.latent and (name in ("d", "dv", "latent") or name.endswith(("store", "scale"))):
                continue
            if name in ("k_store", "v_store"):
                changes[f"{name[0]}_scale"] = ""
            if name in ("k_scale", "v_scale") and not getattr(case, f"{name[0]}_store").startswith("float"):
                continue
            if name == "new":
                changes |= {"rotary": "", "slots": None}
            if name == "packed":
                same = (max(1, case.queries[0]),) * len(case.queries)
                changes |= {"slack": 0, "slots": None, "queries": same, "new": same if case.new else ()}
            yield replace(case, **changes)
    yield from with_fewer_tokens(case)


AnyKvCase = TypeVar("AnyKvCase", bound=KvCase)


def with_fewer_tokens(case: AnyKvCase) -> Iterator[AnyKvCase]:
    """Cases with a sequence fewer, or a shorter one."""
    each = ("lengths", "queries", "new", "starts", "shared")
    for n in range(0 if len(case.lengths) == 1 or case.slots else len(case.lengths)):
        yield replace(case, **{name: x[:n] + x[n + 1 :] for name in each if (x := getattr(case, name))})
    for n, length in enumerate(case.lengths):
        for shorter in sorted({length // 2, length - 1} - {length, -1}):
            if not case.starts:
                yield replace(case, lengths=(*case.lengths[:n], shorter, *case.lengths[n + 1 :]))
