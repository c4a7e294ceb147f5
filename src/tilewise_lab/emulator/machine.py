"""The machine: threads that take turns in virtual time, shared memory that knows who is touching it, barriers.

Only one thread runs at a time, always the one whose clock is behind; so a run is reproducible. If no thread can run and
nothing is in flight, it is a deadlock. `seed` perturbs every latency: other seeds are other interleavings.

Costs are in cycles and roughly those of an H100. They order the events and draw the timeline; they measure nothing.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RaceError(RuntimeError):
    """Two parties touched the same shared memory, and nothing ordered them."""


class DeadlockError(RuntimeError):
    """All threads wait, and no operation is in flight that could wake one."""


class Span(NamedTuple):
    """What a unit of a program did from one cycle to another."""

    program: int
    unit: str
    what: str
    start: int
    end: int


TMA_LATENCY = 700
TMA_BYTES = 48  # per cycle
MMA_FLOPS = 8192  # per cycle and SM, 16-bit operands
CYCLES = {"exp2": 8.0, "log2": 8.0, "alu": 1.0, "shared": 2.0}  # per element that a thread holds


class Machine:
    """Runs programs to their end and keeps the timeline of what they did."""

    def __init__(self, seed: int = 0, latencies: tuple[float, ...] = (0.5, 1.0, 1.0, 1.0, 3.0)) -> None:
        self.random = random.Random(seed)
        self.latencies = latencies
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.partitions: list[Partition] = []
        self.timeline: list[Span] = []
        self.addresses: list[Tensor] = []  # of which a kernel has taken the address
        self._ids = 0
        self._baton = threading.Semaphore(0)
        self._error: BaseException | None = None

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._ids += 1
        heapq.heappush(self.events, (self.now + delay, self._ids, event))

    def late(self, cycles: float) -> float:
        """A latency, shorter or longer than usual."""
        return cycles * self.random.choice(self.latencies)

    def run(self) -> None:
        """Until every partition has ended: the next event or the partition that is behind, whichever is earlier."""
        while True:
            alive = [p for p in self.partitions if not p.ended]
            ready = min((p for p in alive if p.ready()), key=lambda p: p.clock, default=None)
            if self.events and (ready is None or self.events[0][0] <= ready.clock):
                self.now, _, event = heapq.heappop(self.events)
                self._guarded(event)
            elif ready is not None:
                self.now = max(self.now, ready.clock)
                ready.resume()
            elif alive:
                self._error = DeadlockError("; ".join(f"{p.name} waits for {p.waits_for}" for p in alive))
            else:
                break
            if self._error is not None:
                self._abandon()
                raise self._error
        self._check_barriers()

    def _check_barriers(self) -> None:
        """The compiler reuses the memory of an unused barrier, but the hardware still takes
        it for a barrier when it saves and restores a program that has to make room for another process."""
        programs = {p.program for p in self.partitions}
        barriers = [(b.name.partition("[")[0], b.used) for program in programs for b in program.barriers]
        used = {name for name, is_used in barriers if is_used}
        idle = {name for name, _ in barriers} - used
        if used and idle:
            raise RaceError(f"{', '.join(sorted(idle))}: initialised and never used, so its memory is not its own")

    def _guarded(self, event: Callable[[], None]) -> None:
        try:
            event()
        except BaseException as error:
            self._error = error

    def _abandon(self) -> None:
        for p in self.partitions:
            if not p.ended:
                p.abandoned = True
                p.resume()


class Abandoned(BaseException):
    pass


class Partition:
    """A group of warps that runs one function: a thread that holds the baton while it runs."""

    def __init__(self, program: Program, name: str, warps: int, function: Callable[..., Any], args: tuple[Any, ...]):
        self.machine, self.program, self.name, self.warps = program.machine, program, name, warps
        self.clock = self.machine.now
        self.ended = self.abandoned = False
        self.waits_for = ""
        self.condition: Callable[[], bool] | None = None
        self.mmas: list[Mma] = []
        self.copies: list[bool] = []  # cp.async, in the order in which they were issued: has it landed?
        self.stores: list[bool] = []  # in the order in which they were sent out: has it been read?
        self.unfenced: list[Shared] = []
        self.bit = 1 << sum(p.program is program for p in self.machine.partitions)
        self._since = self.clock
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, args=(function, args), daemon=True)
        self.machine.partitions.append(self)
        self._thread.start()

    def _main(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._turn.acquire()
        _current.partition = self
        try:
            if not self.abandoned:
                function(*args)
                self._span("compute")
                if self.mmas:
                    raise RaceError(f"{self.name} ended with {len(self.mmas)} wgmma in flight")
        except Abandoned:
            pass
        except BaseException as error:
            self.machine._error = self.machine._error or error
        self.ended = True
        self.machine._baton.release()

    def resume(self) -> None:
        self._turn.release()
        self.machine._baton.acquire()

    def ready(self) -> bool:
        return self.condition is None or self.condition()

    def step(self) -> None:
        """Run all threads whose clock is behind first."""
        self.machine._baton.release()
        self._turn.acquire()
        if self.abandoned:
            raise Abandoned
        self.clock = max(self.clock, self.machine.now)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        self.step()
        if not condition():
            self._span("compute")
            self.waits_for, self.condition = what, condition
            self.step()
            self.condition = None
            self._span(f"wait {what}")

    def charge(self, kind: str, elements: int) -> None:
        self.clock += CYCLES[kind] * max(1.0, elements / (32 * self.warps))

    def _span(self, what: str) -> None:
        if self.clock > self._since:
            self.record(self.name, what, self._since, self.clock)
        self._since = self.clock

    def record(self, unit: str, what: str, start: float, end: float) -> None:
        self.machine.timeline.append(Span(self.program.index, unit, what, round(start), round(end)))


class Current(threading.local):
    partition: Partition


_current = Current()


def current() -> Partition:
    return _current.partition


class Program:
    """One thread block: its shared memory, its named barriers, its tensor cores."""

    def __init__(self, machine: Machine, index: int, count: int) -> None:
        self.machine, self.index, self.count = machine, index, count
        self.named_barriers: dict[int, NamedBarrier] = {}
        self.barriers: list[Barrier] = []
        self.mma_free = 0.0
        self.allocations = 0


class NamedBarrier:
    """A named barrier: `bar.sync` and `bar.arrive` on a number of threads."""

    def __init__(self) -> None:
        self.come, self.generation = 0, 0

    def arrive(self, threads: int, of: int) -> int:
        generation = self.generation
        self.come += threads
        if self.come > of:
            raise RaceError(f"{self.come} threads came to a named barrier of {of}")
        if self.come == of:
            self.come = 0
            self.generation += 1
        return generation


def named_barrier(ident: int, threads: int, *, wait: bool) -> None:
    p = current()
    p.step()
    bar = p.program.named_barriers.setdefault(ident, NamedBarrier())
    generation = bar.arrive(32 * p.warps, threads)
    if wait:
        p.wait(f"named barrier {ident}", lambda: bar.generation != generation)


class Barrier:
    """An mbarrier. Its phase ends when `count` arrivals have come and as many bytes as were announced."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count: int | None = None
        self.pending = self.bytes = self.phase = 0
        self.used = False

    def init(self, count: int) -> None:
        self.count = self.pending = count
        current().program.barriers.append(self)

    def update(self, *, arrivals: int = 0, expect: int = 0) -> None:
        if self.count is None:
            raise RaceError(f"{self.name} was used before it was initialised")
        self.used = True
        if arrivals > self.pending:
            raise RaceError(f"{self.name}: more arrivals than the {self.count} of a phase")
        self.pending -= arrivals
        self.bytes += expect
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def arrive(self, count: int = 1, expect: int = 0) -> None:
        current().step()
        self.update(expect=expect)
        self.update(arrivals=count)

    def wait(self, parity: int) -> None:
        if self.count is None:
            raise RaceError(f"{self.name} was waited for before it was initialised")
        self.used = True
        current().wait(self.name, lambda: self.phase != parity)


