"""Which versions of another library an adapter was tested with."""

from __future__ import annotations

import re
import warnings
from functools import cache

Version = tuple[int, ...]


@cache  # so that it warns once
def check_version(name: str, found: str, first: Version, last: Version) -> None:
    """Warn where a library is older or newer than those that an adapter was tested with; it then works, or raises.

    >>> check_version("vllm", "0.23.1rc1", (0, 23), (0, 32))
    """
    here = version(str(found), len(first))
    if here and not first <= here <= last:  # () for a module without a version, such as the stubs of the docs
        one, other = (".".join(map(str, v)) for v in (first, last))
        known = one if first == last else f"{one} to {other}"
        warnings.warn(f"tilewise was tested with {name} {known}; this is {found}", stacklevel=3)


def version(text: str, parts: int = 2) -> Version:
    """
    >>> version("2.11.0+cu130"), version("0.0.35.post1", 3)
    ((2, 11), (0, 0, 35))
    """
    return tuple(map(int, re.findall(r"\d+", text)[:parts]))
