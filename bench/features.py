"""What score terms cost, beside those who offer the same: compiled FlexAttention, torch's SDPA, the packed call.

    python bench/features.py terms    # softcap, ALiBi, sinks, documents: plain causal, and FlexAttention
    python bench/features.py bias     # a (1, H, S, S) bias with its gradient: SDPA's memory-efficient kernel
    python bench/features.py documents    # a block mask over 64 documents: the same documents packed

Each case is checked against the reference before it is timed; calls are interleaved, and only ratios are meant.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from random import sample as random_order
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise_lab.clock import clock_for

Call = Callable[[], Any]
ROUNDS, WARM = 10, 3


def interleave(calls: dict[str, Call]) -> dict[str, float]:
    """Median milliseconds of each call on the device, taken in turns; the host, which queues them, is ahead."""
    clock = clock_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(WARM + ROUNDS):
        names = random_order(list(calls), len(calls))
        found = clock.start([calls[name] for name in names])()
        for name, seconds in zip(names, found, strict=True):
            if n >= WARM:
                times[name].append(1e3 * seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def both(make: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[Call, Call]:
    """The forward without autograd, and the backward alone."""
    out = make()

    def forward() -> None:
        with torch.no_grad():
            make()

    def backward() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return forward, backward


def agree(name: str, ours: Tensor, theirs: Tensor, budget: float = 2e-2) -> None:
    error = (ours.float() - theirs.float()).abs().max().item()
    if not error <= budget:
        raise SystemExit(f"{name}: {error:.3e} away from the peer; not timed")


def peak(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def terms() -> list[dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # one function, many masks
    batch, n, heads, dim = 2, 4096, 16, 128
    q, k, v = (random(batch, n, heads, dim) for _ in range(3))
    grad = torch.randn_like(q)
    slopes = torch.rand(heads, device="cuda") * 0.1
    sinks = torch.randn(heads, device="cuda")
    ids = (torch.arange(n, device="cuda") // 512).to(torch.int32)
    documents = tilewise.mods.document(ids=ids)
    ours: dict[str, dict[str, Any]] = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
        "documents": {"mask_mod": tilewise.block_mask(documents, n, n, causal=True)},
    }
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n)
    packed = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, n, n)
    theirs: dict[str, dict[str, Any]] = {
        "plain": {},
        "softcap": {"score_mod": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)},
        "alibi": {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j)},
        "sinks": {"return_lse": True},
        "documents": {"block_mask": packed},
    }
    rows = []
    calls: dict[str, Call] = {}
    for name, options in ours.items():

        def flex(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> Tensor:
            options = {"block_mask": causal} | theirs[name]
            out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            if name == "sinks":
                out, lse = out
                out = (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)
            return out.transpose(1, 2)

        compiled = torch.compile(flex, fullgraph=True)

        def tiled(options: dict[str, Any] = options) -> Tensor:
            return tilewise.attention(q, k, v, causal=True, backend="triton", **options)

        def chosen(options: dict[str, Any] = options) -> Tensor:
            return tilewise.attention(q, k, v, causal=True, **options)

        def peer(compiled: Any = compiled) -> Tensor:
            return compiled(q, k, v)

        for who, call in {"flex": peer, "portable": tiled, "auto": chosen}.items():
            agree(f"{name} {who}", call(), peer())
            calls[f"{name} forward {who}"], calls[f"{name} backward {who}"] = both(call, [q, k, v], grad)
        print("ready:", name, flush=True)
    times = interleave(calls)
    for name in ours:
        for pass_ in ("forward", "backward"):
            flexes, mine, auto = (times[f"{name} {pass_} {who}"] for who in ("flex", "portable", "auto"))
            rows.append(
                {
                    "case": name,
                    "pass": pass_,
                    "flex ms": flexes,
                    "portable ms": mine,
                    "of flex": mine / flexes,
                    "of plain": mine / times[f"plain {pass_} portable"],
                    "auto ms": auto,
                    "auto of flex": auto / flexes,
                }
            )
    return rows


def bias() -> list[dict[str, Any]]:
    batch, n, heads, dim = 4, 2048, 16, 64
    q, k, v = (random(batch, n, heads, dim) for _ in range(3))
    pair = random(1, heads, n, n)
    grad = torch.randn_like(q)
    leaves = [q, k, v, pair]

    def ours() -> Tensor:
        return tilewise.attention(q, k, v, bias=pair, backend="triton")

    def sdpa() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            mask = pair.expand(batch, -1, -1, -1)
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)

    agree("bias", ours(), sdpa())
    for a, b in zip(torch.autograd.grad(ours(), leaves, grad), torch.autograd.grad(sdpa(), leaves, grad), strict=True):
        agree("gradient", a, b, 6e-2 * max(1.0, b.float().abs().max().item()))

    def step(make: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(make(), leaves, grad)

    times = interleave({"tilewise": step(ours), "sdpa": step(sdpa), "tilewise forward": ours, "sdpa forward": sdpa})
    memory = {name: peak(step(make)) for name, make in (("tilewise", ours), ("sdpa", sdpa))}
    row = {f"{name} ms": t for name, t in times.items()} | {f"{name} MiB": m / 2**20 for name, m in memory.items()}
    return [{"case": "pair bias", **row, "ratio": times["tilewise"] / times["sdpa"]}]


def documents() -> list[dict[str, Any]]:
    count, length, heads, dim = 64, 1024, 16, 128
    n = count * length
    q, k, v = (random(n, heads, dim) for _ in range(3))
    grad = torch.randn_like(q)
    cu = torch.arange(0, n + 1, length, device="cuda", dtype=torch.int32)
    mask = tilewise.block_mask(tilewise.mods.document(cu_seqlens=cu, tokens=n), n, n)

    def masked() -> Tensor:
        return tilewise.attention(q[None], k[None], v[None], mask_mod=mask, backend="triton")[0]

    def packed() -> Tensor:
        return tilewise.attention_varlen(q, k, v, cu, cu, backend="triton")

    agree("documents", masked(), packed())
    calls = {}
    for name, make in (("mask", masked), ("varlen", packed)):
        for pass_, call in zip(("forward", "backward"), both(make, [q, k, v], grad), strict=True):
            calls[f"{name} {pass_}"] = call
    times = interleave(calls)
    return [
        {"case": "64 documents", "pass": p, **{f"{x} ms": times[f"{x} {p}"] for x in ("mask", "varlen")},
         "ratio": times[f"mask {p}"] / times[f"varlen {p}"]}
        for p in ("forward", "backward")
    ]  # fmt: skip


if __name__ == "__main__":
    found = [row for name in sys.argv[1:] for row in {"terms": terms, "bias": bias, "documents": documents}[name]()]
    for row in found:
        print(
            "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    print(json.dumps(found))
