"""Runs the steps of ranks and delivers their messages: with torch.distributed, or all ranks in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttentionError, shown


class Exchange(NamedTuple):
    """Messages to post: (peer, tensor), in order."""

    number: int
    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]


def group_of(mesh: Any) -> tuple[int, Any, int | None]:
    """(number of ranks, group, ranks of a node) of a DeviceMesh, a ProcessGroup or None. The last is None unless the
    mesh has two axes."""
    if not dist.is_available() or not dist.is_initialized():
        raise AttentionError(
            "mesh of a plan", shown(mesh), "a number of ranks; or torch.distributed.init_process_group first"
        )
    if mesh is None:
        mesh = dist.group.WORLD
    if isinstance(mesh, dist.ProcessGroup):
        return dist.get_world_size(mesh), mesh, None
    if hasattr(mesh, "get_group"):
        if mesh.ndim > 2:
            raise AttentionError(
                "axes of the mesh", mesh.mesh_dim_names or mesh.ndim, "one, as mesh['cp']; or two, nodes and GPUs"
            )
        node = mesh.shape[1] if mesh.ndim == 2 else None
        group = flattened(mesh)
        return dist.get_world_size(group), group, node
    raise AttentionError("mesh of a plan", type(mesh).__name__, "a DeviceMesh, a ProcessGroup, None, or an int")


_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()  # of each world, by their ranks


def flattened(mesh: Any) -> Any:
    """The process group of all ranks of a DeviceMesh of one or two axes."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    known = _groups.setdefault(dist.group.WORLD, {tuple(range(dist.get_world_size())): dist.group.WORLD})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return known[ranks]


_initialised: WeakSet[Any] = WeakSet()  # groups in which all ranks have communicated once


def run(group: Any, steps: Any, device: torch.device) -> Any:
    """The result of this rank's steps. On a GPU, messages run on NCCL's own stream: computation between a post and its
    wait overlaps them.

    Args:
        steps: a generator of `Exchange` (messages to post) and numbers (an exchange to wait for).
    """
    if group is not None and device.type == "cuda" and group not in _initialised:
        if "cuda:gloo" in dist.get_backend_config(group):
            raise AttentionError("group of the plan", "gloo, which sends nothing from a GPU", "one of nccl")
        # NCCL: all ranks take part in the first operation of a group
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _initialised.add(group)
    pending: dict[int, tuple[list[Any], Exchange]] = {}
    order: dict[tuple[str, int], int] = defaultdict(int)

    def operation(kind: Any, peer: int, x: Tensor) -> Any:
        tag = order[kind.__name__, peer]
        order[kind.__name__, peer] += 1
        return dist.P2POp(kind, x, dist.get_global_rank(group, peer), group, tag)

    try:
        while True:
            step = next(steps)
            if isinstance(step, Exchange):
                ops = [operation(dist.isend, peer, x) for peer, x in step.sends if x.numel()]
                ops += [operation(dist.irecv, peer, x) for peer, x in step.receives if x.numel()]
                pending[step.number] = (dist.batch_isend_irecv(ops) if ops else [], step)
            else:
                _finish(pending.pop(step, None))
    except StopIteration as stop:
        for number in list(pending):
            _finish(pending.pop(number))
        return stop.value


def compare(
    group: Any, what: str, names: Sequence[str], values: Sequence[Any] | None, device: torch.device | None = None
) -> None:
    """Raises on every rank unless the values are the same on all ranks, which exchange a hash of each.

    Args:
        what: of what they are, such as "of a plan".
        names: of the values, the same on all ranks.
        values: None if this rank is about to raise an error of its own.
        device: a GPU, for a group that sends nothing from a CPU. Default: the current one.

    Raises:
        AttentionError: values differ, or another rank has an error.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    elif device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    own = [_hash(x) for x in (values or [None] * len(names))]
    each = [torch.empty(1 + len(names), dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(each, torch.tensor([values is not None, *own], device=device), group=group)
    found = [x.tolist() for x in each]
    if values is None or all(x == found[rank] for x in found):
        return
    failed = [r for r in range(ranks) if not found[r][0]]
    if failed:
        raise AttentionError(f"arguments {what}", f"an error on rank {_numbers(failed)}", "none: that rank says why")
    wrong = [n for n in range(len(names)) if len({x[1 + n] for x in found}) > 1]
    others = [r for r in range(ranks) if found[r] != found[rank]]
    raise AttentionError(
        f"{', '.join(names[n] for n in wrong)} {what}",
        f"{', '.join(shown(values[n]) for n in wrong)} on rank {rank}, and something else on rank {_numbers(others)}",
        "the same on all ranks of the group",
    )


def _hash(value: Any) -> int:
    """The same in every process."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


