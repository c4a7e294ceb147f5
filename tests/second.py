"""Second derivatives: of the library, of torch in the same dtype, and of torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.budget import largest
from tests.cases import Case, Inputs, make
from tests.oracle import _dense as dense
from tilewise import mods

NAMES = ("dout", "dlse", "q", "k", "v")
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# Options whose score has derivative 1, so that the kernels differentiate them twice: of n tokens and 2 heads.
TERMS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "sinks": lambda n, device: {"sinks": torch.randn(2, device=device), "causal": True},
    "alibi": lambda n, device: {"alibi_slopes": torch.rand(2, device=device), "causal": True},
    "mask mod": lambda n, device: {"mask_mod": documents(n, device)},
    "block mask": lambda n, device: {"mask_mod": mods.block_mask(documents(n, device), n, n, device=device)},
    "dropout": lambda n, device: {"dropout_p": 0.3, "seed": 5},
}


def documents(n: int, device: str) -> Any:
    return mods.document(ids=torch.arange(n, device=device) // 12)


def second(attend: Attend, inputs: Inputs, along: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The gradients of <dq, along[0]> + <dk, along[1]> + <dv, along[2]> with respect to dout, dlse, q, k and v."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[1:5]]
    out, lse = attend(*leaves[:3])
    assert inputs.dlse is not None
    dlse = inputs.dlse.to(lse.dtype).requires_grad_()
    first = torch.autograd.grad((out, lse), leaves[:3], (leaves[3], dlse), create_graph=True)
    cotangents = [x.to(dtype) for x in along]
    return list(torch.autograd.grad(first, (leaves[3], dlse, *leaves[:3]), cotangents))


def ours(inputs: Inputs, along: Sequence[Tensor], backend: str, **options: Any) -> list[Tensor]:
    case = inputs.case
    options = {"window": (case.before, case.after), "scale": case.scale, "backend": backend} | options

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.cu_q is None:
            out, lse = tilewise.attention(*x, return_lse=True, **options)
        else:
            out, lse = tilewise.attention_varlen(*x, inputs.cu_q, inputs.cu_k, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return second(attend, inputs, along, inputs.q.dtype)


def of_term(term: str, case: Case, backend: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """The second derivatives of a case with a term of `TERMS`, and those of the reference in float64."""
    options = TERMS[term](case.n_q, device) | {"window": None, "scale": 0.3}
    inputs, along = (make(replace(case, seed=case.seed + n), device) for n in (0, 1))
    wide = inputs._replace(**{name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout", "dlse")})
    return ours(inputs, along[1:4], backend, **options), ours(wide, along[1:4], "reference", **options)


def torchs(inputs: Inputs, along: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """By torch, every step in `dtype`."""
    spec = inputs.case.spec

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.cu_q is None or inputs.cu_k is None:
            out, lse = dense(q, k, v, spec)
        else:
            bounds = [x.tolist() for x in (inputs.cu_q, inputs.cu_k)]
            parts = [
                dense(q[None, a:b], k[None, c:d], v[None, c:d], spec)
                for a, b, c, d in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False)
            ]
            out, lse = torch.cat([x[0] for x, _ in parts]), torch.cat([y[0] for _, y in parts], -1)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return second(attend, inputs, along, dtype)


def check(case: Case, backend: str, device: str) -> None:
    """Each second derivative is finite, and within twice the error of torch's own and two roundings of it."""
    inputs, along = (make(replace(case, seed=case.seed + n), device) for n in (0, 1))
    found = ours(inputs, along[1:4], backend)
    theirs = torchs(inputs, along[1:4], inputs.q.dtype)
    exact = torchs(inputs, along[1:4], torch.float64)
    for name, x, y, truth in zip(NAMES, found, theirs, exact, strict=True):
        assert x.shape == truth.shape, name
        assert x.isfinite().all(), name
        size = float(truth.abs().max()) if truth.numel() else 0.0
        rounding = torch.finfo(x.dtype).eps * max(size, 1.0)
        assert largest(x, truth) <= 2 * largest(y, truth) + 2 * rounding, (
            f"{case}: {name}: error {largest(x, truth):.1e}, torch's {largest(y, truth):.1e}, rounding {rounding:.1e}"
        )
