"""torch's FlexAttention: the same signature, with existing score functions and BlockMasks.

    from tilewise.compat import create_block_mask, flex_attention

    mask = create_block_mask(causal, None, None, S, S)
    out = flex_attention(q, k, v, score_mod=relative, block_mask=mask)

There is nothing to compile (within torch.compile it is a graph break): the function is traced as a mod or, if it
contains more than a mod may (tuples, loops, an `if` over numbers), traced as it is at every call. Tensors and numbers
in its closure are captured, and float tensors of a score mod get gradients. Tested with the FlexAttention of torch 2.10
to 2.15; with other versions it warns once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from ..api import attention
from ..errors import AttentionError, shown
from ..mods import PROGRAMS, BlockMask, Mod
from ..mods.bands import split
from ..mods.blocks import listed
from ..mods.expr import SCORE, Expr, const, load, nodes, substitute
from ..mods.modifier import PAIR, Modifier, UntypedModifier, mask_mod, result
from ..mods.outside import is_callable_object, name_of
from ..mods.program import Program, combine_masks, register
from ..mods.trace import trace_as_is
from ..request import FAR, LIMIT
from ..torch_internals import version_of
from ..validation.dense import tensor
from ..validation.versions import check_version

and_masks, create_block_mask, or_masks = torchs.and_masks, torchs.create_block_mask, torchs.or_masks
ScoreFunction = Callable[..., Tensor]
Flexed = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, torchs.AuxOutput]
TESTED = ((2, 10), (2, 15))
check_version("FlexAttention of torch", torch.__version__, *TESTED)
BOTH = {"and_masks.<locals>.and_mask": "and", "or_masks.<locals>.or_mask": "or"}


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = ...,
    block_mask: torchs.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, object] | None = ...,
    *,
    return_aux: None = ...,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = ...,
    block_mask: torchs.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: Mapping[str, object] | None = ...,
    return_aux: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = ...,
    block_mask: torchs.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: Mapping[str, object] | None = ...,
    *,
    return_aux: torchs.AuxRequest,
) -> tuple[Tensor, torchs.AuxOutput]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = ...,
    block_mask: torchs.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: Mapping[str, object] | None = ...,
    *,
    return_aux: torchs.AuxRequest | None = ...,
) -> Flexed: ...


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: torchs.AuxRequest | None = None,
) -> Flexed:
    """FlexAttention's function, torch.nn.attention.flex_attention.flex_attention, computed by tilewise.

    >>> slopes = torch.rand(4, requires_grad=True)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + slopes[h] * (kv_idx - q_idx)
    >>> q, k, v = (torch.randn(2, 4, 128, 16) for _ in range(3))
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    >>> flex_attention(q, k, v, alibi, mask).sum().backward()
    >>> slopes.grad.shape
    torch.Size([4])

    The part of a mask that is a band (causal, a window) is computed as a band, and the tiles that a BlockMask does not
    list are skipped. Its lists are read when it is first used and when they have changed, which waits for the GPU. Its
    mask_mod is traced at every call.

    Args:
        query: (B, H, L, E).
        key: (B or 1, Hk, S, E).
        value: (B or 1, Hk, S, Ev).
        score_mod: f(score, b, h, q_idx, kv_idx) -> score, a plain function. Default: none.
        block_mask: torch's BlockMask, from `create_block_mask`. Default: none.
        scale: factor of the scores. Default: 1 / sqrt(E).
        enable_gqa: must be True if H and Hk differ. H is a multiple of Hk.
        return_lse: if True, (out, lse) is returned.
        kernel_options: for torch's kernels: ignored.
        return_aux: torch's AuxRequest. lse=True is supported, max_scores=True is not. Default: none.

    Returns:
        out (B, H, L, Ev). With return_lse (out, lse), lse (B, H, L); with return_aux (out, AuxOutput).

    Raises:
        AttentionError: an argument is not as above, the block mask has other lengths, or a function contains what mods
            may not.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if tensor(name, x).dim() != 4:
            raise AttentionError(f"shape of {name}", tuple(x.shape), "4 axes (batch, heads, tokens, dim)")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise AttentionError("heads of key", kv_heads, f"query's {heads}, or enable_gqa=True")
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise AttentionError("return_aux", shown(return_aux), "torch's AuxRequest(lse=True)")
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise AttentionError("return_aux", "max_scores=True", "lse alone: the kernels keep no maximum")
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    options: dict[str, Any] = {"scale": scale, "return_lse": True}
    if score_mod is not None:
        mod = mod_of(score_mod, "score")
        if mod.program.root is not SCORE:
            options["score_mod"] = mod
    if block_mask is not None:
        n_q, n_k = query.shape[2], key.shape[2]
        converted = _converted(block_mask, n_q, n_k)
        options |= {"window": converted.window, "mask_mod": converted.mask}
        if converted.keys != n_k:
            key, value = key[:, :, : converted.keys], value[:, :, : converted.keys]
    out, lse = attention(query, key, value, layout="bhsd", **options)
    if return_aux is not None:
        return out, torchs.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def mod_of(function: Any, kind: str) -> Mod:
    """The mod of a plain function, as `tilewise.score_mod(function)()` or `tilewise.mask_mod(function)()`."""
    if isinstance(function, Mod):
        return function
    op = BOTH.get(getattr(function, "__qualname__", ""))
    if op is not None and function.__module__ == torchs.__name__:
        return combine_masks(op, [mod_of(f, kind) for f in function.__closure__[0].cell_contents])
    if not isinstance(function, (FunctionType, MethodType, partial)) and not is_callable_object(function):
        raise AttentionError(f"{kind}_mod", shown(function), "a function, a method, or an object that can be called")
    _check_parameters(function, kind)
    try:
        mod: Mod | None = _modifier(function, kind)() if isinstance(function, FunctionType) else None
    except AttentionError:
        mod = None
    mod = _count_from_the_end(mod or _traced(function, kind))
    if mod.program.root.deps & {"n_q", "n_k"}:
        raise AttentionError(f"{kind}_mod", "q_len or kv_len in it", "tilewise.attention, which has these parameters")
    return mod


