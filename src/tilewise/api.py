"""The public functions of dense and packed attention. They take the same options (`options.Options`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from . import settings
from .autograd import attend, run_plan
from .backends.registry import choose
from .call.fields import ATTENTION, REQUIRED, misplaced
from .call.options import Layout, Options, OtherOptions, OutLse, OutLseMaxLogit, OutMaxLogit, Result
from .errors import AttentionError
from .plan_cache import CallPlan, can_use_plan, needs_registered_op, plan_of, plans, positions, signature
from .validation import dense as validation
from .validation import nested
from .validation.offsets import as_int32_offsets, check_max_seqlens


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> OutLse: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutMaxLogit: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutLseMaxLogit: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = ...,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[OtherOptions],
) -> Result: ...


@ATTENTION.shown
def attention(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    *others: Any,
    layout: Layout | None = None,
    **options: Unpack[Options],
) -> Result:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile in O(S) memory.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])

    A score is computed in this order: scale * q.k; softcap; score_mod; ALiBi; bias; masks. Sinks join the denominator
    only. A query that sees no key gets out = 0, lse = -inf and gradients of 0.

    Nested tensors of jagged layout, (B, j, H, D), are packed sequences: out is nested as q is, and nothing is copied.

    Args:
        q: queries (B, Sq, H, D) in float16, bfloat16 or float32 (float64 with the "reference" backend). Any strides;
            D and Dv from 1 to 512.
        k: keys (B, Sk, Hk, D). H is a multiple of Hk: query head h reads KV head h // (H / Hk).
        v: values (B, Sk, Hk, Dv).
        layout: "bshd" as above, or "bhsd": q, k, v and out are (B, heads, tokens, dim), as in torch's
            scaled_dot_product_attention. Nothing is copied. Default: "bshd", with a warning if there are more heads
            than tokens, in q and in k.
        causal: if True, query i sees no key after its position i + Sk - Sq (bottom-right alignment).
        window: (left, right): query i sees the keys from position - left to position + right. None is unbounded.
        scale: factor of q.k. Default 1 / sqrt(D). Zero and negative values are allowed.
        softcap: if given, a score s becomes softcap * tanh(s / softcap).
        bias: added to the scores; broadcasts to (B, H, Sq, Sk). Differentiable.
        alibi_slopes: (H,) or (B, H). Subtracts slope * abs(i + Sk - Sq - j) from the score of query i and key j.
            Differentiable.
        sinks: (H,) scores that are added to the softmax denominator and have no value. Differentiable.
        score_mod: a function f(score, b, h, q_idx, kv_idx) that returns the new score of a pair. A plain function, or
            one decorated with `tilewise.score_mod` and called with its tensors; torch.compile needs a decorated one.
            Its float tensors are differentiable.
        mask_mod: a function f(b, h, q_idx, kv_idx) that returns True if the query sees the key. It applies in addition
            to causal and window. A plain function, or one decorated with `tilewise.mask_mod`, as score_mod. Or a
            `tilewise.block_mask` of one, which also skips tiles without a visible pair.
        dropout_p: probability that a softmax weight is dropped, 0 <= dropout_p < 1. It is rounded to a multiple of
            1/65536, at most 65535/65536. The other weights are divided by 1 minus the rounded probability.
        seed: seed of dropout, an int or an int64 tensor of one element. Default: drawn from torch's generator. The same
            seed drops the same weights: `tilewise.dropout_mask` returns which.
        return_lse: if True, lse is returned too.
        return_max_logit: if True, the largest score of each head is returned too, last, as QK-clip needs it.
        deterministic: if True, the gradients have the same bits in every run. Default: as
            torch.use_deterministic_algorithms says. Only the backward of the "hopper" backend is faster without it.
        precision: "fp8": q, k and v are quantised to float8_e4m3fn, with a float32 scale for each block, and multiplied
            by fp8 tensor cores (the how-to on fp8 says how, and how large the error is). Forward only: it raises if a
            gradient is needed. Default None: products in q's dtype.
        backend: "reference" (torch, any device), "torch" (torch's fused kernels, CPUs), "triton" (GPUs), "hopper"
            (sm_90), or "auto".

    Returns:
        out (B, Sq, H, Dv) in q's dtype. With return_lse=True (out, lse): lse (B, H, Sq) is the natural logsumexp of the
        scores in float32 (float64 for float64). Both are differentiable. With return_max_logit=True the last result is
        (B, H) in float32: the largest score of each head over all visible pairs, after scale, softcap, mods, ALiBi and
        bias. Sinks and NaNs do not count; it is -inf if no pair is visible, and has no gradient.

    Raises:
        AttentionError: an argument is not as above, or the named backend cannot run this call. Nothing was launched.
    """
    if others:
        raise misplaced("attention", others)
    # is_autocast_enabled() is the setting of GPUs; that of the CPU costs time to read, which matters on GPUs alone
    may_cast = torch.is_autocast_enabled() or not getattr(q, "is_cuda", False)
    if layout is not None or (may_cast and validation.is_cast(q, k, v)):
        q, k, v = validation.to_bshd(q, k, v, layout)
    tensors = [q, k, v]
    key = signature("attention", tensors, options) if can_use_plan() and not settings.checks_contents() else None
    plan = None if key is None else plans.get(key)
    if plan is None:
        results = _first_call(key, tensors, options, (), (), layout is not None)
    else:
        results = run_plan(plan, tensors)
    out: Tensor = results[0].transpose(1, 2) if layout == "bhsd" else results[0]
    return out if plan is not None and plan.returns_out else returned(out, results[1:], options)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> OutLse: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutMaxLogit: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutLseMaxLogit: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[OtherOptions],
) -> Result: ...


