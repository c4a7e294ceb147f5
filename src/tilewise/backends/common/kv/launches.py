"""From a request with a KV cache to launches: the plan, the new tokens, the keys, what several programs share."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from ....errors import AttentionError
from ....kv_request import UNDIVIDED, AppendRequest, KvCall, KvRequest, PlannedTile
from ..device.structs import Plan, View
from ..gpu import Gpu
from ..kernel_config import precision
from ..launch import INTERPRETED, Launch, Memory, Target, can_overlap, overlapped, target_of
from ..score_terms import device_terms, folded, is_bounded, mask_mod
from ..shapes import padded, view
from . import kv_tiles
from . import partition as kv_profile
from .append import Turn, append_kernel
from .combine import combine_kernel
from .decode import Cache, attend_kernel
from .partition import Deal
from .schedule import RECORD as SCHEDULE_RECORD
from .schedule import plan_kernel

CHUNK = 1024  # items that the plan looks at together
RECORD = SCHEDULE_RECORD.value  # numbers of a stretch in the schedule
COMBINED = 4096  # numbers that a program of `combine_kernel` looks at together


def row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def deal(request: KvRequest, target: Target) -> Deal:
    processors = kv_tiles.INTERPRETED_PROCESSORS if INTERPRETED else target.processors
    return kv_profile.deal(request, target.gpu, processors, kv_tiles.INTERPRETER if INTERPRETED else None)


def checked(dealt: Deal, dim_v: int, schedule: Tensor, workspace: Tensor | None = None) -> Deal:
    """Raises AttentionError if the memory of a plan has other sizes than this call needs: accesses would be out of
    bounds."""
    found = [schedule.numel()] if workspace is None else [schedule.numel(), workspace.numel()]
    wanted = [dealt.numbers, dealt.floats(dim_v)][: len(found)]
    if found != wanted:
        raise AttentionError("sizes of the plan", found, f"{wanted}: make the plan on this device, in this process")
    return dealt


def schedule_sizes(request: KvRequest, target: Target | None = None) -> tuple[int, int]:
    """int64 numbers of the schedule, and float32 numbers of the workspace."""
    dealt = deal(request, target_of(request.q.device) if target is None else target)
    return dealt.numbers, dealt.floats(request.v.shape[-1])


def planned(request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
    """The tiles of a schedule, read back (its layout is in schedule.py). Those with keys come first: the last stretch
    ends at the item behind them. Those without keys come last."""
    dealt = checked(deal(request, target_of(request.q.device)), request.v.shape[-1], schedule)
    numbers: list[int] = schedule.tolist()
    with_keys, without = numbers[2 + RECORD * dealt.teams], numbers[1]
    table = numbers[len(numbers) - 8 * dealt.items :]
    items = [PlannedTile(*table[8 * n : 8 * n + 8]) for n in range(dealt.items)]
    places = [n for n in range(dealt.items) if n < with_keys or n >= dealt.items - without]
    return sorted(items[n] for n in places)


def schedule_launch(request: KvRequest, schedule: Tensor, target: Target, few: int | None = None) -> Launch:
    """`few`: sequences with more queries are left out."""
    q, k, places, gpu = request.q, request.k, request.places, target.gpu
    dealt = checked(deal(request, target), request.v.shape[-1], schedule)
    items = max(dealt.items, 1)
    return Launch(
        plan_kernel,
        1,
        (
            schedule, places.lengths, request.call.cu_q, places.cu_new, places.starts, places.indptr, q.shape[-3],
            places.new, min(places.capacity(k), UNDIVIDED), k.shape[1], places.batch, dealt.tiles, dealt.items,
            dealt.teams, request.spec.before, request.spec.after, dealt.unit, dealt.least, few,
        ),
        {
            "GROUP": q.shape[-2] // k.shape[-2], "BLOCK_M": dealt.tile.block_m, "COST": dealt.cost,
            "CHUNK": min(CHUNK, triton.next_power_of_2(items)), "BLOCK_T": triton.next_power_of_2(dealt.teams + 1),
            "num_warps": 4, **overlapped(can_overlap(gpu)),
        },
    )  # fmt: skip


def attend_launches(kv: KvCall, target: Target, memory: Memory, beside: bool = False) -> list[Launch]:
    """`beside`: they may run together with what is launched before them."""
    request, out, lse, schedule, workspace = kv.request, kv.out, kv.lse, kv.schedule, kv.workspace
    assert out is not None
    assert lse is not None
    assert schedule is not None
    assert workspace is not None
    call, places, spec, gpu = request.call, request.places, request.spec, target.gpu
    q, k, v = call[:3]
    group, dv = q.shape[-2] // k.shape[-2], v.shape[-1]
    dealt = checked(deal(request, target), dv, schedule, workspace)
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
            view(q), Cache(view(k), view(v), table, places.indptr, places.rows), view(out), row_view(lse), workspace,
            schedule, request.tree, spec.before, spec.after, scale, dealt.items, dealt.programs, dealt.unit,
            dealt.slots,
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
    combining = combine_launch(kv, terms, dealt, target)
    if not differ:
        return [attending, combining]
    careful = attending._replace(options=attending.options | {"CAREFUL": True, "BESIDE": False, "num_stages": 1})
    return [attending, careful, combining]


def combine_launch(kv: KvCall, terms: Any, dealt: Deal, target: Target) -> Launch:
    """As many parts together as a row set is likely to have, or one of many among short ones; and as many rows, or as
    few columns, as fit beside them."""
    request, out, lse, gpu = kv.request, kv.out, kv.lse, target.gpu
    assert out is not None
    assert lse is not None
    q, k, dv = request.q, request.k, request.v.shape[-1]
    most = kv_tiles.INTERPRETED_PROCESSORS if INTERPRETED else 8 * target.processors
    row_sets = max(dealt.items * k.shape[-2], 1)
    parts = 1 if request.split else min(max(triton.next_power_of_2(-(-dealt.programs // row_sets)), 8), 128)
    columns = min(padded(dv), COMBINED // parts)
    block_r = min(triton.next_power_of_2(dealt.rows), COMBINED // (parts * columns))
    blocks = -(-dealt.rows // block_r) * -(-dv // columns)
    return Launch(
        combine_kernel,
        min(dealt.programs * blocks, most),
        (
            view(out), row_view(lse), kv.workspace, kv.schedule, terms.sinks, dealt.programs, dealt.items, dealt.slots,
            dealt.rows, request.places.batch,
        ),
        {
            "GROUP": q.shape[-2] // k.shape[-2], "KV_HEADS": k.shape[-2], "DV": dv, "BLOCK_R": block_r,
            "BLOCK_C": parts, "BLOCK_DV": columns, "SPLIT": request.split is not None,
            "FAR": terms.large_scores is not None, "num_warps": 4, **overlapped(can_overlap(gpu)),
        },
    )  # fmt: skip


def append_launch(request: AppendRequest, gpu: Gpu) -> Launch:
    k_new, v_new, k, v, places = request[:5]
    rotary, q, rotated, table = request.rotary, request.q, request.rotated, places.table
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
            none if rotated is None else view(rotated), places.lengths, table, places.indptr, places.rows,
            places.cu_new, request.cu_q, request.slots, turn, tokens, places.new,
            0 if q is None or q.dim() == 3 else q.shape[1],
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
