"""Rows of calls with masks, biases, mods and selected keys, beside the peers that offer the same: a row is a name and a
function that makes its callers. Results and gradients are compared with those of a peer before they are timed.

On a CPU everything is small: to see that it runs.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, util
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise import mods, sparse
from tilewise_lab.bench.judge import Error, condemn, note
from tilewise_lab.bench.kv import graphed
from tilewise_lab.bench.measure import rounds
from tilewise_lab.bench.provider import OURS, RefusedError
from tilewise_lab.bench.results import Cell, Entry
from tilewise_lab.bench.runner import Kept, Run
from tilewise_lab.clock import HostClock, Work

BUDGET = 0.03  # of the norm of a result, of bfloat16
PORTABLE = f"{OURS}-triton"
PASSES = ("forward", "backward")


class Caller(NamedTuple):
    """A function of tensors. `same`: its result is to equal that of the other callers that say so."""

    call: Callable[..., Tensor]
    leaves: list[Tensor]
    same: bool = True


Callers = dict[str, Caller]


class Row(NamedTuple):
    make: Callable[[torch.device], Callers]
    flops: tuple[float, float] | None = None  # of the forward and of the backward
    passes: tuple[str, ...] = PASSES


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def cells(run: Run, group: str, name: str, row: Row) -> Iterator[Cell]:
    """The forward without autograd, and the backward alone, of every caller of a row."""
    callers = row.make(run.device)
    for n, which in enumerate(row.passes):
        entries: dict[str, Entry] = {}
        works: dict[str, Kept] = {}
        for who, caller in callers.items():
            began = time.perf_counter()
            entries[who], work = run.attempt(partial(_kept, caller, which))
            if work is not None:
                entries[who].first = round(time.perf_counter() - began, 4)
                works[who] = work
        peer = next((x for x in works if not x.startswith(OURS) and callers[x].same), None)
        for who in works:
            if peer is not None and who != peer and callers[who].same:
                errors = _distances(works[who].first, works[peer].first)
                note(entries[who], errors)
                condemn(entries[who], errors)
        flops = None if row.flops is None else row.flops[n]
        cell = Cell(f"{group} {which}", name, {}, flops, OURS, entries, checked=peer and f"all of it, beside {peer}")
        run.time(cell, {who: work for who, work in works.items() if entries[who].status == "ok"})
        yield cell
    del callers, works
    run.tidy()


def _kept(caller: Caller, which: str) -> Kept:
    return Kept(_answer(caller, which))


def _answer(caller: Caller, which: str) -> Callable[[], dict[str, Tensor]]:
    call, leaves, _ = caller
    if which == "forward":

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"out": call(*leaves)}

        return forward
    out = call(*leaves)
    if not out.requires_grad:
        raise RefusedError("its output carries no gradient")
    generator = torch.Generator(out.device).manual_seed(1)
    dout = torch.randn(out.numel(), generator=generator, device=out.device).to(out.dtype).view_as(out)
    return lambda: {f"d{n}": grad for n, grad in enumerate(torch.autograd.grad(out, leaves, dout, retain_graph=True))}


def _distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Error]:
    """The norm of the difference over the norm."""
    away = {}
    for name, x in exact.items():
        error = ((found[name].reshape(-1).float() - x.reshape(-1).float()).norm() / x.float().norm()).item()
        away[name] = Error(error if error < float("inf") else None, BUDGET)
    return away


def leaves(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if on_gpu(device) else torch.float32
    return [torch.randn(x, generator=generator, device=device).to(dtype).requires_grad_() for x in shapes]


def sized(device: torch.device, batch: int, n: int, heads: int, dim: int) -> tuple[int, int, int, int]:
    """The same sizes; on a CPU small ones."""
    return (batch, n, heads, dim) if on_gpu(device) else (1, 256, 2, 16)


def compiled_flex(device: torch.device) -> Callable[..., Any]:
    """FlexAttention, compiled for a GPU; it has no backward on a CPU."""
    flex = import_module("torch.nn.attention.flex_attention").flex_attention
    if on_gpu(device):
        torch._functorch.config.donated_buffer = False  # a backward is called again and again
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        flex = torch.compile(flex, dynamic=False, fullgraph=True)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex(q, k, v, **options) if q.is_cuda else flex(q.detach(), k.detach(), v.detach(), **options)

    return call


def blocks_of(function: Any, n: int, device: torch.device) -> Any:
    create = import_module("torch.nn.attention.flex_attention").create_block_mask
    return create(function, None, None, n, n, device=device.type)


def tokens_first(flex: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """FlexAttention of (B, S, H, D)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
        return out

    return call


