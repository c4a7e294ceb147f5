"""FlexAttention's standard mods, compiled by torch and computed by `tilewise.compat.flex_attention`.

    python bench/flex.py                        # forward and backward of the eight, in at most 95 seconds
    python bench/flex.py causal document --seconds 60 --keep

Out and gradients are compared before anything is timed; calls are interleaved, and only ratios are meant.
On a CPU it is small, forward only, and torch's side is not compiled: to see that it runs.
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
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
from torch.nn.attention.flex_attention import flex_attention as torchs

from tilewise.compat import flex_attention

BATCH, HEADS, LENGTH, DIM, WINDOW, PREFIX, DOCUMENTS, CAP = 2, 16, 8192, 128, 1024, 1024, 12, 20.0
if SMALL:
    HEADS, LENGTH, DIM, WINDOW, PREFIX = 2, 256, 16, 32, 32
DTYPE, BUDGET = (torch.float32, 1e-4) if SMALL else (torch.bfloat16, 3e-2)
BAR = 1.0
PASSES = ("forward",) if SMALL else ("forward", "backward")  # FlexAttention has no backward on a CPU


def noop(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + (q_idx - kv_idx)


def alibi(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return score + (kv_idx - q_idx) * scale


def softcap(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return CAP * torch.tanh(score / CAP)


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def prefix(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx < PREFIX


def documents() -> Any:
    ids = torch.randint(0, DOCUMENTS, (LENGTH,), device=DEVICE).sort()[0].int()

    def document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return ids[q_idx] == ids[kv_idx]

    return and_masks(document, causal)


SCORES = {"noop": noop, "relative": relative, "alibi": alibi, "softcap": softcap}
MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: causal,
    "sliding_window": lambda: window,
    "prefix_lm": lambda: or_masks(prefix, causal),
    "document": documents,
}


def words_of(name: str) -> dict[str, Any]:
    if name in SCORES:
        return {"score_mod": SCORES[name]}
    return {"block_mask": create_block_mask(MASKS[name](), None, None, LENGTH, LENGTH, device=DEVICE.type)}


def away(ours: Tensor, theirs: Tensor) -> float:
    """The distance of two answers, relative to their size."""
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def prepare(name: str) -> Callable[[], list[Row]]:
    torch.manual_seed(0)
    words = words_of(name)
    shape = (BATCH, HEADS, LENGTH, DIM)
    leaves = [torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=not SMALL) for _ in range(3)]
    grad = torch.randn_like(leaves[0])
    makes: dict[str, Callable[..., Any]] = {OURS: flex_attention, "flex": torchs}
    if not SMALL:
        torch._functorch.config.donated_buffer = False  # the backward is called again and again
        makes["flex"] = torch.compile(torchs, dynamic=False, fullgraph=True)
    calls: dict[str, tuple[Call, Call]] = {}
    answers: dict[str, list[Tensor]] = {}
    for who, make in makes.items():
        out = make(*leaves, **words)
        answers[who] = [out.detach(), *(() if SMALL else torch.autograd.grad(out, leaves, grad))]
        calls[who] = both(partial(make, *leaves, **words), leaves, grad)
        calls[who][0]()  # without gradients: another graph to compile
    found = {
        what: away(a, b) for what, a, b in zip(("out", "dq", "dk", "dv"), answers[OURS], answers["flex"], strict=False)
    }
    if not max(found.values()) <= BUDGET:
        raise RuntimeError(f"{name} disagrees with FlexAttention: {found}")

    def measure() -> list[Row]:
        rows = []
        for n, which in enumerate(PASSES):
            times = interleave({who: pair[n] for who, pair in calls.items()})
            rows.append(row(f"{name} {which}", times, bar=BAR, away=found if n == 0 else {}))
        return rows

    return measure


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # eight compile side by side
    main(f"{__doc__}\nB {BATCH}, H {HEADS}, S {LENGTH}, D {DIM}", "flex", prepare, [*SCORES, *MASKS])