COMPARED_CALLS = 256  # of a group: those of a model's first step
_compared: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many calls of each group have been compared


def compare_call(group: Any, names: Sequence[str], values: Callable[[], Sequence[Any]], device: torch.device) -> None:
    """`compare` for one of the first calls of a group: all ranks make the same number of them."""
    count = 0 if group is None else _compared.get(group, 0)
    if group is None or count >= COMPARED_CALLS:
        return
    _compared[group] = count + 1
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        compare(group, "of a call of distributed.attention", names, values(), device)


def maximum(group: Any, x: Tensor) -> Tensor:
    """x, with the maximum over all ranks in place."""
    if group is not None:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def _finish(exchange: tuple[list[Any], Exchange] | None) -> None:
    for work in exchange[0] if exchange else ():
        work.wait()


def rehearse(ranks: Sequence[Any]) -> list[Any]:
    """The results of all ranks' steps, run in one process: each runs until it must wait for another. An exchange has
    the same number at both ends."""
    n = len(ranks)
    sent: dict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
    wanted: dict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
    missing: list[dict[int, int]] = [defaultdict(int) for _ in range(n)]
    waits: list[int | None] = [None] * n
    results: list[Any] = [None] * n
    left = set(range(n))

    def deliver(a: int, b: int) -> None:
        while sent[a, b] and wanted[a, b]:
            (number, x), (expected, buffer) = sent[a, b].popleft(), wanted[a, b].popleft()
            if number != expected or x.shape != buffer.shape or x.dtype != buffer.dtype:
                raise RuntimeError(
                    f"rank {b} expects {tuple(buffer.shape)} as {expected}, {a} sent {tuple(x.shape)} as {number}"
                )
            buffer.copy_(x)
            missing[b][number] -= 1

    while left:
        moved = False
        for r in sorted(left):
            while waits[r] is None or not missing[r][waits[r] or 0]:
                moved = True
                try:
                    step = next(ranks[r])
                except StopIteration as stop:
                    results[r] = stop.value
                    left.discard(r)
                    break
                if not isinstance(step, Exchange):
                    waits[r] = step
                    continue
                waits[r] = None
                for peer, x in step.sends:
                    if x.numel():
                        sent[r, peer].append((step.number, x.clone()))
                        deliver(r, peer)
                for peer, buffer in step.receives:
                    if buffer.numel():
                        wanted[peer, r].append((step.number, buffer))
                        missing[r][step.number] += 1
                        deliver(peer, r)
        if not moved:
            raise RuntimeError(f"ranks {sorted(left)} wait for one another")
    return results


class _Gathered(torch.autograd.Function):
    """The shards of all ranks; the gradient of this rank's shard is its own part of the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, counts: Sequence[int], rank: int, group: Any) -> tuple[Tensor, ...]:
        ctx.rank = rank
        parts = [x.new_empty((*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in counts]
        parts[rank] = x.clone()

        def steps() -> Any:
            others = [r for r in range(len(parts)) if r != rank]
            yield Exchange(0, [(r, x.contiguous()) for r in others], [(r, parts[r]) for r in others])
            yield 0

        if group is not None:
            run(group, steps(), x.device)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[ctx.rank], None, None, None, None


def gathered(x: Tensor, dim: int, counts: Sequence[int], rank: int, group: Any) -> tuple[Tensor, ...]:
    """The shards of all ranks, with `counts` tokens along `dim`, from this rank's shard."""
    dim = dim % x.dim()
    if x.shape[dim] != counts[rank]:
        raise AttentionError(
            "shape of a tensor to unshard", tuple(x.shape), f"this rank's {counts[rank]} tokens along dim {dim}"
        )
    found: tuple[Tensor, ...] = _Gathered.apply(x, dim, counts, rank, group)  # type: ignore[no-untyped-call]
    return found
