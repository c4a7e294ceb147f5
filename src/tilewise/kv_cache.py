"""The public functions of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from . import settings
from .backends.protocol import Runner
from .backends.registry import choose, kv_backend
from .call.fields import CACHE, REQUIRED, show_required
from .call.options import BackendName, KvOptions, OtherKvOptions, OutLse, OutLseMaxLogit, OutMaxLogit, Result
from .errors import AttentionError
from .kv_formats import has_token_scales, head_dim, is_latent
from .kv_request import KvCall, KvPlan, KvRequest, attend_arguments, structure_of, written_tokens
from .ops import kv as ops
from .plan_cache import can_use_plan, needs_registered_op, plans, positions, runner_of, signature
from .request import TENSOR_TYPES, lse_dtype
from .validation import kv as checks
from .validation import kv_contents as contents
from .validation.kv_new_tokens import check_append, check_new_tokens
from .validation.kv_plan import check_shape, shape_of
from .validation.kv_rotary import check_positions


@overload
def attention_kv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor | int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherKvOptions],
) -> Tensor: ...


@overload
def attention_kv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor | int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherKvOptions],
) -> OutLse: ...


@overload
def attention_kv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor | int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[OtherKvOptions],
) -> OutMaxLogit: ...


@overload
def attention_kv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor | int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[OtherKvOptions],
) -> OutLseMaxLogit: ...


@overload
def attention_kv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor | int,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[OtherKvOptions],
) -> Result: ...


@CACHE.shown
def attention_kv(
    q: Tensor = REQUIRED,
    k_cache: Tensor = REQUIRED,
    v_cache: Tensor = REQUIRED,
    lengths: Tensor | int = REQUIRED,
    **options: Unpack[KvOptions],
) -> Result:
    """Attention over a KV cache, dense or paged, for any number of queries of every sequence.

    On kernels it does not synchronise. The reference backend reads the lengths.

    >>> import torch
    >>> # 8 pages of 16 tokens, 2 heads; the pages of two sequences
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64).unbind(0)
    >>> table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32)
    >>> lengths = torch.tensor([20, 3], dtype=torch.int32)
    >>> q = torch.randn(2, 1, 4, 64)
    >>> new = {"k_new": torch.randn(2, 1, 2, 64), "v_new": torch.randn(2, 1, 2, 64)}
    >>> attention_kv(q, k_cache, v_cache, lengths, page_table=table, **new).shape
    torch.Size([2, 1, 4, 64])

    Args:
        q: queries (B, Sq, H, D), or packed (T, H, D) with cu_seqlens_q. Rows past the last packed sequence get out = 0
            and lse = -inf.
        k_cache: (rows, tokens, Hk, D), or with a page table (pages, page size, Hk, D). Any strides, any page size. The
            dtype is q's, or float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, or uint8 with two int4 in each byte:
            byte i of the D / 2 of a head has dims i (low bits) and i + D / 2 (high bits).
        v_cache: as k_cache, with Dv. Its dtype need not be k_cache's. For MLA, k_cache[..., :512], which is read once;
            D is at most 576 then (see `attention_mla`), and 512 otherwise. In DeepSeek's fp8 format k_cache is
            float8_e4m3fn with 656 bytes a token (see `pack_mla`), and k_new has 576 columns.
        lengths: int32 (B,): tokens of each sequence in the cache before this call. Or one int for all.
        k_new: new keys (B, Sn, Hk, D), or packed (Tn, Hk, D). Written into the cache first, in place.
        v_new: new values, as k_new. If v_cache is a view of k_cache (MLA), the same columns of k_new.
        cu_seqlens_q: int32 (B + 1,): offsets of the sequences in a packed q.
        cu_seqlens_new: int32 (B + 1,): offsets of the sequences in packed k_new and v_new. Default cu_seqlens_q.
        page_table: int32 (B, pages): the pages of each sequence. Or (indptr (B + 1,), pages (N,)). Entries past a
            sequence's last page are not read.
        token_table: int32 (B, keys), instead of a page table: the slot of each key, row * tokens + position (paged:
            page * page size + position), as in DeepSeek's sparse attention. A slot outside the cache, such as -1, is
            not a key. `lengths` says how many slots of a sequence count. All queries of a sequence see them.
        slots: where each new token is written, row * tokens + position (paged: page * page size + position). Negative:
            it is not written. Default: after the sequence's last token.
        cache_rows: (B,): the row of a dense cache for each sequence. Default 0, 1, ...
        starts: (B,): the first valid key of each sequence, if it is padded on the left.
        rotary: a `tilewise.Rotary`, applied to k_new and q.
        qk_norm: a `tilewise.QkNorm`, applied to k_new and q before `rotary`.
        k_scale: scale of a quantised k_cache: a key is the stored number times k_scale. A number, or a float32 tensor
            of shape (), (Hk,), (B, Hk), or by token and head, (rows or pages, tokens, Hk) as the cache, which is
            written for new tokens. For int4 also (.., Hk, G), a scale for each of an even number G of groups of D / G
            dims; the kernels read up to 32 groups. Default 1 for float8.
        v_scale: scale of a quantised v_cache, as k_scale.
        tree: mask among the draft tokens of speculative decoding: tree[b, i, j] is True if query i sees draft j, one of
            the last Sq keys of the sequence. bool (B, Sq, Sq), or (Sq, Sq) for all sequences; packed (T, drafts); or an
            int64 bit mask for each query.
        causal: default True. The last query of a sequence is at its last key.
        window: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sinks: as in `attention`.
        alibi_slopes: as in `attention`.
        score_mod: a plain function or a called `tilewise.score_mod`, as in `attention`. kv_idx counts from the
            sequence's first position in the cache.
        mask_mod: a plain function or a called `tilewise.mask_mod`, as in `attention`, with kv_idx as in score_mod. No
            `tilewise.block_mask`.
        out: a tensor for the result.
        return_lse: if True, lse is returned too.
        return_max_logit: if True, the largest score of each head is returned too, last.
        plan: a plan from `plan_kv`. One plan serves all layers of a step that have the same shapes.
        split: keys per split (split-KV, as in FlashDecoding). A fixed number makes results independent of the rest of
            the batch; 0 is one split. Default: chosen on the device.
        shared_prefix: "auto": keys in pages that consecutive sequences begin with are read once for all of them
            (cascade attention). They are found on the device. Or int32 (B,): so many leading keys of each sequence lie
            in the pages of the sequence before it. Results are the same up to rounding. Default None: nothing is
            shared. Has no effect with a left window, starts, split, mask_mod, score_mod, alibi_slopes, return_max_logit
            or scales of shape (B, Hk), for MLA caches, for more than 2048 sequences, nor in the backends "reference"
            and "hopper". "auto" shares nothing that saves less than 96 MB.
        max_seqlen_q: the largest number of queries in a packed sequence. It is used to choose the tile. If it is too
            small, results are the same but slower; with `split`, and if hidden values are NaN, they are wrong.
            `check_kv` raises.
        backend: as in `attention`.

    Returns:
        out (B, Sq, H, Dv) or (T, H, Dv) in q's dtype. With return_lse=True (out, lse), lse (B, H, Sq) or (H, T) in
        float32 (float64 for float64). With return_max_logit=True the last result is (B, H), or (H,) for a packed q, as
        in `attention`.

    Raises:
        AttentionError: an argument is not as above, or the named backend cannot run this call. Nothing was launched.
    """
    tensors: list[Any] = [q, k_cache, v_cache, lengths]
    key = _signature("attention_kv", tensors, options)
    known: Prepared | None = None if key is None else plans.get(key)
    if known is not None:
        return _returned(known.run(tensors), known.returns_lse)
    given = CACHE.completed(options)
    call, with_lse = _call(q, k_cache, v_cache, lengths, given), given["return_lse"]
    if needs_registered_op(*call.request.dense[:3]):
        return _returned(ops.traced_attend(call), with_lse)
    make = lambda: kv_backend(call.request).attend_runner(call)  # noqa: E731
    results = _run_new("attend", key, tensors, call, make, _check_call, with_lse)
    return _returned(results, with_lse)


def _returned(results: Sequence[Tensor], with_lse: bool) -> Result:
    """What `attention_kv` returns, of out, lse and perhaps max_logit."""
    if len(results) == 2:
        return (results[0], results[1]) if with_lse else results[0]
    out, lse, max_logit = results
    return (out, lse, max_logit) if with_lse else (out, max_logit)


@CACHE.shown
def plan_kv(
    q: Tensor = REQUIRED,
    k_cache: Tensor = REQUIRED,
    v_cache: Tensor = REQUIRED,
    lengths: Tensor | int = REQUIRED,
    **options: Unpack[KvOptions],
) -> KvPlan:
    """Divides the keys of an `attention_kv` call among programs. Made once a step, used by all layers.

    >>> import torch
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> lengths = torch.tensor([5, 20], dtype=torch.int32)
    >>> plan = plan_kv(q, cache, cache, lengths)
    >>> attention_kv(q, cache, cache, lengths, plan=plan).shape
    torch.Size([2, 1, 4, 64])

    It launches one small kernel, which a CUDA graph may capture. A graph that uses a plan does not own it: keep both. A
    plan stays valid while lengths, cu_seqlens and starts do not change. A layer with another window needs its own, and
    so does a call on another stream that may run at the same time: calls with one plan use one workspace.

    Args:
        q: as in `attention_kv`. Of q, the caches, k_new and v_new only the shapes matter: those of any layer.
        k_cache: as in `attention_kv`.
        v_cache: as in `attention_kv`.
        lengths: as in `attention_kv`.
        options: as in `attention_kv`. With `plan`, overwrites that plan and returns it.

    Returns:
        The plan, for the argument `plan` of `attention_kv`.

    Raises:
        AttentionError: as in `attention_kv`.
    """
    given = CACHE.completed(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, given)
    shape = shape_of(request)
    old: KvPlan | None = given["plan"]
    if old is not None:
        _check_plan(old, request)
    traced = needs_registered_op(*request.dense[:3])
    if not traced and contents.are_read(request.places.lengths):
        contents.check(request)
    if old is None and traced:
        schedule, workspace = torch.ops.tilewise.new_plan_kv(*attend_arguments(request))
        return KvPlan(schedule, workspace, ops.new_lse(request.dense.q), shape)
    if old is None:
        name = choose(request).backend.name
        old = KvPlan(*ops.new_schedule(request), ops.scratch_lse(request.dense.q), shape, name)
    if traced:
        torch.ops.tilewise.plan_kv(old.schedule, *attend_arguments(request))
    else:
        ops.schedule(request, old.schedule)
    return old


class PlanMemory:
    """Memory for plans that are used one after another, as large as the largest. It is kept as long as this object,
    because a CUDA graph that was captured with a plan writes into it."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[Tensor]] = {"schedule": [], "workspace": [], "lse": []}

    def empty(self, name: str, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements on the device of `like`. Blocks grow by factors of two, so all of them together are at most
        twice the largest."""
        blocks = self.blocks[name]
        if not blocks or blocks[-1].numel() < numel:
            blocks.append(like.new_empty(max(numel, 2 * blocks[-1].numel() if blocks else 0), dtype=dtype))
        return blocks[-1][:numel]

    def plan(self, q: Tensor, known: PreparedPlan) -> KvPlan:
        """An unwritten plan."""
        schedule = self.empty("schedule", q, known.sizes[0], torch.int64)
        workspace = self.empty("workspace", q, known.sizes[1], torch.float32)
        lse = self.empty("lse", q, q.shape[:-1].numel(), lse_dtype(q)).view(q.shape[:-1]).transpose(-1, -2)
        return KvPlan(schedule, workspace, lse, known.shape, known.backend)


class PreparedPlan(NamedTuple):
    """What `plan_kv_in` keeps of a call: the runner of the schedule and the indices of its tensors among the arguments,
    as in `Prepared`; the sizes of schedule and workspace; the rest of the plan."""

    runner: Runner
    order: tuple[int, ...]
    sizes: tuple[int, int]
    shape: tuple[Any, ...]
    backend: str


def plan_kv_in(
    memory: PlanMemory, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, **options: Any
) -> KvPlan:
    """`plan_kv` for the steps of a serving engine: the plan is made in given memory, over the plan before it, and calls
    of a known signature are not checked again."""
    tensors: list[Any] = [q, k_cache, v_cache, lengths]
    key = _signature("plan_kv", tensors, options)
    known: PreparedPlan | None = None if key is None else plans.get(key)
    if known is not None:
        wanted = [tensors[n] for n in known.order]
    else:
        request = checks.attend_request(q, k_cache, v_cache, lengths, CACHE.completed(options))  # type: ignore[arg-type]
        name, backend = choose(request).backend.name, kv_backend(request)
        sizes = backend.schedule_sizes(request)
        schedule = memory.empty("schedule", q, sizes[0], torch.int64)
        runner = runner_of("schedule", (request, schedule), lambda: backend.schedule_runner(request, schedule))
        wanted, _ = structure_of(request)
        order: Any = None if key is None else positions(wanted, tensors)
        known = PreparedPlan(runner, order or (), sizes, shape_of(request), name)
        plans.keep(None if order is None else key, known)
    plan = memory.plan(q, known)
    if known.sizes[0]:
        known.runner([*wanted, plan.schedule])
    return plan


@CACHE.shown
def check_kv(
    q: Tensor = REQUIRED,
    k_cache: Tensor = REQUIRED,
    v_cache: Tensor = REQUIRED,
    lengths: Tensor | int = REQUIRED,
    **options: Unpack[KvOptions],
) -> None:
    """Checks a call of `attention_kv`, including the contents of its tensors. Waits for the GPU.

    >>> import torch
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> check_kv(q, cache, cache, torch.tensor([5, 40], dtype=torch.int32))
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: tokens of sequence 1: found 40;
    expected at most 32, which the cache holds

    With TILEWISE_CHECK=1 in the environment, every call begins with it, and `append_kv` with the same checks. On a CPU
    every call checks lengths, offsets, pages, rows and slots.

    Args:
        q: as in `attention_kv`.
        k_cache: as in `attention_kv`.
        v_cache: as in `attention_kv`.
        lengths: as in `attention_kv`.
        options: as in `attention_kv`. A `plan` is compared with the one that plan_kv makes for these arguments.

    Raises:
        AttentionError: the call is wrong, or the plan was made for other lengths.
    """
    given = CACHE.completed(options)
    call = _call(q, k_cache, v_cache, lengths, given)
    _check_contents(call, given, full=True)
    choose(call.request)


@show_required
def append_kv(
    k_new: Tensor = REQUIRED,
    v_new: Tensor = REQUIRED,
    k_cache: Tensor = REQUIRED,
    v_cache: Tensor = REQUIRED,
    lengths: Tensor | int = REQUIRED,
    *,
    q: Tensor | None = None,
    backend: BackendName = "auto",
    **options: Any,
) -> Tensor | None:
    """Writes new keys and values into a cache in place, with qk-norm and rotary embedding if given, quantised if the
    cache is.

    >>> import torch
    >>> cache, new = torch.zeros(1, 8, 2, 4), torch.ones(1, 3, 2, 4)
    >>> lengths = torch.tensor([2], dtype=torch.int32)
    >>> append_kv(new, new, cache, cache.clone(), lengths)
    >>> cache[0, :, 0, 0]
    tensor([0., 0., 1., 1., 1., 0., 0., 0.])

    Tokens past the last sequence of cu_seqlens_new, and tokens with a negative slot, are skipped; on a GPU also tokens
    whose slot, page or row is not in the cache, which is an error on a CPU. If two tokens have the same slot, which one
    is stored is undefined.

    Args:
        k_new: as in `attention_kv`.
        v_new: as in `attention_kv`.
        k_cache: as in `attention_kv`.
        v_cache: as in `attention_kv`.
        lengths: as in `attention_kv`.
        q: queries to which `qk_norm` and `rotary` are applied too.
        backend: as in `attention`.
        options: cu_seqlens_new, cu_seqlens_q (of a packed q), page_table, slots, cache_rows, rotary, qk_norm, k_scale
            and v_scale, as in `attention_kv`; and starts, which has no effect here. A quantised cache stores x / scale,
            rounded to nearest and saturated; a scale by token and head is set to the largest magnitude / 448 (e5m2:
            57344, int8: 127, int4: 7).

    Returns:
        q, normalised and rotated if `qk_norm` or `rotary` is given; None without q.

    Raises:
        AttentionError: an argument is not as above. Nothing was launched.
    """
    tensors: list[Any] = [k_new, v_new, k_cache, v_cache, lengths]
    key = _signature("append_kv", tensors, {"q": q, "backend": backend, **options})
    known: Prepared | None = None if key is None else plans.get(key)
    if known is not None:
        results = known.run(tensors)
        return results[0] if results else q
    given = checks.append_options(options)
    places = checks.places_of(k_new, k_cache, lengths, given)
    request = checks.append_request(k_new, v_new, k_cache, v_cache, places, q, given)
    if needs_registered_op(k_new, v_new, k_cache, v_cache):
        rotated = ops.traced_append(request, backend)
        return q if rotated is None else rotated
    if contents.are_read(places.lengths):
        check_append(request)
    written = written_tokens(request, backend)
    make = lambda: kv_backend(written).append_runner(request)  # noqa: E731
    results = _run_new(f"append {backend}", key, tensors, request, make, check_append)
    return results[0] if results else q


class Prepared(NamedTuple):
    """The plan of a call with a KV cache: its runner; for each of the runner's tensors, its index among the arguments;
    and on a CPU the check of their contents."""

    runner: Runner
    order: tuple[int, ...]
    returns_lse: bool = False
    check: Callable[[Sequence[Tensor]], None] | None = None

    def run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = [arguments[n] for n in self.order]
        if self.check is not None:
            self.check(tensors)
        return self.runner(tensors)


def _signature(name: str, tensors: list[Any], options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The signature, or None if the call is not kept and is checked every time: traced calls, those on a CPU with a
    rotary embedding, those whose lengths are a number, and all calls with TILEWISE_CHECK=1."""
    if not can_use_plan() or settings.checks_contents():  # a tracer cannot compare the addresses below
        return None
    if options.get("rotary") is not None and not getattr(tensors[0], "is_cuda", False):
        return None  # validation reads offsets, to find the positions of queries
    plan = options.get("plan")
    k_cache, v_cache = tensors[2:4] if name == "append_kv" else tensors[1:3]
    shared: tuple[Any, ...] = ()
    if name != "plan_kv":
        apart = _distance(k_cache, v_cache)
        shared = (apart,)
        if apart is not None and -LONG_ROW < apart < LONG_ROW and abs(apart) < max(_row(k_cache), _row(v_cache)):
            new = tensors[:2] if name == "append_kv" else (options.get("k_new"), options.get("v_new"))
            shared += (_distance(*new),)  # new values have to be columns of new keys
        k_scale = options.get("k_scale")
        if k_scale is not None and has_token_scales(k_scale):
            shared += (_distance(k_scale, options.get("v_scale")),)
    if type(plan) is not KvPlan:
        return signature(name, tensors, options, *shared)
    tensors += plan[:3]
    others = {option: value for option, value in options.items() if option != "plan"}
    # the shape has 25 items: as one part, and the types as another, because True == 1
    return signature(name, tensors, others, plan.shape, (*map(type, plan.shape),), plan.backend, *shared)


LONG_ROW = 2**14  # bytes; a row of MLA in float64 has 4608


def _distance(a: Any, b: Any) -> int | None:
    """Bytes from the address of a tensor to that of another, which with their strides says what memory they share; None
    if it is further than the allocation of the first of both. Such a distance is no part of a signature."""
    if type(a) not in TENSOR_TYPES or type(b) not in TENSOR_TYPES:
        return None
    try:
        apart: int = b.data_ptr() - a.data_ptr()
        size = (a if apart > 0 else b).untyped_storage().nbytes()
    except RuntimeError:  # a sparse or nested tensor
        return None
    return apart if -size < apart < size else None


def _row(x: Tensor) -> int:
    """The bytes of a row of a cache."""
    return x.shape[-1] * x.stride(-1) * x.element_size() if x.dim() else 0


def _run_new(
    name: str,
    key: tuple[Any, ...] | None,
    tensors: Sequence[Tensor],
    call: tuple[Any, ...],
    make: Callable[[], Runner],
    check: Callable[[Any], None],
    returns_lse: bool = False,
) -> Sequence[Tensor]:
    """The results of a call whose signature is not known. Its runner is kept by the signature; if there is none,
    validation made a tensor for this call, or a tensor requires a gradient, which is an error in grad mode only, by the
    layouts of the tensors in `call`. `check`: of the contents of such a call, for calls on a CPU."""
    wanted, structure = structure_of(call)
    order: Any = None
    if key is not None and not any(x.requires_grad for x in wanted):
        order = positions(wanted, tensors)
    if order is None:
        runner = runner_of(name, call, make)
    else:
        runner = make()
        checked = (lambda found: check(structure(found))) if contents.are_read(wanted[0]) else None
        plans.keep(key, Prepared(runner, order, returns_lse, checked))
    return runner(wanted)


def _call(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, given: KvOptions) -> KvCall:
    """The checked call of `attention_kv`."""
    request = checks.attend_request(q, k_cache, v_cache, lengths, given)
    new = None
    if given["k_new"] is not None:
        new = checks.append_request(given["k_new"], given["v_new"], k_cache, v_cache, request.places, q, given)
    elif any(given[name] is not None for name in ("rotary", "qk_norm", "slots")):  # type: ignore[literal-required]
        raise AttentionError("rotary, qk_norm and slots", "given without new tokens", "k_new and v_new too")
    plan = given["plan"]
    if plan is not None:
        _check_plan(plan, request)
    out = given["out"]
    if out is not None:
        _check_out(request, out)
    call = KvCall(request, new, out=out)
    if not needs_registered_op(*request.dense[:3]) and contents.are_read(request.places.lengths):
        _check_contents(call, given, full=settings.checks_contents())
    if plan is None:
        return call
    return call._replace(
        schedule=plan.schedule, workspace=plan.workspace, lse=None if given["return_lse"] else plan.lse
    )


def _check_call(call: KvCall) -> None:
    """Checks the contents of a call on a CPU that has no rotary embedding."""
    contents.check(call.request, call.append)
    if call.append is not None:
        check_new_tokens(call.append)


def _check_contents(call: KvCall, given: KvOptions, full: bool) -> None:
    """Checks the contents of a call's tensors, with `full` those of its plan too. Synchronises with the GPU."""
    request = call.request
    contents.check(request, call.append, full)
    if call.append is not None:
        check_new_tokens(call.append)
    check_positions(given["rotary"], request.dense.cu_q, given["cu_seqlens_new"])
    plan: KvPlan | None = given["plan"]
    if full and plan is not None:
        _check_plan(plan, request)
        schedule, _ = ops.new_schedule(request)
        ops.schedule(request, schedule)
        backend = kv_backend(request)
        contents.check_plan(backend.planned(request, plan.schedule), backend.planned(request, schedule))


def _check_plan(plan: KvPlan, request: KvRequest) -> None:
    check_shape(plan, request)
    if plan.backend is not None and not needs_registered_op(*request.dense[:3]):
        name = choose(request).backend.name
        if plan.backend != name:
            expected = f"one for {name!r}, which runs this call: call plan_kv with this call's arguments"
            raise AttentionError("plan", f"one for the backend {plan.backend!r}", expected)


def _check_out(request: KvRequest, out: Tensor) -> None:
    q, _, v, *_ = request.dense
    shape = (*q.shape[:-1], head_dim(v))
    exact = is_latent(request) and out.dtype == torch.float32  # of MLA, whose parts are merged in float32
    if tuple(out.shape) != shape or not (out.dtype == q.dtype or exact) or out.device != q.device:
        raise AttentionError(
            "out", f"{out.dtype} {tuple(out.shape)} on {out.device}", f"{q.dtype} {shape} on {q.device}"
        )
