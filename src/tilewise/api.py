"""The public functions. They take the same options (`options.Options`) and make one request of a call."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from .autograd import attend, run_plan
from .backends.registry import choose
from .options import Options, takes_options
from .plan_cache import CallPlan, plan_of, plans, positions, signature
from .torch_internals import any_autocast, is_eager, is_traced
from .validation import dense as validation
from .validation import nested


@takes_options
def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **options: Unpack[Options]) -> Any:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile in O(S) memory.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), with H a multiple of Hk; any strides; D and Dv from 1 to 512.
    Returns out (B, Sq, H, Dv) in q's dtype, and with `return_lse` also the logsumexp of the scores, (B, H, Sq) in
    float32; gradients flow through both.

    causal, window: query i sits at key position i + Sk - Sq; `window=(left, right)` lets it see so many keys to either
        side, None meaning all; `causal` is right = 0. A query that sees no key gets out = 0 and lse = -inf.
    scale: 1/sqrt(D) unless given.
    softcap, score_mod, alibi_slopes, bias: what a score becomes, in this order: cap * tanh(s / cap); the mod (see
        `tilewise.score_mod`); minus slope * distance, slopes (H,) or (B, H); plus a bias that broadcasts to
        (B, H, Sq, Sk). The tensors get gradients where they require them, summed in a fixed order.
    mask_mod: which pairs see each other, besides the band: a `tilewise.mask_mod`, or a `tilewise.block_mask` made of
        one (`block_mask_varlen` for packed sequences), which skips the tiles nobody sees.
    sinks: (H,) scores that join the denominator and have no value; learnable.
    dropout_p, seed: each weight is dropped with this probability, by a hash of the seed (an int or one int64; drawn
        from torch's generator if None), batch row, head and both positions: see `tilewise.dropout_mask`.
    deterministic: the same bits in every run; by default as torch.use_deterministic_algorithms says. Only the backward
        of the "hopper" backend is faster without (docs/hopper-backward.md says by how much).
    backend: "reference" (torch, any device), "triton" (GPU), "hopper", or "auto".
    layout: "bshd" as above, or "bhsd": q, k, v and out are (B, heads, tokens, dim), as torch's own attention has them;
        nothing is copied.

    Nested tensors of jagged layout, (B, j, H, D), are packed sequences: out is nested as q is, and nothing is copied.
    """
    if not isinstance(layout, str) or layout != "bshd" or any_autocast():
        q, k, v = validation.arranged(q, k, v, layout)
    out, lse = _run(q, k, v, options)
    if layout != "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if options.get("return_lse") else out


@takes_options
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """`attention` over sequences packed one after the other, without padding and without a host sync.

    >>> import torch
    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # lengths 3, 0 and 7
    >>> out, lse = attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([10, 4, 32]), torch.Size([4, 10]))

    q (T, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv); cu_seqlens are int32 of length B + 1, from 0 to T. The maximal lengths
    are needed with a bias, whose axes they are, and bound the work on the gradient of a table that a score mod reads at
    both i and j, which without them is that of one sequence of T and Tk tokens; otherwise they are accepted for the
    sake of other libraries' callers. No sequence may be longer: on a CPU that is an error, on a GPU such tokens have a
    bias of 0, and `check` raises.
    Every position, in mods, biases and dropout, counts within its sequence, and b is the sequence's number. Where a
    buffer is longer than its sequences, the rest are empty rows: out 0, lse -inf, gradients 0.
    """
    cu = tuple(x.contiguous() if isinstance(x, Tensor) and not x.is_sparse else x for x in (cu_seqlens_q, cu_seqlens_k))
    q, k, v = validation.arranged(q, k, v)
    out, lse = _run(q, k, v, options, cu, (max_seqlen_q, max_seqlen_k))
    return (out, lse) if options.get("return_lse") else out


@takes_options
def check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, layout: str = "bshd", **options: Unpack[Options],
) -> None:  # fmt: skip
    """Everything that can be wrong with a call of `attention` (with cu_seqlens: `attention_varlen`), contents included.

    >>> import torch
    >>> q = torch.randn(10, 4, 32)
    >>> check(q, q, q, torch.tensor([0, 12], dtype=torch.int32), torch.tensor([0, 10], dtype=torch.int32))
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: end of cu_seqlens_q: found 12; expected at most the 10 tokens there are

    A call by itself looks at shapes alone, since to read numbers is to wait for the GPU: offsets that run past the end
    are clamped there, a bias adds nothing past its end, and a block mask is taken for one of these sequences. This
    reads them, and raises. With TILEWISE_CHECK=1 in the environment, every call begins with it.
    (Indices of a mod that run past its tensor are clamped everywhere, and are no error.)
    """
    cu = () if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    q, k, v = validation.arranged(q, k, v, layout)
    request = validation.request_of(q, k, v, cu, (max_seqlen_q, max_seqlen_k), options, read=True)
    choose(request)


def _run(q: Tensor, k: Tensor, v: Tensor, options: Options, cu: tuple[Any, ...] = (), longest: Any = ()) -> Any:
    """(out, lse), by the plan of an earlier call with the same signature or by a new one. lse may be None if
    `return_lse` is False."""
    tensors = [q, k, v, *cu]
    key = None
    if is_eager() and not validation.ALWAYS:
        key = signature("attention", tensors, options, *(_sizes(longest, options) if longest else ()))
    plan: CallPlan | None = None if key is None else plans.get(key)
    with_lse = options.get("return_lse", False) is not False  # validation raises for anything but True and False
    if plan is not None:
        if longest:
            validation.check_longest(*longest)
        return run_plan(plan, plan.tensors(tensors), with_lse)
    if not cu and isinstance(q, Tensor) and q.is_nested:
        values, offsets = nested.unpacked(q, k, v)
        out, lse = _run(*values, options, offsets, (None, None))
        return nested.packed(out, lse, q)
    request = validation.request_of(q, k, v, cu, longest, options)
    if is_traced(*request[:3]):
        return attend(request.spec, None, request.tensors(), with_lse)
    if key is None or positions(request.tensors(), tensors) is None:  # a tensor was made for this call, such as a seed
        plan = plan_of("request", lambda: request, request.tensors(), repr(request.spec))
    else:
        plan = CallPlan(request, tensors)
        plans.keep(key, plan)
    return attend(request.spec, plan, request.tensors(), with_lse)


def _sizes(longest: Any, options: Options) -> Any:
    """max_seqlen_q and max_seqlen_k, where they belong to the signature: beside an option whose tensors may have these
    sizes. Otherwise they have no effect, and may change with every batch."""
    return longest if any(options.get(name) is not None for name in validation.SIZED) else ()
