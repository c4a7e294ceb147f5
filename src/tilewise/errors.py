"""The one exception type of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING


class AttentionError(ValueError):
    """A call that cannot run. The message says what is wrong, what was found and what is accepted.

    >>> raise AttentionError("head dim of q", "640", "1 to 512")
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: head dim of q: found 640; expected 1 to 512
    """

    if TYPE_CHECKING:  # BaseException stores the arguments as args; torch 2.10 and 2.11 lose them in a traced __init__

        def __init__(self, what: str, found: object, expected: str) -> None: ...

    def __str__(self) -> str:
        return "{}: found {}; expected {}".format(*self.args)
