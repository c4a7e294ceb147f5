"""FlexAttention's standard mods, compiled by torch and computed by `tilewise.compat.flex_attention`.

    python bench/flex.py                        # forward and backward of the eight, about two minutes
    python bench/flex.py causal document --out flex.json

Each answer is compared before it is timed; calls are interleaved, and only ratios are meant.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from features import agree, both, interleave
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
from torch.nn.attention.flex_attention import flex_attention as torchs

from tilewise.compat import flex_attention

BATCH, HEADS, LENGTH, DIM, WINDOW, PREFIX, DOCUMENTS, CAP = 2, 16, 8192, 128, 1024, 1024, 12, 20.0


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


def documents(ids: Tensor) -> Any:
    def document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return ids[q_idx] == ids[kv_idx]

    return and_masks(document, causal)


def cases(device: str) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    ids = torch.randint(0, DOCUMENTS, (LENGTH,), device=device).sort()[0].int()
    masks = {
        "causal": causal,
        "sliding_window": window,
        "prefix_lm": or_masks(prefix, causal),
        "document": documents(ids),
    }
    made = {
        name: {"block_mask": create_block_mask(mod, None, None, LENGTH, LENGTH, device=device)}
        for name, mod in masks.items()
    }
    scores = {"noop": noop, "relative": relative, "alibi": alibi, "softcap": softcap}
    return {name: {"score_mod": mod} for name, mod in scores.items()} | made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which mods; all if none is named")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out, "flex.json") if out else None, help="a file to write")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one function, many mods
    compiled = torch.compile(torchs, dynamic=False)
    leaves = [
        torch.randn(BATCH, HEADS, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    ]
    grad = torch.randn_like(leaves[0])
    rows: list[dict[str, Any]] = []
    for name, words in cases("cuda").items():
        if args.names and name not in args.names:
            continue
        with torch.no_grad():
            agree(name, flex_attention(*leaves, **words), compiled(*leaves, **words), 3e-2)
        ours = both(lambda words=words: flex_attention(*leaves, **words), leaves, grad)
        theirs = both(lambda words=words: compiled(*leaves, **words), leaves, grad)
        for which, pair in zip(("forward", "backward"), zip(ours, theirs, strict=True), strict=True):
            times = interleave(dict(zip(("tilewise", "flex"), pair, strict=True)))
            rows.append({"mod": name, "pass": which, **times, "ratio": times["flex"] / times["tilewise"]})
            print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        sizes = {"batch": BATCH, "heads": HEADS, "length": LENGTH, "dim": DIM, "machine": torch.cuda.get_device_name()}
        args.out.write_text(json.dumps({**sizes, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
