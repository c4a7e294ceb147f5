"""The course's own kernels against torch, and the machine's lesson on memory against what they do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from tests.conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("triton_runs")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts what a kernel moves")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Elements that kernels load and store, lanes that are masked off not counted."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    moved: Counter[str] = Counter()
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def counting_load(self, pointers, mask, *rest):
        moved["loads"] += int(mask.data.sum())
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        moved["stores"] += int(mask.data.sum())
        return store(self, pointers, value, mask, *rest)

    with mock.patch.multiple(Builder, create_masked_load=counting_load, create_masked_store=counting_store):
        yield moved


def test_vector_add_masks_what_is_past_the_end(device):
    from tilewise_lab.learn.kernels import vector_add

    a = torch.tensor([1, 4, 3, 9, 5, 11, 7, 2] + [99] * 24, device=device)
    b = torch.tensor([3, 2, 6, 1, 2, 5, 6, 9] + [99] * 24, device=device)
    c = torch.full((32,), -1, device=device)
    vector_add[(1,)](a, b, c, 8, BLOCK=32)
    assert c.tolist() == [4, 6, 9, 10, 7, 16, 13, 11] + [-1] * 24


def test_more_elements_than_threads_take_blocks(device):
    """What the notes break off at: 8 elements in 4 blocks of 2; a million in 31,250 blocks of 32; a ragged last one."""
    from tilewise_lab.learn.kernels import vector_add
    from tilewise_lab.machine import warps

    a, b = torch.arange(16, device=device), 100 * torch.arange(16, device=device)
    for n in (8, 7):
        c = torch.full((16,), -1, device=device)
        vector_add[(warps.grid(n, 2),)](a, b, c, n, BLOCK=2)
        assert c.tolist() == [101 * i for i in range(n)] + [-1] * (16 - n)
    assert (warps.grid(8, 2), warps.grid(1_000_000, 32)) == (4, 31_250)


@interpreted
def test_lanes_past_the_end_are_switched_off(device):
    """Predicated, not looping: 24 of 32 lanes of a warp neither load nor store."""
    from tilewise_lab.learn.kernels import vector_add
    from tilewise_lab.machine import warps

    a = torch.arange(32, device=device)
    with counted() as moved:
        vector_add[(1,)](a, a, a.clone(), 8, BLOCK=32)
    (warp,) = warps.warps(8)
    assert (warp.active, warp.masked) == (8, 24)
    assert moved == {"loads": 2 * warp.active, "stores": warp.active}


def test_matrix_add_and_softmax(device):
    from tilewise_lab.learn.kernels import matrix_add, softmax_rows

    x, y = torch.randn(2, 5, 7, device=device)
    z = torch.empty_like(x)
    matrix_add[(3, 2)](x, y, z, 5, 7, BLOCK_M=2, BLOCK_N=4)
    assert torch.equal(z, x + y)
    softmax_rows[(5,)](x, z, 7, BLOCK=8)
    torch.testing.assert_close(z, torch.softmax(x, -1))


def test_matmuls_of_ragged_sizes(device):
    from tilewise_lab.learn.kernels import matmul_naive, matmul_tiled

    m, n, k = 5, 18, 20
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    one, two = torch.empty(m, n, device=device), torch.empty(m, n, device=device)
    matmul_naive[(m, n)](a, b, one, m, n, k, BLOCK_K=16)
    matmul_tiled[(-(-m // 16), -(-n // 16))](a, b, two, m, n, k, k, n, n, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    torch.testing.assert_close(one, a @ b, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(two, a @ b, atol=1e-4, rtol=1e-4)


@interpreted
def test_loads_of_one_output_and_of_a_tile(device):
    """Each element of A and B is read N times for outputs alone, N / T times for tiles of T: load a tile of A and one
    of B, multiply, add to what is there, four times."""
    from tilewise_lab.learn.kernels import matmul_naive, matmul_tiled

    n, t = 16, 8
    a, b, one, two = (torch.randn(n, n, device=device) for _ in range(4))
    with counted() as alone:
        matmul_naive[(n, n)](a, b, one, n, n, n, BLOCK_K=16)
    with counted() as tiled:
        matmul_tiled[(n // t, n // t)](a, b, two, n, n, n, n, n, n, BLOCK_M=t, BLOCK_N=t, BLOCK_K=4)
    torch.testing.assert_close(one, a @ b, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(two, a @ b, atol=1e-4, rtol=1e-4)
    elements = 2 * n * n
    assert (alone["loads"] / elements, tiled["loads"] / elements) == (n, n / t)
    assert alone["stores"] == tiled["stores"] == n * n


@interpreted
@pytest.mark.parametrize("tile", [8, 16, 32])
def test_loads_fall_with_the_tile(device, tile):
    """C_ij = Σ_k A_ik B_kj, blocks loaded when their turn comes: 2 N³ / T elements in all."""
    from tilewise_lab.learn.kernels import matmul_tiled

    n = 32
    a, b, c = (torch.randn(n, n, device=device) for _ in range(3))
    with counted() as moved:
        matmul_tiled[(n // tile, n // tile)](a, b, c, n, n, n, n, n, n, BLOCK_M=tile, BLOCK_N=tile, BLOCK_K=16)
    torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)
    assert moved["loads"] == 2 * n**3 // tile


def test_chain_is_its_four_operations(device):
    from tilewise_lab.learn.kernels import chain

    x = torch.randn(1000, device=device)
    y = torch.empty_like(x)
    chain[(4,)](x, y, 1000, BLOCK=256)
    torch.testing.assert_close(y, (2 * x + 1).relu().square() - 3)


@interpreted
def test_a_fused_chain_goes_to_memory_once(device):
    """Four operations: each element is read once and written once, not four times."""
    from tilewise_lab.learn.kernels import chain

    x = torch.randn(1000, device=device)
    with counted() as moved:
        chain[(4,)](x, torch.empty_like(x), 1000, BLOCK=256)
    assert moved == {"loads": 1000, "stores": 1000}


@pytest.mark.parametrize("stride", [1, 8, 64])
def test_every_element_is_read_once_at_any_stride(device, stride):
    from tilewise_lab.learn.kernels import read_apart

    x = torch.arange(1024.0, device=device)
    y = torch.empty(8, device=device)
    read_apart[(8,)](x, y, stride, 1024, BLOCK=128)
    assert y.sum() == x.sum()


def test_a_chain_of_loads_shows_how_far_memory_is(device):
    """Each load says where the next one is; on an H200 that took about the cycles that the notes give."""
    from tilewise_lab.learn.course import home
    from tilewise_lab.learn.kernels import chase

    kept = json.loads((home() / "measured" / "nvidia-h200.json").read_text(encoding="utf-8"))["found"]["latency"]
    cycles = {name: 1.83 * nanoseconds for name, nanoseconds in kept.items()}
    assert 20 < cycles["L1"] < 60 < 150 < cycles["L2"] < 400 < cycles["HBM"] < 1000

    order = [0, 3, 1, 2]
    ring = torch.zeros(4, dtype=torch.int32, device=device)
    for a, b in zip(order, order[1:] + order[:1], strict=True):
        ring[a] = b
    place = torch.zeros(1, dtype=torch.int32, device=device)
    chase[(1,)](ring, place, 3)
    assert place.item() == order[3]
    chase[(1,)](ring, place, 3)
    assert place.item() == order[2]


def test_the_kernels_softmax_step_is_the_references(device):
    """m, l, alpha and p of every step, beside `reference.softmax`."""
    from tilewise_lab.derivation import softmax as rung
    from tilewise_lab.learn.kernels import watch_softmax

    s = torch.randn(16, 64, device=device) * 3
    m, l, alpha = torch.empty(3, 4, 16, device=device)
    p = torch.empty(16, 64, device=device)
    watch_softmax[(1,)](s, m, l, alpha, p, 64, ROWS=16, COLS=16)
    states = list(rung.online_states(s))[15::16]
    old = rung.nothing(s)
    for step, state in enumerate(states):
        torch.testing.assert_close(m[step], state.m)
        torch.testing.assert_close(l[step], state.l, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alpha[step], rung.correction(old.m, state.m), rtol=1e-4, atol=1e-6)
        columns = slice(16 * step, 16 * step + 16)
        torch.testing.assert_close(p[:, columns], torch.exp(s[:, columns] - state.m[:, None]), rtol=1e-4, atol=1e-5)
        old = state
