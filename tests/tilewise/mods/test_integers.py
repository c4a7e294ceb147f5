"""Integers of mods have 64 bits everywhere: in the reference, in block masks and in the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product as product_of

import pytest
import torch
from torch import Tensor

import tilewise
from tests.conftest import DEVICE
from tilewise.mods import Mod
from tilewise.mods.bounds import INT32, INT64, bounds, is_narrow
from tilewise.mods.expr import _PYTHON, BITWISE, SHIFTS, Expr, H, I, J, arithmetic, const

N = 40
I_, J_ = torch.arange(N)[:, None], torch.arange(N)
IDS = torch.arange(N) // 7


@tilewise.mask_mod
def product(b, h, q_idx, kv_idx):
    return q_idx * 100_000_000 >= kv_idx * 100_000_001


@tilewise.mask_mod
def shifted(b, h, q_idx, kv_idx):
    return (q_idx + 2_147_483_640) - kv_idx < 2_147_483_650


@tilewise.mask_mod
def same(b, h, q_idx, kv_idx, ids):
    return ids[q_idx] == ids[kv_idx]


@tilewise.mask_mod
def summed(b, h, q_idx, kv_idx, ids):
    return ids[q_idx] + ids[kv_idx] > 100


@tilewise.mask_mod
def is_past(b, h, q_idx, kv_idx, ids):
    return ids[kv_idx] * kv_idx > 1_099_511_627_776


@tilewise.mask_mod
def indexed(b, h, q_idx, kv_idx, ids):
    return ids[q_idx * 4_000_000_000 - kv_idx * 4_000_000_000] == 3


@tilewise.mask_mod
def cut(b, h, q_idx, kv_idx):
    return int((q_idx - kv_idx) * 1e12) >= 2_147_483_000


def spread(x):
    x = (x | (x << 4)) & 0x0F0F
    x = (x | (x << 2)) & 0x3333
    return (x | (x << 1)) & 0x5555


@tilewise.mask_mod
def in_order(b, h, q_idx, kv_idx):
    """On a curve through a square of 8 x 8 that visits its quarters one after the other."""
    return (spread(q_idx // 8) << 1 | spread(q_idx % 8)) >= (spread(kv_idx // 8) << 1 | spread(kv_idx % 8))


def spread_by_bit(x: Tensor) -> Tensor:
    return sum((x // 2**n % 2) * 4**n for n in range(3))  # type: ignore[return-value]


PLACES = 2 * spread_by_bit(J_ // 8) + spread_by_bit(J_ % 8)


@tilewise.mask_mod
def bits(b, h, q_idx, kv_idx, ids):
    """Of integers of either sign, on both sides of 32 bits, and of bools."""
    low = ((q_idx - kv_idx) & 5) ^ ~kv_idx | (ids[q_idx] >> 1)
    high = (low << 33) ^ (q_idx << 40)
    return (high >> 35 & 6 > 2) ^ (q_idx & 1 > 0) ^ ((1 << (kv_idx & 31)) & 0x5555_5555 != 0)


@tilewise.mask_mod
def shifted_out(b, h, q_idx, kv_idx, by):
    """By less than 0 bits, by 64 and by more: nothing but the sign is left, and that of >> alone."""
    return ((q_idx + 1 << by[kv_idx]) == 0) & (((-1 - q_idx) >> by[kv_idx]) == -1) & (q_idx >> by[kv_idx] == 0)


BY = torch.tensor([-1, 64, 100, 63, 3, -(2**40), 2**40])[J_ % 7]
LOW = (((I_ - J_) & 5) ^ (-1 - J_)) | ((2**33 - IDS[:, None]) >> 1)

CASES: dict[str, tuple[Callable[[], Mod], Tensor]] = {
    "a product": (product, I_ * 100_000_000 >= J_ * 100_000_001),
    "a sum": (shifted, I_ - J_ < 10),
    "ids past 2^32": (lambda: same((IDS % 2 * 2**32 + IDS // 2).to(DEVICE)), IDS[:, None] == IDS),
    "bytes": (lambda: summed((3 * J_).to(torch.int8).to(DEVICE)), 3 * I_ + 3 * J_ > 100),
    "int32 times an index": (
        lambda: is_past(torch.full((N,), 2**30, dtype=torch.int32, device=DEVICE) + J_.to(DEVICE).int()),
        ((2**30 + J_) * J_ > 2**40).expand(N, N),
    ),
    "an index past both ends": (
        lambda: indexed(torch.tensor([3, 0, 0, 3], device=DEVICE)),
        torch.ones(N, N, dtype=torch.bool),
    ),
    "a float cut": (cut, I_ > J_),
    "order": (in_order, PLACES[:, None] >= PLACES),
    "bits": (
        lambda: bits((2**33 - IDS).to(DEVICE)),
        (((LOW << 33) ^ (I_ << 40)) // 2**35 % 8 // 2 > 1) ^ (I_ % 2 == 1) ^ (J_ % 2 == 0),
    ),
    "a shift past the end": (
        lambda: shifted_out(BY.to(DEVICE)),
        ((BY < 0) | (BY >= 64) | ((BY == 63) & (I_ % 2 == 1))).expand(N, N),
    ),
}


def seen_by(mod: Mod, backend: str, block: int | None) -> Tensor:
    """Values are one-hot: the weights that are not 0 are the mask."""
    q, k = torch.zeros(1, N, 1, 16, device=DEVICE), torch.zeros(1, N, 1, 16, device=DEVICE)
    v = torch.eye(N, device=DEVICE)[None, :, None]
    mask = tilewise.block_mask(mod, N, N, block=(block, block), device=DEVICE) if block else mod
    return tilewise.attention(q, k, v, mask_mod=mask, backend=backend)[0, :, 0].cpu() > 0


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("name", CASES)
def test_one_meaning(name: str, block: int | None, backend: str) -> None:
    make, expected = CASES[name]
    assert torch.equal(seen_by(make(), backend, block), expected)


def test_tiles_are_those_of_the_mask() -> None:
    for make, expected in CASES.values():
        tiles = tilewise.block_mask(make(), N, N, block=(16, 16), device=DEVICE).tiles[0, 0].cpu()
        assert torch.equal(tiles > 0, torch.nn.functional.pad(expected, (0, 8, 0, 8)).view(3, 16, 3, 16).any(3).any(1))


@pytest.mark.parametrize("index", [-7, -1, 0, 2, 3, 50])
def test_an_index_outside_reads_the_nearest(index: int, backend: str) -> None:
    @tilewise.score_mod
    def at(score, b, h, q_idx, kv_idx, table, n):
        return score + table[kv_idx * 0 + n]

    table = torch.tensor([1.0, 2.0, 4.0], device=DEVICE, requires_grad=True)
    x = torch.zeros(1, 4, 1, 16, device=DEVICE)
    _, lse = tilewise.attention(x, x, x, score_mod=at(table, index), return_lse=True, backend=backend)
    nearest = min(max(index, 0), 2)
    assert lse[0, 0, 0].item() == pytest.approx(table[nearest].item() + math.log(4))
    (grad,) = torch.autograd.grad(lse.sum(), table)
    assert grad.nonzero().flatten().tolist() == [nearest]


def test_32_bits_where_they_are_enough() -> None:
    """Distances and the like are not made slower; brute force agrees with the bounds."""
    narrow = [
        arithmetic("sub", I, J),
        arithmetic("floordiv", I, const(3)),
        arithmetic("mod", arithmetic("sub", I, J), H),
    ]
    wide = [arithmetic("mul", I, J), arithmetic("add", const(2**31 - 1), I), arithmetic("sub", const(-(2**31)), I)]
    assert all(is_narrow(bounds(x)[x]) for x in narrow)
    assert not any(is_narrow(bounds(x)[x]) for x in wide)
    assert bounds(const(INT32[1]))[const(INT32[1])] == (INT32[1], INT32[1])


@pytest.mark.parametrize("op", ["add", "sub", "mul", "floordiv", "mod", "min", "max", *BITWISE])
def test_bounds_hold(op: str) -> None:
    """Of a number in a range of its own and another in another, by trying all of them."""
    index = arithmetic("sub", I, const(100))

    def within(least: int, width: int) -> Expr:
        return arithmetic("min", arithmetic("max", index, const(least)), const(least + width))

    for a, c, width in product_of(range(-7, 8), range(-7, 8), (0, 3)):
        x = arithmetic(op, within(a, width), within(c, width))
        least, most = bounds(x)[x]
        others = [n for n in range(c, c + width + 1) if not (n == 0 and op in ("floordiv", "mod"))]
        truth = [_PYTHON[op](m, n) for m in range(a, a + width + 1) for n in others if n >= 0 or op not in SHIFTS]
        assert all(least <= y <= most for y in truth), (a, c, width)


def test_what_overflows_has_no_bounds() -> None:
    cube = arithmetic("mul", arithmetic("mul", I, I), I)
    assert bounds(cube)[cube] == INT64
    by = arithmetic("bitwise_left_shift", I, J)
    assert bounds(by)[by] == INT64
