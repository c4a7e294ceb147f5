"""What one rank does: the steps of its program, on tensors. Who delivers the messages is somebody else's business.

`forward` and `backward` are generators. They yield an `Exchange` when messages are posted, and its number when they
must have arrived, and go on in between; a driver (`cluster`) runs one of them over torch.distributed, or those of all
ranks in one process.

Partial results are float32: out and lse of each call are merged (`tilewise.merge`), gradients of keys are summed while
they travel. The gradients of a tile are those of the whole: its weights come from the merged lse, its delta from the
merged out. A sink, which every query sees once, joins after the last merge.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.dense import aligned
from ..plan_cache import CallPlan, plan_of
from ..request import BackwardInputs, Request
from .cluster import Exchange
from .division import GATHERING, Division
from .heads import Heads
from .program import FIRST, LAST, Compute, Merge, Move, Post, Wait, program
from .rows import Part, Rows, added, merge_, parts, zeros

Keys = tuple[Tensor, Tensor]  # of a station, with their values; or the gradients of both
Steps = Generator[Exchange | int, None, Any]


class Saved(NamedTuple):
    """What a backward needs of a forward: the station's tensors, for this member's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def forward(plan: Division, rank: int, request: Request) -> Steps:
    """(out, lse, saved) of a rank. Tensors are (B, tokens, heads, dim); a packed plan has one batch row."""
    heads = Heads(plan, rank, request.q.shape[2], request.k.shape[2])
    q, k, v = yield from heads.enter(FIRST, *request[:3], keys=True)
    work = Forward(plan, heads, request, q, (k, v))
    yield from work.steps()
    saved = Saved(q, k, v, *work.finished())
    out, lse = yield from heads.leave(LAST, saved.out, saved.lse.mT)
    return out, lse.mT, saved


def backward(
    plan: Division, rank: int, request: Request, saved: Saved, dout: Tensor, dlse: Tensor | None,
    wanted: tuple[bool, ...],
) -> Steps:  # fmt: skip
    """The gradients of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors: of these the
    part that comes from this rank's queries (or heads), as of every weight whose tokens are sharded."""
    heads = Heads(plan, rank, request.q.shape[2], request.k.shape[2])
    dout, dlse = yield from heads.enter(FIRST, dout, None if dlse is None else dlse.mT)
    work = Backward(plan, heads, request, saved, dout, None if dlse is None else dlse.mT, wanted)
    yield from work.steps()
    dk, dv = work.own_keys()
    dq, dk, dv = yield from heads.leave(LAST, work.dq.to(request.q.dtype), dk, dv, keys=True)
    inputs = (*request[:3], request.bias, request.sinks, *request.score)
    return tuple(
        None if g is None or x is None else g.to(x.dtype)
        for g, x in zip((dq, dk, dv, *work.terms), inputs, strict=True)
    )


def plan_for(request: Request) -> CallPlan:
    """How one tile's call runs. Its options are the key; the calls of a step differ in little else."""
    return plan_of("tile", lambda: request, request.tensors(), request.spec)


