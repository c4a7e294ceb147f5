"""What a reader must find in the README, and how long it may be."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, its head and rule left out."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", text, re.M)][2:]


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 110
    assert len(TEXT.split()) <= 900


def test_the_first_screen_says_where_it_has_run():
    first = TEXT.partition("\n## ")[0]
    assert re.search(r"\*\*run on\*\* the NVIDIA H200", first)
    assert "**only compiled**" in first


def test_ten_measured_rows_have_their_sources():
    found = rows(section("How fast it is").partition("<!-- rows:readme-cpu -->")[0])
    assert len(found) == 10
    for *_, number, source in found:
        assert re.fullmatch(r"\d\.\d\d", number)
        path = re.fullmatch(r"\[[^]]+\]\((bench/results/[^)#]+)\)", source)[1]
        assert (ROOT / path).is_file()


def test_the_comparison_has_a_cell_for_everyone():
    """On the page of the benchmark."""
    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    found = rows(text.partition("## Compared with other libraries")[2])
    assert len(found) == 5
    assert all(len(row) == 6 and all(row) for row in found)


def test_installing_from_pypi_is_not_promised_before_a_release():
    released = re.search(r"^## \[\d+\.\d+\.\d+\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert ("not on PyPI yet" in TEXT) is (released is None)
