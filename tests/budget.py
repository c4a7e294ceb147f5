"""How large an error may be: a budget from data, with the float64 oracle as the truth.

    error <= 2 * error of torch's own attention in the same dtype + rounding

`rounding` is what one rounding of each value that a kernel must hold in that dtype (P, dS, and the out from which
delta is made) adds to a result; it matters where torch is exact by luck, as with a single key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.cases import NAMES, Inputs
from tests.oracle import naive_grads, seen


class Yardstick(NamedTuple):
    """One result: its true value, torch's own in the same dtype (float32 for lse), and the rounding term."""

    name: str
    exact: Tensor
    torch: Tensor
    rounding: float

    @property
    def error(self) -> float:
        """Torch's largest."""
        return largest(self.torch, self.exact)

    def ratio(self, ours: Tensor) -> float:
        """Our largest error over torch's, where torch's is not luck."""
        return largest(ours, self.exact) / max(self.error, self.rounding / 2, 1e-30)

    def fault(self, ours: Tensor) -> str | None:
        """What is wrong with a result, if anything is."""
        if ours.shape != self.exact.shape:
            return f"{self.name} has shape {tuple(ours.shape)}, not {tuple(self.exact.shape)}"
        if not torch.equal(ours.isfinite(), self.exact.isfinite()):
            return f"{self.name} is not finite where it should be, or the other way round"
        error = largest(ours, self.exact)
        if error > 2 * self.error + self.rounding:
            return f"{self.name}: error {error:.1e}, torch's {self.error:.1e}, rounding {self.rounding:.1e}"
        return None


def check(ours: Sequence[Tensor], inputs: Inputs, names: Sequence[str] = NAMES) -> None:
    """Each result is finite where the truth is, and within its budget."""
    sticks = zip(yardsticks(inputs), ours, strict=True)
    faults = [fault for stick, x in sticks if stick.name in names and (fault := stick.fault(x)) is not None]
    assert not faults, f"{inputs.case}: {'; '.join(faults)}"


def yardsticks(inputs: Inputs) -> list[Yardstick]:
    case, q, k, v, dout, dlse, cu_q, cu_k = inputs
    exact = naive_grads(q, k, v, case.spec, dout, dlse, cu_q, cu_k)
    naive = torch_grads(inputs, q.dtype)
    lse32 = naive[1] if q.dtype == torch.float32 else torch_grads(inputs, torch.float32)[1]
    terms = roundings(inputs, exact)
    naive = (naive[0], lse32, *naive[2:])
    return [Yardstick(*each) for each in zip(NAMES, exact, naive, terms, strict=True)]


def largest(x: Tensor, exact: Tensor) -> float:
    error = (x.double() - exact).abs()[exact.isfinite()]
    return error.max().item() if error.numel() else 0.0


def sequences(inputs: Inputs) -> list[tuple[slice, slice]]:
    """Where the tokens of each sequence lie; a dense batch is one."""
    if inputs.case.lengths is None:
        return [(slice(None), slice(None))]
    ends_q, ends_k = inputs.cu_q.tolist(), inputs.cu_k.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)]


def heads_first(x: Tensor, group: int = 1) -> Tensor:
    """(B, S, H, D) or (S, H, D) -> (..., H * group, S, D)"""
    return x.repeat_interleave(group, -2).transpose(-2, -3)


