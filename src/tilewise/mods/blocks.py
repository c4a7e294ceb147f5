"""Block masks: which tiles of a mask are empty, partial or full, computed once and used by every call.

Each row of tiles has a list of its tiles that are not empty. The kernels visit the tiles in the list, and apply the
mask mod to the partial ones. The backward uses the lists of the transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError, shown
from ..request import Request, band
from .dropout import is_whole
from .expr import B, H, I, J, arithmetic, compare, const, load, logic
from .modifier import MaskMod, as_mod
from .program import Mod, Program, check_tables, register
from .tile_lists import (
    Band,
    Lists,
    both_lists,
    check_devices,
    check_mask,
    grown_kinds,
    kinds_of,
    largest,
    lengths_of,
    new_lists,
    new_packed_lists,
    of_part,
    part_key,
)

LARGE = 128  # queries and keys of a tile that every kernel supports


class BlockMask(NamedTuple):
    """A mask mod with the lists of its tiles that are not empty. Made by `tilewise.block_mask`.

    Attributes:
        mod: the mask mod.
        lists: offsets of the rows (B H Tq + 1,), their tiles, offsets of the columns (B H Tk + 1,), their tiles; all
            int32. A tile is 4 * position + its kind. Kind 1: the mod hides some of its pairs; 2: only causal or window
            does; 3: none are hidden. Of masks made in torch.compile zeros may follow the tiles.
        block: (queries, keys) of a tile.
        shape: (B, H, n_q, n_k). B or H is 1 where the mask is the same for all. For packed sequences n_q and n_k are
            the largest lengths.
        band: (left, right) of causal and window, None where unbounded.
        tokens: for packed sequences, the numbers of queries and keys; None if made in torch.compile. Otherwise None.
        cu_seqlens: for packed sequences, their offsets. Otherwise None.
    """

    mod: Mod
    lists: Lists
    block: tuple[int, int]
    shape: tuple[int, int, int, int]
    band: Band
    tokens: tuple[int, int] | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None

    @property
    def tiles(self) -> Tensor:
        """(B, H, Tq, Tk) int8: 0 empty, 1 partial, 2 full."""
        kinds = kinds_of(self.lists, self.shape[:2])
        return kinds.clamp(max=1) + kinds // 3

    def density(self) -> float:
        """The fraction of tiles that are not empty.

        Returns:
            A number from 0 to 1.
        """
        batch, heads, t_q, t_k = self._grid()
        offsets, entries, *_ = self.lists
        visited = len(entries) if offsets.is_meta else int(offsets[-1])
        return visited / (batch * heads * t_q * t_k)

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on another device, with the tensors that its mod reads.

        Args:
            device: a torch.device or its name.

        Returns:
            A new block mask.
        """
        a, b, c, d = (x.to(device) for x in self.lists)
        cu = None if self.cu_seqlens is None else (self.cu_seqlens[0].to(device), self.cu_seqlens[1].to(device))
        return self._replace(mod=self.mod.to(device), lists=(a, b, c, d), cu_seqlens=cu)

    def queries(self, start: int, stop: int, *, n_k: int | None = None, mod: MaskMod | None = None) -> BlockMask:
        """The mask of some queries of the sequence, such as the newest ones while decoding.

        >>> from tilewise.mods import block_diagonal
        >>> mask = block_mask(block_diagonal(128), 512, 512, causal=True)
        >>> mask.queries(256, 512).tiles[0, 0]
        tensor([[0, 0, 1, 0],
                [0, 0, 0, 1]], dtype=torch.int8)
        >>> mask.queries(512, 513).shape  # the sequence has grown by one token
        (1, 1, 1, 513)

        The tiles are computed for these queries alone, in O(tiles) memory; the other tiles of the mask are not read.
        It is for calls with q[:, start:stop] and the keys up to them, whose `causal` and `window` are those of this
        mask. In the mod, q_idx counts from the beginning of the sequence, as in the call with all queries. All such
        masks of a mod use the same kernels.

        Args:
            start: the first query.
            stop: the query after the last. If it is larger than the number of queries, the sequence has grown by as
                many queries and keys.
            n_k: number of keys of the calls: the first ones. Default: as many as end with the last of these queries. If
                this mask has a `causal` or `window`, it must be that number, because they count from the last key.
            mod: the mod with its tensors for a longer sequence. Default: the mod of this mask.

        Returns:
            A new block mask, of stop - start queries.

        Raises:
            AttentionError: the mask is one of packed sequences, `mod` is another function than that of this mask or
                its tensors are too short, or a number is not as above.
        """
        mod = self._new_mod("queries", mod)
        batch, heads, n_q, keys = self.shape
        if not (is_whole(start) and is_whole(stop) and 0 <= start < stop):
            raise AttentionError("queries of a block mask", (shown(start), shown(stop)), "ints, 0 <= start < stop")
        more = max(0, stop - n_q)
        n_q, keys = n_q + more, keys + more
        aligned = stop + keys - n_q
        n_k = aligned if n_k is None else n_k
        if not is_whole(n_k) or n_k < 1 or (n_k != aligned and self.band != (None, None)):
            expected = "an int, at least 1" if self.band == (None, None) else f"{aligned}: causal and window end there"
            raise AttentionError(f"keys of queries {start} to {stop} of a block mask", shown(n_k), expected)
        check_tables(mod, (*_counted(batch, heads), stop, n_k))
        device, sizes = self.lists[0].device, (batch, heads, stop - start, n_k)
        mod = of_part(mod, start, (n_q, keys), sizes[2:], device)
        lists = new_lists(mod, sizes, self.band, self.block, device)
        return BlockMask(mod, lists, self.block, sizes, self.band)

    def grown(self, tokens: int, *, mod: MaskMod | None = None) -> BlockMask:
        """The mask of the sequence with more queries and as many more keys at its end.

        >>> from tilewise.mods import block_diagonal
        >>> mask = block_mask(block_diagonal(128), 256, 256)
        >>> mask.grown(128).tiles[0, 0]
        tensor([[2, 0, 0],
                [0, 2, 0],
                [0, 0, 2]], dtype=torch.int8)

        Only tiles with new queries or keys are computed; the others are copied. (All are computed in torch.compile, and
        if the mod reads q_len or kv_len other than in q_pos.)

        Args:
            tokens: int, the number of new queries, and of new keys.
            mod: the mod with its tensors for the longer sequence, which shows the same pairs of old tokens. Default:
                the mod of this mask.

        Returns:
            A new block mask.

        Raises:
            AttentionError: the mask is one of packed sequences, `mod` is another function than that of this mask or
                its tensors are too short, or `tokens` is not an int of at least 0.
        """
        mod = self._new_mod("grown", mod)
        if not is_whole(tokens) or tokens < 0:
            raise AttentionError("tokens that a block mask grows by", shown(tokens), "an int, at least 0")
        batch, heads, n_q, n_k = self.shape
        sizes = batch, heads, n_q + tokens, n_k + tokens
        check_tables(mod, (*_counted(batch, heads), *sizes[2:]))
        if torch.compiler.is_compiling():
            lists = new_lists(mod, sizes, self.band, self.block, self.lists[0].device)
        else:
            old = kinds_of(self.lists, self.shape[:2])
            lists = both_lists(grown_kinds(mod, old, self.shape, tokens, self.band, self.block), self.block)
        return BlockMask(mod, lists, self.block, sizes, self.band)

    def _new_mod(self, name: str, given: Any) -> Mod:
        """The mask's mod, or the given one, for the method `name`."""
        if self.cu_seqlens is not None:
            raise AttentionError(f"BlockMask.{name}", "a mask of packed sequences", "one made by tilewise.block_mask")
        if given is None:
            return self.mod
        mod = as_mod("mask", given)
        batch, heads, *_ = self.shape
        check_mask(mod, self.block, {"b": batch, "h": heads})
        check_devices(mod, self.lists[0].device)
        if self.mod.key != mod.key and self.mod.key in (part_key(mod.key, True), part_key(mod.key, False)):
            found, expected = "given to a mask of some queries", "None; or call it on the mask of the whole sequence"
            raise AttentionError(f"mod of BlockMask.{name}", found, expected)
        if (mod.key, mod.numbers) != (self.mod.key, self.mod.numbers):
            raise AttentionError(f"mod of BlockMask.{name}", shown(mod), f"{self.mod!r} with longer tensors")
        made: Mod = mod
        return made

    def __repr__(self) -> str:
        batch, heads, n_q, n_k = self.shape
        packed = "" if self.tokens is None else f", packed in {self.tokens[0]} and {self.tokens[1]} tokens"
        edges = "" if self.band == (None, None) else f", window {self.band}"
        return (
            f"block mask of {self.mod!r}: B {batch}, H {heads}, {n_q} queries x {n_k} keys{packed}{edges}, tiles of"
            f" {self.block[0]} x {self.block[1]}, {100 * self.density():.1f} % visited, on {self.lists[0].device}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return restored_block_mask, tuple(self)

    def _grid(self) -> tuple[int, int, int, int]:
        """Batch rows, heads, rows and columns of tiles."""
        batch, heads, n_q, n_k = self.shape
        return batch, heads, -(-n_q // self.block[0]), -(-n_k // self.block[1])


def spelled_out(mod: Mod, kinds: Tensor, block: Sequence[int]) -> Mod:
    """A mask mod that does what the tiles do: it hides those that are not listed and applies `mod` to partial ones."""
    at = (arithmetic("floordiv", x, const(size)) for x, size in zip((I, J), block, strict=True))
    kind = load(0, B, H, *at, kind="int")
    partial = mod.program.after(Program(compare("eq", kind, const(1)), (4,), 0))
    root = logic("or", compare("gt", kind, const(1)), partial.root)
    return mod._replace(key=register(Program(root, partial.ranks, partial.numbers)), tensors=(kinds, *mod.tensors))


def without_lists(request: Request) -> Request:
    """The same request for kernels without tile lists: the mask mod does what the lists do."""
    if not request.blocks:
        return request
    spec = request.spec
    block_q, block_k, *lines = spec.mask_block
    mod = Mod("mask", spec.mask_mod or "", request.mask, spec.mask_numbers)
    mod = spelled_out(mod, kinds_of(request.blocks, lines), (block_q, block_k))
    spec = spec._replace(mask_mod=mod.key, mask_tensors=len(mod.tensors), mask_block=())
    return request._replace(spec=spec, mask=mod.tensors, blocks=())


def restored_block_mask(*fields: Any) -> BlockMask:
    """A block mask from its pickled fields. The lists are checked: the kernels would read out of bounds otherwise."""
    mask = BlockMask(*fields)
    check_mask(mask.mod, mask.block, {})
    batch, heads, t_q, t_k = mask._grid()
    for (offsets, entries), rows, columns in ((mask.lists[:2], t_q, t_k), (mask.lists[2:], t_k, t_q)):
        fits = (
            offsets.dtype == entries.dtype == torch.int32
            and offsets.shape == (batch * heads * rows + 1,)
            and offsets[0] == 0
            and offsets[-1] <= len(entries) <= rows * batch * heads * columns
            and bool((offsets.diff() >= 0).all())
            and bool(((entries >= 0) & (entries < 4 * columns)).all())
            and bool((entries[: offsets[-1]] % 4 > 0).all() & (entries[offsets[-1] :] == 0).all())
        )
        if not fits:
            raise AttentionError("a saved block mask", "lists that do not fit its shape", "one as it was saved")
    return mask


def _counted(batch: int, heads: int) -> tuple[int | None, int | None]:
    """The batch rows and heads that tables must have: a mask of one row or head stands for all (None)."""
    return batch if batch > 1 else None, heads if heads > 1 else None


def block_mask(
    mod: MaskMod,
    n_q: int,
    n_k: int,
    *,
    batch: int = 1,
    heads: int = 1,
    causal: bool = False,
    window: Band | None = None,
    block: tuple[int, int] = (128, 128),
    device: torch.device | str | None = None,
) -> BlockMask:
    """The tiles of a mask, for use as `attention(..., mask_mod=...)` again and again.

    >>> from tilewise.mods import block_diagonal
    >>> block_mask(block_diagonal(128), 512, 512).tiles[0, 0]
    tensor([[2, 0, 0, 0],
            [0, 2, 0, 0],
            [0, 0, 2, 0],
            [0, 0, 0, 2]], dtype=torch.int8)

    Most tiles of documents, windows and trees are known to be empty or full from the bounds of what the mod compares;
    the mod is evaluated only for the pairs of the remaining tiles, some tiles at a time: O(tiles) memory. While
    decoding, `BlockMask.queries` makes the mask of the newest queries alone, and `BlockMask.grown` that of a longer
    sequence.

    Args:
        mod: a mask mod with its tensors bound, or a plain function f(b, h, q_idx, kv_idx).
        n_q: number of queries of the calls that use it.
        n_k: number of keys of these calls.
        batch: their batch size. Default 1: the same mask for all batch rows. Needed if the mod reads b, other than to
            index an axis of size 1.
        heads: their query heads. Default 1: the same mask for all heads. Needed if the mod reads h.
        causal: as in the calls. Tiles that it hides are left out.
        window: as in the calls. Tiles that it hides are left out.
        block: (queries, keys) of a tile: multiples of 16, on a GPU powers of two from 128 on. Default (128, 128).
        device: where the lists are made. Default: that of the mod's tensors, or the CPU if it has none.

    Returns:
        The block mask, for the option mask_mod of `attention`.

    Raises:
        AttentionError: `mod` is not a mask mod, a size or the block is not as above, or the mod reads b or h and batch
            or heads is 1.
    """
    if not all(is_whole(n) and n >= 1 for n in (n_q, n_k, batch, heads)):
        raise AttentionError("sizes of a block mask", (batch, heads, n_q, n_k), "ints, all at least 1")
    made: Mod = as_mod("mask", mod)
    check_mask(made, block, {"b": batch, "h": heads})
    device = torch.device(device or (made.tensors[0].device if made.tensors else "cpu"))
    check_devices(made, device)
    check_tables(made, (*_counted(batch, heads), n_q, n_k))
    edges = band(causal, window)
    sizes = batch, heads, n_q, n_k
    return BlockMask(made, new_lists(made, sizes, edges, block, device), block, sizes, edges)


def listed(
    mod: Mod, kinds: Tensor, block: tuple[int, ...], n_q: int, n_k: int, edges: Band = (None, None)
) -> BlockMask:
    """A block mask from the kinds of its tiles, (B, H, Tq, Tk) int8 as in `BlockMask`, for calls with this band. The
    mod is not evaluated: a tile is empty or full if its kind is. Tiles that no kernel supports are put into larger
    ones, where the mod looks their kinds up; so are all tiles on AMD's GPUs, whose kernels do not use lists."""
    if not _is_supported(block, kinds.device):
        mod, kinds, block = spelled_out(mod, kinds, block), _enlarged(kinds, block, n_q, n_k), (LARGE, LARGE)
    elif torch.version.hip:
        mod = spelled_out(mod, kinds, block)
    block_q, block_k = block
    check_mask(mod, (block_q, block_k), {})
    shape = (kinds.shape[0], kinds.shape[1], n_q, n_k)
    return BlockMask(mod, both_lists(kinds, (block_q, block_k)), (block_q, block_k), shape, edges)


def _is_supported(block: tuple[int, ...], device: torch.device) -> bool:
    """Whether the kernels of the device visit tiles of this size."""
    if device.type == "cpu":
        return all(x % 16 == 0 for x in block)
    return all(x >= 64 and x & (x - 1) == 0 for x in block)


def _enlarged(kinds: Tensor, block: tuple[int, ...], n_q: int, n_k: int) -> Tensor:
    """The kinds of tiles of LARGE x LARGE: empty or full if all small tiles in it are, else partial."""
    rows, columns = (
        _overlaps(n, size, tiles, kinds.device)
        for n, size, tiles in zip((n_q, n_k), block, kinds.shape[2:], strict=True)
    )
    some, gaps = (rows @ x.float() @ columns.mT > 0 for x in (kinds > 0, kinds < 3))
    return some.to(torch.int8) * torch.where(gaps, 1, 3).to(torch.int8)


def _overlaps(n: int, size: int, tiles: int, device: torch.device) -> Tensor:
    """(large, small): 1 where tiles of LARGE and of `size` tokens, along n tokens, have tokens in common."""
    first = torch.arange(0, n, LARGE, device=device)[:, None]
    own = torch.arange(tiles, device=device) * size
    return ((own < first + LARGE) & (own + size > first)).float()


def block_mask_varlen(
    mod: MaskMod,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    heads: int = 1,
    causal: bool = False,
    window: Band | None = None,
    block: tuple[int, int] = (128, 128),
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> BlockMask:
    """`block_mask` for packed sequences of these lengths, for use as `attention_varlen(..., mask_mod=...)`.

    >>> from tilewise.mods import block_diagonal
    >>> cu = torch.tensor([0, 384, 512], dtype=torch.int32)  # lengths 384 and 128
    >>> block_mask_varlen(block_diagonal(128), cu, cu).tiles[:, 0]
    tensor([[[2, 0, 0],
             [0, 2, 0],
             [0, 0, 2]],
    <BLANKLINE>
            [[2, 0, 0],
             [0, 0, 0],
             [0, 0, 0]]], dtype=torch.int8)

    Every sequence has its own tiles, counted from its first token. Making the mask reads the lengths on the host, once;
    the calls that use it do not. It is for these sequences alone: with other lengths, a call raises on a CPU; on a GPU
    only `tilewise.check` reads the lengths and raises.

    Args:
        mod: as in `block_mask`.
        cu_seqlens_q: (B + 1,) integers, as in `attention_varlen`.
        cu_seqlens_k: (B + 1,) integers, as in `attention_varlen`.
        heads: as in `block_mask`.
        causal: as in `block_mask`.
        window: as in `block_mask`.
        block: as in `block_mask`.
        max_seqlen_q: the largest number of queries in a sequence, or a larger one. Needed in torch.compile, as the size
            of the lists. Default: it is read.
        max_seqlen_k: the same for keys.

    Returns:
        The block mask, for the option mask_mod of `attention_varlen`, on the device of cu_seqlens_q.

    Raises:
        AttentionError: as in `block_mask`; or the offsets are not integer tensors of one axis, or do not have the same
            number of sequences, at least 1.
    """
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor) or x.dim() != 1 or x.is_floating_point():
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(name, found, "a tensor of ints (B + 1,), as attention_varlen takes it")
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 1 or cu_seqlens_k.shape[0] - 1 != batch:
        counts = batch, cu_seqlens_k.shape[0] - 1
        raise AttentionError("sequences of a block mask", counts, "as many of q as of k, at least 1")
    made: Mod = as_mod("mask", mod)
    check_mask(made, block, {"h": heads})
    check_devices(made, cu_seqlens_q.device)
    edges, tokens, lengths = band(causal, window), None, None
    if not torch.compiler.is_compiling():
        lengths = lengths_of(cu_seqlens_q, cu_seqlens_k)
        check_tables(made, (*_counted(batch, heads), *(max(1, *x) for x in lengths)))
        tokens = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
    n_q, n_k = largest("q", max_seqlen_q, lengths), largest("k", max_seqlen_k, lengths)
    shape = batch, heads, n_q, n_k
    cu = cu_seqlens_q.clone(), cu_seqlens_k.clone()  # the caller may change the tensors later
    return BlockMask(made, new_packed_lists(made, cu, lengths, shape, edges, block), block, shape, edges, tokens, cu)


def check_block_mask(
    mask: BlockMask,
    sizes: tuple[int, int, int | None, int | None],
    q: Tensor,
    packed: bool,
    band: tuple[int | None, int | None],
) -> None:
    """Raises unless the mask fits a call of these sizes (B, H, Sq, Sk); for packed sequences Sq and Sk are max_seqlen_q
    and max_seqlen_k, or None. The call's band must not exceed the band that the mask was made for."""
    made, fit = ("block_mask", "block_mask_varlen") if packed else ("block_mask_varlen", "block_mask")
    if packed == (mask.cu_seqlens is None):
        raise AttentionError("mask_mod", f"a mask made by {made}", f"one made by {fit}, for this kind of call")
    for name, own, size in zip(("B", "H", "Sq", "Sk"), mask.shape, sizes, strict=True):
        is_bound = packed and name in ("Sq", "Sk") and size is not None and own <= size  # max_seqlen may be larger
        if own != size and size is not None and not is_bound and not (own == 1 and name in ("H" if packed else "BH")):
            raise AttentionError(f"{name} of the block mask", own, f"{size}, as in this call")
    if mask.tokens is not None and mask.tokens[0] > q.shape[0]:
        raise AttentionError("tokens of the block mask", mask.tokens[0], f"q's {q.shape[0]}")
    if mask.lists[0].device != q.device and not q.is_meta:
        raise AttentionError("device of the block mask", mask.lists[0].device, f"q's {q.device}")
    if any(own is not None and (side is None or side > own) for own, side in zip(mask.band, band, strict=True)):
        raise AttentionError(
            "window of the block mask, (left, right)",
            mask.band,
            f"the call's {band}, or a wider one: give both the same",
        )
