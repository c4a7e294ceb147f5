"""One set of kernels serves all sizes of a model: what Triton would compile is the same, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forks import python


@pytest.fixture(scope="module")
def found() -> Any:
    """In a process of its own: this one's Triton is the interpreter's."""
    done = python("-m", "tests.tilewise.backends.compile_sizes")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("band", ["causal", "full", "window"])
def test_sizes_ask_for_few_more_kernels(found: Any, band: str, kind: str) -> None:
    """The backward and what follows it: where several programs compute a tile of keys, and where one does. The forward
    has tiles for short calls, two of them with the full mask."""
    counts = found[f"{band} {kind}"]
    assert counts[-1] == counts[0] + 2 + {"causal": 1, "full": 2, "window": 0}[band]


def test_portable_kernels_know_two_kinds_of_length(found: Any) -> None:
    """Those that tiles divide, and the others: of four kernels, the three that visit tiles come twice."""
    counts = found["portable"]
    assert counts[0] < counts[-1] <= counts[0] + 3


def test_short_causal_calls_of_narrow_heads_have_a_tile_of_their_own(found: Any) -> None:
    counts = found["narrow"]
    assert counts[-1] == counts[0] + 2 + 1


def test_warmup_compiles_the_forward_of_every_length(found: Any) -> None:
    assert found["not warmed"] == []


def test_numbers_of_pages_and_new_tokens_ask_for_no_more_kernels(found: Any) -> None:
    assert found["caches"] == [[1] * 20] * 2


def test_parameters_of_compiled_kernels_are_as_the_launcher_expects(found: Any) -> None:
    """Pointers, scalars, and descriptors with their shapes and strides; pointers to scratch memory follow."""
    assert len(found["known"]) == 3
    for name, behind in found["known"].items():
        assert behind in ([], [8], [8, 8]), name
