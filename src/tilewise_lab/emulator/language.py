"""Gluon's and Triton's words, on torch tensors. Layouts mean nothing here: the emulator checks what is computed and in
which order, the compiler checks where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilewise.mods import dropout

from . import machine
from .machine import Barrier, Mma, Shared, current
from .values import (
    Descriptor,
    Int,
    Memory,
    Pointer,
    PointerType,
    Value,
    allocate_shared_memory,
    atomic_add,
    atomic_max,
    cast,
    load,
    store,
    tensor,
)


def warp_specialize(tasks: list[tuple[Any, tuple[Any, ...]]], warps: list[int], _registers: list[int]) -> None:
    me = current()
    names = [f"{f.__name__} {i}" for i, (f, _) in enumerate(tasks)]
    parts = [
        machine.Partition(me.program, name, n, f, args)
        for name, n, (f, args) in zip(names, [me.warps, *warps], tasks, strict=True)
    ]
    me.wait("the partitions", lambda: all(p.ended for p in parts))


def warpgroup_mma(a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    left = a.shared if isinstance(a, Memory) else a.data
    c = None if not use_acc else acc if isinstance(acc, Mma) else acc.data
    job = machine.mma(left, b.shared, c, "S" if isinstance(a, Memory) else "O")
    return job if is_async else warpgroup_mma_wait(0, deps=(job,))


def warpgroup_mma_wait(num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    machine.mma_wait(num_outstanding)
    for job in deps:
        if isinstance(job, Mma) and not job.done:
            raise machine.RaceError(f"{current().name} takes the result of a wgmma that is still in flight")
    out = tuple(Value(job.value) if isinstance(job, Mma) else job for job in deps)
    return out[0] if len(out) == 1 else out


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Value):
        return a if condition else b
    return Value(torch.where(condition.data, tensor(a), tensor(b)))


def _pick(f: Callable[[Tensor, Tensor], Tensor], scalar: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Value) or isinstance(b, Value):
            x, y = tensor(a), tensor(b)
            return Value(f(x, y.to(x.dtype) if x.dim() else y))
        return scalar(a, b)

    return apply


def _reduce(f: Callable[[Tensor, int], Tensor]) -> Callable[[Value, int], Any]:
    def apply(x: Value, axis: int) -> Any:
        result = f(x.data, axis)
        if result.dim() or result.is_floating_point():
            return Value(result) if result.dim() else float(result)
        return Int(result)

    return apply


def _unary(f: Callable[[Tensor], Tensor], kind: str = "alu") -> Callable[[Value], Value]:
    return lambda x: Value(f(x.data if isinstance(x, Value) else torch.tensor(float(x))), kind)


def map_elementwise(f: Callable[..., Any], *tensors: Value, pack: int = 1) -> tuple[Value, ...]:
    """The function once, on tensors: elements n, n + pack, n + 2 pack .. of every input are its n-th argument. Which
    elements meet in one call is the layout's affair, so only functions that treat all of them alike are emulated right.
    """
    inputs = torch.broadcast_tensors(*(x.data for x in tensors))
    done = f(*(Value(x) for x in inputs for _ in range(pack)))
    return tuple(done[::pack])


def _pack_fp8(*values: Value) -> Value:
    bytes_of = torch.stack([x.data for x in values], -1).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return Value(bytes_of.view(torch.int32).squeeze(-1))


def _unpack_fp8(words: Value) -> Value:
    return Value(words.data[..., ::4].contiguous().view(torch.float8_e4m3fn))


def _keep_columns(s: Value, compare: str, limit: Value) -> Value:
    keep = getattr(torch, compare)(torch.arange(s.shape[1])[None, :], limit.data[:, None])
    return Value(s.data.masked_fill(~keep, -torch.inf))


def _keep_column_range(s: Value, lo: Value | None, hi: Value) -> Value:
    s = _keep_columns(s, "lt", hi)
    return s if lo is None else _keep_columns(s, "ge", lo)


def _load_row_words(p: Pointer, pred: Any, _n: int, _layout: Any) -> Value:
    found: Value = load(p + Value(torch.arange(256).view(64, 4)), pred)
    return found


def _keep_bits(s: Value, words: Value, shift: int) -> Value:
    c = torch.arange(s.shape[1])
    bits = words.data[:, (c & 6) >> 1] >> (c // 8 * 2 + (c & 1) + int(shift))
    return Value(s.data.masked_fill(bits & 1 == 0, -torch.inf))


def _mix(x: Any) -> Any:
    return (
        Value(dropout.mix(x.data & dropout.LOW))
        if isinstance(x, Value)
        else Int(dropout.mix(torch.tensor(x & dropout.LOW)))
    )


def _half_mix(x: Value, factor: int) -> Value:
    return Value(dropout.step(x.data & dropout.LOW, factor))


def _negate_dropped(p: Value, words: Value, threshold: int) -> Value:
    keys, queries = torch.arange(p.shape[0])[:, None], torch.arange(p.shape[1])[None, :]
    first = dropout.mix(words.data & dropout.LOW)
    bits = torch.where(queries & dropout.BIT == 0, first, dropout.step(first, 0x2C1B3C6D))
    bits = torch.where(keys & dropout.BIT == 0, bits >> 16, bits & 0xFFFF)
    return Value(torch.where(bits >= threshold, p.data, -p.data))


def _tma_load(descriptor: Descriptor, at: list[int], barrier: Barrier, target: Memory, pred: Any = True) -> None:
    if pred:
        machine.copy_in(descriptor.read(at), target.shared, barrier, descriptor.name)


def _copy_async(target: Memory, pointer: Pointer, mask: Any = None) -> None:
    machine.copy_async(load(pointer, mask).data, target.shared)


def _tma_store(descriptor: Descriptor, at: list[int], source: Memory) -> None:
    inside = descriptor.locate(at)[1]

    def used(x: Tensor) -> Tensor:
        return x.repeat_interleave(inside.numel() // x.numel(), -1).reshape(descriptor.box)[inside]

    machine.copy_out(source.shared, lambda tile: descriptor.write(at, tile), descriptor.name, used)


def _reinterpret(memory: Memory, dtype: torch.dtype, shape: list[int], _layout: Any) -> Memory:
    """The same bytes as another type. Their state stays as fine as it was: one entry for 4 bytes remains one."""
    *outer, inner = shape
    data = memory.shared.data.view(-1).view(dtype).view(list(shape))
    times = data.numel() // memory.shared.data.numel()
    state = {k: x.view([*outer, inner // times]) for k, x in memory.shared.state.items()}
    return Memory(Shared(memory.shared.name, data, state))


def _tma_reduce_add(descriptor: Descriptor, at: list[int], source: Memory) -> None:
    machine.copy_out(source.shared, lambda tile: descriptor.add(at, tile), descriptor.name)


def _bar_sync(ident: int, threads: int) -> None:
    machine.named_barrier(ident, threads, wait=True)


def _bar_arrive(ident: int, threads: int) -> None:
    machine.named_barrier(ident, threads, wait=False)


def _semaphore_wait(pointer: Pointer, value: int) -> None:
    current().wait("a semaphore", lambda: int(pointer.memory()[pointer.index()]) >= value)


def _semaphore_release(pointer: Pointer) -> None:
    machine.store_wait(0)
    pointer.memory()[pointer.index()] += 32 * current().warps


def _range(*args: int, **_hints: Any) -> Iterator[Int]:
    return map(Int, range(*(int(a) for a in args)))


def _wait(bar: Barrier, phase: int, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        bar.wait(int(phase))


def _largest(x: torch.Tensor, axis: int) -> torch.Tensor:
    """As PTX's max: the larger number of a number and a NaN is the number."""
    if not x.is_floating_point():
        return x.amax(axis)
    found = x.masked_fill(x.isnan(), -torch.inf).amax(axis)
    return found.masked_fill(x.isnan().all(axis), torch.nan)


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda *a: "mbarrier",
    init=lambda bar, count: bar.init(count),
    wait=_wait,
    expect=lambda bar, size, pred=True: bar.arrive(1, size) if pred else None,
    arrive=lambda bar, count=1, pred=True: bar.arrive(count) if pred else None,
)
tma = SimpleNamespace(store_wait=machine.store_wait)

