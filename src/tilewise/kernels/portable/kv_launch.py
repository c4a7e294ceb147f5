"""From a request with a KV cache to launches: the plan, the new tokens, the keys, what several programs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from ...kv_spec import UNDIVIDED, AppendRequest, KvRequest, Ran
from ...spec import AttentionError
from .. import replay
from ..gpu import Gpu
from ..launch import INTERPRETED, Launch, can_overlap, gpu_for, multiprocessors, on, overlapped
from ..shapes import padded, view
from ..terms import device_terms, folded, is_bounded, mask_mod
from ..tile.tuples import Plan, View
from . import kv_profile, kv_tiles
from .kv import Cache, attend_kernel
from .kv_append import Turn, append_kernel
from .kv_combine import combine_kernel
from .kv_plan import plan_kernel
from .kv_profile import Deal
from .options import precision

CHUNK = 1024  # items that the plan looks at together
COMBINED = 4096  # numbers that a program of `combine_kernel` looks at together


def row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def deal(request: KvRequest, gpu: Gpu) -> Deal:
    q = request.q
    processors = multiprocessors(q.device) if q.is_cuda else kv_tiles.INTERPRETED_PROCESSORS
    return kv_profile.deal(request, gpu, processors, kv_tiles.INTERPRETER if INTERPRETED else None)


def checked(dealt: Deal, dim_v: int, ledger: Tensor, room: Tensor | None = None) -> Deal:
    """A plan made under another TILEWISE_KV_TILE has other sizes, and the memory behind it belongs to somebody."""
    found = [ledger.numel()] if room is None else [ledger.numel(), room.numel()]
    wanted = [dealt.numbers, dealt.floats(dim_v)][: len(found)]
    if found != wanted:
        raise AttentionError("sizes of the plan", found, f"{wanted}: plan_kv under the same TILEWISE_KV_TILE")
    return dealt


def room_for(request: KvRequest) -> tuple[int, int]:
    """Numbers of the plan, and floats of the workspace."""
    dealt = deal(request, gpu_for(request.q))
    return dealt.numbers, dealt.floats(request.v.shape[-1])


def plan(request: KvRequest, ledger: Tensor, recordings: dict[Any, Any] | None = None) -> Ran | None:
    """`recordings`, here and below, remembers the launches of calls that look alike."""
    gpu = gpu_for(request.q)
    tensors = (ledger, *request.tensors())
    key = "plan", kv_tiles.asked(), ledger.numel()
    with on(ledger):
        recording = replay.launch(key, tensors, lambda: [plan_launch(request, ledger, gpu)], recordings)
    return ran(recording, tensors)


def attend(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor,
    recordings: dict[Any, Any] | None = None,
) -> Ran | None:  # fmt: skip
    if request.q.shape[:-1].numel() == 0:
        return None
    gpu = gpu_for(request.q)
    tensors = (*request.tensors(), out, lse, ledger, room)
    key = (
        "attend",
        kv_tiles.asked(),
        precision(request.q, gpu),
        ledger.numel(),
        room.numel(),
        *replay.layout_of((out, lse, ledger, room), request.tensors()),
    )
    with on(out):
        build = lambda: attend_launches(request, out, lse, ledger, room, gpu)  # noqa: E731
        recording = replay.launch(key, tensors, build, recordings)
    return ran(recording, tensors)


def append(request: AppendRequest, recordings: dict[Any, Any] | None = None) -> Ran | None:
    gpu = gpu_for(request.k_new)
    tensors = request.tensors()
    with on(request.k):
        recording = replay.launch("append", tensors, lambda: [append_launch(request, gpu)], recordings)
    return ran(recording, tensors)


def ran(recording: Any, tensors: Sequence[Tensor | None]) -> Ran | None:
    return None if recording is None else Ran(replay.joined, recording, tensors)


def plan_launch(request: KvRequest, ledger: Tensor, gpu: Gpu, few: int | None = None) -> Launch:
    """`few`: sequences with more queries are left out."""
    q, k, places = request.q, request.k, request.places
    dealt = checked(deal(request, gpu), request.v.shape[-1], ledger)
    items = max(dealt.items, 1)
    return Launch(
        plan_kernel,
        1,
        (
            ledger, places.lengths, request.call.cu_q, places.cu_new, places.starts, places.indptr, q.shape[-3],
            places.new, min(places.capacity(k), UNDIVIDED), k.shape[1], places.batch, dealt.tiles, dealt.items,
            dealt.teams, request.spec.before, request.spec.after, dealt.unit, dealt.least, few,
        ),
        {
            "GROUP": q.shape[-2] // k.shape[-2], "BLOCK_M": dealt.tile.block_m, "COST": dealt.cost,
            "CHUNK": min(CHUNK, triton.next_power_of_2(items)), "BLOCK_T": triton.next_power_of_2(dealt.teams + 1),
            "num_warps": 4, **overlapped(can_overlap(gpu)),
        },
    )  # fmt: skip


def attend_launches(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor, gpu: Gpu, beside: bool = False
) -> list[Launch]:
    """`beside`: they may run together with what is launched before them."""
    call, places, spec = request.call, request.places, request.spec
    q, k, v = call[:3]
    group, dv = q.shape[-2] // k.shape[-2], v.shape[-1]
    dealt = checked(deal(request, gpu), dv, ledger, room)
    tile, table = dealt.tile, places.table
    scoring, scale, _ = folded(call, gpu, slope=False)
    terms = device_terms(call, gpu)
    overlap = can_overlap(gpu)
    differ = request.most != 1 or spec.mask_mod is not None  # the rows of a tile, in what they see
    compiled = Plan(
        GROUP=group, D=q.shape[-1], DV=dv, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=padded(q.shape[-1]),
        BLOCK_DV=padded(dv), FOLD=scoring["FOLD"], PRECISION=precision(q, gpu), CHUNK=512,
        BOUNDED=scoring["FOLD"] and is_bounded(call, scale), OVERLAP=overlap,
    )  # fmt: skip
    attending = Launch(
        attend_kernel,
        dealt.programs,
        (
            view(q), Cache(view(k), view(v), table, places.indptr, places.rows), view(out), row_view(lse), room, ledger,
            request.tree, spec.before, spec.after, scale, dealt.items, dealt.programs, dealt.unit, dealt.slots,
            dealt.rows, 0 if table is None else table.stride(0), k.shape[0], places.batch,
            0 if call.cu_q is not None else q.shape[1], 0 if request.tree is None else request.tree.shape[1], terms,
        ),
        {
            "SCORE_MOD": scoring["SCORE_MOD"], "MASK_MOD": mask_mod(call), "PLAN": compiled,
            "PAGE": None if table is None else k.shape[1], "KV_HEADS": k.shape[-2], "SPLIT": request.split is not None,
            "CARRY": tile.carry != 0, "ALIKE": view(k)[1:] == view(v)[1:], "STARTS": places.starts is not None,
            "BESIDE": beside, "FLAGGED": differ, "CAREFUL": False, "num_warps": tile.warps,
            "num_stages": tile.stages,
            **({"launch_pdl": True} if overlap else {}), **({"maxnreg": tile.registers} if tile.registers else {}),
        },
    )  # fmt: skip
    combining = combine_launch(request, out, lse, ledger, room, terms.sinks, dealt, gpu)
    if not differ:
        return [attending, combining]
    careful = attending._replace(options=attending.options | {"CAREFUL": True, "BESIDE": False, "num_stages": 1})
    return [attending, careful, combining]


def combine_launch(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor, sinks: Any, dealt: Deal, gpu: Gpu
) -> Launch:
    """As many parts together as a row set is likely to have, or one of many among short ones; and as many rows, or as
    few columns, as fit beside them."""
    q, k, dv = request.q, request.k, request.v.shape[-1]
    row_sets = max(dealt.items * k.shape[-2], 1)
    parts = 1 if request.split else min(max(triton.next_power_of_2(-(-dealt.programs // row_sets)), 8), 128)
    columns = min(padded(dv), COMBINED // parts)
    block_r = min(triton.next_power_of_2(dealt.rows), COMBINED // (parts * columns))
    blocks = -(-dealt.rows // block_r) * -(-dv // columns)
    return Launch(
        combine_kernel,
        min(dealt.programs * blocks, 8 * multiprocessors(q.device) if q.is_cuda else kv_tiles.INTERPRETED_PROCESSORS),
        (
            view(out), row_view(lse), room, ledger, sinks, dealt.programs, dealt.items, dealt.slots, dealt.rows,
            request.places.batch,
        ),
        {
            "GROUP": q.shape[-2] // k.shape[-2], "KV_HEADS": k.shape[-2], "DV": dv, "BLOCK_R": block_r,
            "BLOCK_C": parts, "BLOCK_DV": columns, "SPLIT": request.split is not None, "num_warps": 4,
            **overlapped(can_overlap(gpu)),
        },
    )  # fmt: skip


def append_launch(request: AppendRequest, gpu: Gpu) -> Launch:
    k_new, v_new, k, v, places = request[:5]
    rotary, q, turned, table = request.rotary, request.q, request.turned, places.table
    tokens = k_new.shape[:-2].numel()
    queries = 0 if q is None else q.shape[:-2].numel()
    heads = max(k.shape[-2], 0 if q is None else q.shape[-2])
    turn = Turn() if rotary is None else Turn(rotary.cos, rotary.sin, rotary.positions, rotary.q_positions)
    columns = padded(max(k.shape[-1], v.shape[-1]))
    none = View(None, (0, 0, 0, 0))
    return Launch(
        append_kernel,
        tokens + queries,
        (
            view(k_new), view(v_new), view(k), view(v), none if q is None else view(q),
            none if turned is None else view(turned), places.lengths, table, places.indptr, places.rows, places.cu_new,
            request.cu_q, request.slots, turn, tokens, places.new, 0 if q is None or q.dim() == 3 else q.shape[1],
            places.batch, 1 if rotary is None else rotary.cos.shape[0], 0 if table is None else table.stride(0),
            k.shape[0], 0 if table is None else table.shape[-1], k.shape[1],
        ),
        {
            "KV_HEADS": k.shape[-2], "HEADS": 0 if q is None else q.shape[-2], "D": k.shape[-1], "DV": v.shape[-1],
            "BLOCK_H": min(triton.next_power_of_2(heads), max(1, 4096 // columns)), "BLOCK_D": padded(k.shape[-1]),
            "BLOCK_DV": padded(v.shape[-1]), "HALF": 1 if rotary is None else rotary.cos.shape[1],
            "INTERLEAVED": rotary is not None and rotary.interleaved,
            "SEARCH": min(1024, triton.next_power_of_2(max(places.batch, 1))), "num_warps": 4,
            **overlapped(can_overlap(gpu)),
        },
    )  # fmt: skip
