"""Offsets past 2^31: tensors with few elements, far apart, in memory that is mostly never touched."""

from __future__ import annotations

import mmap
from math import prod

import pytest
import torch
from torch import Tensor

from tests import budget
from tests.cases import Case, make, run
from tests.compiling import reports
from tests.conftest import INTERPRETED

FAR = 2**31 + 24
NORESERVE = 0x4000  # of Linux; mmap has the name from Python 3.13 on
# strides of (batch, token, head, dim), whose largest offset passes 2^31 along one axis, or only along all together
STRIDES = {
    "batch": (FAR, 64, 16, 1),
    "token": (1024, FAR // 16, 16, 1),
    "head": (1024, 16, FAR, 1),
    "dim": (1024, 32, 8, FAR // 7),
    "all": (FAR // 3, FAR // 50, FAR // 3, 1),
}


def spread(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; the gaps are pages of no memory."""
    elements = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    assert elements > 2**31 > prod(x.shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, elements * x.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that is not there; tests/gpu has the real thing")
@pytest.mark.parametrize("axis", STRIDES)
def test_far_apart(axis: str) -> None:
    inputs = make(Case(batch=2, n_q=20, n_k=20, heads=2, kv_heads=2, d=8, dv=8, dtype="float16", after=0), "cpu")
    far = {name: spread(getattr(inputs, name), STRIDES[axis]) for name in ("q", "k", "v", "dout")}
    inputs = inputs._replace(**far)
    budget.check(run(inputs, "triton"), inputs)


def test_compiled_offsets_inside_a_tile_have_64_bits() -> None:
    """A struct in a struct has lost the constant that says so: the interpreter keeps it."""
    (found,) = reports("tests.tilewise.backends.compile_wide", [])
    assert {"decode", "append", "forward", "key", "query"} <= set(found)
    assert not any(found.values()), found
