"""The portable kernels of precision="fp8" spill nothing, and the compiler sees which calls hide keys."""

from __future__ import annotations

import pytest

from tests.compiling import compiler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", [90, 89])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [{}, {"after": 0}, {"before": 100, "after": 0}], ids=str)
def test_no_spills_and_scales_of_rows_where_keys_are_hidden(arch: int, d: int, window: dict[str, int]) -> None:
    """A 1 in a tuple, as a flag, would be None in a function that is called in a branch."""
    pytest.importorskip("triton")
    made = compiler("tests.tilewise.backends.compile_fp8", "").report({"arch": arch, "d": d, **window})
    assert {name: x["spills"] for name, x in made.items()} == dict.fromkeys(made, 0)
    for name in ("fp8 quantise", "forward"):
        assert made[name]["own scales"] == bool(window)
