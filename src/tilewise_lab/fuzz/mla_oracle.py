"""What a call with a cache of MLA should leave: the bytes of its tokens, by the definition of each format, and out and
lse of what the cache holds then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise_lab.fuzz import kv_oracle, stored
from tilewise_lab.fuzz.budget import excess
from tilewise_lab.fuzz.mla import LATENT, MlaCase, counted, named

FLOAT64_ERROR = 2**14 * torch.finfo(torch.float64).eps  # the exact results have it too: scores add 576 large products


def fault(case: MlaCase, found: dict[str, Any]) -> tuple[str, str] | None:
    """The first result that is wrong, and how."""
    wrong = _wrong_cache(case, found)
    if wrong is None and case.rotary and case.mode == "mla":
        wrong = _wrong_turned(case, found)
    if wrong is not None:
        return "cache", wrong
    if case.mode == "append":
        return None
    if len(found["outs"]) != 1 + case.return_lse:
        return "out", f"out: {len(found['outs'])} results"
    dtype = getattr(torch, case.dtype)
    exact, peer = results(case, found, torch.float64), results(case, found, dtype)
    peer["lse"] = results(case, found, torch.promote_types(dtype, torch.float32))["lse"]
    ours = dict(zip(("out", "lse"), found["outs"], strict=False))
    unit = FLOAT64_ERROR if dtype == torch.float64 else None
    if case.return_lse:
        wide = torch.promote_types(dtype, torch.float32)
        # what attention_kv rotates is rounded before it is used, and so is what lse sums
        lse_unit = unit or 8 * torch.finfo(dtype if case.rotary and case.mode != "mla" else wide).eps
        wrong = excess({"lse": ours.pop("lse")}, {"lse": exact.pop("lse")}, {"lse": peer.pop("lse")}, dtype, lse_unit)
    wrong = wrong or excess(ours, {"out": exact["out"]}, peer, dtype, unit)
    return None if wrong is None else (wrong.partition(":")[0], wrong)


def written(case: MlaCase, found: dict[str, Any]) -> dict[tuple[int, int], tuple[int, int, Tensor]]:
    """place -> (sequence, position, numbers (576,)) of the new tokens that are written, rotated in float64."""
    places, n = {}, 0
    for b, count in enumerate(case.new):
        for i in range(count):
            token = found["new"].reshape(-1, case.d)[n]
            if case.slots is None or n not in case.slots:
                position = case.lengths[b] + i
                places[case.place(b, position)] = b, position, turned(case, found, token, position)
            n += 1
    return places


def turned(case: MlaCase, found: dict[str, Any], x: Tensor, position: int) -> Tensor:
    """(.., 576) with the dims after the values rotated, in float64 if they are."""
    if not case.rotary:
        return x
    before, rest, after = x.double().split((LATENT, case.dims, case.d - LATENT - case.dims), -1)
    return torch.cat([before, kv_oracle.rotated(case, found, rest, position), after], -1)


def _wrong_turned(case: MlaCase, found: dict[str, Any]) -> str | None:
    at, q, n = 0, found["q"].reshape(-1, case.group, case.d), found["turned"].reshape(-1, case.group, case.d)
    for b, count in enumerate(case.queries):
        for i in range(count):
            exact = turned(case, found, q[at], case.totals[b] - count + i)
            if not _near(n[at], exact, q[at]):
                return "q: other numbers than the rotated ones"
            at += 1
    return None


def _near(x: Tensor, exact: Tensor, of: Tensor) -> bool:
    """Whether x is `exact` within a unit in the last place, and what float32 loses of the numbers it comes from."""
    info = torch.finfo(x.dtype)
    slack = info.eps * (exact.abs() + info.tiny) + 2.0**-21 * float(of.double().abs().max())
    return bool(((x.double() - exact).abs() <= slack).all())


def _wrong_cache(case: MlaCase, found: dict[str, Any]) -> str | None:
    """What is wrong with the bytes of the cache, or with its scales by token."""
    new, cache, before = written(case, found), found["cache"], found["before"]
    for row in range(cache.shape[0]):
        for at in range(cache.shape[1]):
            place = row, at
            if place not in new:
                if not torch.equal(_bytes(cache[place]), _bytes(before[place])):
                    return "cache: a token that is not new has changed"
                if case.k_scale == "token" and not _same(found["scale"][place], found["scale_before"][place]):
                    return "cache: a scale of a token that is not new has changed"
            elif (wrong := _wrong_token(case, found, place, *new[place])) is not None:
                return f"cache: {wrong}"
    return None


def _wrong_token(
    case: MlaCase, found: dict[str, Any], place: tuple[int, int], b: int, position: int, x: Tensor
) -> str | None:
    """What is wrong with a new token whose numbers are x."""
    ours = found["cache"][place][0]
    if case.is_deepseek:
        latent, scale, rest = _bytes(ours).split((LATENT, 16, 128))
        wanted = stored.token_scale(x[:LATENT], "float8_e4m3fn", 4)
        if not _same(scale.view(torch.float32), wanted):
            return "other scales"
        if not _same(latent.view(torch.float8_e4m3fn), _packed(x[:LATENT], "float8_e4m3fn", wanted)):
            return "other bytes"
        return None if _is_rounded(case, rest.view(torch.bfloat16), x[LATENT:]) else "other numbers after the values"
    if case.k_store not in stored.LARGEST:
        return None if _is_rounded(case, ours, x) else "other numbers"
    if case.k_scale == "token":
        wanted = stored.token_scale(x, case.k_store, 1)
        if not _same(found["scale"][place], wanted):
            return "other scales"
    else:
        wanted = _scale(case, found, b, place).reshape(1)
    return None if _same(ours, _packed(x, case.k_store, wanted)) else "other bytes"


def _packed(x: Tensor, store: str, scale: Tensor) -> Tensor:
    """Numbers as they are stored: nan, and what a scale that is inf or nan makes of the largest, is nan; 0 in int8."""
    y = x.float() / stored.by_dim(scale, x.shape[-1])
    _, code = stored.nearest(y.nan_to_num(0.0, torch.inf, -torch.inf), store)
    if store == "int8":
        return code.to(torch.uint8).view(torch.int8)
    return torch.where(y.isnan(), 127, code).to(torch.uint8).view(getattr(torch, store))


def _is_rounded(case: MlaCase, ours: Tensor, x: Tensor) -> bool:
    return _near(ours, x.double(), x) if case.rotary else _same(ours, x.to(ours.dtype))


def _same(ours: Tensor, wanted: Tensor) -> bool:
    """Whether all bits agree; of nan its place alone."""
    if not ours.is_floating_point():
        return torch.equal(ours, wanted)
    a, b = (torch.where(x.isnan(), torch.zeros_like(x, dtype=torch.float32), x.float()) for x in (ours, wanted))
    return torch.equal(ours.isnan(), wanted.isnan()) and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _scale(case: MlaCase, found: dict[str, Any], b: int, place: tuple[int, int]) -> Tensor:
    scale: Tensor = stored.scale_at(found.get("scale"), b, place, found["cache"].device)
    return scale


def read(case: MlaCase, found: dict[str, Any], b: int, place: tuple[int, int]) -> Tensor:
    """The numbers (576,) of a token, in float64."""
    token: Tensor = found["cache"][place][0].contiguous()
    if case.is_deepseek:
        latent, scale, rest = token.view(torch.uint8).split((LATENT, 16, 128))
        numbers = stored.unpack(latent, "float8_e4m3fn", scale.view(torch.float32))
        return torch.cat([numbers, rest.view(torch.bfloat16).double()])
    if case.k_store not in stored.LARGEST:
        return token.double()
    return stored.unpack(token.view(torch.uint8), case.k_store, _scale(case, found, b, place).reshape(1))


def results(case: MlaCase, found: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """out and lse of what the cache holds, with all arithmetic in one dtype."""
    heads, at_q = case.group, 0
    outs: list[Tensor] = []
    logs: list[Tensor] = []
    q = (found["turned"] if case.mode == "mla" else found["q"]).to(dtype)
    flat = q.reshape(-1, heads, case.d)
    slots, counts, page = (named(case), counted(case), case.shape[1]) if case.indices else ((), (), 1)
    for b, n_q in enumerate(case.queries):
        mine, total = flat[at_q : at_q + n_q], case.totals[b]
        at_q += n_q
        if case.mode != "mla" and case.new:
            each = [turned(case, found, x, total - n_q + i).to(dtype) for i, x in enumerate(mine)]
            mine = torch.stack(each) if each else mine
        if case.indices:
            for i, (row, count) in enumerate(zip(slots[b], counts[b], strict=True)):
                places = [divmod(slot, page) for slot in row[:count] if slot >= 0]
                _attend(case, found, b, mine[i : i + 1], places, dtype, outs, logs)
            continue
        places = [case.place(b, j) for j in range(total)]
        _attend(case, found, b, mine, places, dtype, outs, logs)
    if case.packed:
        outs.append(q.new_zeros(case.slack, heads, case.dv))
        logs.append(q.new_full((heads, case.slack), -torch.inf))
    out, log = torch.cat(outs), torch.cat(logs, -1)
    if not case.packed:
        shape = len(case.lengths), case.queries[0]
        out, log = out.unflatten(0, shape), log.unflatten(1, shape).transpose(0, 1)
    return {"out": out, "lse": log}


def _attend(
    case: MlaCase, found: dict[str, Any], b: int, q: Tensor, places: list[tuple[int, int]], dtype: torch.dtype,
    outs: list[Tensor], logs: list[Tensor],
) -> None:  # fmt: skip
    tokens = [read(case, found, b, place) for place in places]
    keys = torch.stack(tokens).to(dtype)[:, None] if tokens else q.new_empty(0, 1, case.d)
    out, log = kv_oracle.attend(case, found, b, q, keys, keys[..., : case.dv], 0, dtype, by_place=not case.indices)
    outs.append(out)
    logs.append(log)
