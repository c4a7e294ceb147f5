"""What transformers wants masked, said in numbers: a band, lengths, document ids; a table of pairs only where nothing
shorter says it.

transformers makes a mask once a forward, by a function that is registered beside the attention function. It is told the
lengths, where queries and keys begin, a padding mask, and a `mask_function` of one pair, put together of known ones. We
take it apart, look at the padding mask (once a forward, as transformers' own mask functions do), and make one `Mask`
that every layer uses.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

from ..distributed import Plan, current
from ..errors import AttentionError
from ..mods import document
from ..mods.modifier import mask_mod
from ..mods.program import Mod
from .bool_masks import table

FAR = 2**30
TABLES = {"doge"}  # types of models that compute with the mask, and leave out one that is not a tensor


@mask_mod
def valid_keys(b, h, q_idx, kv_idx, valid):  # type: ignore[no-untyped-def]
    """valid (B, Sk): the keys that are no padding."""
    return valid[b, kv_idx]


@mask_mod
def reached(b, h, q_idx, kv_idx, shift, before, after):  # type: ignore[no-untyped-def]
    """A band around query i at key position i + shift; the shift is on the device."""
    at = q_idx + shift
    return (kv_idx >= at - before) & (kv_idx <= at + after)


@mask_mod
def reached_and_valid(b, h, q_idx, kv_idx, shift, valid, before, after):  # type: ignore[no-untyped-def]
    at = q_idx + shift
    return (kv_idx >= at - before) & (kv_idx <= at + after) & valid[b, kv_idx]


class Mask(BlockMask):
    """What transformers passes from its mask function to its layers, and does not look into. It takes tensors for masks
    and also torch's BlockMask, which has lists of tiles that this has not.

    keys: how many of the keys take part, or None for all (the rest of a static cache is not written yet).
    window: (before, after) of `tilewise.attention`, for the keys that take part.
    mod: a mask mod, or None.
    segments: for a padded batch, the offsets of its rows' pieces, of queries and keys, for `attention_varlen`; or None.
    plan: for a model in `tilewise.distributed.use`, the plan of layers with this mask, whose window and mod are then of
        the whole sequence; or None.
    checked: whether positions have been compared with the plan's, or searched for packed sequences, or need not be.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        keys: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        mod: Mod | None = None,
        segments: tuple[Tensor, Tensor] | None = None,
        plan: Plan | None = None,
        checked: bool = True,
    ) -> None:
        self.sizes, self.keys, self.window, self.mod, self.segments = shape, keys, window, mod, segments
        self.plan, self.checked = plan, checked

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        return self.sizes

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    def to(self, device: Any, **words: Any) -> Mask:  # type: ignore[override]
        """On another device: accelerate moves what it passes to layers that lie on several."""
        moved = copy(self)
        moved.mod = None if self.mod is None else self.mod.to(device)
        moved.segments = None if self.segments is None else (self.segments[0].to(device), self.segments[1].to(device))
        return moved

    def __getitem__(self, index: Any) -> Any:
        raise AttentionError("an index into tilewise's attention mask", repr(index), "the mask as it is")

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> Any:
        """A model that hands its mask to torch (scores + mask, scores.masked_fill(mask, ...)) attends by itself."""
        name = getattr(function, "__name__", repr(function))
        found = f"tilewise, in a model that computes with its mask itself ({name})"
        raise AttentionError("attn_implementation", found, "eager")

    def __getattr__(self, name: str) -> Any:
        found = f"tilewise's attention mask has no {name}; a model that asks for it computes its own attention"
        raise AttributeError(f'{found}: attn_implementation="eager"')

    def __repr__(self) -> str:
        return f"Mask({self.sizes}, keys={self.keys}, window={self.window}, mod={self.mod}, segments={self.segments})"


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    look: bool = True,
    **others: Any,
) -> Mask | Tensor | None:
    """transformers' mask of a forward. None means what it means to its "sdpa": nothing is hidden but by causality, with
    query 0 at key 0 if there are several.

    look: read the padding mask and a static cache's length, which waits for the GPU once a forward (as transformers'
        own mask functions do); without, and in torch.compile, they stay on the device.
    """
    shape = (batch_size, 1, q_length, kv_length)
    parts = _parts(mask_function, local_size, use_vmap, config, others)
    plan = current()
    if plan is not None:
        return _sharded(plan, shape, parts, attention_mask)
    pairs: Callable[[], Any] = partial(  # the mask of every pair, as transformers evaluates its function
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=others.get("device", "cpu"),
    )
    if getattr(config, "model_type", None) in TABLES:
        return pairs()  # type: ignore[no-any-return]
    if parts is None:
        return Mask(shape, mod=table(pairs()))
    tracing = torch.compiler.is_compiling() or isinstance(attention_mask, torch.fx.Proxy)
    valid = _valid(attention_mask, kv_length, kv_offset)
    shift = q_offset - kv_offset
    before, after, ids = _band(parts)
    segments = None
    if q_length == 1 and others.get("allow_is_causal_skip") is False and not isinstance(shift, Tensor):
        shift = torch.full((), shift, device=others["device"])  # a step of a static cache: one graph for all of them
    on_device = isinstance(shift, Tensor)
    if look and not tracing and (valid is not None or on_device) and not (on_device and q_length == 1):
        shift, valid, segments = _looked(shift, valid, q_length, before, after)
        on_device = False
    if ids is _NEIGHBOURS:
        ids = None
        if q_length == kv_length and valid is None and not on_device and shift == 0 and q_length > 1:
            ids = _documents(mask_function, batch_size, q_length, others["device"])
    banded = (before, after) != (FAR, FAR)
    if on_device and banded:
        shift = shift.to(others["device"])
        if valid is None:
            return Mask(shape, mod=reached(shift, before, after))
        return Mask(shape, mod=reached_and_valid(shift, valid, before, after))
    if not banded:
        plain = valid is None and ids is None
        return None if plain else Mask(shape, mod=_mod(valid, ids), segments=segments)
    keys = None
    if after == 0 and shift + q_length < kv_length:  # no query sees the other keys
        keys = shift + q_length
        valid = None if valid is None else valid[:, :keys]
    late = shift - ((kv_length if keys is None else keys) - q_length)  # how far past the bottom right corner
    window = tuple(None if side >= FAR else side for side in (before - late, after + late))
    if min(side for side in (*window, 0) if side is not None) < 0:
        return Mask(shape, mod=table(pairs()))
    mod = _mod(valid, ids)
    checked = not look or tracing or mod is not None or late != 0 or not 1 < q_length == kv_length
    return Mask(shape, keys=keys, window=window, mod=mod, segments=segments, checked=checked)  # type: ignore[arg-type]