@ATTENTION.shown
def attention_varlen(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    cu_seqlens_q: Tensor = REQUIRED,
    cu_seqlens_k: Tensor = REQUIRED,
    *others: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[Options],
) -> Result:
    """`attention` over sequences packed one after the other, without padding and without a host sync.

    >>> import torch
    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # lengths 3, 0 and 7
    >>> out, lse = attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([10, 4, 32]), torch.Size([4, 10]))

    All positions, in mods, biases and dropout, count from 0 within a sequence; b is the number of the sequence. Rows of
    a buffer past its last sequence get out = 0, lse = -inf and gradients of 0.

    Args:
        q: queries of all sequences, (T, H, D).
        k: keys of all sequences, (Tk, Hk, D).
        v: values of all sequences, (Tk, Hk, Dv).
        cu_seqlens_q: int32 or int64 (B + 1,): sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: int32 or int64 (B + 1,): the same for keys.
        max_seqlen_q: the largest number of queries in a sequence. Needed with a bias, as the length of its query axis.
            It also bounds the work on the gradient of a table that a score_mod reads at both q_idx and kv_idx.
            Otherwise it has no effect. A longer sequence is an error on a CPU; on a GPU its tokens past the maximum
            have a bias of 0, and `check` raises.
        max_seqlen_k: the same for keys.
        options: as in `attention`. A bias is (B, H, max_seqlen_q, max_seqlen_k), or broadcasts to it.

    Returns:
        out (T, H, Dv) in q's dtype. With return_lse=True (out, lse), lse (H, T). With return_max_logit=True the last
        result is (H,): the largest score of each head over all sequences.

    Raises:
        AttentionError: an argument is not as above, or the named backend cannot run this call. Nothing was launched.
    """
    if others:
        raise misplaced("attention_varlen", others)
    cu = as_int32_offsets(cu_seqlens_q), as_int32_offsets(cu_seqlens_k)
    q, k, v = validation.to_bshd(q, k, v)
    out, *statistics = _packed(q, k, v, options, cu, (max_seqlen_q, max_seqlen_k))
    return returned(out, statistics, options)


def returned(out: Tensor, statistics: Sequence[Tensor], options: Options) -> Result:
    """What a call returns. `statistics`: lse, and with return_max_logit=True the largest score of each head."""
    if options.get("return_lse"):
        return (out, statistics[0], statistics[1]) if len(statistics) > 1 else (out, statistics[0])
    return (out, statistics[1]) if options.get("return_max_logit") else out


