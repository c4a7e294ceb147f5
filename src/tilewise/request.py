"""What a backend is given: the checked request of a call, which is its tensors and its scalars (`Spec`), and the kind
of GPU that it is for."""

from __future__ import annotations

import math
from ast import literal_eval
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from . import settings
from .errors import AttentionError, shown
from .torch_internals import constant

MAX_HEAD_DIM = 512
LIMIT = 4096  # entries of an lru_cache by shapes or options
TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))  # types of tensors that are no subclass with its own behaviour
FAR = 2**30  # a window of this size is unbounded: no sequence is longer, and 32 bits hold sums of positions


class Spec(NamedTuple):
    """The scalars of a call, as the registered ops take them too (`SCHEMA`).

    `before` and `after` are the band: query i, which sits at key position p = i + Sk - Sq, sees the keys
    p - before .. p + after; None means unbounded. Causal is `after=0`.

    `score_mod` and `mask_mod` are keys of programs (see mods), each with its floats and how many tensors it reads.

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
    score_tensors: int = 0
    mask_mod: str | None = None
    mask_numbers: tuple[float, ...] = ()
    mask_tensors: int = 0
    mask_block: tuple[int, ...] = ()  # of a block mask: queries and keys of a tile, batch size and heads (or 1)
    dropout_p: float = 0.0
    deterministic: bool = False  # the gradients are the same bits in every run
    max_seqlen: int | None = None  # bounds the lengths of packed sequences; for the gradients of tables
    partial: bool = False  # out and the gradients of q, k, v are parts of a sum: returned in float32
    max_logit: bool = False  # the largest score of each head is returned too
    precision: str | None = None  # "fp8": q, k and v are quantised first; forward only
    # Tokens are a grid whose rows of the mask and of lse are counted box by box: lengths of its slow and fast axes,
    # tokens between neighbours along them, and the fast axis' tokens of boxes of queries and of keys. Hopper's forward.
    token_boxes: tuple[int, ...] = ()

    @staticmethod
    def of(
        *,
        head_dim: int,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        backend: str = "auto",
        **others: Any,
    ) -> Spec:
        """The spec of options as `attention` takes them."""
        before, after = band(causal, window)
        if scale is None:
            scale = 1 / math.sqrt(head_dim)
        elif not -math.inf < scale < math.inf:
            raise AttentionError("scale", scale, "a finite number (zero and negative are fine)")
        return Spec(float(scale), before, after, backend, **others)

    def is_linear(self, has_bias: bool) -> bool:
        """Whether the score is q.k times a positive factor, which kernels multiply in the exponent of the softmax."""
        return self.scale > 0 and self.score_mod is None and not has_bias


def num_differentiable(spec: Spec) -> int:
    """The number of tensors that may have gradients. They are the first ones of `Request.tensors()`: q, k, v, bias,
    sinks and the tensors of the score mod.

    This is a function because torch.compile of torch 2.10 does not support properties of a NamedTuple.
    """
    return 5 + spec.score_tensors


class Request(NamedTuple):
    """A checked call (`validation`), as backends receive it.

    Attributes:
        q, k, v: (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv); packed (T, H, D) with cu_q and cu_k.
        spec: the scalars.
        bias: (B, H, Sq, Sk), each axis possibly 1.
        sinks: (H,).
        score: the tensors of the score mod.
        cu_q, cu_k: int32 (B + 1,): offsets of packed sequences.
        seed: seed of dropout, one int64.
        mask: the tensors of the mask mod.
        blocks: the tile lists of a block mask; and, if they are known, its bits on Hopper for forward and backward.
        position_offsets: int32 (B, 7), for a call that is a part of a larger one: see `POSITION_OFFSETS`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: Spec
    bias: Tensor | None = None
    sinks: Tensor | None = None
    score: tuple[Tensor, ...] = ()
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    seed: Tensor | None = None
    mask: tuple[Tensor, ...] = ()
    blocks: tuple[Tensor, ...] = ()
    position_offsets: Tensor | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of out, and of the gradients of q, k and v."""
        dtype = self.q.dtype
        return torch.promote_types(dtype, torch.float32) if self.spec.partial else dtype

    @property
    def is_plain(self) -> bool:
        """Whether the call has no bias, sinks, mods or dropout."""
        spec = self.spec
        return self.bias is self.sinks is self.seed is None and spec.score_mod is spec.mask_mod is None

    @property
    def is_masked(self) -> bool:
        """Whether a band or a mask mod may hide keys."""
        spec = self.spec
        return not (spec.before is spec.after is None and spec.mask_mod is None)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in one tuple, those with a gradient first; None for an absent one, but not at the end."""
        _, _, _, _, bias, sinks, score, cu_q, cu_k, seed, mask, blocks, position_offsets = self
        if bias is sinks is cu_q is seed is position_offsets is None and not score and not mask and not blocks:
            return self.q, self.k, self.v
        found = [self.q, self.k, self.v, bias, sinks, *score, cu_q, cu_k, seed, position_offsets, *mask, *blocks]
        while found[-1] is None:
            found.pop()
        return tuple(found)

    def on_meta(self) -> Request:
        """The same request with meta tensors, for offline compilation."""

        def like(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        return Request.of(self.spec, [like(x) for x in self.tensors()])

    @staticmethod
    def of(spec: Spec, tensors: Any) -> Request:
        """The reverse of `tensors`.

        >>> q, cu, slopes = Tensor(4, 1, 8), Tensor(2), Tensor(1)
        >>> spec = Spec(1.0, score_mod="alibi", score_tensors=1)
        >>> call = Request(q, q, q, spec, score=(slopes,), cu_q=cu, cu_k=cu)
        >>> again = Request.of(call.spec, call.tensors())
        >>> all(a is b for a, b in zip(again.tensors(), call.tensors()))
        True
        """
        if len(tensors) == 3:
            q, k, v = tensors
            return Request(q, k, v, spec)
        n, m = spec.score_tensors, spec.mask_tensors
        every: list[Any] = [*tensors, *[None] * (9 + n - len(tensors))]
        q, k, v, bias, sinks, *rest = every
        cu_q, cu_k, seed, position_offsets, *others = rest[n:]
        mask, blocks = tuple(others[:m]), tuple(others[m:])
        return Request(q, k, v, spec, bias, sinks, tuple(rest[:n]), cu_q, cu_k, seed, mask, blocks, position_offsets)


class BackwardInputs(NamedTuple):
    """The inputs of a backward: out and lse of the forward, and their gradients (dlse None: zero)."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


# The columns of `Request.position_offsets`, which mods and dropout use; the band and the bias count within the call. A
# row is a batch row or packed sequence: b is its number in the larger call, h_0 is added to the head, query i is
# i_0 + step * i, key j is j_0 + step * j, and n_q and n_k are the lengths in the larger call.
POSITION_OFFSETS = ("b", "h_0", "i_0", "j_0", "step", "n_q", "n_k")
Window = tuple[int | None, int | None]
_KINDS: dict[Any, str] = {float: "float", int | None: "SymInt?", tuple[float, ...]: "float[]"}
# Numbers that may be symbols under torch.compile are arguments of the ops. The other fields of a Spec are one string:
# each argument costs a call a microsecond.
_hints = get_type_hints(Spec)
_NUMBERS = tuple(name for name in Spec._fields if _hints[name] in _KINDS)
_OTHERS = tuple(name for name in Spec._fields if name not in _NUMBERS)
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor?[] others, "
    + "".join(f"{_KINDS[_hints[name]]} {name}, " for name in _NUMBERS)
    + "str options"
)
_in_order = itemgetter(*[(*_NUMBERS, *_OTHERS).index(name) for name in Spec._fields])
ARGUMENTS = 4 + len(_NUMBERS) + 1


def arguments(request: Request) -> tuple[Any, ...]:
    """A request as the ops take it, by `SCHEMA`."""
    tensors = request.tensors()
    others = list(tensors[3:])  # not `*others`: torch 2.10 and 2.11 trace that as a tuple
    spec = request.spec
    numbers = (getattr(spec, name) for name in _NUMBERS)
    options = _to_text(*(getattr(spec, name) for name in _OTHERS))
    return *tensors[:3], others, *(list(x) if isinstance(x, tuple) else x for x in numbers), options


@constant
def _to_text(*options: Any) -> str:
    return repr(options)


def request_from_arguments(q: Tensor, k: Tensor, v: Tensor, others: Any, *scalars: Any) -> Request:
    """The reverse of `arguments`."""
    spec = spec_of(scalars)
    return Request.of(spec, (q, k, v, *(others or ())))


def spec_of(scalars: Any) -> Spec:
    """The spec of an op's arguments after its tensors."""
    *numbers, options = [tuple(x) if isinstance(x, (list, tuple)) else x for x in scalars]
    return Spec._make(_in_order((*numbers, *_from_text(options))))


@lru_cache(LIMIT)
def _from_text(options: str) -> tuple[Any, ...]:
    """The reverse of `_to_text`. Cached by the text: as values, 0.0 and -0.0 would be one key."""
    found: tuple[Any, ...] = literal_eval(options)
    return found


def band(causal: bool, window: Window | None) -> tuple[int | None, int | None]:
    """(before, after) of the options causal and window.

    >>> band(True, None), band(False, (128, 0)), band(True, (128, None))
    ((None, 0), (128, 0), (128, 0))
    >>> band(False, (0, 2**31))
    (0, None)
    """
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        expected = "(left, right), each an int >= 0 or None for unbounded"
        if type(window) is int and window > 0:
            expected += f"; ({window - 1}, 0) for the last {window} keys"
        raise AttentionError("window", shown(window), expected)
    before, after = (_side(name, side) for name, side in zip(("left", "right"), window, strict=True))
    return before, 0 if causal else after


def _side(name: str, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, (bool, float, Tensor)) or not (isinstance(side, int) or hasattr(side, "__index__")):
        raise AttentionError(f"window {name}", shown(side), "an int >= 0, or None for unbounded")
    if side < 0:
        hint = f"{side}" + (" (flash-attn writes -1 for unbounded; here that is None)" if side == -1 else "")
        raise AttentionError(f"window {name}", hint, "an int >= 0, or None for unbounded")
    if type(side) is not int and not hasattr(side, "node"):  # numpy's; a symbol of torch.compile stays one
        side = side.__index__()
    return side if side < FAR else None


def padded(d: int, least: int = 16) -> int:
    """The power of two, at least `least`, in which kernels compute a head dim."""
    return max(least, 1 << (d - 1).bit_length())


def has_address(x: Tensor) -> bool:
    """Whether a tensor has memory. Fake tensors and those that torch.func or autograd batches have none."""
    if type(x) not in TENSOR_TYPES:
        return False
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def is_dtensor(*tensors: Tensor) -> bool:
    """Whether one is sharded. Compares the name of the type: importing DTensor takes long."""
    return any(type(x).__name__ == "DTensor" for x in tensors)


def lse_dtype(q: Tensor) -> torch.dtype:
    """float32; float64 for float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def heads_are_queries(n_q: int, group: int, before: int | None) -> bool:
    """Whether the query heads of a group, with one query each, become the queries of one head, so that their keys are
    read once. Each of them must see all keys.

    >>> heads_are_queries(1, 8, None), heads_are_queries(1, 8, 128)
    (True, False)
    >>> heads_are_queries(2, 8, None)
    False
    """
    return n_q == 1 and group > 1 and before is None


class Gpu(NamedTuple):
    """`kind` is "cuda" (NVIDIA), "hip" (AMD) or "interpreter" (a CPU acts as one); `arch` 90 for sm_90, or gfx942."""

    kind: str
    arch: int | str

    @property
    def capability(self) -> int:
        """90 for sm_90, 0 where there is none: what AMD's report under that name means something else."""
        return self.arch if isinstance(self.arch, int) else 0

    @property
    def has_e4m3(self) -> bool:
        """Whether PTX has conversions to and from float8_e4m3fn."""
        return self.kind == "cuda" and self.capability >= 89

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.kind == "cuda" else str(self.arch)


INTERPRETER = Gpu("interpreter", 0)


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that a tensor lives on; of a CPU the interpreter, where Triton's is on; None elsewhere."""
    if device.type == "cuda":
        return _gpu(device)
    if device.type == "cpu" and has_triton() and settings.interprets():
        return INTERPRETER
    return None


OLDER_TARGETS = {"sm_80": 80, "sm_86": 86, "sm_89": 89}


@cache
def older_target() -> Gpu | None:
    """The GPU that TILEWISE_TARGET names, or None. It is read once: compiled kernels depend on it.

    Raises:
        AttentionError: it is none of `OLDER_TARGETS`.
    """
    name = settings.target()
    if name and name not in OLDER_TARGETS:
        raise AttentionError(settings.TARGET, repr(name), f"{', '.join(OLDER_TARGETS)}, or no such variable")
    return Gpu("cuda", OLDER_TARGETS[name]) if name else None


@cache
def _gpu(device: torch.device) -> Gpu:
    """Asking torch takes longer than a launch."""
    if torch.version.hip is not None:
        if older_target() is not None:
            raise AttentionError(settings.TARGET, str(older_target()), "a GPU of NVIDIA; the one here is of AMD")
        return Gpu("hip", torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    found, older = Gpu("cuda", 10 * major + minor), older_target()
    if older is None:
        return found
    if older.capability > found.capability:
        expected = f"{found} or older: code for a newer GPU does not run on this one"
        raise AttentionError(settings.TARGET, str(older), expected)
    return older


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def triton_version() -> tuple[int, int]:
    """(3, 6) of 3.6.0; (0, 0) where there is none."""
    if not has_triton():
        return 0, 0
    major, minor, *_ = version("triton").split(".")
    return int(major), int(minor)
