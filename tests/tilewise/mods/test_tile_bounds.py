"""Block masks from the bounds of their ints: the same tiles as from every pair, without a tensor of all pairs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise
from tilewise import mods
from tilewise.mods import tile_bounds
from tilewise.mods.expr import (
    N_K,
    Q_POS,
    B,
    Expr,
    H,
    I,
    J,
    Place,
    absolute,
    arithmetic,
    compare,
    const,
    evaluate,
    load,
    logic,
    negative,
    where,
)
from tilewise.mods.tile_bounds import Tiles, interval_of


@tilewise.mask_mod
def two_tables(b, h, q_idx, kv_idx, t):
    return t[b, q_idx // 3] <= t[h, kv_idx]


@tilewise.mask_mod
def flagged(b, h, q_idx, kv_idx, flags):
    return flags[kv_idx] | (q_idx % 5 == kv_idx % 5)


@tilewise.mask_mod
def chosen(b, h, q_idx, kv_idx, t):
    return (kv_idx * 2 > q_idx - 7) if q_idx < 20 else (t[min(q_idx, kv_idx)] != t[q_idx])


@tilewise.mask_mod
def with_floats(b, h, q_idx, kv_idx, t):
    return (t[q_idx] * 1.0 < 2.5) & (abs(q_idx - kv_idx) < 30)


@tilewise.mask_mod
def pair_table(b, h, q_idx, kv_idx, t):
    return t[q_idx, kv_idx] > 0


@tilewise.mask_mod
def overflowing(b, h, q_idx, kv_idx, t):
    return t[q_idx] - t[kv_idx] > 0


@tilewise.mask_mod
def bits(b, h, q_idx, kv_idx):
    return ((q_idx & kv_idx) == 0) | ~(-kv_idx * q_idx < max(q_idx, 7) - 400)


@tilewise.mask_mod
def of_floats(b, h, q_idx, kv_idx, t):
    return t[q_idx] >= t[kv_idx]


def drawn(n: int) -> list[mods.Mod]:
    ids = torch.randint(0, 4, (n,)).sort()[0]
    return [
        mods.document(ids=ids.int()),
        mods.document(ids=ids.expand(2, -1)),
        mods.prefix_lm(torch.tensor([7, 3])),
        mods.window_with_globals(9, 3),
        mods.dilated_window(5, 3),
        mods.neighbourhood_2d(6, 1),
        mods.block_diagonal(11),
        mods.strided_sparse(5),
        two_tables(torch.randint(-9, 9, (2, n))),
        flagged(torch.rand(n) > 0.7),
        chosen(ids),
        with_floats(torch.randint(0, 5, (n,))),
        pair_table(torch.randint(0, 2, (n, n))),
        overflowing(torch.tensor([2**62, -(2**62)] * n)),
        bits(),
        of_floats(torch.tensor([0.0, float("nan"), 1.0] * n)),
    ]


def expected_kinds(shown: Tensor, in_band: Tensor, block: tuple[int, int]) -> Tensor:
    """Tile by tile, from every pair."""
    rows, columns = (range(0, n, size) for n, size in zip(shown.shape, block, strict=True))
    kinds = torch.zeros(len(rows), len(columns), dtype=torch.int8)
    for r, i in enumerate(rows):
        for c, j in enumerate(columns):
            tile, inside = (x[i : i + block[0], j : j + block[1]] for x in (shown, in_band))
            if (tile & inside).any():
                kinds[r, c] = 1 if (inside & ~tile).any() else 3 if inside.all() else 2
    return kinds


@pytest.mark.parametrize("seed", range(40))
def test_as_from_every_pair(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    n_q, n_k = r.randint(1, 90), r.randint(1, 90)
    block = 16 * r.randint(1, 3), 16 * r.randint(1, 3)
    window = r.choice((None, 0, 5, 40)), r.choice((None, 0, 5, 40))
    head = r.randint(0, 1), r.randint(0, 1)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    at = i + n_k - n_q
    in_band = torch.ones(n_q, n_k, dtype=torch.bool)
    in_band &= True if window[0] is None else j >= at - window[0]
    in_band &= True if window[1] is None else j <= at + window[1]
    for mod in drawn(max(n_q, n_k)):
        shown = mod(*head, i, j, q_len=n_q, kv_len=n_k).expand(n_q, n_k)
        tiles = Tiles(head, n_q, n_k, block, torch.device("cpu"))
        found = tile_bounds.tile_kinds(mod.program.root, tiles, window, mod.tensors, mod.numbers)
        assert torch.equal(found, expected_kinds(shown, in_band, block)), mod
        bounds = interval_of(mod.program.root, tiles, mod.tensors, mod.numbers)
        if bounds is not None:
            every = expected_kinds(shown, torch.ones_like(in_band), block)
            surely, perhaps = (x.expand(every.shape) for x in bounds)
            assert not (surely & (every != 3)).any(), mod
            assert not (~perhaps & (every != 0)).any(), mod


INTS = ("add", "sub", "mul", "min", "max", "floordiv", "mod", "bitwise_and", "bitwise_or")


class Drawn:
    """Random masks of ints, bools and floats, with tables that have nan, infinite and huge values in them."""

    def __init__(self, seed: int, n: int) -> None:
        self.r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        wide = torch.tensor([2**62, -(2**63), 2**40, 7, -1])
        odd = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 2.5])
        self.tensors = (
            torch.randint(-9, 9, (n,), generator=g),
            torch.randint(-40, 40, (n, n), generator=g, dtype=torch.int32),
            torch.rand(2, generator=g) > 0.5,
            torch.rand(n, generator=g) > 0.3,
            wide[torch.randint(0, 5, (n,), generator=g)],
            odd[torch.randint(0, 5, (n,), generator=g)],
            odd[torch.randint(0, 5, (2,), generator=g)],
        )

    def load(self, n: int, depth: int) -> Expr:
        tensor = self.tensors[n]
        kind = "bool" if tensor.dtype == torch.bool else "float" if tensor.is_floating_point() else "int"
        first = (H, B) if tensor.shape[0] == 2 else (I, J, I, J, H, const(3), self.int(depth))
        return load(n, *(self.r.choice(first) for _ in range(tensor.dim())), kind=kind)

    def int(self, depth: int) -> Expr:
        if depth <= 0 or self.r.random() < 0.2:
            return self.r.choice((I, J, Q_POS, H, N_K, const(self.r.choice((-7, -1, 0, 1, 2, 5, 16, 2**33)))))
        match self.r.choice(("load", "load", "where", "neg", "abs", "wide", *INTS, *INTS)):
            case "load":
                return self.load(self.r.choice((0, 1)), depth - 1)
            case "wide":
                return self.load(4, depth - 1)
            case "where":
                return where(self.bool(depth - 1), self.int(depth - 1), self.int(depth - 1))
            case "neg":
                return negative(self.int(depth - 1))
            case "abs":
                return absolute(self.int(depth - 1))
            case op:
                b = self.divisor(depth - 1) if op in ("floordiv", "mod") else self.int(depth - 1)
                return arithmetic(op, self.int(depth - 1), b)

    def divisor(self, depth: int) -> Expr:
        """Not 0: one number, one of two by the head or by the pair, or any number above 0; some of them negative."""
        a, b = (const(self.r.choice((-16, -3, 1, 4, 11))) for _ in range(2))
        if self.r.random() < 0.3:
            return a
        return where(self.bool(depth), a, b) if self.r.random() < 0.6 else arithmetic("max", self.int(depth), const(1))

    def bool(self, depth: int) -> Expr:
        op = self.r.choice(("lt", "le", "gt", "ge", "eq", "ne", "same", "and", "or", "not", "where", "load", "float"))
        if depth <= 0:
            op = "load" if op in ("and", "or", "not", "where") else op
        match op:
            case "load":
                return self.load(self.r.choice((2, 3)), depth - 1)
            case "and" | "or":
                return logic(op, self.bool(depth - 1), self.bool(depth - 1))
            case "not":
                return logic("not", self.bool(depth - 1))
            case "where":
                return where(self.bool(depth - 1), self.bool(depth - 1), self.bool(depth - 1))
            case "same":
                x = self.r.choice((self.int(depth - 1), self.load(5, 0), self.load(6, 0)))
                return compare(self.r.choice(("eq", "le", "ne", "ge")), x, x)
            case "float":
                return compare(self.r.choice(("lt", "ge")), self.load(self.r.choice((5, 6)), 0), self.int(depth - 1))
        return compare(op, self.int(depth - 1), self.int(depth - 1))


@pytest.mark.parametrize("seed", range(150))
def test_random_masks(seed: int) -> None:
    """No interval rule may say more than the values of a tile's pairs."""
    r = random.Random(seed)
    n_q, n_k, block = r.randint(1, 40), r.randint(1, 40), (16, 16)
    drawn = Drawn(seed, max(n_q, n_k))
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    everywhere = torch.ones(n_q, n_k, dtype=torch.bool)
    for _ in range(6):
        root, head = drawn.bool(4), (r.randint(0, 1), r.randint(0, 1))
        (shown,) = evaluate([root], Place(*head, i, j, n_q, n_k), None, drawn.tensors, ())
        expected = expected_kinds(torch.as_tensor(shown).expand(n_q, n_k), everywhere, block)
        tiles = Tiles(head, n_q, n_k, block, torch.device("cpu"))
        assert torch.equal(tile_bounds.tile_kinds(root, tiles, (None, None), drawn.tensors, ()), expected)


