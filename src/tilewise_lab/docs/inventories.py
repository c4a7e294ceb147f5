"""What names of Python and torch link to. Kept in the repository as text, so that no build needs a network.

A line has the name, its role and its page: "torch.Tensor py:class tensors.html". Sphinx reads a compressed form.
"""

from __future__ import annotations

import zlib
from pathlib import Path

URLS = {"python": "https://docs.python.org/3/", "torch": "https://docs.pytorch.org/docs/stable/"}


def mapping(folder: Path) -> dict[str, tuple[str, str]]:
    """intersphinx_mapping for the inventories of a folder, which are compressed beside their texts."""
    found = {}
    for name, url in URLS.items():
        path = folder / f"{name}.inv"
        path.write_bytes(compressed(name, (folder / f"{name}.txt").read_text(encoding="utf-8")))
        found[name] = (url, str(path))
    return found


def compressed(project: str, text: str) -> bytes:
    """
    >>> head, _, rest = compressed("torch", "torch.Tensor py:class tensors.html").rpartition(b"zlib.\\n")
    >>> zlib.decompress(rest)
    b'torch.Tensor py:class 1 tensors.html#$ -\\n'
    """
    lines = (line.split() for line in text.splitlines())
    entries = "".join(f"{name} {role} 1 {page}#$ -\n" for name, role, page in lines)
    head = (
        "Sphinx inventory version 2",
        f"Project: {project}",
        "Version: ",
        "The rest of this file is compressed with zlib.",
    )
    return "".join(f"# {line}\n" for line in head).encode() + zlib.compress(entries.encode())
