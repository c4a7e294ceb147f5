"""What a call asks for, apart from its tensors; and the one way the library says no."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

BACKENDS = ("auto", "reference", "triton", "hopper")
MAX_HEAD_DIM = 512
LIMIT = 4096  # calls that are remembered, so that the next one like it costs less: a new length may bring new strides


class AttentionError(ValueError):
    """A request that cannot be met: what was asked, what was found, what would work.

    >>> raise AttentionError("head dim of q", "640", "1 to 512")
    Traceback (most recent call last):
    ...
    tilewise.spec.AttentionError: head dim of q: found 640; expected 1 to 512
    """

    def __init__(self, what: str, found: object, expected: str) -> None:
        self.args = what, found, expected  # so that it can be pickled, and raised while torch.compile traces

    def __str__(self) -> str:
        return "{}: found {}; expected {}".format(*self.args)


@dataclass(frozen=True, slots=True)
class Spec:
    """The scalars of a call, in the order in which the registered ops take them.

    `before` and `after` are the band: query i, which sits at key position p = i + Sk - Sq, sees the keys
    p - before .. p + after; None means unbounded. Causal is `after=0`: nothing past this point knows the word.

    `score_mod` and `mask_mod` are keys of programs (see mods), each with its floats.

    >>> spec = Spec.of(head_dim=64, causal=True)
    >>> spec.scale, spec.before, spec.after
    (0.125, None, 0)
    """

    scale: float
    before: int | None = None
    after: int | None = None
    backend: str = "auto"
    score_mod: str | None = None
    score_numbers: tuple[float, ...] = ()
    mask_mod: str | None = None
    mask_numbers: tuple[float, ...] = ()
    dropout_p: float = 0.0
    mask_block: tuple[int, ...] = ()  # of a block mask: queries and keys of a tile, batch rows and heads (or 1)
    deterministic: bool = False  # the gradients are the same bits in every run

    @staticmethod
    def of(
        *,
        head_dim: int,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        backend: str = "auto",
        **terms: Any,
    ) -> Spec:
        before, after = band(causal, window)
        if backend not in BACKENDS:
            raise AttentionError("backend", repr(backend), " or ".join(map(repr, BACKENDS)))
        if scale is None:
            scale = 1 / math.sqrt(head_dim)
        elif not math.isfinite(scale):
            raise AttentionError("scale", scale, "a finite number (zero and negative are fine)")
        return Spec(float(scale), before, after, backend, **terms)

    @staticmethod
    def from_args(args: Any) -> Spec:
        return _spec_of(*(tuple(a) if isinstance(a, list) else a for a in args))

    def args(self) -> tuple[Any, ...]:
        return (
            self.scale, self.before, self.after, self.backend, self.score_mod, list(self.score_numbers),
            self.mask_mod, list(self.mask_numbers), self.dropout_p, list(self.mask_block),
            self.deterministic,
        )  # fmt: skip


@lru_cache(LIMIT)
def _spec_of(*args: Any) -> Spec:
    return Spec(*args)


# in the order of Spec's fields
SPEC_SCHEMA = (
    "float scale, SymInt? before, SymInt? after, str backend, str? score_mod, float[] score_numbers, str? mask_mod,"
    " float[] mask_numbers, float dropout_p, int[] mask_block, bool deterministic"
)


class Terms(NamedTuple):
    """The tensors of a call beside q, k and v, all optional.

    bias (B, H, Sq, Sk), each axis possibly 1; sinks (H,); seed, one int64; the tensors that the two mods read; a block
    mask's tile lists.
    """

    bias: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    score: tuple[Tensor, ...] = ()
    mask: tuple[Tensor, ...] = ()
    blocks: tuple[Tensor, ...] = ()

    def is_empty(self, spec: Spec) -> bool:
        """Nothing but q, k, v and the band."""
        return all(x is None for x in (self.bias, self.sinks, self.seed, spec.score_mod, spec.mask_mod))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.sinks, self.seed, *self.score, *self.mask, *self.blocks


NO_TERMS = Terms()
TERMS_SCHEMA = "Tensor? bias, Tensor? sinks, Tensor? seed, Tensor[] score, Tensor[] mask, Tensor[] blocks"


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


def heads_are_queries(n_q: int, group: int, before: int | None) -> bool:
    """Whether the heads of a group, of one query each, are taken for the queries of one head, so that the keys which
    they share are read once: each must see all keys.

    >>> heads_are_queries(1, 8, None), heads_are_queries(1, 8, 128), heads_are_queries(2, 8, None)
    (True, False, False)
    """
    return n_q == 1 and group > 1 and before is None


def _is_int(x: object) -> bool:
    return isinstance(x, int) or hasattr(x, "__index__")  # torch.compile knows the first of its symbols only


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a choice of kernels and its compilation depend on; and which tensors are one, q and k say, whose places a
    recorded launch could not tell apart.
    """
    seen: dict[int, int] = {}
    found: list[Any] = []
    for n, x in enumerate(tensors):
        if x is None:
            found.append(None)
        else:
            same = seen.setdefault(id(x), n)
            found += same, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16
    return tuple(found)
