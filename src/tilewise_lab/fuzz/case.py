"""A call as data, and as the few lines of Python that it is run from and reported with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise_lab.fuzz import grown, kv, mla, sparse
from tilewise_lab.fuzz.family import SIZES, Drawn
from tilewise_lab.fuzz.twins import MASK, SCORE, Twin

FORWARD = ("call", "no_grad", "inference", "vmap")  # modes that ask for no derivative
REVERSE = (
    "backward", "enable_grad", "autocast", "func.grad", "func.vjp", "jacrev", "vmap of grad", "functional_call",
    "checkpoint", "compile eager", "compile aot_eager",
)  # fmt: skip
SECOND = ("second", "jvp of grad", "hessian")  # that give the derivative of the gradients along tangents
MODES = (*FORWARD, *REVERSE, "jvp", *SECOND)


@dataclass(frozen=True)
class Case(Drawn):
    """Everything that a call is made of. The defaults are the simplest choices: shrinking goes towards them.

    lengths: (queries, keys) of each packed sequence; slack: tokens of q and of k past the last sequence.
    layouts: name of a tensor -> how it lies in memory; dtypes: dtypes of the terms, where they are not q's.
    bias: the axes that do not broadcast, of "bhij"; after a "-", without the leading axes of size 1.
    wants: the tensors that require a gradient; hidden: what the keys that no query sees hold.
    bad: an argument and what it is instead, or None.
    """

    function: str = "attention"
    batch: int = 1
    n_q: int = 1
    n_k: int = 1
    heads: int = 1
    group: int = 1
    d: int = 1
    dv: int = 1
    lengths: tuple[tuple[int, int], ...] = ()
    slack: tuple[int, int] = (0, 0)
    layouts: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()
    wants: tuple[str, ...] = ()
    gain: float = 1.0
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    alibi: str | None = None
    sinks: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    block: int = 0
    dropout_p: float = 0.0
    dropout_seed: int = 11
    return_lse: bool = False
    return_max_logit: bool = False
    deterministic: bool | None = None
    hidden: str | None = None
    bad: tuple[str, str] | None = None

    @property
    def packed(self) -> bool:
        return self.function == "attention_varlen"

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // self.group) if self.heads else 1

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return self.lengths if self.packed else ((self.n_q, self.n_k),) * self.batch

    @property
    def longest(self) -> tuple[int, int]:
        if not self.packed:
            return self.n_q, self.n_k
        return max((q for q, _ in self.sequences), default=0), max((k for _, k in self.sequences), default=0)

    @property
    def tokens(self) -> tuple[int, int]:
        """Rows of q and of k, where they are packed."""
        return sum(q for q, _ in self.lengths) + self.slack[0], sum(k for _, k in self.lengths) + self.slack[1]

    @property
    def compute_dtype(self) -> str:
        return "bfloat16" if self.mode == "autocast" and self.dtype != "float64" else self.dtype

    def twins(self) -> list[Twin]:
        return [table[name] for table, name in ((SCORE, self.score_mod), (MASK, self.mask_mod)) if name is not None]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the floating-point tensors that may have gradients."""
        lead_q, lead_k = ((self.tokens[0],), (self.tokens[1],)) if self.packed else (
            (self.batch, self.n_q), (self.batch, self.n_k))  # fmt: skip
        n = len(self.sequences)
        found = {
            "q": (*lead_q, self.heads, self.d), "k": (*lead_k, self.kv_heads, self.d),
            "v": (*lead_k, self.kv_heads, self.dv),
        }  # fmt: skip
        if self.bias is not None:
            axes = zip("bhij", (n, self.heads, *self.longest), strict=True)
            full = tuple(size if axis in self.bias else 1 for axis, size in axes)
            ones = next((n for n, size in enumerate(full) if size != 1), 4)
            found["bias"] = full[ones if self.bias.startswith("-") else 0 :]
        if self.alibi is not None:
            found["slopes_of_alibi"] = (n, self.heads) if self.alibi == "bh" else (self.heads,)
        if self.sinks:
            found["sinks"] = (self.heads,)
        if self.score_mod is not None:
            for name, axes_of in SCORE[self.score_mod].tensors.items():
                found[name] = self._sizes(axes_of)
        return found

    def _sizes(self, axes: tuple[Any, ...]) -> tuple[int, ...]:
        named = {"B": max(1, len(self.sequences)), "H": max(1, self.heads), "S": max(1, *self.longest)}
        return tuple(named.get(axis, axis) for axis in axes)

    def outputs(self) -> dict[str, tuple[int, ...]]:
        lead = (self.tokens[0],) if self.packed else (self.batch, self.n_q)
        lse = (self.heads, self.tokens[0]) if self.packed else (self.batch, self.heads, self.n_q)
        found = {"out": (*lead, self.heads, self.dv)} | ({"lse": lse} if self.return_lse else {})
        return found | ({"max_logit": lse[:-1] if not self.packed else (self.heads,)} if self.return_max_logit else {})

    @property
    def graded(self) -> tuple[str, ...]:
        """The tensors whose gradients the call leaves: where gradients are differentiated, the cotangents too."""
        return (*self.wants, *(f"d{name}" for name in self.outputs())) if self.mode == "second" else self.wants

    def dtype_of(self, name: str) -> str:
        if name in ("dout", "dlse"):
            name = name[1:]
        if name == "lse":
            return "float64" if self.compute_dtype == "float64" else "float32"
        if name == "max_logit":
            return "float32"
        if name == "out":
            return self.compute_dtype
        if name in ("q", "k", "v"):
            return self.dtype
        return dict(self.dtypes).get(name, self.dtype if name == "bias" else "float32")

    @staticmethod
    def of(data: dict[str, Any]) -> Case:
        """The reverse of `dict`, from JSON."""
        return Case(**{name: _frozen(x) for name, x in data.items()})

    def features(self) -> frozenset[str]:
        """The names of the fields that are not at their simplest, sizes left out; two cases that fail alike and have
        the same are one finding."""
        valued = {"mode", "function", "score_mod", "mask_mod"}
        return frozenset(f"{n} {x}" if n in valued else n for n, x in self.dict().items() if n not in SIZES)


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, list) else x


