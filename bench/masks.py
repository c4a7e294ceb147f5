"""Dropout beside cuDNN, and block masks beside compiled FlexAttention and the packed call.

    python bench/masks.py                       # forward and backward of all, in at most 95 seconds
    python bench/masks.py documents --seconds 60

Block masks are compared with FlexAttention before anything is timed. Dropout cannot be: cuDNN drops other weights; its
test is tests/gpu/test_masks.py. Calls are interleaved, and only ratios are meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from bounded import DEVICE, OURS, SMALL, Row, main, row
from features import Call, both, interleave
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise import mods

P, PREFIX, WIDTH, GLOBALS, DOCUMENTS = 0.1, 1024, 512, 64, 12
BUDGET = 3e-2
# name -> batch, length, heads, head dim, causal
DROPOUT = {
    "dropout 128 causal": (4, 4096, 16, 128, True),
    "dropout 128 full": (4, 4096, 16, 128, False),
    "dropout 64 causal": (4, 4096, 32, 64, True),
}
MASKS = {
    "documents": (2, 8192, 16, 128),
    "prefix_lm": (2, 8192, 16, 128),
    "globals": (2, 8192, 16, 128),
    "documents, even": (1, 65536, 16, 128),  # 64 of 1024 tokens, not causal
    "documents 64": (2, 8192, 32, 64),
    "documents 256": (2, 8192, 8, 256),
}
BARS = {"dropout forward": 1.1, "dropout backward": 1.0, "flex": 1.5, "packed": 0.91}


def leaves_of(batch: int, n: int, heads: int, dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if SMALL else torch.bfloat16
    return [torch.randn(batch, n, heads, dim, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]


def shrunk(batch: int, n: int, heads: int, dim: int) -> tuple[int, int, int, int]:
    """The same sizes; on a CPU small ones, to see that it runs."""
    return (1, 256, 1, 16) if SMALL else (batch, n, heads, dim)


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH if SMALL else SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, dropout_p=P)
    return out.transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, function: Any, mask: Any) -> Tensor:
    out: Tensor = function(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    return out.transpose(1, 2)


def masks(name: str, n: int) -> tuple[Any, Any, dict[str, Any], Tensor | None]:
    """tilewise's mod, FlexAttention's function, the band, and the offsets of documents."""
    if name == "documents, even":
        each = max(n // 64, 16)
        cu = torch.arange(0, n + 1, each, device=DEVICE, dtype=torch.int32)
        return mods.document(cu_seqlens=cu, tokens=n), lambda b, h, i, j: i // each == j // each, {}, cu
    if name.startswith("documents"):
        starts = torch.randperm(n - 1, generator=torch.Generator().manual_seed(0))[: DOCUMENTS - 1] + 1
        cu = torch.cat([torch.tensor([0]), starts.sort()[0], torch.tensor([n])]).to(DEVICE, torch.int32)
        ids = torch.repeat_interleave(torch.arange(DOCUMENTS, device=DEVICE), cu.diff().long()).int()
        return mods.document(ids=ids), lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), {"causal": True}, cu
    if name == "prefix_lm":
        prefix = torch.full((1,), min(PREFIX, n // 2), dtype=torch.int32, device=DEVICE)
        return mods.prefix_lm(prefix), lambda b, h, i, j: (j < prefix[0]) | (i >= j), {}, None
    return (
        mods.window_with_globals(WIDTH, GLOBALS),
        lambda b, h, i, j: ((i - j).abs() <= WIDTH) | (j < GLOBALS) | (i < GLOBALS),
        {},
        None,
    )


def prepare_dropout(name: str) -> Callable[[], list[Row]]:
    *sizes, causal = DROPOUT[name]
    leaves = leaves_of(*shrunk(*sizes))
    grad = torch.randn_like(leaves[0])
    makes: dict[str, Callable[[], Tensor]] = {
        OURS: partial(tilewise.attention, *leaves, causal=causal, dropout_p=P, seed=1),
        "cudnn": partial(cudnn, *leaves, causal),
    }
    calls = {who: both(make, leaves, grad) for who, make in makes.items()}
    for pair in calls.values():
        for call in pair:
            call()
    return partial(measure, name, calls, {}, [BARS["dropout forward"], BARS["dropout backward"]])


def away(ours: Tensor, theirs: Tensor) -> float:
    """The distance of two results, relative to their size."""
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def prepare_mask(name: str) -> Callable[[], list[Row]]:
    batch, n, heads, dim = shrunk(*MASKS[name])
    leaves = leaves_of(batch, n, heads, dim)
    grad = torch.randn_like(leaves[0])
    mod, function, edges, cu = masks(name, n)
    mask = tilewise.block_mask(mod, n, n, device=DEVICE, **edges)
    compiled = flex_attention
    if not SMALL:
        torch._functorch.config.donated_buffer = False  # the backward is called again and again
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    theirs = create_block_mask(function, None, None, n, n, device=DEVICE.type)
    makes: dict[str, Callable[[], Tensor]] = {
        OURS: partial(tilewise.attention, *leaves, mask_mod=mask, **edges),
        "flex": partial(flex, *leaves, compiled, theirs),
    }
    if SMALL:
        del makes["flex"]  # which has no backward on a CPU
    if cu is not None:
        flat = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
        all_cu = torch.cat([cu[:-1] + b * n for b in range(batch)] + [cu.new_tensor([batch * n])])
        longest = int(cu.diff().max())
        packed = partial(
            tilewise.attention_varlen, *flat, cu_seqlens_q=all_cu, cu_seqlens_k=all_cu,
            max_seqlen_q=longest, max_seqlen_k=longest, **edges,
        )  # fmt: skip
        makes["packed"] = packed
    calls: dict[str, tuple[Call, Call]] = {}
    answers: dict[str, list[Tensor]] = {}
    for who, make in makes.items():
        own = flat if who == "packed" else leaves
        out = make()
        answers[who] = [out.detach(), *torch.autograd.grad(out, own, grad.view_as(out))]
        answers[who] = [x.view(batch, n, heads, dim) for x in answers[who]]
        calls[who] = both(make, own, grad.view_as(out))
        calls[who][0]()  # without gradients: another graph to compile
    found = {
        f"{what} {who}": away(a, b)
        for who in makes
        if who != OURS
        for what, a, b in zip(("out", "dq", "dk", "dv"), answers[OURS], answers[who], strict=True)
    }
    if not max(found.values(), default=0.0) <= BUDGET:
        raise RuntimeError(f"{name}: {found}")
    return partial(measure, name, calls, {"largest": max(found.values(), default=0.0)}, [BARS["flex"]] * 2)


def measure(name: str, calls: dict[str, tuple[Call, Call]], found: dict[str, float], bars: list[float]) -> list[Row]:
    rows = []
    for which, bar in zip((0, 1), bars, strict=True):
        times = interleave({who: pair[which] for who, pair in calls.items()})
        what = f"{name} {('forward', 'backward')[which]}"
        packed = times.pop("packed", None)
        rows.append(row(what, times, bar=bar, away=found if which == 0 else {}))
        if packed is not None:
            both_times = {OURS: times[OURS], "packed": packed}
            rows.append(row(f"{what}, beside packed", both_times, bar=BARS["packed"]))
    return rows


def prepare(name: str) -> Callable[[], list[Row]]:
    return prepare_dropout(name) if name in DROPOUT else prepare_mask(name)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # all compile side by side
    main(f"{__doc__}", "masks", prepare, [*DROPOUT, *MASKS])
