"""What a call would do on a device, and why: `tilewise.explain`.

>>> told = explain((4, 4096, 16, 128), (4, 4096, 16, 128), (4, 4096, 16, 128), causal=True, device="H200")
>>> told.backend, told.binding, f"{told.traffic.naive / told.traffic.tiled:.0f} times less memory traffic"
('hopper', 'matrix units', '49 times less memory traffic')

`Explanation.to_dict()` is the JSON of `tilewise explain --json`, and what pages are drawn from:

    call       batch, n_q, n_k, heads, kv_heads, d, dv, dtype, before, after, lengths, deterministic, backward;
               terms: None, or {names, forward, backward (operations per pair), read, written (bytes), visited, ...}
    device     the facts of `devices.Device`
    backend    name, reason
    flops      forward, backward (visible pairs only), executed (whole tiles, padding included)
    bytes      naive, fa1, tiled, least
    intensity  naive, tiled: FLOPs per byte; ridge: where the device's roofs meet
    roofs      [{name, seconds}], slowest first; binding: the name of the first
    kernels    [{name, tile, programs, steps, blocks_per_sm, slots, waves, wave_efficiency, schedule_efficiency,
               flops, bytes, seconds, registers, shared, spills}]; the last three are None unless compiled
    seconds    device (the kernels), call (what the caller sees; the host can be slower than the device)
    advice     [{text, gain}]: gain is predicted time now / then, or None where the model has no number
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.costs import cost, predict, roofline
from tilewise.costs.advice import Advice, advise
from tilewise.costs.compiled import Compiled, compile_for
from tilewise.costs.cost import Call
from tilewise.costs.devices import ITEMSIZE, Device
from tilewise.costs.devices import device as device_named
from tilewise.costs.terms import count
from tilewise.mods.blocks import BlockMask
from tilewise.mods.program import Mod
from tilewise.spec import AttentionError, Spec, Terms, band

Shape = Sequence[int]


class Resources(NamedTuple):
    """What the compiler gave a kernel."""

    registers: int
    shared: int
    spills: int


@dataclass(frozen=True)
class Explanation:
    call: Call
    backward: bool
    device: Device
    backend: str
    reason: str
    traffic: cost.Traffic
    kernels: list[predict.Kernel]
    prediction: predict.Prediction
    roofs: list[roofline.Roof]
    resources: dict[str, Resources]
    not_compiled: str
    advice: list[Advice]

    @property
    def flops(self) -> int:
        return self.call.flops() + (self.call.flops(backward=True) if self.backward else 0)

    @property
    def executed(self) -> int:
        return sum(kernel.flops for kernel in self.kernels) or self.flops

    @property
    def binding(self) -> str:
        return self.roofs[0].name

    def to_dict(self) -> dict[str, Any]:
        none = Resources(None, None, None)  # type: ignore[arg-type]
        return {
            "call": self.call.to_dict()
            | {"backward": self.backward, "terms": self.call.terms and self.call.terms._asdict()},
            "device": self.device.to_dict(),
            "backend": {"name": self.backend, "reason": self.reason},
            "flops": {
                "forward": self.call.flops(),
                "backward": self.call.flops(backward=True) if self.backward else 0,
                "executed": self.executed,
            },
            "bytes": self.traffic._asdict(),
            "intensity": {
                "naive": self.flops / self.traffic.naive,
                "tiled": self.flops / self.traffic.tiled,
                "ridge": self.device.ridge(self.call.dtype),
            },
            "roofs": [roof._asdict() for roof in self.roofs],
            "binding": self.binding,
            "kernels": [
                predict.to_dict(kernel, self.prediction.kernels[kernel.name])
                | self.resources.get(kernel.name, none)._asdict()
                for kernel in self.kernels
            ],
            "seconds": {"device": self.prediction.device, "call": self.prediction.call},
            "advice": [advice._asdict() for advice in self.advice],
        }

    def __str__(self) -> str:
        from tilewise.costs.report import text

        return text(self)


def explain(
    q: Tensor | Shape,
    k: Tensor | Shape,
    v: Tensor | Shape,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    backward: bool | None = None,
    device: str | None = None,
    dtype: str = "bfloat16",
    compiled: bool = False,
) -> Explanation:
    """What `attention(q, k, v, ...)`, or with cu_seqlens `attention_varlen`, would run, what it costs, what would help.

    Tensors may live anywhere, "meta" included; shapes do as well (then `dtype` counts). Nothing is launched. The
    arguments are theirs, and:

    device: a name ("A100", "H100", "H200", "RTX 4090", "L4", "B200"), "cuda", "cpu"; None is where the tensors are.
    backward: count the backward too; None means if an input requires a gradient.
    compiled: read registers and shared memory from the compiled kernels (seconds, once; needs Triton, but no GPU).
    """
    tensors = [_tensor(x, dtype) for x in (q, k, v)]
    lengths = _lengths(tensors, cu_seqlens_q, cu_seqlens_k)
    extras = {
        "softcap": softcap, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "score_mod": score_mod,
        "mask_mod": mask_mod, "dropout_p": dropout_p, "seed": seed,
    }  # fmt: skip
    longest = [max_seqlen_q, max_seqlen_k] if lengths else [tensors[0].shape[1], tensors[1].shape[1]]
    seen = band(causal, window)
    terms, named = _terms(tensors[0], len(lengths or tensors[0]), longest, seen, extras, packed=lengths is not None)
    same_bits = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    spec = Spec.of(
        head_dim=tensors[0].shape[-1], causal=causal, window=window, scale=scale, backend=backend,
        deterministic=same_bits, **named,
    )  # fmt: skip
    asked = extras | {"seed": None, "dropout_p": dropout_p or None}
    names = tuple(name for name, x in asked.items() if x is not None)
    blocks = mask_mod if isinstance(mask_mod, BlockMask) else None
    call = _call(tensors, lengths, spec, count(spec, terms, names, blocks))
    where = _device(tensors[0], device)
    if backward is None:
        backward = any(x.requires_grad for x in (*tensors, *terms.score, *(t for t in terms[:2] if t is not None)))
    if where.capability:
        chosen = dispatch.choose(tensors[0], tensors[1], tensors[2], spec, where.capability, terms)
    else:
        here = torch.empty(0, dtype=tensors[0].dtype)
        chosen = dispatch.choose(here, here, here, spec, terms=terms)
    found = estimate(call, backward, where, chosen.backend, chosen.reason)
    resources, not_compiled = _resources(tensors, call, spec, where, found) if compiled else ({}, "not asked for")
    found = replace(found, resources=resources, not_compiled=not_compiled)
    return replace(
        found, advice=list(advise(found, tensors, lambda other: estimate(other, backward, where, found.backend)))
    )


def estimate(call: Call, backward: bool, device: Device, backend: str, reason: str = "") -> Explanation:
    """What the model says of a call, before the compiler is asked and advice is given."""
    kernels = predict.plan(call, backend, device, backward=backward)
    rereads = {
        kernel.name: predict.rereads(call, device, kernel.tile, queries=kernel.name in ("key", "hopper backward"))
        for kernel in kernels
    }
    bill = cost.traffic(
        call,
        backward=backward,
        masked=call.before is not None or call.after is not None,
        reads_of_keys=rereads.get("forward", rereads.get("hopper forward", 1.0)),
        reads_of_queries=rereads.get("key", rereads.get("hopper backward", 1.0)),
    )
    flops = call.flops() + (call.flops(backward=True) if backward else 0)
    again = 0 if not backward else 1 if len(kernels) == 2 else 2  # the portable dK and dQ kernels each compute P
    exps = call.pairs * (1 + again)
    terms = call.terms or cost.ScoreTerms(())
    operations = call.pairs * (terms.forward + again * terms.backward)
    return Explanation(
        call=call,
        backward=backward,
        device=device,
        backend=backend,
        reason=reason,
        traffic=bill,
        kernels=kernels,
        prediction=predict.predict(call, backend, device, backward=backward),
        roofs=roofline.roofs(flops, bill.tiled, exps, device, call.dtype, operations),
        resources={},
        not_compiled="",
        advice=[],
    )


def _tensor(x: Tensor | Shape, dtype: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if dtype not in ITEMSIZE:
        raise AttentionError("dtype", repr(dtype), " or ".join(ITEMSIZE))
    return torch.empty(tuple(x), dtype=getattr(torch, dtype), device="meta")


def _lengths(
    tensors: list[Tensor], cu_q: Tensor | Sequence[int] | None, cu_k: Tensor | Sequence[int] | None
) -> tuple[tuple[int, int], ...] | None:
    """(n_q, n_k) of packed sequences; None for a dense call. Raises where the shapes fit neither."""
    rank = 4 if cu_q is None else 3
    for name, x in zip("qkv", tensors, strict=True):
        if x.dim() != rank:
            axes = "(batch, tokens, heads, dim)" if rank == 4 else "(tokens, heads, dim) beside cu_seqlens"
            raise AttentionError(f"shape of {name}", tuple(x.shape), f"{rank} axes {axes}")
    heads, kv_heads = tensors[0].shape[-2], tensors[1].shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise AttentionError("heads of q", heads, f"a multiple of k's {kv_heads}")
    if cu_q is None:
        return None
    ends = [list(map(int, cu)) for cu in (cu_q, cu_q if cu_k is None else cu_k)]
    return tuple(zip(*([b - a for a, b in pairwise(cu)] for cu in ends), strict=True))


def _terms(
    q: Tensor,
    batch: int,
    longest: Sequence[int | None],
    seen: tuple[int | None, int | None],
    extras: dict[str, Any],
    *,
    packed: bool,
) -> tuple[Terms, dict[str, Any]]:
    """As `attention` sees them. Shapes and meta tensors live nowhere, so the terms may live anywhere."""
    from tilewise import api

    heads = q.shape[-2]
    if q.device.type == "meta":
        mods = [x for x in (extras["score_mod"], extras["mask_mod"]) if x is not None]
        mods = [x.mod if isinstance(x, BlockMask) else x for x in mods]
        tensors = [x for x in extras.values() if isinstance(x, Tensor)]
        tensors += [x for mod in mods for x in getattr(mod, "tensors", ())]
        q = q.new_empty(0, device=tensors[0].device if tensors else "cpu")
    return api.terms_of(q, (batch, heads, longest[0], longest[1]), seen, packed, **extras)


def _call(tensors: list[Tensor], lengths: tuple[tuple[int, int], ...] | None, spec: Spec, terms: Any) -> Call:
    q, k, v = tensors
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
    return device_named(name or {"meta": None}.get(q.device.type, str(q.device)))


def _resources(
    tensors: list[Tensor], call: Call, spec: Spec, device: Device, found: Explanation
) -> tuple[dict[str, Resources], str]:
    """Registers and shared memory of each kernel, or why they are not known."""
    if found.backend == "reference":
        return {}, "the reference backend has no kernels of its own"
    if call.terms:
        return {}, "kernels with score terms are compiled when they are first called"
    if not dispatch.has_triton():
        return {}, "no Triton here"
    from tilewise.kernels.portable import launch

    if launch.INTERPRETED:
        return {}, "Triton is interpreting (TRITON_INTERPRET=1)"
    strides = tuple(x.stride() for x in tensors)
    shapes = tuple(tuple(x.shape) for x in tensors)
    try:
        return _compile(
            shapes, strides, tensors[0].dtype, call.lengths, spec, device.capability, found.backward, found.backend
        ), ""
    except Exception as error:
        return {}, f"the compiler here refused sm_{device.capability} ({type(error).__name__})"


@cache
def _compile(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...] | None,
    spec: Spec,
    capability: int,
    backward: bool,
    backend: str,
) -> dict[str, Resources]:
    q, k, v = (torch.empty_strided(n, s, dtype=dtype, device="meta") for n, s in zip(shapes, strides, strict=True))
    with _quiet():
        return {
            name: Resources(made.registers, made.shared, made.spills)
            for name, made in compile_kernels(q, k, v, lengths, spec, capability, backward=backward, backend=backend)
        }


def compile_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[tuple[int, int]] | None,
    spec: Spec,
    capability: int,
    *,
    backward: bool,
    backend: str = "triton",
) -> Iterator[tuple[str, Compiled]]:
    """The kernels of a call, compiled as a launch would; the tensors may be meta."""
    from tilewise.kernels.portable import launch

    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    cu = None if lengths is None else q.new_empty(len(lengths) + 1, dtype=torch.int32)
    if backend == "hopper":
        from tilewise.kernels.hopper.launch import forward_launches, new_state

        one, *_ = forward_launches(q, k, v, out, lse, cu, cu, spec, new_state(torch.device("meta")), 132)
        launches = {"hopper forward": one}
    else:
        launches = {"forward": launch.forward_launch(q, k, v, out, lse, cu, cu, spec, capability)}
    if backward:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tensors = out, None, q, k, v, out, lse, dq, dk, dv, cu, cu, spec
        if backend == "hopper" and predict.has_hopper_backward(q.shape[-1], v.shape[-1]):
            from tilewise.kernels.hopper.backward_launch import backward_launches, new_space

            space = new_space(q, launch.problem(q, k, v, cu))
            launches["hopper backward"] = backward_launches(*tensors, space, 132)[1]
        else:
            passes = launch.backward_launches(*tensors, capability)
            names = ("prepare", "key", *["value"] * (len(passes) > 3), "query")
            launches |= dict(zip(names, passes, strict=True))
    for name, one in launches.items():
        yield name, compile_for(capability, one.kernel, one.args, one.options)


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
