from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.tilewise_lab.bench.made_up import OURS, cell, grid, results
from tilewise_lab.bench import charts, report
from tilewise_lab.bench.providers import roster
from tilewise_lab.bench.results import Entry, Peak, load

KEPT = Path(__file__).parents[3] / "bench/results/2026-11-15-nvidia-h200.json"
SVG = "{http://www.w3.org/2000/svg}"


def by_name(found):
    return {table.name: table for table in report.tables(found)}


def test_the_page_needs_nothing_else():
    text = report.render(results(*grid()))
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "$" not in text
    assert "it is not installed" in text
    drawn = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg viewBox.*?</svg>", text, re.S)]
    assert len(drawn) == 8
    assert all(len(d.findall(".//circle")) == 3 * 3 for d in drawn)


def test_the_same_tables_are_text_html_and_markdown():
    found = load(KEPT)
    shown, page = "\n".join(report.show(found)), report.render(found)
    for table in report.tables(found):
        assert all(len(row) == len(table.head) for row in table.rows), table.name
        assert report.html(table) in page
        assert table.name == "all" or report.text(table) in shown
        assert report.markdown(table).count("\n") == len(table.rows) + 2
    assert {"speed", "peers", "cases", "lowest", "memory", "absent", "all"} == set(by_name(found))
    assert len(by_name(found)["lowest"].rows) == report.LOWEST
    ratios = [float(row[2]) for row in by_name(found)["lowest"].rows]
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(min(x.ratio_to_best().median for x in found.cells if x.ratio_to_best()), abs=1e-3)


def test_a_wrong_answer_shows():
    bad = cell()
    bad.entries[OURS] = Entry("wrong", "out <is> off", errors={"out": [0.5, 0.1]})
    found = results(bad, *grid()[1:])
    text = report.render(found)
    assert "out &lt;is&gt; off" in text
    assert report.verdict(found) == "71 of 72 answers right"
    assert by_name(found)["all"].rows[0][2] == "wrong"
    assert "500%" in by_name(found)["all"].rows[0]


def test_nothing_and_out_of_memory_are_said():
    assert report.verdict(results()) == "0 of 0 answers right"
    found = results(cell())
    found.memory.append(Peak("naive", 4096, None))
    assert by_name(found)["memory"].rows[-1][-1] == "out of memory"


def test_a_line_names_everybody_who_is_here():
    other = cell("gqa forward")
    other.entries["flex"] = Entry("refused", "no")
    assert report.line(other, results(other).unit()).startswith("gqa forward: b16 s1024 h32 d64 full bfloat16  triton ")
    assert report.line(other, results(other).unit()).endswith("flex refused  1.50x")


@pytest.mark.parametrize("theme", charts.THEMES)
def test_the_figure_stands_alone(theme):
    text = charts.figure(results(*grid()), "forward", theme)
    drawn = ElementTree.fromstring(text)
    assert len(drawn.findall(f"{SVG}svg")) == 4
    assert "@media" not in text  # GitHub's theme is not the system's
    assert ("--card: #1b1e24" in text) is (theme == "dark")


def labels(panel):
    """Texts of a panel with their left and right ends, as wide as bold letters are at most."""
    for element in panel.iter():
        if element.tag.endswith("text"):
            x, wide, kind = float(element.get("x")), 7.2 * len(element.text), element.get("class")
            start = x - wide if "end" in kind else x - wide / 2 if "middle" in kind else x
            yield element.text, start, start + wide


@pytest.mark.parametrize("which", ["forward", "overview"])
def test_no_label_is_clipped(which):
    """1000 was written as 1e+03, beyond the left edge; long names ended beyond the right one."""
    found = results(*grid(triton=[0.0003] * 3))
    text = charts.overview(found, "light") if which == "overview" else charts.figure(found, which, "light")
    panels = ElementTree.fromstring(text).findall(f"{SVG}svg")
    assert panels
    for panel in panels:
        said = list(labels(panel))
        assert "1000" in [words for words, *_ in said]
        assert "tilewise (Triton)" in [words for words, *_ in said]
        assert all(start >= 0 and end <= charts.WIDTH for _, start, end in said), said


def test_the_thick_line_is_what_tilewise_chooses():
    cells = grid()
    for one in cells:
        one.entries["tilewise-reference"] = Entry("ok", times=[5.0] * 3)
    drawn = ElementTree.fromstring(charts.figure(results(*cells), "forward", "light"))
    for panel in drawn.findall(f"{SVG}svg"):
        thick = [
            group.get("style") for group in panel.iter(f"{SVG}g") for p in group if p.get("class") == "series ours"
        ]
        assert thick == [f"--c:var(--{OURS})"]


@pytest.mark.parametrize("peak", [0.003, 0.97, 1.0, 6.1, 99.0, 812.0])
def test_scales_hold_the_peak_in_a_few_steps(peak):
    limit, step = charts.scale(peak)
    assert peak <= limit < peak + step
    assert 3 <= round(limit / step) <= 7


def test_every_known_provider_has_a_colour():
    for name in roster(torch.device("cpu")).known:
        assert charts.style().count(f"--{name}:") == 2, name
