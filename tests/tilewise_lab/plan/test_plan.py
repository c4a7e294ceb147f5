"""`tilewise plan`: the comparison, its advice, its picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tilewise_lab.cli import main


def told(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def advice(text: str) -> str:
    return next(line.split()[0] for line in map(str.rstrip, text.splitlines()) if line.endswith("advised"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--seqlen 1M --ranks 256 --causal", "two-level"),
        ("--seqlen 128k --ranks 8 --causal", "ulysses"),
        ("--seqlen 1M --ranks 32 --window 4096 0", "halo"),
        ("--seqlen 1M --ranks 16 --causal --heads 4 --kv-heads 1", "ring"),
    ],
)
def test_what_is_advised(capsys, words, expected):
    assert advice(told(capsys, *words.split())) == expected


def test_more_ranks_than_heads_are_no_advice(capsys):
    assert "256 ranks for 32 heads" in told(capsys, "--seqlen", "1M", "--ranks", "256", "--causal")


def test_pictures_and_numbers(capsys, tmp_path):
    svg, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    told(
        capsys,
        "--seqlen",
        "64k",
        "--ranks",
        "4",
        "--causal",
        "--heads",
        "2",
        "--kv-heads",
        "2",
        "--svg",
        str(svg),
        "--json",
        str(numbers),
    )
    tree = ElementTree.fromstring(svg.read_text())
    assert len(tree.findall("{*}rect")) >= 4 * 2
    found = json.loads(numbers.read_text())
    assert found["advice"] in {x["passes"][0]["strategy"] for x in found["strategies"]}


def test_what_cannot_be_is_said(capsys):
    assert main(["plan", "--machine", "8xH200+fast"]) == 2
    assert "machine" in capsys.readouterr().err


def test_a_slower_strategy_is_advised_with_a_reason(capsys):
    text = told(capsys, *["--seqlen", "1M", "--ranks", "16"])
    assert advice(text) == "ulysses"
    assert "ulysses is advised: 0.2% slower than two-level, holds 4.83 GB, not 5.64" in text
    assert "is advised" not in told(capsys, *["--seqlen", "128k", "--ranks", "8", "--causal"])
    text = told(capsys, *["--seqlen", "1M", "--ranks", "64", "--causal"])  # ring: slower, with the same memory
    assert advice(text) == "two-level"
