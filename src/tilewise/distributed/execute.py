"""The forward and the backward of one rank: the steps of its schedule, on tensors.

`forward` and `backward` are generators. They yield an `Exchange` to post messages, and its number to wait for them. A
driver (`cluster`) runs the generator of one rank over torch.distributed, or those of all ranks in one process.

Partial results are float32. The (out, lse) of the calls are merged by lse; gradients of keys are summed while they
travel. The gradients of a tile are those of the whole: its p comes from the merged lse, its delta from the merged out.
Sinks are added once, after the last merge.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan_cache import CallPlan, plan_of, prepare_backward_inputs
from ..request import BackwardInputs, Request
from .calls import AttentionCall, Rows, accumulate, attention_calls, merge_
from .cluster import Exchange
from .partition import GATHERING, Partition
from .schedule import HEADS_IN, HEADS_OUT, Compute, Merge, Message, Post, Wait, attention_schedule
from .ulysses import Ulysses

Pair = tuple[Tensor, Tensor]  # (k, v), (dk, dv) or (out, lse)
Steps = Generator[Exchange | int, None, Any]


class Saved(NamedTuple):
    """What a backward needs of its forward: tensors of the ring rank's tokens, for this rank's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def forward(plan: Partition, rank: int, request: Request) -> Steps:
    """Returns (out, lse, saved, max_logit) of a rank. The request has the rank's tokens: (B, tokens, heads, dim); a
    packed plan has one batch row. max_logit (B, H) is the largest score of this rank's pairs, -inf for the heads that
    others have; None if the call does not return it."""
    ulysses = Ulysses(plan, rank, request.q.shape[2], request.k.shape[2])
    q, k, v = yield from ulysses.to_heads(HEADS_IN, request[:3], kv=2)
    work = Forward(plan, ulysses, request, q, (k, v))
    yield from work.run()
    saved = Saved(q, k, v, *work.results())
    out, lse = yield from ulysses.to_tokens(HEADS_OUT, [saved.out, saved.lse.mT])
    return out, lse.mT, saved, work.max_logit


def backward(
    plan: Partition,
    rank: int,
    request: Request,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: tuple[bool, ...],
) -> Steps:
    """Returns the gradients of q, k, v, bias, sinks and the score mod's tensors. Of bias, sinks and these tensors, the
    ones that are not `wanted` are None. The gradient of a replicated tensor is this rank's part of a sum over ranks."""
    ulysses = Ulysses(plan, rank, request.q.shape[2], request.k.shape[2])
    given = [dout] if dlse is None else [dout, dlse.mT]
    dout, *rest = yield from ulysses.to_heads(HEADS_IN, given)
    bwd_inputs = BackwardInputs(saved.out, saved.lse, dout, rest[0].mT if rest else None)
    work = Backward(plan, ulysses, request, saved, bwd_inputs, wanted)
    yield from work.run()
    grads = [work.dq.to(request.q.dtype), *work.own_dkv()]
    dq, dk, dv = yield from ulysses.to_tokens(HEADS_OUT, grads, kv=2)
    inputs = (*request[:3], request.bias, request.sinks, *request.score)
    return tuple(
        None if g is None or x is None else g.to(x.dtype)
        for g, x in zip((dq, dk, dv, *work.terms), inputs, strict=True)
    )


def _call_plan(request: Request) -> CallPlan:
    """The prepared launches of one call: its options are the key."""
    return plan_of("tile", lambda: request, request.tensors(), request.spec)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(like.shape, dtype=dtype)


