"""`plan` and its result, `Plan`: a partition of a sequence with the process group whose ranks execute it."""

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

from ..errors import AttentionError, shown
from ..mods.dropout import is_whole
from ..mods.program import Mod
from ..request import Window
from ..request import band as band_of
from ..torch_internals import constant
from ..validation.dense import tensor
from .cluster import gathered, group_of
from .layout import LAYOUTS, cacheable, positions, starts, token_index
from .partition import STRATEGIES, Partition
from .pass_time import fastest
from .tiles import Band

if TYPE_CHECKING:
    from tilewise_lab.costs.context_parallel import Simulation

MAX_PLANS = 256  # that are kept, so that equal arguments give the same plan
_plans: dict[Any, Plan] = {}
_numbers = itertools.count()
PLANS: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # by number, for the registered ops


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Partition):
    """A partition of a sequence among the ranks of a mesh, or among a number of ranks without processes. Made by
    `tilewise.distributed.plan`.

    Attributes:
        ranks: number of ranks.
        lengths: the length of each document; a sequence that is not packed is one document.
        packed: whether the documents were given as cu_seqlens.
        band: (left, right) of causal and window, None where unbounded.
        strategy: how keys reach queries, as in `tilewise.distributed.plan`.
        layout: which tokens a rank holds, as in `tilewise.distributed.plan`.
        ulysses_size: number of neighbouring ranks that exchange heads for tokens; 1 without Ulysses.
        queries: number of queries of strategy "tree"; otherwise 0.
        mask: a mask mod for all calls, or None.
        group: the process group, or None.
        node: number of ranks that share fast links.
        number: number by which the registered ops know the plan.
    """

    mask: Mod | None = None
    group: Any = None
    node: int = 8
    number: int = field(default_factory=_numbers.__next__)

    def __post_init__(self) -> None:
        PLANS[self.number] = self

    def __reduce__(self) -> Any:
        """Without the number: another process gives it its own."""
        return Plan, tuple(getattr(self, x.name) for x in fields(self) if x.name != "number")

    def __deepcopy__(self, _memo: Any) -> Plan:
        return self

    @property
    def rank(self) -> int:
        """The rank of this process in the plan's group."""
        if self.group is not None:
            return dist.get_rank(self.group)
        if self.ranks == 1:
            return 0
        raise AttentionError(
            "rank in this plan",
            f"none: it was made for {self.ranks} ranks without a process group",
            "a plan of a mesh; or rank=...",
        )

    def index(self, rank: int | None = None, device: Any = None) -> Tensor:
        """The indices in the whole sequence of the tokens that a rank holds.

        Args:
            rank: number of a rank. Default: that of this process.
            device: device of the result. Default: the CPU.

        Returns:
            (tokens of the rank,) int64.

        Raises:
            AttentionError: there is no such rank.
        """
        return _rank_tokens(self, "index", self.rank if rank is None else rank, device)

    def positions(self, rank: int | None = None, device: Any = None) -> Tensor:
        """The positions within their documents of the tokens that a rank holds, for RoPE.

        >>> plan(4, seqlen=10, causal=True).positions(rank=1)
        tensor([1, 7])

        Args:
            rank: number of a rank. Default: that of this process.
            device: device of the result. Default: the CPU.

        Returns:
            (tokens of the rank,) int64.

        Raises:
            AttentionError: there is no such rank.
        """
        return _rank_tokens(self, "positions", self.rank if rank is None else rank, device)

    def shard(self, *tensors: Tensor, dim: int = 1, rank: int | None = None) -> Any:
        """The parts of whole tensors that a rank holds.

        >>> plan(2, seqlen=8, causal=True).shard(torch.arange(8), dim=0, rank=0)
        tensor([0, 1, 6, 7])

        Args:
            tensors: tensors with all tokens along `dim`.
            dim: the dimension of tokens.
            rank: number of a rank. Default: that of this process.

        Returns:
            A tensor for one, a tuple for several.

        Raises:
            AttentionError: if a tensor does not have the plan's number of tokens along `dim`.
        """
        found = []
        for x in tensors:
            if not -tensor("a tensor to shard", x).dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
                raise AttentionError(
                    "shape of a tensor to shard", tuple(x.shape), f"the plan's {self.tokens} tokens along dim {dim}"
                )
            found.append(x.index_select(dim, self.index(rank, x.device)))
        return found[0] if len(found) == 1 else tuple(found)

    def unshard(self, x: Tensor | Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor, on every rank. Differentiable: a rank's gradient is that of its part.

        Args:
            x: this rank's part, with its tokens along `dim`; all ranks must call. Or a list of the parts of all ranks.
            dim: the dimension of tokens.

        Returns:
            The tensor with all tokens along `dim`, in the order of the sequence.

        Raises:
            AttentionError: if x does not have this rank's number of tokens along `dim`.
        """
        if isinstance(x, Tensor):
            x = gathered(x, dim, self.counts(), self.rank, self.group)
        parts = list(x)
        order = torch.cat([self.index(r, parts[0].device) for r in range(self.ranks)])
        return torch.cat(parts, dim).index_select(dim, order.argsort())

    def labels(self, tokens: Tensor, dim: int = 1, ignore: int = -100, rank: int | None = None) -> Tensor:
        """A rank's labels for the prediction of the next token, shifted before they are sharded: the label of a shard's
        last token may be on another rank.

        >>> plan(2, seqlen=8, causal=True).labels(torch.arange(8), dim=0, rank=0)
        tensor([   1,    2,    7, -100])

        Args:
            tokens: all tokens, along `dim`.
            dim: the dimension of tokens.
            ignore: the label at the end of each document.
            rank: number of a rank. Default: that of this process.

        Returns:
            The labels of the rank's tokens.

        Raises:
            AttentionError: `tokens` does not have the plan's number of tokens along `dim`.
        """
        shifted = tokens.roll(-1, dim)
        ends = torch.tensor(starts(self.lengths)[1:], device=tokens.device)
        ends = ends[torch.tensor(self.lengths, device=tokens.device) > 0] - 1
        result: Tensor = self.shard(shifted.index_fill(dim, ends, ignore), dim=dim, rank=rank)
        return result

    def banded(self, *, causal: bool = False, window: Window | None = None) -> Plan:
        """The plan with the same tokens on the same ranks and another mask, for models whose layers differ.

        >>> plan(8, seqlen=65536, causal=True).banded(window=(1023, 0))
        <plan: 65536 tokens on 8 ranks, window (1023, 0), halo, zigzag>

        Args:
            causal: as in `attention`.
            window: as in `attention`.

        Returns:
            A plan, whose strategy may differ.

        Raises:
            AttentionError: `window` is neither None nor a pair, each an int >= 0 or None.
        """
        band = band_of(causal, window)
        return self if band == self.band else replan(self, band=band)

    def simulate(self, machine: str = "8xH200+400G", *, ranks: int | None = None, **shape: Any) -> Simulation:
        """What a pass of attention would take on a cluster.

        Args:
            machine: GPUs of a node, their name, and the network between nodes.
            ranks: another number of ranks than the plan's, or None.
            shape: heads, kv_heads, dim, batch, dtype, backward and links, as in
                `tilewise_lab.costs.context_parallel.simulate`. Like `tilewise.explain`, this imports the laboratory
                when it is called.

        Returns:
            The times, traffic and memory of each rank. `print` shows a summary.

        Raises:
            AttentionError: the machine is unknown, a size is less than 1, or heads is not a multiple of kv_heads.
        """
        from tilewise_lab.costs.context_parallel import simulate

        return simulate(self if ranks is None else replan(self, ranks=ranks), machine, **shape)


@lru_cache(4096)
@cacheable
def _rank_tokens(of: Plan, what: str, rank: int, device: Any) -> Tensor:
    if not 0 <= rank < of.ranks:
        raise AttentionError("rank", rank, f"0 to {of.ranks - 1}, of {of!r}")
    shard = of.shards[rank]
    found = token_index(shard, of.lengths) if what == "index" else positions(shard)
    return found if device is None else found.to(device)


def plan(
    mesh: Any = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: Mod | None = None,
    strategy: str = "auto",
    layout: str = "auto",
    heads: int | None = None,
    queries: int = 1,
    node: int | None = None,
) -> Plan:
    """Divides attention over a sequence, or over packed documents, among the ranks of a mesh.

    >>> plan(8, seqlen=65536, causal=True)
    <plan: 65536 tokens on 8 ranks, causal, ring, zigzag>

    Args:
        mesh: a DeviceMesh (two dimensions: nodes, and the GPUs of a node), a ProcessGroup, None for the default group;
            or a number of ranks, for `simulate` and `rehearse`.
        seqlen: length of the sequence. Need not be divisible by anything.
        cu_seqlens: instead of seqlen: the boundaries of packed documents, as in `attention_varlen`.
        causal: as in `attention`, over the whole sequence.
        window: as in `attention`, over the whole sequence.
        mask: a mask mod for every call, as `attention`'s mask_mod.
        strategy: how keys reach queries:
            "ring": ring attention. Keys and values go around; the next hop is sent while a tile is computed. Needs the
            least memory.
            "allgather": all keys and values go to all ranks: fewer, larger calls, and the memory of all keys.
            "halo": each rank receives only the keys that it sees: for windows and documents.
            "ulysses": heads are exchanged for tokens: each rank has the whole sequence for some of the heads.
            "two-level": Ulysses within a node, ring attention between nodes.
            "tree": decoding. The cache is sharded by tokens, and all ranks have the last `queries` queries; partial
            results are merged in log2(ranks) exchanges. No gradient.
            "auto": "two-level" on several nodes if `heads` allow it, else "ring"; for windows and documents "halo" if
            its estimated time (on H200s) is as good.
        layout: which tokens a rank holds: "contiguous", "zigzag", "striped" or "document".
            "auto" is "zigzag" for causal, "contiguous" for windows and full attention, "document" for packed documents.
        heads: number of query heads, for "auto". Default: 32.
        queries: number of queries of strategy "tree".
        node: number of ranks that share fast links. Default: from a mesh of two dimensions, else 8.

    Returns:
        The plan. Equal arguments give the same plan, on every rank.

    Raises:
        AttentionError: if an argument has a wrong type or value, or if no process group exists for `mesh`.
    """
    ranks, group, mesh_node = _ranks(mesh)
    for name, given in (("node", node), ("heads", heads)):
        if given is not None and (not is_whole(given) or given < 1):
            raise AttentionError(f"{name} of a plan", shown(given), "at least 1, or None")
    node = node or mesh_node or min(8, ranks)
    packed = cu_seqlens is not None
    lengths = _lengths(seqlen, cu_seqlens)
    if not isinstance(causal, bool):
        raise AttentionError("causal", shown(causal), "True or False")
    band = band_of(causal, window)
    _check_names(strategy, layout, mask)
    if strategy == "tree" and (packed or queries < 1):
        found = "packed documents" if packed else f"queries={queries}"
        raise AttentionError("strategy='tree'", found, "seqlen, and at least one query")
    if strategy == "auto":
        strategy = _strategy(ranks, lengths, band, node, heads, packed)
    if layout == "auto":
        layout = _layout(strategy, band, packed)
    ulysses_size = {"ulysses": ranks, "two-level": node}.get(strategy, 1)
    if ranks % ulysses_size:
        raise AttentionError("ranks of a two-level plan", ranks, f"a multiple of the {node} of a node (node=...)")
    values = (ranks, lengths, packed, band, strategy, layout, ulysses_size, queries if strategy == "tree" else 0)
    # torch.compile of 2.10 and 2.11 traces neither id(None) nor the id of a group
    key = (*values, mask if mask is None else id(mask), group if group is None else group.group_name, node)
    made = _plans.get(key)
    if made is None or made.mask is not mask or made.group is not group:
        while len(_plans) >= MAX_PLANS:
            _plans.pop(next(iter(_plans)))
        made = _plans[key] = Plan(*values, mask, group, node)
    return made


def replan(of: Plan, *, ranks: int | None = None, band: Band | None = None) -> Plan:
    """The plan of the same sequence for a number of ranks without processes; or with another band, and each token on
    the rank that has it now."""
    given: dict[str, Any] = {"cu_seqlens": starts(of.lengths)} if of.packed else {"seqlen": of.tokens}
    mesh, strategy = of.group or of.ranks, of.strategy
    if ranks is not None:
        mesh, strategy = ranks, "auto" if ranks == 1 else strategy
    if band is None:
        band = of.band
    else:
        suitable = _strategy(of.ranks, of.lengths, band, of.node, None, of.packed)
        strategy = suitable if "halo" in (suitable, strategy) else strategy
    given |= {"strategy": strategy, "layout": of.layout, "queries": max(1, of.queries), "node": of.node}
    return plan(mesh, window=band, mask=of.mask, **given)


@constant
def _strategy(*question: Any) -> str:
    """`_found_strategy`, which torch.compile does not trace."""
    return _found_strategy(*question)


@lru_cache(MAX_PLANS)
def _found_strategy(
    ranks: int, lengths: tuple[int, ...], band: Band, node: int, heads: int | None, packed: bool
) -> str:
    """The strategy of "auto". On several nodes "two-level", unless a node has more GPUs than there are heads; else
    "ring". For packed documents, and windows that reach over less than half of the ranks, "halo" if it is estimated to
    be as fast."""
    before, after = band
    tokens = sum(lengths)
    reach = (tokens if before is None else before) + (tokens if after is None else after)
    is_two_level = ranks > node > 1 and ranks % node == 0 and (heads is None or heads >= node)
    dense = "two-level" if is_two_level else "ring"
    if ranks == 1 or not tokens or not (packed or reach // max(1, tokens // ranks) + 1 < ranks / 2):
        return dense
    options = [
        Partition(ranks, lengths, packed, band, x, _layout(x, band, packed), node if x == "two-level" else 1)
        for x in ("halo", dense)
    ]
    return fastest(options, node, heads or 32).strategy


def _layout(strategy: str, band: Band, packed: bool) -> str:
    """The layout of "auto"."""
    before, after = band
    if strategy in ("ulysses", "tree"):
        return "contiguous"
    if packed:
        return "document"
    return "zigzag" if after is not None and before is None else "contiguous"


def _check_names(strategy: Any, layout: Any, mask: Any) -> None:
    for name, value, known in (("strategy", strategy, STRATEGIES), ("layout", layout, LAYOUTS)):
        if value not in (*known, "auto"):
            raise AttentionError(name, shown(value), " or ".join(map(repr, (*known, "auto"))))
    if mask is not None and (not isinstance(mask, Mod) or mask.kind != "mask"):
        raise AttentionError("mask of a plan", shown(mask), "a tilewise.mask_mod, called (block masks are for one GPU)")


def _lengths(seqlen: int | None, cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...]:
    """The lengths of the documents."""
    if (seqlen is None) == (cu_seqlens is None):
        raise AttentionError("seqlen and cu_seqlens", "neither" if seqlen is None else "both", "one of them")
    if seqlen is not None:
        if isinstance(seqlen, bool) or not hasattr(seqlen, "__index__") or seqlen < 0:
            raise AttentionError("seqlen", shown(seqlen), "an int >= 0")
        return (int(seqlen),)
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens or ())
    if any(not hasattr(x, "__index__") for x in ends):
        raise AttentionError("cu_seqlens", ends[:8], "whole numbers, in one dimension")
    ends = [int(x) for x in ends]
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        found = ends if len(ends) < 9 else f"{ends[:8]}..."
        raise AttentionError("cu_seqlens", found, "at least two numbers, the first 0, none below the one before it")
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _ranks(mesh: Any) -> tuple[int, Any, int | None]:
    """(number of ranks, process group or None, ranks of a node if the mesh has two dimensions)."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if mesh < 1:
            raise AttentionError("ranks of a plan", mesh, "at least 1")
        return mesh, None, None
    return group_of(mesh)
