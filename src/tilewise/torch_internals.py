"""The private names of torch that tilewise uses: all of them, each with the public API that would replace it.

Tested with torch 2.10 to 2.15. If a later torch lacks a name, a fallback takes its place: attention stays right and may
be slower, but FLOP counters and profilers may miss it, torch.vmap over a KV cache is not rejected, batched
gradients (`is_grads_batched`) raise, and layers that are checkpointed on a GPU do not find the plan in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


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
num_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)

# The active dispatch modes: a FLOP counter that is already active has a copy of the formulas. Public: a
# torch.utils.flop_counter whose counters look formulas up in the registry when they count.
dispatch_modes: Callable[[], list[Any]] = private("utils._python_dispatch._get_current_dispatch_mode_stack", list)

# Level of the innermost torch.func transform, or None. Public: none; a torch.func.is_transforming() would do.
transform_level: Callable[[], Any] = private("_C._functorch.maybe_current_level", lambda: 0)

# Level of the innermost forward-mode derivative, below 0 if none is active. Public: forward_ad.unpack_dual, which needs
# each tensor.
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)

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

# Fused attention on a CPU, which returns lse, and its backward. Public: scaled_dot_product_attention, which keeps lse.
cpu_flash: Any = private("_scaled_dot_product_flash_attention_for_cpu", None)
cpu_flash_backward: Any = private("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", None)


# Objects by name that autograd's threads have from the thread that called backward. Public: none; contextvars would do,
# if autograd copied the context, and torch.compile traced ContextVar.get. With torch 2.11 processes that had stashed an
# object ended with a segmentation fault: before 2.13 these threads have what any thread set last.
_latest: dict[str, Any] = {}
_has_stash = torch.__version__ >= "2.13"
_stash: Callable[[str, Any], None] = (
    private("_C._stash_obj_in_tls", _latest.__setitem__) if _has_stash else _latest.__setitem__
)
_stashed: Callable[[str], Any] = private("_C._get_obj_in_tls", _latest.get) if _has_stash else _latest.get


def inherit(name: str, value: Any) -> None:
    """Sets an object of this thread, and of autograd's threads during a backward that this thread calls."""
    _stash(name, value)


def inherited(name: str) -> Any:
    """What this thread, or the one that called backward, has set; or None."""
    try:
        return _stashed(name)
    except RuntimeError:  # nothing: asking takes 60 us once, and then 1
        return _stash(name, None)


def constant(function: F) -> F:
    """Let torch.compile call the function while it traces. Public: torch.compiler.assume_constant_result, which sets
    the same attribute and imports the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for eager calls (`can_use_plan`). Function.apply first asks whether a torch.func transform is
    active, which takes a tenth of a small forward, and then calls the method of its own base class."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def version_of(x: Tensor) -> int:
    """How often a tensor was written in place; 0 for one of inference mode, which does not count. Public: none;
    torch.autograd checks the same counter."""
    return 0 if x.is_inference() else x._version


def is_vmapped(x: Tensor) -> bool:
    """Whether a tensor is the argument of torch.vmap."""
    return not torch.compiler.is_compiling() and _is_vmapped(x)
