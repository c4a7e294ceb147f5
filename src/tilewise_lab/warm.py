"""`tilewise warm`: compile a model's kernels ahead, on any machine, for the GPU it will run on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from tilewise.errors import AttentionError
from tilewise.warmup import warmup
from tilewise_lab.progress import progress

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the config.json of a Hugging Face model: says all the rest")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[], metavar="D")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="as many as --heads, unless given")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--full", action="store_true", help="every query sees every key (causal, unless given)")
    parser.add_argument("--window", type=int, metavar="N", help="keys that a query sees to its left")
    parser.add_argument("--softcap", type=float)
    for name in ("sinks", "bias", "alibi-slopes", "packed", "deterministic"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no-backward", action="store_true", help="for serving: forwards alone")
    parser.add_argument("--gpu", metavar="ARCH", help="sm_90, sm_100, gfx942, ...; the one that is here, unless given")
    parser.add_argument("--workers", type=int, help="processes; one for each core, unless given")


def run(options: argparse.Namespace) -> int:
    words: dict[str, Any] = {"causal": not options.full}
    if options.window is not None:
        words["window"] = (options.window, 0)
    words |= {name: value for name in ("softcap",) if (value := getattr(options, name)) is not None}
    words |= {name: True for name in ("sinks", "bias", "alibi_slopes", "deterministic") if getattr(options, name)}
    if options.gpu is None and not torch.cuda.is_available():
        raise AttentionError("--gpu", "none, and no GPU here", "the one that the model will run on: --gpu sm_90")
    began = time.monotonic()
    with progress(every=0) as show:
        found = warmup(
            options.head_dim, heads=options.heads, kv_heads=options.kv_heads, packed=options.packed,
            dtype=[DTYPES[name] for name in options.dtype], backward=not options.no_backward, gpu=options.gpu,
            config=options.config, workers=options.workers, progress=lambda done, of, name: show(name, done, of),
            **words,
        )  # fmt: skip
    if not found.kernels:
        raise AttentionError("--gpu", f"{options.gpu!r}, for which no kernel takes such a call", "sm_80 or newer")
    seconds = time.monotonic() - began
    there = f", {found.kernels - found.compiled} were there" if found.compiled < found.kernels else ""
    print(f"{found.compiled} kernels compiled{there} ({seconds:.0f} s)")
    return 0
