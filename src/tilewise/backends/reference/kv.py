"""Attention over a KV cache, in torch: gathers the keys of each sequence, then runs packed attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kv_formats import (
    LATENT,
    dequantise,
    format_of,
    head_dim,
    is_deepseek_fp8,
    pack_mla,
    quantise,
    scale_groups,
    token_scales,
    unpack_latent,
)
from ...kv_request import (
    AppendRequest,
    CachePlaces,
    KvCall,
    KvRequest,
    PlannedTile,
    QkNorm,
    Rotary,
    Scale,
    structure_of,
)
from ...mods import mask_mod
from ...mods.program import Mod, bound
from ...request import Request
from . import scored, tiled


class ReferenceCache:
    """A `KvBackend` in torch. It has no schedule."""

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        return 0, 0

    def schedule_runner(self, request: KvRequest, schedule: Tensor) -> Any:
        return lambda tensors: []

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        return []

    def attend_runner(self, call: KvCall) -> Any:
        _, structure = structure_of(call)
        return lambda tensors: attend(structure(tensors))

    def append_runner(self, request: AppendRequest) -> Any:
        _, structure = structure_of(request)

        def run(tensors: Sequence[Any]) -> list[Tensor]:
            rotated = append(structure(tensors))
            return [] if rotated is None else [rotated]

        return run


def attend(kv: KvCall) -> tuple[Tensor, ...]:
    """(out, lse), and the largest score of each head if the call returns it, after the new tokens are appended."""
    request = kv.request
    if kv.append is not None:
        rotated = append(kv.append)
        if rotated is not None:
            request = request._replace(dense=request.dense._replace(q=rotated))
    dense, places = request.dense, request.places
    q = dense.q if dense.q.dim() == 3 else dense.q.flatten(0, 1)
    cu_q = bounds_of(dense.q, dense.cu_q)
    totals = clamped_totals(places, dense.k)
    where = tokens(places, totals, dense.k)
    counts = torch.tensor([0, *(len(at[0]) for at in where)], device=q.device)
    cu_k = counts.cumsum(0).int()
    dtype = common_dtype(dense)
    if kv.out is not None:
        dtype = torch.promote_types(dtype, kv.out.dtype)
    none = q.new_empty(0, dense.k.shape[2], q.shape[-1], dtype=dtype)
    k = torch.cat([none, *loaded(dense.k, request.k_scale, where, dtype)])
    v = k[..., :LATENT]
    if not is_deepseek_fp8(dense.k):
        none = none.new_empty(0, dense.v.shape[2], head_dim(dense.v))
        v = torch.cat([none, *loaded(dense.v, request.v_scale, where, dtype)])
    q = q.to(dtype)
    mask = bound(masks_of(request, cu_q))
    spec = dense.spec
    if mask is not None:
        spec = spec._replace(mask_mod=mask.key, mask_numbers=mask.numbers, mask_tensors=len(mask.tensors))
    packed = Request(
        q, k, v, spec, None, dense.sinks, dense.score, cu_q, cu_k, None, () if mask is None else mask.tensors
    )
    out, *by_row = tiled.forward(packed) if packed.is_plain else scored.forward(packed)
    out = out.view(*dense.q.shape[:-1], out.shape[-1])
    if dense.q.dim() == 4:  # (H, B Sq) -> (B, H, Sq)
        by_row = [x.unflatten(1, dense.q.shape[:2]).transpose(0, 1).contiguous() for x in by_row]
    lse, *largest = by_row
    out = out.to(dense.q.dtype) if kv.out is None else kv.out.copy_(out)
    lse = lse if kv.lse is None else kv.lse.copy_(lse)
    found = [tiled.max_logit(x) for x in largest]
    return out, lse, *(found if kv.max_logit is None else [kv.max_logit.copy_(x) for x in found])


def common_dtype(dense: Request) -> torch.dtype:
    """The dtype that a call with a cache is computed in: q's, if the caches have it; at least float32 otherwise."""
    if dense.k.dtype == dense.q.dtype == dense.v.dtype:
        return dense.q.dtype
    return torch.promote_types(dense.q.dtype, torch.float32)


