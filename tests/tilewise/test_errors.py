"""Wrong calls raise AttentionError with the message in tests/tables/errors, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tilewise
from tests import errors
from tests.forks import python


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # a row has one
@pytest.mark.parametrize("path", sorted(errors.FOLDER.iterdir()), ids=lambda path: path.stem)
def test_messages(path: Path, request: pytest.FixtureRequest) -> None:
    """Each says in one line what is wrong, what was found and what is accepted."""
    if path.stem == errors.INTERPRETED:
        request.getfixturevalue("triton_runs")
    rows = errors.table(path)
    wrong = [
        f"{call}\n    {found}\n  not\n    {wanted}"
        for call, wanted in rows
        if (found := errors.message(call)) != wanted
    ]
    assert not wrong, "\n".join([*wrong, "run: python -m tests.errors"])
    assert len(rows) <= 60
    assert len({call for call, _ in rows}) == len(rows)
    unclear = [text for _, text in rows if not re.fullmatch(r"[^\n]+: found [^\n]*; expected [^\n]+", text)]
    assert not unclear
    assert not [text for _, text in rows if len(text) > 350]


@pytest.mark.parametrize("name", [name for name in errors.RIGHT if name != "merge"])
def test_the_unchanged_calls_run(name: str) -> None:
    errors.evaluated(f"{name}()")


def test_the_message_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from tests.errors import message; print(message(sys.argv[1]))"
    found = python("-c", code, 'attention(backend="triton")').stdout
    assert re.match(r"backend='triton': found no triton installed.*; expected .*'reference'", found), found


def test_auto_does_not_choose_the_interpreter(triton_runs: None) -> None:
    q = errors.x(1, 2, 1, 8)
    assert tilewise.explain(q, q, q, show=False).backend == "torch"
    assert tilewise.plan_kv(**errors.paged()).backend == "reference"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ["attention", "attention_options", "attention_varlen"])
def test_check_says_the_same(name: str) -> None:
    rows = errors.table(errors.FOLDER / f"{name}.txt")
    for call, wanted in rows:
        checked = call.replace("attention_varlen(", "check_varlen(").replace("attention(", "check(")
        assert errors.message(checked) == wanted
