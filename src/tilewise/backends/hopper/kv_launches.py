"""From a request with a KV cache to launches: the Hopper forward for sequences with many queries (prefill), the decode
kernels for the others."""

import math

from torch import Tensor

from ...kv_formats import is_latent
from ...kv_request import MIN_PREFILL_QUERIES, KvCall, KvRequest, PlannedTile
from ..common.kernel_call import CallShape
from ..common.kv import launches as decode
from ..common.launch import Launch, Memory, Target
from .forward import ROWS
from .launches import Operands, State, column_descriptors, forward_config, forward_launch, new_state
from .mla_launches import hopper_mla_launches, page_stride
from .pipeline import KvCache

MAX_DECODE_QUERIES = MIN_PREFILL_QUERIES - 1


def decode_request(request: KvRequest) -> KvRequest:
    """A packed request for the decode kernels, which compute the sequences with at most MAX_DECODE_QUERIES queries."""
    return request._replace(max_seqlen_q=min(request.max_seqlen_q or MAX_DECODE_QUERIES, MAX_DECODE_QUERIES))


def schedule_sizes(request: KvRequest, target: Target | None = None) -> tuple[int, int]:
    """Only packed requests, and those with an MLA cache, have a schedule: the tile scheduler of the forward needs
    none."""
    if is_latent(request):
        return decode.schedule_sizes(request, target)
    return (0, 0) if request.dense.cu_q is None else decode.schedule_sizes(decode_request(request), target)


def schedule_launches(request: KvRequest, schedule: Tensor, target: Target) -> list[Launch]:
    if is_latent(request):
        return decode.schedule_launches(request, schedule, target)
    if request.dense.cu_q is None:
        return []
    rest = decode_request(request)
    partition = decode.checked_partition(rest, target, schedule)
    return [decode.partition_launch(rest, schedule, partition, target, MAX_DECODE_QUERIES)]


def planned(request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
    if is_latent(request):
        return decode.planned(request, schedule)
    return [] if request.dense.cu_q is None else decode.planned(decode_request(request), schedule)


def attend_launches(call: KvCall, target: Target, memory: Memory, shared: bool = True) -> list[Launch]:
    request, out, lse = call.request, call.out, call.lse
    if is_latent(request):
        return hopper_mla_launches(call, target)
    assert out is not None
    assert lse is not None
    # The kernel writes a contiguous lse. The lse of a plan is strided and is not returned.
    own = lse if lse.is_contiguous() else memory.empty(lse.shape, lse.dtype)
    prefill = prefill_launch(request, out, own, new_state(memory, None), target.num_sms, call.max_logit)
    if request.dense.cu_q is None:
        return [prefill]
    rest = call._replace(request=decode_request(request))
    assert rest.schedule is not None
    partition = decode.checked_partition(rest.request, target, rest.schedule, rest.workspace)
    return [prefill, *decode.decode_launches(rest, partition, target, decode.Part(concurrent=True))]


def prefill_launch(
    request: KvRequest, out: Tensor, lse: Tensor, state: State, num_sms: int, max_logit: Tensor | None = None
) -> Launch:
    """The Hopper forward on a KV cache."""
    dense, places = request.dense, request.places
    q, k, v, spec = dense[:4]
    cu_q, table = dense.cu_q, places.table
    max_length = places.capacity(k)
    n_q, heads, d = q.shape[-3:]
    size = CallShape(places.batch, n_q, max_length, heads, k.shape[-2], d, v.shape[-1], packed=cu_q is not None)
    # The width of a page table says little of the lengths, and engines pass several widths: one kernel for all.
    config = forward_config(size, max_length if table is None else None, spec, False)
    box = config.BLOCK_N if table is None else math.gcd(k.shape[1], config.BLOCK_N)
    boxes = config.BLOCK_N // box
    # the most page numbers that fit into the producer's registers (forward.specialize_warps)
    most = 4 if config.WARPGROUPS == 3 else 8 if config.BLOCK_DV <= 128 else 1
    config = config._replace(
        PAGE_SIZE=None if table is None else k.shape[1],
        PAGE_BOXES=boxes,
        Q_IN_REGISTERS=config.Q_IN_REGISTERS and boxes == 1,  # the producer of pages takes some of the registers
        PAGE_PREFETCH=boxes if boxes <= most else math.gcd(boxes, most),
        MAX_DECODE_QUERIES=0 if cu_q is None else MAX_DECODE_QUERIES,
    )
    cache = KvCache(
        *(places.lengths, places.cu_new, table, places.rows, places.new, max_length),
        *(0 if table is None else table.stride(0), k.shape[0], page_stride(k), page_stride(v)),
    )
    kv = *column_descriptors(k, box, is_cache=True), *column_descriptors(v, box, is_cache=True)
    varlen = dense._replace(cu_k=cu_q)  # for the kernel's signature: the cache tells where the keys are
    operands = Operands((*column_descriptors(q, ROWS.value), *kv))
    return forward_launch(varlen, operands, (out, lse, max_logit), state, num_sms, size, config, cache)
