"""The one cache of calls: a signature finds a plan.

A signature is a plain tuple of everything that the result of a call depends on, except the contents of its tensors: the
options and the layout of every tensor. A plan holds what follows from it: the checked options, the backend, and the
prepared launches. A call with a known signature allocates its results, fills in addresses and launches; any other call
is checked, given to a backend and compiled first.

Calls are kept for CUDA tensors and on a CPU. There calls check the contents of tensors such as cu_seqlens too, because
that waits for no device: those of a KV cache check them beside the plan, and dense and packed calls are kept only if
they have no other tensors than q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from . import settings
from .backends.protocol import Runner
from .backends.registry import backward_backend, choose
from .bounded import Bounded
from .errors import AttentionError
from .kv_formats import shares_memory
from .request import TENSOR_TYPES, BackwardInputs, Request, has_address, num_differentiable
from .torch_internals import forward_mode_level, num_dispatch_modes, transform_level

MAX_PLANS = 4096  # new sequence lengths make new plans; the oldest eighth is dropped then
MAX_LAYOUTS = 64  # of the gradients and saved tensors of one plan
CONSTANTS = frozenset((bool, int, str, type(None), torch.dtype, torch.device))
T = TypeVar("T")
strides_of, dtype_of, device_index_of = Tensor.stride, attrgetter("dtype"), Tensor.get_device


class PlanCache(Bounded[tuple[Any, ...], T], Generic[T]):
    """Shared by threads. If two threads make the same plan, the last is kept."""

    def __init__(self, limit: int = MAX_PLANS) -> None:
        super().__init__(limit)

    def keep(self, signature: tuple[Any, ...] | None, plan: T) -> None:
        if signature is not None:
            self[signature] = plan


plans: PlanCache[Any] = PlanCache()


def is_transformed() -> bool:
    """Whether torch.func or forward mode differentiates or batches calls of this thread, outside of torch.compile."""
    return (transform_level() is not None or forward_mode_level() >= 0) and not is_compiling()


def can_use_plan() -> bool:
    """Whether no tracer, dispatch mode, function transform or forward-mode derivative is active in this thread. (A
    tracer other than Dynamo is a dispatch mode.)"""
    return not (is_dynamo_compiling() or num_dispatch_modes() or is_transformed())


def needs_registered_op(*tensors: Tensor) -> bool:
    """Whether a tracer, dispatch mode or function transform is active, which must see the registered op. If not, the
    implementation is called directly: the dispatcher costs as much as a launch."""
    return (
        is_compiling()
        or num_dispatch_modes() > 0
        or transform_level() is not None
        or not TENSOR_TYPES.issuperset(map(type, tensors))
        or tensors[0].is_meta
    )


def signature(name: str, tensors: list[Tensor], options: Mapping[str, Any], *others: Any) -> tuple[Any, ...] | None:
    """The signature of an eager call (`can_use_plan`) of the function `name`, or None if it is not kept: calls of
    `attention` on a CPU that have other tensors than q, k and v, calls in Triton's interpreter or on other devices, and
    those with values of other types.

    Args:
        name: tells the calls of different functions apart.
        tensors: the tensor arguments. The tensors among the options are appended to it.
        options: the other arguments. Names that are absent have their defaults.
        others: whatever else the result depends on.
    """
    if not TENSOR_TYPES.issuperset(map(type, tensors)):
        return None
    on_cpu = not tensors[0].is_cuda
    if on_cpu and (settings.may_interpret() or not tensors[0].is_cpu):
        return None
    parts: list[Any] = [name, torch.are_deterministic_algorithms_enabled(), settings.of_kernels(), *others]
    for key, value in options.items():
        kind = type(value)
        if kind in CONSTANTS:
            parts += key, kind, value
            continue
        parts.append(key)
        if not _add(value, parts, tensors):
            return None
    if on_cpu and name == "attention" and len(tensors) > 3:
        return None
    try:
        add_layouts(parts, tensors)
    except RuntimeError:  # a sparse or nested tensor has no strides or address: validation raises
        return None
    return tuple(parts)


def _add(value: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
    """Append a value to `parts` and its tensors to `tensors`. Returns False if its type cannot be part of a signature.
    True and 1 are different values here, and so are 0.0 and -0.0."""
    kind = type(value)
    if kind in CONSTANTS:
        parts += kind, value
    elif kind is float:
        parts.append(value.hex())
    elif kind in TENSOR_TYPES:
        parts.append(Tensor)
        tensors.append(value)
    elif isinstance(value, tuple):
        parts += kind, len(value)
        return all(_add(item, parts, tensors) for item in value)
    else:
        return False
    return True


def add_layouts(parts: list[Any], tensors: Sequence[Tensor]) -> None:
    """Append everything that kernels depend on in tensors except their contents.

    `get_device` is the number of a GPU, and -1 for a CPU. Of an address only the lowest four bits are used, because
    Triton specialises kernels on 16-byte alignment. Address 0 is a tensor without memory. If there are more than three
    tensors, those passed twice are recorded, because `positions` compares identities. Three tensors are q, k and v,
    each at its own position.
    """
    for x in tensors:
        address = x.data_ptr()
        alignment = address & 15 if address else None
        parts += x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.is_neg(), alignment
    if len(tensors) > 3 and len({*map(id, tensors)}) < len(tensors):
        names = [*map(id, tensors)]
        parts += map(names.index, names)
    if tensors[0].dtype is torch.float32 and tensors[0].is_cuda:
        parts.append(torch.backends.cuda.matmul.fp32_precision)


def positions(wanted: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[int | None, ...] | None:
    """The position of each wanted tensor among the call's; None if one was made for this call and is not among them."""
    places = {id(x): n for n, x in reversed([*enumerate(tensors)])}
    found: list[int | None] = []
    for n, x in enumerate(wanted):
        if x is None or (n < len(tensors) and tensors[n] is x):
            found.append(None if x is None else n)
        elif id(x) in places:
            found.append(places[id(x)])
        else:
            return None
    return tuple(found)