def _sharded(
    plan: Plan, shape: tuple[int, int, int, int], parts: list[tuple[str, Any]] | None, padding: Tensor | None
) -> Mask:
    """The mask of layers whose tokens are sharded. Document ids are left out: they come from positions that jump where
    this rank's tokens do; the plan knows the documents."""
    if parts is None:
        raise AttentionError(
            "the attention mask of a model in use(plan)",
            "one that only a table of its pairs says",
            "causal, windowed or full attention; plan(mask=...) adds a mask mod to it",
        )
    before, after, _ = _band(parts)
    band = None if before >= FAR else before, None if after >= FAR else after
    whole = _whole_padding(plan, padding)
    mod = None if whole is None else valid_keys(whole)
    return Mask(shape, mod=mod, plan=plan.banded(window=band), checked=padding is not None)


def _whole_padding(plan: Plan, padding: Tensor | None) -> Tensor | None:
    """A padding mask of all tokens, from that of this rank's; None if nothing is hidden, on every rank alike."""
    if padding is None:
        return None
    whole = plan.unshard(padding.to(torch.uint8)).bool()
    if bool(whole.all()):
        return None
    if plan.packed:
        raise AttentionError("attention_mask", "padding, with a plan of packed documents", "documents without padding")
    return whole


def _mod(valid: Tensor | None, ids: Tensor | None) -> Mod | None:
    if ids is not None:
        return document(ids=ids)
    return None if valid is None else valid_keys(valid)  # type: ignore[no-any-return]


