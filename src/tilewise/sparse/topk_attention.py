"""Attention of each query over the keys that it names, as in DeepSeek's sparse attention (DSA).

The portable kernels gather the named keys tile by tile; the reference gathers them in torch, some queries at a time.
The gradients of keys are sums over the queries that name them: by atomics, or with deterministic=True by a sorted
scatter in torch. docs/how-to/sparse.md has an indexer that chooses the keys, and its training loss.

"auto" takes the kernels where they ran right on a GPU: on sm_90 in float16 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..autograd import for_each_batched_gradient
from ..call.options import BackendName
from ..errors import AttentionError, shown
from ..plan_cache import is_transformed
from ..request import Gpu, gpu_of
from ..validation.dense import DTYPES, to_bshd
from .checks import check_indices, looped

MAX_DIM, MAX_VALUE_DIM = 576, 512  # those of multi-head latent attention (MLA)
GATHERED = 1 << 22  # elements of k and v that the reference gathers at a time
_library = torch.library.Library("tilewise_sparse", "DEF")
_inputs = "Tensor q, Tensor k, Tensor v, Tensor indices, float scale, str backend"
_library.define(f"topk({_inputs}) -> (Tensor, Tensor)")
_library.define(
    f"topk_backward(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool deterministic, bool summed, {_inputs})"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("checked_indices(Tensor indices, SymInt keys) -> Tensor")


@overload
def topk(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    *,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: BackendName = ...,
) -> Tensor: ...


@overload
def topk(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    *,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def topk(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    *,
    scale: float | None = ...,
    return_lse: bool,
    deterministic: bool | None = ...,
    backend: BackendName = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def topk(
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    indices: Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over exactly the keys that it names.

    >>> q = torch.randn(1, 5, 4, 16)
    >>> k, v = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 16)
    >>> indices = torch.tensor([[0, -1], [0, 1], [2, 0], [3, 1], [8, 4]])
    >>> topk(q, k, v, indices.view(1, 5, 1, 2)).shape
    torch.Size([1, 5, 4, 16])

    Args:
        q: queries (B, Sq, H, D). D is at most 576 and Dv at most 512, as in multi-head latent attention.
        k: keys (B, Sk, Hk, D). H is a multiple of Hk.
        v: values (B, Sk, Hk, Dv). Or an int Dv: the values are the first Dv columns of k, as in multi-head latent
            attention; the gradients of keys and values are then added into one.
        indices: (B, Sq, Hk, K) int32 or int64: the keys of each query, shared by the query heads of a KV head; -1 for
            none. A query names no key twice. On a GPU that is not checked (TILEWISE_CHECK=1 does), and an index past
            the end names none.
        scale: factor of q.k. Default 1 / sqrt(D).
        return_lse: if True, lse (B, H, Sq) is returned too.
        deterministic: if True, the gradients have the same bits in every run, by a slower sum. Default: as
            torch.use_deterministic_algorithms says.
        backend: "reference" (torch, any device), "triton" (kernels), or "auto": the kernels on sm_90 in float16 and
            bfloat16, else the reference.

    Returns:
        out (B, Sq, H, Dv) in q's dtype, or (out, lse). Both are differentiable with respect to q, k and v. A query
        without keys gets out = 0, lse = -inf and gradients of 0.

    Raises:
        AttentionError: an argument is not as above.
    """
    if isinstance(v, Tensor):
        q, k, v = to_bshd(q, k, v)
    else:
        q, k, _ = to_bshd(q, k, k)
    values = v if isinstance(v, Tensor) else _first_columns(k, v)
    _check(q, k, values, indices)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not isfinite(scale):
        raise AttentionError("scale of topk", shown(scale), "a finite number, or None for 1/sqrt(D)")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    given = v if isinstance(v, Tensor) else None
    settings = values.shape[3], float(scale), deterministic, _backend(q, backend)
    if is_transformed():
        if backend == "triton":
            found = "a torch.func transform or forward mode"
            raise AttentionError("backend='triton' of topk", found, "backend='reference', or 'auto'")
        indices = torch.ops.tilewise_sparse.checked_indices(indices, k.shape[1])
        out, lse = _attended(q, k, values, indices, settings[1])
    else:
        out, lse = Topk.apply(q, k, given, indices.contiguous(), settings)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class Topk(torch.autograd.Function):
    """(out, lse), both differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, settings: Any
    ) -> tuple[Tensor, Tensor]:
        columns, scale, _, backend = settings
        values = k[..., :columns] if v is None else v
        out, lse = torch.ops.tilewise_sparse.topk(q, k, values, indices, scale, backend)
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, indices, out, lse = ctx.saved_tensors
        columns, scale, deterministic, backend = ctx.settings
        values = k[..., :columns] if v is None else v
        is_again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        backward: Any = _backward if is_again else torch.ops.tilewise_sparse.topk_backward
        backend = "reference" if is_again else backend  # torch differentiates its operations

        def gradients(dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
            dout = torch.zeros_like(out) if dout is None else dout
            grads = backward(out, lse, dout, dlse, deterministic, v is None, q, k, values, indices, scale, backend)
            return tuple(grads)

        dq, dk, dv = for_each_batched_gradient(gradients, dout, dlse)
        return dq, dk, None if v is None else dv, None, None


@torch.library.impl(_library, "checked_indices", "CompositeExplicitAutograd")
def _checked_indices(indices: Tensor, keys: int) -> Tensor:
    """A copy: an op with a rule of vmap, so that the check reads plain tensors."""
    check_indices("indices", "topk", indices, keys - 1)
    return indices.clone(memory_format=torch.contiguous_format)


@torch.library.register_fake("tilewise_sparse::checked_indices", lib=_library)
def _checked_indices_fake(indices: Tensor, keys: int) -> Tensor:
    return indices.new_empty(indices.shape)


torch.library.register_vmap(
    "tilewise_sparse::checked_indices", looped(torch.ops.tilewise_sparse.checked_indices), lib=_library
)


@torch.library.impl(_library, "topk", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    check_indices("indices", "topk", indices, k.shape[1] - 1)
    if backend == "triton":
        from ..backends.common import topk as kernels

        gpu = gpu_of(q.device)
        assert gpu is not None
        with torch.cuda.device_of(q):
            if gpu == Gpu("cuda", 90):
                from ..backends.hopper import topk as hopper

                if hopper.supports(q, k, v, scale):
                    return hopper.forward(q, k, indices, scale)
            return kernels.forward(kernels.Inputs(q, k, v, indices, scale), gpu)
    out, lse = _attended(q, k, v, indices, scale)
    return out.contiguous(), lse.contiguous()


def _attended(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of the reference, which torch.func and forward mode differentiate and batch too."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n = 0 if k.shape[1] else q.shape[1]  # without keys there are no parts
    outs = [q.new_zeros((q.shape[0], n, q.shape[2], v.shape[3]))]
    sums = [q.new_full((q.shape[0], q.shape[2], n), -torch.inf, dtype=dtype)]
    for _, part in _parts(q, k, v, indices, scale):
        p, log_sum = _softmax(part.scores)
        outs.append(torch.einsum("bchgk,bchkd->bchgd", p, part.v).flatten(2, 3).to(q.dtype))
        sums.append(log_sum.flatten(2, 3).transpose(1, 2))
    return torch.cat(outs, 1), torch.cat(sums, 2)


@torch.library.impl(_library, "topk_backward", "CompositeExplicitAutograd")
def _backward(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    deterministic: bool,
    summed: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton" and not deterministic:
        from ..backends.common import topk as kernels

        gpu = gpu_of(q.device)
        assert gpu is not None
        saved = out, lse.contiguous(), dout.contiguous(), None if dlse is None else dlse.contiguous()
        with torch.cuda.device_of(q):
            return kernels.backward(kernels.Inputs(q, k, v, indices, scale), saved, gpu, summed)
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    group = k.shape[2]
    for rows, part in _parts(q, k, v, indices, scale):
        do, o = (x[:, rows].to(dtype).unflatten(2, (group, -1)) for x in (dout, out))
        stats = [
            x[:, :, rows].transpose(1, 2).unflatten(2, (group, -1)).unsqueeze(-1) for x in (lse, dlse) if x is not None
        ]
        own_lse, *own_dlse = (x.to(dtype) for x in stats)
        p = torch.exp(part.scores - own_lse.masked_fill(own_lse == -torch.inf, torch.inf))
        dp = torch.einsum("bchgd,bchkd->bchgk", do, part.v)
        delta = (do * o).sum(-1, keepdim=True) - (own_dlse[0] if own_dlse else 0.0)
        ds = scale * (p * (dp - delta)).masked_fill(~part.seen, 0.0)
        dq[:, rows] = torch.einsum("bchgk,bchkd->bchgd", ds, part.k).flatten(2, 3).to(q.dtype)
        # a sum over equal indices in a fixed order, on a GPU too: index_put_ sorts them
        for total, weights, x in ((dk, ds, part.q), (dv, p, do)):
            summand = torch.einsum("bchgk,bchgd->bchkd", weights, x)
            total.index_put_(part.at, summand.masked_fill(part.hide, 0.0), accumulate=True)  # 0 * nan is nan
    if summed:
        dk[..., : v.shape[3]] += dv
    return dq, dk.to(k.dtype), v.new_empty((*v.shape[:3], 0)) if summed else dv.to(v.dtype)


@torch.library.register_fake("tilewise_sparse::topk", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)


@torch.library.register_fake("tilewise_sparse::topk_backward", lib=_library)
def _backward_fake(
    out: Tensor, lse: Tensor, dout: Any, dlse: Any, deterministic: bool, summed: bool, *inputs: Any
) -> Any:
    q, k, v = (x.new_empty(x.shape) for x in inputs[:3])
    return q, k, v.new_empty((*v.shape[:3], 0)) if summed else v


class Part:
    """Some queries, with the keys that they name: q (b, c, Hk, G, D), k and v (b, c, Hk, K, D), in the dtype of sums;
    scores (b, c, Hk, G, K), -inf where there is no key; `seen`, and the places `at` of the keys in k."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch, _, kv_heads, _ = indices.shape
        seen = (indices >= 0) & (indices < k.shape[1])
        b = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
        h = torch.arange(kv_heads, device=q.device).view(1, 1, -1, 1)
        self.at = b, torch.where(seen, indices, 0).long(), h
        self.hide = ~seen.unsqueeze(-1)
        self.q = q.to(dtype).unflatten(2, (kv_heads, -1))
        self.k, self.v = (x[self.at].to(dtype).masked_fill(self.hide, 0.0) for x in (k, v))
        self.seen = seen.unsqueeze(3)
        scores = scale * torch.einsum("bchgd,bchkd->bchgk", self.q, self.k)
        self.scores = scores.masked_fill(~self.seen, -torch.inf)


