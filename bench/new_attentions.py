"""Prefix trees, sparse attentions and block masks beside their bars.

    python bench/new_attentions.py                  # all cases
    python bench/new_attentions.py moba nsa         # some of them

Results are compared before times are measured. A bar in TFLOP/s is shown as the time of a peer with that rate. FLA_PEER
names a folder with flash-linear-attention's package `fla`; without it NSA has no peer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from bounded import DEVICE, OURS, SMALL, Row, main, row
from features import interleave
from torch import Tensor

import tilewise
from tilewise import mods, sparse

DTYPE = torch.float32 if SMALL else torch.bfloat16
Calls = dict[str, Callable[[], Any]]
torch._functorch.config.donated_buffer = False  # a backward is called again and again


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True) for shape in shapes]


def step(f: Callable[..., Tensor], x: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward."""
    grad = torch.randn_like(f(*x).detach())
    return lambda: torch.autograd.grad(f(*x), x, grad)


def passes(f: Callable[..., Tensor], x: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward without autograd, and the backward alone."""
    out = f(*x)
    grad = torch.randn_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return f(*x)

    return forward, lambda: torch.autograd.grad(out, x, grad, retain_graph=True)


def same(ours: Tensor, theirs: Tensor, budget: float = 3e-2) -> float:
    """Their distance relative to their size."""
    away = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not away <= budget:
        raise RuntimeError(f"{away:.1e} away from the peer")
    return away


def flex(mask: Any, n: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(mask, None, None, n, n, device=DEVICE.type)
    compiled = flex_attention if SMALL else torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(*tokens: Tensor) -> Tensor:
        q, k, v = (x.detach().transpose(1, 2) if SMALL else x.transpose(1, 2) for x in tokens)
        out: Tensor = compiled(q, k, v, block_mask=blocks)  # type: ignore[assignment]
        return out.transpose(1, 2)

    return attend


def timed(what: str, calls: Calls, bars: dict[str, float], **more: Any) -> list[Row]:
    """A row for each peer, whose bar is its own."""
    times = interleave(calls)
    return [
        row(f"{what}, {name}", {OURS: times[OURS], name: times[name]}, bar=bar, **more) for name, bar in bars.items()
    ]


def tree() -> Callable[[], list[Row]]:
    prompt, tail, branches, heads = (256, 128, 4, 2) if SMALL else (16384, 1024, 16, 8)
    n, dim = prompt + branches * tail, 128
    parents = torch.tensor([-1] + [0] * branches)
    cu = torch.tensor([0, *range(prompt, n + 1, tail)])
    mod = mods.prefix_tree(parents, cu).to(DEVICE)
    mask = tilewise.block_mask(mod, n, n, causal=True)
    x = leaves(*[(1, n, heads, dim)] * 3)
    apart = leaves(*[(branches, prompt + tail, heads, dim)] * 3)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, causal=True, mask_mod=mask)

    def in_tree(b: Any, h: Any, i: Any, j: Any) -> Any:
        own = (i - prompt) // tail == (j - prompt) // tail
        return (j <= i) & ((j < prompt) | own)

    theirs = flex(in_tree, n)
    with torch.no_grad():
        away = same(ours(*x), theirs(*x))
    calls: Calls = {
        OURS: step(ours, x),
        "separate": step(lambda q, k, v: tilewise.attention(q, k, v, causal=True), apart),
    }
    if not SMALL:
        calls["flex"] = step(theirs, x)
    bars = {name: bar for name, bar in {"separate": 4.5, "flex": 1.5}.items() if name in calls}
    return lambda: timed("prefix tree forward + backward", calls, bars, away={"out": away})


def moba() -> Callable[[], list[Row]]:
    n, heads, block, top = (256, 2, 32, 3) if SMALL else (32768, 16, 512, 8)
    x = leaves(*[(1, n, heads, 128)] * 3)
    ours = step(lambda q, k, v: sparse.moba(q, k, v, block_size=block, top_k=top), x)
    dense = step(lambda q, k, v: tilewise.attention(q, k, v, causal=True), x)
    blocks = n // block
    pairs = sum(min(b, top - 1) for b in range(blocks)) * block**2 + blocks * block * (block + 1) // 2
    share = pairs / (n * (n + 1) // 2)
    ours()

    def measure() -> list[Row]:
        times = interleave({OURS: ours, "dense": dense})
        shared = {OURS: times[OURS], "its share of dense": share * times["dense"]}
        return [row(f"MoBA forward + backward, {share:.3f} of dense's pairs", shared, bar=0.8)]

    return measure


def nsa() -> Callable[[], list[Row]]:
    n, heads, kv_heads, window = (256, 32, 2, 64) if SMALL else (32768, 64, 4, 512)
    x = leaves((1, n, heads, 128), *[(1, n, kv_heads, 128)] * 2, *[(1, n, heads)] * 3)

    def ours(q: Tensor, k: Tensor, v: Tensor, *gates: Any) -> Tensor:
        return sparse.nsa(q, k, v, gates, block_size=64, num_blocks=16, window=window)

    own = passes(ours, x)
    folder, calls = os.environ.get("FLA_PEER"), [{OURS: f} for f in own]
    if folder and not SMALL:
        sys.path.insert(0, folder)
        import fla.ops.nsa.parallel as peer

        def local(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
            return tilewise.attention(q, k, v, causal=True, window=window_size)

        peer.flash_attn_func = local  # the window branch is ours in both
        theirs = passes(lambda q, k, v, *g: peer.parallel_nsa(q, k, v, *g, block_counts=16, window_size=window), x)
        for f in theirs:
            f()
        calls = [{OURS: f, "fla": g} for f, g in zip(own, theirs, strict=True)]

    def measure() -> list[Row]:
        found = []
        for name, both in zip(("forward", "backward"), calls, strict=True):
            times = interleave(both)
            found.append(row(f"NSA {name}", times, bar=1.2))
        return found

    return measure


def topk() -> Callable[[], list[Row]]:
    n, n_k, heads, count = (4, 256, 16, 32) if SMALL else (4096, 65536, 128, 2048)
    x = leaves((1, n, heads, 576), (1, n_k, 1, 576))
    first, stride = (torch.randint(0, n_k, (n, 1), device=DEVICE) for _ in range(2))
    at = (first + (stride | 1) * torch.arange(count, device=DEVICE)) % n_k  # an odd stride: no key twice
    indices = at.int().view(1, n, 1, count)
    backend = "reference" if SMALL else "triton"
    forward, backward = passes(lambda q, k: sparse.topk(q, k, 512, indices, backend=backend), x)
    pairs = n * heads * count
    rates = {"forward": (forward, 300, 2 * pairs * 1088), "backward": (backward, 115, 2 * pairs * 2752)}
    for f in (forward, backward):
        f()

    def measure() -> list[Row]:
        found = []
        for name, (f, bar, flops) in rates.items():
            ms = interleave({OURS: f})[OURS]
            what = f"top-k 2048 of 64k, MLA {name}: {flops / ms * 1e-9:.0f} TFLOP/s"
            found.append(row(what, {OURS: ms, f"{bar} TFLOP/s": flops / bar * 1e-9}, bar=1.0))
        return found

    return measure


def neighborhood() -> Callable[[], list[Row]]:
    side, size, heads = (16, 5, 2) if SMALL else (128, 13, 16)
    x = leaves(*[(1, side * side, heads, 64)] * 3)

    def ours(*tokens: Tensor) -> Tensor:
        return sparse.neighborhood(*(t.unflatten(1, (side, side)) for t in tokens), kernel_size=size).flatten(1, 2)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = None
        for a, c in ((i // side, j // side), (i % side, j % side)):
            low = (a - size // 2).clamp(0, side - size)
            inside = (c >= low) & (c < low + size)
            seen = inside if seen is None else seen & inside
        return seen

    theirs = flex(near, side * side)
    with torch.no_grad():
        away = same(ours(*x), theirs(*x))
    everyone = {OURS: passes(ours, x)} if SMALL else {OURS: passes(ours, x), "flex": passes(theirs, x)}
    pairs = [{name: both[n] for name, both in everyone.items()} for n in range(2)]

    def measure() -> list[Row]:
        rows = []
        for name, calls in zip(("forward", "backward"), pairs, strict=True):
            rows.append(row(f"neighbourhood 2D {name}", interleave(calls), bar=3.0, away={"out": away}))
        return rows

    return measure


CASES = {f.__name__: f for f in (tree, moba, nsa, topk, neighborhood)}


def prepare(name: str) -> Callable[[], list[Row]]:
    return CASES[name]()


if __name__ == "__main__":
    main(__doc__, "new-attentions", prepare, tuple(CASES))
