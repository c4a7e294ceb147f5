"""What a call with a KV cache should leave: in the cache, bit for bit or within a rounding, and in out and lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise_lab.fuzz import stored
from tilewise_lab.fuzz.kv import KvCase, mods_of
from tilewise_lab.fuzz.twins import Place


def fault(case: KvCase, found: dict[str, Any]) -> tuple[str, str] | None:
    """The first result that is wrong, and how: an error above twice that of the same loop in the call's own dtype."""
    dtype = getattr(torch, case.dtype)
    exact, peer = results(case, found, torch.float64), results(case, found, dtype)
    lse = torch.promote_types(dtype, torch.float32)
    if case.return_lse and lse != dtype:
        peer["lse"] = results(case, found, lse)["lse"]
    ours = dict(zip(("out", "lse"), found["outs"], strict=False))
    for name, store in (("k_cache", case.k_store), ("v_cache", case.v_store)):
        if not store:
            ours[name] = found[name]
        elif (wrong := _wrong_bytes(case, found, name, exact)) is not None:
            return name, wrong
    if len(found["outs"]) != 1 + case.return_lse:
        return "out", f"out: {len(found['outs'])} results"
    for name, x in ours.items():
        wanted = lse if name == "lse" else dtype
        if x.shape != exact[name].shape or x.dtype != wanted:
            return name, f"{name}: {x.dtype} {tuple(x.shape)}, not {wanted} {tuple(exact[name].shape)}"
        if not torch.equal(x.isfinite(), exact[name].isfinite()):
            return name, f"{name}: not finite where it should be, or the other way round"
        error, torchs = (_largest(y, exact[name]) for y in (x, peer[name]))
        unit = torch.finfo(dtype if case.rotary else wanted).eps  # what is turned is rounded before it is used
        small = 8 * unit * max(1.0, _largest(exact[name], torch.zeros_like(exact[name])))
        if error > 2 * torchs + small:
            return name, f"{name}: error {error:.1e}, torch's {torchs:.1e}"
    return None


def _largest(x: Tensor, exact: Tensor) -> float:
    error = (x.double() - exact.double()).abs()[exact.isfinite()]
    return float(error.max()) if error.numel() else 0.0


def results(case: KvCase, found: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and both caches, with all arithmetic in one dtype."""
    caches = _Cache(case, found, "k", dtype), _Cache(case, found, "v", dtype)
    q = found["q"].to(dtype)
    heads, outs, logs = case.kv_heads * case.group, [], []
    at_q = at_new = 0
    new: Any = None
    if case.new:
        new = [found[n].to(dtype).reshape(-1, *found[n].shape[-2:]) for n in ("k_new", "v_new")]
    flat = q.reshape(-1, heads, case.d)
    for b, n_q in enumerate(case.queries):
        total, mine = case.totals[b], flat[at_q : at_q + n_q]
        for i in range(case.new[b] if case.new else 0):
            j = case.lengths[b] + i
            if case.slots is None or at_new + i not in case.slots:
                caches[0].write(b, j, _turned(case, found, new[0][at_new + i], j, dtype))
                if not case.latent:
                    caches[1].write(b, j, new[1][at_new + i])
        if case.new:
            mine = _stacked([_turned(case, found, x, total - n_q + i, dtype) for i, x in enumerate(mine)], mine)
        keys, values = (
            _stacked([x.read(b, j) for j in range(total)], q.new_empty(0, case.kv_heads, x.dim)) for x in caches
        )
        if case.latent:
            values = keys[..., : case.dv]
        out, log = attend(case, found, b, mine, keys, values, at_q, dtype)
        outs.append(out)
        logs.append(log)
        at_q, at_new = at_q + n_q, at_new + (case.new[b] if case.new else 0)
    if case.packed:
        outs.append(q.new_zeros(case.slack, heads, case.dv))
        logs.append(q.new_full((heads, case.slack), -torch.inf))
        out, log = torch.cat(outs), torch.cat(logs, -1)
    else:
        out, log = torch.stack(outs), torch.stack(logs)
    if case.latent:  # one memory for both
        caches[1].data, caches[1].scale = caches[0].data[..., : case.dv], caches[0].scale
    found_scales = {f"{x.name}_scale": x.scale for x in caches}
    return {"out": out, "lse": log, "k_cache": caches[0].data, "v_cache": caches[1].data, **found_scales}


class _Cache:
    """K or V: numbers in the dtype of the computation, or as they are stored."""

    def __init__(self, case: KvCase, found: dict[str, Any], name: str, dtype: torch.dtype) -> None:
        self.case, self.name, self.dtype = case, name, dtype
        self.store = case.k_store if name == "k" else case.v_store
        self.kind = case.k_scale if name == "k" else case.v_scale
        self.dim = case.d if name == "k" else case.dv
        before: Tensor = found["before"]["kv".index(name)]
        self.data = before.to(dtype, copy=True) if not self.store else before.clone()
        scale = found.get(f"before_{name}_scale")
        number = 2.0 / stored.LARGEST[self.store] if self.kind == "number" else None
        self.scale: Any = number if scale is None else scale.clone()

    def read(self, b: int, j: int) -> Tensor:
        place = self.case.place(b, j)
        if self.store not in stored.LARGEST:
            return self.data[place].to(self.dtype)
        scale = stored.scale_at(self.scale, b, place, self.data.device)
        return stored.unpack(self.data[place].contiguous().view(torch.uint8), self.store, scale).to(self.dtype)

    def write(self, b: int, j: int, x: Tensor) -> None:
        place = self.case.place(b, j)
        if self.store not in stored.LARGEST:
            self.data[place] = x
            return
        if groups := stored.groups_of(self.kind):
            self.scale[place] = stored.token_scale(x, self.store, groups).view_as(self.scale[place])
        scale = stored.scale_at(self.scale, b, place, self.data.device)
        self.data.view(torch.uint8)[place] = stored.pack(x, self.store, scale)


def _wrong_bytes(case: KvCase, found: dict[str, Any], name: str, exact: dict[str, Any]) -> str | None:
    """What is wrong with a cache of another dtype than q's, and with its scales."""
    if not torch.equal(*(x.contiguous().view(torch.uint8) for x in (found[name], exact[name]))):
        return f"{name}: other bytes"
    scale = exact[f"{name[0]}_scale"]
    if isinstance(scale, Tensor) and not torch.equal(found[f"{name[0]}_scale"].nan_to_num(-1), scale.nan_to_num(-1)):
        return f"{name}: other scales"
    return None


def _stacked(tokens: list[Tensor], none: Tensor) -> Tensor:
    return torch.stack(tokens) if tokens else none


def _turned(case: KvCase, found: dict[str, Any], x: Tensor, position: int, dtype: torch.dtype) -> Tensor:
    """One token, (heads, dim), at its place. A cache keeps what is rounded to its own dtype."""
    if not case.rotary:
        return x
    wide = torch.promote_types(dtype, torch.float32)
    return rotated(case, found, x.to(wide), position).to(dtype)


def rotated(case: KvCase, found: dict[str, Any], x: Tensor, position: int) -> Tensor:
    """x (.., dim) with all its dims rotated, in its dtype."""
    angle = found["angles"][min(max(position, 0), len(found["angles"]) - 1)]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    pairs = x.unflatten(-1, (-1, 2) if case.rotary == "pairs" else (2, -1))
    a, b = pairs.unbind(-1 if case.rotary == "pairs" else -2)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if case.rotary == "pairs" else -2)
    return turned.flatten(-2)