def _parts(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> Iterator[tuple[slice, Part]]:
    """All queries, as many at a time as GATHERED allows."""
    each = q.shape[0] * indices.shape[2] * indices.shape[3] * (k.shape[3] + v.shape[3])
    step = max(1, GATHERED // max(1, each))
    for first in range(0, q.shape[1] if k.shape[1] else 0, step):
        rows = slice(first, min(first + step, q.shape[1]))
        yield rows, Part(q[:, rows], k, v, indices[:, rows], scale)


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """(p, lse) over the last axis; a row without keys gets 0 and -inf."""
    empty = (s == -torch.inf).all(-1)
    # the tangent of torch's logsumexp is nan where every score is -inf
    lse = torch.logsumexp(s.masked_fill(empty[..., None], 0.0), -1).masked_fill(empty, -torch.inf)
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]), lse


def _backend(q: Tensor, name: str) -> str:
    if name == "auto":
        halves = q.dtype in (torch.float16, torch.bfloat16)
        return "triton" if halves and gpu_of(q.device) == Gpu("cuda", 90) else "reference"
    if name not in ("reference", "triton"):
        raise AttentionError("backend of topk", shown(name), "'auto', 'reference' or 'triton'")
    if name == "triton" and (gpu_of(q.device) is None or q.dtype == torch.float64):
        raise AttentionError("backend='triton' of topk", f"{q.dtype} on {q.device}", "a GPU, and no float64")
    return name


