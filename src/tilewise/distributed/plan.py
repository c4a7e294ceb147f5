"""The plan: a division of tokens, with the ranks that carry it out; and how the caller's words become one.

plan = tilewise.distributed.plan(mesh, seqlen=1_000_000, causal=True)
q, k, v = plan.shard(q, k, v, dim=1)
out = tilewise.distributed.attention(q, k, v, plan=plan)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttentionError
from ..mods.dropout import is_whole
from ..mods.program import Mod
from ..request import Window
from ..request import band as band_of
from ..torch_internals import constant
from ..validation.dense import tensor
from .cluster import gathered, group_of
from .division import STRATEGIES, Division
from .layout import LAYOUTS, lasting, positions, starts, tokens
from .pass_time import fastest
from .tiles import Band

if TYPE_CHECKING:
    from tilewise_lab.costs.context_parallel import Simulation

REMEMBERED = 256  # plans, so that the same words give the same one, and a backward finds that of its forward
_made: dict[Any, Plan] = {}
_numbers = itertools.count()
PLANS: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # the ops know a plan by its number


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Division):
    """Made by `tilewise.distributed.plan`: a division of tokens among the ranks of a mesh, or among some in thought."""

    mask: Mod | None = None
    group: Any = None
    node: int = 8
    number: int = field(default_factory=_numbers.__next__)

    def __post_init__(self) -> None:
        PLANS[self.number] = self

    def __reduce__(self) -> Any:
        """In another process its number is another's: it gets a new one."""
        return Plan, tuple(getattr(self, x.name) for x in fields(self) if x.name != "number")

    def __deepcopy__(self, _memo: Any) -> Plan:
        return self

    @property
    def rank(self) -> int:
        """This process, in the group of the plan."""
        if self.group is not None:
            return dist.get_rank(self.group)
        if self.ranks == 1:
            return 0
        raise AttentionError(
            "rank in this plan", f"none: it is for {self.ranks} ranks in thought", "a plan of a mesh; or rank=..."
        )

    def index(self, rank: int | None = None, device: Any = None) -> Tensor:
        """The places in the stream of the tokens that a rank (this one) holds."""
        return _moved(self, "index", self.rank if rank is None else rank, device)

    def positions(self, rank: int | None = None, device: Any = None) -> Tensor:
        """Of the tokens that a rank (this one) holds, within their documents: what RoPE wants.

        >>> plan(4, seqlen=10, causal=True).positions(rank=1)
        tensor([1, 7])
        """
        return _moved(self, "positions", self.rank if rank is None else rank, device)

    def shard(self, *tensors: Tensor, dim: int = 1, rank: int | None = None) -> Any:
        """This rank's part of whole tensors, along their axis of tokens: one for one, a tuple for several.

        >>> plan(2, seqlen=8, causal=True).shard(torch.arange(8), dim=0, rank=0)
        tensor([0, 1, 6, 7])
        """
        found = []
        for x in tensors:
            if not -tensor("a tensor to shard", x).dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
                raise AttentionError(
                    "shape of a tensor to shard", tuple(x.shape), f"the plan's {self.tokens} tokens along dim {dim}"
                )
            found.append(x.index_select(dim, self.index(rank, x.device)))
        return found[0] if len(found) == 1 else tuple(found)

    def labels(self, tokens: Tensor, dim: int = 1, ignore: int = -100, rank: int | None = None) -> Tensor:
        """This rank's labels for the prediction of the next token: shifted while the sequence is whole, so that the
        last token of a shard is asked for the first of the next; `ignore` at the end of each document.

        >>> plan(2, seqlen=8, causal=True).labels(torch.arange(8), dim=0, rank=0)
        tensor([   1,    2,    7, -100])
        """
        shifted = tokens.roll(-1, dim)
        ends = torch.tensor(starts(self.lengths)[1:], device=tokens.device)
        ends = ends[torch.tensor(self.lengths, device=tokens.device) > 0] - 1
        shifted = shifted.index_fill(dim, ends, ignore)
        result: Tensor = self.shard(shifted, dim=dim, rank=rank)
        return result

    def unshard(self, x: Tensor | Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor from this rank's part, on every rank (differentiable: a rank's gradient is that of its
        part); from the parts of all ranks, if given a list of them."""
        if isinstance(x, Tensor):
            x = gathered(x, dim, self.counts(), self.rank, self.group)
        parts = list(x)
        order = torch.cat([self.index(r, parts[0].device) for r in range(self.ranks)])
        return torch.cat(parts, dim).index_select(dim, order.argsort())

    def banded(self, *, causal: bool = False, window: Window | None = None) -> Plan:
        """The same tokens on the same ranks, seen through another band: for layers of a model whose windows differ.

        >>> plan(8, seqlen=65536, causal=True).banded(window=(1023, 0))
        <plan: 65536 tokens on 8 ranks, window (1023, 0), halo, zigzag>
        """
        band = band_of(causal, window)
        return self if band == self.band else again(self, band=band)

    def simulate(self, machine: str = "8xH200+400G", *, ranks: int | None = None, **shape: Any) -> Simulation:
        """What a pass of attention would take on a cluster.

        Args:
            machine: GPUs of a node, their name, and the network between nodes.
            ranks: another number of ranks than the plan's, or None.
            shape: heads, kv_heads, dim, batch, dtype, backward and links, as of
                `tilewise_lab.costs.context_parallel.simulate`. Like `tilewise.explain`, this imports the laboratory
                when it is called.
        """
        from tilewise_lab.costs.context_parallel import simulate

        return simulate(self if ranks is None else again(self, ranks=ranks), machine, **shape)


@lru_cache(4096)
@lasting
def _moved(of: Plan, what: str, rank: int, device: Any) -> Tensor:
    if not 0 <= rank < of.ranks:
        raise AttentionError("rank", rank, f"0 to {of.ranks - 1}, of {of!r}")
    shard = of.shards[rank]
    found = tokens(shard, of.lengths) if what == "index" else positions(shard)
    return found if device is None else found.to(device)


def plan(
    mesh: Any = None, *, seqlen: int | None = None, cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False, window: Window | None = None, mask: Mod | None = None, strategy: str = "auto",
    layout: str = "auto", heads: int | None = None, queries: int = 1, node: int | None = None,
) -> Plan:  # fmt: skip
    """How attention over so many tokens is divided among the ranks of a mesh.

    >>> plan(8, seqlen=65536, causal=True)
    <plan: 65536 tokens on 8 ranks, causal, ring, zigzag>

    mesh: a DeviceMesh (of two axes: nodes, and the GPUs of a node), a ProcessGroup, None for the default one; or just a
        number of ranks, for simulation and for `rehearse`.
    seqlen, cu_seqlens: the length of the sequence, or the ends of packed documents as in `attention_varlen`. Lengths
        need not divide by anything.
    causal, window, mask: as of `attention` (mask: its mask_mod), over the whole sequence.
    strategy:
        "ring"        keys and values go around, the next hop under way while a tile is computed; least memory
        "allgather"   all keys and values to all: fewer, larger calls, at the price of their memory
        "halo"        each rank is sent the keys that it sees and no others: for windows and documents
        "ulysses"     heads for tokens: each rank attends over the whole sequence with some of the heads
        "two-level"   Ulysses in the node, the ring between nodes
        "tree"        decoding: the cache is sharded by tokens, `queries` last queries are everywhere; partial results
                      are merged in log2(ranks) exchanges
        "auto"        two-level on several nodes where `heads` allow it, else the ring; for windows and documents, halo
                      where the simulator (of H200s, with `heads` or 32) finds it as fast
    layout: see `tilewise.distributed.layout`; "auto" is zigzag for causal, contiguous for windows and full attention,
        by document for packed ones.
    node: how many ranks share fast links; 8 unless the mesh says.
    """
    ranks, group, found = _ranks(mesh)
    for name, given in (("node", node), ("heads", heads)):
        if given is not None and (not is_whole(given) or given < 1):
            raise AttentionError(f"{name} of a plan", repr(given), "at least 1, or None")
    node = node or found or min(8, ranks)
    lengths = _lengths(seqlen, cu_seqlens)
    if not isinstance(causal, bool):
        raise AttentionError("causal", repr(causal), "True or False")
    before, after = band_of(causal, window)
    if strategy not in (*STRATEGIES, "auto"):
        raise AttentionError("strategy", repr(strategy), " or ".join(map(repr, (*STRATEGIES, "auto"))))
    if layout not in (*LAYOUTS, "auto"):
        raise AttentionError("layout", repr(layout), " or ".join(map(repr, (*LAYOUTS, "auto"))))
    if mask is not None and (not isinstance(mask, Mod) or mask.kind != "mask"):
        raise AttentionError("mask of a plan", repr(mask), "a tilewise.mask_mod, called (block masks are for one GPU)")
    if strategy == "tree" and (cu_seqlens is not None or queries < 1):
        raise AttentionError("strategy='tree'", "packed documents" if queries >= 1 else f"queries={queries}",
                             "seqlen, and at least one query")  # fmt: skip
    packed = cu_seqlens is not None
    if strategy == "auto":
        strategy = _strategy(ranks, lengths, (before, after), node, heads, packed)
    if layout == "auto":
        layout = _layout(strategy, (before, after), packed)
    width = {"ulysses": ranks, "two-level": node}.get(strategy, 1)
    if ranks % max(1, width):
        raise AttentionError("ranks of a two-level plan", ranks, f"a multiple of the {width} of a node (node=...)")
    named = (ranks, lengths, packed, (before, after), strategy, layout, width, queries if strategy == "tree" else 0)
    # neither id(None) nor that of a group is traced by torch.compile of 2.10 and 2.11
    key = (*named, mask if mask is None else id(mask), group if group is None else group.group_name, node)
    made = _made.get(key)
    if made is None or made.mask is not mask or made.group is not group:
        while len(_made) >= REMEMBERED:
            _made.pop(next(iter(_made)))
        made = _made[key] = Plan(*named, mask, group, node)
    return made


def again(of: Plan, *, ranks: int | None = None, band: Band | None = None) -> Plan:
    """The same sequence on other ranks, in thought; or seen through another band, with its tokens where they are."""
    given: dict[str, Any] = {"cu_seqlens": starts(of.lengths)} if of.packed else {"seqlen": of.tokens}
    mesh, strategy, layout = of.group or of.ranks, of.strategy, of.layout
    if ranks is not None:
        mesh, strategy = ranks, "auto" if ranks == 1 else strategy
    if band is None:
        band = of.band
    else:
        suits = _strategy(of.ranks, of.lengths, band, of.node, None, of.packed)
        strategy = suits if "halo" in (suits, strategy) else strategy
    return plan(mesh, **given, window=band, mask=of.mask, strategy=strategy, layout=layout,
                queries=max(1, of.queries), node=of.node)  # fmt: skip


@constant
def _strategy(*question: Any) -> str:
    """`_found_strategy`, which torch.compile need not look into."""
    return _found_strategy(*question)


@lru_cache(REMEMBERED)
def _found_strategy(
    ranks: int, lengths: tuple[int, ...], band: Band, node: int, heads: int | None, packed: bool
) -> str:  # fmt: skip
    """Several nodes: two-level, unless there are fewer heads than GPUs in a node; else the ring. A window that reaches
    over less than half of the ranks, and packed documents: halo, if the simulator has nothing against it."""
    before, after = band
    share = max(1, sum(lengths) // ranks)
    reach = (before if before is not None else sum(lengths)) + (after if after is not None else sum(lengths))
    wide = ranks > node > 1 and ranks % node == 0 and (heads is None or heads >= node)
    dense = "two-level" if wide else "ring"
    if ranks == 1 or not sum(lengths) or not (packed or reach // share + 1 < ranks / 2):
        return dense
    options = [
        Division(ranks, lengths, packed, band, x, _layout(x, band, packed), node if x == "two-level" else 1)
        for x in ("halo", dense)
    ]
    return fastest(options, node, heads or 32).strategy


def _layout(strategy: str, band: Band, packed: bool) -> str:
    before, after = band
    if strategy in ("ulysses", "tree"):
        return "contiguous"
    if packed:
        return "document"
    return "zigzag" if after is not None and before is None else "contiguous"


def _lengths(seqlen: int | None, cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...]:
    if (seqlen is None) == (cu_seqlens is None):
        both = "neither" if seqlen is None else "both"
        raise AttentionError("seqlen and cu_seqlens", both, "one of them")
    if seqlen is not None:
        if isinstance(seqlen, bool) or not hasattr(seqlen, "__index__") or seqlen < 0:
            raise AttentionError("seqlen", repr(seqlen), "an int >= 0")
        return (int(seqlen),)
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens or ())
    if any(not hasattr(x, "__index__") for x in ends):
        raise AttentionError("cu_seqlens", ends[:8], "whole numbers, in one line")
    ends = [int(x) for x in ends]
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        raise AttentionError(
            "cu_seqlens", ends if len(ends) < 9 else f"{ends[:8]}...", "from 0 on, none below the last"
        )
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _ranks(mesh: Any) -> tuple[int, Any, int | None]:
    """How many, the process group (None where there is none), and the GPUs of a node, if the mesh has two axes."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if mesh < 1:
            raise AttentionError("ranks of a plan", mesh, "at least 1")
        return mesh, None, None
    return group_of(mesh)
