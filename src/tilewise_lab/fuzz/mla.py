"""Caches of multi-head latent attention (MLA), in every format: new tokens of any size are appended, and read by
`attention_mla` or `attention_kv`. `mla_oracle` says what bytes and numbers that should leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewise_lab.fuzz import kv, stored
from tilewise_lab.fuzz.family import options

LATENT, WIDTH = 512, 576
DEEPSEEK = "deepseek"  # 656 bytes for each token
STORES = ("", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", DEEPSEEK, DEEPSEEK, DEEPSEEK)
# What a new token holds. Attention has no oracle for the last ones, so that they are only written.
VALUES = ("normal", "zeros", "tiny", "one", "signs", "huge", "nan", "inf")
READABLE = VALUES[:5]


@dataclass(frozen=True)
class MlaCase(kv.KvCase):
    """A `KvCase` of 576 columns and one KV head, with the store in `k_store` and its scale in `k_scale`.

    mode: "append" (only the bytes are compared), "mla" (`append_kv` and `attention_mla`), "kv" (`attention_kv` with new
    tokens), "compile". values: what the new tokens hold, in turn. room: unused bytes or numbers after each token. dims:
    those that are rotated. indices: how many of the tokens each query names, 0 for all that it sees. counts: how the
    number of indices is given.
    """

    mode: str = "mla"
    d: int = WIDTH
    dv: int = LATENT
    latent: bool = True
    values: tuple[str, ...] = ("normal",)
    room: int = 0
    dims: int = 64
    indices: int = 0
    counts: str = ""

    @property
    def is_deepseek(self) -> bool:
        return self.k_store == DEEPSEEK

    @property
    def live(self) -> list[list[tuple[int, int]]]:
        """The places of the tokens of every sequence, new ones included, that are written."""
        return [[self.place(b, j) for j in range(n)] for b, n in enumerate(self.totals)]


def draw(r: random.Random, dtypes: tuple[str, ...], small: bool) -> MlaCase:
    """A call that is right; `small` for the interpreter."""
    most, packed, batch = 6 if small else 24, r.random() < 0.4, r.randint(1, 2 if small else 3)
    each = [r.choice((1, 1, 2, r.randint(0, 4))) for _ in range(batch)]
    queries = tuple(each) if packed else (max(each[0], 1),) * batch
    store = r.choice(STORES)
    kinds = [kind for kind in stored.KINDS if stored.groups_of(kind) < 2]
    scale = r.choice([*kinds, ""] if store.startswith("float8") else kinds) if store in stored.LARGEST else ""
    new = queries if r.random() < 0.8 else ()
    case = MlaCase(
        mode=r.choice(("append", "append", "mla", "mla", "kv")), dtype=r.choice(dtypes), queries=queries, new=new,
        lengths=tuple(0 if r.random() < 0.15 else r.randint(1, most) for _ in range(batch)), packed=packed,
        slack=r.choice((0, 0, 3)) if packed else 0, page=r.choice((0, 1, 3, 8, 16)), csr=r.random() < 0.3,
        group=r.choice((1, 2, 3, 8)), k_store=store, k_scale=scale, v_store=store, v_scale=scale,
        causal=r.random() < 0.75, room=r.choice((0, 0, 4, 16)), dims=r.choice((64, 64, 32, 2)),
        **options(r, "scale", "split", "sinks", "plan", "out", "return_lse"),
        **options(r, "rotary") if new else {},
        slots=tuple(n for n in range(sum(new)) if r.random() < 0.3) if new and r.random() < 0.3 else None,
    )  # fmt: skip
    if case.mode == "append" and new:
        return replace(case, values=tuple(r.choice(VALUES) for _ in range(r.randint(1, 4))), rotary="")
    case = replace(case, mode="mla" if case.mode == "append" else case.mode)
    case = replace(case, values=tuple(r.choice(READABLE) for _ in range(r.randint(1, 3))))
    if store in stored.LARGEST:  # what is rotated may be rounded the other way
        case = replace(case, rotary="")
    if case.mode == "kv":
        case = replace(case, **options(r, "window", "softcap"))
        return replace(case, mode="compile") if r.random() < 0.05 and not small else case
    if not packed and case.slots is None and r.random() < 0.4:
        kinds = ["", "number", "sequence", "query"]
        return replace(case, indices=r.choice((1, 3, 9)), counts=r.choice(kinds), plan=False, causal=True)
    return case


def code(case: MlaCase) -> str:
    """The Python of a case, which leaves `before`, `cache` and, unless it is only written, `outs`."""
    batch, heads, page = len(case.lengths), case.group, case.shape[1]
    tokens, cast = sum(case.queries), case.cast
    lines = [*case.begin("from tilewise_lab.fuzz import stored"), *_cache(case)]
    lead = (tokens + case.slack,) if case.packed else (batch, case.queries[0])
    lines.append(f"q = torch.randn{(*lead, heads, WIDTH)}{cast}")
    lines += [f"q[{tokens}:] = float('nan')"] * bool(case.slack)
    where = {"cu_seqlens_q": kv.ends(case.queries)} if case.packed else {}
    where |= kv.placement(case)
    where |= {"k_scale": "scale", "v_scale": "scale"} if case.k_scale else {}
    where |= {"backend": repr(case.backend)} if case.backend != "auto" else {}
    args = {n: repr(x) for n in kv.TERMS if (x := getattr(case, n)) is not None and x is not False}
    args |= {"causal": "False"} if not case.causal else {}
    if case.sinks:
        lines.append(f"sinks = torch.rand({heads})")
        args["sinks"] = "sinks"
    if case.out:
        lines.append(f"out = torch.empty(*q.shape[:-1], {LATENT}, dtype=q.dtype)")
        args["out"] = "out"
    new: dict[str, str] = {}
    if case.new:
        lead = (sum(case.new),) if case.packed else (batch, case.new[0])
        lines.append(f"new = stored.tokens({(*lead, 1, WIDTH)}, {case.values}, torch.{case.dtype})")
        if case.rotary:
            lines.append(f"angles = 6 * torch.rand({max(case.totals) + 1}, {case.dims // 2})")
            new["rotary"] = f"tilewise.Rotary(angles.cos(), angles.sin(), interleaved={case.rotary == 'pairs'})"
        if case.slots is not None:
            at = [case.place(b, case.lengths[b] + i) for b in range(batch) for i in range(case.new[b])]
            slots = [-1 if n in case.slots else row * page + offset for n, (row, offset) in enumerate(at)]
            new["slots"] = f"torch.tensor({slots}, dtype=torch.int64)"
    lines += [f"lengths = {kv.ints(case.lengths)}", f"totals = {kv.ints(case.totals)}"]
    return "\n".join([*lines, *_use(case, where, args, new)])


def _cache(case: MlaCase) -> list[str]:
    """The lines that make the cache and its scale. Tokens that no call reads are nan, or bytes that are no number."""
    rows, page = case.shape
    columns = (656 if case.is_deepseek else WIDTH) + case.room
    store = case.k_store
    if case.is_deepseek:
        lines = [f"cache = stored.random_packed({rows}, {page}, {columns})[..., :656]"]
    elif store in stored.LARGEST:
        lines = [f"cache = stored.random_bytes({(rows, page, 1, columns)}, {store!r})[..., :{WIDTH}]"]
    else:
        lines = [f"cache = torch.randn{(rows, page, 1, columns)}.to(torch.{store or case.dtype})[..., :{WIDTH}]"]
    used = {at for b, each in enumerate(case.live) for at in each[: None if case.slots else case.lengths[b]]}
    dead = [(row, at) for row in range(rows) for at in range(page) if (row, at) not in used]
    index = ", ".join(str(list(axis)) for axis in zip(*dead, strict=True))
    lines.append(f"cache[{index}] = {255 if case.is_deepseek else 127 if store in stored.LARGEST else kv.NAN}")
    if store in stored.LARGEST:
        lines.append(f"cache = cache.view(torch.{store})")
    lines += ["cache = cache.view(torch.float8_e4m3fn)"] * case.is_deepseek
    lines.append("before = cache.clone()")
    if case.k_scale == "number":
        lines.append(f"scale = {2.0 / stored.LARGEST[store]!r}")
    elif case.k_scale:
        shapes = {"scalar": (), "head": (1,), "batch": (len(case.lengths), 1), "token": (rows, page, 1)}
        lines.append(f"scale = (torch.rand({shapes[case.k_scale]}) + 0.5) * {2.0 / stored.LARGEST[store]!r}")
        lines += [f"scale[{index}] = float('nan')"] * (case.k_scale == "token")
        lines.append("scale_before = scale.clone()")
    return lines


def _use(case: MlaCase, where: dict[str, str], args: dict[str, str], new: dict[str, str]) -> list[str]:
    """The lines that append the new tokens and attend."""
    values = f"cache[..., :{LATENT}]"
    alike = "outs = outs if isinstance(outs, tuple) else (outs,)"
    if case.mode in ("kv", "compile"):
        new = {"k_new": "new", "v_new": f"new[..., :{LATENT}]"} | new if case.new else {}
        lines, words = [], where | args | new
        if case.plan:
            lines.append(f"plan = tilewise.plan_kv(q, cache, {values}, lengths, {kv.keywords(words)})")
            words |= {"plan": "plan"}
        call = f"tilewise.attention_kv(q, cache, {values}, lengths, {kv.keywords(words)})"
        lines += ["def f(q, cache, lengths):", f"    return {call}"]
        lines += ["f = torch.compile(f, backend='eager', fullgraph=True)"] * (case.mode == "compile")
        return [*lines, "outs = f(q, cache, lengths)", alike]
    lines = ["turned = q"]
    if case.new:
        packed = {"cu_seqlens_new": where["cu_seqlens_q"]} if case.packed else {}
        options = kv.keywords({"q": "q"} | where | packed | new)
        lines = [f"turned = tilewise.append_kv(new, new[..., :{LATENT}], cache, {values}, lengths, {options})"]
    if case.mode == "append":
        return lines
    where = {name: x for name, x in where.items() if name != "v_scale"}
    if case.indices:
        where = {name: x for name, x in where.items() if name in ("k_scale", "backend")}
        lines += _indices(case)
        words = where | {n: x for n, x in args.items() if n != "causal"} | {"indices": "indices"}
        counts = "None" if not case.counts else "counts"
        return [*lines, f"outs = tilewise.attention_mla(turned, cache, {counts}, {kv.keywords(words)})", alike]
    if case.plan:
        both = where | ({"v_scale": "scale"} if case.k_scale else {})
        lines.append(f"plan = tilewise.plan_kv(turned, cache, {values}, totals, {kv.keywords(both | args)})")
        args = args | {"plan": "plan"}
    read = "cache.view(torch.uint8)" if case.is_deepseek and case.seed % 2 else "cache"
    return [*lines, f"outs = tilewise.attention_mla(turned, {read}, totals, {kv.keywords(where | args)})", alike]


def named(case: MlaCase) -> list[list[list[int]]]:
    """The slots that each query of each sequence names, -1 for none."""
    r, page, found = random.Random(case.seed), case.shape[1], []
    for b, each in enumerate(case.live):
        slots = [row * page + at for row, at in each]
        rows = [r.sample([*slots, *[-1] * case.indices], case.indices) for _ in range(case.queries[b])]
        found.append(rows)
    return found


def counted(case: MlaCase) -> list[list[int]]:
    """How many of its slots count, for each query."""
    r = random.Random(case.seed + 1)
    shape = len(case.lengths), case.queries[0]
    if case.counts == "number":
        return [[case.indices // 2 + 1] * shape[1]] * shape[0]
    if case.counts == "sequence":
        return [[n] * shape[1] for n in (r.randint(0, case.indices) for _ in range(shape[0]))]
    return [
        [r.randint(0, case.indices) if case.counts else case.indices for _ in range(shape[1])] for _ in case.lengths
    ]


def _indices(case: MlaCase) -> list[str]:
    lines, counts = [f"indices = {kv.ints(named(case))}"], counted(case)
    match case.counts:
        case "number":
            lines.append(f"counts = {counts[0][0]}")
        case "sequence":
            lines.append(f"counts = {kv.ints(row[0] for row in counts)}")
        case "query":
            lines.append(f"counts = {kv.ints(counts)}")
    return lines


def candidates(case: MlaCase) -> Iterator[MlaCase]:
    """Simpler cases: each choice at its simplest, a sequence fewer, shorter ones."""
    simplest, kept = MlaCase(), ("seed", "backend", "device", "lengths", "queries", "counts", "v_store", "v_scale")
    for name in case.dict():
        if name not in kept and not (name == "k_scale" and case.k_store == "int8"):
            changes: dict[str, Any] = {name: getattr(simplest, name)}
            if name == "k_store":
                changes |= {"v_store": "", "k_scale": "", "v_scale": ""}
            elif name == "k_scale":
                changes["v_scale"] = ""
            elif name == "new":
                changes |= {"rotary": "", "slots": None}
            elif name == "packed":
                same = (max(1, case.queries[0]),) * len(case.queries)
                changes |= {"slack": 0, "slots": None, "queries": same, "new": same if case.new else ()}
            elif name == "mode" and not set(case.values) <= set(READABLE):
                continue
            yield replace(case, **changes)
    for n in range(len(case.values) if len(case.values) > 1 else 0):
        yield replace(case, values=case.values[:n] + case.values[n + 1 :])
    yield from kv.with_fewer_tokens(case)