def torch_grads(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv as a few lines of torch compute them, every step in `dtype`."""
    case, spec = inputs.case, inputs.case.spec
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[1:4]]
    q, k, v = leaves
    outs, logs = [], []
    for rows, keys in sequences(inputs):
        at, group = (..., rows, slice(None), slice(None)), case.heads // case.kv_heads
        of = (..., keys, slice(None), slice(None))
        s = spec.scale * (heads_first(q[at]) @ heads_first(k[of], group).mT)
        mask = seen(*s.shape[-2:], spec, s.device)
        empty = ~mask.any(-1, keepdim=True)
        s = s.masked_fill(~mask, -torch.inf).masked_fill(empty, 0.0)
        p = torch.softmax(s, -1).masked_fill(empty, 0.0)
        outs.append((p @ heads_first(v[of], group)).transpose(-2, -3))
        lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        logs.append(lse.masked_fill(empty[:, 0], -torch.inf))
    out, lse = torch.cat(outs, -3), torch.cat(logs, -1)
    loss = (out * inputs.dout.to(dtype)).sum()
    if inputs.dlse is not None:
        loss = loss + (lse * inputs.dlse.to(dtype)).masked_fill(lse == -torch.inf, 0.0).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), *grads


def roundings(inputs: Inputs, exact: tuple[Tensor, ...]) -> tuple[float, ...]:
    """The rounding terms, from sums of squares: roundings are independent. A result is rounded once more at its end.

    P, dS (n_q, n_k):   out: P V      dv: P^T dO      dq: scale * dS K      dk: scale * dS^T Q
    delta = rowsum(dO * O) shifts all of a row of dS at once, by delta_error * P; and what is left of a sum whose terms
    cancel has the float32 noise of its terms.
    """
    case, spec = inputs.case, inputs.case.spec
    q, k, v, dout = (x.double() for x in inputs[1:5])
    group = case.heads // case.kv_heads
    eps = torch.finfo(inputs.q.dtype).eps / 2
    ulp = torch.finfo(torch.float32).eps
    noise = 4 * ulp
    worst = [0.0] * 5
    for rows, keys in sequences(inputs):
        at, of = (..., rows, slice(None), slice(None)), (..., keys, slice(None), slice(None))
        qs, dos, os = (heads_first(x[at]) for x in (q, dout, exact[0]))
        ks, vs = (heads_first(x[of], group) for x in (k, v))
        s = spec.scale * (qs @ ks.mT)
        mask = seen(*s.shape[-2:], spec, s.device)
        lse = exact[1][..., rows, None].nan_to_num(neginf=0.0)
        p = torch.exp(s - lse).masked_fill(~mask, 0.0)
        delta = (dos * os).sum(-1, keepdim=True)
        if inputs.dlse is not None:
            delta = delta - inputs.dlse.double()[..., rows, None]
        ds = p * (dos @ vs.mT - delta)
        p_noise = p * (noise + ulp * (s.abs() + lse.abs()))  # p = exp(s - lse), and both are float32
        terms = p_noise * (dos.abs() @ vs.abs().mT + delta.abs())
        delta_error = (dos.square() @ os.square().mT).diagonal(dim1=-2, dim2=-1).sqrt()[..., None]
        coherent = p * delta_error
        scale = abs(spec.scale)
        found = (
            eps * root(p, vs) + p_noise @ vs.abs(),
            noise * (s.abs() * mask + 1.0),
            scale * (eps * (root(ds, ks) + (coherent @ ks).abs()) + terms @ ks.abs()),
            scale * (eps * (root(ds.mT, qs) + root(coherent.mT, qs)) + terms.mT @ qs.abs()),
            eps * root(p.mT, dos) + p_noise.mT @ dos.abs(),
        )
        worst = [max(w, x.max().item() if x.numel() else 0.0) for w, x in zip(worst, found, strict=True)]
    scales = [x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for x in exact]
    last = [eps, noise, eps, eps, eps]
    shared = [1.0, 1.0, 1.0, group**0.5, group**0.5]  # a kv head sums over its group
    return tuple(w * g + e * x for w, g, e, x in zip(worst, shared, last, scales, strict=True))


def root(a: Tensor, b: Tensor) -> Tensor:
    return (a.square() @ b.square()).sqrt()


def signed_bias(ours: Tensor, exact: Tensor, heads_axis: int) -> tuple[float, float]:
    """The mean over (batch, head) pairs of <error, exact> / <exact, exact>, and its standard error.

    A matrix product that truncates, or a sum that forgets, shrinks every result: a slope that no symmetry of the data
    hides, as it would hide a mean.
    """
    error, exact = (x.movedim(heads_axis, 1).flatten(2) for x in (ours.double() - exact, exact))
    slope = ((error * exact).sum(-1) / exact.square().sum(-1)).flatten()
    return slope.mean().item(), (slope.std() / slope.numel() ** 0.5).item()


# What tensor cores lose of float32, in units of its last place, at the size of the tests: 64 dims, tiles of 32 keys.
# They cut off the sum at every step, on average 0.36 units of what it is by then (half a unit, over numbers of every
# size): (steps + 1) / 2 * 0.36 of the result. A product of 64 numbers takes 8 steps of TF32 (or 4 of 16 bits), 1.6
# units; a sum over 32 keys takes 4, 0.9 units. out and dv pass one of each, dq and dk one more of the first; lse moves
# with its scores, a seventh of its size, and with the hardware's exp2. Found on an H200: out -2.0, lse -0.4, dq and dk
# -2.7, dv -1.4. An operand whose halves were cut off instead of rounded would add -2.3 with every product.
CUT_OFF = {"out": 2.5, "lse": 0.5, "dq": 4.1, "dk": 4.1, "dv": 2.5}


def check_unbiased(stick: Yardstick, ours: Tensor) -> None:
    """The slope is within five standard errors of zero, or within a tenth of one rounding."""
    slope, noise = signed_bias(ours, stick.exact, heads_axis=1 if stick.name == "lse" else 2)
    units = CUT_OFF[stick.name] if ours.is_cuda and ours.dtype == torch.float32 else 0.1
    allowed = 5 * noise + units * torch.finfo(ours.dtype).eps
    assert abs(slope) <= allowed, f"{stick.name}: biased by {slope:.1e}, noise {noise:.1e}"
