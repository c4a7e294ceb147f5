"""Random cases: calls that are right, over all that the functions take, and calls that are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tilewise_lab.fuzz import grown, kv, mla, sparse
from tilewise_lab.fuzz.bad import BAD
from tilewise_lab.fuzz.case import FORWARD, SECOND, Case
from tilewise_lab.fuzz.family import options

TANGENTS = ("jvp", "jvp of grad", "hessian")  # modes of forward-mode derivatives
WINDOWS = (0, 0, 1, 1, 3, 3, 20, 20, 2**31 - 1, 2**31, 2**40, 2**63, None, None)
LAYOUTS = ("turned", "stepped", "expanded", "offset", "padded")


class Where(NamedTuple):
    """Where the calls run. The interpreter is slow, and torch.compile cannot look into it."""

    backend: str = "reference"
    device: str = "cpu"

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.interpreted:
            return "float32", "float32", "float16", "bfloat16"
        kernels = "float32", "float16", "bfloat16"
        return kernels if self.backend in ("triton", "hopper") else (*kernels, "float32", "float64")

    @property
    def longest(self) -> int:
        return 12 if self.interpreted else 300 if self.device == "cuda" else 40

    @property
    def dims(self) -> tuple[int, ...]:
        dims = (1, 2, 3, 7, 8, 16, 17)
        return dims if self.interpreted else (*dims, 32, 33, 64, 96, 128) if self.device == "cuda" else (*dims, 40)


def draw(seed: int, number: int, where: Where) -> Case:
    """The number-th case of a seed.

    >>> draw(1, 2, Where()) == draw(1, 2, Where())
    True
    """
    r = random.Random(f"{seed} {number} {where}")
    case = r.choice(list(FUNCTIONS.values()))(r, where)
    case = replace(case, seed=r.randrange(10_000), backend=where.backend, device=where.device)
    return _spoilt(r, case) if r.random() < 0.2 else _used(r, case, where)


def drawn(family: str, seed: int, number: int, where: Where) -> Any:
    """The same of another family: "kv" (a call with a KV cache), "mla", "sparse", "grown" (a block mask that was cut or
    has grown)."""
    r = random.Random(f"{family} {seed} {number} {where}")
    case = FAMILIES[family].draw(r, where.dtypes, where.interpreted)
    backend = where.backend
    if family == "kv" and case.mode == "compile" and case.mask_mod == "tree":  # which reads its tree on the host
        case = replace(case, mode="call")
    elif family == "sparse":
        if case.function == "topk" and backend == "triton" and case.mode in sparse.TRANSFORMS:  # it raises there
            case = replace(case, mode="backward")
        if where.interpreted and case.function == "neighborhood" and case.mode in ("create_graph", "jvp of grad"):
            case = replace(case, batch=1, kv_heads=1, group=1)  # its boxes have 128 tokens each, which take long
        backend = "auto" if backend == "hopper" else backend  # nsa and topk take no such name
    elif family == "grown" and where.device == "cuda":  # its kernels take tiles of 128 and more
        case = replace(case, block=(128, 128), n_q=case.n_q * 8, n_k=case.n_k * 8)
    return replace(case, seed=r.randrange(10_000), backend=backend, device=where.device)


FAMILIES: dict[str, Any] = {"kv": kv, "mla": mla, "sparse": sparse, "grown": grown}


def _attention(r: random.Random, where: Where) -> Case:
    """A dense call."""
    small = r.random() < 0.3

    def size() -> int:
        return r.choice((0, 1, 1, 2)) if r.random() < 0.15 else r.randint(1, 5 if small else where.longest)

    n_q = size()
    n_k = n_q if r.random() < 0.4 else size()
    return _termed(
        r,
        replace(_sized(r, where), batch=r.choice((1, 1, 2, 2, 1 if where.interpreted else 3, 0)), n_q=n_q, n_k=n_k),
        where,
    )


def _attention_varlen(r: random.Random, where: Where) -> Case:
    """Packed sequences, some empty, in buffers some of which are longer."""

    def length() -> int:
        return 0 if r.random() < 0.2 else r.randint(1, max(2, where.longest // 2))

    lengths = [(length(), length()) for _ in range(r.randint(1, 4))]
    if r.random() < 0.4:
        lengths = [(q, q) for q, _ in lengths]
    slack = (r.choice((0, 1, 5)), r.choice((0, 1, 5))) if r.random() < 0.25 else (0, 0)
    case = replace(_sized(r, where), function="attention_varlen", lengths=tuple(lengths), slack=slack)
    case = _termed(r, case, where)
    if case.mask_mod == "tree" and not case.block:  # the rows of k must not exceed the tokens of so many trees
        case = replace(case, slack=(slack[0], 0))
    return case


FUNCTIONS: dict[str, Callable[[random.Random, Where], Case]] = {
    "attention": _attention,
    "attention_varlen": _attention_varlen,
}


def _sized(r: random.Random, where: Where) -> Case:
    few = (1, 1), (2, 1), (2, 2)
    heads, group = r.choice(few if where.interpreted else (*few, (3, 1), (4, 2), (6, 3), (4, 4)))
    d = r.choice(where.dims)
    return Case(
        dtype=r.choice(where.dtypes), heads=0 if r.random() < 0.01 else heads, group=group, d=d,
        dv=d if r.random() < 0.6 else r.choice(where.dims),
    )  # fmt: skip


def _termed(r: random.Random, case: Case, where: Where) -> Case:
    """The case with score terms, masks and options."""

    odds = 0.25 if r.random() < 0.6 else 0.0
    terms = options(r, "softcap", "bias", "sinks", "score_mod", "mask_mod", "dropout_p", odds=odds)
    terms |= options(r, "causal", "scale", "return_lse", "deterministic")
    if r.random() < 0.35:
        terms["window"] = r.choice(WINDOWS), r.choice(WINDOWS)
    if r.random() < odds:
        terms["alibi"] = r.choice(("h", "bh"))
    if "dropout_p" in terms:
        terms["dropout_seed"] = options(r, "seed").get("seed", 11)
    some = min(len(case.sequences), case.heads, *case.longest) > 0
    blocked = "mask_mod" in terms and some and r.random() < 0.4
    dtypes = [(name, r.choice(("float32", "float16", "float64"))) for name in ("bias", "sinks", "slopes_of_alibi")]
    return replace(
        case, **terms, gain=20.0 if r.random() < 0.1 else 1.0,
        block=(128 if where.device == "cuda" else 16) if blocked else 0,
        hidden=r.choice(("nan", "inf")) if r.random() < 0.2 else None,
        dtypes=tuple(x for x in dtypes if r.random() < 0.15),
    )  # fmt: skip


def _used(r: random.Random, case: Case, where: Where) -> Case:
    """The case with a way to call it: which derivatives, of what, under which transform; and with memory layouts."""
    kind = r.random()
    usual = ("backward", "backward", "backward", "backward", "enable_grad", "no_grad", "inference", "call")
    transforms = ("autocast", "func.grad", "func.vjp", "vmap", "vmap of grad", "functional_call", "checkpoint", "jvp")
    mode = r.choice(usual) if kind < 0.55 else r.choice(transforms) if kind < 0.88 else r.choice((*SECOND, "jacrev"))
    if kind > 0.985 and not where.interpreted and case.mask_mod != "tree":  # which reads its tree on the host
        mode = r.choice(("compile eager", "compile aot_eager"))
    if mode == "hessian" and where.interpreted:  # it takes minutes
        mode = "jvp of grad"
    if mode in SECOND and case.dtype not in ("float32", "float64"):
        case = replace(case, dtype="float32")
    if mode in ("jacrev", "hessian"):
        case = replace(case, dtype="float32", n_q=min(case.n_q, 4), n_k=min(case.n_k, 4), d=min(case.d, 3),
                       dv=min(case.dv, 3), batch=min(case.batch, 2), block=0, dtypes=(),
                       lengths=tuple((min(q, 3), min(k, 3)) for q, k in case.lengths))  # fmt: skip
        if 0 in case.outputs()["out"]:  # of no results torch's own jacrev fails, in many an expression
            mode = "func.vjp"
    names = list(case.shapes())
    wants = [n for n in names if r.random() < 0.7] or [r.choice(names)]
    if r.random() < 0.4:
        wants = names
    if mode in FORWARD and mode != "vmap":
        wants = []
    if mode == "vmap" and r.random() < 0.7:
        wants = ["q", "k", "v"]
    layouts = [(n, _layout(r)) for n in (*names, "dout", "dlse") if r.random() < 0.3]
    if (
        mode in TANGENTS
    ):  # torch gives a tangent the strides of its primal, and cannot write to one that overlaps itself
        layouts = [(n, layout) for n, layout in layouts if not layout.startswith("expanded")]
    largest = mode in ("call", "no_grad", "inference") and bool(options(r, "return_max_logit"))
    return replace(case, mode=mode, wants=tuple(wants), layouts=tuple(layouts), return_max_logit=largest)


def _layout(r: random.Random) -> str:
    return f"{r.choice(LAYOUTS)} {r.randrange(4)}"


def _spoilt(r: random.Random, case: Case) -> Case:
    """A small plain call with one argument that is wrong."""
    packed = case.packed
    plain = Case(
        function=case.function, seed=case.seed, backend=case.backend, device=case.device, n_q=2, n_k=2, heads=2, d=4,
        dv=4, lengths=((2, 2),) if packed else (),
    )  # fmt: skip
    choices: list[tuple[str, Any]] = [
        (name, value)
        for name, values in BAD.items()
        for value in values
        if packed or not name.startswith(("cu_", "max_"))
    ]
    name, value = r.choice(choices)
    if name == "seed" and "without" not in value:
        plain = replace(plain, dropout_p=0.5)
    if name.startswith("max_"):
        plain = replace(plain, bias="ij")
    return replace(plain, bad=(name, value.partition("  #")[0]))
