"""What a call with a KV cache would do on a device: `tilewise.explain_kv`.

>>> q, cache, lengths = (64, 1, 32, 128), (64, 8192, 8, 128), [4096] * 64
>>> found = explain_kv(
...     q, cache, None, lengths, device="H200", backend="triton"
... )
>>> found.binding, f"{found.read / 1e9:.2f} GB"
('memory', '1.07 GB')
>>> f"{found.ranges.each} tiles of keys for each of {found.ranges.busy}"
'64 tiles of keys for each of 512'

`KvExplanation.to_dict()` is the JSON of `tilewise explain --kv-lengths ... --json`:

    call       batch, queries, keys (all sequences), longest, heads, kv_heads,
               d, dv, dtype (of q), cache (dtypes of K and V), before, after,
               page, split
    device     the facts of `devices.Device`
    backend    name, reason
    flops      visible pairs only; executed: whole tiles, padding included
    bytes      read (keys, values and scales that some query of a sequence sees),
               loaded (the same for each tile of rows: the rest comes from L2),
               other (queries, results, page table),
               workspace (of what programs share, both ways)
    roofs      [{name, seconds}], slowest first; binding: the name of the first
    plan       None, or tile, programs, busy, items, each, unit, divided, parts,
               workspace (bytes kept)
    seconds    device
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import registry as dispatch
from tilewise.backends.common.kv.partition import Partition
from tilewise.backends.common.kv.partition import partition as partition_of
from tilewise.call.fields import CACHE
from tilewise.errors import AttentionError
from tilewise.kv_formats import has_token_scales, head_dim, shares_memory
from tilewise.kv_request import KvRequest
from tilewise.mods.dropout import is_whole
from tilewise.validation import kv as checks
from tilewise_lab.costs import roofline
from tilewise_lab.costs.devices import ITEMSIZE, Device
from tilewise_lab.costs.devices import device as device_named
from tilewise_lab.costs.explanation import amount, band, table, time
from tilewise_lab.costs.kv_ranges import Ranges
from tilewise_lab.costs.kv_ranges import ranges as ranges_of

Shape = Sequence[int]
# Decoding over dense caches of 32 MB to 4.3 GB, as it was measured on an H200: 21.6 us for 33.5 MB, 75.4 us for 268 MB,
# 255 us for 1.07 GB, 962 us for 4.29 GB. The paged kernels themselves are still to be fitted.
BANDWIDTH, FIXED = 0.93, 13e-6
DIVIDING = "triton"  # the backend whose programs divide the keys of a cache as `kv_ranges` computes
MATRIX = 0.48  # of the matrix units, where there are many queries: that of the portable forward


@dataclass(frozen=True, repr=False)
class KvExplanation:
    request: KvRequest
    sequences: list[tuple[int, int, int]]  # queries, keys, first valid key
    device: Device
    backend: str
    reason: str
    partition: Partition | None
    ranges: Ranges | None
    read: int
    loaded: int
    other: int
    workspace: int
    flops: int
    executed: int

    @property
    def dtype(self) -> str:
        return str(self.request.q.dtype).removeprefix("torch.")

    @property
    def moved(self) -> int:
        return self.read + self.other + self.workspace

    @property
    def roofs(self) -> list[roofline.Roof]:
        q = self.request.q
        pairs = self.flops // (2 * (q.shape[-1] + head_dim(self.request.v)))
        return roofline.roofs(self.flops, self.moved, pairs, self.device, self.dtype)

    @property
    def binding(self) -> str:
        return self.roofs[0].name

    @property
    def seconds(self) -> float:
        memory = self.moved / (BANDWIDTH * self.device.bandwidth)
        matrix = self.executed / (MATRIX * self.device.flops(self.dtype))
        return (FIXED if self.device.capability else 0.0) + max(memory, matrix)

    def to_dict(self) -> dict[str, Any]:
        q, k, v = self.request.dense[:3]
        spec, places = self.request.spec, self.request.places
        plan = None
        if self.partition is not None and self.ranges is not None:
            plan = {
                "tile": self.partition.tile._asdict(),
                "programs": self.partition.programs,
                "busy": self.ranges.busy,
                "items": len(self.ranges.items),
                "each": self.ranges.each,
                "unit": self.partition.chunk_size,
                "divided": self.ranges.divided,
                "parts": self.ranges.parts,
                "workspace": 4 * self.partition.workspace_numel(head_dim(v)),
            }
        return {
            "call": {
                "batch": len(self.sequences),
                "queries": sum(n for n, _, _ in self.sequences),
                "keys": sum(n for _, n, _ in self.sequences),
                "longest": max((n for _, n, _ in self.sequences), default=0),
                "heads": q.shape[-2],
                "kv_heads": k.shape[-2],
                "d": q.shape[-1],
                "dv": head_dim(v),
                "dtype": self.dtype,
                "cache": [str(x.dtype).removeprefix("torch.") for x in (k, v)],
                "before": spec.before,
                "after": spec.after,
                "page": None if places.table is None else k.shape[1],
                "split": self.request.split,
            },
            "device": self.device.to_dict(),
            "backend": {"name": self.backend, "reason": self.reason},
            "flops": {"visible": self.flops, "executed": self.executed},
            "bytes": {"read": self.read, "loaded": self.loaded, "other": self.other, "workspace": self.workspace},
            "roofs": [roof._asdict() for roof in self.roofs],
            "binding": self.binding,
            "plan": plan,
            "seconds": {"device": self.seconds},
        }

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self._lines())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self._lines())

    def __repr__(self) -> str:
        keys, queries = (sum(x[n] for x in self.sequences) for n in (1, 0))
        return (
            f"<KvExplanation: {len(self.sequences)} sequences, {queries} queries on {keys} keys, on {self.device.name}:"
            f" {self.backend}, {time(self.seconds)}; print() shows all>"
        )

    def _repr_html_(self) -> str:
        return table(self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        facts, spec, target = self.to_dict(), self.request.spec, self.device
        call, plan = facts["call"], facts["plan"]
        pages = "a dense cache" if call["page"] is None else f"pages of {call['page']}"
        dims = call["d"] if call["d"] == call["dv"] else f"{call['d']} and {call['dv']}"
        tokens = f"{call['queries']} queries on {call['keys']} keys (longest {call['longest']})"
        heads = f"{call['heads']} heads on {call['kv_heads']}, D {dims}, {self.dtype}"
        if set(call["cache"]) != {self.dtype}:
            pages += f" of {' and '.join(dict.fromkeys(call['cache']))}"
        yield "call", f"{call['batch']} sequences, {tokens}, {heads}, {pages}, {band(spec.before, spec.after)}"
        yield "device", f"{target.name}, {target.sms} {'SMs' if target.capability else 'threads'}"
        yield "backend", f"{self.backend}: {self.reason}"
        times = self.executed / max(self.flops, 1)
        more = "" if self.executed == self.flops else f"; the tiles compute {times:.3g} times that"
        yield "work", f"{amount(self.flops)}FLOP on visible pairs{more}"
        shared = f", {amount(self.workspace)}B that programs share" if self.workspace else ""
        yield "memory", f"{amount(self.read)}B of keys and values, {amount(self.other)}B else{shared}"
        binds = f"{self.binding} {'binds' if self.binding == 'memory' else 'bind'}"
        yield "roofs", ", ".join(f"{roof.name} {time(roof.seconds)}" for roof in self.roofs) + f": {binds}"
        if plan is not None:
            yield from _plan_lines(plan, plan["items"] * call["kv_heads"])
        rate = amount(self.read / self.seconds)
        yield "predicted", f"{time(self.seconds)} on the device ({rate}B/s of keys and values)"


def _plan_lines(plan: dict[str, Any], row_sets: int) -> Iterator[tuple[str, str]]:
    tile = plan["tile"]
    size = f"{tile['block_m']} rows (queries times heads of a group) x {tile['block_n']} keys"
    yield "tiles", f"{size}, {tile['warps']} warps, {tile['stages']} stages, {tile['programs_per_sm']} on a processor"
    programs = (
        f"{plan['busy']} of {plan['programs']} programs have keys, at most {plan['each']} units of {plan['unit']}"
    )
    divided = f"{plan['divided']} of {row_sets} row sets are divided, into {plan['parts']} parts"
    yield "ranges", f"{programs}; {divided}; {amount(plan['workspace'])}B of workspace, whatever the lengths"


def explain_kv(
    q: Tensor | Shape,
    k_cache: Tensor | Shape,
    v_cache: Tensor | Shape | None,
    lengths: Tensor | Shape | int,
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> KvExplanation:
    """What `attention_kv(q, k_cache, v_cache, lengths, ...)` reads, how keys are divided, and what binds it. Nothing is
    launched.

    Args:
        q: a tensor on any device, "meta" included, or a shape.
        k_cache: as q.
        v_cache: as q; None: like k_cache.
        lengths: as in `attention_kv`; its numbers are read, as are those of cu_seqlens and starts.
        device: as in `explain`.
        dtype: dtype of the tensors that are given as shapes.
        options: options of `attention_kv`; k_new and v_new may be shapes.

    Raises:
        AttentionError: an argument is wrong, or a backend that was named does not support the call.
    """
    v_cache = k_cache if v_cache is None else v_cache
    names = "q", "k_cache", "v_cache"
    given = [_tensor(name, x, dtype) for name, x in zip(names, (q, k_cache, v_cache), strict=True)]
    for name in ("k_new", "v_new"):
        if options.get(name) is not None:
            options[name] = _tensor(name, options[name], dtype)
    for name in ("k_scale", "v_scale"):
        if isinstance(options.get(name), Tensor):
            options[name] = options[name].to("meta")
    target = device_named(device or {"meta": None}.get(given[0].device.type, str(given[0].device)))
    on_q, on_k, on_v = (x.to("meta") for x in given)
    shared = 0  # bytes of a token and head in K that are V too
    if shares_memory(*given[1:]):
        on_v = on_k[..., : on_v.shape[-1]]
        shared = on_v.shape[-1] * on_v.element_size()
    values = CACHE.completed(options)  # type: ignore[arg-type]
    if not isinstance(lengths, int):
        try:
            lengths = torch.as_tensor(lengths).cpu().int()
        except (TypeError, ValueError, RuntimeError):
            raise AttentionError("lengths", repr(lengths), "an int, or ints, one for each sequence") from None
    request = checks.attend_request(on_q, on_k, on_v, lengths, values)
    if target.capability:
        chosen = dispatch.choose(request, target.gpu)
    else:
        dense = request.dense._replace(q=request.q.new_empty(0, device="cpu"))
        chosen = dispatch.choose(request._replace(dense=dense))
    return _explanation(request, _sequences(request, lengths), target, chosen, shared)


def _explanation(
    request: KvRequest,
    sequences: list[tuple[int, int, int]],
    target: Device,
    chosen: dispatch.Choice,
    shared_bytes: int,
) -> KvExplanation:
    """`shared_bytes`: of a token and head in K, those that are V too."""
    q, k, v = request.dense[:3]
    before, after = request.spec.before, request.spec.after
    heads, kv_heads, dims = q.shape[-2], k.shape[-2], q.shape[-1] + head_dim(v)
    size = q.element_size()
    token = kv_heads * (_bytes_of_head(request) - shared_bytes)
    flops = 2 * heads * dims * sum(_pairs(*seq, before, after) for seq in sequences)
    queries = sum(n for n, _, _ in sequences)
    visible = sum(_visible_keys(*seq, before, after) for seq in sequences)
    other = size * queries * heads * dims + 4 * queries * heads
    if request.places.table is not None:
        other += 4 * sum(-(-n // k.shape[1]) for _, n, _ in sequences)
    partition, ranges, shared = None, None, 0
    if chosen.backend.name != DIVIDING:
        loaded, executed = visible, flops
    else:
        partition = partition_of(request, target.gpu, target.sms)
        ranges = ranges_of(partition, sequences, heads // kv_heads, before, after)
        loaded = sum(item.keys for item in ranges.items)
        keys = partition.chunk_size * sum(item.num_chunks for item in ranges.items)
        executed = 2 * kv_heads * dims * keys * partition.tile.block_m
        shared = 2 * 4 * ranges.parts * partition.rows * (head_dim(v) + 1)
    return KvExplanation(
        request=request,
        sequences=sequences,
        device=target,
        backend=chosen.backend.name,
        reason=chosen.reason,
        partition=partition,
        ranges=ranges,
        read=token * visible,
        loaded=token * loaded,
        other=other,
        workspace=shared,
        flops=flops,
        executed=executed,
    )


def _bytes_of_head(request: KvRequest) -> int:
    """Bytes of a token and head in both caches, with scales by token."""
    found = 0
    for cache, scale in ((request.k, request.k_scale), (request.v, request.v_scale)):
        found += cache.shape[-1] * cache.element_size()
        if isinstance(scale, Tensor) and has_token_scales(scale):
            found += scale.element_size() * (scale.shape[3] if scale.dim() == 4 else 1)
    return found


def _visible_keys(n_q: int, n_k: int, start: int, before: int | None, after: int | None) -> int:
    """How many keys are visible to some query."""
    lo = start if before is None else max(start, n_k - n_q - before)
    hi = n_k if after is None else min(n_k, n_k + after)
    return max(hi - lo, 0) if n_q else 0


def _pairs(n_q: int, n_k: int, start: int, before: int | None, after: int | None) -> int:
    """How many pairs of a query and a visible key there are."""
    found = 0
    for at in range(n_k - n_q, n_k):
        lo = start if before is None else max(start, at - before)
        hi = n_k if after is None else min(n_k, at + after + 1)
        found += max(hi - lo, 0)
    return found


def _sequences(request: KvRequest, lengths: Tensor | int) -> list[tuple[int, int, int]]:
    """(queries, keys, first valid key) of each; of a packed q, the rows past the last one as well, without keys."""
    places, cu_q = request.places, request.dense.cu_q
    batch = places.batch
    own = [lengths] * batch if isinstance(lengths, int) else lengths.tolist()
    gained = [places.new] * batch if places.cu_new is None else [b - a for a, b in pairwise(places.cu_new.tolist())]
    starts = [0] * batch if places.starts is None else places.starts.tolist()
    most = places.capacity(request.k)
    keys = [min(max(a + b, 0), most) for a, b in zip(own, gained, strict=True)]
    if cu_q is None:
        return [(request.q.shape[1], n, start) for n, start in zip(keys, starts, strict=True)]
    ends = cu_q.tolist()
    found = [(b - a, n, start) for (a, b), n, start in zip(pairwise(ends), keys, starts, strict=True)]
    rest = request.q.shape[0] - ends[-1]
    return [*found, (rest, 0, 0)] if rest > 0 else found


def _tensor(name: str, x: Tensor | Shape, dtype: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if dtype not in ITEMSIZE:
        raise AttentionError("dtype", repr(dtype), " or ".join(ITEMSIZE))
    if not isinstance(x, Sequence) or not all(is_whole(n) and n >= 0 for n in x):
        raise AttentionError(name, repr(x), "a tensor, or the sizes of one")
    return torch.empty(tuple(x), dtype=getattr(torch, dtype), device="meta")
