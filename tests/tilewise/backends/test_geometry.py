"""Who am I, which tiles do I visit, which pairs see each other: against brute force, over all small cases."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.oracle import seen
from tests.tilewise.backends.probes import band_probe, locate_probe, visible_probe
from tilewise.backends.common.device.structs import PAD
from tilewise.backends.common.kernel_call import CallShape
from tilewise.request import Spec

SIDES = (None, 0, 1, 3)
BLOCK = 4


def table(rows: list[tuple[int | None, ...]], device: str) -> Tensor:
    return torch.tensor([[x or 0 for x in row] for row in rows], dtype=torch.int32, device=device)


def by_bounds(cases: list[tuple[int | None, ...]]) -> list[tuple[int | None, int | None, list]]:
    """Cases that end in (before, after), by which of the two are None: a kernel is compiled for each."""
    return [
        (before, after, [c for c in cases if ((c[-2] is None), (c[-1] is None)) == (before is None, after is None)])
        for before, after in product((None, 0), (None, 0))
    ]


def test_band(device: str) -> None:
    """Every pair that sees each other is visited, unmasked tiles see all, and no tile is visited in vain."""
    cases = [
        (first, first + rows - 1, n, before, after)
        for first, rows, n, before, after in product((-6, -1, 0, 2, 5, 9), (1, 3), (0, 1, 4, 7), SIDES, SIDES)
    ]
    for some_before, some_after, group in by_bounds(cases):
        out = torch.empty(len(group), 4, dtype=torch.int32, device=device)
        band_probe[(len(group),)](table(group, device), out, some_before, some_after, BLOCK=BLOCK)
        for (first, last, n, before, after), (lo, full_lo, full_hi, hi) in zip(group, out.tolist(), strict=True):
            sees = {
                (r, c)
                for r, c in product(range(first, last + 1), range(n))
                if (before is None or c >= r - before) and (after is None or c <= r + after)
            }
            case = first, last, n, before, after
            tiles = range(lo, hi, BLOCK)
            visited = {c for start in tiles for c in range(start, start + BLOCK)}
            assert lo % BLOCK == 0, case
            assert {c for _, c in sees} <= visited, case
            for start in tiles:
                pairs = set(product(range(first, last + 1), range(start, start + BLOCK)))
                if full_lo <= start and start + BLOCK <= full_hi:
                    assert pairs <= sees, case
                elif sees:
                    assert pairs & sees, case
            assert sees or len(tiles) <= 1, case


def test_visible(device: str) -> None:
    size = 8
    cases = [*product((0, 1, 3, 5, 8), (0, 1, 4, 8), SIDES, SIDES)]
    for some_before, some_after, group in by_bounds(cases):
        out = torch.empty(len(group), size, size, dtype=torch.int32, device=device)
        visible_probe[(len(group),)](table(group, device), out, some_before, some_after, SIZE=size)
        for (n_q, n_k, before, after), found in zip(group, out.bool().cpu(), strict=True):
            expected = torch.zeros(n_q, size, dtype=torch.bool)
            expected[:, :n_k] = seen(n_q, n_k, Spec(1.0, before, after))
            assert torch.equal(found[:n_q], expected), (n_q, n_k, before, after)


@pytest.mark.parametrize(("batch", "heads", "n"), [(1, 1, 1), (2, 3, 9), (3, 2, 8), (2, 1, 0)])
def test_locate_dense(batch: int, heads: int, n: int, device: str) -> None:
    size = CallShape(batch, n, n + 2, heads, heads, 8, 8, packed=False)
    programs = size.programs(n, heads, BLOCK)
    out = torch.empty(programs, 8, dtype=torch.int32, device=device)
    if programs:
        locate_probe[(programs,)](
            out, size.tiles(n, BLOCK), heads, batch, None, None, n, n + 2, None, BLOCK=BLOCK
        )  # fmt: skip
    expected = {(b, h, i) for b, h, i in product(range(batch), range(heads), range(0, n, BLOCK))}
    assert {tuple(row[:3]) for row in out.tolist()} == expected
    assert programs == len(expected)
    assert all(row[3:] == [0, n, 0, n + 2, 0] for row in out.tolist())


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_locate_packed(side: str, device: str) -> None:
    """Each tile of each sequence has one owner; the padded statistics of sequences do not overlap."""
    heads = 2
    for lengths in [*product((0, 1, 4, 5), repeat=2), (0,), (9, 0, 0), (0, 0, 3, 0, 13), (3, 150, 0, 128, 2)]:
        others = [2 * n + 1 if n % 2 else 0 for n in lengths]
        n_q, n_k = (lengths, others) if side == "queries" else (others, lengths)
        starts_q, starts_k = ([sum(n[:b]) for b in range(len(n) + 1)] for n in (n_q, n_k))
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k))
        size = CallShape(len(lengths), sum(n_q), sum(n_k), heads, heads, 8, 8, packed=True)
        programs = size.programs(sum(lengths), heads, BLOCK)
        out = torch.empty(programs, 8, dtype=torch.int32, device=device)
        locate_probe[(programs,)](
            out, size.tiles(sum(lengths), BLOCK), heads, len(lengths), cu_q, cu_k, sum(n_q), sum(n_k),
            cu_q if side == "queries" else cu_k, BLOCK=BLOCK,
        )  # fmt: skip
        work = [row for row in out.tolist() if row[2] < lengths[row[0]]]
        found = [tuple(row[:3]) for row in work]
        expected = {(b, h, i) for b, n in enumerate(lengths) for h in range(heads) for i in range(0, n, BLOCK)}
        assert len(found) == len(expected), lengths
        assert set(found) == expected, lengths
        pad = PAD.value
        end = 0
        for b, row in sorted({row[0]: row for row in work}.items()):
            assert row[3:7] == [starts_q[b], n_q[b], starts_k[b], n_k[b]], lengths
            assert row[7] >= end, lengths
            assert row[7] % pad == 0, lengths
            end = row[7] + -(-n_q[b] // pad) * pad
        assert end <= size.tiles(sum(n_q), pad) * pad, lengths
