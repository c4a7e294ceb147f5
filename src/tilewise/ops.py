"""The one boundary between torch and the backends: the registered ops, their fakes, and the autograd rule."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .dispatch import choose
from .spec import LIMIT, NO_TERMS, SPEC_SCHEMA, TERMS_SCHEMA, AttentionError, Spec, Terms, signature

_library = torch.library.Library("tilewise", "DEF")
_call = f"Tensor? cu_q, Tensor? cu_k, {TERMS_SCHEMA}, {SPEC_SCHEMA}"
_saved = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_call}) -> (Tensor, Tensor)")
_library.define(f"backward({_saved}, {_call}) -> (Tensor, Tensor, Tensor)")
_library.define(f"term_gradients({_saved}, {_call}, bool[] wanted) -> Tensor[]")
_library.define(
    f"jvp(Tensor[] tangents, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_call}) -> (Tensor, Tensor)"
)

PLAIN = frozenset((Tensor, torch.nn.Parameter))
N_TERMS, N_SPEC = len(Terms._fields), len(Spec.__dataclass_fields__)


def _backend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, terms: Terms = NO_TERMS) -> Any:
    backend = choose(q, k, v, spec, terms=terms).backend
    if backend == "reference":
        from . import reference

        return reference
    if backend == "hopper":
        from .kernels import hopper

        return hopper
    from . import kernels

    return kernels


class Memo:
    """What calls that look alike to the kernels share: the backend's forward, and what it remembers of launches."""

    __slots__ = ("forward", "launches")

    def __init__(self) -> None:
        self.forward: Any = None
        self.launches: dict[Any, Any] = {}


_memos: dict[Any, Memo] = {}


def _forward_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms,
    memo: Memo | None = None,
) -> Any:  # fmt: skip
    """(out, lse) of the backend. On a GPU it is chosen once for all calls that look alike."""
    if memo is None:
        if not q.is_cuda:
            return _backend(q, k, v, spec, terms).forward(q, k, v, cu_q, cu_k, spec, terms)
        key = (spec, *signature(q, k, v, cu_q, cu_k, *terms.tensors()))
        memo = _memos.get(key)
        if memo is None:
            if len(_memos) >= LIMIT:
                _memos.clear()
            memo = _memos[key] = Memo()
    if memo.forward is None:
        memo.forward = _backend(q, k, v, spec, terms).forward
    return memo.forward(q, k, v, cu_q, cu_k, spec, terms, memo.launches)


def _unpack(args: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None, Spec, Terms]:
    """cu_q, cu_k, spec and terms from the arguments of `_call`."""
    cu_q, cu_k, *rest = args
    fields: list[Any] = [tuple(x) if isinstance(x, list) else x for x in rest[:N_TERMS]]
    terms = Terms(*fields)
    return cu_q, cu_k, Spec.from_args(rest[N_TERMS:]), terms


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _forward_of(q, k, v, *_unpack(call))
    return result


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, cu_k, spec, terms = _unpack(call)
    grads: tuple[Tensor, Tensor, Tensor]
    grads = _backend(q, k, v, spec, terms).backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec, terms)
    return grads


@torch.library.impl(_library, "term_gradients", "CompositeExplicitAutograd")
def _term_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any
) -> list[Tensor]:
    """The gradients of the wanted ones among bias, sinks and the score mod's tensors, in this order."""
    *call_, wanted = call
    cu_q, cu_k, spec, terms = _unpack(tuple(call_))
    grads: list[Tensor]
    backend = _backend(q, k, v, spec, terms)
    grads = backend.term_gradients(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec, terms, wanted)
    return grads


@torch.library.impl(_library, "jvp", "CompositeExplicitAutograd")
def _jvp(
    tangents: list[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any
) -> tuple[Tensor, Tensor]:
    """On the portable kernels; `attend` gives the reference's calls to torch."""
    from . import kernels

    cu_q, cu_k, spec, terms = _unpack(call)
    result: tuple[Tensor, Tensor] = kernels.jvp(tangents, q, k, v, out, lse, cu_q, cu_k, spec, terms)
    return result


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    *batch, n_q, heads, _d = q.shape
    statistic = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*batch, n_q, heads, v.shape[-1])), q.new_empty((*batch, heads, n_q), dtype=statistic)


