"""Measured numbers of pages: each is made from a file of `bench/results/`, or stands in one that its page links to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tilewise.errors import AttentionError
from tilewise_lab.bench import kept_rows

ROOT = Path(__file__).parents[3]
MADE = re.compile(r"<!-- (rows:|bench:|number:)([\w-]+) -->.*?<!-- /(?:\1\2|number) -->", re.S)
FENCED = re.compile(r"^(```+).*?^\1$", re.M | re.S)
UNITS = (
    r"(?:times (?:as|the|its|that|our|bfloat16)|times faster|× |us|µs|ms|s|seconds|minutes|TFLOP/s|[GT]B/s|%|tokens/s"
    r"|of (?:FA\d|SDPA|FlashAttention)|倍|微秒|毫秒|秒)"
)
MEASURED = re.compile(
    rf"(?<![\w.^-])(\d+(?:\.\d+)?)(?:(?: to | and |到| 到 |、|; |, )(\d+(?:\.\d+)?))? ?{UNITS}(?![\w(])"
)
DECIMAL = re.compile(r"(?<![\w.=:(^-])([01]\.\d\d+)(?![\w.]| ·)")
LINK = re.compile(r"\]\(([^)#\s]*bench/results/[^)#\s]+)")
NO_MEASUREMENTS = {"gotchas.md", "upstream.md", "wrong-results.md"}  # reports of faults, not on the site
SHOWN = [
    path for path in kept_rows.documents(ROOT) if path.name not in NO_MEASUREMENTS and path.parent.name != "results"
]
VERSIONS = re.compile(r"\b0\.(?:23|32|42)\b")  # of vLLM and diffusers
REPORTS = re.compile(r"^## Reports of `tilewise selftest`\n.*?(?=^## )", re.M | re.S)  # pasted by their users
RULES = re.compile(r"(?:more than|at least|within|超过|超过全部键的) (?:3|5|15) %")  # a plan chooses by them
# The kernels' own pages explain with numbers of many places: a link of the page is enough there.
KERNELS = ("hopper-backward.md", "hopper-backward-wide.md", "hopper-forward.md", "portable-kernels.md")


def numbers(text: str) -> list[str]:
    """
    >>> numbers("1.28 times as fast, 3 to 4 us, 0.92 of it; 2 times, 20 keys, D 0.5, version 0.23.1")
    ['1.28', '3', '4', '0.92']
    """
    found = [number for match in MEASURED.finditer(text) for number in match.groups() if number]
    return found + [number for number in DECIMAL.findall(text) if number not in found]


def unsourced(path: Path) -> list[str]:
    """The measured numbers of a page that stand in no results file to which their paragraph links (on a kernel's page:
    to which the page links)."""
    text = path.read_text(encoding="utf-8")
    for left_out in (MADE, FENCED, VERSIONS, RULES, REPORTS):
        text = left_out.sub("", text)
    whole = path.name in KERNELS
    found = []
    last = ""
    for paragraph in text.split("\n\n"):
        near = text if whole else f"{last}\n{paragraph}" if paragraph.startswith("|") else paragraph
        sources = "".join((path.parent / link).read_text(encoding="utf-8") for link in set(LINK.findall(near)))
        found += [
            number for number in numbers(paragraph) if not re.search(rf"(?<![\d.]){re.escape(number)}0*(?!\d)", sources)
        ]
        last = paragraph
    return found


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_measured_number_of_a_page_is_in_a_results_file(path):
    assert unsourced(path) == []


def test_a_number_without_a_source_is_found(tmp_path):
    """Numbers in a sentence, in a table and in Chinese are found; a number that the linked file lacks is a fault."""
    note = tmp_path / "bench" / "results" / "2026-01-01-note.md"
    note.parent.mkdir(parents=True)
    note.write_text("| a | 1.28 |\n", encoding="utf-8")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    link = "[rows](../bench/results/2026-01-01-note.md)"
    for text, found in {
        "It is 1.28 times as fast.": ["1.28"],
        f"It is 1.28 times as fast ({link}).": [],
        f"It is 1.29 times as fast ({link}).": ["1.29"],
        f"Rows ({link}):\n\n| a | 1.28 |\n|---|---|\n| b | 0.95 |": ["0.95"],
        "快 1.28 倍，用 3 微秒。": ["1.28", "3"],
        "<!-- number:x -->1.28<!-- /number --> times": [],
        "```\n1.28 times as fast\n```": [],
        "vLLM 0.23, and 2 heads of 64": [],
    }.items():
        page.write_text(text, encoding="utf-8")
        assert unsourced(page) == found, text


def rows(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "bench/results").mkdir(parents=True, exist_ok=True)
    (tmp_path / "bench/results/2026-01-02-note.md").write_text(
        "# Note\n\nCommit abc.\n\n| a | 1.284 |\n", encoding="utf-8"
    )
    row = {"key": "a", "tables": ["speed"], "case": "A", "zh": "甲", "peer": "SDPA", "source": "2026-01-02-note.md"}
    row |= {"find": r"^\| a \| ([\d.]+)", "commit": "abc"} | changes
    (tmp_path / kept_rows.FILE).write_text(json.dumps([row]), encoding="utf-8")
    return tmp_path


PAGE = "x <!-- number:a -->9<!-- /number -->\n\n<!-- rows:speed -->\n<!-- /rows:speed -->\n"


@pytest.mark.parametrize(("document", "case"), [("docs/x.md", "A"), ("docs/zh/x.md", "甲")])
def test_a_number_is_read_from_its_file(tmp_path, document, case):
    root = rows(tmp_path)
    text = kept_rows.fill(PAGE, document, root, kept_rows.load(root))
    up = "../" * document.count("/")
    assert text.startswith("x <!-- number:a -->1.28<!-- /number -->")
    assert f"| {case} | SDPA | 1.28 | [2026-01-02, abc]({up}bench/results/2026-01-02-note.md) |" in text
    assert kept_rows.fill(text, document, root, kept_rows.load(root)) == text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"find": r"^\| b \| ([\d.]+)"}, "found 0 matches"),
        ({"find": r"(\d)"}, "expected one"),
        ({"commit": "def"}, "commit def"),
        ({"key": "b"}, "number:a"),
        ({"tables": ["other"]}, "rows:speed"),
    ],
)
def test_a_row_that_its_file_does_not_have_raises(tmp_path, changes, reason):
    root = rows(tmp_path, **changes)
    with pytest.raises(AttentionError, match=re.escape(reason)):
        kept_rows.fill(PAGE, "docs/x.md", root, kept_rows.load(root))


def test_a_table_waits_for_its_measurement(tmp_path):
    """As the rows of the CPU do: a pattern stands for the newest file, and is no row while there is none."""
    root = rows(tmp_path, source="*-cpu.json", find='"mean": ([\\d.]+)', commit="")
    empty = "<!-- rows:speed -->\n<!-- /rows:speed -->\n"
    assert kept_rows.fill(empty, "README.md", root, kept_rows.load(root)) == empty
    for day, mean in (("03", "1.1"), ("04", "1.2")):
        (root / f"bench/results/2026-01-{day}-cpu.json").write_text(f'{{"mean": {mean}}}', encoding="utf-8")
    assert "| 1.20 | [2026-01-04]" in kept_rows.fill(empty, "README.md", root, kept_rows.load(root))


def test_every_row_of_the_repository_is_found_and_shown():
    found = {row.key: row.number(ROOT) for row in kept_rows.load(ROOT) if "*" not in row.source}
    assert len(found) == len({row.key for row in kept_rows.load(ROOT) if "*" not in row.source}) > 50
    pages = "".join(path.read_text(encoding="utf-8") for path in kept_rows.documents(ROOT))
    shown = set(re.findall(r"<!-- (?:rows|number):([\w-]+) -->", pages))
    assert [row.key for row in kept_rows.load(ROOT) if not shown & {row.key, *row.tables}] == []


def test_the_index_lists_every_note():
    listed = set(re.findall(r"\]\(([^)]*)\)", kept_rows.notes(ROOT)))
    files = {path.name for path in (ROOT / kept_rows.RESULTS).iterdir()}
    assert files - listed == {"README.md", "rows.json"}
