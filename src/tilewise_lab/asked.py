"""What was typed, checked before any work is done: a mistake is an AttentionError, which `cli` says in one sentence.

device("cuda"), place(Path("out/page.html")), file(Path("calls.json"))
"""

from __future__ import annotations

from pathlib import Path

import torch

from tilewise.errors import AttentionError


def device(word: str | None) -> torch.device:
    """Where to run: a GPU if there is one and nothing was said, else the CPU.

    >>> device("tpu")
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: --device: found 'tpu'; expected cpu, or cuda where torch sees a GPU
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        where = torch.device(word or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        where = torch.device("meta")
    if where.type == "cpu" or (where.type == "cuda" and (where.index or 0) < gpus):
        return where
    if where.type == "cuda":
        found = f"{word!r}, where torch {torch.__version__} sees {f'{gpus} of them' if gpus else 'no GPU'}"
        raise AttentionError("--device", found, "cpu, or leave it out" if not gpus else f"cuda:0 to cuda:{gpus - 1}")
    raise AttentionError("--device", repr(word), "cpu, or cuda where torch sees a GPU")


def place(path: Path, option: str = "--out") -> Path:
    """Where a file is to be written: its folder exists."""
    if path.is_dir():
        raise AttentionError(option, f"{str(path)!r}, a folder", "a file in it")
    if not path.parent.is_dir():
        raise AttentionError(
            option, f"{str(path)!r}, whose folder does not exist", f"a folder that exists: mkdir -p {path.parent}"
        )
    return path


def folder(path: Path, marker: str, option: str = "--out") -> Path:
    """A folder to be emptied and written, made here to know at once whether that works. One that is not empty must have
    `marker` in it, a file that is always written."""
    if path.exists() and not path.is_dir():
        raise AttentionError(option, f"{str(path)!r}, a file", "a folder")
    if path.suffix in (".html", ".htm"):
        found = f"{str(path)!r}, the name of a page"
        raise AttentionError(option, found, f"the folder of the pages, for example {option} {path.with_suffix('')}")
    if path.exists() and any(path.iterdir()) and not (path / marker).exists():
        found = f"{str(path)!r}, a folder with other files"
        raise AttentionError(option, found, "a new or an empty folder, or one to be written again: it is emptied first")
    path.mkdir(parents=True, exist_ok=True)
    return path


def file(path: Path, what: str) -> Path:
    """A file to be read, that exists."""
    if not path.is_file():
        raise AttentionError(
            what, f"{str(path)!r}, {'a folder' if path.exists() else 'which does not exist'}", "a file"
        )
    return path


def count(name: str, n: int, most: int | None = None, why: str = "") -> int:
    """A number that was typed, from 1 to the most."""
    if n < 1 or (most is not None and n > most):
        raise AttentionError(name, n, f"1 to {most}{why}" if most is not None else "1 or more")
    return n
