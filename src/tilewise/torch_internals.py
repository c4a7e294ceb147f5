"""Every name of torch that is not public and that we use, in one place, each with the public way beside it.

Tested with torch 2.10 to 2.15. What a version lacks is found out when this is imported, not when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

_C: Any = torch._C
_functorch: Any = getattr(_C, "_functorch", None)
_compiled: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)  # what compiled programs call
F = TypeVar("F", bound=Callable[..., Any])
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _found(name: str) -> Any:
    """The function torch._C.<name>, or None."""
    return getattr(_C, name, None)


# Whether autocast is on for some device: one call instead of one for each kind.
any_autocast: Callable[[], bool] = _found("_is_any_autocast_enabled") or (lambda: True)

# How many modes (fake tensors, FLOP counters, selective checkpoints) look at every op.
_modes: Callable[[], int] = _found("_len_torch_dispatch_stack") or (lambda: 1)

# The transform of torch.func that is at work, or None.
_transform: Callable[[], Any] = getattr(_functorch, "maybe_current_level", None) or (lambda: 0)

_is_wrapped: Callable[[Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", None) or (lambda x: False)


_forward_ad: Any = torch.autograd.forward_ad
if not hasattr(_forward_ad, "_current_level"):
    _forward_ad = SimpleNamespace(_current_level=0)  # every call is taken for one of forward mode: slower, and right


def is_transformed() -> bool:
    """Whether torch.func (grad, vmap, jvp, ...) is at work."""
    return _transform() is not None


def is_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken."""
    return bool(_forward_ad._current_level >= 0)


def is_intercepted() -> bool:
    """Whether a mode looks at every op of this thread."""
    return _modes() > 0


def is_eager() -> bool:
    """Whether no tracer, dispatch mode, function transform or forward-mode derivative is active in this thread."""
    return (
        not torch.compiler.is_compiling() and _modes() == 0 and _transform() is None and _forward_ad._current_level < 0
    )


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


_autograd: Any = getattr(_C, "_autograd", None)
profiler_enabled: Callable[[], bool] = getattr(_autograd, "_profiler_enabled", None) or (lambda: False)


def is_profiled() -> bool:
    """Whether a profiler of torch's is at work, which should see a name for what is computed."""
    return not torch.compiler.is_compiling() and profiler_enabled()


def has_address(x: Tensor) -> bool:
    """Not so of a tensor that torch.compile only pretends to have, or that torch.func wraps."""
    return type(x) in PLAIN and not _is_wrapped(x)


_is_batched: Callable[[Tensor], bool] = getattr(_functorch, "is_legacy_batchedtensor", None) or (lambda x: False)


def is_batched(*tensors: Tensor | None) -> bool:
    """Whether one is a stack of gradients for which autograd runs one backward: `is_grads_batched`, gradcheck's and
    torch.autograd.functional's vectorised derivatives. (Not torch.vmap, which transforms ops.)"""
    return any(x is not None and _is_batched(x) for x in tensors)


_is_vmapped: Callable[[Tensor], bool] = getattr(_functorch, "is_batchedtensor", None) or (lambda x: False)


def is_vmapped(x: Tensor) -> bool:
    """Whether torch.vmap stands for many tensors by this one."""
    return not torch.compiler.is_compiling() and _is_vmapped(x)


def split_batched(function: Callable[..., Any], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """function(*tensors), a tuple, for tensors some of which are such stacks: once for each entry."""
    level = _C._vmapmode_increment_nesting() - 1
    _C._vmapmode_decrement_nesting()
    plain = [torch._remove_batch_dim(x, level, 1, 0) if x is not None and is_batched(x) else x for x in tensors]
    size = next(p.shape[0] for p, x in zip(plain, tensors, strict=True) if p is not None and p is not x)
    each = [
        function(*(x if p is x or p is None else p[i] for p, x in zip(plain, tensors, strict=True)))
        for i in range(size)
    ]
    return tuple(
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*each, strict=True)
    )


def constant(function: F) -> F:
    """Let torch.compile call the function while it traces. torch.compiler.assume_constant_result does no more than
    this, and imports all of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register_sharding(op: Any, rule: Callable[..., Any]) -> None:
    """torch.distributed.tensor.experimental.register_sharding; but that remembers what it found by the shapes and those
    arguments alone that come after the first int, and the rule looks at strings before it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import experimental as public
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    public.register_sharding(op)(rule)
    propagator = DTensor._op_dispatcher.sharding_propagator
    first = next(n for n, x in enumerate(op._schema.arguments) if x.name == "others") + 1
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, needs_pytree=True)
    if torch.__version__ < (2, 13):  # type: ignore[operator]
        propagator.op_strategy_funcs[op] = _of_lists(propagator.op_strategy_funcs[op])


def _of_lists(strategy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An op's strategy, told of all DTensors: torch 2.10 and 2.11 overlook those in a list that begins with None."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    def seen(x: Any) -> Any:
        if isinstance(x, list):
            return [seen(each) for each in x]
        return OpStrategy([OpSpec(x)]) if isinstance(x, DTensorSpec) else x

    def of_lists(schema: Any) -> Any:
        args = tuple(map(seen, schema.args_schema))
        return strategy(OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info))

    return of_lists


def is_dtensor(*tensors: Tensor) -> bool:
    """Whether one is sharded: by its name, so that nobody who has none imports what knows them."""
    return any(type(x).__name__ == "DTensor" for x in tensors)


def flattened(mesh: Any) -> Any:
    """The process group of all ranks of a DeviceMesh; of one with two axes, row by row."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _public_empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Memory on the current CUDA device, as compiled programs allocate it: in half the time of torch.empty.
empty_strided_cuda: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = (
    getattr(_compiled, "_empty_strided_cuda", None) or _public_empty
)

# The handle of the current CUDA stream; the public function builds a Stream object around it.
current_stream: Callable[[int], int] = _found("_cuda_getCurrentRawStream") or _public_stream
