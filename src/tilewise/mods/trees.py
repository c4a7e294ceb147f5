"""Prefix trees: sequences that share prefixes, packed as one sequence in which every shared token is computed once.

A prompt with n continuations, which may continue further, is a tree of segments. Segment s holds the tokens
cu_segments[s] to cu_segments[s + 1] - 1 of the packed sequence and continues segment parents[s], which comes before it;
-1 is a root. A token sees its own segment up to itself and all tokens of the segments before it on the way to the root.
So each token has the same keys as in a sequence of its own, and with the positions of `tree_positions` the same result.

The mask needs no table of pairs. In a depth-first walk the segments below s are those entered from enter[s] to
leave[s] - 1: segment s is an ancestor of t, or t itself, if enter[s] <= enter[t] < leave[s].
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import AttentionError
from ..torch_internals import constant
from .modifier import mask_mod
from .program import Mod


@mask_mod
def _on_path(b, h, q_idx, kv_idx, enter, leave, *, q_pos):  # type: ignore[no-untyped-def]
    at = enter[q_pos]
    return (kv_idx <= q_pos) & (enter[kv_idx] <= at) & (at < leave[kv_idx])


def prefix_tree(parents: Tensor, cu_segments: Tensor) -> Mod:
    """A mask mod for trees packed into one sequence: a token sees its own segment up to itself, and its ancestors.

    >>> # a prompt with two continuations
    >>> parents, cu_segments = torch.tensor([-1, 0, 0]), torch.tensor([0, 2, 4, 5])
    >>> mod, tokens = prefix_tree(parents, cu_segments), torch.arange(5)
    >>> mod(0, 0, tokens[:, None], tokens).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 0, 0, 1]], dtype=torch.int32)

    `tilewise.block_mask(prefix_tree(...), S, S, causal=True)`, used in calls with causal=True, skips the tiles of other
    branches and does not evaluate the mod where a tile sees all of an ancestor. Both tensors are read on the host.

    Args:
        parents: (segments,) int32 or int64. The segment that each one continues, which has a smaller number; -1: none.
        cu_segments: (segments + 1,) int32 or int64. Segment s holds the tokens cu_segments[s] to cu_segments[s + 1] - 1
            of the sequence. Segments may be empty.

    Returns:
        The mod, with its tensors on the device of cu_segments.

    Raises:
        AttentionError: a segment continues itself or a later one, or the tensors are not as above.
    """
    up, ends = _checked("prefix_tree", parents, cu_segments)
    sizes = [1] * len(up)  # segments of each subtree
    for s in reversed(range(len(up))):
        if up[s] >= 0:
            sizes[up[s]] += sizes[s]
    enter, free, roots = [0] * len(up), [0] * len(up), 0
    for s, parent in enumerate(up):
        if parent < 0:
            enter[s], roots = roots, roots + sizes[s]
        else:
            enter[s] = free[parent]
            free[parent] += sizes[s]
        free[s] = enter[s] + 1
    leave = [at + size for at, size in zip(enter, sizes, strict=True)]
    mod: Mod = _on_path(*(_by_token(x, ends, cu_segments.device) for x in (enter, leave)))
    return mod._replace(name="prefix_tree")


def check_tree(mod: Mod, keys: int, sequences: int) -> None:
    """Raises if a prefix tree has too few tokens for packed sequences with so many rows of keys: if they fill these
    rows, one of them is longer than the tree. Their lengths are on the device and are not read."""
    if mod.key != _tree_key() or not mod.tensors:
        return
    tokens = mod.tensors[0].shape[0]
    if tokens * sequences < keys:
        where = "1 sequence" if sequences == 1 else f"{sequences} sequences, which all read the tree from its start"
        hint = "; without rows of k past the last sequence"
        raise AttentionError("tokens of the prefix_tree", tokens, f"enough for k's {keys} tokens in {where}{hint}")


@constant
def _tree_key() -> str:
    return _kept_tree_key()


@cache
def _kept_tree_key() -> str:
    of_one_token = torch.zeros(1, dtype=torch.int32, device="cpu")
    mod: Mod = _on_path(of_one_token, of_one_token)
    return mod.key


def tree_positions(parents: Tensor, cu_segments: Tensor) -> Tensor:
    """The position of every token in the sequence from its root: what RoPE and other position embeddings need.

    >>> tree_positions(torch.tensor([-1, 0, 0]), torch.tensor([0, 2, 4, 5]))
    tensor([0, 1, 2, 3, 2])

    Args:
        parents: as in `prefix_tree`.
        cu_segments: as in `prefix_tree`.

    Returns:
        (tokens,) int64, on the device of cu_segments.

    Raises:
        AttentionError: as in `prefix_tree`.
    """
    up, ends = _checked("tree_positions", parents, cu_segments)
    first: list[int] = []  # the position of each segment's first token
    for parent in up:
        first.append(0 if parent < 0 else first[parent] + ends[parent + 1] - ends[parent])
    start = _by_token([at - begin for at, begin in zip(first, ends, strict=False)], ends, cu_segments.device)
    return torch.arange(ends[-1], device=cu_segments.device) + start


def _by_token(values: list[int], ends: list[int], device: torch.device) -> Tensor:
    """(tokens,) int32: the value of each token's segment."""
    lengths = torch.tensor(ends, device="cpu").diff()
    return torch.tensor(values, dtype=torch.int32, device="cpu").repeat_interleave(lengths).to(device)


def _checked(name: str, parents: Tensor, cu_segments: Tensor) -> tuple[list[int], list[int]]:
    """Both as lists."""
    for what, x in (("parents", parents), ("cu_segments", cu_segments)):
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"{what} of {name}", found, "a tensor of int32 or int64 with one axis")
        if x.is_meta:
            raise AttentionError(f"device of {what} of {name}", x.device, "a CPU or GPU: its values are read")
    up, ends = parents.tolist(), cu_segments.tolist()
    if not up or len(ends) != len(up) + 1:
        raise AttentionError(
            f"cu_segments of {name}", f"{len(ends)} numbers for {len(up)} segments", "one more than segments, 1 or more"
        )
    for s, parent in enumerate(up):
        if not -1 <= parent < s:
            raise AttentionError(f"parents[{s}] of {name}", parent, f"a segment before {s}, or -1 for a root")
    if ends[0] != 0:
        raise AttentionError(f"cu_segments[0] of {name}", ends[0], "0")
    for s, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise AttentionError(f"cu_segments[{s + 1}] of {name}", b, f"at least cu_segments[{s}], {a}")
    if ends[-1] == 0:
        raise AttentionError(f"cu_segments of {name}", "no tokens", "at least one")
    return up, ends
