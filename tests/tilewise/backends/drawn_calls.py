"""Random calls of every kind as Python code, with the shapes and options that choose between kernels."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tilewise_lab.fuzz import draw, family, kv, sparse
from tilewise_lab.fuzz.case import Case, code

DIMS = 8, 16, 17, 40, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 200, 256, 256, 320, 384, 512
LENGTHS = 1, 2, 17, 64, 100, 128, 200, 256, 384, 513
DTYPES = "bfloat16", "bfloat16", "float16", "float32"
HEADS = (1, 1), (2, 1), (2, 2), (4, 4), (6, 3), (8, 8)  # query heads, and those of a group
WHERE = draw.Where("hopper", "cuda")  # the shapes and options of calls on a GPU
MIN_PREFILL_QUERIES = 256


def dense(r: random.Random, mode: str) -> Case:
    """A call of `attention` or `attention_varlen`. Half of them have score terms."""
    case = replace(draw.FUNCTIONS[r.choice(["attention", "attention_varlen"])](r, WHERE), mode=mode)
    heads, group = r.choice(HEADS)
    d = r.choice(DIMS)
    case = replace(
        case, heads=heads, group=group, d=d, dv=d if r.random() < 0.75 else r.choice(DIMS), dtype=r.choice(DTYPES)
    )
    if not case.packed:
        n_q = r.choice(LENGTHS)
        case = replace(case, batch=max(1, case.batch), n_q=n_q, n_k=n_q if r.random() < 0.6 else r.choice(LENGTHS))
    elif r.random() < 0.5:
        case = replace(case, lengths=tuple((r.choice(LENGTHS), r.choice(LENGTHS)) for _ in case.lengths))
    if r.random() < 0.3:
        case = replace(
            case, softcap=None, bias=None, alibi=None, sinks=False, score_mod=None, mask_mod=None, block=0,
            dropout_p=0.0, window=case.window if r.random() < 0.3 else None,
        )  # fmt: skip
    if case.mask_mod == "tree":  # reads how many tokens there are
        case = replace(case, mask_mod=None, block=0)
    if case.block and min(*case.longest, len(case.sequences)) == 0:
        case = replace(case, block=0)
    names = list(case.shapes())
    layouts = [(n, draw._layout(r)) for n in (*names, "dout", "dlse") if r.random() < 0.3] if r.random() < 0.2 else []
    if mode == "jvp":
        layouts = [x for x in layouts if not x[1].startswith("expanded")]
    return replace(case, layouts=tuple(layouts), hidden=None)


def forward(r: random.Random, backend: str) -> str:
    case = dense(r, r.choice(("call", "no_grad")))
    return code(replace(case, backend=backend, return_max_logit=r.random() < 0.3))


def few_queries(r: random.Random, backend: str) -> str:
    """Few queries of many keys, which are divided among programs."""
    case = replace(dense(r, "no_grad"), function="attention", batch=1, n_q=r.choice((1, 1, 8, 60)), n_k=4096)
    return code(replace(case, backend=backend, block=0, lengths=(), slack=(0, 0), dropout_p=0.0, layouts=()))


def backward(r: random.Random, backend: str) -> str:
    case = dense(r, "backward")
    if r.random() < 0.3:
        case = replace(case, deterministic=True)
    return code(replace(case, backend=backend, wants=tuple(case.shapes())))


def term_gradients(r: random.Random, backend: str) -> str:
    """Gradients of a bias, sinks and a score mod's tensors."""
    terms = {"bias": family.OPTIONS["bias"].value(r), "score_mod": family.OPTIONS["score_mod"].value(r)}
    case = replace(dense(r, "backward"), **dict([*terms.items()][r.choice((slice(1), slice(1, 2), slice(2)))]))
    case = replace(case, sinks=r.random() < 0.5)
    return code(replace(case, backend=backend, wants=tuple(case.shapes())[r.choice((0, 3)) :]))


