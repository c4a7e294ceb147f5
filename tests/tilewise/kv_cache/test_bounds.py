"""The tiles and the many programs of a GPU, in tensors that end where their last entry does (conftest watches)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import INTERPRETED
from tests.covering import cases, each_once
from tests.kv_cases import KvCase, KvInputs, compare, inputs

pytestmark = [
    pytest.mark.usefixtures("triton_runs"),
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU, see tests/gpu"),
]


def tight(x: KvInputs) -> KvInputs:
    """Nothing behind the last entry of a table."""
    table = x.options.get("page_table")
    if isinstance(table, torch.Tensor):
        new = x.case.each(x.case.new)
        most = max([1, *(-(-(n + m) // x.case.page) for n, m in zip(x.case.lengths, new, strict=True))])
        x.options["page_table"] = table[:, :most].clone()
    return x


def check(
    monkeypatch: pytest.MonkeyPatch, case: KvCase, tile: tuple[int, ...], processors: int, **options: Any
) -> None:
    from tilewise.backends.common.kv import partition

    monkeypatch.setattr(partition, "INTERPRETER", partition.KvTile(*tile))
    monkeypatch.setattr(partition, "INTERPRETED_PROCESSORS", processors)
    x = tight(inputs(case))
    found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, return_lse=True, backend="triton", **options)
    options.pop("split", None)
    compare(found, x, **options)


LARGE, NARROW = (64, 64, 4, 3, 2, 1, 0), (16, 64, 4, 3, 3, 1, 168)


@each_once(tile=[LARGE, NARROW], page=[16, 64, 256, 1, 0])
def test_decoding(page: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences as long as each other; each is shared by programs, some of which have two of them."""
    check(monkeypatch, KvCase((256,) * 3, heads=4, kv_heads=2, dim=16, page=page), tile, 5)


@each_once(carry=[0, 1], lengths=[(1,), (64,), (65,), (0, 0), (130, 0, 1)], ids=str)
def test_more_programs_than_work(lengths: tuple[int, ...], carry: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = KvCase(lengths, heads=4, kv_heads=1, dim=16, page=16)
    check(monkeypatch, case, (16, 64, 4, 3, 3, carry, 0), 40)
    check(monkeypatch, case.but(queries=(1,) * len(lengths), csr=True), (16, 64, 4, 3, 3, carry, 0), 40)


@cases("page", [3], [0, 16])
def test_offsets_of_64_bits(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for tensors whose dims or tokens lie far apart."""
    from tilewise.backends.common.kv import launches as kv_launch

    view = kv_launch.view
    monkeypatch.setattr(kv_launch, "view", lambda x: view(x)._replace(strides=(*view(x).strides[:4], 1)))
    case = KvCase((20, 3, 40), queries=2, new=2, heads=4, kv_heads=2, dim=20, page=page)
    rotary = tilewise.Rotary(torch.ones(64, 4), torch.zeros(64, 4))  # turns nothing
    check(monkeypatch, case.but(options={"rotary": rotary}), (16, 16, 4, 1, 1), 5)


@cases("seed", range(3), range(12))
def test_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    anything(seed, monkeypatch)


@pytest.mark.slow
@cases("seed", range(100, 106), range(100, 200))
def test_anything_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    anything(seed, monkeypatch)


def anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of a few random words."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 1, 2, 3])
    lengths = tuple(rng.choice([0, 1, 15, 16, 17, 64, rng.randrange(300)]) for _ in range(rng.randrange(1, 5)))
    new: Any = rng.choice([0, 0, 1, 3])
    queries: Any = rng.choice([1, 2, 5, 17])
    if rng.random() < 0.4:
        queries = tuple(rng.choice([0, 1, 1, 2, 9, 20]) for _ in lengths)
        new = queries if rng.random() < 0.5 else 0
    page = rng.choice([0, 1, 3, 8, 16, 16, 64])
    case = KvCase(
        lengths,
        queries,
        new,
        page,
        kv_heads * rng.choice([1, 2, 5]),
        kv_heads,
        rng.choice([16, 20]),
        rng.choice([0, 8]),
        bool(page) and rng.random() < 0.4,
        layout=rng.choice(["plain", "interleaved", "heads_first", "wide"]),
        padding=rng.choice([0, 3]) if isinstance(queries, tuple) else 0,
    )
    tile = *rng.choice([(16, 16), (16, 64), (32, 16), (64, 32)]), 4, 1, 1, rng.choice([0, 1])
    options: dict[str, Any] = rng.choice([{}, {}, {"window": (rng.randrange(40), 0)}, {"causal": False}])
    split = rng.choice([None, None, 0, 128])
    check(monkeypatch, case, tile, rng.choice([1, 2, 5, 13, 30]), split=split, **options)
