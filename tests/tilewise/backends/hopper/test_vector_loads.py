"""The loads of the small kernels: rows that begin at multiples of 8 elements are loaded and stored 16 bytes at a time,
and all loads of the preprocess are in flight at once."""

from typing import Any

import pytest
import torch

from tilewise.backends.common.kernel_call import view

from .test_compile import compiled


@pytest.mark.parametrize("d", [72, 80])
def test_small_kernels_of_the_backward(d: int) -> None:
    found: dict[str, Any] = compiled({"d": d}, script="compile_small")
    for widths in found["widths"].values():
        assert "v4.b32" in widths
        assert "b16" not in widths


@pytest.mark.parametrize(("d", "threads"), [(64, 128), (128, 128), (256, 256)])
def test_the_preprocess_loads_all_rows_before_it_stores(d: int, threads: int) -> None:
    found: dict[str, Any] = compiled({"d": d}, script="compile_small")
    assert found["loads"] == 2 * 64 * d * 2 // 16 // threads  # 64 rows of o and do
    assert not found["spills"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        pytest.param((2, 8, 4, 64), None, id="multiples of 16"),
        pytest.param((2, 8, 4, 72), 1, id="multiples of 8"),
        pytest.param((2, 8, 4, 68), None, id="multiples of 4"),
        pytest.param((2, 8, 1, 8), 1, id="one head"),
    ],
)
def test_when_rows_begin_at_multiples_of_8(shape: tuple[int, ...], expected: int | None) -> None:
    assert view(torch.empty(shape)).strides[5] is expected