def loaded(cache: Tensor, scale: Scale, where: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Iterator[Tensor]:
    """The keys or values (tokens, heads, dim) of every sequence, whose tokens lie `where`."""
    for b, at in enumerate(where):
        if is_deepseek_fp8(cache):
            yield unpack_latent(cache.view(torch.uint8)[at], dtype)
        elif format_of(cache) is None:
            yield cache[at].to(dtype)
        else:
            yield dequantise(cache[at], scale_at(scale, b, at, cache), dtype)


def scale_at(scale: Scale, b: int | Tensor, at: tuple[Tensor, Tensor], cache: Tensor) -> Tensor:
    """The scales (.., heads, groups) of the tokens of sequences b at (pages, offsets); axes may have size 1."""
    if not isinstance(scale, Tensor):
        number = 1.0 if scale is None else scale
        return torch.full((1, 1), number, dtype=torch.float32, device=cache.device)
    if scale.dim() >= 3:
        return scale[at] if scale.dim() == 4 else scale[at][..., None]
    return (scale[b] if scale.dim() == 2 else scale.reshape(-1))[..., None]


@mask_mod
def since_start(b, h, q_idx, kv_idx, starts):  # type: ignore[no-untyped-def]
    return kv_idx >= starts[b]


@mask_mod
def on_branch(b, h, q_idx, kv_idx, tree, first, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    return (kv_idx < kv_len - q_len) | tree[first[b] + q_idx, kv_idx - (kv_len - q_len)]


def masks_of(request: KvRequest, cu_q: Tensor) -> list[Mod]:
    """The mask mods of a request: its own, valid keys, the tree."""
    dense, starts, tree = request.dense, request.places.starts, request.tree
    found = []
    if dense.spec.mask_mod is not None:
        found.append(Mod("mask", dense.spec.mask_mod, dense.mask, dense.spec.mask_numbers))
    if starts is not None and starts.numel():
        found.append(since_start(starts))
    if tree is not None and tree.numel() and cu_q.shape[0] > 1:
        bits = (tree[..., None] >> torch.arange(64, device=tree.device)) & 1
        found.append(on_branch(bits.flatten(1) != 0, cu_q[:-1]))
    return found


def append(request: AppendRequest) -> Tensor | None:
    """Append the new keys, rotated, and values. Returns the rotated queries, if there are any."""
    k, v, places, rotary = request.k, request.v, request.places, request.rotary
    new = Tokens.of(request.k_new, places.cu_new)
    at = places.lengths.long()[new.b] + new.i
    k_new, v_new, norm = request.k_new, request.v_new, request.norm
    if norm is not None:
        k_new = apply_norm(k_new, norm.k_weight, norm)
    if rotary is not None:
        positions = at if rotary.positions is None else rotary.positions.flatten()
        k_new = apply_rotary(k_new, positions, rotary, request.first_rotated)
    k_new, v_new = (x.reshape(-1, *x.shape[-2:]) for x in (k_new, v_new))
    if request.slots is None:
        row, offset, fits = slot_of(places, new.b, at, k)
    else:
        slots = request.slots.flatten().long()
        row, offset = slots // k.shape[1], slots % k.shape[1]
        fits = (slots >= 0) & (row < k.shape[0])
    fits &= new.exists
    where = row[fits], offset[fits]
    if is_deepseek_fp8(k):
        k.view(torch.uint8)[where] = pack_mla(k_new[fits])
    else:
        store(k, k_new[fits], request.k_scale, new.b[fits], where)
        if not request.keys_alone:
            store(v, v_new[fits], request.v_scale, new.b[fits], where)
    if request.q is None:
        return None
    rotated = request.q
    if norm is not None:
        rotated = apply_norm(rotated, norm.q_weight, norm)
    if rotary is not None:
        rotated = apply_rotary(rotated, query_positions(request, rotary), rotary, request.first_rotated)
    rotated = rotated.to(request.q.dtype)
    return rotated if request.rotated is None else request.rotated.copy_(rotated)


def store(cache: Tensor, x: Tensor, scale: Scale, b: Tensor, at: tuple[Tensor, Tensor]) -> None:
    """Write new tokens x (tokens, heads, dim) of sequences b to (pages, offsets). Scales by token are written first."""
    if format_of(cache) is None:
        cache[at] = x.to(cache.dtype)
        return
    if isinstance(scale, Tensor) and scale_groups(scale):
        scale[at] = token_scales(x, cache.dtype, scale_groups(scale)).view(-1, *scale.shape[2:])
    stored = quantise(x, scale_at(scale, b, at, cache), cache.dtype)
    cache.view(torch.uint8)[at] = stored.view(torch.uint8)


def apply_norm(x: Tensor, weight: Tensor, norm: QkNorm) -> Tensor:
    """RMSNorm of every head of x (.., heads, dim), at least in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rms = (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return wide / rms * (weight.to(wide.dtype) + norm.offset)


def query_positions(request: AppendRequest, rotary: Rotary) -> Tensor:
    """The position of every query: given, or so that the last query is at the last key."""
    assert request.q is not None
    if rotary.q_positions is not None:
        return rotary.q_positions.flatten()
    of = Tokens.of(request.q, request.cu_q)
    if rotary.positions is not None:
        return rotary.positions.flatten()
    totals = request.places.lengths.long() + appended(request.places)
    return totals[of.b] - of.n[of.b] + of.i


def apply_rotary(x: Tensor, positions: Tensor, rotary: Rotary, first: int = 0) -> Tensor:
    """x (.., heads, dim), from dim `first` on rotated by the angles of its tokens' positions; at least in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = rotary.cos.shape[1]
    at = positions.long().clamp(0, max(rotary.cos.shape[0] - 1, 0))
    cos, sin = (t[at].to(dtype).view(*x.shape[:-2], 1, half) for t in (rotary.cos, rotary.sin))
    width, wide = 2 * half, x[..., first:].to(dtype)
    if rotary.interleaved:
        a, b = wide[..., 0:width:2], wide[..., 1:width:2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = wide[..., :half], wide[..., half:width]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([x[..., :first].to(dtype), rotated, wide[..., width:]], -1)


class Tokens(NamedTuple):
    """Sequence, index in the sequence, and existence of every token of a buffer; and the lengths of all sequences."""

    b: Tensor
    i: Tensor
    exists: Tensor
    n: Tensor

    @staticmethod
    def of(x: Tensor, cu: Tensor | None) -> Tokens:
        ends = bounds_of(x, cu).long()
        batch = ends.shape[0] - 1
        t = torch.arange(x.shape[0] if x.dim() == 3 else x.shape[0] * x.shape[1], device=x.device)
        b = torch.bucketize(t, ends[1:], right=True)
        exists = b < batch
        b = b.clamp(max=max(batch - 1, 0))
        i = t - ends[b]
        return Tokens(b, i, exists & (i >= 0), ends.diff())


def bounds_of(x: Tensor, cu: Tensor | None) -> Tensor:
    """cu_seqlens of packed tokens, clamped, or of a dense (B, S, heads, dim)."""
    if cu is not None:
        tokens = x.shape[0]
        return cu.clamp(0, tokens)
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32) * x.shape[1]


def appended(places: CachePlaces) -> Tensor:
    """The number of new tokens of every sequence."""
    if places.cu_new is not None:
        return places.cu_new.long().diff().clamp(min=0)
    return torch.full_like(places.lengths, places.new, dtype=torch.int64)


def clamped_totals(places: CachePlaces, cache: Tensor) -> Tensor:
    """The sequence lengths with new tokens, at most what the cache can hold."""
    most = torch.full_like(places.lengths, places.capacity(cache), dtype=torch.int64)
    if places.indptr is not None:
        most = places.indptr.long().diff() * cache.shape[1]
    return torch.minimum((places.lengths.long() + appended(places)).clamp(min=0), most.clamp(min=0))


def slot_of(places: CachePlaces, b: Tensor, j: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(page or row of the cache, clamped, offset in it) of token j of sequence b; and whether that exists."""
    rows, page = cache.shape[:2]
    fits = j >= 0
    j = j.clamp(min=0)
    if places.table is None:
        row = b if places.rows is None else places.rows.long()[b]
        offset, fits = j, fits & (j < page)
    else:
        n, offset, table = j // page, j % page, places.table.long()
        if places.indptr is None:
            fits = fits & (n < table.shape[1])
            row = table[b, n.clamp(max=max(table.shape[1] - 1, 0))]
        else:
            n = places.indptr.long()[b] + n
            fits = fits & (n < places.indptr.long()[b + 1]) & (n < table.shape[0])
            row = table[n.clamp(max=max(table.shape[0] - 1, 0))]
    return row.clamp(0, max(rows - 1, 0)), offset, fits & (row >= 0) & (row < rows)


def tokens(places: CachePlaces, totals: Tensor, cache: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For every sequence, (pages, offsets) of its tokens."""
    found = []
    for b, n in enumerate(totals.tolist()):
        if places.by_token:
            assert places.table is not None
            slots = places.table[b, :n].long()
            slots = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
            found.append((slots // cache.shape[1], slots % cache.shape[1]))
            continue
        j = torch.arange(n, device=cache.device)
        found.append(slot_of(places, torch.full_like(j, b), j, cache)[:2])
    return found
