"""The validated request of a call with a KV cache, and its conversion to and from the arguments of the ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from .errors import AttentionError, shown
from .kv_formats import ROPE, format_of, has_token_scales, is_deepseek_fp8, is_one_scale, shared_columns
from .request import Request, Spec

UNDIVIDED = 2**30  # keys of a split that is longer than any sequence
MIN_PREFILL_QUERIES = 256  # of a sequence; with fewer, reading the cache takes longer than the products


class Rotary(NamedTuple):
    """Rotary embedding (RoPE) of new keys, and of the queries that come with them.

    >>> import torch, tilewise
    >>> angles = torch.outer(torch.arange(512.0), 10000 ** -(torch.arange(32) / 32))
    >>> rotary = tilewise.Rotary(angles.cos(), angles.sin())  # d, d + 32: Llama
    >>> q, k, v = torch.randn(3, 2, 5, 4, 64)
    >>> caches = torch.zeros(2, 2, 128, 4, 64).unbind(0)
    >>> tilewise.attention_kv(
    ...     q, *caches, 0, k_new=k, v_new=v, rotary=rotary
    ... ).shape
    torch.Size([2, 5, 4, 64])

    The first `width` dims of every head are rotated. If v_cache is a view of k_cache's first columns (MLA), the dims
    after those columns are: of v_cache = k_cache[..., :512] the dims from 512 on. The position of a new key is its
    index in the sequence, lengths + i; that of a query is the key position where it sits. A position outside of the
    tables is replaced by the nearest one in them; `check_kv` raises.

    Attributes:
        cos: (positions, width / 2), cosines of the angles.
        sin: (positions, width / 2), sines of the angles.
        interleaved: if True, dims 2 d and 2 d + 1 form a pair; if False (default), d and d + width / 2.
        positions: integers of the shape of the new tokens: their positions. Default: as above. Used for
            queries too if each comes with a new key: equal shapes, and cu_seqlens_new as cu_seqlens_q.
        q_positions: integers of the shape of the queries' tokens: their positions. Default: as above.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    positions: Tensor | None = None
    q_positions: Tensor | None = None