# the words of `gl` and of `tl`
WORDS = SimpleNamespace(
    constexpr=lambda x: x,
    int32=torch.int32,
    int64=torch.int64,
    uint32=torch.int64,  # `mix` wraps it around
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    float8e4nv=torch.float8_e4m3fn,
    NVMMADistributedLayout=lambda *a: None,
    NVMMASharedLayout=lambda *a: None,
    DotOperandLayout=lambda *a: None,
    SliceLayout=lambda *a: None,
    BlockedLayout=lambda *a: None,
    SwizzledSharedLayout=lambda *a: None,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
    range=_range,
    static_range=_range,
    static_assert=lambda *a: None,
    assume=lambda condition: None,
    to_tensor=Int,
    cast=cast,
    pointer_type=PointerType,
    program_id=lambda axis: Int(current().program.index),
    num_programs=lambda axis: Int(current().program.count if axis == 0 else 1),
    num_warps=lambda: current().warps,
    cdiv=lambda a, b: (a + b - 1) // b,
    multiple_of=lambda x, _n: x,
    load=load,
    store=store,
    atomic_add=atomic_add,
    atomic_max=atomic_max,
    arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: Value(torch.zeros(list(shape), dtype=dtype)),
    full=lambda shape, x, dtype, layout=None: Value(torch.full(list(shape), x, dtype=dtype)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    broadcast=lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.data, b.data))),
    join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
    split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
    expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
    map_elementwise=map_elementwise,
    where=where,
    maximum=_pick(torch.fmax, max),
    minimum=_pick(torch.fmin, min),
    max=_reduce(_largest),
    sum=_reduce(lambda x, axis: x.sum(axis)),
    exp2=_unary(torch.exp2, "exp2"),
    log2=_unary(torch.log2, "log2"),
    exp=_unary(torch.exp, "exp2"),
    log=_unary(torch.log, "log2"),
    sqrt=_unary(torch.sqrt, "log2"),
    sin=_unary(torch.sin),
    cos=_unary(torch.cos),
    floor=_unary(torch.floor),
    abs=lambda x: Value(x.data.abs()) if isinstance(x, Value) else abs(x),
)

