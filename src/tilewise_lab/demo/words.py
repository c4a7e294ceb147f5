"""Numbers as people say them."""

from __future__ import annotations

NOTHING = "out of memory"


def binary(size: float | None) -> str:
    """
    >>> binary(1536), binary(33 * 2**20), binary(None)
    ('1.5 KiB', '33 MiB', 'out of memory')
    """
    if size is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{three_digits(size)} {unit}"
        size /= 1024
    return f"{three_digits(size)} GiB"


def duration(seconds: float | None) -> str:
    """
    >>> duration(2.5), duration(0.0123), duration(4e-5)
    ('2.5 s', '12.3 ms', '40 µs')
    """
    if seconds is None:
        return NOTHING
    for unit, size in ("s", 1.0), ("ms", 1e-3):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-6)} µs"


def ratio(x: float) -> str:
    """
    >>> ratio(1.25), ratio(0.0001)
    ('1.25', '< 0.01')
    """
    return f"{x:.2f}" if x >= 0.01 else "< 0.01"


def tokens(length: int) -> str:
    """
    >>> tokens(512), tokens(4096)
    ('512', '4k')
    """
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def three_digits(x: float) -> str:
    """
    >>> three_digits(0.123456), three_digits(12.0), three_digits(1234.5)
    ('0.123', '12', '1234')
    """
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
