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
N_TERMS = len(Terms._fields)
FIRST = 4  # of the arguments of `Attention` that are tensors
Call = tuple[Tensor | None, Tensor | None, Spec, Terms]  # cu_q, cu_k and so on: what is asked of q, k and v


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
    """What calls that look alike to the kernels share: who computes them and, on a GPU, what they launch."""

    __slots__ = ("backend", "launches")

    def __init__(self) -> None:
        self.backend: Any = None
        self.launches: dict[Any, Any] | None = {}


_memos: dict[Any, Memo] = {}


def _known(
    memo: Memo | None, spec: Spec, terms: Terms, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
) -> Memo:
    """The memo of a call, with a backend. On a GPU it is chosen once for all calls that look alike."""
    if memo is None and q.is_cuda:
        key = (spec, *signature(q, k, v, *others, *terms.tensors()))
        memo = _memos.get(key)
        if memo is None:
            if len(_memos) >= LIMIT:
                _memos.clear()
            memo = _memos[key] = Memo()
    elif memo is None:
        memo = Memo()
        memo.launches = None
    if memo.backend is None:
        memo.backend = _backend(q, k, v, spec, terms)
    return memo


def _forward_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms,
    memo: Memo | None = None,
) -> Any:  # fmt: skip
    """(out, lse) of the backend."""
    memo = _known(memo, spec, terms, q, k, v, cu_q, cu_k)
    return memo.backend.forward(q, k, v, cu_q, cu_k, spec, terms, memo.launches)


def _backward_of(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms,
) -> Any:  # fmt: skip
    """(dq, dk, dv) of the backend."""
    memo = _known(None, spec, terms, q, k, v, cu_q, cu_k, dout, dlse, out, lse)
    return memo.backend.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec, terms, memo.launches)


def _pack(cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms) -> tuple[Any, ...]:
    """The arguments of `_call`."""
    bias, sinks, seed, score, mask, blocks = terms
    return cu_q, cu_k, bias, sinks, seed, list(score), list(mask), list(blocks), *spec.args()


def _unpack(args: tuple[Any, ...]) -> Call:
    """The reverse of `_pack`."""
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
    grads: tuple[Tensor, Tensor, Tensor] = _backward_of(dout, dlse, q, k, v, out, lse, *_unpack(call))
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

    Arguments: the spec, a memo, how many tensors the score mod and the mask mod have; then what has derivatives: q, k,
    v, bias, sinks and the score mod's tensors; and what has none: cu_q, cu_k, seed, the mask mod's and a block mask's.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        (q, k, v), call = _call_of(args)
        return _outputs(q, k, v, *call, args[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.rest = inputs[:FIRST]
        ctx.save_for_backward(*inputs[FIRST:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        args = *ctx.rest, *tensors
        last = FIRST + 5 + args[2]
        q, k, v, *terms = args[FIRST:last]
        wanted = ctx.needs_input_grad[FIRST:last]
        if not _is_higher_order(dout, dlse, q, k, v, *terms):
            grads = _gradients(dout, dlse, out, lse, wanted, *args)
        elif choose(q, k, v, args[0]).backend == "reference":
            grads = _differentiable_gradients(dout, dlse, (q, k, v, *terms), wanted, args)
        else:
            grads = OneDerivative.apply(dout, dlse, out, lse, wanted, *args)  # type: ignore[no-untyped-call]
        return *(None,) * FIRST, *grads, *(None,) * (len(args) - last)


class OneDerivative(torch.autograd.Function):
    """The kernels' gradients where torch would differentiate them again: refused when it does, not when it might."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _gradients(*args)

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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        Attention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[FIRST:], *output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        qkv, call = _call_of((*ctx.rest, *tensors))
        if any(t is not None for t in tangents[FIRST + 3 :]):
            raise AttentionError("forward mode on these kernels", "a tangent of a term", "tangents of q, k and v only")
        along = [torch.zeros_like(x) if t is None else t for x, t in zip(qkv, tangents[FIRST:], strict=False)]
        return torch.ops.tilewise.jvp(along, *qkv, out, lse, *_pack(*call))


def _args_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms,
    memo: Memo | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `Attention`."""
    bias, sinks, seed, score, mask, blocks = terms
    tensors = q, k, v, bias, sinks, *score, cu_q, cu_k, seed, *mask, *blocks
    return spec, memo, len(score), len(mask), *tensors


def _call_of(args: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Call]:
    """The reverse of `_args_of`, without the memo."""
    spec, _, n_score, n_mask, q, k, v, bias, sinks, *rest = args
    cu_q, cu_k, seed, *others = rest[n_score:]
    score, mask, blocks = tuple(rest[:n_score]), tuple(others[:n_mask]), tuple(others[n_mask:])
    return (q, k, v), (cu_q, cu_k, spec, Terms(bias, sinks, seed, score, mask, blocks))


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms,
    memo: Memo | None,
) -> Any:  # fmt: skip
    """(out, lse); there is a memo only where nobody watches."""
    if memo is None and is_watched(q, k, v):
        return torch.ops.tilewise.forward(q, k, v, *_pack(cu_q, cu_k, spec, terms))
    return _forward_of(q, k, v, cu_q, cu_k, spec, terms, memo)


def _is_higher_order(*tensors: Tensor | None) -> bool:
    if _in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _in_forward_mode() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _gradients(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: tuple[bool, ...], *args: Any
) -> tuple[Tensor | None, ...]:
    """Of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors."""
    qkv, call = _call_of(args)
    if dout is None:
        dout = torch.zeros_like(out)
    saved = (dout, dlse, *qkv, out, lse)
    if is_watched(dout, *qkv, out, lse):
        grads = torch.ops.tilewise.backward(*saved, *_pack(*call))
    else:
        grads = _backward_of(*saved, *call)
    terms = wanted[3:]
    found = iter(torch.ops.tilewise.term_gradients(*saved, *_pack(*call), terms) if any(terms) else ())
    return *grads, *(next(found) if wants else None for wants in terms)


def _differentiable_gradients(
    dout: Tensor | None, dlse: Tensor | None, inputs: tuple[Any, ...], wanted: tuple[bool, ...], args: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients by torch's own rules, so that they have gradients again; on the reference backend only."""
    _, (cu_q, cu_k, spec, terms) = _call_of(args)
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
    return tuple(next(found) if wants else None for wants in wanted)


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
        function: Any = ForwardMode if _in_forward_mode() else Attention
        if memo is not None or not is_watched(q, k, v):
            function = super(torch.autograd.Function, function)  # whose apply does not inspect signatures first
        return function.apply(*_args_of(q, k, v, cu_q, cu_k, spec, terms, memo))
    return _outputs(q, k, v, cu_q, cu_k, spec, terms, memo)