# every other name that a kernel may have imported from Gluon or from gluon_compat
NAMES: dict[str, Any] = {
    "mbarrier": mbarrier,
    "tma": tma,
    "tma_load": _tma_load,
    "tma_store": _tma_store,
    "tma_reduce_add": _tma_reduce_add,
    "barrier": lambda: None,
    "fence_async_shared": machine.fence,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "arrive": lambda bar: bar.arrive(),
    "copy_async": _copy_async,
    "arrive_copied": machine.arrive_copied,
    "bar_sync": _bar_sync,
    "bar_sync_dynamic": _bar_sync,
    "bar_arrive": _bar_arrive,
    "bar_arrive_dynamic": _bar_arrive,
    "reinterpret": _reinterpret,
    "semaphore_wait": _semaphore_wait,
    "semaphore_release": _semaphore_release,
    "gdc_launch_dependents": lambda: None,
    "gdc_wait": lambda: None,
    "tma_stores_done": lambda: machine.store_wait(0),
    "prefetch_l2": lambda p: None,
    "opaque": lambda x: x,
    "program_id_here": lambda: Int(current().program.index),
    "opaque64": lambda x: x,
    "fast_tanh": _unary(torch.tanh, "exp2"),
    "downcast": lambda x, dtype: x.to(dtype),
    "downcast_positive": lambda x, dtype: Value(torch.where(x.data < 0, 0.0, x.data)).to(dtype),
    "mix": _mix,
    "half_mix": _half_mix,
    "negate_dropped": _negate_dropped,
    "pack_fp8": _pack_fp8,
    "unpack_fp8": _unpack_fp8,
    "column_indices": lambda first, s: Value(torch.arange(s.shape[1], dtype=torch.int32) + int(first)),
    "keep_columns": _keep_columns,
    "keep_column_range": _keep_column_range,
    "load_row_words": _load_row_words,
    "keep_bits": _keep_bits,
    "range": _range,
}