def forward_mode(r: random.Random, backend: str) -> str:
    case = replace(dense(r, "jvp"), deterministic=None, dropout_p=0.0)
    terms = [] if r.random() < 0.8 else list(case.shapes())[3:]
    return code(replace(case, backend=backend, wants=("q", "k", "v", *terms)))


def second(r: random.Random, backend: str) -> str:
    case = dense(r, "second")
    if r.random() < 0.7:  # of few calls with many terms there is a second derivative
        case = replace(case, dropout_p=0.0, bias=None)
    wants = r.choice((("q", "k", "v"), ("q", "k", "v"), ("k", "v"), ("q",), ("v", "q")))
    return code(replace(case, backend=backend, wants=wants))


def fp8(r: random.Random, backend: str) -> str:
    case = replace(dense(r, "no_grad"), dropout_p=0.0, block=0, bad=("precision", "'fp8'"))  # an argument to add
    d = r.choice((16, 32, 64, 80, 96, 128, 128, 192, 256))
    dtype = r.choice(DTYPES[:3]) if r.random() < 0.8 else "float32"
    return code(replace(case, backend=backend, d=d, dv=d if r.random() < 0.7 else 64, dtype=dtype))


def cache(r: random.Random, backend: str) -> str:
    """A call with a KV cache, or an append and a call."""
    return written(r, drawn_cache(r, backend))


def prefill(r: random.Random, backend: str) -> str:
    """The same with queries enough for the Hopper kernels, mostly of a cache that they take."""
    case = drawn_cache(r, backend)
    same = {} if r.random() < 0.2 else {
        "k_store": "", "v_store": "", "k_scale": "", "v_scale": "", "starts": (), "csr": False, "split": None,
        "tree": False, "page": r.choice((0, 8, 16, 64)), "dtype": r.choice(DTYPES[:3]),
    }  # fmt: skip
    d = r.choice((64, 128, 128, 192, 256))
    each = [MIN_PREFILL_QUERIES + (64 * n if case.packed else 0) for n in range(len(case.lengths))]
    queries = tuple(each)
    case = replace(case, queries=queries, new=queries if case.new else (), slots=None, latent=False, **same)
    return written(r, replace(case, d=d, dv=d) if same else case)


def shared_prefix(r: random.Random, backend: str) -> str:
    """The same with pages that sequences have in common."""
    case, page = drawn_cache(r, backend), r.choice((8, 16, 64))
    lengths = tuple(r.randint(page, 3 * page) for _ in case.lengths)
    case = replace(
        case, lengths=lengths, shared=tuple(r.choice((1, 2)) for _ in lengths), page=page, starts=(), split=None,
        mask_mod=None, score_mod=None, alibi=False, window=r.choice((None, (None, 1))),
        k_scale=case.k_scale.replace("batch", "token"), v_scale=case.v_scale.replace("batch", "token"),
    )  # fmt: skip
    if case.latent:
        case = replace(case, latent=False, d=128, dv=128)
    return written(r, case)


def drawn_cache(r: random.Random, backend: str) -> kv.KvCase:
    case = kv.draw(r, DTYPES, False)
    case = replace(case, seed=r.randrange(10_000), mode=r.choice(("call", "call", "append")), backend=backend)
    if case.mask_mod == "tree":
        case = replace(case, mask_mod=None)
    if case.latent:
        return case
    d = r.choice((16, 64, 64, 80, 96, 128, 128, 128, 192, 256, 512))
    dv = d if r.random() < 0.8 else r.choice((64, 128))
    (k_store, k_scale), (v_store, v_scale) = kv._store(r, d), kv._store(r, dv)
    if r.random() < 0.6:
        v_store, v_scale = k_store, k_scale if k_store != "uint8" or dv % 16 == 0 else "token"
    return replace(
        case, d=d, dv=dv, k_store=k_store, k_scale=k_scale, v_store=v_store, v_scale=v_scale,
        group=r.choice((1, 2, 3, 4, 8, 16)), page=r.choice((0, 1, 8, 16, 24, 64)),
        rotary=r.choice(("halves", "pairs")) if case.new and r.random() < 0.4 else "",
    )  # fmt: skip


