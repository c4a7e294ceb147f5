"""`tilewise show-mask`: a picture of a mask and of its tiles, empty, partial and full."""

from __future__ import annotations

import runpy
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from tilewise import mods
from tilewise.mods import picture
from tilewise.spec import AttentionError

EXAMPLES = {
    "causal": (),
    "document": (200, 56, 300, 468),
    "prefix_lm": (300,),
    "window_with_globals": (96, 32),
    "dilated_window": (24, 8),
    "neighbourhood_2d": (32, 3),
    "block_diagonal": (256,),
    "strided_sparse": (64,),
}


@mods.mask_mod
def causal(b, h, q_idx, kv_idx, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx + (kv_len - q_len)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("mask", help=f"{', '.join(EXAMPLES)}, or FILE.py:NAME of a mask mod of yours")
    parser.add_argument("numbers", nargs="*", type=int, help="its arguments; for document, the documents' lengths")
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--keys", type=int, help="(default: as many as queries)")
    parser.add_argument("--block", type=int, default=128, help="tokens along a tile (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("mask.png"), help="a .png or .html (default: %(default)s)")


def run(options: Namespace) -> int:
    try:
        mod = mask_named(options.mask, options.numbers, options.queries)
        block = (options.block, options.block)
        mask = mods.block_mask(mod, options.queries, options.keys or options.queries, block=block)
    except AttentionError as error:
        print(error)
        return 2
    if options.out.suffix == ".html":
        options.out.write_text(picture.html(mask), encoding="utf-8")
    else:
        options.out.write_bytes(picture.png(picture.picture(mask)))
    print(f"{picture.summary(mask)}\n{options.out}")
    return 0


def mask_named(name: str, numbers: list[int], tokens: int) -> mods.Mod:
    """A mask mod by its name, with the arguments of its example unless given.

    >>> mask_named("causal", [], 4).program.name
    'causal'
    """
    file, _, function = name.rpartition(":")
    if file:
        found = runpy.run_path(file).get(function)
        if found is None:
            raise AttentionError(f"a mask mod in {file}", f"no {function!r}", "a function decorated with mask_mod")
        mod: mods.Mod = found(*numbers) if callable(getattr(found, "function", None)) else found
        return mod
    if name not in EXAMPLES:
        raise AttentionError("mask", repr(name), f"{', '.join(EXAMPLES)}, or FILE.py:NAME")
    arguments = numbers or list(EXAMPLES[name])
    if name == "document":
        ends = torch.tensor([0, *arguments]).cumsum(0)
        return mods.document(cu_seqlens=ends, tokens=tokens)
    if name == "prefix_lm":
        return mods.prefix_lm(torch.tensor(arguments))
    bound: mods.Mod = (causal if name == "causal" else getattr(mods, name))(*arguments)
    return bound
