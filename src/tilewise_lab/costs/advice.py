"""What the caller could change to make a call faster, and the gain that the time model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from tilewise.request import padded
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.explanation import Advice, Explanation

Estimate = Callable[[Call], Explanation]
MIN_GAIN = 1.02  # smaller gains are not reported


def advise(result: Explanation, tensors: list[Tensor], estimate: Estimate) -> Iterator[Advice]:
    """Likely mistakes, then predicted gains, the largest first, then advice without a number."""
    call = result.call
    if call.lengths is None and call.heads > call.n_q > 1 and call.kv_heads > call.n_k > 1:
        yield Advice(
            f"{call.heads} heads and {call.n_q} tokens: if the tensors are (batch, heads, tokens, dim), layout='bhsd'"
        )
    if not result.kernels:
        return
    gains = [
        *_wave(result, estimate),
        *_dtype(result, estimate),
        *_host(result),
        *_heads(result, estimate),
    ]
    yield from sorted((a for a in gains if a.gain and a.gain > MIN_GAIN), key=lambda advice: -(advice.gain or 0))
    yield from _terms(result)
    yield from _programs(result)
    yield from _dims(result)
    for name, x in zip("qkv", tensors, strict=True):
        yield from _strides(name, x)
    for name, used in result.resources.items():
        if used.spills > 64:  # a few bytes, moved once, cost nothing
            yield Advice(f"the {name} kernel spills {used.spills} bytes of registers: please report this shape")


def _gain(result: Explanation, other: Explanation) -> float:
    return result.prediction.device / other.prediction.device


def _wave(result: Explanation, estimate: Estimate) -> Iterator[Advice]:
    """A length just past a multiple of the tile: a tile with a row or two in it costs as much as a full one."""
    call, block = result.call, result.kernels[0].tile.block_m
    extra = call.n_q % block
    if call.lengths or call.n_q < block or not 0 < extra <= block // 8:
        return
    shorter = replace(call, n_q=call.n_q - extra, n_k=call.n_k - extra if call.n_k == call.n_q else call.n_k)
    better = estimate(shorter)
    more = result.kernels[0].waves.waves - better.kernels[0].waves.waves
    costs = {0: "a tile per head", 1: "a second wave" if result.kernels[0].waves.waves == 2 else "another wave"}
    yield Advice(
        f"S {call.n_q} is {extra} past a multiple of the {block}-row tile and costs "
        f"{costs.get(more, f'{more} more waves')}: {shorter.n_q} if you can",
        _gain(result, better),
    )


def _dtype(result: Explanation, estimate: Estimate) -> Iterator[Advice]:
    if result.call.dtype == "float32":
        yield Advice(
            "float32 products run on the ordinary units, not the matrix units: bfloat16 inputs keep float32 sums",
            _gain(result, estimate(replace(result.call, dtype="bfloat16"))),
        )


def _host(result: Explanation) -> Iterator[Advice]:
    yield Advice(
        "the host takes longer to launch this call than the device to run it: torch.compile or a CUDA graph",
        result.prediction.call / result.prediction.device,
    )


def _heads(result: Explanation, estimate: Estimate) -> Iterator[Advice]:
    call = result.call
    if result.binding == "memory" and call.heads == call.kv_heads and call.heads % 8 == 0 and call.n_q < 64:
        yield Advice(
            "memory binds, and K and V are most of it: grouped heads (8 queries to a KV head) read an eighth",
            _gain(result, estimate(replace(call, kv_heads=call.heads // 8))),
        )


def _terms(result: Explanation) -> Iterator[Advice]:
    terms = result.call.terms
    if terms and terms.masked and terms.visited == 1.0:
        yield Advice("a mask mod alone visits every tile: tilewise.block_mask(...) made of it skips hidden tiles")


def _programs(result: Explanation) -> Iterator[Advice]:
    forward = result.kernels[0]
    if forward.programs <= forward.slots // 2:
        yield Advice(f"{forward.programs} programs on {forward.slots} slots: a larger batch is nearly free")


def _dims(result: Explanation) -> Iterator[Advice]:
    call = result.call
    for name, d in {"D": call.d, "Dv": call.dv}.items():
        full = padded(d)
        if d != full and not (name == "Dv" and d == call.d):
            aligned = "" if d * call.itemsize % 16 == 0 else ", and its rows do not start at multiples of 16 bytes"
            yield Advice(f"pad {name} {d} to {full}: the kernel computes {full} columns anyway{aligned}")


def _strides(name: str, x: Tensor) -> Iterator[Advice]:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        yield Advice(
            f"{name}'s head dim is strided by {x.stride(-1)}: its neighbours lie far apart; make it contiguous"
        )
    elif x.shape[-1] * x.element_size() % 16 == 0:
        steps = [stride for stride, size in zip(x.stride(), x.shape[:-1], strict=False) if size > 1]
        if any(step * x.element_size() % 16 for step in steps):
            yield Advice(
                f"{name}'s rows do not start at multiples of 16 bytes: its loads are narrower than they could be"
            )