class Work:
    """One rank at work between its exchanges of heads: what forward and backward have in common."""

    def __init__(self, plan: Division, heads: Heads, request: Request, q: Tensor, keys: Keys, backward: bool) -> None:
        self.plan, self.heads, self.station, self.q = plan, heads, heads.station, q
        bias = request.bias
        self.request = request._replace(q=q, bias=None if bias is None else heads.of(bias, 1))
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.program = [x for x in program(plan, heads.rank, backward) if getattr(x, "number", 0) not in (FIRST, LAST)]
        self.keys = {self.station: keys}
        self.came: dict[tuple[str, int, int], Keys] = {}  # by (what, peer, source)

    def steps(self) -> Steps:
        for step in self.program:
            match step:
                case Post(number, sends, receives):
                    sent = [(move.peer, x.contiguous()) for move in sends for x in self.sent(move)]
                    yield Exchange(number, sent, [(move.peer, x) for move in receives for x in self.room(move)])
                case Wait(number):
                    yield number
                case Compute(sources):
                    self.compute(sources)
                    for source in sources:
                        if source != self.station:
                            del self.keys[source]
                case Merge(peer, replaces):
                    self.merge(peer, replaces)
        return None

    def sent(self, move: Move) -> Keys:
        k, v = self.keys[move.source]
        if self.plan.strategy not in GATHERING:
            return k, v
        rows = Rows.of(self.plan.wants(move.peer, self.station), k.shape[1])
        return rows.take(k), rows.take(v)

    def room(self, move: Move) -> Keys:
        """Where a message will be."""
        dtype = self.q.dtype if move.what == "kv" else self.dtype
        k, v = (x.new_empty((x.shape[0], move.rows, *x.shape[2:]), dtype=dtype) for x in self.keys[self.station])
        if move.what == "kv":
            self.keys[move.source] = k, v
        else:
            self.came[move.what, move.peer, move.source] = k, v
        return k, v

    def gathers(self, sources: tuple[int, ...]) -> bool:
        return self.plan.strategy in GATHERING and sources != (self.station,)

    def kv(self, sources: tuple[int, ...]) -> Keys:
        """The keys of some stations, as `Division.buffer` has them in order."""
        if not self.gathers(sources):
            return self.keys[sources[0]]
        order = self.plan.buffer(self.station, sources)
        k, v = (torch.cat([self.keys[s][n][:, row : row + run.size] for s, row, run in order], 1) for n in (0, 1))
        return k, v

    def parts(self, sources: tuple[int, ...], keys: Keys) -> Any:
        call = self.request._replace(k=keys[0], v=keys[1])
        return parts(self.plan, self.station, sources, call, self.heads.own.q0)

    def compute(self, sources: tuple[int, ...]) -> None:
        raise NotImplementedError

    def merge(self, peer: int, replaces: bool) -> None:
        raise NotImplementedError


class Forward(Work):
    def __init__(self, plan: Division, heads: Heads, request: Request, q: Tensor, keys: Keys) -> None:
        super().__init__(plan, heads, request, q, keys, backward=False)
        self.out = q.new_zeros((*q.shape[:-1], keys[1].shape[-1]), dtype=self.dtype)
        self.lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=self.dtype)
        self.is_new = True

    def compute(self, sources: tuple[int, ...]) -> None:
        for request, rows, _, _ in self.parts(sources, self.kv(sources)):
            out, lse = plan_for(request).forward(request.tensors())
            if request.cu_q is not None:
                out, lse = out[None], lse[None]
            if self.is_new and rows.is_all:
                self.out, self.lse = out.contiguous(), lse.contiguous()
            else:
                merge_(self.out, self.lse, rows, out, lse)
            self.is_new = False

    def sent(self, move: Move) -> Keys:
        return (self.out, self.lse) if move.what == "state" else super().sent(move)

    def room(self, move: Move) -> Keys:
        if move.what != "state":
            return super().room(move)
        found = self.came["state", move.peer, 0] = torch.empty_like(self.out), torch.empty_like(self.lse)
        return found

    def merge(self, peer: int, replaces: bool) -> None:
        out, lse = self.came.pop(("state", peer, 0))
        if replaces:
            self.out, self.lse = out, lse
        else:  # into new memory: what was sent may still be on its way
            self.out, self.lse = self.out.clone(), self.lse.clone()
            merge_(self.out, self.lse, Rows.of([(0, out.shape[1])], out.shape[1]), out, lse)

    def finished(self) -> tuple[Tensor, Tensor]:
        """With the sinks; out as it is handed on."""
        out, lse, sinks = self.out, self.lse, self.request.sinks
        if sinks is not None:
            sink = self.heads.of(sinks).to(self.dtype)[None, :, None]
            lse = torch.logaddexp(self.lse, sink.expand_as(self.lse))
            scale = torch.exp(self.lse - lse).masked_fill(self.lse == -torch.inf, 0.0)
            out = out * scale.mT[..., None]
        return out.to(self.q.dtype), lse


