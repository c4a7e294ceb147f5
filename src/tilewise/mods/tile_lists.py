"""The tile lists of a block mask: made from a mask mod, or read back; and the mod of some queries of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.errors import AttentionError, shown
from tilewise.mods.bounds import TOKENS, only_difference
from tilewise.mods.expr import N_K, N_Q, Q_POS, Expr, I, arithmetic, const, load, substitute
from tilewise.mods.program import Mod, Program, check_filled, register
from tilewise.mods.tile_bounds import Tiles, tile_kinds

Lists = tuple[Tensor, Tensor, Tensor, Tensor]
Band = tuple[int | None, int | None]
Sizes = tuple[int, int, int, int]  # B, H, n_q, n_k


def kinds_of(lists: Sequence[Tensor], lines: Sequence[int]) -> Tensor:
    """(B, H, Tq, Tk) int8: the kinds of the tiles, 0 for those that are not in the lists. `lines`: B and H."""
    offsets, entries, columns, _ = lists
    batch, heads = lines
    device, width = entries.device, (len(columns) - 1) // (batch * heads)
    kinds = torch.zeros(len(offsets) - 1, width, dtype=torch.int8, device=device)
    rows = torch.repeat_interleave(torch.arange(len(kinds), device=device), offsets.diff(), output_size=len(entries))
    kinds[rows, entries.long() // 4] = (entries % 4).to(torch.int8)
    return kinds.view(batch, heads, -1, width)


def both_lists(kinds: Tensor, block: tuple[int, int]) -> Lists:
    """The lists of (B, H, Tq, Tk) kinds: of the rows, and of the columns."""
    lists = (*_lists(kinds.flatten(0, 2)), *_lists(kinds.mT.flatten(0, 2)))
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
    at = len(mod.tensors)

    def number(n: int, least: int) -> Expr:
        x = load(at, const(n), kind="int")
        return arithmetic("max", arithmetic("min", x, const(TOKENS)), const(least))  # bounds: 32 bits hold the sum

    def moved(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if x is Q_POS:
            return Q_POS if is_aligned else arithmetic("add", I, number(3, -TOKENS))
        if x is I:
            return arithmetic("add", I, number(0, 0))
        return number(1 if x is N_Q else 2, 0) if x in (N_Q, N_K) else None

    program = mod.program
    root = substitute(program.root, moved)
    if root is program.root:
        return mod
    numbers = torch.tensor([start, n_q, n_k, shift], dtype=torch.int32, device=device)
    key = register(Program(root, (*program.ranks, 1), program.numbers))
    return mod._replace(key=key, tensors=(*mod.tensors, numbers))


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

    def at_0(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if x.op != "load":
            return None
        sizes = mod.tensors[x.value].shape
        return load(x.value, *(const(0) if n == 1 else a for a, n in zip(args, sizes, strict=True)), kind=x.kind)

    return axis in substitute(mod.program.root, at_0).deps


def check_devices(mod: Mod, device: torch.device) -> None:
    """Raises unless the mod's tensors are on this device."""
    for x in mod.tensors:
        if x.device.type != device.type or (device.index is not None and x.device != device):
            raise AttentionError("device of a tensor of the block mask's mod", x.device, f"{device}, as of the mask")