AnyCase = Case | kv.KvCase | sparse.SparseCase | grown.GrownCase
MODULES: dict[type, Any] = {  # that write each
    kv.KvCase: kv, sparse.SparseCase: sparse, grown.GrownCase: grown, mla.MlaCase: mla,
}  # fmt: skip


def code(case: AnyCase, poisoned: dict[str, list[tuple[int, ...]]] | None = None) -> str:
    """The Python of a case, which leaves `outs` and, where derivatives are asked for, `grads`.

    poisoned: rows of k and v that hold what `case.hidden` says.
    """
    if not isinstance(case, Case):
        return str(MODULES[type(case)].code(case))
    call = _call(case)
    fixed = _fixed(case)
    twins = ["from tilewise_lab.fuzz import twins"] * ("twins." in call + fixed.get("mask", ""))
    lines = case.begin(*twins, *["import numpy"] * (case.bad is not None and "numpy" in case.bad[1]))
    for name, shape in case.shapes().items():
        lines.append(f"{name} = {made(case, name, shape, case.gain if name == 'q' else 1.0)}")
    lines += [f"{name} = {text}" for name, text in fixed.items()]
    for name, rows in (poisoned or {}).items():
        if rows:
            index = ", ".join(str(list(axis)) for axis in zip(*rows, strict=True))
            lines.append(f"{name}[{index}] = float({case.hidden!r})")
    if case.mode not in FORWARD:
        lines += [f"{name}.requires_grad_()" for name in case.wants]
        lines += [f"d{n} = {made(case, n, shape, name=f'd{n}')}" for n, shape in case.outputs().items()]
    if case.mode in ("jvp", *SECOND):
        lines += [f"t_{n} = {made(case, n, case.shapes()[n], name=f't_{n}')}" for n in case.wants]
    ends = "" if case.return_lse or case.return_max_logit else ","
    lines += [f"def f({', '.join(case.wants)}):", f"    return {call}{ends}"]
    return "\n".join([*lines, *_use(case)])