def written(r: random.Random, case: kv.KvCase) -> str:
    """The Python of a case, with options that it does not have."""
    text = kv.code(case)
    if case.new and not case.latent and r.random() < 0.3:
        norm = f"qk_norm=tilewise.QkNorm(torch.ones({case.d}), torch.ones({case.d}), offset={r.choice((0.0, 1.0))})"
        old = "q=q, " if case.mode == "append" else "k_new=k_new, "
        text = text.replace(old, f"{old}{norm}, ")
    if not case.shared and not case.plan and r.random() < 0.2:
        call = re.compile(r"(tilewise\.attention_kv\(.*)\)$", re.MULTILINE)
        text = call.sub(r"\1, return_max_logit=True)", text, count=1)
    return re.sub(r"^\w+\[\[.*\] = .*$", "", text, flags=re.MULTILINE)  # what hidden tokens hold


MLA = """import torch, tilewise
lengths = torch.tensor({lengths}, dtype=torch.int32)
page_table = torch.arange({pages}, dtype=torch.int32).view({batch}, -1)
dtype = torch.{dtype}
q = torch.randn({batch}, {queries}, {heads}, 576).to(dtype)
cache = torch.randn({pages}, {page}, 1, 576).to(dtype)
new = torch.randn({batch}, {queries}, 1, 576).to(dtype)
angles = torch.randn(64, 32)
rotary = tilewise.Rotary(angles.cos(), angles.sin(), interleaved={interleaved})
scale = {scale}
cache = {stored}
view = {view}
where = dict(page_table=page_table, k_scale=scale, v_scale=scale, backend='auto')
turned = tilewise.append_kv(new, new[..., :512], view, view[..., :512], lengths, rotary=rotary, q=q, **where)
outs = {call}
"""


def mla(r: random.Random, backend: str) -> str:
    """A call with an MLA cache of 16 bits, 8 bits or 656 bytes a token, after an append."""
    batch, each, page = r.choice((1, 2, 3)), r.choice((1, 2, 3)), r.choice((1, 16, 24, 64, 64, 64))
    kind = r.choice(("", "", "packed", "packed", "float8_e4m3fn", "float8_e5m2", "int8"))
    dtype = "bfloat16" if r.random() < 0.6 else r.choice(DTYPES)
    scales = ("0.01", "torch.ones(1)", f"torch.ones({batch}, 1)", f"torch.ones({batch * each}, {page}, 1)")
    stored = "tilewise.pack_mla(cache)" if kind == "packed" else f"cache.to(torch.{kind})" if kind else "cache"
    given = {"k_scale": "scale", "backend": repr(backend)}
    if r.random() < 0.2:
        given["sinks"] = "torch.ones(q.shape[2])"
    if r.random() < 0.2:
        given["split"] = r.choice(("0", "128"))
    if r.random() < 0.25:
        count = r.choice((16, 64, 128, 2048))
        given["indices"] = f"torch.zeros({batch}, q.shape[1], {count}, dtype=torch.int32)"
    else:
        given |= {"page_table": "page_table", "causal": str(r.random() < 0.8)}
    return MLA.format(
        lengths=[r.randint(0, page * each) for _ in range(batch)], pages=batch * each, batch=batch, page=page,
        dtype=dtype, queries=r.choice((1, 1, 2, 5)), heads=r.choice((1, 8, 16, 64, 64, 128, 128)), stored=stored,
        interleaved=r.random() < 0.5, scale=r.choice(scales) if kind not in ("", "packed") else "None",
        view="cache.view(torch.float8_e4m3fn)" if kind == "packed" else "cache",
        call=f"tilewise.attention_mla(turned, cache, lengths, {', '.join(f'{n}={x}' for n, x in given.items())})",
    )  # fmt: skip