# FlexAttention's standard mods, called as `flex_attention` of tilewise.compat. The functions are those of its users.

WINDOW, PREFIX, DOCUMENTS, CAP = 1024, 1024, 12, 20.0


def flex_row(name: str, device: torch.device) -> Callers:
    batch, n, heads, dim = sized(device, 2, 8192, 16, 128)
    window, prefix = (WINDOW, PREFIX) if on_gpu(device) else (32, 32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, DOCUMENTS, (n,), generator=generator).sort()[0].int().to(device)
    functions: dict[str, Any] = {
        "noop": lambda score, b, h, i, j: score,
        "relative": lambda score, b, h, i, j: score + (i - j),
        "alibi": lambda score, b, h, i, j: score + (j - i) * torch.exp2(-((h + 1) * 8.0 / heads)),
        "softcap": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP),
        "causal": lambda b, h, i, j: i >= j,
        "sliding window": lambda b, h, i, j: (i >= j) & (i - j <= window),
        "prefix lm": lambda b, h, i, j: (j < prefix) | (i >= j),
        "documents": lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j),
    }
    words = functions[name]
    options = {"score_mod": words} if name in SCORES else {"block_mask": blocks_of(words, n, device)}
    x = leaves(device, *[(batch, heads, n, dim)] * 3)
    ours = import_module("tilewise.compat").flex_attention
    return {
        OURS: Caller(partial(ours, **options), x),
        "flex": Caller(partial(compiled_flex(device), **options), x),
    }


SCORES = ("noop", "relative", "alibi", "softcap")


def term_row(name: str, device: torch.device) -> Callers:
    """A term beside plain causal attention (row "plain"), of the chosen backend and of the portable one."""
    batch, n, heads, dim = sized(device, 2, 4096, 16, 128)
    x = leaves(device, *[(batch, n, heads, dim)] * 3)
    slopes, sinks = torch.rand(heads, device=device) * 0.1, torch.randn(heads, device=device)
    causal = blocks_of(lambda b, h, i, j: i >= j, n, device)
    ours: dict[str, dict[str, Any]] = {
        "plain": {}, "softcap": {"softcap": 30.0}, "alibi": {"alibi_slopes": slopes}, "sinks": {"sinks": sinks},
    }  # fmt: skip
    theirs: dict[str, dict[str, Any]] = {
        "plain": {}, "softcap": {"score_mod": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)},
        "alibi": {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j)}, "sinks": {"return_lse": True},
    }  # fmt: skip
    flex = compiled_flex(device)

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flex(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=causal, **theirs[name])
        if name == "sinks":
            found, lse = found
            found = (found * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)
        return found.transpose(1, 2)  # type: ignore[no-any-return]

    call = partial(tilewise.attention, causal=True, **ours[name])
    callers = {OURS: Caller(call, x), PORTABLE: Caller(partial(call, backend="triton"), x), "flex": Caller(peer, x)}
    return callers if on_gpu(device) else {who: c for who, c in callers.items() if who != PORTABLE}


def bias_row(device: torch.device) -> Callers:
    """A bias of each pair, with its gradient."""
    batch, n, heads, dim = sized(device, 4, 2048, 16, 64)
    x = leaves(device, *[(batch, n, heads, dim)] * 3, (1, heads, n, n))

    def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH):
            mask = bias.expand(batch, -1, -1, -1)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return {OURS: Caller(lambda q, k, v, bias: tilewise.attention(q, k, v, bias=bias), x), "efficient": Caller(sdpa, x)}


