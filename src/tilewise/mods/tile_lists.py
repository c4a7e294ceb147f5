"""The tile lists of a block mask: made from a mask mod, or read back; and the mod of some queries of a sequence.

In torch.compile an op makes them, whose results have static shapes: there the lists of tiles are as long as if all
tiles were visited. The entries past the last offset are 0, and nothing reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import AttentionError, shown
from ..request import LIMIT
from ..torch_internals import constant
from .bounds import TOKENS, only_difference
from .dropout import is_whole
from .expr import N_K, N_Q, Q_POS, Expr, I, arithmetic, const, load, substitute
from .program import PROGRAMS, Mod, Program, check_filled, check_tables, register
from .tile_bounds import Tiles, tile_kinds

Lists = tuple[Tensor, Tensor, Tensor, Tensor]
Band = tuple[int | None, int | None]
Sizes = tuple[int, int, int, int]  # B, H, n_q, n_k

_library = torch.library.Library("tilewise_mods", "DEF")
_library.define(
    "tile_lists(Tensor like, Tensor[] tensors, str key, float[] numbers, SymInt[] sizes, SymInt? before, SymInt? after,"
    " SymInt[] block) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # it waits for the GPU
)
_library.define(
    "tile_lists_varlen(Tensor cu_q, Tensor cu_k, Tensor[] tensors, str key, float[] numbers, SymInt[] sizes,"
    " SymInt? before, SymInt? after, SymInt[] block) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def new_lists(mod: Mod, sizes: Sizes, edges: Band, block: tuple[int, int], device: torch.device) -> Lists:
    """The lists of a mask mod in calls of these sizes with this band."""
    if not torch.compiler.is_compiling():
        return both_lists(all_kinds(mod, sizes, edges, block, device), block)
    tensors = [x.detach() for x in mod.tensors]
    like = torch.empty(0, dtype=torch.int32, device=device)
    lists: Lists = torch.ops.tilewise_mods.tile_lists(
        like, tensors, mod.key, list(mod.numbers), list(sizes), *edges, list(block)
    )
    return lists


def new_packed_lists(
    mod: Mod, cu: tuple[Tensor, Tensor], lengths: Sequence[list[int]] | None, sizes: Sizes, edges: Band, block: Any
) -> Lists:
    """`new_lists` for packed sequences with these offsets. `lengths`: those of queries and of keys; None in
    torch.compile, where they are not known."""
    if lengths is not None:
        return both_lists(packed_kinds(mod, lengths, sizes, edges, block, cu[0].device), block)
    tensors = [x.detach() for x in mod.tensors]
    lists: Lists = torch.ops.tilewise_mods.tile_lists_varlen(
        *cu, tensors, mod.key, list(mod.numbers), list(sizes), *edges, list(block)
    )
    return lists


@torch.library.impl(_library, "tile_lists", "CompositeExplicitAutograd")
def _tile_lists(like: Tensor, *rest: Any) -> Lists:
    mod, sizes, edges, block = _described(*rest)
    kinds = all_kinds(mod, sizes, edges, block, like.device)
    return _padded(both_lists(kinds, block), kinds.numel())


@torch.library.impl(_library, "tile_lists_varlen", "CompositeExplicitAutograd")
def _tile_lists_varlen(cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Lists:
    mod, sizes, edges, block = _described(*rest)
    lengths = lengths_of(cu_q, cu_k)
    for side, most in zip("qk", sizes[2:], strict=True):
        largest(side, most, lengths)
    check_tables(mod, (None, None, *map(max, lengths)))
    kinds = packed_kinds(mod, lengths, sizes, edges, block, cu_q.device)
    return _padded(both_lists(kinds, block), kinds.numel())


def _described(
    tensors: list[Tensor], key: str, numbers: list[float], sizes: Any, before: int | None, after: int | None, block: Any
) -> tuple[Mod, Sizes, Band, tuple[int, int]]:
    """The mod, the sizes, the band and the tile that both ops take as their last arguments."""
    batch, heads, n_q, n_k = sizes
    block_q, block_k = block
    mod = Mod("mask", key, tuple(tensors), tuple(numbers))
    return mod, (batch, heads, n_q, n_k), (before, after), (block_q, block_k)


def _padded(lists: Lists, most: int) -> Lists:
    rows, tiles, columns, others = lists
    tiles, others = (pad(x, (0, most - len(x))) for x in (tiles, others))
    return rows, tiles, columns, others


@torch.library.register_fake("tilewise_mods::tile_lists", lib=_library)
def _tile_lists_fake(like: Tensor, tensors: Any, key: str, numbers: Any, sizes: Any, *rest: Any) -> Lists:
    (batch, heads, *lengths), block = sizes, rest[2]
    rows, columns = (batch * heads * ((n + size - 1) // size) for n, size in zip(lengths, block, strict=True))
    most = rows * ((lengths[1] + block[1] - 1) // block[1])
    a, b, c, d = (like.new_empty(n, dtype=torch.int32) for n in (rows + 1, most, columns + 1, most))
    return a, b, c, d


@torch.library.register_fake("tilewise_mods::tile_lists_varlen", lib=_library)
def _tile_lists_varlen_fake(cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Lists:
    lists: Lists = _tile_lists_fake(cu_q, *rest)
    return lists


def kinds_of(lists: Sequence[Tensor], lines: Sequence[int]) -> Tensor:
    """(B, H, Tq, Tk) int8: the kinds of the tiles, 0 for those that are not in the lists. `lines`: B and H."""
    offsets, entries, columns, _ = lists
    batch, heads = lines
    device, width = entries.device, (columns.shape[0] - 1) // (batch * heads)
    kinds = torch.zeros(offsets.shape[0] * width, dtype=torch.int8, device=device)  # the last row is of no tile
    rows = torch.searchsorted(offsets[1:], torch.arange(entries.shape[0], device=device, dtype=torch.int32), right=True)
    kinds[rows * width + entries.long() // 4] = (entries % 4).to(torch.int8)
    return kinds.view(-1, width)[:-1].view(batch, heads, -1, width)


def both_lists(kinds: Tensor, block: tuple[int, int]) -> Lists:
    """The lists of (B, H, Tq, Tk) kinds: of the rows, and of the columns."""
    lists: Lists = (*_lists(kinds.flatten(0, 2)), *_lists(kinds.mT.flatten(0, 2)))
    if len(lists[1]) * max(block) >= 2**31:
        raise AttentionError("visited tiles of a block mask", len(lists[1]), f"fewer than {2**31 // max(block)}")
    return lists


def _lists(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets (rows + 1,) and entries of the visited tiles of (rows, columns) kinds."""
    visited = kinds > 0
    offsets = torch.zeros(len(kinds) + 1, dtype=torch.int32, device=kinds.device)
    offsets[1:] = visited.sum(1).cumsum(0)
    rows, columns = visited.nonzero(as_tuple=True)
    return offsets, (4 * columns + kinds[rows, columns]).to(torch.int32)