def sparse_call(function: str, r: random.Random, backend: str) -> str:
    """A call of `tilewise.sparse`, with blocks and head dims that the kernels of sm_90 take."""
    case = sparse.draw(r, DTYPES, False)
    while case.bad is not None or case.function != function:
        case = sparse.draw(r, DTYPES, False)
    d = r.choice((16, 64, 64, 80, 128, 128, 192, 256))
    case = replace(case, d=d, dv=d if r.random() < 0.7 else r.choice((16, 64, 128)), group=r.choice((1, 2, 4, 16)))
    if case.function in ("moba", "nsa") and not case.lengths and r.random() < 0.6:
        block = r.choice((16, 64, 128))
        case = replace(case, size=(block,), space=(block * r.randint(1, 5),), most=r.randint(1, 3))
    if case.function in ("nsa", "topk"):  # "auto" takes the kernels of topk on sm_90 alone
        backend = "auto" if backend == "hopper" else "triton" if r.random() < 0.4 else backend
        if case.mode in sparse.TRANSFORMS:  # which the kernels of topk do not support
            case = replace(case, mode="create_graph")
    if case.function == "topk" and case.extra == "columns":
        case = replace(case, d=576, dv=512, group=64) if r.random() < 0.5 else replace(case, d=max(case.d, case.dv))
    return sparse.code(replace(case, seed=r.randrange(10_000), backend=backend))


CONTEXT = """import torch, tilewise
q = torch.randn({batch}, {tokens}, {heads}, {d}).to(torch.{dtype})
k, v = (torch.randn({batch}, {tokens}, {kv_heads}, {d}).to(torch.{dtype}) for _ in range(2))
plan = tilewise.distributed.plan({plan})
leaves = [x.requires_grad_() for x in (q, k, v)]
outs = tilewise.distributed.rehearse(q, k, v, plan=plan{options})
grads = torch.autograd.grad(outs.sum(), leaves)
"""
TERMS = {
    "softcap": "30.0", "alibi_slopes": "torch.rand({heads})", "sinks": "torch.rand({heads})",
    "dropout_p": "0.1, seed=3", "deterministic": "True", "bias": "torch.randn({heads}, 1, {tokens})",
    "score_mod": "lambda s, b, h, i, j: s + (i - j)", "mask_mod": "lambda b, h, i, j: (i - j) % 3 != 0",
}  # fmt: skip


def context_parallel(r: random.Random, backend: str) -> str:
    """Context parallelism of all ranks in one process."""
    heads, group = r.choice(((4, 1), (4, 2), (8, 4)))
    tokens, packed = r.choice((64, 300, 512)), r.random() < 0.3
    plan = ["2, "] if r.random() < 0.5 else ["4, "]
    plan.append(f"cu_seqlens=[0, 40, {tokens}]" if packed else f"seqlen={tokens}")
    plan.append(f", strategy={r.choice(('ring', 'allgather', 'halo', 'ulysses'))!r}")
    plan.append(r.choice((", causal=True", "", ", window=(50, 0)")))
    chosen = [f", {n}={x}" for n, x in TERMS.items() if r.random() < 0.15] + [f", backend={backend!r}"]
    return CONTEXT.format(
        batch=1 if packed else r.choice((1, 2)), tokens=tokens, heads=heads, kv_heads=heads // group,
        d=r.choice((16, 64, 80, 128, 128, 192, 256)), dtype=r.choice(DTYPES), plan="".join(plan),
        options="".join(chosen).format(heads=heads, tokens=tokens),
    )  # fmt: skip


CATEGORIES: dict[str, Callable[[random.Random, str], str]] = {
    "forward": forward, "few queries": few_queries, "backward": backward, "term gradients": term_gradients,
    "forward mode": forward_mode,
    "second derivatives": second, "fp8": fp8, "cache": cache, "prefill": prefill, "shared prefix": shared_prefix,
    "mla": mla, **{name: partial(sparse_call, name) for name in sparse.FUNCTIONS},
    "context parallel": context_parallel,
}  # fmt: skip
