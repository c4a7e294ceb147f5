"""The one exception type of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor


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


def shown(value: Any) -> str:
    """A value in an error message: of a tensor its shape and dtype, of anything else its repr, at most 200 characters.

    >>> import torch
    >>> shown((torch.zeros(2, 3), 0)), shown("fp4")
    ('(a tensor (2, 3) of torch.float32, 0)', "'fp4'")
    """
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if type(value) in (tuple, list) and any(isinstance(x, Tensor) for x in value):
        return f"({', '.join(map(shown, value))})"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