class CallPlan:
    """How calls with one signature run. It holds no tensor of the caller's.

    Attributes:
        spec: the checked options.
        backend: what computes the forward.
        forward: a runner from `Request.tensors()` to (out, lse), and the largest score of each head if spec.max_logit.
        order: where these tensors stand among the arguments of the call; None if some are made anew for every call.
        requires_grad: whether a tensor of the call does.
        returns_out: whether the caller wants out alone.
    """

    __slots__ = ("_backward", "backend", "forward", "order", "requires_grad", "returns_out", "spec", "uses_tf32")

    def __init__(
        self, request: Request, order: tuple[int | None, ...] | None = None, returns_out: bool = False
    ) -> None:
        tensors = request.tensors()
        self.spec = request.spec
        self.backend, _ = choose(request)
        self.order, self.returns_out = order, returns_out
        self.requires_grad = any(x is not None and x.requires_grad for x in tensors[: num_differentiable(request.spec)])
        self.forward: Runner = self.backend.forward_runner(request, self.requires_grad or not returns_out)
        self.uses_tf32 = request.q.dtype == torch.float32 and request.q.is_cuda  # if torch's settings allow it
        self._backward: Bounded[tuple[Any, ...], Runner] = Bounded(MAX_LAYOUTS)

    def tensors(self, arguments: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """`Request.tensors()` of a call with these arguments."""
        assert self.order is not None
        return [None if n is None else arguments[n] for n in self.order]

    def gradients(
        self, wanted: Sequence[bool], tensors: Sequence[Tensor | None], bwd_inputs: BackwardInputs
    ) -> Sequence[Tensor | None]:
        """The gradients of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors: None for
        the others. `wanted` has a value for each of `tensors`, in this order, or for the first of them only; those of
        q, k and v are not used."""
        bwd_inputs = prepare_backward_inputs(bwd_inputs)
        grads: Sequence[Tensor] = self.backward((*tensors, *bwd_inputs))
        if len(wanted) == 3:
            return grads
        terms = tuple(wanted[3 : num_differentiable(self.spec)])
        nothing = (None,) * (len(wanted) - 3 - len(terms))
        if not any(terms):
            return *grads, *(None,) * len(terms), *nothing
        return *grads, *at_wanted(terms, self.term_gradients(terms, tensors, bwd_inputs)), *nothing

    def term_gradients(
        self, wanted: tuple[bool, ...], tensors: Sequence[Tensor | None], bwd_inputs: BackwardInputs
    ) -> Sequence[Tensor]:
        """The gradients of the wanted ones among bias, sinks and the score mod's tensors."""
        wanted = (*wanted, *(False,) * (2 + self.spec.score_tensors - len(wanted)))
        found: Sequence[Tensor] = self.backward((*tensors, *bwd_inputs), wanted)
        return found

    def hvp(
        self, tensors: Sequence[Tensor | None], bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The tangents of out, lse, dq, dk and dv for tangents of q, k and v."""
        found: Sequence[Tensor] = self.backward((*tensors, *bwd_inputs, *tangents), tangents=len(tangents))
        return found

    def prepared_gradients(self, saved: Sequence[Tensor], dout: Any) -> Any:
        """(dq, dk, dv) of a call without score terms and without a gradient of lse, by the runner that is kept for
        these layouts. `saved`: q, k, v, out and lse.

        None if there is no such runner, or if the values of dout are not those at its address: it is None, a tensor of
        a subclass, a zero tensor, a stack of gradients that autograd batches, or a view with the negative bit.
        """
        if not has_address(dout) or not dout.data_ptr() or dout.is_neg():
            return None
        given = *saved, dout
        runner = self._backward.get(self._backward_key(None, (*map(strides_of, given), None), given))
        return None if runner is None else runner((*given, None))

    def _backward_key(
        self, wanted: tuple[bool, ...] | None, strides: Sequence[Any], given: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """What a runner of `backward` depends on. The layout of dout is not known before, and a hook may have replaced
        a saved tensor. (A KernelCall checks the alignment.) `strides`: of all tensors, None for one that is absent;
        `given`: the others."""
        key = (wanted, *strides, *map(dtype_of, given), *map(device_index_of, given))
        return (*key, torch.backends.cuda.matmul.fp32_precision) if self.uses_tf32 else key

    def backward(
        self, every: Sequence[Tensor | None], wanted: tuple[bool, ...] | None = None, tangents: int = 0
    ) -> Any:
        """(dq, dk, dv); or `term_gradients`, or `hvp`.

        Args:
            every: `Request.tensors()`, `BackwardInputs` and tangents.
            wanted: which of the score terms' gradients; None for those of q, k and v.
            tangents: how many of the tensors are tangents.
        """
        strides = [None if x is None else x.stride() for x in every]
        key = self._backward_key(wanted, strides, [x for x in every if x is not None])
        runner = self._backward.get(key)
        if runner is None:
            runner = self._backward[key] = self._backward_runner([*every], wanted, tangents)
        return runner(every)

    def _backward_runner(self, every: list[Any], wanted: tuple[bool, ...] | None, tangents: int) -> Runner:
        start = len(every) - tangents
        bwd_inputs = BackwardInputs(*every[start - 4 : start])
        request = Request.of(self.spec, every[: start - 4])
        check_saved(request, bwd_inputs)
        backend = backward_backend(request, self.backend)
        if tangents:
            return backend.hvp_runner(request, bwd_inputs, every[start:])
        if wanted is None:
            return backend.backward_runner(request, bwd_inputs)
        return backend.term_gradients_runner(request, bwd_inputs, wanted)


def check_saved(request: Request, bwd_inputs: BackwardInputs) -> None:
    """Raises if a saved-tensor hook returned a tensor of another dtype or device than the one that was saved."""
    device, dtype = bwd_inputs.dout.device, bwd_inputs.dout.dtype
    inputs = request.q.dtype if request.spec.partial else dtype  # results of a partial call are float32
    saved = zip(("q", "k", "v", "out"), (*request[:3], bwd_inputs.out), (inputs, inputs, inputs, dtype), strict=True)
    for name, x, expected in saved:
        if x.device != device or x.dtype != expected:
            found = f"a saved-tensor hook returned {x.dtype} on {x.device}"
            raise AttentionError(f"saved {name}", found, f"what was saved: {expected} on {device}")


def prepare_backward_inputs(bwd_inputs: BackwardInputs) -> BackwardInputs:
    """lse and dlse contiguous; dout with rows that the copy engine (TMA) can read, or else contiguous."""
    out, lse, dout, dlse = bwd_inputs
    dout = aligned(dout)
    if dlse is not None:
        dlse = (dlse if dlse.data_ptr() or not dlse.numel() else dlse + 0).resolve_neg().contiguous()
    return BackwardInputs(out, lse.contiguous(), dout, dlse)


def aligned(x: Tensor) -> Tensor:
    """The same values in memory, with rows that the copy engine can read, or else contiguous."""
    address = x.data_ptr()
    if address == 0 and x.numel():  # a zero tensor has no memory
        x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    elif x.is_neg():
        x = x.resolve_neg()
    if not x.is_contiguous() or address & 15:
        *outer, inner = x.stride()
        step = 16 // x.element_size()
        if inner != 1 or address & 15 or any(stride % step or stride == 0 for stride in outer):
            x = x.clone(memory_format=torch.contiguous_format)
    return x


def at_wanted(wanted: Sequence[bool], found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """A tuple with the found gradients where one is wanted, and None elsewhere."""
    rest = iter(found)
    return tuple(next(rest) if wants else None for wants in wanted)


def plan_of(name: str, make: Callable[[], Request], tensors: Sequence[Tensor | None], *others: Any) -> CallPlan:
    """The plan of a registered op, whose scalar arguments are `others`, or of a call that has no signature. `make`
    returns the checked request."""
    first = tensors[0]
    key = None
    if first is not None and first.is_cuda:
        given = [x for x in tensors if x is not None]
        absent = tuple([x is None for x in tensors])
        parts: list[Any] = [name, torch.are_deterministic_algorithms_enabled(), settings.of_kernels(), *others, absent]
        add_layouts(parts, given)
        key = tuple(parts)
    plan: CallPlan | None = plans.get(key) if key is not None else None
    if plan is None:
        plan = CallPlan(make())
        plans.keep(key, plan)
    return plan


def runner_of(name: str, call: tuple[Any, ...], make: Callable[[], Runner]) -> Runner:
    """The runner of a call with a KV cache that has no signature of its own arguments, such as a registered op: by the
    layouts of the tensors in `call`, which is nested tuples."""
    parts: list[Any] = [name, torch.are_deterministic_algorithms_enabled(), settings.of_kernels()]
    tensors: list[Tensor] = []
    key = None
    if _add(call, parts, tensors) and tensors[0].is_cuda:
        parts.append(name == "attend" and shares_memory(*tensors[1:3]))
        add_layouts(parts, tensors)
        key = tuple(parts)
    runner: Runner | None = None if key is None else plans.get(key)
    if runner is None:
        runner = make()
        plans.keep(key, runner)
    return runner