def all_kinds(mod: Mod, sizes: Sizes, edges: Band, block: tuple[int, int], device: torch.device) -> Tensor:
    """(B, H, Tq, Tk) int8: 0 empty, 1 the mod hides some pairs, 2 only the band does, 3 full."""
    batch, heads, n_q, n_k = sizes
    lines = [(b, h) for b in range(batch) for h in range(heads)]
    kinds = torch.stack([kinds_of_tiles(mod, Tiles(line, n_q, n_k, block, device), edges) for line in lines])
    found: Tensor = kinds.unflatten(0, (batch, heads))
    return found


def kinds_of_tiles(mod: Mod, tiles: Tiles, edges: Band) -> Tensor:
    """The kinds of some tiles of one head."""
    return tile_kinds(mod.program.root, tiles, edges, mod.tensors, mod.numbers)


def lengths_of(cu_q: Tensor, cu_k: Tensor) -> list[list[int]]:
    """The numbers of queries and of keys of packed sequences."""
    return [x.diff().tolist() for x in (cu_q, cu_k)]


def packed_kinds(
    mod: Mod, lengths: Sequence[list[int]], sizes: Sizes, edges: Band, block: tuple[int, int], device: torch.device
) -> Tensor:
    """`all_kinds` of packed sequences. `sizes`: those of the result, with the largest lengths or larger ones."""
    batch, heads, n_q, n_k = sizes
    tiles = batch, heads, -(-n_q // block[0]), -(-n_k // block[1])
    kinds = torch.zeros(tiles, dtype=torch.int8, device=device)
    for b, (rows, keys) in enumerate(zip(*lengths, strict=True)):
        for h in range(heads if min(rows, keys) > 0 else 0):
            own = kinds_of_tiles(mod, Tiles((b, h), rows, keys, block, device), edges)
            kinds[b, h, : own.shape[0], : own.shape[1]] = own
    return kinds


def largest(side: str, given: int | None, lengths: Sequence[list[int]] | None) -> int:
    """max_seqlen_q or max_seqlen_k, by `side`; if it is not given, the length of the longest sequence."""
    what = f"max_seqlen_{side} of a block mask"
    if given is not None and (not is_whole(given) or given < 1):
        raise AttentionError(what, shown(given), "an int, at least 1")
    if lengths is None:
        if given is None:
            raise AttentionError(f"{what} in torch.compile", "None", "the largest length: lengths are not read there")
        return given
    most = max(1, *lengths["qk".index(side)])
    if given is not None and given < most:
        raise AttentionError(what, given, f"at least {most}, the length of a sequence")
    return most if given is None else given


def grown_kinds(mod: Mod, kinds: Tensor, old: Sizes, tokens: int, edges: Band, block: tuple[int, int]) -> Tensor:
    """`all_kinds` of a sequence with so many more queries and keys than `kinds`, of the sizes `old`. Tiles of old
    tokens alone are copied, unless the mod reads a length other than in the position of a query."""
    batch, heads, n_q, n_k = old
    device = kinds.device
    sizes = batch, heads, n_q + tokens, n_k + tokens
    rows, columns = n_q // block[0], n_k // block[1]  # tiles without new tokens
    if min(rows, columns) < 1 or not only_difference([mod.program.root], N_Q, N_K):
        return all_kinds(mod, sizes, edges, block, device)
    each = []
    for line in [(b, h) for b in range(batch) for h in range(heads)]:
        every = Tiles(line, sizes[2], sizes[3], block, device)
        right = kinds_of_tiles(mod, every._replace(first=(0, columns), last=(rows, None)), edges)
        below = kinds_of_tiles(mod, every._replace(first=(rows, 0)), edges)
        each.append(torch.cat([torch.cat([kinds[line][:rows, :columns], right], 1), below]))
    found: Tensor = torch.stack(each).unflatten(0, (batch, heads))
    return found


def of_part(mod: Mod, start: int, lengths: tuple[int, int], own: tuple[int, int], device: torch.device) -> Mod:
    """The mask mod of the queries from `start` on: it shows the pairs that `mod` shows of a sequence with these numbers
    of queries and keys, in calls with `own` ones. The numbers are a tensor of it, so that kernels are the same for
    all."""
    n_q, n_k = lengths
    shift = start + n_k - n_q
    is_aligned = shift == own[1] - own[0]  # a query's distance from the last key
    key = part_key(mod.key, True) if is_aligned else part_key(mod.key, False)  # torch.compile has a symbol for it
    if key == mod.key:
        return mod
    numbers = torch.tensor([start, n_q, n_k, shift], dtype=torch.int32, device=device)
    return mod._replace(key=key, tensors=(*mod.tensors, numbers))


@constant
def part_key(key: str, is_aligned: bool) -> str:
    """The key of a mask in the indices of a part of the queries, as in `of_part`; the same if it reads none of them."""
    return _kept_part_key(key, is_aligned)


@lru_cache(LIMIT)
def _kept_part_key(key: str, is_aligned: bool) -> str:
    program = PROGRAMS[key]
    at = len(program.ranks)

    def number(n: int, least: int) -> Expr:
        x = load(at, const(n), kind="int")
        return arithmetic("max", arithmetic("min", x, const(TOKENS)), const(least))  # bounds: 32 bits hold the sum

    def moved(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if x is Q_POS:
            return Q_POS if is_aligned else arithmetic("add", I, number(3, -TOKENS))
        if x is I:
            return arithmetic("add", I, number(0, 0))
        return number(1 if x is N_Q else 2, 0) if x in (N_Q, N_K) else None

    root = substitute(program.root, moved)
    return key if root is program.root else register(Program(root, (*program.ranks, 1), program.numbers))


def check_mask(mod: Mod, block: tuple[int, int], sizes: dict[str, int]) -> None:
    """Raises for a mod, a tile or sizes (by `b`, `h`) that a block mask cannot have."""
    if not isinstance(mod, Mod) or mod.kind != "mask":
        raise AttentionError("the mask of a block mask", shown(mod), "a tilewise.mask_mod, called")
    check_filled(mod)
    if not (isinstance(block, tuple | list) and len(block) == 2 and all(isinstance(x, int) for x in block)):
        raise AttentionError("block", shown(block), "(queries, keys) of a tile, such as (128, 128)")
    if min(block) < 16 or any(x % 16 for x in block):
        raise AttentionError("tiles of a block mask", block, "multiples of 16 (on a GPU powers of two from 128 on)")
    for axis, size in sizes.items():
        if size == 1 and _depends(mod, axis):
            hint = {"b": "batch", "h": "heads"}[axis]
            raise AttentionError(
                f"{hint} of a block mask", 1, f"{hint}= as in the calls it is for: the mask reads {axis}"
            )


def _depends(mod: Mod, axis: str) -> bool:
    """Whether the mod reads the index b or h, other than at axes of size 1."""
    return _reads(mod.key, axis, tuple([tuple([1 if n == 1 else 0 for n in x.shape]) for x in mod.tensors]))


@constant
def _reads(key: str, axis: str, single: tuple[tuple[int, ...], ...]) -> bool:
    """`single`: which axes of each tensor have size 1."""
    return _kept_reads(key, axis, single)


@lru_cache(LIMIT)
def _kept_reads(key: str, axis: str, single: tuple[tuple[int, ...], ...]) -> bool:
    def at_0(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if x.op != "load":
            return None
        ones = single[x.value]
        return load(x.value, *(const(0) if one else a for a, one in zip(args, ones, strict=True)), kind=x.kind)

    return axis in substitute(PROGRAMS[key].root, at_0).deps


def check_devices(mod: Mod, device: torch.device) -> None:
    """Raises unless the mod's tensors are on this device."""
    for x in mod.tensors:
        if x.device.type != device.type or (device.index is not None and x.device != device):
            raise AttentionError("device of a tensor of the block mask's mod", x.device, f"{device}, as of the mask")