@tilewise.mask_mod
def is_a_number(b, h, q_idx, kv_idx, w):
    return w[kv_idx] == w[kv_idx]


@tilewise.mask_mod
def sized_by_head(b, h, q_idx, kv_idx, gate):
    n = torch.where((gate[h] > 0) & (h < 4), 16, 40)
    return q_idx // n == kv_idx // n


@tilewise.mask_mod
def of_a_row_and_a_column(b, h, q_idx, kv_idx, t):
    return t[0, kv_idx] != t[kv_idx, 0]


@tilewise.mask_mod
def of_the_queries_left(b, h, q_idx, kv_idx, *, q_len):
    return kv_idx // (q_len - q_idx) < 2


@pytest.mark.parametrize("case", range(4))
def test_as_the_mod(case: int) -> None:
    """NaN is not equal to itself; a bound of one head is not its value; two views of one table; the last tile has no
    pairs past the last query."""
    torch.manual_seed(case)
    n = 90
    w = torch.ones(n)
    w[3] = torch.nan
    table = torch.zeros(n, n, dtype=torch.int64)
    table[0] = 1
    every = (
        is_a_number(w),
        sized_by_head(torch.tensor([1.0, -1.0])),
        of_a_row_and_a_column(table),
        of_the_queries_left,
    )
    mod = every[case]
    mask = tilewise.block_mask(mod, n, n, heads=2, block=(16, 16))
    q, k, v = (torch.randn(1, n, 2, 8) for _ in range(3))
    expected = tilewise.attention(q, k, v, mask_mod=mod)
    torch.testing.assert_close(tilewise.attention(q, k, v, mask_mod=mask), expected)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("name", ["document", "tree", "window"])
