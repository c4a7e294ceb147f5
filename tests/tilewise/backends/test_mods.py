"""The names of generated functions, and the integers in them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import tilewise
from tests.forks import environment
from tests.tilewise.mods.test_functions import COMPOSED, by_head, far, over_zero
from tests.tilewise.mods.test_functions import made as body_of
from tests.tilewise.mods.test_integers import bits, in_order, product, shifted_out
from tests.tilewise.mods.test_rows import chosen_tiles, relative
from tests.tilewise.mods.test_rows import product as product_of_rows
from tilewise import mods

generated = pytest.importorskip("tilewise.backends.common.mod_source")


@tilewise.mask_mod
def near(b, h, q_idx, kv_idx, reach):
    return q_idx - kv_idx < reach


def test_names_are_short_and_those_of_every_process() -> None:
    key = mods.softcap(2.0).key
    assert generated.short(key) == "0fa89a980e13311bbc93ac248ce80d83"
    assert generated.value(key, False).__name__ == f"value_{generated.short(key)}"


def test_programs_that_differ_have_names_that_differ() -> None:
    keys = [near(n).key for n in range(200)] + [mods.block_diagonal(n).key for n in range(1, 200)]
    assert len({generated.short(key) for key in keys}) == len(set(keys)) == 399
    assert near(5).key != near(5.0).key
    assert len({generated.value(key, fast).__name__ for key in keys[:3] for fast in (True, False)}) == 6


def test_64_bits_only_where_32_are_not_enough() -> None:
    def source(mod: mods.Mod) -> str:
        return generated.write("f", [mod.program.root], 0, False)

    assert "int64" not in source(near(5))
    assert "int64" in source(near(2**31))
    assert "int64" in source(product())
    assert "int64" not in source(mods.strided_sparse(64))
    assert "int64" not in source(mods.dilated_window(24, 8))


@pytest.mark.slow
def test_every_operation_is_compiled() -> None:
    """For sm_80, sm_90 and gfx942: the interpreter takes what a compiler may not."""
    ids, table = torch.zeros(40, dtype=torch.int64), torch.zeros(5, 40)
    made = [by_head(table), far(table[0]), in_order(), bits(ids), shifted_out(ids.int())]
    made += [over_zero(), *(body_of(x)() for x in COMPOSED[1:7:2])]
    rows = torch.zeros(1, 5, 40, 8)
    made += [product_of_rows(rows, rows, 1.0), relative(rows, rows[0, 0], table[:, 0]), chosen_tiles(rows.int())]
    script = "tests.tilewise.backends.compile_mods"
    done = subprocess.run(
        [sys.executable, "-m", script], input=pickle.dumps(made), env=environment(), capture_output=True, check=False
    )
    assert done.stdout.strip() == b"compiled", done.stderr.decode()[-3000:]
