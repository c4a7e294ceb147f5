"""How the tiles of keys of the Hopper backward are split among programs, and in what order they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.backends.common.kernel_call import CallShape, call_shape
from tilewise.backends.common.launch import DeviceMemory
from tilewise.request import BackwardInputs, Request, Spec

pytest.importorskip("triton")
schedule = pytest.importorskip("tilewise.backends.hopper.backward_schedule")

from tilewise.backends.hopper.backward_launches import backward_launches, new_workspace  # noqa: E402
from tilewise.backends.hopper.backward_schedule import Split  # noqa: E402
from tilewise.backends.hopper.support import backward_tile  # noqa: E402
from tilewise.backends.hopper.tile_table import BackwardTile  # noqa: E402

H200 = 132
TILE = backward_tile(128, 128, plain=True, deterministic=False)


def request(
    batch: int, tokens: Any, heads: tuple[int, int], after: int | None = 0, d: int = 128, **spec: Any
) -> Request:
    n_q, n_k = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    q, k = (
        torch.empty(batch, n, h, d, dtype=torch.bfloat16, device="meta") for n, h in zip((n_q, n_k), heads, strict=True)
    )
    return Request(q, k, k, Spec(0.1, None, after, **spec))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (request(1, 2048, (32, 8)), Split(2)),  # 128 causal tiles, the longest of twice the mean
        (request(4, 4096, (32, 1)), Split(8)),  # the same, and 32 query heads of each row do not fit into L2
        (request(1, 2048, (64, 8), d=64), Split(2)),
        (request(4, 512, (32, 8)), Split(2)),
        (request(1, 1024, (32, 8)), Split(4)),  # 64 tiles
        (request(1, 4096, (28, 4)), Split(1, 2)),  # a group of 7 divides by 7 alone
        (request(1, 1024, (8, 8)), Split(1, 2)),  # without a group, by blocks of queries
        (request(1, (4096, 256), (16, 16), None), Split(1, 4)),  # 32 tiles
        (request(1, 2048, (16, 16)), None),  # 256 causal tiles
        (request(1, 1024, (16, 16), None), None),  # 128 tiles of equal length
        (request(4, 4096, (32, 8)), None),
        (request(1, 16384, (32, 8)), None),
        (request(64, 4096, (32, 8)), None),
        (request(8, 3573, (96, 8), d=192), Split(4)),  # 12 query heads of each row do not fit into L2
        (request(4, 4096, (128, 8)), Split(4)),
        (request(4, 4096, (128, 8), None), None),  # tiles of equal length visit the same head at the same time
        (request(64, 4096, (128, 8)), None),  # 16384 tiles
        (request(1, 128, (1, 1)), None),  # parts would take longer than they save
        (request(1, 16384, (32, 8), partial=True), Split()),  # float32 gradients are parts, be it one
        (request(1, 2048, (32, 8), partial=True), Split(2)),
    ],
)
def test_tiles_are_split_where_they_are_few(call: Request, expected: Split | None) -> None:
    assert schedule.choose_split(call, H200) == expected


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(8, 3573, (96, 8)), (4, 4096, (128, 8)), (4, 8192, (48, 1))])
def test_parts_are_no_larger_than_the_sums_of_dq(batch: int, tokens: int, heads: tuple[int, int]) -> None:
    size = call_shape(request(batch, tokens, heads))
    most = max(x.parts for x in schedule.possible_splits(size, TILE.block_n, H200))
    assert 1 < most <= max(heads[0] // heads[1] / 2, schedule.MOST_ROUNDS * H200 / size.programs(tokens, heads[1], 128))


def test_packed_sequences_count_as_spread_around_their_mean() -> None:
    """Lengths are on the device. 14 sequences of 610 tokens have tiles for all SMs if they are equally long; one of
    2048 tokens, as batches have them, needs a split."""
    q, k = torch.empty(8541, 71, 64, device="meta"), torch.empty(8541, 1, 64, device="meta")
    cu = torch.empty(15, dtype=torch.int32, device="meta")
    packed = Request(q, k, k, Spec(0.125, None, 0), cu_q=cu, cu_k=cu)
    assert schedule.choose_split(packed, H200) == schedule.Split(1, 4)
    lengths = schedule.sequence_lengths(8541, 14)
    assert sum(lengths) == 8541
    assert max(lengths) < 2 * 8541 / 14
    blocks = schedule.blocks_of_tiles(call_shape(packed), packed.spec, TILE)
    assert max(blocks) == -(-lengths[-1] // 64)
    assert len(blocks) == sum(-(-n // 128) for n in lengths)


@pytest.mark.parametrize(
    ("shape", "band", "expected"),
    [
        ((512, 512), (None, None), [8, 8, 8, 8]),
        ((512, 512), (None, 0), [8, 6, 4, 2]),
        ((256, 512), (None, 0), [4, 4, 4, 2]),  # the first queries are at key 256
        ((512, 256), (None, 0), [4, 2]),
        ((1024, 1024), (128, 0), [4, 4, 4, 4, 4, 4, 4, 2]),
        ((100, 130), (None, None), [2, 2]),
    ],
)
def test_blocks_that_see_a_tile(shape: Any, band: Any, expected: list[int]) -> None:
    size = CallShape(1, *shape, 1, 1, 128, 128, packed=False)
    assert schedule.blocks_of_tiles(size, Spec(0.1, *band), BackwardTile(64, 128, dq_by_tma=True)) == expected


def test_a_split_is_by_heads_first_and_by_powers_of_two_of_blocks() -> None:
    size = CallShape(1, 128, 128, 12, 2, 128, 128, packed=False)
    heads, blocks = [Split(n) for n in (1, 2, 3, 6)], [Split(2, 2), Split(2, 4), Split(6, 2)]
    found = schedule.possible_splits(size, 128, H200)
    assert {*heads, *blocks} <= {*found}
    assert [x.parts for x in found] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    many = size._replace(batch=2 * H200)  # four tiles an SM
    assert schedule.possible_splits(many, 128, H200) == [Split(), Split(2), Split(3), Split(2, 2)]


def test_the_estimate_is_list_scheduling() -> None:
    """Of three equal tiles on two SMs the last one waits; halves do not."""
    size = CallShape(1, 65536, 128, 6, 3, 128, 128, packed=False)
    spec = Spec(0.1)
    whole, halves = (schedule.estimated_cycles(size, spec, TILE, split, 2) for split in (Split(), Split(2)))
    assert halves / whole == pytest.approx(0.75, rel=0.01)


def test_parts_are_heads_of_the_tile_scheduler() -> None:
    """Tiles, programs and memory of a call whose tiles have four parts."""
    call = request(2, 300, (8, 2))
    q, k, v, spec = call[:4]
    call = Request(*(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)), spec)
    size, out = call_shape(call), torch.empty(q.shape, dtype=q.dtype)
    split = Split(2, 2)
    space = new_workspace(DeviceMemory(out.device), size, split)
    assert space.dk_parts is not None
    assert space.dk_parts.numel() == 2 * 2 * 4 * 384 * 128
    bwd_inputs = BackwardInputs(out, torch.empty(2, 8, 300), out, None)
    _, sums, added = backward_launches(call, bwd_inputs, (out, call.k, call.v), space, 132).values()
    arguments = dict(zip(sums.kernel.arg_names, sums.args, strict=False))
    found = [
        arguments[x] for x in ("num_tiles", "rows", "tiles_per_row", "heads", "group", "query_shift", "query_step")
    ]
    assert found == [48, 16, 3, 8, 2, 1, 128]
    assert sums.programs == 48
    assert added.programs == 2 * (2 * 8 * 3) + 2 * (2 * 2 * 3)
    whole = backward_launches(
        call, bwd_inputs, (out, call.k, call.v), new_workspace(DeviceMemory(out.device), size, None), 132
    )
    assert [x.programs for x in [*whole.values()][1:3]] == [12, 2 * (2 * 8 * 3)]