def _first_columns(k: Tensor, columns: Any) -> Tensor:
    """Columns of k that are the values."""
    most = k.shape[-1] if isinstance(k, Tensor) and k.dim() else 0
    if isinstance(columns, bool) or not isinstance(columns, int) or not 1 <= columns <= most:
        raise AttentionError("v of topk", shown(columns), f"a tensor, or the number of k's columns: 1 to {most}")
    return k[..., :columns]


def _check(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("indices", indices)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name} of topk", shape, "a tensor with 4 axes")
        if x.device != q.device:
            raise AttentionError(f"device of {name} of topk", x.device, f"q's {q.device}")
    if q.dtype not in DTYPES:
        raise AttentionError("dtype of q of topk", q.dtype, " or ".join(map(str, DTYPES)))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise AttentionError(f"dtype of {name} of topk", x.dtype, f"q's {q.dtype}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        found = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise AttentionError("shapes of k and v of topk", found, f"(B, Sk, Hk, D) of q's {tuple(q.shape)}, and Dv")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise AttentionError("heads of q of topk", q.shape[2], f"a multiple of k's {k.shape[2]}")
    if not (1 <= q.shape[3] <= MAX_DIM and 1 <= v.shape[3] <= MAX_VALUE_DIM):
        raise AttentionError("head dims of topk", (q.shape[3], v.shape[3]), f"1 to {MAX_DIM}, and to {MAX_VALUE_DIM}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise AttentionError("dtype of indices of topk", indices.dtype, "torch.int32 or torch.int64")
    if indices.shape[:3] != (*q.shape[:2], k.shape[2]) or indices.shape[3] == 0:
        expected = f"(B, Sq, Hk, K), {(*q.shape[:2], k.shape[2])} and K at least 1"
        raise AttentionError("shape of indices of topk", tuple(indices.shape), expected)