class _Work:
    """One rank between its exchanges of heads: what the forward and the backward have in common."""

    is_backward: bool

    def __init__(self, plan: Partition, ulysses: Ulysses, request: Request, q: Tensor, kv: Pair) -> None:
        self.plan, self.ulysses, self.ring_rank = plan, ulysses, ulysses.ring_rank
        bias = None if request.bias is None else ulysses.heads_of(request.bias, 1)
        self.request = request._replace(q=q, bias=bias)
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.kv = {self.ring_rank: kv}  # by ring rank; those of others are dropped after use
        self.received: list[tuple[Message, Pair]] = []  # (out, lse) or (dk, dv), not yet used

    def run(self) -> Steps:
        for step in attention_schedule(self.plan, self.ulysses.rank, self.is_backward):
            match step:
                case Post(number, sends, receives):
                    sent = [(m.peer, x.contiguous()) for m in sends for x in self.sent(m)]
                    yield Exchange(number, sent, [(m.peer, x) for m in receives for x in self.buffer(m)])
                case Wait(number):
                    yield number
                case Compute(sources):
                    self.compute(sources)
                    for source in sources:
                        if source != self.ring_rank:
                            del self.kv[source]
                case Merge(replaces):
                    self.merge(replaces)
        return None

    def sent(self, message: Message) -> Pair:
        """The tensors of a message to send."""
        k, v = self.kv[message.source]
        if self.plan.strategy not in GATHERING:
            return k, v
        rows = self.rows_sent(message.peer)
        return rows.take(k), rows.take(v)

    def buffer(self, message: Message) -> Pair:
        """New tensors for a message to receive."""
        is_kv = message.what == "kv"
        dtype = self.request.q.dtype if is_kv else self.dtype
        own = self.kv[self.ring_rank]
        k, v = (x.new_empty((x.shape[0], message.rows, *x.shape[2:]), dtype=dtype) for x in own)
        if is_kv:
            self.kv[message.source] = k, v
        else:
            self.received.append((message, (k, v)))
        return k, v

    def rows_sent(self, peer: int) -> Rows:
        """The rows of this rank's keys that a peer which gathers keys receives."""
        plan, rank, device = self.plan, self.ring_rank, self.request.q.device
        return plan.tensors.get(
            ("rows sent", peer, rank),
            device,
            lambda: Rows.of(plan.rows_sent(peer, rank), plan.rows(rank), device),
        )

    def keys_of(self, sources: tuple[int, ...]) -> Pair:
        """k and v of some ring ranks, as `Partition.key_runs` orders them."""
        if not self.plan.gathers(self.ring_rank, sources):
            return self.kv[sources[0]]
        runs = self.plan.key_runs(self.ring_rank, sources)
        k, v = (torch.cat([self.kv[s][n][:, row : row + run.size] for s, row, run in runs], 1) for n in (0, 1))
        return k, v

    def calls(self, sources: tuple[int, ...], k: Tensor, v: Tensor) -> Iterator[tuple[AttentionCall, Request]]:
        whole = self.request._replace(k=k, v=v)
        for call in attention_calls(self.plan, self.ring_rank, sources, whole, self.ulysses.own.q0):
            yield call, call.request(whole)

    def compute(self, sources: tuple[int, ...]) -> None:
        raise NotImplementedError

    def merge(self, replaces: bool) -> None:
        raise NotImplementedError


class Forward(_Work):
    """Accumulates (out, lse) over the keys of all ring ranks."""

    is_backward = False

    def __init__(self, plan: Partition, ulysses: Ulysses, request: Request, q: Tensor, kv: Pair) -> None:
        super().__init__(plan, ulysses, request, q, kv)
        self.out = q.new_zeros((*q.shape[:-1], kv[1].shape[-1]), dtype=self.dtype)
        self.lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=self.dtype)
        heads = request.q.shape[2]
        self.max_logit: Tensor | None = None
        if request.spec.max_logit:
            self.max_logit = q.new_full((q.shape[0], heads), -torch.inf, dtype=torch.float32)
        self.is_first = True

    def compute(self, sources: tuple[int, ...]) -> None:
        for call, request in self.calls(sources, *self.keys_of(sources)):
            out, lse, *max_logit = _call_plan(request).forward(request.tensors())
            if self.max_logit is not None:
                own = self.ulysses.heads_of(self.max_logit, 1)
                torch.maximum(own, max_logit[0], out=own)
            if request.cu_q is not None:
                out, lse = out[None], lse[None]
            if self.is_first and call.queries.is_all:
                self.out, self.lse = out.contiguous(), lse.contiguous()
            else:
                merge_(self.out, self.lse, call.queries, out, lse)
            self.is_first = False

    def sent(self, message: Message) -> Pair:
        return (self.out, self.lse) if message.what == "state" else super().sent(message)

    def buffer(self, message: Message) -> Pair:
        if message.what != "state":
            return super().buffer(message)
        state = torch.empty_like(self.out), torch.empty_like(self.lse)
        self.received.append((message, state))
        return state

    def merge(self, replaces: bool) -> None:
        _, (out, lse) = self.received.pop()
        if replaces:
            self.out, self.lse = out, lse
        else:  # in new memory: the state that was sent may still be read
            self.out, self.lse = self.out.clone(), self.lse.clone()
            merge_(self.out, self.lse, Rows(((0, out.shape[1]),), out.shape[1]), out, lse)

    def results(self) -> Pair:
        """(out, lse) with the sinks; out in the dtype of q."""
        out, lse, sinks = self.out, self.lse, self.request.sinks
        if sinks is not None:
            sink = self.ulysses.heads_of(sinks, 0).to(self.dtype)[None, :, None]
            lse = torch.logaddexp(self.lse, sink.expand_as(self.lse))
            scale = torch.exp(self.lse - lse).masked_fill(self.lse == -torch.inf, 0.0)
            out = out * scale.mT[..., None]
        return out.to(self.request.q.dtype), lse