class Shared:
    """A view of shared memory. Beside every element lie its state: filled, being written, read how often, and for which
    partitions' asynchronous reads (a bit each) ordinary stores to it have not been fenced. Views of the data are views
    of the state."""

    def __init__(self, name: str, data: Tensor, state: dict[str, Tensor] | None = None) -> None:
        self.name, self.data = name, data
        self.state = state or {
            "filled": torch.zeros_like(data, dtype=torch.bool),
            "writing": torch.zeros_like(data, dtype=torch.bool),
            "readers": torch.zeros_like(data, dtype=torch.int8),
            "unfenced": torch.zeros_like(data, dtype=torch.int16),
        }

    def view(self, f: Callable[[Tensor], Tensor], suffix: str = "") -> Shared:
        return Shared(self.name + suffix, f(self.data), {k: f(x) for k, x in self.state.items()})

    def check_read(self, who: str, *, asynchronous: bool) -> None:
        if self.state["writing"].any():
            raise RaceError(f"{who} reads {self.name} while a copy is writing it")
        if not self.state["filled"].all():
            raise RaceError(f"{who} reads {self.name}, which has not been filled")
        if asynchronous and (self.state["unfenced"] & current().bit).any():
            raise RaceError(f"{who} reads {self.name} without a fence after ordinary stores")

    def check_write(self, who: str) -> None:
        if self.state["writing"].any():
            raise RaceError(f"{who} writes {self.name} while a copy is writing it")
        if self.state["readers"].any():
            raise RaceError(f"{who} writes {self.name} while it is being read")

    def load(self) -> Tensor:
        p = current()
        p.step()
        self.check_read(p.name, asynchronous=False)
        p.charge("shared", self.data.numel())
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        p = current()
        p.step()
        self.check_write(p.name)
        self.data.copy_(value.detach())
        self.state["filled"].fill_(True)
        self.state["unfenced"].fill_(-1)
        p.unfenced.append(self)
        p.charge("shared", self.data.numel())


