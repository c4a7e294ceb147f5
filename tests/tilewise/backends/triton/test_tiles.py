"""The tables of tiles: every GPU, pass and head dim has a row, of sizes that the kernels can take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise import AttentionError, settings
from tilewise.backends.common import tiles
from tilewise.backends.common.tiles import CHIPS, Tile, chip, parts_of_keys, tile
from tilewise.request import MAX_HEAD_DIM

PASSES = ("forward", "query", "key", "sums", "jvp", "hvp query", "hvp key")


@pytest.mark.parametrize("arch", [*CHIPS, 75, 200, "gfx1100"])
def test_every_call_has_a_row(arch: int | str) -> None:
    for which in PASSES:
        for itemsize in (2, 4):
            rows = [tile(which, arch, itemsize, d) for d in (16, 32, 64, 128, 256, MAX_HEAD_DIM)]
            areas = [row.block_m * row.block_n for row in rows]
            assert areas[0] >= areas[-1]
            for row in rows:
                assert all(n >= 16 and n & (n - 1) == 0 for n in (row.block_m, row.block_n, row.chunk))
                assert (row.warps in (4, 8), row.stages in (1, 2, 3)) == (True, True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file that TILEWISE_TILES names."""
    monkeypatch.setenv(settings.TILES, str(tmp_path / "tiles.json"))
    tiles.measured_tiles.cache_clear()
    yield tmp_path / "tiles.json"
    tiles.measured_tiles.cache_clear()


def test_measured_tiles_replace_those_of_the_table(measured: Path) -> None:
    fields = {"block_m": 128, "block_n": 32, "warps": 4, "stages": 3}
    row = {"arch": 80, "pass": "forward", "bytes": 2, "head_dim": 128, "tile": fields}
    measured.write_text(json.dumps([row, row | {"pass": "forward bias", "head_dim": 64}]))
    assert tile("forward", 80, 2, 128) == tile("forward", 80, 2, 128, "alibi") == Tile(128, 32, 4, 3)
    assert tile("forward", 80, 2, 64, "bias") == Tile(128, 32, 4, 3) != tile("forward", 80, 2, 64)
    assert tile("forward", 89, 2, 128) == tiles.ADA["forward", 2][128]


@pytest.mark.parametrize(
    "text", ["[", '[{"arch": 80}]', '[{"arch": 80, "pass": "key", "bytes": 2, "head_dim": 64, "tile": {}}]']
)
def test_a_file_of_tiles_that_cannot_be_read(text: str, measured: Path) -> None:
    measured.write_text(text)
    with pytest.raises(AttentionError, match="tilewise tune"):
        tile("forward", 80, 2, 128)


def test_a_gpu_that_is_not_in_the_table_gets_the_least_of_its_kind() -> None:
    assert chip(130).shared == min(x.shared for arch, x in CHIPS.items() if isinstance(arch, int))
    assert chip("gfx999").shared == min(x.shared for arch, x in CHIPS.items() if isinstance(arch, str))


def test_options_are_what_a_launch_takes() -> None:
    options = Tile(64, 32, 4, 2, chunk=16).options()
    assert options == {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2, "CHUNK": 16} | {
        "PIECE": 512,
        "BRANCH": True,
    }


@pytest.mark.parametrize("programs", [0, 1, 7, 131, 132, 5000])
@pytest.mark.parametrize("keys", [1, 1024, 5001, 1 << 20])
def test_parts_fill_the_processors_and_no_more(programs: int, keys: int) -> None:
    parts = parts_of_keys(programs, keys, 64, 132)
    assert 1 <= parts <= 64
    assert parts == 1 or (parts * max(programs, 1) <= 132 and keys // parts >= 4 * 64)


def test_terms_with_rows_of_their_own() -> None:
    assert tile("forward", 89, 2, 128, "blocks") != tile("forward", 89, 2, 128) == tile("forward", 89, 2, 128, "alibi")
    assert tile("forward", 89, 2, 64, "blocks") == Tile(64, 64, 4, 2) != tile("forward", 89, 2, 64)
    assert tile("forward", 89, 2, 64, "alibi") == tile("forward", 89, 2, 64)
    assert tile("forward", "gfx942", 2, 128, "bias") == tile("forward", "gfx942", 2, 128)


def test_block_masks_fit_every_tile() -> None:
    """The smallest tile of a block mask is 128 by 128; see `tilewise.block_mask`."""
    for arch in CHIPS:
        for (which, _), rows in chip(arch).tiles.items():
            if which.split()[0] in ("forward", "query", "key"):
                assert all(128 % row.block_m == 128 % row.block_n == 0 for row in rows.values()), (arch, which)
    assert tiles.INTERPRETER.block_m == tiles.INTERPRETER.block_n == 16


def test_a_table_instead_of_a_search() -> None:
    """The notes' kernel compiles and times 24 configurations for every shape, of which not all fit; ours has one tile
    for a call, which fits, and the same one every time."""

    def shared(row: Tile, d: int) -> int:
        return 2 * (row.block_m * d + row.stages * row.block_n * (d + d))

    tried = [Tile(q, k, warps, stages) for q in (64, 128) for k in (32, 64) for stages in (3, 4, 7) for warps in (2, 4)]
    assert len(tried) == 24
    assert [sum(shared(row, 128) <= chip(arch).shared for row in tried) for arch in (90, 80, 89)] == [20, 20, 8]
    for arch in (arch for arch in CHIPS if isinstance(arch, int)):
        for d in (16, 32, 64, 128, 256, MAX_HEAD_DIM):
            row = tile("forward", arch, 2, d)
            buffers = max(row.stages - 1, 1)  # a stage is the tile that is multiplied: it leaves its buffer first
            assert shared(replace(row, stages=buffers), d) <= chip(arch).shared, (arch, d)
            assert row is tile("forward", arch, 2, d)
    from tilewise.backends.triton.forward import forward_kernel

    assert not hasattr(forward_kernel, "configs")  # as what triton.autotune makes has