class QkNorm(NamedTuple):
    """RMSNorm of new keys, and of the queries that come with them, before the rotary embedding (Qwen 3, Gemma 3).
    Not supported where v_cache is a view of k_cache (MLA).

        x / sqrt(mean(x^2) + eps) * (weight + offset)

    >>> import torch, tilewise
    >>> norm = tilewise.QkNorm(torch.ones(64), torch.ones(64), eps=1e-6)
    >>> q, k, v = torch.randn(3, 2, 5, 4, 64)
    >>> caches = torch.zeros(2, 2, 128, 4, 64).unbind(0)
    >>> out = tilewise.attention_kv(
    ...     q, *caches, 0, k_new=k, v_new=v, qk_norm=norm
    ... )
    >>> bool((caches[0][0, 0].square().mean(-1) - 1).abs().max() < 1e-3)
    True

    The mean is over the dims of a head. All is computed in float32.

    Attributes:
        q_weight: (D,), the weight of queries, shared by all heads.
        k_weight: (D,), the weight of keys, shared by all heads.
        eps: added to the mean of squares. Default 1e-6.
        offset: added to the weights. Default 0; 1 in Gemma.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float = 1e-6
    offset: float = 0.0


# The scale of a quantised cache: a number, or float32 of shape (), (Hk,), (B, Hk), or by token and head as the cache.
Scale = Tensor | float | None
SharedPrefix = Tensor | str | None  # "auto" is the only string


class KvPlan(NamedTuple):
    """The schedule of a step and the workspace for partial results. Made by `plan_kv`; the layers of the step use it
    one after the other.

    >>> import torch, tilewise
    >>> q = torch.randn(2, 1, 4, 64)
    >>> caches = torch.randn(2, 2, 128, 4, 64).unbind(0)
    >>> plan = tilewise.plan_kv(q, *caches, 100)
    >>> for layer in range(2):
    ...     out = tilewise.attention_kv(q, *caches, 100, plan=plan)

    Attributes:
        schedule: int64: which program computes which rows over which keys.
        workspace: buffer for partial results.
        lse: buffer for calls that do not return lse.
        shape: the shapes and options that it was made for.
        backend: the backend that made it; None under torch.compile.
    """

    schedule: Tensor
    workspace: Tensor
    lse: Tensor
    shape: tuple[Any, ...]
    backend: str | None = None


class PlannedTile(NamedTuple):
    """A work item of a schedule, a tile of rows: its sequence, its first row; the sequence's first query in a packed q,
    its queries, keys and first valid key; the first chunk of keys that the tile sees, and how many."""

    b: int
    first: int
    q0: int
    n_q: int
    n_k: int
    start: int
    first_chunk: int
    num_chunks: int


class CachePlaces(NamedTuple):
    """Where the tokens of every sequence lie in a cache.

    A sequence has `lengths` tokens, to which `new` are appended, or those between its offsets in `cu_new`. With a page
    table, token j lies in page table[b, j // page_size] (with `indptr`, table[indptr[b] + j // page_size]) at offset
    j % page_size; without, in batch row `rows[b]`, or b, at offset j. Tokens before `starts` are not valid.

    `by_token`: table (B, keys) has the slot of each key, page * page_size + offset. A slot outside the cache is no key.
    """

    lengths: Tensor
    table: Tensor | None = None
    indptr: Tensor | None = None
    rows: Tensor | None = None
    starts: Tensor | None = None
    cu_new: Tensor | None = None
    new: int = 0
    by_token: bool = False

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def capacity(self, cache: Tensor) -> int:
        """The most tokens that a sequence can have, by the shapes of the cache and the page table."""
        if self.table is None:
            return cache.shape[1]
        return self.table.shape[-1] * (1 if self.by_token else cache.shape[1])


class KvRequest(NamedTuple):
    """`dense`, the request without the cache's places, has q (B, Sq, H, D), or packed (T, H, D) with cu_q; the caches
    (C, S, Hk, D) as k and v; the score terms.

    `tree` (tokens of q, words) int64 has a bit for each of a sequence's last n_q keys that a query sees. `split`: keys
    of a split, the same for every batch; None: the schedule balances the load. `max_seqlen_q`: the largest number of
    queries in a sequence, 0 if unknown. `k_scale` and `v_scale`: scales of quantised caches (kv_formats).
    `shared_prefix`: "auto": keys in pages that consecutive sequences begin with are read once for all of them; int32
    (B,): so many leading keys of each sequence and the one before it.
    """

    dense: Request
    places: CachePlaces
    tree: Tensor | None = None
    split: int | None = None
    max_seqlen_q: int = 0
    k_scale: Scale = None
    v_scale: Scale = None
    shared_prefix: SharedPrefix = None

    # Not for code that torch.compile traces: torch 2.10 does not support properties of a named tuple.
    @property
    def q(self) -> Tensor:
        return self.dense.q

    @property
    def k(self) -> Tensor:
        return self.dense.k

    @property
    def v(self) -> Tensor:
        return self.dense.v

    @property
    def spec(self) -> Spec:
        return self.dense.spec


class AppendRequest(NamedTuple):
    """New tokens (B, Sn, Hk, D), or packed (T, Hk, D) with places.cu_new, and the caches that they are written to, at
    `slots` if given; and queries that are normalised and rotated with them into `rotated`. Scales by token and head are
    written too. `per_query`: the call has a query for each new token, at the same index. `first_rotated`: the first dim
    that is rotated, from the function of that name. `keys_alone`: what is written of the keys has the values, from the
    function of that name."""

    k_new: Tensor
    v_new: Tensor
    k: Tensor
    v: Tensor
    places: CachePlaces
    slots: Tensor | None = None
    rotary: Rotary | None = None
    q: Tensor | None = None
    cu_q: Tensor | None = None
    rotated: Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    norm: QkNorm | None = None
    per_query: bool = False
    first_rotated: int = 0
    keys_alone: bool = False


def first_rotated(k: Tensor, v: Tensor, rotary: Rotary | None, norm: QkNorm | None) -> int:
    """The first dim that `rotary` rotates in caches k and v: 0, or the dim after the values where those are the first
    columns of the keys (MLA). Raises AttentionError if `rotary` or `norm` would change columns that are values too."""
    if rotary is None and norm is None:
        return 0
    first, end = shared_columns(k, v)
    if not end:
        return 0
    shared = f"given with v_cache, a view of k_cache[..., {first}:{end}]"
    if norm is not None:
        raise AttentionError("qk_norm", shared, "None: normalise q, k_new and v_new before the call")
    assert rotary is not None
    width, rest = 2 * rotary.cos.shape[1], ROPE if is_deepseek_fp8(k) else k.shape[-1] - end
    if first or width > rest:
        expected = f"a rotary embedding of at most {rest} dims, those after the values; or rotate q and k_new before"
        if first:
            expected = "values that are the first columns of k_cache; or rotate q and k_new before the call"
        raise AttentionError("rotary", f"{width} dims, {shared}", expected)
    return end


def keys_alone(k: Tensor, v: Tensor, k_scale: Scale, v_scale: Scale) -> bool:
    """Whether the new values of caches k and v are not written by themselves, because v is a view of k: in DeepSeek's
    fp8 format, and with scales by token, which are those of whole keys. Raises AttentionError if numbers that are keys
    and values have two scales."""
    if is_deepseek_fp8(k):
        return True
    found, (first, end) = format_of(k), shared_columns(k, v)
    if found is None or not end:
        return False
    by_token = has_token_scales(k_scale)
    if not is_one_scale(k_scale, v_scale):
        expected = "one number or tensor for both: v_cache is a view of k_cache"
        raise AttentionError("k_scale and v_scale", f"{shown(k_scale)} and {shown(v_scale)}", expected)
    if by_token and (found.bits < 8 or end - first < v.shape[-1]):
        expected = "v_cache = k_cache[..., first:end] of 8 bits; or a scale that is not by token"
        raise AttentionError("k_scale by token", f"given with v_cache, a view of {found.name} k_cache", expected)
    return by_token


class WrittenTokens(NamedTuple):
    """An append as the choice of a backend sees calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: Spec


def written_tokens(request: AppendRequest, backend: str) -> WrittenTokens:
    return WrittenTokens(request.k_new, request.k, request.v, Spec(1.0, backend=backend))


class KvCall(NamedTuple):
    """A call of `attention_kv`. The schedule with its workspace, out, lse and, if spec.max_logit, max_logit are
    allocated by the call if None."""

    request: KvRequest
    append: AppendRequest | None = None
    schedule: Tensor | None = None
    workspace: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    max_logit: Tensor | None = None


_TENSOR = object()  # stands for a tensor


def structure_of(x: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    """The tensors in nested tuples, and a function from other tensors to the same nested tuples with those. The
    function holds no reference to the first ones.

    >>> import torch
    >>> tensors, structure = structure_of((torch.ones(1), None, ("a", torch.zeros(1))))
    >>> structure(["x", "y"])
    ('x', None, ('a', 'y'))
    """
    tensors: list[Tensor] = []
    empty, has_tensors = _emptied(x, tensors), bool(tensors)
    return tensors, lambda others: _filled(empty, iter(others)) if has_tensors else empty


def _emptied(x: Any, tensors: list[Tensor]) -> Any:
    """A tuple with marks for its tensors, which are appended to a list; x itself if it holds no tensor, so that
    `_filled` does not look into it."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return _TENSOR
    if not isinstance(x, tuple):
        return x
    items = [_emptied(y, tensors) if isinstance(y, (tuple, Tensor)) else y for y in x]
    return x if all(map(is_, items, x)) else _Filled(_maker(x), items)


def _filled(x: Any, rest: Iterator[Any]) -> Any:
    if x is _TENSOR:
        return next(rest)
    return x.make([_filled(y, rest) if y is _TENSOR or type(y) is _Filled else y for y in x.items])


class _Filled(NamedTuple):
    """A tuple that holds tensors: what makes it of a list, and its items with marks."""

    make: Callable[[list[Any]], Any]
    items: list[Any]


def _maker(x: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    return type(x)._make if hasattr(x, "_fields") else tuple  # type: ignore[attr-defined]


NUM_PLACES = len(CachePlaces._fields)
PLACES = (
    "Tensor lengths, Tensor? table, Tensor? indptr, Tensor? rows, Tensor? starts, Tensor? cu_new, SymInt new,"
    " bool by_token"
)
SCALES = "Tensor? k_scale, Tensor? v_scale, float? k_number, float? v_number"
ATTEND = (
    f"Tensor q, Tensor k, Tensor v, {PLACES}, Tensor? cu_q, Tensor? tree, Tensor? sinks, Tensor[] score, Tensor[] mask,"
    " float scale, SymInt? before, SymInt? after, str backend, str? score_mod, float[] score_numbers, str? mask_mod,"
    f" float[] mask_numbers, int? split, SymInt max_seqlen_q, {SCALES},"
    " Tensor? common, bool find_common"
)
APPEND = (
    f"Tensor k_new, Tensor v_new, {PLACES}, Tensor? slots, Tensor? cos, Tensor? sin, bool interleaved,"
    " Tensor? positions, Tensor? q_positions, Tensor? q, Tensor? cu_q, Tensor? q_weight, Tensor? k_weight, float eps,"
    f" float offset, {SCALES}, str backend"
)


def attend_arguments(request: KvRequest) -> tuple[Any, ...]:
    """The arguments of the ops for a request, in the order of `ATTEND`."""
    dense, spec = request.dense, request.dense.spec
    terms = (dense.cu_q, request.tree, dense.sinks, list(dense.score), list(dense.mask))
    band = (spec.scale, spec.before, spec.after, spec.backend)
    mods = (spec.score_mod, list(spec.score_numbers), spec.mask_mod, list(spec.mask_numbers))
    scales = scale_arguments(request.k_scale, request.v_scale)
    shared = request.shared_prefix
    shares = (None, True) if isinstance(shared, str) else (shared, False)
    sizes = (request.split, request.max_seqlen_q)
    return (*dense[:3], *request.places, *terms, *band, *mods, *sizes, *scales, *shares)


def attend_request_of_op(*given: Any) -> KvRequest:
    """The request of such arguments, those of an op."""
    q, k, v, *rest = given
    places, rest = CachePlaces(*rest[:NUM_PLACES]), rest[NUM_PLACES:]
    cu_q, tree, sinks, score, mask, scale, before, after, backend, score_mod, score_numbers, mask_mod, *rest = rest
    mask_numbers, split, max_seqlen_q, *scales, common, find_common = rest
    score_mod, mask_mod = (score_mod, tuple(score_numbers), len(score)), (mask_mod, tuple(mask_numbers), len(mask))
    spec = Spec(scale, before, after, backend, *score_mod, *mask_mod)
    dense = Request(q, k, v, spec, sinks=sinks, score=tuple(score), cu_q=cu_q, mask=tuple(mask))
    shared = "auto" if find_common else common
    return KvRequest(dense, places, tree, split, max_seqlen_q, *scales_of(*scales), shared)


def scale_arguments(k: Scale, v: Scale) -> tuple[Any, ...]:
    """The arguments of the ops for two scales, in the order of `SCALES`."""
    tensors = [x if isinstance(x, Tensor) else None for x in (k, v)]
    return *tensors, *[None if isinstance(x, Tensor) else x for x in (k, v)]


def scales_of(
    k: Tensor | None, v: Tensor | None, k_number: float | None, v_number: float | None
) -> tuple[Scale, Scale]:
    """The scales of such arguments."""
    return k_number if k is None else k, v_number if v is None else v


def append_arguments(request: AppendRequest, backend: str) -> tuple[Any, ...]:
    """The arguments of the op for a request, in the order of `APPEND`, after those that `written_arguments` returns.
    Scales that are written are not repeated."""
    rotary = request.rotary or (None, None, False, None, None)
    norm = request.norm or (None, None, 0.0, 0.0)
    scales = [None if has_token_scales(x) else x for x in (request.k_scale, request.v_scale)]
    tokens = request.k_new, request.v_new, *request.places, request.slots
    return *tokens, *rotary, request.q, request.cu_q, *norm, *scale_arguments(*scales), backend


def written_arguments(request: AppendRequest) -> tuple[Any, ...]:
    """What an append writes: the caches, the rotated queries, and scales by token and head."""
    scales = [x if has_token_scales(x) else None for x in (request.k_scale, request.v_scale)]
    return request.k, request.v, request.rotated, *scales


def append_request_of_op(*given: Any) -> tuple[AppendRequest, str]:
    """The request of such arguments, those of the op, and the backend."""
    k, v, rotated, k_scales, v_scales, k_new, v_new, *rest = given
    places, (slots, cos, sin, interleaved, at, q_at, q, cu_q, *rest) = (
        CachePlaces(*rest[:NUM_PLACES]),
        rest[NUM_PLACES:],
    )
    q_weight, k_weight, eps, offset, k_scale, v_scale, k_number, v_number, backend = rest
    rotary = None if cos is None else Rotary(cos, sin, interleaved, at, q_at)
    norm = None if q_weight is None else QkNorm(q_weight, k_weight, eps, offset)
    k_scale, v_scale = scales_of(k_scale, v_scale, k_number, v_number)
    k_scale, v_scale = k_scale if k_scales is None else k_scales, v_scale if v_scales is None else v_scales
    tokens = k_new, v_new, k, v, places, slots, rotary, q, cu_q, rotated, k_scale, v_scale, norm
    alone = keys_alone(k, v, k_scale, v_scale)
    return AppendRequest(*tokens, first_rotated=first_rotated(k, v, rotary, norm), keys_alone=alone), backend
