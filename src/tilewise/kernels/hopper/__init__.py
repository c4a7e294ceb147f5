"""The kernels for Hopper (sm_90), in Gluon: TMA, mbarriers, asynchronous wgmma, warps with different jobs.

Gradients of calls with score terms, and forward-mode derivatives, come from the portable kernels, which read the same
out and lse.
"""

from typing import Any

from torch import Tensor

from ...spec import NO_TERMS, Spec, Terms
from ..launch import backward as portable_backward
from ..launch import jvp
from ..terms import term_gradients
from .backward_launch import backward as plain_backward
from .launch import forward

__all__ = ["backward", "forward", "jvp", "term_gradients"]


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
) -> Any:  # fmt: skip
    of = plain_backward if terms.is_empty(spec) else portable_backward
    return of(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec, terms)
