from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.tilewise_lab.bench.made_up import OURS, cell, grid, results
from tilewise_lab.bench.results import Entry, Peak

pytest.importorskip("rich", reason="the benchmark's tables need the cli extra")
from tilewise_lab.bench import charts, page, plots


def drawings(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg viewBox.*?</svg>", text, re.S)]


def test_the_page_needs_nothing_else():
    text = page.render(results(*grid()))
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "$" not in text


def test_every_timed_provider_is_drawn():
    found = results(*grid())
    speeds = [d for d in drawings(page.render(found)) if d.get("aria-label", "").startswith("D ")]
    assert len(speeds) == 8
    assert all(len(d.findall(".//circle")) == 3 * 3 for d in speeds)


def test_what_is_missing_is_said():
    text = page.render(results(*grid()))
    assert "it is not installed" in text


def test_a_wrong_answer_shows():
    bad = cell()
    bad.entries[OURS] = Entry("wrong", "out <is> off", errors={"out": [0.5, 0.1]})
    text = page.render(results(bad, *grid()[1:]))
    assert 'class="badcell">wrong<' in text
    assert 'class="badcell">500 %<' in text
    assert "out &lt;is&gt; off" in text
    assert 'class="card fail"' in text


def test_who_refuses_a_case_is_named_beside_it():
    other = cell("gqa forward")
    other.entries["flex"] = Entry("refused", "no")
    assert "flex: refused" in page.render(results(other))


def test_ratios_are_coloured_by_their_side():
    up, down = (page.heat_cell(cell(triton=[t] * 3), None, "best") for t in (1.0, 3.0))
    assert 'class="up"' in up
    assert ">1.50<" in up
    assert 'class="down"' in down
    assert ">0.50<" in down


def test_a_page_of_nothing():
    assert "0 of 0" in page.render(results())


def test_out_of_memory_is_drawn():
    found = results(cell())
    found.memory.append(Peak("naive", 4096, None))
    found.memory.append(Peak("tilewise", 4096, 40960))
    assert "naive, 4096 tokens: out of memory" in page.render(found)


SVG = "{http://www.w3.org/2000/svg}"


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
    import torch

    from tilewise_lab.bench.providers import roster

    for name in roster(torch.device("cpu")).known:
        assert charts.style().count(f"--{name}:") == 2, name


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    files = plots.write(results(*grid()), tmp_path)
    assert [path.name for path in files] == [
        "speed-forward.png",
        "speed-backward.png",
        "ratio.png",
        "errors.png",
        "memory.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_without_matplotlib_there_are_no_plots(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert plots.write(results(*grid()), tmp_path) == []