def test_no_tensor_of_all_pairs(name: str) -> None:
    n = 8192
    mod = {
        "document": mods.document(ids=torch.arange(n) // 700),
        "tree": mods.prefix_tree(torch.tensor([-1, 0, 0, 2]), torch.tensor([0, 4000, 5000, 7000, n])),
        "window": mods.window_with_globals(300, 64),
    }[name]
    with Largest() as largest:
        mask = tilewise.block_mask(mod, n, n, causal=True)
    assert largest.elements <= tile_bounds.PAIRS
    i = torch.arange(n)[:, None]
    rows = slice(3900, 4100)
    shown = mod(0, 0, i[rows], torch.arange(n)) & (torch.arange(n) <= i[rows])
    for row in (30, 31, 32):
        own = shown[128 * row - 3900 : 128 * row - 3900 + 128][: max(0, 4100 - 128 * row)]
        for column in range(64) if 128 * row >= 3900 else ():
            tile = own[:, 128 * column : 128 * column + 128]
            kind = mask.tiles[0, 0, row, column]
            assert not (kind == 0 and tile.any()), (row, column)
            assert not (kind == 2 and not tile.all()), (row, column)


def test_few_tiles_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents only tiles with an end of a document in them; of a band on tile borders none."""
    evaluated = []
    evaluate = tile_bounds._evaluated
    monkeypatch.setattr(
        tile_bounds, "_evaluated", lambda root, at, *rest: (evaluated.append(len(at)), evaluate(root, at, *rest))[1]
    )
    n = 4096
    tilewise.block_mask(mods.document(ids=torch.arange(n) // 1000), n, n, causal=True)
    assert sum(evaluated) <= 4 * 2 * 9
    evaluated.clear()
    tilewise.block_mask(mods.block_diagonal(512), n, n, causal=True)
    assert not evaluated


def test_the_row_of_a_decoded_query() -> None:
    n = 700
    for mod in (mods.document(ids=torch.arange(n) // 300), mods.strided_sparse(128), mods.window_with_globals(70, 5)):
        whole = tilewise.block_mask(mod, n, n, causal=True, block=(16, 16))
        last = tilewise.block_mask(mod, 1, n, causal=True, block=(16, 16))
        q, k, v = torch.randn(1, n, 2, 8), torch.randn(1, n, 2, 8), torch.randn(1, n, 2, 8)
        expected = tilewise.attention(q, k, v, causal=True, mask_mod=whole)[:, -1:]
        torch.testing.assert_close(tilewise.attention(q[:, -1:], k, v, causal=True, mask_mod=last), expected)


def test_made_in_a_compiled_function() -> None:
    q = torch.randn(1, 64, 2, 8, requires_grad=True)
    ids = torch.arange(64) // 20

    @torch.compile(backend="aot_eager")
    def step(q: Tensor, ids: Tensor) -> Tensor:
        mask = tilewise.block_mask(mods.document(ids=ids), 64, 64, block=(16, 16))
        return tilewise.attention(q, q, q, mask_mod=mask)

    expected = tilewise.attention(q, q, q, mask_mod=mods.document(ids=ids))
    torch.testing.assert_close(step(q, ids), expected)
    torch.testing.assert_close(step(q, ids // 2), tilewise.attention(q, q, q, mask_mod=mods.document(ids=ids // 2)))