@torch.library.register_fake("tilewise::backward", lib=_library)
def _backward_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("tilewise::term_gradients", lib=_library)
def _term_gradients_fake(*args: Any) -> list[Tensor]:
    *_, wanted = args
    bias, sinks, _seed, score = args[9:13]
    return [x.new_empty(x.shape) for x, wants in zip((bias, sinks, *score), wanted, strict=True) if wants]


@torch.library.register_fake("tilewise::jvp", lib=_library)
def _jvp_fake(tangents: list[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any) -> Any:
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


class Attention(torch.autograd.Function):
    """out and lse are both differentiable; the backward recomputes the weights from lse.

    Arguments: q, k, v, bias, sinks, cu_q, cu_k, seed, the number of tensors of the score mod and of the mask mod, these
    tensors, a block mask's, and the spec's scalars.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        q, k, v, call = _call_of(args)
        return (torch.ops.tilewise.forward if is_watched(q, k, v) else _forward)(q, k, v, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.places = [n for n, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = [inputs[n] for n in ctx.places]
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        args, out, lse = _saved_of(ctx)
        q, k, v, call = _call_of(args)
        n_score = args[8]
        inputs = (q, k, v, args[3], args[4], *args[10 : 10 + n_score])
        wanted = [ctx.needs_input_grad[n] for n in (0, 1, 2, 3, 4, *range(10, 10 + n_score))]
        if not _is_higher_order(dout, dlse, *inputs):
            grads = _gradients(dout, dlse, out, lse, wanted[3:], *args)
        elif choose(q, k, v, _unpack(call)[2]).backend == "reference":
            grads = _differentiable_gradients(inputs, wanted, dout, dlse, call)
        else:
            grads = OneDerivative.apply(dout, dlse, out, lse, wanted[3:], *args)  # type: ignore[no-untyped-call]
        return (*grads[:5], *(None for _ in range(5)), *grads[5:], *(None for _ in args[10 + n_score :]))


class OneDerivative(torch.autograd.Function):
    """The kernels' gradients where torch would differentiate them again: refused when it does, not when it might."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(_gradients(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _need_reference("a gradient of the gradient")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _need_reference("a derivative of the gradient")


class ForwardMode(Attention):
    """Attention with a jvp. It is a class of its own because torch.compile takes no Function that has one."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        args, out, lse = _saved_of(ctx)
        q, k, v, call = _call_of(args)
        if any(t is not None for t in tangents[3:]):
            raise AttentionError("forward mode on these kernels", "a tangent of a term", "tangents of q, k and v only")
        along = [torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tangents, strict=False)]
        return torch.ops.tilewise.jvp(along, q, k, v, out, lse, *call)


def _apply(function: type[Attention], *args: Any) -> Any:
    """function.apply. Before a Function with a setup_context, torch inspects the signature of its forward at each call,
    which takes as long as all else; where nobody watches, what comes after that is called at once."""
    if is_watched(*args[:3]):
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _call_of(args: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """q, k, v and the arguments of `_call`, from those of `Attention`."""
    q, k, v, bias, sinks, cu_q, cu_k, seed, n_score, n_mask, *rest = args
    tensors, scalars = rest[: len(rest) - N_SPEC], rest[len(rest) - N_SPEC :]
    score, mask, blocks = tensors[:n_score], tensors[n_score : n_score + n_mask], tensors[n_score + n_mask :]
    return q, k, v, (cu_q, cu_k, bias, sinks, seed, score, mask, blocks, *scalars)


def _saved_of(ctx: Any) -> tuple[list[Any], Tensor, Tensor]:
    *tensors, out, lse = ctx.saved_tensors
    args = list(ctx.rest)
    for n, x in zip(ctx.places, tensors, strict=True):
        args[n] = x
    return args, out, lse


def _is_higher_order(*tensors: Tensor | None) -> bool:
    if _in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _in_forward_mode() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _gradients(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted_terms: list[bool], *args: Any
) -> list[Tensor | None]:
    """Of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors."""
    q, k, v, call = _call_of(args)
    if dout is None:
        dout = torch.zeros_like(out)
    saved = (dout, dlse, q, k, v, out, lse)
    op = torch.ops.tilewise.backward if is_watched(dout, q, k, v, out, lse) else _backward
    grads: list[Tensor | None] = list(op(*saved, *call))
    terms = iter(torch.ops.tilewise.term_gradients(*saved, *call, wanted_terms) if any(wanted_terms) else ())
    return grads + [next(terms) if wants else None for wants in wanted_terms]


def _differentiable_gradients(
    inputs: tuple[Any, ...], wanted: list[bool], dout: Tensor | None, dlse: Tensor | None, call: tuple[Any, ...]
) -> list[Tensor | None]:
    """The gradients by torch's own rules, so that they have gradients again; on the reference backend only."""
    q, k, v, bias, sinks, *score = inputs
    cu_q, cu_k, spec, terms = _unpack(call)
    from . import reference

    with torch.enable_grad():
        asked = [x.view_as(x) for x, wants in zip(inputs, wanted, strict=True) if wants]
        given = iter(asked)
        q, k, v, bias, sinks, *score = (next(given) if w else x for x, w in zip(inputs, wanted, strict=True))
        results = reference.differentiable(
            q, k, v, cu_q, cu_k, spec, terms._replace(bias=bias, sinks=sinks, score=tuple(score))
        )
        pairs = [(x, g) for x, g in zip(results, (dout, dlse), strict=True) if g is not None and x.requires_grad]
        if not pairs:
            found = iter([torch.zeros_like(x) for x in asked])
        else:
            outputs, cotangents = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, asked, cotangents, create_graph=True, materialize_grads=True))
    return [next(found) if wants else None for wants in wanted]