def _count_from_the_end(mod: Mod) -> Mod:
    """The mod with constant negative indices that count from a tensor's end, as in torch. (In mods of tilewise they
    read the nearest element, the first one.)"""
    if not _has_negative_index(mod.key):
        return mod

    def moved(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if x.op != "load":
            return None
        pairs = zip(args, mod.tensors[x.value].shape, strict=True)
        return load(x.value, *(const(a.value + n) if _is_negative(a) else a for a, n in pairs), kind=x.kind)

    program = mod.program
    return mod._replace(key=register(Program(substitute(program.root, moved), program.ranks, program.numbers)))


@lru_cache(LIMIT)
def _has_negative_index(key: str) -> bool:
    return any(x.op == "load" and any(map(_is_negative, x.args)) for x in nodes(PROGRAMS[key].root))


def _is_negative(index: Expr) -> bool:
    return bool(index.op == "const" and index.value < 0)


def _check_parameters(function: Any, kind: str) -> None:
    """Raises unless a function has FlexAttention's parameters and no others, or another callable accepts them."""
    wanted = PARAMETERS[kind].split(", ")
    if isinstance(function, FunctionType):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        shown, fits = f"({', '.join(names)})", len(names) == len(wanted)
    else:
        signature = inspect.signature(function)
        shown, fits = str(signature), True
        try:
            signature.bind(*wanted)
        except TypeError:
            fits = False
    if not fits:
        raise AttentionError(f"{kind}_mod", f"{name_of(function)}{shown}", f"{PARAMETERS[kind]} alone")


def _modifier(function: Any, kind: str) -> UntypedModifier:
    """The Modifier of the function, stored on the function. Not stored if the function has a closure: the cycle would
    keep the closure's tensors until the garbage collector runs."""
    kept: UntypedModifier | None = getattr(function, "_tilewise", None)
    if kept is not None and kept.function is function and kept.kind == kind:  # functools.wraps copies attributes
        return kept
    made: UntypedModifier = Modifier(function, kind)
    if isinstance(function, FunctionType) and function.__closure__ is None:
        function._tilewise = made  # type: ignore[attr-defined]
    return made


def _traced(function: Any, kind: str) -> Mod:
    """The mod of a function that contains more than a mod may: tuples, loops, an `if` over numbers. It is traced at
    every call: what it depends on is not known."""
    values = [*([SCORE] if kind == "score" else []), *PAIR]
    root, tensors = trace_as_is(function, values)
    root = result(kind, root, name_of(function))
    key = register(Program(root, tuple(x.dim() for x in tensors), 0))
    return Mod(kind, key, tuple(tensors), (), name_of(function))


PARAMETERS = {"score": "(score, b, h, q_idx, kv_idx)", "mask": "(b, h, q_idx, kv_idx)"}


class Converted(NamedTuple):
    """The window and the block mask of a torch BlockMask. Keys from `keys` on are visible to no query."""

    window: tuple[int | None, int | None] | None
    mask: BlockMask | None
    keys: int


class Kept(NamedTuple):
    """A conversion and its inputs. `extra`: tensors of its mask that come before those of the mask function."""

    key: tuple[Any, ...]
    lists: list[Any]
    converted: Converted
    extra: tuple[Tensor, ...]


def _converted(block_mask: Any, n_q: int, n_k: int) -> Converted:
    """The conversion of a torch BlockMask, stored on the BlockMask with all that it depends on: the program of the mask
    function and the contents of the block lists. The function is traced at every call, for it may read anything
    (globals, helpers, objects, dicts). The tensors that it reads are always those of this call."""
    if not isinstance(block_mask, torchs.BlockMask):
        raise AttentionError("block_mask", type(block_mask).__name__, "torch's BlockMask, from create_block_mask")
    sizes = tuple(block_mask.seq_lengths)
    if sizes != (n_q, n_k):
        raise AttentionError("lengths of the block mask", sizes, f"those of query and key, {(n_q, n_k)}")
    function = block_mask.mask_mod
    mod = _all_visible() if function is None or function is torchs.noop_mask else mod_of(function, "mask")
    key = mod.key, n_q, n_k, *block_mask.BLOCK_SIZE
    lists = [getattr(block_mask, f"{full}kv_{name}") for full in ("", "full_") for name in ("num_blocks", "indices")]
    kept: Kept | None = vars(block_mask).get("_tilewise")
    if kept is None or kept.key != key or not all(map(_is_unchanged, lists, kept.lists)):
        recorded = [_recorded(x) for x in lists]
        with torch.inference_mode(False):  # its tensors may be used by a call with a gradient later
            made = _convert(block_mask, mod, n_q, n_k)
        extra: tuple[Tensor, ...] = ()
        if made.mask is not None:
            extra = made.mask.mod.tensors[: len(made.mask.mod.tensors) - len(mod.tensors)]
            made = made._replace(mask=made.mask._replace(mod=made.mask.mod._replace(tensors=(), numbers=())))
        kept = vars(block_mask)["_tilewise"] = Kept(key, recorded, made, extra)
    made = kept.converted
    if made.mask is None:
        return made
    bound = made.mask.mod._replace(tensors=(*kept.extra, *mod.tensors), numbers=mod.numbers)
    return made._replace(mask=made.mask._replace(mod=bound))


def _recorded(x: Tensor | None) -> Any:
    """What `_is_unchanged` compares a block list with later: a copy on a CPU; on a GPU, where comparing would wait, the
    tensor, its address and its version counter. None if there is no counter: tensors made in inference mode."""
    if x is None:
        return ABSENT
    if not x.is_cuda:
        return x.detach().clone()
    return None if x.is_inference() else (x, x.data_ptr(), version_of(x))


def _is_unchanged(x: Tensor | None, before: Any) -> bool:
    if x is None or before is None or before is ABSENT:
        return x is None and before is ABSENT
    if isinstance(before, Tensor):
        return x.device == before.device and x.dtype == before.dtype and torch.equal(x, before)
    return x is before[0] and not x.is_inference() and (x.data_ptr(), version_of(x)) == before[1:]


ABSENT = object()


def _convert(block_mask: Any, mod: Mod, n_q: int, n_k: int) -> Converted:
    block = tuple(block_mask.BLOCK_SIZE)
    kinds = _kinds(block_mask, -(-n_q // block[0]), -(-n_k // block[1]))
    before, after, rest = split(mod)
    keys = max(0, min(n_k, n_q + after))
    sides = before + keys - n_q, after - (keys - n_q)  # around the diagonal that ends in the last key
    window = (None if sides[0] >= FAR // 2 else sides[0]), (None if sides[1] >= FAR // 2 else sides[1])
    if rest is not mod and sides[0] >= 0 and keys > 0:
        touched, within = _band(kinds, before, after, n_q, n_k, block)
        if rest is None and bool((((kinds > 0) == touched) & ((kinds < 3) | within)).all()):
            return Converted(window, None, keys)  # the listed tiles are those that the band touches
        if rest is not None and keys == n_k and bool(((kinds < 3) | within).all()):
            return Converted(window, listed(rest, kinds, block, n_q, n_k, window), n_k)
    return Converted(None, listed(mod, kinds, block, n_q, n_k), n_k)


@mask_mod
def _all_visible(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return True


def _kinds(block_mask: Any, rows: int, columns: int) -> Tensor:
    """(B, H, Tq, Tk) int8: 0 not listed, 1 listed, 3 listed as full."""
    kinds = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, rows, columns)
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, rows, columns)
        kinds = torch.maximum(kinds, 3 * full)
    return kinds


def _dense(counts: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """(B, H, rows, columns) int8: 1 at the first `counts` indices of each row. Tiles past the end are ignored."""
    if counts.dim() != 3 or counts.shape[2] < rows or indices.shape[:3] != counts.shape:
        found = f"counts {tuple(counts.shape)}, indices {tuple(indices.shape)}"
        raise AttentionError("lists of the block mask", found, f"(B, H, {rows}) and (B, H, {rows}, tiles)")
    counts, indices = counts[:, :, :rows], indices[:, :, :rows].long()
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(is_listed, indices, columns).clamp(max=columns)
    dense = torch.zeros(*counts.shape, columns + 1, dtype=torch.int8, device=indices.device)
    return dense.scatter_(-1, places, 1)[..., :columns]


def _band(kinds: Tensor, before: int, after: int, n_q: int, n_k: int, block: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which tiles the band touches, and which lie within it. (A BlockMask may list fewer tiles than its mask_mod shows,
    and may list a tile as full that the band cuts.)"""
    rows, columns = (torch.arange(n, device=kinds.device) for n in kinds.shape[-2:])
    first, top = columns * block[1], (rows * block[0])[:, None]
    last, bottom = (first + block[1]).clamp(max=n_k) - 1, (top + block[0]).clamp(max=n_q) - 1
    touched = (first - bottom <= after) & (last - top >= -before)
    return touched, (last - top <= after) & (first - bottom >= -before)
