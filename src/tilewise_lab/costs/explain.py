"""What a call would do on a device, and why: `tilewise.explain`.

>>> shape = 4, 4096, 16, 128
>>> found = explain(shape, shape, shape, causal=True, device="H200")
>>> found.backend, found.binding
('hopper', 'matrix units')
>>> f"{found.traffic.naive / found.traffic.tiled:.0f} times less memory traffic"
'49 times less memory traffic'

`Explanation.to_dict()` is the JSON of `tilewise explain --json`, and what pages are drawn from:

    call       batch, n_q, n_k, heads, kv_heads, d, dv, dtype, before, after,
               lengths, deterministic, backward;
               terms: None, or {names, forward, backward (operations per pair),
               read, written (bytes), visited, ...}
    device     the facts of `devices.Device`
    backend    name, reason
    flops      forward, backward (visible pairs only),
               executed (whole tiles, padding included)
    bytes      naive, fa1, tiled, least
    intensity  naive, tiled: FLOPs per byte; ridge: where the device's roofs meet
    roofs      [{name, seconds}], slowest first; binding: the name of the first
    kernels    [{name, tile, programs, steps, blocks_per_sm, slots, waves,
               wave_efficiency, schedule_efficiency, flops, bytes, seconds,
               registers, shared, spills}];
               the last three are None unless compiled
    seconds    device (the kernels), call (what the caller sees; the host can be
               slower than the device)
    advice     [{text, gain}]: gain is the predicted speedup, or None if the
               model predicts none
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from tilewise import settings
from tilewise.backends import registry as dispatch
from tilewise.backends.protocol import Backend
from tilewise.call.fields import ATTENTION
from tilewise.call.options import Options
from tilewise.errors import AttentionError
from tilewise.mods.blocks import BlockMask
from tilewise.request import Request, has_triton, num_differentiable
from tilewise.validation import dense as checks
from tilewise.validation.offsets import as_int32_offsets
from tilewise_lab.costs import cost, predict, roofline
from tilewise_lab.costs.advice import advise
from tilewise_lab.costs.compiled import Compiled, compile_for
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import ITEMSIZE, Device
from tilewise_lab.costs.devices import device as device_named
from tilewise_lab.costs.explanation import Explanation, Resources
from tilewise_lab.costs.terms import count

TERMS = "softcap", "bias", "alibi_slopes", "sinks", "score_mod", "mask_mod", "dropout_p"
Shape = Sequence[int]


@ATTENTION.shown
def explain(
    q: Tensor | Shape,
    k: Tensor | Shape,
    v: Tensor | Shape,
    cu_seqlens_q: Tensor | Shape | None = None,
    cu_seqlens_k: Tensor | Shape | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str | None = None,
    backward: bool | None = None,
    device: str | None = None,
    dtype: str = "bfloat16",
    compiled: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """What `attention(q, k, v, ...)`, or with cu_seqlens `attention_varlen`, would run and cost. Nothing is launched.

    Args:
        q: a tensor on any device, "meta" included, or a shape.
        k: as q.
        v: as q.
        device: a name ("A100", "H100", "H200", "RTX 4090", "L4", "B200"), "cuda" or "cpu"; None: that of the tensors.
        dtype: dtype of q, k and v, for those that are given as shapes.
        backward: count the backward too; None: if an input requires a gradient.
        compiled: read registers and shared memory from the compiled kernels (seconds, once; needs Triton, but no GPU).
        options: options of `attention`. The other arguments are those of `attention` or, with cu_seqlens,
            `attention_varlen`.

    Raises:
        AttentionError: an argument is wrong, or a backend that was named does not support the call.
    """
    values = ATTENTION.completed(options)
    for name, flag in (("backward", backward), ("compiled", compiled)):
        if not isinstance(flag, bool) and flag is not None:
            raise AttentionError(name, repr(flag), "True or False")
    tensors = [_tensor(name, x, dtype) for name, x in zip("qkv", (q, k, v), strict=True)]
    tensors = q, k, v = tensors if layout in (None, "bshd") else list(checks.bhsd_to_bshd(layout, *tensors))
    if cu_seqlens_q is None:
        request, lengths = checks.dense(q, k, v, values), None
    else:
        cu_q, cu_k = (_offsets(x) for x in (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k))
        request = checks.packed(q, k, v, cu_q, cu_k, (max_seqlen_q, max_seqlen_k), values)
        lengths = tuple(zip(*(cu.diff().tolist() for cu in (cu_q, cu_k)), strict=True))
    terms = {name: values[name] for name in TERMS} | {"dropout_p": values["dropout_p"] or None}  # type: ignore[literal-required]
    names = tuple(name for name, x in terms.items() if x is not None)
    blocks = values["mask_mod"] if isinstance(values["mask_mod"], BlockMask) else None
    call = _call(request, lengths, count(request, names, blocks))
    target = _device(request.q, device)
    if backward is None:
        backward = any(x is not None and x.requires_grad for x in request.tensors()[: num_differentiable(request.spec)])
    if target.capability:
        chosen = dispatch.choose(request, target.gpu)
    else:
        on_cpu = request.q.new_empty((), device="cpu").expand(request.q.shape)  # without memory
        chosen = dispatch.choose(request._replace(q=on_cpu))
    reason = chosen.reason
    if request.spec.precision is not None:
        reason += f"; the time model does not know precision='fp8': the times are those of {call.dtype}"
    found = estimate(call, backward, target, chosen.backend.name, reason)
    resources, not_compiled = _resources(request, target, chosen.backend, found) if compiled else ({}, "not asked for")
    found = replace(found, resources=resources, not_compiled=not_compiled)
    return replace(
        found, advice=list(advise(found, tensors, lambda other: estimate(other, backward, target, found.backend)))
    )


def estimate(call: Call, backward: bool, device: Device, backend: str, reason: str = "") -> Explanation:
    """What the time model predicts for a call, without resources of compiled kernels and without advice."""
    kernels = predict.plan(call, backend, device, backward=backward)
    profiles = [kernel.profile for kernel in kernels if kernel.profile is not None]

    def reads(by_key: bool) -> float:
        """How often programs that own queries (of the forward) or keys (of the backward) read the other side."""
        found = (x.tile for x in profiles if x.by_key == by_key and x.is_forward != by_key)
        return next((predict.rereads(call, device, tile, queries=by_key) for tile in found), 1.0)

    traffic = cost.traffic(
        call,
        backward=backward,
        masked=call.before is not None or call.after is not None,
        reads_of_keys=reads(by_key=False),
        reads_of_queries=reads(by_key=True),
    )
    flops = call.flops() + (call.flops(backward=True) if backward else 0)
    again = max(1, sum(not x.is_forward for x in profiles)) if backward else 0  # each kernel computes P once more
    exps = call.pairs * (1 + again)
    terms = call.terms or cost.ScoreTerms(())
    operations = call.pairs * (terms.forward + again * terms.backward)
    return Explanation(
        call=call,
        backward=backward,
        device=device,
        backend=backend,
        reason=reason,
        traffic=traffic,
        kernels=kernels,
        prediction=predict.predict(call, backend, device, backward=backward),
        roofs=roofline.roofs(flops, traffic.tiled, exps, device, call.dtype, operations),
        resources={},
        not_compiled="",
        advice=[],
    )


def _tensor(name: str, x: Tensor | Shape, dtype: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if dtype not in ITEMSIZE:
        raise AttentionError("dtype", repr(dtype), " or ".join(ITEMSIZE))
    try:
        sizes = torch.Size(x)
    except TypeError:
        sizes = torch.Size((-1,))
    if any(n < 0 for n in sizes):
        raise AttentionError(name, repr(x), "a tensor, or the sizes of one, (batch, tokens, heads, dim)")
    return torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")


def _offsets(cu: Tensor | Shape) -> Tensor:
    found: Tensor = as_int32_offsets(cu if isinstance(cu, Tensor) else torch.tensor(list(cu), dtype=torch.int64))
    return found


def _call(request: Request, lengths: tuple[tuple[int, int], ...] | None, terms: Any) -> Call:
    q, k, v, spec = request[:4]
    return Call(
        batch=q.shape[0] if lengths is None else len(lengths),
        n_q=q.shape[-3],
        n_k=k.shape[-3],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        d=q.shape[-1],
        dv=v.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        before=spec.before,
        after=spec.after,
        lengths=lengths,
        deterministic=spec.deterministic,
        terms=terms,
    )


def _device(q: Tensor, name: str | None) -> Device:
    return device_named({"meta": None}.get(q.device.type, str(q.device)) if name is None else name)


def _resources(
    request: Request, device: Device, backend: Backend, found: Explanation
) -> tuple[dict[str, Resources], str]:
    """Registers and shared memory of each kernel, or why they are not known."""
    if not found.kernels:
        return {}, f"the {backend.name} backend has no kernels of its own"
    if not request.is_plain:
        return {}, "kernels with score terms are compiled when they are first called"
    if not has_triton():
        return {}, "no Triton here"
    if settings.interprets():
        return {}, "Triton is interpreting (TRITON_INTERPRET=1)"
    try:
        with _quiet():
            made = compile_kernels(request, device, found.backward)
            return {name: Resources(x.registers, x.shared, x.spills) for name, x in made}, ""
    except Exception as error:
        return {}, f"the compiler here refused {device.gpu} ({type(error).__name__})"


def compile_kernels(request: Request, device: Device, backward: bool) -> Iterator[tuple[str, Compiled]]:
    """The main kernels of a call, compiled as for a launch, whatever device its tensors are on."""
    for name, one in dispatch.launches_of(request.on_meta(), device.gpu, backward).items():
        if not name.startswith("("):
            yield name, compile_for(device.capability, one.kernel, one.args, one.options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The compiler prints its whole program on stderr when a pass fails."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