def _valid(mask: Tensor | None, keys: int, first: Any) -> Tensor | None:
    """(B, keys) of a padding mask that begins with the first token and may end before the last key."""
    if mask is None:
        return None
    missing = keys + first - mask.shape[-1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    return mask[:, first : first + keys]


def _looked(
    shift: Any, valid: Tensor | None, n_q: int, before: int, after: int
) -> tuple[int, Tensor | None, tuple[Tensor, Tensor] | None]:
    """What is learned by waiting for the numbers, once: the shift; a padding mask if there is padding; and, where each
    row of a square mask has its tokens in one piece, the offsets of the pieces."""
    if valid is None:
        return int(shift), None, None
    n = valid.shape[1]
    j = torch.arange(n, device=valid.device)
    first, count = valid.int().argmax(1), valid.sum(1)
    pieces = (j >= first[:, None]) & (j < (first + count)[:, None])
    place = torch.as_tensor(shift, device=valid.device)
    unseen = j >= place + n_q if after == 0 else torch.zeros_like(j, dtype=torch.bool)  # the rest of a static cache
    whole = (valid | unseen).all()
    found, all_valid, in_pieces = torch.stack([place.long(), whole.long(), (valid == pieces).all().long()]).tolist()
    if all_valid:
        return found, None, None
    causal, everything = after == 0, (before, after) == (FAR, FAR)
    if not in_pieces or n != n_q or found != 0 or not (causal or everything):
        return found, valid, None
    return found, valid, _segments(first, count, n, causal)


def _segments(first: Tensor, count: Tensor, n: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Offsets of a batch's rows cut into padding, tokens, padding. No query sees keys of padding. If it is causal, its
    queries see nothing: each padding is two sequences, one without queries and one without keys. If not, every query
    sees the tokens, for it may be that of another text: cross attention is told the padding of its keys.

    >>> [x.tolist() for x in _segments(torch.tensor([1, 0]), torch.tensor([2, 1]), 3, True)]
    [[0, 0, 1, 3, 3, 3, 3, 3, 4, 4, 6], [0, 1, 1, 3, 3, 3, 3, 3, 4, 6, 6]]
    >>> [x.tolist() for x in _segments(torch.tensor([1, 0]), torch.tensor([2, 1]), 3, False)]
    [[0, 0, 3, 3, 3, 6, 6], [0, 1, 3, 3, 3, 4, 6]]
    """
    none, last = torch.zeros_like(first), n - first - count
    if causal:
        queries = torch.stack([none, first, count, none, last], 1)
        keys = torch.stack([first, none, count, last, none], 1)
    else:
        queries = torch.stack([none, none + n, none], 1)
        keys = torch.stack([first, count, last], 1)
    cu_q, cu_k = (torch.nn.functional.pad(x.flatten().cumsum(0), (1, 0)).int() for x in (queries, keys))
    return cu_q, cu_k


_NEIGHBOURS: Any = object()


def _band(parts: list[tuple[str, Any]]) -> tuple[int, int, Any]:
    """(before, after, document ids) of the parts of a mask function."""
    before, after, ids = FAR, FAR, None
    for name, value in parts:
        if name == "causal_mask_function":
            after = 0
        elif name == "sliding_window_overlay":
            before = min(before, value - 1)
        elif name == "sliding_window_bidirectional_overlay":
            before, after = min(before, value), min(after, value)
        elif name == "packed_sequence_mask_function":
            ids = value
    return before, after, ids


KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
}


def _parts(
    function: Any, local_size: int | None, use_vmap: bool, config: Any, others: dict[str, Any]
) -> list[tuple[str, Any]] | None:
    """The known functions of which a mask function is the conjunction, each with its number or tensor; or None."""
    if function is masking_utils.causal_mask_function or function is masking_utils.bidirectional_mask_function:
        return [(function.__name__, None)]
    if use_vmap:
        return None
    if torch.compiler.is_compiling():
        return _parts_compiled(function, local_size, config, others)
    found: list[tuple[str, Any]] = []
    for f in _conjuncts(function):
        name = f.__qualname__.partition(".")[0]
        if f.__module__ != masking_utils.__name__ or name not in KNOWN:
            return None
        found.append((name, f.__closure__[0].cell_contents if f.__closure__ else None))
    return found


REMAPPED = "remap_positions_for_packed_sequence"  # transformers 5.23


def _conjuncts(function: Any, packed: bool = False) -> list[Any]:
    """The mask functions that `and_masks` combined into this one. `packed`: a mask of packed sequences is one of them.
    Positions then count the tokens of a sequence, so a band of positions is the same band of indices."""
    if function.__module__ != masking_utils.__name__:
        return [function]
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = function.__closure__[0].cell_contents
        packed = packed or any(f.__qualname__.startswith("packed_sequence_mask_function.") for f in parts)
        return [part for f in parts for part in _conjuncts(f, packed)]
    if packed and function.__qualname__.startswith(REMAPPED):
        return _conjuncts(function.__closure__[0].cell_contents)
    return [function]


def _parts_compiled(
    function: Any, local_size: int | None, config: Any, others: dict[str, Any]
) -> list[tuple[str, Any]] | None:
    """The same in torch.compile, which does not show what a function has closed over: from what else is said. Packed
    sequences are found by asking the function about neighbours."""
    if function.__name__ != "and_mask":  # of `and_masks`; up to torch 2.12 there is no asking for more of its name
        return None
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        return None
    if local_size is not None and (local_size < 2 or getattr(config, "attention_chunk_size", None) is not None):
        return None
    if "allow_is_bidirectional_skip" in others:
        return None if local_size is None else [("sliding_window_bidirectional_overlay", local_size)]
    window = [] if local_size is None else [("sliding_window_overlay", local_size)]
    return [("causal_mask_function", None), *window, ("packed_sequence_mask_function", _NEIGHBOURS)]


def _documents(function: Any, batch: int, n: int, device: Any) -> Tensor:
    """(B, S) ids: a token that does not see the one before it begins a document."""
    i = torch.arange(1, n, device=device)[None]
    b = torch.arange(batch, device=device)[:, None]
    begins = ~function(b, torch.zeros_like(b), i, i - 1).expand(batch, n - 1)
    return torch.nn.functional.pad(begins.int().cumsum(1, dtype=torch.int32), (1, 0))
