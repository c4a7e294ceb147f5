"""`tilewise explain`: what a call costs on any device, and what would make it faster.

tilewise explain 4 4096 16 128 --causal --device H200
tilewise explain 1 2049 16 100 --device A100 --backward --json
tilewise explain 4 4096 16 128 --device H200 --softcap 30 --alibi
tilewise explain 4 1 32 128 --hk 8 --kv-lengths 4096 900 17 30000 --page 16 --device H200 --backend triton
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

from tilewise_lab.costs.devices import DEVICES, ITEMSIZE


def configure(parser: ArgumentParser) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("shape", nargs="*", type=int, metavar="B S H D", help="of q (default: 4 4096 16 128)")
    parser.add_argument("--sk", type=int, help="keys, where they are not as many as queries")
    parser.add_argument("--hk", type=int, help="KV heads, where they are fewer")
    parser.add_argument("--dv", type=int, help="head dim of v, where it differs")
    parser.add_argument(
        "--kv-lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens in a KV cache, one for all sequences or one for each",
    )
    parser.add_argument("--page", type=int, help="tokens of a page, where the KV cache has pages")
    parser.add_argument("--split", type=int, help="keys of a KV cache summed at a time (0: never divided)")
    parser.add_argument("--dtype", default="bfloat16", choices=ITEMSIZE)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window", type=side, nargs=2, metavar=("LEFT", "RIGHT"), help="keys seen to each side, or 'all'"
    )
    parser.add_argument("--softcap", type=float, metavar="CAP")
    parser.add_argument("--alibi", action="store_true", help="slopes, one for each head")
    parser.add_argument("--bias", action="store_true", help="a bias for each head and pair")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--backward", action="store_true", help="count the backward too")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--device", help=f"{', '.join(DEVICES)}, cuda or cpu (default: what is here)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not ask the compiler for registers and shared memory"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--kernel", action="store_true", help="what the compiler makes of the forward kernel, stage by stage"
    )


def side(word: str) -> int | None:
    return None if word == "all" else int(word)


def run(options: Namespace) -> int:
    import torch

    from tilewise.errors import AttentionError
    from tilewise_lab import asked
    from tilewise_lab.costs.explain import explain

    shape = options.shape or [4, 4096, 16, 128]
    if len(shape) != 4 or min(shape) < 1:
        raise AttentionError("shape", " ".join(map(str, shape)), "B S H D, each 1 or more, for example 4 4096 16 128")
    b, s, h, d = shape
    if options.kernel:
        return show_kernel(options, shape)
    if options.kv_lengths:
        told_kv = of_cache(options, shape)
        print(json.dumps(told_kv.to_dict(), indent=1) if options.json else told_kv)
        return 0
    keys = b, s if options.sk is None else options.sk, h if options.hk is None else options.hk
    for name, n in ("--sk", keys[1]), ("--hk", keys[2]), ("--dv", d if options.dv is None else options.dv):
        asked.count(name, n)
    told = explain(
        shape,
        (*keys, d),
        (*keys, options.dv or d),
        causal=options.causal,
        window=options.window and tuple(options.window),
        softcap=options.softcap,
        alibi_slopes=torch.empty(h, device="meta") if options.alibi else None,
        bias=torch.empty(1, h, s, keys[1], dtype=getattr(torch, options.dtype), device="meta")
        if options.bias
        else None,
        dropout_p=options.dropout,
        deterministic=options.deterministic,
        backend=options.backend,
        backward=options.backward,
        device=options.device,
        dtype=options.dtype,
        compiled=not options.no_compile,
    )
    print(json.dumps(told.to_dict(), indent=1) if options.json else told)
    return 0


def of_cache(options: Namespace, shape: list[int]) -> Any:
    """S queries of each sequence, over a cache that has just room for the longest."""
    import torch

    from tilewise.errors import AttentionError
    from tilewise_lab.costs.kv import explain_kv

    b, _, h, d = shape
    lengths = options.kv_lengths * b if len(options.kv_lengths) == 1 else options.kv_lengths
    if len(lengths) != b:
        raise AttentionError("--kv-lengths", f"{len(lengths)} numbers", f"1, or {b}: one for each sequence")
    if options.page is not None and options.page < 1:
        raise AttentionError("--page", options.page, "1 or more")
    page = options.page or max(*lengths, 1)
    pages = -(-max(lengths) // page)
    table = {"page_table": torch.zeros(b, pages, dtype=torch.int32)} if options.page else {}
    cache = (b * max(pages, 1), page, options.hk or h)
    return explain_kv(
        shape, (*cache, d), (*cache, options.dv or d), lengths, window=options.window and tuple(options.window),
        split=options.split, backend=options.backend, device=options.device, dtype=options.dtype, **table,
    )  # fmt: skip


def show_kernel(options: Namespace, shape: list[int]) -> int:
    import torch

    from tilewise.request import Request, Spec, has_triton
    from tilewise_lab.costs.devices import device
    from tilewise_lab.costs.explain import compile_kernels
    from tilewise_lab.explain import stages

    if not has_triton():
        print("tilewise explain --kernel needs Triton, and none is here")
        return 2
    where = device(options.device or "H200")
    q = torch.empty(shape, dtype=getattr(torch, options.dtype), device="meta")
    request = Request(q, q, q, Spec.of(head_dim=shape[-1], causal=options.causal, backend="triton"))
    for name, made in compile_kernels(request, where, options.backward):
        print(f"{name}, sm_{where.capability}\n{stages.text(made)}\n")
    return 0