class Backward(Work):
    def __init__(
        self, plan: Division, heads: Heads, request: Request, saved: Saved, dout: Tensor, dlse: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> None:  # fmt: skip
        super().__init__(plan, heads, request, saved.q, (saved.k, saved.v), backward=True)
        self.bwd_inputs = BackwardInputs(saved.out, saved.lse, dout, dlse)
        self.taken: tuple[tuple[Rows, bool], BackwardInputs] | None = None
        self.dq = zeros(saved.q, self.dtype)
        self.is_new = True
        self.dkv: dict[int, Keys] = {}
        terms = zip((request.bias, request.sinks, *request.score), wanted, strict=True)
        self.terms = [zeros(x, self.dtype) if x is not None and wants else None for x, wants in terms]
        if self.terms[1] is not None:
            self.add_sinks(self.terms[1])

    def compute(self, sources: tuple[int, ...]) -> None:
        k, v = self.kv(sources)
        grads: list[Tensor | None] = [None if self.is_new else self.dq, None, None]
        for part in self.parts(sources, (k, v)):
            request, rows, keys, _ = part
            bwd_inputs = self.upstream_of(rows, request.cu_q is not None)
            plan = plan_for(request)
            found: Any = plan.backward(request.tensors(), bwd_inputs)
            if request.cu_q is not None:
                found = tuple(x[None] for x in found)
            for n, (x, g, place) in enumerate(zip((self.q, k, v), found, (rows, keys, keys), strict=True)):
                grads[n] = added(grads[n], x, place, g)
            self.add_terms(plan, part, bwd_inputs)
            self.is_new = False
        dq, dk, dv = (zeros(x, self.dtype) if g is None else g for x, g in zip((self.q, k, v), grads, strict=True))
        self.dq = dq
        self.keep(sources, dk, dv)

    def upstream_of(self, rows: Rows, packed: bool) -> BackwardInputs:
        """Of these rows; kept, since the next tile mostly has the same."""
        if self.taken is None or self.taken[0] != (rows, packed):
            out, lse, dout, dlse = self.bwd_inputs
            if not rows.is_all:
                out, lse, dout = rows.take(out), rows.take(lse, 2).contiguous(), rows.take(dout)
                dlse = None if dlse is None else rows.take(dlse, 2).contiguous()
            if packed:
                out, lse, dout, dlse = out[0], lse[0], dout[0], None if dlse is None else dlse[0]
            self.taken = (rows, packed), aligned(BackwardInputs(out, lse, dout, dlse))
        return self.taken[1]

    def add_terms(self, plan: CallPlan, part: Part, bwd_inputs: BackwardInputs) -> None:
        wanted = [x is not None for x in self.terms]
        wanted[1] = False
        if not any(wanted):
            return
        found = iter(plan.term_gradients(tuple(wanted), part.request.tensors(), bwd_inputs))
        bias, _, *score = self.terms
        if bias is not None:
            self.heads.of(bias, 1)[part.bias].add_(next(found))
        for total in score:
            if total is not None:
                total += next(found)

    def add_sinks(self, total: Tensor) -> None:
        """-Σ exp(sink - lse)·delta over the rows."""
        out, lse, dout, dlse = self.bwd_inputs
        assert self.request.sinks is not None
        delta = (dout.to(self.dtype) * out.to(self.dtype)).sum(-1).mT
        sink = self.heads.of(self.request.sinks).to(self.dtype)[None, :, None]
        share = torch.exp(sink - lse) * (delta if dlse is None else delta - dlse)
        self.heads.of(total).sub_(share.masked_fill(lse == -torch.inf, 0.0).sum((0, 2)))

    def keep(self, sources: tuple[int, ...], dk: Tensor, dv: Tensor) -> None:
        """The gradients of keys by where they came from."""
        if not self.gathers(sources):
            self.dkv[sources[0]] = dk, dv
            return
        row = 0
        found: dict[int, list[tuple[int, slice]]] = {}
        for source, at, run in self.plan.buffer(self.station, sources):
            found.setdefault(source, []).append((at, slice(row, row + run.size)))
            row += run.size
        for source, rows in found.items():
            rows.sort(key=lambda x: x[0])
            dk_part, dv_part = (torch.cat([x[:, place] for _, place in rows], 1) for x in (dk, dv))
            self.dkv[source] = dk_part, dv_part

    def sent(self, move: Move) -> Keys:
        if move.what == "kv":
            return super().sent(move)
        dk, dv = self.dkv.pop(move.source)
        for key in [key for key in self.came if key[2] == move.source]:
            came_k, came_v = self.came.pop(key)
            dk, dv = came_k.add_(dk), came_v.add_(dv)
        return dk, dv

    def own_keys(self) -> Keys:
        """The gradients of this rank's keys, with what came home: around the ring, all of it."""
        if self.plan.strategy not in GATHERING:
            for key in list(self.came):
                self.dkv[self.station] = self.came.pop(key)
            return self.dkv[self.station]
        dk, dv = self.dkv[self.station]
        for _, peer, _ in list(self.came):
            rows = Rows.of(self.plan.wants(peer, self.station), dk.shape[1])
            came_k, came_v = self.came.pop(("dkv", peer, self.station))
            rows.add(dk, came_k)
            rows.add(dv, came_v)
        return dk, dv