def dropout_row(n: int, heads: int, dim: int, causal: bool, device: torch.device) -> Callers:
    """Not compared: cuDNN drops other weights; tests/gpu/test_masks.py has the test."""
    batch, n, heads, dim = sized(device, 4, n, heads, dim)
    x = leaves(device, *[(batch, n, heads, dim)] * 3)

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=0.1).transpose(1, 2)

    ours = partial(tilewise.attention, causal=causal, dropout_p=0.1, seed=1)
    return {OURS: Caller(ours, x), "cudnn": Caller(cudnn, x, same=False)}


def mask_row(name: str, sizes: tuple[int, int, int, int], device: torch.device) -> Callers:
    """A block mask beside compiled FlexAttention and, where it has documents, the packed call."""
    batch, n, heads, dim = sized(device, *sizes)
    x = leaves(device, *[(batch, n, heads, dim)] * 3)
    mod, function, edges, cu = mask_of(name, n, device)
    mask = tilewise.block_mask(mod, n, n, device=device, **edges)
    callers = {
        OURS: Caller(partial(tilewise.attention, mask_mod=mask, **edges), x),
        "flex": Caller(tokens_first(compiled_flex(device), block_mask=blocks_of(function, n, device)), x),
    }
    if cu is not None:
        every = torch.cat([cu[:-1] + b * n for b in range(batch)] + [cu.new_tensor([batch * n])])
        longest = {name: int(cu.diff().max()) for name in ("max_seqlen_q", "max_seqlen_k")}
        flat = [t.detach().flatten(0, 1).requires_grad_() for t in x]
        packed = partial(tilewise.attention_varlen, cu_seqlens_q=every, cu_seqlens_k=every, **longest, **edges)
        callers["packed"] = Caller(packed, flat)
    return callers