def _need_reference(what: str) -> NoReturn:
    raise AttentionError(
        what, "the kernels' one derivative", "backend='reference', which has derivatives of every order"
    )


def is_watched(*tensors: Tensor) -> bool:
    """Whether something traces, transforms or intercepts torch's calls, and must see the registered op.

    Where nobody watches, the body is called at once: the dispatcher would cost as much as a launch.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or not PLAIN.issuperset(map(type, tensors))
        or tensors[0].is_meta
    )


def _need_grad(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    leaves = () if terms is NO_TERMS else (terms.bias, terms.sinks, *terms.score)
    return any(x is not None and x.requires_grad for x in leaves)


def is_remembered(*tensors: Tensor) -> bool:
    """Whether calls with such tensors are worth a memo: the kernels take less time than the checks."""
    return tensors[0].is_cuda and not is_watched(*tensors)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
    memo: Memo | None = None,
) -> Any:  # fmt: skip
    """(out, lse), through autograd only where a derivative will be asked for."""
    if _in_forward_mode() and choose(q, k, v, spec).backend == "reference":
        from . import reference

        return reference.differentiable(q, k, v, cu_q, cu_k, spec, terms)
    if _in_forward_mode() or (torch.is_grad_enabled() and _need_grad(q, k, v, terms)):
        if torch.compiler.is_compiling():  # which lets no tensor be two arguments of a Function, as in self-attention
            k, v, cu_k = k.view_as(k), v.view_as(v), None if cu_k is None else cu_k.view_as(cu_k)
        return _apply(
            ForwardMode if _in_forward_mode() else Attention,
            q, k, v, terms.bias, terms.sinks, cu_q, cu_k, terms.seed, len(terms.score), len(terms.mask),
            *terms.score, *terms.mask, *terms.blocks, *spec.args(),
        )  # fmt: skip
    if memo is not None or not is_watched(q, k, v):
        return _forward_of(q, k, v, cu_q, cu_k, spec, terms, memo)
    return torch.ops.tilewise.forward(
        q, k, v, cu_q, cu_k, terms.bias, terms.sinks, terms.seed, list(terms.score), list(terms.mask),
        list(terms.blocks), *spec.args(),
    )  # fmt: skip
