"""Compiles every kernel that the steps of a serving engine can need, before the first of them.

What a step's kernels depend on, beside the layers: the number of tokens and sequences, by ranges, and the most queries
of a sequence, which engines round up to few values (`StepLimits.max_seqlen_q`). Launches are built from meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.registry import choose
from .call.fields import CACHE
from .call.options import BackendName
from .kv_request import MIN_PREFILL_QUERIES, KvCall, structure_of
from .ops import kv as ops
from .request import gpu_of
from .validation import kv as checks


class StepLimits(NamedTuple):
    """The most tokens and sequences of a step, tokens of a sequence, and draft tokens that are verified with one."""

    tokens: int
    sequences: int
    length: int
    drafts: int = 0

    def max_seqlen_q(self, n: int) -> int:
        """n queries rounded up to one of few numbers: 1, with drafts, of a short prompt, of a long one.

        >>> limits = StepLimits(tokens=8192, sequences=64, length=4096, drafts=3)
        >>> [limits.max_seqlen_q(n) for n in (1, 2, 4, 5, 300)]
        [1, 4, 4, 255, 8192]
        """
        return next((m for m in (1, 1 + self.drafts, MIN_PREFILL_QUERIES - 1) if n <= m), max(self.tokens, n))

    def backend(self, n: int) -> BackendName:
        """The backend of a step with at most n queries a sequence. Kernels for prefill are left to "auto"; otherwise by
        name, because "auto" may choose the reference, which reads lengths, and no CUDA graph can."""
        return "triton" if n < MIN_PREFILL_QUERIES else "auto"

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, sequences, most queries of a sequence) of steps that need all kernels."""
        tokens, sequences = doubled(self.tokens), doubled(self.sequences)
        yield from ((n, n, 1) for n in sequences)
        for most in sorted({self.max_seqlen_q(n) for n in (1 + self.drafts, 2, self.tokens)} - {1}):
            yield from ((n, 1, most) for n in tokens)
            yield from ((max(self.tokens, n), n, most) for n in sequences)


def doubled(most: int) -> list[int]:
    """1, 2, 4, .. and the most itself.

    >>> doubled(5)
    [1, 2, 4, 5]
    """
    return sorted({min(1 << n, most) for n in range(most.bit_length() + 1)})


class AttentionLayer(NamedTuple):
    """A kind of attention layer: query heads, its caches as meta tensors in pages, the dtype of its queries, and the
    options of `attention_kv` that do not change from step to step."""

    heads: int
    k_cache: Tensor
    v_cache: Tensor
    dtype: torch.dtype
    options: Mapping[str, Any]


def on_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) else x


def step_launches(layer: AttentionLayer, limits: StepLimits, step: tuple[int, int, int], target: Any) -> list[Any]:
    """The launches of a step: plan, attention, append at slots."""
    from .backends.common.launch import DeviceMemory

    tokens, sequences, most = step
    memory = DeviceMemory(torch.device("meta"))
    k, v = layer.k_cache, layer.v_cache
    pages = -(-limits.length // k.shape[1])

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    lengths, one = integers(sequences), integers(1)
    options = {name: on_meta(x) for name, x in layer.options.items()} | {
        "cu_seqlens_q": integers(sequences + 1),
        "page_table": integers(sequences, pages),
        "max_seqlen_q": most,
        "backend": limits.backend(most),
    }
    q = memory.empty((tokens, layer.heads, k.shape[-1]), layer.dtype)
    out = memory.empty((tokens, layer.heads, v.shape[-1]), layer.dtype)
    request = checks.attend_request(q, k, v, lengths, CACHE.completed(options))  # type: ignore[arg-type]
    call = KvCall(request, out=out, lse=ops.scratch_lse(q))
    k_new, v_new = (memory.empty((1, tokens, *x.shape[2:]), layer.dtype) for x in (k, v))
    asked = CACHE.completed({"slots": torch.empty(tokens, dtype=torch.int64, device="meta")})
    asked["k_scale"], asked["v_scale"] = options.get("k_scale"), options.get("v_scale")
    places = checks.places_of(k_new, k, one, asked)
    append = checks.append_request(k_new, v_new, k, v, places, None, asked)
    backend: Any = choose(request, target.gpu).backend.kv
    runners = (
        (backend.attend_runner(call), structure_of(call)[0]),
        (backend.append_runner(append), structure_of(append)[0]),
    )
    return [x for runner, tensors in runners for x in runner.build(tensors, target, memory).launches]


def all_launches(layers: Sequence[AttentionLayer], limits: StepLimits, target: Any) -> dict[str, Any]:
    """The launches of all steps within the limits by what they compile to, without duplicates."""
    from .backends.common.offline import specialised

    found: dict[str, Any] = {}
    binders: dict[int, Any] = {}
    for layer in layers:
        for step in limits.steps():
            for launch in step_launches(layer, limits, step, target):
                found.setdefault(specialised(target.gpu.arch, launch, binders), launch)
    return found


def compile_steps(layers: Sequence[AttentionLayer], limits: StepLimits, device: torch.device) -> int:
    """Compiles the kernels of all steps within the limits, in parallel, or loads them from Triton's cache. Returns how
    many there are; 0 on a device without kernels."""
    if not layers or device.type != "cuda" or gpu_of(device) is None:
        return 0
    from .backends.common.launch import INTERPRETED, compile_launches, target_of

    if INTERPRETED:
        return 0
    found = all_launches(layers, limits, target_of(device))
    with torch.cuda.device(device):
        compile_launches([*found.values()])
    return len(found)