def fence() -> None:
    """Between ordinary stores and asynchronous reads: by the one who stored, for all, or by one who reads, for it."""
    p = current()
    for shared in p.unfenced:
        shared.state["unfenced"].zero_()
    p.unfenced.clear()
    for other in p.machine.partitions:
        if other.program is p.program:
            for shared in other.unfenced:
                shared.state["unfenced"] &= ~p.bit


def copy_in(tile: Tensor, target: Shared, barrier: Barrier, what: str) -> None:
    """TMA, global to shared: the tile lands late, in one piece, and tells the barrier how many bytes came."""
    p = current()
    p.step()
    target.check_write(f"the copy of {what}")
    target.state["writing"].fill_(True)
    target.state["filled"].fill_(False)
    size = tile.numel() * tile.element_size()
    start, duration = p.clock, p.machine.late(TMA_LATENCY) + size / TMA_BYTES

    def land() -> None:
        target.data.copy_(tile.reshape(target.data.shape))
        target.state["writing"].fill_(False)
        target.state["filled"].fill_(True)
        target.state["unfenced"].zero_()
        barrier.update(expect=-size)
        p.record("copies", f"load {what}", start, p.machine.now)

    p.machine.after(duration, land)


def copy_async(tile: Tensor, target: Shared) -> None:
    """cp.async, global to shared: the tile lands late."""
    p = current()
    p.step()
    target.check_write(f"a copy of {p.name}")
    target.state["writing"].fill_(True)
    target.state["filled"].fill_(False)
    n = len(p.copies)
    p.copies.append(False)
    start, duration = p.clock, p.machine.late(TMA_LATENCY) + tile.numel() * tile.element_size() / TMA_BYTES

    def land() -> None:
        target.data.copy_(tile)
        target.state["writing"].fill_(False)
        target.state["filled"].fill_(True)
        target.state["unfenced"].zero_()
        p.copies[n] = True
        p.record("copies", f"copy of {p.name}", start, p.machine.now)

    p.machine.after(duration, land)


def arrive_copied(barrier: Barrier) -> None:
    """All threads arrive once the copies so far have landed."""
    p = current()
    p.step()
    issued = len(p.copies)

    def arrive() -> None:
        if all(p.copies[:issued]):
            barrier.update(arrivals=32 * p.warps)
        else:
            p.machine.after(10.0, arrive)

    p.machine.after(0.0, arrive)


def copy_out(
    source: Shared, write: Callable[[Tensor], None], what: str, used: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """TMA, shared to global: reads the tile late; it must not be written before `store_wait`. `used`: what of it is."""
    p = current()
    p.step()
    source.view(used).check_read(f"the copy of {what}", asynchronous=True)
    source.state["readers"] += 1
    n = len(p.stores)
    p.stores.append(False)
    size = source.data.numel() * source.data.element_size()
    start, duration = p.clock, p.machine.late(TMA_LATENCY) + size / TMA_BYTES

    def land() -> None:
        write(source.data.clone())
        source.state["readers"] -= 1
        p.stores[n] = True
        p.record("copies", f"store {what}", start, p.machine.now)

    p.machine.after(duration, land)


def store_wait(pending: int) -> None:
    """Until all stores but the last `pending` have been read."""
    p = current()
    p.wait("stores", lambda: all(p.stores[: len(p.stores) - pending]))


class Mma:
    """A wgmma on its way: its value must not be used before a wait has returned it."""

    def __init__(self, value: Tensor, operands: list[Shared]) -> None:
        self.value, self.operands, self.done = value, operands, False


def mma(a: Any, b: Shared, c: Any, what: str) -> Mma:
    """c + a b, later: the tensor cores take one product after the other. The operands in shared memory are read until
    then. c is a value, an Mma still on its way, or None."""
    p = current()
    p.step()
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    for x in operands:
        x.check_read(f"{p.name}'s wgmma", asynchronous=True)
        x.state["readers"] += 1
    left = (a.data if isinstance(a, Shared) else a).float()
    right = b.data.float()
    value = left @ right
    if c is not None:
        value = value + (c.value if isinstance(c, Mma) else c)
    job = Mma(value, operands)
    p.mmas.append(job)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    start = max(p.clock, p.program.mma_free)
    p.program.mma_free = end = start + p.machine.late(flops / MMA_FLOPS)

    def finish() -> None:
        for x in job.operands:
            x.state["readers"] -= 1
        job.done = True
        p.record("tensor cores", f"{p.name} {what}", start, end)

    p.machine.after(end - p.machine.now, finish)
    return job


def mma_wait(pending: int) -> None:
    p = current()
    p.wait("wgmma", lambda: sum(not job.done for job in p.mmas) <= pending)
    p.mmas = p.mmas[max(0, len(p.mmas) - pending) :]