def _tuple(names: Any) -> str:
    names = list(names)
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _use(case: Case) -> list[str]:
    w = _tuple(case.wants)
    x = ", ".join(case.wants)
    g = _tuple(f"d{n}" for n in case.outputs())
    t = _tuple(f"t_{n}" for n in case.wants)
    grads = f"grads = torch.autograd.grad(outs, {w}, {g}, allow_unused=True)"
    loss = f"loss = lambda *x: sum((o * g).sum() for o, g in zip(f(*x), {g}))"
    numbers = tuple(range(len(case.wants)))
    match case.mode:
        case "call":
            return [f"outs = f({x})"]
        case "no_grad":
            return ["with torch.no_grad():", f"    outs = f({x})"]
        case "inference":
            return ["with torch.inference_mode():", f"    outs = f({x})"]
        case "vmap":
            return [
                f"outs = torch.func.vmap(f)(*(torch.stack([-x, x]) for x in {w}))",
                "outs = tuple(o[1] for o in outs)",
            ]
        case "backward":
            return [f"outs = f({x})", grads]
        case "enable_grad":
            return ["with torch.no_grad(), torch.enable_grad():", f"    outs = f({x})", grads]
        case "autocast":
            return [f"with torch.autocast({case.device!r}, torch.bfloat16):", f"    outs = f({x})", grads]
        case "func.grad":
            return [f"outs = f({x})", loss, f"grads = torch.func.grad(loss, {numbers})({x})"]
        case "func.vjp":
            return [f"outs, pull = torch.func.vjp(f, {x})", f"grads = pull({g})"]
        case "jacrev":
            return [
                f"outs = f({x})", f"rows = torch.func.jacrev(lambda *x: f(*x)[0], {numbers})({x})",
                "grads = tuple(torch.tensordot(dout.to(r.dtype), r, dout.dim()) for r in rows)",
            ]  # fmt: skip
        case "vmap of grad":
            return [
                f"outs = f({x})", loss,
                f"grads = torch.func.vmap(torch.func.grad(loss, {numbers}))(*(torch.stack([-x, x]) for x in {w}))",
                "grads = tuple(g[1] for g in grads)",
            ]  # fmt: skip
        case "functional_call":
            return [
                "layer = torch.nn.Module()",
                *(f"layer.{n} = torch.nn.Parameter(torch.zeros_like({n}))" for n in case.wants),
                f"layer.forward = lambda: f({', '.join(f'layer.{n}' for n in case.wants)})",
                f"outs = torch.func.functional_call(layer, {{{', '.join(f'{n!r}: {n}' for n in case.wants)}}}, ())",
                grads,
            ]
        case "checkpoint":
            return [
                "from torch.utils.checkpoint import checkpoint",
                f"outs = checkpoint(f, {x}, use_reentrant=False)", grads,
            ]  # fmt: skip
        case "compile eager" | "compile aot_eager":
            return [
                f"f = torch.compile(f, backend={case.mode.split()[1]!r}, fullgraph=True)", f"outs = f({x})", grads,
            ]  # fmt: skip
        case "jvp":
            return [f"outs, grads = torch.func.jvp(f, {w}, {t})"]
    return [f"outs = f({x})", *([loss] if case.mode != "second" else []), *_second(case, g, t)]


def _second(case: Case, g: str, t: str) -> list[str]:
    """The lines that differentiate the gradients along the tangents `t`; of "second" by the cotangents `g` too."""
    w, x, numbers = _tuple(case.wants), ", ".join(case.wants), tuple(range(len(case.wants)))
    match case.mode:
        case "second":
            every = _tuple(case.graded)
            return [
                f"every = {every}", "every = [x.requires_grad_() for x in every]",
                f"first = torch.autograd.grad(outs, {w}, {g}, create_graph=True)",
                f"total = sum((x * t).sum() for x, t in zip(first, {t}))",
                "grads = torch.autograd.grad(total, every, allow_unused=True)",
            ]  # fmt: skip
        case "jvp of grad":
            return [f"_, grads = torch.func.jvp(torch.func.grad(loss, {numbers}), {w}, {t})"]
        case "hessian":
            return [
                f"rows = torch.func.hessian(loss, {numbers})({x})",
                "products = [[torch.tensordot(t, x, t.dim()) for x in row] for t, row in zip(" + t + ", rows)]",
                f"grads = tuple(sum(each).to(x.dtype) for each, x in zip(zip(*products), {w}))",
            ]  # fmt: skip
    raise AssertionError(case.mode)


