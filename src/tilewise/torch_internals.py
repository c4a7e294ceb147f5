"""The state of torch that a call depends on, and the private names of torch that tilewise uses: all of them, each with
the public API that would replace it.

Tested with torch 2.10 to 2.15. If a later torch lacks a name, a fallback takes its place: attention stays right and may
be slower, but FLOP counters and profilers may miss it, torch.vmap over a KV cache is not rejected, and batched
gradients (`is_grads_batched`) raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def private(name: str, fallback: Any) -> Any:
    """torch.<name>, or the fallback if this torch has no such name.

    >>> private("_no._such_name", 3)
    3
    """
    try:
        return reduce(getattr, name.split("."), torch)
    except AttributeError:
        return fallback


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Number of active dispatch modes (fake tensors, FLOP counters, selective checkpoints). Public: none; a
# torch.overrides.is_dispatch_mode_active() would do.
_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)

# The active dispatch modes: a FLOP counter that is already active has a copy of the formulas. Public: a
# torch.utils.flop_counter whose counters look formulas up in the registry when they count.
dispatch_modes: Callable[[], list[Any]] = private("utils._python_dispatch._get_current_dispatch_mode_stack", list)

# Level of the innermost torch.func transform, or None. Public: none; a torch.func.is_transforming() would do.
_transform: Callable[[], Any] = private("_C._functorch.maybe_current_level", lambda: 0)

# Whether a tensor is the argument of torch.vmap, which a KV cache rejects. Public: the same torch.func query.
_is_vmapped: Callable[[Tensor], bool] = private("_C._functorch.is_batchedtensor", lambda x: False)

# Values of a tensor batched by `is_grads_batched`, and back. Public: torch.func.vmap rules for autograd.Function, once
# torch.autograd.grad(is_grads_batched=True) uses torch.func.vmap.
unbatched: Any = private("_remove_batch_dim", None)
batched: Any = private("_add_batch_dim", None)

# Whether a torch profiler records. Public: torch.profiler.record_function, which costs microseconds if none does.
profiler_enabled: Callable[[], bool] = private("_C._autograd._profiler_enabled", lambda: False)

# Allocation on the current CUDA device, as compiled programs do it. Public: torch.empty_strided, in twice the time.
empty_strided_cuda: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = private(
    "_C._dynamo.guards._empty_strided_cuda", _empty_strided
)

# Handle of the current CUDA stream. Public: torch.cuda.current_stream(), which builds a Stream around it.
current_stream: Callable[[int], int] = private(
    "_C._cuda_getCurrentRawStream", lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)


def constant(function: F) -> F:
    """Let torch.compile call the function while it traces. Public: torch.compiler.assume_constant_result, which sets
    the same attribute and imports the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for calls that are eager (`is_eager`): Function.apply first asks whether a torch.func transform
    is active, which takes a tenth of a small forward, and then calls the method of its own base class."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def is_forward_mode() -> bool:
    """Whether a forward-mode derivative is active. Public: forward_ad.unpack_dual, which needs each tensor."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def version_of(x: Tensor) -> int:
    """How often a tensor was written in place. Public: none; torch.autograd checks the same counter."""
    return x._version


def is_transformed() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) is active."""
    return _transform() is not None


def is_intercepted() -> bool:
    """Whether a dispatch mode is active in this thread."""
    return _modes() > 0


def is_eager() -> bool:
    """Whether no tracer, dispatch mode, function transform or forward-mode derivative is active in this thread. (A
    tracer other than Dynamo is a dispatch mode.)"""
    is_dual = getattr(forward_ad, "_current_level", 0) >= 0
    return not (is_dual or is_dynamo_compiling() or _modes() or _transform() is not None)


def is_first_order() -> bool:
    """`is_eager` in a backward that torch does not differentiate again, and no profiler records. (One function: each
    function that every call passes through takes a microsecond.)"""
    if torch.is_grad_enabled() or profiler_enabled():
        return False
    is_dual = getattr(forward_ad, "_current_level", 0) >= 0
    return not (is_dual or is_dynamo_compiling() or _modes() or _transform() is not None)


def is_cast(q: Any, k: Any, v: Any) -> bool:
    """Whether autocast is on for the device of q, and one of the three has another dtype than it computes in."""
    if type(q) in PLAIN and q.is_cuda:
        device = "cuda"
    elif isinstance(q, Tensor) and not q.is_meta:
        device = q.device.type
    else:
        return False
    if not torch.is_autocast_enabled(device):
        return False
    dtype = torch.get_autocast_dtype(device)
    return not (q.dtype is dtype and getattr(k, "dtype", None) is dtype and getattr(v, "dtype", None) is dtype)


def is_traced(*tensors: Tensor) -> bool:
    """Whether a tracer, dispatch mode or function transform is active, which must see the registered op. If not, the
    implementation is called directly: the dispatcher costs as much as a launch."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _transform() is not None
        or not PLAIN.issuperset(map(type, tensors))
        or tensors[0].is_meta
    )


def is_profiled() -> bool:
    """Whether a torch profiler records and should see the name of an operation."""
    return not torch.compiler.is_compiling() and profiler_enabled()


def is_vmapped(x: Tensor) -> bool:
    """Whether a tensor is the argument of torch.vmap."""
    return not torch.compiler.is_compiling() and _is_vmapped(x)


def has_address(x: Tensor) -> bool:
    """Whether a tensor has memory. Fake tensors and those that torch.func or autograd batches have none."""
    if type(x) not in PLAIN:
        return False
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def is_batched(*tensors: Tensor | None) -> bool:
    """Whether one is a stack of gradients for which autograd runs one backward: `is_grads_batched`, gradcheck's and
    torch.autograd.functional's vectorised derivatives. (Not torch.vmap, which transforms ops.)"""
    for x in tensors:
        if x is not None and type(x) in PLAIN and not has_address(x):
            return not is_transformed()
    return False


def split_batched(function: Callable[..., Any], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """function(*tensors), a tuple, for tensors some of which are such stacks: once for each entry. Their level is 1:
    autograd does not nest them."""
    plain = [unbatched(x, 1, 1, 0) if x is not None and is_batched(x) else x for x in tensors]
    size = next(p.shape[0] for p, x in zip(plain, tensors, strict=True) if p is not None and p is not x)
    each = [
        function(*(x if p is x or p is None else p[i] for p, x in zip(plain, tensors, strict=True)))
        for i in range(size)
    ]
    return tuple(None if parts[0] is None else batched(torch.stack(parts), 0, 1) for parts in zip(*each, strict=True))


def is_dtensor(*tensors: Tensor) -> bool:
    """Whether one is sharded. Compares the name of the type: importing DTensor takes long."""
    return any(type(x).__name__ == "DTensor" for x in tensors)