def attend(
    case: KvCase, found: dict[str, Any], b: int, q: Tensor, k: Tensor, v: Tensor, at_q: int, dtype: torch.dtype,
    by_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(n, H, Dv) and (H, n) of one sequence. by_place: whether keys have positions, which `causal` reads."""
    heads, n_q, n_k = case.kv_heads * case.group, len(q), len(k)
    h, i, j = (torch.arange(n, device=q.device) for n in (heads, n_q, n_k))
    place = Place(b, h[:, None, None], i[:, None], j, n_q, n_k)
    seen = torch.ones(heads, n_q, n_k, dtype=torch.bool, device=q.device)
    before, after = case.window or (None, None)
    after = 0 if case.causal and by_place else after
    if before is not None:
        seen &= place.j >= place.at - before
    if after is not None:
        seen &= place.j <= place.at + after
    if case.starts:
        seen &= j >= case.starts[b]
    if case.tree:
        rows = found["tree"].flatten(0, -2)[at_q : at_q + n_q]
        draft = (j - (n_k - n_q)).clamp(0, max(n_q - 1, 0))
        seen &= (j < n_k - n_q) | (rows[:, draft] if n_q and n_k else rows.new_zeros(n_q, n_k))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    hidden = ~seen.any(1).view(case.kv_heads, case.group, n_k).any(1)
    k, v = (x.masked_fill(hidden[..., None], 0.0).repeat_interleave(case.group, 0) for x in (k, v))
    s = (case.d**-0.5 if case.scale is None else case.scale) * (q @ k.mT)
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    for kind, twin in mods_of(case):
        tensors = [found[name] for name in twin.tensors]
        if kind == "score":
            s = twin.torch(s, place, *(x.to(dtype) for x in tensors))
        else:
            seen &= twin.torch(place, *tensors)
    if case.alibi:
        s = s - found["alibi_slopes"].to(dtype)[:, None, None] * (place.at - j).abs()
    s = s.masked_fill(~seen, -torch.inf)
    sink = found["sinks"].to(dtype) if case.sinks else s.new_full((heads,), -torch.inf)
    s = torch.cat([s, sink[:, None, None].expand(-1, n_q, 1)], -1)
    most = s.amax(-1, keepdim=True)
    p = torch.exp(s - most.masked_fill(most == -torch.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    out = ((p / total.masked_fill(total == 0, 1.0))[..., :-1] @ v).transpose(0, 1)
    return out, (most + total.log()).squeeze(-1)