@ATTENTION.shown
def check(
    q: Tensor = REQUIRED,
    k: Tensor = REQUIRED,
    v: Tensor = REQUIRED,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: Layout | None = None,
    **options: Unpack[Options],
) -> None:
    """Checks a call of `attention`, or with cu_seqlens of `attention_varlen`, including the contents of its tensors.

    >>> import torch
    >>> q = torch.randn(10, 4, 32)
    >>> cu_q, cu_k = torch.tensor([0, 12]), torch.tensor([0, 10])
    >>> check(q, q, q, cu_q, cu_k)
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: end of cu_seqlens_q: found 12;
    expected at most the 10 tokens there are

    On a GPU a call checks shapes alone, because reading contents waits for the device. There, offsets past the end are
    clamped, a bias adds nothing past its end, and a block mask is assumed to have been made for these sequences. This
    function reads the contents. With TILEWISE_CHECK=1 in the environment, every call begins with it. (Indices of a mod
    past the end of its tensor are clamped everywhere and are no error.)

    Args:
        q: as in `attention`, or with cu_seqlens as in `attention_varlen`.
        k: as q.
        v: as q.
        cu_seqlens_q: as in `attention_varlen`; None for `attention`.
        cu_seqlens_k: as cu_seqlens_q.
        max_seqlen_q: as in `attention_varlen`.
        max_seqlen_k: as in `attention_varlen`.
        layout: as in `attention`. It must be given if there are more heads than tokens, in q and in k.
        options: as in `attention`.

    Raises:
        AttentionError: the call is wrong; the message says what, and what is accepted.
    """
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if not is_packed and isinstance(q, Tensor) and q.is_nested:
        (q, k, v), (cu_seqlens_q, cu_seqlens_k) = nested.unpacked(*validation.to_bshd(q, k, v, layout))
        is_packed, layout = True, None
    cu = tuple(map(as_int32_offsets, (cu_seqlens_q, cu_seqlens_k))) if is_packed else ()
    if layout is None and not cu and (found := validation.swapped(q, k)) is not None:
        raise AttentionError("layout", found, validation.LAYOUTS)
    q, k, v = validation.to_bshd(q, k, v, layout)
    request = validation.checked_request(q, k, v, cu, (max_seqlen_q, max_seqlen_k), options, read=True)
    choose(request)


def _packed(q: Tensor, k: Tensor, v: Tensor, options: Options, cu: tuple[Any, Any], max_seqlens: Any) -> Any:
    """The results of `attention_varlen`, as those of `run_plan`."""
    tensors = [q, k, v, *cu]
    key = None
    if can_use_plan() and not settings.checks_contents():
        key = signature("attention", tensors, options, *_sizes(max_seqlens, options))
    plan = None if key is None else plans.get(key)
    if plan is None:
        return _first_call(key, tensors, options, cu, max_seqlens, True)
    check_max_seqlens(*max_seqlens)
    return run_plan(plan, tensors)


def _first_call(
    key: Any, tensors: list[Tensor], options: Options, cu: Any, max_seqlens: Any, is_layout_named: bool
) -> Any:
    """The results of a call that has no plan: checked, and run by a plan that is kept for the signature `key`."""
    q, k, v = tensors[:3]
    if not cu and isinstance(q, Tensor) and q.is_nested:
        values, offsets = nested.unpacked(q, k, v)
        return nested.packed(*_packed(*values, options, offsets, (None, None)), q=q)
    request = validation.checked_request(q, k, v, cu, max_seqlens, options)
    if not is_layout_named and validation.warn_if_swapped(q, k) and not q.is_cuda:
        key = None  # on a CPU each such call warns
    with_lse = options.get("return_lse", False)
    if needs_registered_op(*request[:3]):
        return attend(request.spec, None, request.tensors(), with_lse)
    order = None if key is None else positions(request.tensors(), tensors)
    if order is None:  # there is no signature, or validation made a tensor for this call, such as a seed
        plan = plan_of("request", lambda: request, request.tensors(), repr(request.spec))
    else:
        plan = CallPlan(request, order, returns_out=not with_lse and not request.spec.max_logit)
        plans.keep(key, plan)
    return attend(request.spec, plan, request.tensors(), with_lse)


def _sizes(max_seqlens: tuple[int | None, ...], options: Options) -> tuple[int | None, ...]:
    """max_seqlen_q and max_seqlen_k, where they belong to the signature: beside an option whose tensors may have these
    sizes. Otherwise they have no effect, and may change with every batch."""
    return max_seqlens if any(options.get(name) is not None for name in validation.OPTIONS_WITH_MAX_SEQLEN) else ()
