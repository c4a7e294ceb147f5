"""Whether a call did right: its lines are run, and what they leave is held against the oracle."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import AttentionError
from tilewise_lab.fuzz import grown, kv_oracle, mla, mla_oracle, oracle, sparse
from tilewise_lab.fuzz.case import FORWARD, SECOND, AnyCase, Case, code
from tilewise_lab.fuzz.kv import KvCase

Fault = tuple[str, str]
DRAWS, DEVIATIONS = 4, 8.0

# Correct calls that a backend may refuse: (backends, text of the refusal). The table is in docs/compatibility.md.
REFUSALS = (
    (("triton", "hopper", "auto"), "a gradient of the gradient"),
    (("triton", "hopper", "auto"), "a derivative of the gradient"),
    (("triton", "hopper", "auto"), "a third derivative"),
    (("triton", "hopper", "auto"), "forward mode"),
    (("triton",), "float64, which only the reference computes"),
    (("hopper",), "backend='hopper'"),
    # a mask made for one head of many, or for one row, must not read which: it is not asked again when it is used
    (("reference", "triton", "hopper", "auto"), "of a block mask: found 1"),
)


FAULTS: dict[type, Any] = {
    KvCase: kv_oracle.fault,
    sparse.SparseCase: sparse.fault,
    grown.GrownCase: grown.fault,
    mla.MlaCase: mla_oracle.fault,
}


class Verdict(NamedTuple):
    """kind: "" where all is well, "refused" where it may be; or what is wrong: raised, refusal, accepted, wrong, crash,
    hang. key: what two findings of one cause share."""

    kind: str = ""
    key: str = ""
    words: str = ""
    code: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("", "refused")


def judge(case: AnyCase) -> Verdict:
    """Run a case and say what is wrong with it."""
    text = code(case)
    try:
        if isinstance(case, Case) and case.hidden is not None and case.bad is None:
            text = code(case, poisons(case))
        found = executed(text)
    except AttentionError as error:
        if case.bad is not None:
            return Verdict()
        said = str(error)
        if any(case.backend in backends and words in said for backends, words in REFUSALS):
            return Verdict("refused")
        return Verdict("refusal", f"refusal {_words(said)}", f"a call that is right was refused: {said}", text)
    except Exception as error:
        if case.bad is not None and case.bad[0] in OTHER_LIBRARIES and isinstance(error, TypeError):
            return Verdict()
        where = _where(error)
        said = f"{type(error).__name__} in {where}: {str(error).strip().partition(chr(10))[0][:200]}"
        return Verdict("raised", f"raised {type(error).__name__} {where}", said, text)
    if case.bad is not None:
        return Verdict("accepted", f"accepted {case.bad[0]}", f"{case.bad[0]}={case.bad[1]} was accepted", text)
    fault = fault_of(case, found)
    if fault is None and case.deterministic:
        again = executed(text)
        if not all(torch.equal(a, b) for a, b in zip(found["outs"], again["outs"], strict=True)):
            fault = "out", "out differs from run to run, with deterministic=True"
    if fault is None:
        return Verdict()
    return Verdict("wrong", f"wrong {_words(fault[1].partition(':')[0])}", fault[1], text)


def fault_of(case: AnyCase, found: dict[str, Any]) -> Fault | None:
    """The first result that is wrong, and how."""
    fault: Fault | None = FAULTS.get(type(case), _fault)(case, found)
    return fault


OTHER_LIBRARIES = ("is_causal", "attn_mask", "softmax_scale", "enable_gqa")


def executed(text: str) -> dict[str, Any]:
    """The names that the lines leave."""
    names: dict[str, Any] = {}
    if "torch.compile(" in text:
        torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "<case>", "exec"), names)
    return names


def poisons(case: Case) -> dict[str, list[tuple[int, ...]]]:
    """The rows of k and v to poison: those that no query sees, in tensors whose rows are not one another's."""
    text = code(replace(case, mode="call", hidden=None, wants=()))
    rows = oracle.hidden_rows(case, executed(text.partition("\ndef f(")[0]))
    layouts = dict(case.layouts)
    return {name: r for name, r in rows.items() if not layouts.get(name, "").startswith("expanded")}


