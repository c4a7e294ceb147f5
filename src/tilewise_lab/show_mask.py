"""`tilewise show-mask`: a picture of a mask and of its tiles, empty, partial and full; or of a score mod."""

from __future__ import annotations

import runpy
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import Any

import torch

from tilewise import mods
from tilewise.errors import AttentionError
from tilewise.mods.modifier import Modifier
from tilewise_lab import asked, picture

EXAMPLES: dict[str, tuple[float, ...]] = {
    "causal": (),
    "document": (200, 56, 300, 468),
    "prefix_lm": (300,),
    "prefix_tree": (-1, 384, 0, 256, 1, 128, 0, 128, 0, 128),
    "window_with_globals": (96, 32),
    "dilated_window": (24, 8),
    "neighbourhood_2d": (32, 3),
    "block_diagonal": (256,),
    "strided_sparse": (64,),
    "softcap": (20.0,),
    "alibi": (0.0625,),
    "t5_relative": (32, 128),
}


@mods.mask_mod
def causal(b, h, q_idx, kv_idx, *, q_pos):  # type: ignore[no-untyped-def]
    return kv_idx <= q_pos


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("mod", help=f"{', '.join(EXAMPLES)}, or FILE.py:NAME of a mask or score mod of yours")
    parser.add_argument(
        "numbers", nargs="*", type=number,
        help="its arguments; for document, the documents' lengths; for prefix_tree, the parent and length"
        " of each segment; for alibi, the slopes of the heads; for t5_relative,"
        " buckets and the largest distance",
    )  # fmt: skip
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--keys", type=int, help="(default: as many as queries)")
    parser.add_argument("--block", type=int, default=128, help="tokens along a tile (default: %(default)s)")
    parser.add_argument("--head", type=int, default=0, help="whose scores (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a .png or .html (default: a new .png among the temporary files)")


def number(text: str) -> int | float:
    """
    >>> number("3"), number("0.5")
    (3, 0.5)
    """
    return int(text) if text.lstrip("-").isdigit() else float(text)


def run(options: Namespace) -> int:
    keys = options.queries if options.keys is None else options.keys
    drawn: mods.BlockMask | picture.Heat
    out = options.out or Path(tempfile.mkdtemp(prefix="tilewise-"), "mask.png")
    asked.place(out)
    for name, n in ("--queries", options.queries), ("--keys", keys), ("--block", options.block):
        asked.count(name, n, 1 << 15, "; more do not fit into a picture")
    mod = mod_named(options.mod, options.numbers, options.queries)
    if mod.kind == "score":
        drawn = picture.heat(mod, options.queries, keys, h=options.head)
    else:
        drawn = mods.block_mask(mod, options.queries, keys, block=(options.block, options.block))
    file, words = picture.draw(drawn)
    if out.suffix == ".html":
        out.write_text(picture.html(drawn), encoding="utf-8")
    else:
        out.write_bytes(file)
    print(f"{words}\n{out}")
    return 0


def mod_named(name: str, numbers: list[int | float], tokens: int) -> mods.Mod:
    """A mod by its name, with the arguments of its example unless given.

    >>> mod_named("causal", [], 4).name
    'causal'
    """
    file, _, function = name.rpartition(":")
    if file:
        return _own(_names_in(Path(file)).get(function), f"{function!r} in {file}", numbers)
    if name not in EXAMPLES:
        raise AttentionError("mod", repr(name), f"{', '.join(EXAMPLES)}, or FILE.py:NAME")
    arguments: list[Any] = numbers or list(EXAMPLES[name])
    make: Any = causal if name == "causal" else getattr(mods, name)
    match name:
        case "document":
            bound = make(cu_seqlens=torch.tensor([0, *arguments]).cumsum(0), tokens=tokens)
        case "prefix_lm":
            bound = make(torch.tensor(arguments))
        case "prefix_tree":
            lengths = torch.tensor([0, *arguments[1::2]])
            bound = make(torch.tensor(arguments[::2]), lengths.cumsum(0))
        case "alibi":
            bound = make(torch.tensor(arguments, dtype=torch.float32))
        case "t5_relative":
            buckets, reach = map(int, arguments)
            bound = make(torch.linspace(-1, 1, buckets)[:, None], max_distance=reach)
        case "softcap":
            bound = make(float(arguments[0]))
        case _:
            bound = make(*arguments)
    result: mods.Mod = bound
    return result


def _names_in(file: Path) -> dict[str, Any]:
    """The names that a Python file defines."""
    if asked.file(file, "mod").suffix != ".py":
        raise AttentionError("mod", f"{str(file)!r}", "a Python file, as FILE.py:NAME")
    try:
        return runpy.run_path(str(file))
    except AttentionError:
        raise
    except Exception as error:  # of a file of the user's: any
        line = error.lineno if isinstance(error, SyntaxError) else _line_in(file, error)
        raise AttentionError(
            f"line {line} of {file}", f"{type(error).__name__}: {getattr(error, 'msg', error)}", "a file that runs"
        ) from error


def _line_in(file: Path, error: Exception) -> int | None:
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    return lines[-1] if lines else None


def _own(found: Any, where: str, numbers: list[int | float]) -> mods.Mod:
    """The mod of a value that was named: a mod, a decorated function, or a plain one, which is decorated here."""
    if isinstance(found, mods.Mod):
        return found
    if isinstance(found, FunctionType):
        count = found.__code__.co_argcount  # a score mod has one parameter more, usually called score
        is_score = found.__code__.co_varnames[:1] == ("score",) or count == 5 + len(numbers)
        found = mods.score_mod(found) if is_score else mods.mask_mod(found)
    if not isinstance(found, Modifier):
        kind = type(found).__name__
        told = "nothing of that name" if found is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        raise AttentionError(
            where, told, "a function of (b, h, q_idx, kv_idx, ...) or (score, b, h, q_idx, kv_idx, ...)"
        )
    mod: mods.Mod = found(*numbers)
    return mod
