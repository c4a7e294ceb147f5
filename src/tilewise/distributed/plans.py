"""`plan` and its result, `Plan`: a partition of a sequence with the process group whose ranks execute it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttentionError, shown
from ..mods.dropout import is_whole
from ..mods.program import Mod
from ..request import Window
from ..request import band as band_of
from ..tensor_cache import device_of
from ..torch_internals import constant
from ..validation.dense import tensor
from .cluster import compare, gathered, group_of
from .layout import LAYOUTS, TokenLayout, positions, starts, token_index
from .partition import STRATEGIES, Partition, Strategy
from .tiles import Band

if TYPE_CHECKING:
    from tilewise_lab.costs.context_parallel import Simulation

MAX_PLANS = 256  # that are kept, so that equal arguments give the same plan
COMPARED = "seqlen or cu_seqlens", "causal and window", "mask", "strategy", "layout", "queries", "node"
MAX_BYTES = 32 << 20  # of the tensors of these plans together; plans that the user holds have their own bound
_plans: dict[Any, Plan] = {}
_numbers = itertools.count()
_by_number: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # for the registered ops


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
        _by_number[self.number] = self

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
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

    def index(self, rank: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """The indices in the whole sequence of the tokens that a rank holds.

        Args:
            rank: number of a rank. Default: that of this process.
            device: device of the result. Default: the CPU.

        Returns:
            (tokens of the rank,) int64.

        Raises:
            AttentionError: there is no such rank.
        """
        return self._index(rank, device).clone()

    def positions(self, rank: int | None = None, device: torch.device | str | None = None) -> Tensor:
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
        return positions(self.shards[self._checked(rank)]).to(device_of(device))

    def _checked(self, rank: int | None) -> int:
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.ranks:
            raise AttentionError("rank", rank, f"0 to {self.ranks - 1}, of {self!r}")
        return rank

    def _index(self, rank: int | None, device: torch.device | str | None) -> Tensor:
        """`index`, kept: not to be changed, or returned to users."""
        rank, device = self._checked(rank), device_of(device)

        def made() -> Tensor:
            return token_index(self.shards[rank], self.lengths).to(device)

        return made() if torch.compiler.is_compiling() else self.tensors.get(("index", rank), device, made)

    @overload
    def shard(self, x: Tensor, /, *, dim: int = ..., rank: int | None = ...) -> Tensor: ...

    @overload
    def shard(
        self, x: Tensor, y: Tensor, /, *others: Tensor, dim: int = ..., rank: int | None = ...
    ) -> tuple[Tensor, ...]: ...

    def shard(self, *tensors: Tensor, dim: int = 1, rank: int | None = None) -> Tensor | tuple[Tensor, ...]:
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
            found.append(x.index_select(dim, self._index(rank, x.device)))
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
        order = torch.cat([self._index(r, parts[0].device) for r in range(self.ranks)])
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
        return self.shard(shifted.index_fill(dim, ends, ignore), dim=dim, rank=rank)

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


def compared(of: Plan) -> tuple[object, ...]:
    """What all ranks must agree on, as `COMPARED` names it."""
    mask = None if of.mask is None else described(of.mask.key, of.mask.numbers, of.mask.tensors)
    lengths = of.lengths if of.packed else of.tokens
    return lengths, of.band, mask, of.strategy, of.layout, of.queries, (of.ulysses_size, of.node)


def described(key: str | None, numbers: tuple[float, ...], tensors: Sequence[Tensor]) -> object:
    """A mod for `compare`: without the contents of its tensors."""
    return key and (key, numbers, *((tuple(x.shape), x.dtype) for x in tensors))


def plan_of(number: Any) -> Plan:
    """The plan with a number."""
    found = _by_number.get(int(number))
    if found is None:
        raise AttentionError(
            "plan of a compiled call", "one that was dropped", "a plan that is kept until the backward has run"
        )
    return found


def plan(
    mesh: Any = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: Mod | None = None,
    strategy: Strategy | Literal["auto"] = "auto",
    layout: TokenLayout | Literal["auto"] = "auto",
    heads: int | None = None,
    queries: int = 1,
    node: int | None = None,
) -> Plan:
    """Divides attention over a sequence, or over packed documents, among the ranks of a mesh. All of its ranks must
    call it: they compare their arguments.

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
            "auto": for windows and documents "halo", if no rank receives more than 15 % of all keys, or than
            two and a half ranks hold; else "two-level" on several nodes if `heads` allow it, else "ring".
        layout: which tokens a rank holds: "contiguous", "zigzag", "striped" or "document".
            "auto" is "zigzag" for causal, "contiguous" for windows and full attention, "document" for packed documents.
        heads: number of query heads, for "auto": a node of a two-level plan has no more GPUs. Default: enough.
        queries: number of queries of strategy "tree".
        node: number of ranks that share fast links. Default: from a mesh of two dimensions, else 8.

    Returns:
        The plan. Equal arguments give the same plan.

    Raises:
        AttentionError: if an argument has a wrong type or value or is not the same on all ranks, or if no process group
            exists for `mesh`.
    """
    ranks, group, mesh_node = _ranks(mesh)
    given = Arguments(seqlen, cu_seqlens, causal, window, mask, strategy, layout, heads, queries, node)
    if group is None or torch.compiler.is_compiling():  # a compiled call compares its plan as it runs
        return _found(ranks, group, mesh_node, given)
    try:
        found = _found(ranks, group, mesh_node, given)
    except Exception:
        compare(group, "of a plan", COMPARED, None)
        raise
    compare(group, "of a plan", COMPARED, compared(found))
    return found


class Arguments(NamedTuple):
    """The arguments of `plan` but for the mesh."""

    seqlen: int | None
    cu_seqlens: Tensor | Sequence[int] | None
    causal: bool
    window: Window | None
    mask: Mod | None
    strategy: Strategy | Literal["auto"]
    layout: TokenLayout | Literal["auto"]
    heads: int | None
    queries: int
    node: int | None


def _found(ranks: int, group: Any, mesh_node: int | None, given: Arguments) -> Plan:
    """The plan of these arguments: one that is kept, or a new one."""
    seqlen, cu_seqlens, causal, window, mask, strategy, layout, heads, queries, node = given
    for name, count in (("node", node), ("heads", heads)):
        if count is not None and (not is_whole(count) or count < 1):
            raise AttentionError(f"{name} of a plan", shown(count), "at least 1, or None")
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
        _make_room()
        made = _plans[key] = Plan(*values, mask, group, node)
    return made


@constant
def _make_room() -> None:
    """Drops the oldest plans, before another one is kept. torch.compile calls this and does not trace it."""
    while len(_plans) >= MAX_PLANS or sum(x.tensors.nbytes for x in list(_plans.values())) > MAX_BYTES:
        _plans.pop(next(iter(_plans)))


def replan(of: Plan, *, ranks: int | None = None, band: Band | None = None) -> Plan:
    """The plan of the same sequence for a number of ranks without processes; or with another band, and each token on
    the rank that has it now."""
    given: dict[str, Any] = {"cu_seqlens": None, "seqlen": None}
    given |= {"cu_seqlens": starts(of.lengths)} if of.packed else {"seqlen": of.tokens}
    strategy = "auto" if ranks == 1 else of.strategy
    if band is None:
        band = of.band
    else:
        suitable = _strategy(of.ranks, of.lengths, band, of.node, None, of.packed)
        strategy = suitable if "halo" in (suitable, strategy) else strategy
    given |= {"strategy": strategy, "layout": of.layout, "queries": max(1, of.queries), "node": of.node}
    found = Arguments(causal=False, window=band, mask=of.mask, heads=None, **given)
    return _found(of.ranks if ranks is None else ranks, of.group if ranks is None else None, None, found)


@constant
def _strategy(*question: Any) -> Strategy:
    """`_found_strategy`, which torch.compile does not trace."""
    return _found_strategy(*question)


@lru_cache(MAX_PLANS)
def _found_strategy(
    ranks: int, lengths: tuple[int, ...], band: Band, node: int, heads: int | None, packed: bool
) -> Strategy:
    """The strategy of "auto". "halo" if no rank then receives more keys than two and a half ranks hold, or 15 % of all:
    a training step on simulated H200s takes on average 2 % longer than with the faster of both strategies. Else
    "two-level" on several nodes, unless a node has more GPUs than there are heads; else "ring"."""
    is_two_level = ranks > node > 1 and ranks % node == 0 and (heads is None or heads >= node)
    dense: Strategy = "two-level" if is_two_level else "ring"
    if ranks == 1 or not sum(lengths) or not (packed or None not in band):
        return dense
    halo = Partition(ranks, lengths, packed, band, "halo", _layout("halo", band, packed))
    received = max(map(halo.received, range(ranks)))
    return "halo" if received <= sum(lengths) * max(2.5 / ranks, 0.15) else dense


def _layout(strategy: Strategy, band: Band, packed: bool) -> TokenLayout:
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
