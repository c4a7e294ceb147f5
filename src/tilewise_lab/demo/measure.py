"""What the demo measures: errors against float64, peak memory and time, of tilewise and of what torch offers."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise

BUDGET = 2.0  # an error may be this many times that of naive attention in the same dtype
TENSORS = ("out", "lse", "dq", "dk", "dv")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """Where to measure, and at what sizes. Everything is causal."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    check: tuple[int, int, int, int, int]  # B, Sq, Sk, H, Hk: odd lengths and grouped heads, to meet every edge
    seconds: float  # time spent on each contender at each length

    @staticmethod
    def choose(where: torch.device, *, quick: bool = False) -> Setting:
        if where.type == "cuda":
            lengths = tuple(2**n for n in (range(9, 12) if quick else range(10, 16)))
            return Setting(where, torch.bfloat16, 16, 128, lengths, (2, 1000, 1537, 8, 2), 0.05 if quick else 0.3)
        lengths = (64, 128, 256) if quick else (256, 512, 1024, 2048, 4096)
        check = (1, 75, 93, 4, 2) if quick else (2, 300, 421, 4, 2)
        return Setting(where, torch.float32, 4, 64, lengths, check, 0.02 if quick else 0.6)

    @property
    def machine(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class Error:
    """The largest error of one tensor against float64: ours, naive attention's in the same dtype, and that of torch's
    own, SDPA, which gives no lse."""

    dtype: str
    tensor: str
    ours: float
    naive: float
    sdpa: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.naive if self.naive else math.inf if self.ours else 0.0

    @property
    def ok(self) -> bool:
        return self.ours <= BUDGET * self.naive


@dataclass(frozen=True)
class Run:
    """Forward and backward once: the peak of memory beyond the inputs, and the median time. None: out of memory."""

    contender: str
    length: int
    peak: int | None
    seconds: float | None


@dataclass(frozen=True)
class Results:
    setting: Setting
    errors: list[Error] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    load: float = 0.0  # of other programs on the CPU, when the measuring began: how many cores they would fill

    @property
    def busy(self) -> str:
        """What must be known of times taken on a busy machine, or nothing."""
        cores = os.cpu_count() or 1
        if self.setting.device.type != "cpu" or self.load < cores / 2:
            return ""
        return f"other programs keep {self.load:.1f} of {cores} cores busy: the times are of a busy machine"

    @property
    def passed(self) -> bool:
        return all(error.ok for error in self.errors)

    def of(self, contender: str) -> list[Run]:
        return [run for run in self.runs if run.contender == contender]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = tilewise.attention(q, k, v, causal=True)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: softmax(Q Kᵀ / √D) V with the whole score matrix in memory."""
    return (scores(q, k).softmax(-1) @ spread(v, q)).transpose(1, 2)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, Sq, H, D), (B, Sk, Hk, D) -> (B, H, Sq, Sk); query i sits at key i + Sk - Sq and sees no later one."""
    s = (q / math.sqrt(q.shape[-1])).transpose(1, 2) @ spread(k, q).mT
    n_q, n_k = s.shape[-2:]
    hidden = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).triu(n_k - n_q + 1)
    return s.masked_fill_(hidden, -torch.inf)


def spread(x: Tensor, q: Tensor) -> Tensor:
    """(B, Sk, Hk, D) -> (B, H, Sk, D), each head repeated for the queries that share it."""
    group = q.shape[2] // x.shape[2]
    return (x.repeat_interleave(group, 2) if group > 1 else x).transpose(1, 2)


CONTENDERS: dict[str, Attention] = {"tilewise": ours, "SDPA": sdpa, "naive": naive}


def load() -> float:
    """How many programs wanted a core, over the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def errors(setting: Setting, dtype: torch.dtype) -> list[Error]:
    """Gradients flow through out and lse, both weighted at random; the truth sees the same rounded inputs."""
    b, n_q, n_k, h, h_kv = setting.check
    d = setting.head_dim
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device).to(dtype)

    inputs = normal(b, n_q, h, d), normal(b, n_k, h_kv, d), normal(b, n_k, h_kv, d)
    weights = normal(b, n_q, h, d), normal(b, h, n_q)

    def textbook(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return naive(q, k, v), scores(q, k).logsumexp(-1)

    def under_test(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
        return out, lse

    def torchs_own(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """SDPA, aligned as the others are by a mask; through lse, which it lacks, gradients flow as in the textbook."""
        seen = scores(q, k)[:1, :1] > -torch.inf
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)  # type: ignore[misc, arg-type]
        return out.transpose(1, 2), scores(q, k).logsumexp(-1)

    truth = _everything(textbook, inputs, weights, torch.float64)
    found = _everything(under_test, inputs, weights, dtype)
    usual = _everything(textbook, inputs, weights, dtype)
    fused = _everything(torchs_own, inputs, weights, dtype)
    word = str(dtype).removeprefix("torch.")
    return [
        Error(word, name, _distance(a, exact), _distance(b, exact), None if name == "lse" else _distance(c, exact))
        for name, a, b, c, exact in zip(TENSORS, found, usual, fused, truth, strict=True)
    ]


def _everything(
    attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """out, lse, dq, dk, dv"""
    q, k, v = (x.to(dtype).requires_grad_() for x in (y.detach().clone() for y in inputs))
    outputs = attention(q, k, v)
    along = [w.to(x.dtype) for w, x in zip(weights, outputs, strict=True)]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, (q, k, v), along)]


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


def runs(setting: Setting, length: int) -> Iterator[Run]:
    """Every contender at one length: peak memory first, then rounds in which each takes its turn on the clock."""
    shape = 1, length, setting.heads, setting.head_dim
    q, k, v, dout = (torch.randn(shape, device=setting.device, dtype=setting.dtype) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def work(attention: Attention) -> None:
        torch.autograd.grad(attention(*inputs), inputs, dout)

    peaks: dict[str, int | None] = {}
    for name, attention in CONTENDERS.items():
        try:
            peaks[name] = peak(partial(work, attention), setting.device)
        except torch.OutOfMemoryError:
            peaks[name] = None
            torch.cuda.empty_cache()
    able = [name for name, most in peaks.items() if most is not None]

    def turn() -> dict[str, float]:
        return {name: clock(partial(work, CONTENDERS[name]), setting.device) for name in able}

    times = [turn()]
    more = setting.seconds / max(times[0].values(), default=1.0)
    times += [turn() for _ in range(min(50, max(1, int(more))))]
    for name, most in peaks.items():
        yield Run(name, length, most, statistics.median(t[name] for t in times) if name in able else None)


def peak(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes torch's allocator had handed out at once during the work, beyond those it held before. (On a CPU:
    to this thread, which does all of the CPU backend's work while it is profiled; each other would hold a tile.)"""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    cpu = torch.profiler.ProfilerActivity.CPU
    silent = "KINETO_LOG_LEVEL" not in os.environ
    if silent:
        os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler greets on stderr otherwise
    try:
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            work()
    finally:
        if silent:
            del os.environ["KINETO_LOG_LEVEL"]
    assert profile.profiler is not None
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def clock(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
