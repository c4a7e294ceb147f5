"""What a call asks for, apart from its tensors; and the one way the library says no."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

BACKENDS = ("auto", "reference", "triton", "hopper")
MAX_HEAD_DIM = 512


class AttentionError(ValueError):
    """A request that cannot be met: what was asked, what was found, what would work.

    >>> raise AttentionError("head dim of q", "640", "1 to 512")
    Traceback (most recent call last):
    ...
    tilewise.spec.AttentionError: head dim of q: found 640; expected 1 to 512
    """

    def __init__(self, what: str, found: object, expected: str) -> None:
        super().__init__(f"{what}: found {found}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Spec:
    """The scalars of a call, in the order in which the registered ops take them.

    `before` and `after` are the band: query i, which sits at key position p = i + Sk - Sq, sees the keys
    p - before .. p + after; None means unbounded. Causal is `after=0`: nothing past this point knows the word.

    >>> Spec.of(head_dim=64, causal=True)
    Spec(scale=0.125, before=None, after=0, backend='auto')
    """

    scale: float
    before: int | None = None
    after: int | None = None
    backend: str = "auto"

    SCHEMA = "float scale, SymInt? before, SymInt? after, str backend"

    @staticmethod
    def of(
        *,
        head_dim: int,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        backend: str = "auto",
    ) -> Spec:
        before, after = band(causal, window)
        if backend not in BACKENDS:
            raise AttentionError("backend", repr(backend), " or ".join(map(repr, BACKENDS)))
        if scale is None:
            scale = 1 / math.sqrt(head_dim)
        elif not math.isfinite(scale):
            raise AttentionError("scale", scale, "a finite number (zero and negative are fine)")
        return Spec(float(scale), before, after, backend)

    def args(self) -> tuple[Any, ...]:
        return self.scale, self.before, self.after, self.backend


def band(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(before, after) from the caller's words.

    >>> band(True, None), band(False, (128, 0)), band(True, (128, None))
    ((None, 0), (128, 0), (128, 0))
    """
    before: int | None
    after: int | None
    if window is None:
        before, after = None, None
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise AttentionError("window", repr(window), "(left, right), each an int >= 0 or None for unbounded")
        for name, side in zip(("left", "right"), window, strict=True):
            if side is not None and (isinstance(side, (bool, float)) or not _is_int(side)):
                raise AttentionError(f"window {name}", repr(side), "an int >= 0, or None for unbounded")
            if side is not None and side < 0:
                hint = f"{side}" + (" (flash-attn writes -1 for unbounded; here that is None)" if side == -1 else "")
                raise AttentionError(f"window {name}", hint, "an int >= 0, or None for unbounded")
        before, after = window
    return before, 0 if causal else after


def _is_int(x: object) -> bool:
    return hasattr(x, "__index__")