def _where(error: Exception) -> str:
    """The last line of the library that the error passed through, without its number."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if re.search(r"[/\\]tilewise[/\\]", f.filename)]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "torch"


def _words(said: str) -> str:
    return re.sub(r"-?\d[\d.]*(e[+-]?\d+)?", "#", said)[:80]


def _fault(case: Case, found: dict[str, Any]) -> Fault | None:
    """The first result that is wrong, and how."""
    shapes, wants_lse = case.outputs(), case.return_lse
    outs, grads = found["outs"], found.get("grads")
    if len(outs) != len(shapes):
        return "out", f"{len(outs)} results instead of {len(shapes)}"
    ours: dict[str, Any] = dict(zip(shapes, outs, strict=True))
    wanted = list(shapes)
    if grads is not None:
        names = [f"tangent of {n}" for n in shapes] if case.mode == "jvp" else [f"gradient of {n}" for n in case.graded]
        ours |= dict(zip(names, grads, strict=True))
        wanted += names
    exact = results(case, found, torch.float64)
    for name in wanted:
        fault = _form(case, name, ours[name], exact[name])
        if fault:
            return name, f"{name}: {fault}"
    dtype = getattr(torch, case.compute_dtype)
    peer = results(case, found, dtype)
    if wants_lse and dtype in (torch.float16, torch.bfloat16):
        peer["lse"] = results(case, found, torch.float32, only_outputs=True)["lse"]
    floors: dict[str, float] | None = None
    for name in wanted:
        if ours[name] is None:
            continue
        error, torchs = _largest(ours[name], exact[name]), _largest(peer[name], exact[name])
        if not torchs < float("inf"):
            torchs = 0.0
        small = 4 * _eps(case, name) * _size(exact[name])
        if error <= 2 * torchs + small:
            continue
        floors = _floors(case, found, exact) if floors is None else floors
        if not error <= 2 * torchs + small + floors[name]:
            return name, f"{name}: error {error:.1e}, torch's {torchs:.1e}, rounding {small + floors[name]:.1e}"
    return None


def _form(case: Case, name: str, x: Any, exact: Tensor) -> str | None:
    """What is wrong with a result beside its numbers: lost, of another shape or dtype, NaN."""
    if x is None:
        return "lost (None)" if exact.count_nonzero() else None
    kind, _, leaf = name.rpartition(" of ")
    dtype = case.dtype_of(leaf if kind else name)
    if not isinstance(x, Tensor) or x.shape != exact.shape:
        return f"shape {tuple(x.shape) if isinstance(x, Tensor) else type(x)}, not {tuple(exact.shape)}"
    if x.dtype != getattr(torch, dtype):
        return f"dtype {x.dtype}, not torch.{dtype}"
    if x.isnan().any() and not exact.isnan().any():
        return "NaN"
    if not torch.equal(x.isfinite(), exact.isfinite()):
        return "not finite where it should be, or the other way round"
    if exact.numel() and exact.abs().max() > 1e-3 and not x.count_nonzero():
        return "lost (all zero)"
    return None


def _eps(case: Case, name: str) -> float:
    leaf = name.rpartition(" of ")[2]
    dtypes = [getattr(torch, case.dtype_of(leaf))]
    if leaf in "qkv":
        dtypes.append(getattr(torch, case.compute_dtype))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _size(x: Tensor) -> float:
    x = x[x.isfinite()]
    return float(x.abs().max()) if x.numel() else 0.0


def _largest(x: Tensor, exact: Tensor) -> float:
    error = (x.detach().double() - exact).abs()[exact.isfinite()]
    return float(error.max()) if error.numel() else 0.0


def _floors(case: Case, found: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, float]:
    """What roundings do to each result, drawn: so many deviations of the element that they move most."""
    dtype = getattr(torch, case.compute_dtype)
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    capped = case.softcap is not None or case.score_mod == "softcap"
    tanh = 2.0**-11 if capped and dtype in (torch.float16, torch.bfloat16) and case.backend != "reference" else 0.0
    half = torch.finfo(dtype).eps / 2
    noise = oracle.Noise(half, unit, tanh, half * torch.finfo(dtype).smallest_normal)
    floors = dict.fromkeys(exact, 0.0)
    if case.mode in ("jvp", *SECOND) or dtype == torch.float64:  # for want of a truth that is finer than the result
        sizes = [_size(found[n].detach().double()) for n in case.shapes()] + [
            _size(found[n].detach().double()) for n in found if n.startswith(("t_", "dout", "dlse"))
        ]
        size = 1.0
        for x in sorted(sizes)[-6 if case.mode in SECOND else -4 :]:
            size *= max(1.0, x)
        floors = dict.fromkeys(exact, 64 * noise.half * size)
    state = torch.get_rng_state()
    draws = [results(case, found, torch.float64, noise) for _ in range(DRAWS)]
    torch.set_rng_state(state)
    for name, y in exact.items():
        if name in draws[0]:
            finite = y.isfinite()
            spread = sum(((draw[name] - y)[finite].square() for draw in draws), torch.zeros_like(y[finite])) / DRAWS
            floors[name] += DEVIATIONS * float(spread.max()) ** 0.5 if spread.numel() else 0.0
    return floors


def results(
    case: Case, found: dict[str, Any], dtype: torch.dtype, noise: oracle.Noise | None = None, only_outputs: bool = False
) -> dict[str, Tensor]:
    """What the oracle says the lines should leave, with everything in one dtype."""
    x = {name: _healed(case, name, found[name].detach()).to(dtype) for name in case.shapes()}
    shapes = case.outputs()
    if case.mode in FORWARD or only_outputs:
        with torch.no_grad():
            outs = oracle.attend(case, x, found, dtype, noise)
        return {name: outs[name] for name in shapes}
    leaves = {name: x[name].requires_grad_() for name in case.wants}
    x |= leaves
    outs = oracle.attend(case, x, found, dtype, noise)
    told = {name: outs[name].detach() for name in shapes}
    if case.mode in ("jvp", *SECOND) and noise is not None:
        return told
    cotangents = {name: found[f"d{name}"].detach().to(dtype) for name in shapes}
    if case.mode == "second":
        leaves = leaves | {f"d{name}": g.requires_grad_() for name, g in cotangents.items()}
    if case.mode == "jacrev" and "lse" in cotangents:
        cotangents["lse"] = torch.zeros_like(cotangents["lse"])
    if case.mode == "jvp":
        return told | _tangents(case, x, found, dtype)
    pairs = [(outs[name], g) for name, g in cotangents.items() if outs[name].requires_grad]
    second = case.mode in SECOND
    grads = _grads(pairs, {name: leaves[name] for name in case.wants} if second else leaves, second)
    if second:
        along = [found[f"t_{name}"].detach().to(dtype) for name in case.wants]
        grads = _grads([(g, t) for g, t in zip(grads, along, strict=True) if g.requires_grad], leaves)
    return told | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def _grads(pairs: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor], again: bool = False) -> tuple[Tensor, ...]:
    if not pairs:
        return tuple(torch.zeros_like(x) for x in leaves.values())
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(
        ys, list(leaves.values()), gs, allow_unused=True, materialize_grads=True, create_graph=again
    )


def _tangents(case: Case, x: dict[str, Tensor], found: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    names = list(case.wants)

    def f(*leaves: Tensor) -> tuple[Tensor, ...]:
        outs = oracle.attend(case, x | dict(zip(names, leaves, strict=True)), found, dtype)
        return tuple(outs[name] for name in case.outputs())

    along = tuple(found[f"t_{name}"].detach().to(dtype) for name in names)
    _, tangents, *_ = torch.func.jvp(f, tuple(x[name].detach() for name in names), along)
    return {f"tangent of {n}": t.detach().nan_to_num(nan=0.0) for n, t in zip(case.outputs(), tangents, strict=True)}


def _healed(case: Case, name: str, x: Tensor) -> Tensor:
    """A tensor as the oracle reads it: in the dtype that autocast makes of it, and without what is hidden."""
    if name in "qkv" and case.mode == "autocast":
        x = x.to(getattr(torch, case.compute_dtype))
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if case.hidden and name in "kv" else x