class Backward(_Work):
    """Accumulates the gradients of q, of the keys by ring rank, and of bias, sinks and the score mod's tensors."""

    is_backward = True

    def __init__(
        self,
        plan: Partition,
        ulysses: Ulysses,
        request: Request,
        saved: Saved,
        bwd_inputs: BackwardInputs,
        wanted: tuple[bool, ...],
    ) -> None:
        super().__init__(plan, ulysses, request, saved.q, (saved.k, saved.v))
        self.bwd_inputs = bwd_inputs
        self.last: tuple[tuple[Any, bool], BackwardInputs] | None = None  # what `bwd_inputs_of` returned last
        self.dq = _zeros(saved.q, self.dtype)
        self.is_first = True
        self.dkv: dict[int, Pair] = {}  # by ring rank
        terms = zip((request.bias, request.sinks, *request.score), wanted, strict=True)
        self.terms = [_zeros(x, self.dtype) if x is not None and wants else None for x, wants in terms]
        if self.terms[1] is not None:
            self.add_sinks(self.terms[1])

    def compute(self, sources: tuple[int, ...]) -> None:
        q, (k, v) = self.request.q, self.keys_of(sources)
        dq, dk, dv = None if self.is_first else self.dq, None, None
        for call, request in self.calls(sources, k, v):
            is_packed = request.cu_q is not None
            bwd_inputs = self.bwd_inputs_of(call.queries, is_packed)
            call_plan = _call_plan(request)
            found: Any = call_plan.backward((*request.tensors(), *bwd_inputs))
            dq_part, dk_part, dv_part = (x[None] for x in found) if is_packed else found
            dq = accumulate(dq, q, call.queries, dq_part)
            dk, dv = accumulate(dk, k, call.keys, dk_part), accumulate(dv, v, call.keys, dv_part)
            self.add_terms(call, call_plan, request, bwd_inputs)
            self.is_first = False
        self.dq = _zeros(q, self.dtype) if dq is None else dq
        self.keep(sources, *(_zeros(x, self.dtype) if g is None else g for x, g in ((k, dk), (v, dv))))

    def bwd_inputs_of(self, rows: Rows, is_packed: bool) -> BackwardInputs:
        """Of these rows; the last one is kept, since the next call often has the same rows."""
        if self.last is None or self.last[0] != (rows.ranges, is_packed):
            out, lse, dout, dlse = self.bwd_inputs
            if not rows.is_all:
                out, lse, dout = rows.take(out), rows.take(lse, 2).contiguous(), rows.take(dout)
                dlse = None if dlse is None else rows.take(dlse, 2).contiguous()
            if is_packed:
                out, lse, dout, dlse = out[0], lse[0], dout[0], None if dlse is None else dlse[0]
            self.last = (rows.ranges, is_packed), prepare_backward_inputs(BackwardInputs(out, lse, dout, dlse))
        return self.last[1]

    def add_terms(self, call: AttentionCall, call_plan: CallPlan, request: Request, bwd_inputs: BackwardInputs) -> None:
        """Adds the call's gradients of bias and the score mod's tensors."""
        bias, _, *score = self.terms
        wanted = (bias is not None, False, *(x is not None for x in score))
        if not any(wanted):
            return
        found = iter(call_plan.term_gradients(wanted, request.tensors(), bwd_inputs))
        if bias is not None:
            call.bias_of(self.ulysses.heads_of(bias, 1)).add_(next(found))
        for total in score:
            if total is not None:
                total += next(found)

    def add_sinks(self, total: Tensor) -> None:
        """Adds the gradient of the sinks: the sum over rows of -exp(sink - lse) * (delta - dlse)."""
        out, lse, dout, dlse = self.bwd_inputs
        assert self.request.sinks is not None
        delta = (dout.to(self.dtype) * out.to(self.dtype)).sum(-1).mT
        sink = self.ulysses.heads_of(self.request.sinks, 0).to(self.dtype)[None, :, None]
        share = torch.exp(sink - lse) * (delta if dlse is None else delta - dlse)
        self.ulysses.heads_of(total, 0).sub_(share.masked_fill(lse == -torch.inf, 0.0).sum((0, 2)))

    def keep(self, sources: tuple[int, ...], dk: Tensor, dv: Tensor) -> None:
        """Stores the gradients of keys by the ring rank that owns them, in the order in which it has sent them."""
        if not self.plan.gathers(self.ring_rank, sources):
            self.dkv[sources[0]] = dk, dv
            return
        begin = 0
        found: dict[int, list[tuple[int, slice]]] = {}
        for source, row, run in self.plan.key_runs(self.ring_rank, sources):
            found.setdefault(source, []).append((row, slice(begin, begin + run.size)))
            begin += run.size
        for source, parts in found.items():
            parts.sort(key=lambda x: x[0])
            dk_part, dv_part = (torch.cat([x[:, rows] for _, rows in parts], 1) for x in (dk, dv))
            self.dkv[source] = dk_part, dv_part

    def sent(self, message: Message) -> Pair:
        if message.what == "kv":
            return super().sent(message)
        dk, dv = self.dkv.pop(message.source)
        for n, (received, (dk_received, dv_received)) in enumerate(self.received):
            if received.source == message.source:
                dk, dv = dk_received.add_(dk), dv_received.add_(dv)
                del self.received[n]
                break
        return dk, dv

    def own_dkv(self) -> Pair:
        """The gradients of this rank's keys. What comes back around the ring is their sum over all ranks; of gathered
        keys each rank sends a part."""
        for message, (dk, dv) in self.received:
            if self.plan.strategy not in GATHERING:
                return dk, dv
            rows = self.rows_sent(message.peer)
            for total, part in zip(self.dkv[self.ring_rank], (dk, dv), strict=True):
                rows.add(total, part)
        return self.dkv[self.ring_rank]
