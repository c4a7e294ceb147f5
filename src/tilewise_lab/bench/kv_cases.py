"""The grid of the KV cache: numbers of sequences, lengths, page sizes, shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

K = 1024
STEP = 1 / 32  # of int8 numbers


@dataclass(frozen=True)
class KvCase:
    """lengths count the keys that every sequence sees, `queries` those of each (or of all). page 0: a dense cache.
    `sharing`: sequences in groups of so many have the same first `prefix` keys, in the same pages."""

    group: str
    name: str
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    queries: int | tuple[int, ...] = 1
    window: int | None = None
    sinks: bool = False
    tree: bool = False
    split: int | None = None
    sharing: tuple[int, ...] = ()
    prefix: int = 0
    stored: str | None = None  # dtype of a quantised cache

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.queries,) * len(self.lengths) if isinstance(self.queries, int) else self.queries

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are visible to a query, each read once; shared pages once for a group."""
        seen = (
            n if self.window is None else min(n, self.window + q)
            for n, q in zip(self.lengths, self.counts, strict=True)
        )
        again = sum((n - 1) * self.prefix for n in self.sharing)
        return (sum(seen) - again) * self.kv_heads * self.dim * (2 if self.stored else 4)

    @property
    def flops(self) -> int:
        """Of causal attention."""
        pairs = sum(q * n - q * (q - 1) // 2 for n, q in zip(self.lengths, self.counts, strict=True))
        return 4 * pairs * self.heads * self.dim


def uniform(group: str, name: str, batch: int, length: int, **more: Any) -> KvCase:
    return KvCase(group, name, (length,) * batch, **more)


def ragged() -> list[KvCase]:
    """Four kinds of unevenness, each with the even batch of the same total beside it."""
    rng = random.Random(0)
    normal = tuple(max(1, int(rng.gauss(4 * K, 2 * K))) for _ in range(64))
    zipf = tuple(max(64, 128 * K // (n + 1)) for n in range(64))
    kinds = {
        "1 x 128k + 63 x 1k": (128 * K, *[K] * 63),
        "normal": normal,
        "zipf": zipf,
        "half empty": (*[8 * K] * 32, *[0] * 32),
    }
    cases = []
    for name, lengths in kinds.items():
        cases.append(KvCase("ragged", name, lengths))
        cases.append(uniform("ragged", f"even as {name}", 64, sum(lengths) // 64))
    return cases


def mixed(many: int, length: int, few: int, keys: int) -> list[KvCase]:
    """Whole prompts and single queries in one call; and each of the two alone."""
    prompts, others, name = (length,) * many, (keys,) * few, f"{many}x{length // K}k + {few}x{keys // K}k"
    return [
        KvCase("mixed", name, prompts + others, queries=prompts + (1,) * few),
        KvCase("mixed", f"{name}: prefill", prompts, queries=prompts),
        KvCase("mixed", f"{name}: decode", others, queries=(1,) * few),
    ]


def sharing(name: str, groups: tuple[int, ...], prefix: int, own: int, queries: int = 1) -> KvCase:
    """Sequences of `prefix` keys that their group shares, and `own` keys of each."""
    return KvCase("prefix", name, (prefix + own,) * sum(groups), queries=queries, sharing=groups, prefix=prefix)


GROUPS: dict[str, Callable[[], list[KvCase]]] = {
    "large": lambda: [
        *(
            uniform("large", f"B{b} {n // K}k page {page or 'none'}", b, n, page=page)
            for b, n in ((64, 4 * K), (128, 8 * K))
            for page in (16, 64, 256, 1, 0)
        ),
        uniform("large", "B256 4k page 16", 256, 4 * K),
        uniform("large", "B64 4k 64/8", 64, 4 * K, heads=64),
        uniform("large", "B128 8k 64/8", 128, 8 * K, heads=64),
    ],
    "medium": lambda: [uniform("medium", "B16 4k", 16, 4 * K), uniform("medium", "B64 1k", 64, K)],
    "small": lambda: [
        uniform("small", "B1 8k", 1, 8 * K),
        uniform("small", "B1 16k", 1, 16 * K),
        uniform("small", "B1 128k", 1, 128 * K),
        uniform("small", "B1 32k 8/1", 1, 32 * K, heads=8, kv_heads=1),
        uniform("small", "B8 256", 8, 256),
    ],
    "d64": lambda: [
        uniform("d64", "B64 8k 64/8", 64, 8 * K, heads=64, dim=64),
        uniform("d64", "window 128, sinks", 64, 8 * K, heads=64, dim=64, window=127, sinks=True),
        uniform("d64", "128 keys, sinks", 64, 128, heads=64, dim=64, sinks=True),
    ],
    "ragged": ragged,
    "drafts": lambda: [
        *(uniform("drafts", f"B32 4k, {n} queries", 32, 4 * K, queries=n) for n in (1, 4, 8)),
        uniform("drafts", "B32 4k, tree of 8", 32, 4 * K, queries=8, tree=True),
    ],
    "prefill": lambda: [
        uniform("prefill", f"2k queries on 32k, page {page}", 1, 32 * K, queries=2 * K, page=page) for page in (16, 64)
    ],
    "mixed": lambda: [*mixed(2, 2 * K, 32, K), *mixed(4, K, 16, 2 * K)],
    "quantised": lambda: [
        uniform("quantised", f"B{b} {n // K}k {stored}", b, n, stored=stored)
        for stored in ("float8_e4m3fn", "int8") for b, n in ((64, 4 * K), (128, 8 * K))
    ],
    "prefix": lambda: [
        sharing("64 x (32k + 512)", (64,), 32 * K, 512),
        sharing("8 x (8k + 1k)", (8,), 8 * K, K),
        sharing("128 in 2 groups x (8k + 1k)", (64, 64), 8 * K, K),
        sharing("16 in pairs x (16k + 1k)", (2,) * 8, 16 * K, K),
        sharing("32 x (8k + 512), 4 queries", (32,), 8 * K, 512, 4),
        sharing("256 x (2k + 256)", (256,), 2 * K, 256),
        sharing("4 x (32k + 512)", (4,), 32 * K, 512),
        sharing("64 x 4k, nothing shared", (1,) * 64, 0, 4 * K),
        sharing("8 x 256, nothing shared", (1,) * 8, 0, 256),
    ],
    "split": lambda: [
        uniform("split", "B64 4k", 64, 4 * K),
        uniform("split", "B64 4k split 4096", 64, 4 * K, split=4096),
        uniform("split", "B64 4k split 1024", 64, 4 * K, split=1024),
    ],
}  # fmt: skip


@dataclass
class KvInputs:
    """Tensors of a case. `dense` has every sequence's keys where a dense call takes them, if all are as long."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    cu_q: Tensor
    table: Tensor | None
    sinks: Tensor | None
    tree: Tensor | None
    most: int
    scale: Tensor | None = None  # of a quantised cache: each head's


def small(case: KvCase) -> KvCase:
    """The same in a hundredth of the size: to see that it runs."""
    batch = max(1, len(case.lengths) // 16)
    lengths = tuple(n // 64 for n in case.lengths[:batch])
    counts = tuple(min(q, n) for q, n in zip(case.counts[:batch], lengths, strict=True))
    queries: Any = counts if isinstance(case.queries, tuple) else min(case.queries, min(lengths))
    split = None if case.split is None else 128
    groups = (batch,) if case.prefix else (1,) * batch if case.sharing else ()
    prefix = case.prefix // 64 // 16 * 16
    sizes: dict[str, Any] = {"lengths": lengths, "queries": queries, "split": split, "page": min(case.page, 16)}
    return replace(case, **sizes, sharing=groups, prefix=prefix)


def inputs(case: KvCase, device: torch.device, dtype: torch.dtype) -> KvInputs:
    """Pages in shuffled order. Filling them takes longer than timing: a stretch of numbers is repeated."""
    counts, batch = case.counts, len(case.lengths)
    generator = torch.Generator().manual_seed(0)
    page, most = case.page, max(case.lengths)
    rows = sum(-(-n // page) for n in case.lengths) if page else batch
    shape = (rows, page or most, case.kv_heads, case.dim)
    k, v = (_filled(shape, device, dtype, seed) for seed in (1, 2))
    scale = None
    if case.stored:
        step = 1.0 if case.stored.startswith("float8") else STEP
        k, v = (_quantised(t, step, getattr(torch, case.stored)) for t in (k, v))
        scale = torch.full((case.kv_heads,), step, device=device)
    table = None
    if page:
        order = torch.randperm(rows, generator=generator, dtype=torch.int64).int()
        table = torch.zeros(batch, max(1, -(-most // page)), dtype=torch.int32)
        at = 0
        for b, n in enumerate(case.lengths):
            need = -(-n // page)
            table[b, :need] = order[at : at + need]
            at += need
        for first, n in zip(accumulate(case.sharing, initial=0), case.sharing, strict=False):
            shared = case.prefix // page
            table[first : first + n, :shared] = table[first, :shared].clone()
        table = table.to(device)
    cu = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    q = torch.randn(sum(counts), case.heads, case.dim, generator=generator).to(device=device, dtype=dtype)
    sinks = torch.randn(case.heads, generator=generator).to(device=device, dtype=dtype) if case.sinks else None
    tree = None
    if case.tree:
        n = max(counts)
        tree = torch.eye(n, dtype=torch.bool)
        for i in range(1, n):
            tree[i] |= tree[(i - 1) // 2]
        tree = tree.expand(batch, n, n).contiguous().to(device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return KvInputs(q, k, v, lengths, cu, table, sinks, tree, max(counts), scale)


def _quantised(x: Tensor, step: float, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if dtype.is_floating_point else (x / step).round().clamp(-127, 127).to(dtype)


def _filled(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.empty(shape, device=device, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    some = torch.randn(min(x.numel(), 2**24 + 77), device=device, generator=generator).to(dtype)
    flat = x.view(-1)
    for at in range(0, flat.numel(), some.numel()):
        part = flat[at : at + some.numel()]
        part.copy_(some[: part.numel()])
    return x


def exact(case: KvCase, x: KvInputs, b: int, head: int) -> Tensor:
    """out (queries, dim) of one sequence and head, in float64."""
    n, count = case.lengths[b], case.counts[b]
    kv = head // (case.heads // case.kv_heads)
    if x.table is None:
        k, v = x.k[b, :n, kv], x.v[b, :n, kv]
    else:
        pages = x.table[b, : -(-n // case.page)].long()
        k, v = (t[pages, :, kv].flatten(0, 1)[:n] for t in (x.k, x.v))
    k, v = k.double(), v.double()
    if x.scale is not None:
        k, v = k * x.scale[kv], v * x.scale[kv]
    start = int(x.cu_q[b])
    q = x.q[start : start + count, head].double()
    s = (q @ k.mT) * case.dim**-0.5
    at = torch.arange(count, device=q.device)[:, None] + n - count
    j = torch.arange(n, device=q.device)
    hidden = j > at
    if case.window is not None:
        hidden |= j < at - case.window
    if x.tree is not None:
        hidden[:, n - count :] |= ~x.tree[b]
    s = s.masked_fill(hidden, -torch.inf)
    if x.sinks is not None:
        s = torch.cat([s, x.sinks[head].double().expand(count, 1)], -1)
    p = torch.softmax(s, -1)[:, :n].nan_to_num()
    return p @ v
