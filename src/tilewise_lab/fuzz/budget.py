"""The error budget: at most twice the error of torch's own arithmetic in the call's dtype, and some roundings."""

from __future__ import annotations

import torch
from torch import Tensor

Results = dict[str, Tensor]


def excess(ours: Results, exact: Results, peer: Results, dtype: torch.dtype, unit: float | None = None) -> str | None:
    """What is wrong with the first result that is wrong, or None.

    exact, peer: the same results in float64, and by torch in `dtype`; lse is float32 at least. unit: the rounding error
    of the largest result. Default: that of 16 numbers of `dtype`.
    """
    largest = max([1.0, *(float(finite(y).abs().max()) for y in exact.values() if y.numel())])
    small = 16 * torch.finfo(dtype).eps * largest if unit is None else unit * largest  # large terms may cancel
    for name, x in ours.items():
        expected = torch.promote_types(dtype, torch.float32) if name.endswith("lse") else dtype
        if x.shape != exact[name].shape or x.dtype != expected:
            return f"{name}: {x.dtype} {tuple(x.shape)}, not {expected} {tuple(exact[name].shape)}"
        if not torch.equal(x.isfinite(), exact[name].isfinite()):
            return f"{name}: not finite where it should be, or the other way round"
        error, torchs = (float((finite(y) - finite(exact[name])).abs().max()) if y.numel() else 0.0
                         for y in (x, peer[name]))  # fmt: skip
        if not error <= 2 * torchs + small:
            return f"{name}: error {error:.1e}, torch's {torchs:.1e}"
    return None


def finite(x: Tensor) -> Tensor:
    return x.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention (.., H, T, Dv) and lse (.., H, T); 0 and -inf for rows that see nothing."""
    s = (scale * (q @ k.mT)).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return s.softmax(-1).masked_fill(empty, 0.0) @ v, lse
