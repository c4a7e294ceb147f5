"""The result of `explain`: numbers, JSON, and one page of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from tilewise_lab.costs import cost, predict, roofline
from tilewise_lab.costs.cost import Call, ScoreTerms
from tilewise_lab.costs.devices import Device
from tilewise_lab.costs.predict import Kernel


class Advice(NamedTuple):
    """gain: the predicted speedup; None if the model predicts none."""

    text: str
    gain: float | None = None


class Resources(NamedTuple):
    """What the compiler gave a kernel."""

    registers: int
    shared: int
    spills: int


@dataclass(frozen=True, repr=False)
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
        return text(self)

    def __repr__(self) -> str:
        call = self.call
        return (
            f"<Explanation: {shapes(call)}, {band(call.before, call.after)}, on {self.device.name}:"
            f" {self.backend}, {time(self.prediction.device)}{'' if self.kernels else ' or more'}; print() shows all>"
        )

    def _repr_html_(self) -> str:
        return table(lines(self))


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Labels and values as an HTML table, for notebooks.

    >>> print(table([("work", "a < b")]).replace("><", ">\\n<"))
    <table>
    <tr>
    <th style="text-align:left">work</th>
    <td style="text-align:left">a &lt; b</td>
    </tr>
    </table>
    """
    left = ' style="text-align:left"'
    cells = (f"<tr><th{left}>{escape(label)}</th><td{left}>{escape(value)}</td></tr>" for label, value in rows)
    return f"<table>{''.join(cells)}</table>"


def text(result: Explanation) -> str:
    width = max(len(label) for label, _ in lines(result))
    return "\n".join(f"{label:<{width}}  {value}" if label or value else "" for label, value in lines(result))


def lines(result: Explanation) -> Iterator[tuple[str, str]]:
    call, device, moved = result.call, result.device, result.traffic
    passes = "  forward + backward" if result.backward else ""
    passes += ", the same bits every time" if result.backward and call.deterministic else ""
    yield "call", f"{shapes(call)}  {call.dtype}  {band(call.before, call.after)}{passes}"
    yield "device", f"{device.name}, {device.sms} {'SMs' if device.capability else 'threads; rates measured now'}"
    yield "backend", f"{result.backend}: {result.reason}"
    if call.terms:
        yield "terms", score_terms(call.terms, result.backward)
    more = (
        ""
        if result.executed == result.flops
        else f"; the tiles compute {result.executed / result.flops:.2f} times that"
    )
    yield "work", f"{amount(result.flops)}FLOP on visible pairs{more}"
    kinds = {"naive": moved.naive, "FA1 order": moved.fa1, "tiled": moved.tiled, "least": moved.least}
    yield "memory", ", ".join(f"{kind} {amount(size)}B" for kind, size in kinds.items())
    naive, tiled, ridge = result.flops / moved.naive, result.flops / moved.tiled, device.ridge(call.dtype)
    yield "intensity", f"naive {naive:.3g}, tiled {tiled:.3g} FLOP/byte; the ridge is at {ridge:.3g}"
    binds = f"{result.binding} {'binds' if result.binding == 'memory' else 'bind'}"
    yield "roofs", ", ".join(f"{roof.name} {time(roof.seconds)}" for roof in result.roofs) + f": {binds}"
    for kernel in result.kernels:
        yield kernel.name, describe(kernel, result)
    if result.kernels and result.not_compiled:
        yield "resources", f"unknown: {result.not_compiled}"
    yield "predicted", prediction(result)
    for advice in result.advice:
        yield "advice", advice.text + (f" ({advice.gain:.2f}x faster)" if advice.gain else "")


def score_terms(terms: ScoreTerms, backward: bool) -> str:
    """
    >>> score_terms(ScoreTerms(("softcap", "bias"), 17, 19, read=2**20), False)
    'softcap, bias: 17 operations on each pair, 1.05 MB read'
    """
    parts = [f"{terms.forward} operations on each pair" + (f", {terms.backward} backward" if backward else "")]
    if terms.read:
        parts.append(f"{amount(terms.read)}B read")
    if terms.written and backward:
        parts.append(f"{amount(terms.written)}B of gradients")
    if terms.visited < 1:
        parts.append(f"{terms.visited:.0%} of the tiles visited")
    return f"{', '.join(terms.names)}: {', '.join(parts)}"


def shapes(call: Call) -> str:
    if call.lengths:
        return (
            f"{call.batch} packed sequences, {call.n_q} queries and {call.n_k} keys, "
            f"{call.heads} heads on {call.kv_heads}, D {call.d}"
        )
    keys = f"{call.batch}, {call.n_k}, {call.kv_heads}"
    kv = f"k, v ({keys}, {call.d})" if call.d == call.dv else f"k ({keys}, {call.d})  v ({keys}, {call.dv})"
    return f"q ({call.batch}, {call.n_q}, {call.heads}, {call.d})  {kv}"


def describe(kernel: Kernel, result: Explanation) -> str:
    tile, w = kernel.tile, kernel.waves
    waves = f"{w.waves} wave{'s' * (w.waves != 1)}, {kernel.schedule.efficiency:.0%} busy"
    shared = kernel.profile.heads if kernel.profile else 1
    rows = f"{tile.block_m} (of {shared} heads)" if shared > 1 else f"{tile.block_m}"
    line = (
        f"{rows} x {tile.block_n} tiles, {tile.warps} warps, {tile.stages} stages; "
        f"{kernel.programs} programs on {kernel.slots} slots: {waves}; {time(result.prediction.kernels[kernel.name])}"
    )
    used = result.resources.get(kernel.name)
    if used:
        line += f"; {used.registers} registers, {used.shared / 1024:.0f} of {result.device.shared / 1024:.0f} KB shared"
        line += f", {used.spills} B spilled" if used.spills else ", no spills"
    return line


def prediction(result: Explanation) -> str:
    seconds = result.prediction
    if not result.kernels:  # only the rates of large products and copies are known, not what torch adds to each
        return f"{time(seconds.device)} or more: the overhead of torch's operations, large in small calls, is not known"
    line = f"{time(seconds.device)} on the device ({amount(result.flops / seconds.device)}FLOP/s)"
    return (
        line if seconds.call == seconds.device else f"{line}, {time(seconds.call)} for the caller: the host is slower"
    )


def band(before: int | None, after: int | None) -> str:
    """
    >>> band(None, None), band(None, 0), band(128, 0)
    ('full', 'causal', 'window 128 to the left, 0 to the right')
    """
    if before is None:
        return "full" if after is None else "causal" if after == 0 else f"all to the left, {after} to the right"
    return f"window {before} to the left, {'all' if after is None else after} to the right"


def amount(x: float) -> str:
    """
    >>> amount(137438953472), amount(950)
    ('137 G', '950 ')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= factor:
            return f"{x / factor:.3g} {prefix}"
    return f"{x:.3g} "


def time(seconds: float) -> str:
    """
    >>> time(0.00123), time(42e-6)
    ('1.23 ms', '42 us')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
