"""One head of attention, tile by tile, through an explicit HBM and SRAM: which block is where, and what moved.

>>> trace = attention(8, 8, d=4, rows=2, columns=2, causal=True)
>>> # a triangle of 4 by 4 tiles
>>> trace["totals"]["visited"], trace["totals"]["skipped"]
(10, 6)
>>> sizes = {"d": 4, "rows": 2, "columns": 2}
>>> fa1, fa2 = (attention(8, 8, **sizes, order=o) for o in ("fa1", "fa2"))
>>> # FA1 writes O, m and l again for every block of keys
>>> [sum(x["totals"]["stored"].values()) for x in (fa1, fa2)]
[768, 160]

The JSON:

    kind     "attention"; order, rows, columns (block sizes), sq, sk, d, dv,
             before, after, itemsize, backward
    steps    in order of execution; each step has
      phase     forward (one tile), finish (division by l, FA2);
                delta, key, query, backward (see `_backward`)
      i, j      block of queries, block of keys; None where the step has none
      masked    whether some pair of the tile is hidden
      loads, stores    [[name, block], ...] moved for this step, names as in
                `totals`
      resident  [[name, block], ...] in SRAM at its end
      sram, loaded, stored, flops    bytes in SRAM; bytes and FLOPs so far
      m, l, o, factor, s, p    forward: running maximum, denominator and output
                (of FA2 yet to be divided by l) after the step, the correction
                of the old ones, the scores ("-inf" where hidden) and the
                weights exp(s - m)
      p, ds     backward: the weights exp(s - lse), and the gradient of q·k
    skipped  [[i, j], ...] tiles that no row sees
    totals   loaded, stored: {name: bytes}; flops, visited, skipped,
             peak (bytes of SRAM)
    out, lse, and with backward dq, dk, dv; error: the largest difference to the
    reference backend in float64
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import reference
from tilewise.errors import AttentionError
from tilewise.request import BackwardInputs, Request, Spec
from tilewise.request import band as band_of
from tilewise_lab.derivation import attention as rung
from tilewise_lab.derivation import gradient
from tilewise_lab.derivation.softmax import correction
from tilewise_lab.trace.memory import Memory
from tilewise_lab.trace.plain import plain

STATISTICS = ("m", "l", "lse", "delta")


def attention(
    sq: int,
    sk: int,
    *,
    d: int = 4,
    dv: int | None = None,
    rows: int = 2,
    columns: int = 2,
    order: str = "fa2",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backward: bool = False,
    owners: str = "two",
    itemsize: int = 4,
    sram: int | None = None,
    seed: int = 0,
    tensors: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """`owners`: "two" runs tilewise's backward (dK and dV by the owners of keys, dQ by those of queries), "one" the
    single loop in which dQ goes through HBM, once per tile. `sram`: the most bytes SRAM may hold.
    `tensors`: q, k, v, do to use, in float64; by default they are drawn from `seed`."""
    if order not in ("fa1", "fa2"):
        raise AttentionError("order", repr(order), "'fa1' or 'fa2'")
    before, after = band_of(causal, window)
    tile = _Tiles(sq, sk, rows, columns, before, after)
    make = torch.Generator().manual_seed(seed)
    shapes = (sq, d), (sk, d), (sk, dv or d), (sq, dv or d)
    q, k, v, do = tensors or (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in shapes)
    statistic = q.new_zeros(sq)
    memory = Memory(
        {name: x.split(size) for name, x, size in (
            ("q", q, rows), ("k", k, columns), ("v", v, columns), ("o", torch.zeros_like(do), rows), ("do", do, rows),
            ("m", statistic - torch.inf, rows), ("l", statistic, rows), ("lse", statistic, rows),
            ("delta", statistic, rows), ("dq", torch.zeros_like(q), rows), ("dk", torch.zeros_like(k), columns),
            ("dv", torch.zeros_like(v), columns),
        )},
        itemsize=itemsize,
        sram=sram,
    )  # fmt: skip
    steps = list(_fa1(memory, tile) if order == "fa1" else _fa2(memory, tile))
    if order == "fa1":
        lse = [m + l.log() for m, l in zip(memory.hbm["m"], memory.hbm["l"], strict=True)]
        memory.hbm["lse"] = lse
    if backward:
        steps += _backward(memory, tile, owners)
    outputs = {"out": "o", "lse": "lse"} | ({"dq": "dq", "dk": "dk", "dv": "dv"} if backward else {})
    found = {name: torch.cat(memory.hbm[key]) for name, key in outputs.items()}
    trace: dict[str, Any] = plain(
        {
            "kind": "attention", "order": order, "rows": rows, "columns": columns, "sq": sq, "sk": sk, "d": d,
            "dv": dv or d, "before": before, "after": after, "itemsize": itemsize, "backward": backward,
            "steps": steps,
            "skipped": tile.skipped,
            "totals": {
                "loaded": dict(memory.loaded), "stored": dict(memory.stored), "flops": memory.flops,
                "visited": len(tile.visited), "skipped": len(tile.skipped), "peak": memory.peak,
            },
            **found,
            "error": _error(found, q, k, v, do, Spec(1 / math.sqrt(d), before, after)),
        }
    )  # fmt: skip
    return trace


class _Tiles:
    """Which tiles there are, which are visited, and what each hides."""

    def __init__(self, sq: int, sk: int, rows: int, columns: int, before: int | None, after: int | None) -> None:
        i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
        hide = torch.zeros(sq, sk, dtype=torch.bool)
        if before is not None:
            hide |= j < i - before
        if after is not None:
            hide |= j > i + after
        grid = {
            (i, j): block
            for i, band in enumerate(hide.split(rows))
            for j, block in enumerate(band.split(columns, dim=1))
        }
        self.rows, self.columns = range(-(-sq // rows)), range(-(-sk // columns))
        self.visited = {at: block if block.any() else None for at, block in grid.items() if not block.all()}
        self.skipped = [at for at, block in grid.items() if block.all()]

    def keys_of(self, i: int) -> Iterator[tuple[int, Tensor | None]]:
        yield from ((j, hide) for (row, j), hide in self.visited.items() if row == i)

    def queries_of(self, j: int) -> Iterator[tuple[int, Tensor | None]]:
        yield from ((i, hide) for (i, column), hide in self.visited.items() if column == j)


def _fa2(memory: Memory, tiles: _Tiles) -> Iterator[dict[str, Any]]:
    """Queries outside: (m, l, o) stay in SRAM until their row is done. Rows do not depend on one another."""
    for i in tiles.rows:
        q = memory.load("q", i)
        state = rung.nothing(q, memory.hbm["v"][0])
        for j, hide in tiles.keys_of(i):
            state, step = _tile(memory, state, i, j, hide)
            yield step
            memory.drop("k", "v")
        some = state.l.masked_fill(state.l == 0, 1.0)
        memory.store("o", i, rung.rescale(1 / some, state.o))
        memory.store("lse", i, state.m + state.l.log())
        yield _step(memory, "finish", i, None, m=state.m, l=state.l, o=memory.hbm["o"][i])
        memory.drop("q", "o", "m", "l")


def _fa1(memory: Memory, tiles: _Tiles) -> Iterator[dict[str, Any]]:
    """Keys outside: o, m and l of every row travel to HBM and back for each block of keys."""
    for j in tiles.columns:
        for i, hide in tiles.queries_of(j):
            m, l = memory.load("m", i), memory.load("l", i)
            old = rung.State(m, l, rung.rescale(l, memory.load("o", i)))
            new, step = _tile(memory, old, i, j, hide)
            some = new.l.masked_fill(new.l == 0, 1.0)
            for name, x in (("m", new.m), ("l", new.l), ("o", rung.rescale(1 / some, new.o))):
                memory.store(name, i, memory.keep(name, i, x))
            step["stores"] = memory.take_events()[1]
            yield step | _counts(memory) | {"o": memory.sram["o", i]}
            memory.drop("q", "o", "m", "l")
        memory.drop("k", "v")


def _tile(memory: Memory, old: rung.State, i: int, j: int, hide: Tensor | None) -> tuple[rung.State, dict[str, Any]]:
    q, k, v = memory.load("q", i), memory.load("k", j), memory.load("v", j)
    new = rung.step(old, q, k, v, hide)
    s = rung.scores(q, k)
    if hide is not None:
        s = s.masked_fill(hide, -torch.inf)
    memory.multiply(s, q.shape[1])
    memory.multiply(s, v.shape[1])
    p = memory.keep("p", 0, correction(s, new.m[:, None]))
    for name, x in (("m", new.m), ("l", new.l), ("o", new.o)):
        memory.keep(name, i, x)
    factor = correction(old.m, new.m)
    step = _step(memory, "forward", i, j, masked=hide is not None, m=new.m, l=new.l, o=new.o, factor=factor, s=s, p=p)
    memory.drop("p")
    return new, step


def _backward(memory: Memory, tiles: _Tiles, owners: str) -> Iterator[dict[str, Any]]:
    """delta: rowsum(dO∘O), row by row. Then, with two owners (tilewise), no block is written by more than one program:

        key      for each block of keys: dK, dV summed over the queries that see it
        query    for each block of queries: dQ summed over the keys it sees; S and dP computed a second time

    and with one ("backward"): a loop over keys in which dQ, which all of them share, goes through HBM for every tile.
    """
    for i in tiles.rows:
        memory.store("delta", i, (memory.load("do", i) * memory.load("o", i)).sum(-1))
        yield _step(memory, "delta", i, None)
        memory.drop("do", "o")
    if owners not in ("one", "two"):
        raise AttentionError("owners", repr(owners), "'one' or 'two'")
    for j in tiles.columns:
        k, v = memory.load("k", j), memory.load("v", j)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i, hide in tiles.queries_of(j):
            p, ds, q, do = _gradient(memory, i, j, hide, products=5 if owners == "one" else 4)
            dk, dv = memory.keep("dk", j, dk + ds.mT @ q), memory.keep("dv", j, dv + p.mT @ do)
            if owners == "one":
                memory.store("dq", i, memory.load("dq", i) + ds @ k)
            yield _step(memory, "backward" if owners == "one" else "key", i, j, masked=hide is not None, p=p, ds=ds)
            memory.drop("q", "do", "lse", "delta", "dq")
        memory.store("dk", j, dk)
        memory.store("dv", j, dv)
        yield _step(memory, "finish", None, j)
        memory.drop("k", "v", "dk", "dv")
    for i in tiles.rows if owners == "two" else ():
        dq = torch.zeros_like(memory.load("q", i))
        for j, hide in tiles.keys_of(i):
            p, ds, *_ = _gradient(memory, i, j, hide, products=3)
            dq = memory.keep("dq", i, dq + ds @ memory.load("k", j))
            yield _step(memory, "query", i, j, masked=hide is not None, p=p, ds=ds)
            memory.drop("k", "v")
        memory.store("dq", i, dq)
        yield _step(memory, "finish", i, None)
        memory.drop("q", "do", "lse", "delta", "dq")


def _gradient(
    memory: Memory, i: int, j: int, hide: Tensor | None, products: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, ds, q, do of a tile, and the count of its products: S and dP, then dV and dK, or dQ, or all three."""
    q, do, lse, delta = (memory.load(name, i) for name in ("q", "do", "lse", "delta"))
    k, v = memory.load("k", j), memory.load("v", j)
    p, ds = gradient.block(q, k, v, do, lse, delta, hide)
    for _ in range({3: 2, 4: 2, 5: 3}[products]):  # S, dQ and dK have the head dim of q
        memory.multiply(p, q.shape[1])
    for _ in range({3: 1, 4: 2, 5: 2}[products]):  # dP and dV that of v
        memory.multiply(p, v.shape[1])
    memory.keep("p", 0, p)
    memory.keep("ds", 0, ds)
    memory.drop("p", "ds")
    return p, ds, q, do


def _step(memory: Memory, phase: str, i: int | None, j: int | None, **values: Any) -> dict[str, Any]:
    loads, stores = memory.take_events()
    return {"phase": phase, "i": i, "j": j, "loads": loads, "stores": stores, **_counts(memory), **values}


def _counts(memory: Memory) -> dict[str, Any]:
    return {
        "resident": list(memory.sram),
        "sram": memory.used,
        "loaded": memory.loaded.total(),
        "stored": memory.stored.total(),
        "flops": memory.flops,
    }


def _error(found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, spec: Spec) -> float:
    """The largest difference to the reference backend, which tiles in its own way."""
    q, k, v, do = (x[None, :, None] for x in (q, k, v, do))
    request = Request(q, k, v, spec)
    out, lse = reference.forward(request)
    exact = {"out": out[0, :, 0], "lse": lse[0, 0]}
    if "dq" in found:
        grads = reference.backward(request, BackwardInputs(out, lse, do, None))
        exact |= {name: x[0, :, 0] for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    return max(float((found[name] - x).nan_to_num(0.0).abs().max()) for name, x in exact.items())