def _call(case: Case) -> str:
    args = {"q": "q", "k": "k", "v": "v"}
    if case.packed:
        args |= {"cu_seqlens_q": "cu_q", "cu_seqlens_k": "cu_k"}
        if case.bias is not None:
            args |= {"max_seqlen_q": str(case.longest[0]), "max_seqlen_k": str(case.longest[1])}
    names = ("causal", "window", "scale", "softcap", "return_lse", "return_max_logit", "deterministic")
    options = {n: getattr(case, n) for n in names}
    args |= {
        n: _number(x)
        for n, x in options.items()
        if (x is not None and x is not False) or (n == "deterministic" and x is False)
    }
    if case.bias is not None:
        args["bias"] = "bias"
    if case.alibi is not None:
        args["alibi_slopes"] = "slopes_of_alibi"
    if case.sinks:
        args["sinks"] = "sinks"
    if case.score_mod is not None:
        args["score_mod"] = SCORE[case.score_mod].call
    if case.mask_mod is not None:
        args["mask_mod"] = "mask" if case.block else MASK[case.mask_mod].call
    if case.dropout_p:
        args |= {"dropout_p": str(case.dropout_p), "seed": str(case.dropout_seed)}
    if case.backend != "auto":
        args["backend"] = repr(case.backend)
    if case.bad is not None:
        args[case.bad[0]] = case.bad[1]
    positional = [args.pop(n) for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if n in args]
    return f"tilewise.{case.function}({', '.join([*positional, *(f'{n}={x}' for n, x in args.items())])})"


def _number(x: Any) -> str:
    """
    >>> _number((2**40, None)), _number(3)
    ('(2**40, None)', '3')
    """
    if isinstance(x, tuple):
        return f"({', '.join(map(_number, x))})"
    for power in (31, 32, 40, 62, 63):
        if isinstance(x, int) and abs(x - 2**power) <= 1:
            return f"2**{power}" + {0: "", 1: " + 1", -1: " - 1"}[x - 2**power]
    return repr(x)


def _fixed(case: Case) -> dict[str, str]:
    """The tensors without gradients: sequence bounds, what mask mods read, a block mask."""
    found = {}
    if case.packed:
        for name, lengths in zip(
            ("cu_q", "cu_k"), zip(*case.lengths, strict=True) if case.lengths else ((), ()), strict=True
        ):
            ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
            found[name] = f"torch.tensor({ends}, dtype=torch.int32)"
    if case.mask_mod is None:
        return found
    longest = max(1, *case.longest)
    for name, axes in MASK[case.mask_mod].tensors.items():
        shape, top = case._sizes(axes), 3 if name == "ids" else longest + 1
        found[name] = f"torch.randint({top}, {shape}, dtype=torch.int32)"
    if case.block:
        mod, band = MASK[case.mask_mod], f"causal={case.causal}, window={_number(case.window)}"
        block = f"block=({case.block}, {case.block})"
        if case.packed:
            heads = f"heads={case.heads}, " if "h" in mod.reads else ""
            found["mask"] = f"tilewise.block_mask_varlen({mod.call}, cu_q, cu_k, {heads}{band}, {block})"
        else:
            batch = f"batch={case.batch}, " if "b" in mod.reads else ""
            heads = f"heads={case.heads}, " if "h" in mod.reads else ""
            at = f"{case.n_q}, {case.n_k}, {batch}{heads}{band}, {block}, device={case.device!r}"
            found["mask"] = f"tilewise.block_mask({mod.call}, {at})"
    return found


def made(case: Case, of: str, shape: tuple[int, ...], gain: float = 1.0, name: str | None = None) -> str:
    """A random tensor of the shape and dtype, in the layout that the case gives this name."""
    dtype, layout = case.dtype_of(of), dict(case.layouts).get(name or of, "plain")
    kind, _, where = layout.partition(" ")
    axis = int(where) % len(shape) if where and shape else 0
    end = "" if dtype == "float32" else f".to(torch.{dtype})"
    end = (f".mul({gain})" if gain != 1.0 else "") + end

    def drawn(sizes: tuple[int, ...]) -> str:
        return f"torch.randn({', '.join(map(str, sizes)) if sizes else '()'}){end}"

    if not shape or kind == "plain":
        return drawn(shape)
    changed = list(shape)
    match kind:
        case "turned":
            other = (axis + 1) % len(shape)
            changed[axis], changed[other] = shape[other], shape[axis]
            return f"{drawn(tuple(changed))}.transpose({axis}, {other})"
        case "stepped":
            changed[axis] = 2 * shape[axis] + 1
            return f"{drawn(tuple(changed))}[{':, ' * axis}1::2]"
        case "padded":
            changed[axis] = shape[axis] + 3
            return f"{drawn(tuple(changed))}[{':, ' * axis}:{shape[axis]}]"
        case "expanded":
            changed[axis] = 1
            return f"{drawn(tuple(changed))}.expand({', '.join(map(str, shape))})"
        case "offset":
            size = 3
            for n in shape:
                size *= n
            total = 3 + size // 3
            return f"{drawn((total,))}[3:].view({', '.join(map(str, shape))})"
    raise AssertionError(layout)