def mask_of(name: str, n: int, device: torch.device) -> tuple[Any, Any, dict[str, Any], Tensor | None]:
    """tilewise's mod, FlexAttention's function, the band, and the offsets of documents."""
    if name == "even documents":
        each = max(n // 64, 16)
        cu = torch.arange(0, n + 1, each, device=device, dtype=torch.int32)
        return mods.document(cu_seqlens=cu, tokens=n), lambda b, h, i, j: i // each == j // each, {}, cu
    if name.startswith("documents"):
        starts = torch.randperm(n - 1, generator=torch.Generator().manual_seed(0))[: DOCUMENTS - 1] + 1
        cu = torch.cat([torch.tensor([0]), starts.sort()[0], torch.tensor([n])]).to(device, torch.int32)
        ids = torch.repeat_interleave(torch.arange(DOCUMENTS, device=device), cu.diff().long()).int()
        return mods.document(ids=ids), lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), {"causal": True}, cu
    if name == "prefix lm":
        prefix = torch.full((1,), min(PREFIX, n // 2), dtype=torch.int32, device=device)
        return mods.prefix_lm(prefix), lambda b, h, i, j: (j < prefix[0]) | (i >= j), {}, None
    width, globals_ = 512, 64
    return (
        mods.window_with_globals(width, globals_),
        lambda b, h, i, j: ((i - j).abs() <= width) | (j < globals_) | (i < globals_),
        {},
        None,
    )


def tree_row(device: torch.device) -> Callers:
    """A prompt with branches, beside the branches as sequences of their own."""
    prompt, tail, branches, heads = (16384, 1024, 16, 8) if on_gpu(device) else (256, 128, 4, 2)
    n, dim = prompt + branches * tail, 128
    parents, cu = torch.tensor([-1] + [0] * branches), torch.tensor([0, *range(prompt, n + 1, tail)])
    mask = tilewise.block_mask(mods.prefix_tree(parents, cu).to(device), n, n, causal=True)

    def in_tree(b: Any, h: Any, i: Any, j: Any) -> Any:
        own = (i - prompt) // tail == (j - prompt) // tail
        return (j <= i) & ((j < prompt) | own)

    x = leaves(device, *[(1, n, heads, dim)] * 3)
    apart = leaves(device, *[(branches, prompt + tail, heads, dim)] * 3)
    return {
        OURS: Caller(partial(tilewise.attention, causal=True, mask_mod=mask), x),
        "flex": Caller(tokens_first(compiled_flex(device), block_mask=blocks_of(in_tree, n, device)), x),
        "separate": Caller(partial(tilewise.attention, causal=True), apart, same=False),
    }


def moba_row(device: torch.device) -> Callers:
    """Beside dense attention; 512 of each 4096 keys and more are visited."""
    n, heads, block, top = (32768, 16, 512, 8) if on_gpu(device) else (256, 2, 32, 3)
    x = leaves(device, *[(1, n, heads, 128)] * 3)
    return {
        OURS: Caller(partial(sparse.moba, block_size=block, top_k=top), x),
        "dense": Caller(partial(tilewise.attention, causal=True), x, same=False),
    }


def nsa_row(device: torch.device) -> Callers:
    """FLA_PEER names a folder with flash-linear-attention's package `fla`; without it there is no peer."""
    n, heads, kv_heads, window = (32768, 64, 4, 512) if on_gpu(device) else (256, 32, 2, 64)
    x = leaves(device, (1, n, heads, 128), *[(1, n, kv_heads, 128)] * 2, *[(1, n, heads)] * 3)

    def ours(q: Tensor, k: Tensor, v: Tensor, *gates: Any) -> Tensor:
        return sparse.nsa(q, k, v, gates, block_size=64, num_blocks=16, window=window)

    callers = {OURS: Caller(ours, x)}
    folder = os.environ.get("FLA_PEER")
    if folder and on_gpu(device):
        sys.path.insert(0, folder)
        peer: Any = import_module("fla.ops.nsa.parallel")

        def local(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
            return tilewise.attention(q, k, v, causal=True, window=window_size)

        peer.flash_attn_func = local  # the window branch is ours in both
        theirs = partial(peer.parallel_nsa, block_counts=16, window_size=window)
        callers["fla"] = Caller(theirs, x, same=False)
    return callers


TOPK = 4096, 65536, 128, 2048  # queries, keys, heads, keys of each query


def topk_row(device: torch.device) -> Callers:
    n, n_k, heads, count = TOPK if on_gpu(device) else (4, 256, 16, 32)
    x = leaves(device, (1, n, heads, 576), (1, n_k, 1, 576))
    generator = torch.Generator(device).manual_seed(0)
    first, stride = (torch.randint(0, n_k, (n, 1), device=device, generator=generator) for _ in range(2))
    at = (first + (stride | 1) * torch.arange(count, device=device)) % n_k  # an odd stride: no key twice
    indices = at.int().view(1, n, 1, count)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        out: Any = sparse.topk(q, k, 512, indices)
        return out  # type: ignore[no-any-return]

    return {OURS: Caller(ours, x)}


def neighborhood_row(device: torch.device) -> Callers:
    side, size, heads = (128, 13, 16) if on_gpu(device) else (16, 5, 2)
    x = leaves(device, *[(1, side * side, heads, 64)] * 3)

    def ours(*tokens: Tensor) -> Tensor:
        return sparse.neighborhood(*(t.unflatten(1, (side, side)) for t in tokens), kernel_size=size).flatten(1, 2)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = None
        for a, c in ((i // side, j // side), (i % side, j % side)):
            low = (a - size // 2).clamp(0, side - size)
            inside = (c >= low) & (c < low + size)
            seen = inside if seen is None else seen & inside
        return seen

    theirs = tokens_first(compiled_flex(device), block_mask=blocks_of(near, side * side, device))
    return {OURS: Caller(ours, x), "flex": Caller(theirs, x)}


_PAIRS = TOPK[0] * TOPK[2] * TOPK[3]
ROWS: dict[str, dict[str, Row]] = {
    "terms": {name: Row(partial(term_row, name)) for name in ("plain", "softcap", "alibi", "sinks")}
    | {"bias of each pair": Row(bias_row)},
    "flex": {
        name: Row(partial(flex_row, name))
        for name in (*SCORES, "causal", "sliding window", "prefix lm", "documents")
    },
    "masks": {
        "dropout 128 causal": Row(partial(dropout_row, 4096, 16, 128, True)),
        "dropout 128 full": Row(partial(dropout_row, 4096, 16, 128, False)),
        "dropout 64 causal": Row(partial(dropout_row, 4096, 32, 64, True)),
        **{
            f"{name} {sizes[3]}": Row(partial(mask_row, name, sizes))
            for name, sizes in (
                ("documents", (2, 8192, 16, 128)), ("prefix lm", (2, 8192, 16, 128)),
                ("window with globals", (2, 8192, 16, 128)), ("even documents", (1, 65536, 16, 128)),
                ("documents", (2, 8192, 32, 64)), ("documents", (2, 8192, 8, 256)),
            )
        },
    },
    "sparse": {
        "prefix tree": Row(tree_row),
        "MoBA": Row(moba_row),
        "NSA": Row(nsa_row),
        "top-k 2048 of 64k, MLA": Row(topk_row, (2 * _PAIRS * 1088.0, 2 * _PAIRS * 2752.0)),
        "neighbourhood 2D": Row(neighborhood_row),
    },
}  # fmt: skip


def second(run: Run) -> Iterator[Cell]:
    """A double backward beside the first backward of the same call."""
    for dim in (64, 128):
        for causal in (False, True):
            shape = sized(run.device, 4, 2048, 16, dim)
            q, k, v, dout, *along = leaves(run.device, *[shape] * 7)
            out = tilewise.attention(q, k, v, causal=causal)
            grads = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
            works: dict[str, Work] = {
                OURS: partial(torch.autograd.grad, grads, (q, k, v, dout), along, retain_graph=True),
                "first backward": partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True),
            }
            cell = Cell("second", f"d{dim} {'causal' if causal else 'full'}", {}, None, OURS, _entries(works))
            run.time(cell, works)
            yield cell


def mla(run: Run) -> Iterator[Cell]:
    """Decoding over a cache of MLA, in bfloat16 and in 8 bits, in a CUDA graph with its plan made before; beside
    FlashMLA's package, where it is installed."""
    sizes = ((128, 4096, 16), (128, 4096, 128), (32, 16384, 128)) if on_gpu(run.device) else ((2, 96, 16),)
    for batch, n, heads in sizes:
        for queries in (1, 2):
            q, cache, lengths, table = _mla_inputs(run, batch, n, heads, queries)
            options: dict[str, Any] = {"page_table": table}
            stored = cache.to(torch.float8_e4m3fn if on_gpu(run.device) else torch.float16)
            works = {OURS: _mla_work(q, cache, lengths, options)}
            if on_gpu(run.device):
                works[f"{OURS} fp8"] = _mla_work(q, stored, lengths, options | {"k_scale": 1.0})
                works[PORTABLE] = _mla_work(q, cache, lengths, options | {"backend": "triton"})
                if util.find_spec("flash_mla") is not None:
                    works["flash-mla"] = _flash_mla(q, cache, lengths, table)
            entries = _entries(works)
            _judge_mla(entries, works, q, cache, lengths, table)
            about = {"bytes": batch * n * 576 * cache.element_size()}
            name = f"b{batch} q{queries} s{n} h{heads}"
            cell = Cell("mla", name, about, 2.0 * batch * queries * n * heads * 1088, OURS, entries)
            run.time(cell, {
                who: graphed(work) if on_gpu(run.device) else work
                for who, work in works.items() if entries[who].status == "ok"
            })  # fmt: skip
            yield cell
            run.tidy()


def _mla_inputs(run: Run, batch: int, n: int, heads: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pages = -(-n // 64)
    q, cache = leaves(run.device, (batch, queries, heads, 576), (batch * pages, 64, 1, 576))
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((batch,), n, dtype=torch.int32, device=run.device)
    return q.detach(), cache.detach(), lengths, order.int().view(batch, pages).to(run.device)


def _mla_work(q: Tensor, cache: Tensor, lengths: Tensor, options: dict[str, Any]) -> Work:
    scales = {"v_scale": options["k_scale"]} if "k_scale" in options else {}
    with torch.no_grad():
        plan = tilewise.plan_kv(q, cache, cache[..., :512], lengths, **options, **scales)
    return lambda: tilewise.attention_mla(q, cache, lengths, plan=plan, **options)


def _flash_mla(q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor) -> Work:
    module = import_module("flash_mla")
    metadata = module.get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)
    return lambda: module.flash_mla_with_kvcache(q, cache, table, lengths, 512, *metadata, causal=True)[0]


def _judge_mla(
    entries: dict[str, Entry], works: dict[str, Work], q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor
) -> None:
    """The first and the last sequence beside float64; 8 bits round by a sixteenth at most."""
    for who, work in works.items():
        out, worst = work(), 0.0
        for b in (0, q.shape[0] - 1):
            keys = cache[table[b].long(), :, 0].flatten(0, 1)[: int(lengths[b])].double()
            s = q[b].double() @ keys.T * 576**-0.5
            at = torch.arange(q.shape[1], device=q.device)[:, None, None] + len(keys) - q.shape[1]
            p = s.masked_fill(torch.arange(len(keys), device=q.device) > at, -torch.inf).softmax(-1)
            exact = p @ keys[:, :512]
            worst = max(worst, ((out[b].double() - exact).norm() / exact.norm()).item())
        errors = {"out": Error(worst if worst < float("inf") else None, 0.07 if "fp8" in who else BUDGET)}
        note(entries[who], errors)
        condemn(entries[who], errors)


def growing(run: Run) -> Iterator[Cell]:
    """A new shape at every call beside a known one, on the host: decoding with a cache that grows by a token, and
    training on batches of ever-new lengths."""
    first, most = (1100, 4096) if on_gpu(run.device) else (20, 60)
    cache, q = (x.detach() for x in leaves(run.device, (1, most, 8, 64), (1, 1, 32, 64)))

    def decode(keys: int) -> None:
        with torch.no_grad():
            tilewise.attention(q, cache[:, :keys], cache[:, :keys], causal=True)

    def packed(tokens: int) -> None:
        cu = torch.tensor([0, tokens // 3, tokens // 2, tokens], dtype=torch.int32, device=run.device)
        q, k, v = (cache[0, :tokens].detach().requires_grad_() for _ in range(3))
        tilewise.attention_varlen(q, k, v, cu, cu, causal=True).sum().backward()

    def dense(tokens: int) -> None:
        q, k, v = (cache[:, :tokens].detach().requires_grad_() for _ in range(3))
        tilewise.attention(q, k, v, causal=True).sum().backward()

    for name, call in {"decoding": decode, "packed step": packed, "dense step": dense}.items():
        for n in (first - 2, first - 1, most - 1, most):  # whatever is compiled
            call(n)
        lengths = cycle(range(first, most - 1))
        works: dict[str, Work] = {
            OURS: partial(_next, call, lengths),
            "a known shape": partial(call, first - 1),
        }
        entries = _entries(works)
        found = rounds(
            works, HostClock(run.device), count=5, burst=0.0, limit=60.0, rng=random.Random(0),
            least=40 if on_gpu(run.device) else 1,
        )  # fmt: skip
        for who, times in found.items():
            entries[who].times = [float(f"{t:.5g}") for t in times]
        yield Cell("growing", name, {}, None, OURS, entries)


def _next(call: Callable[[int], None], lengths: Iterator[int]) -> None:
    call(next(lengths))


def _entries(works: dict[str, Work]) -> dict[str, Entry]:
    return {who: Entry("ok") for who in works}
