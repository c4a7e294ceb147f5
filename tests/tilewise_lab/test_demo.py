from __future__ import annotations

import math
import re
from argparse import ArgumentParser
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

import tilewise
from tilewise_lab import cli
from tilewise_lab.demo import measure
from tilewise_lab.demo.measure import CONTENDERS, TENSORS, Error, Results, Run, Setting

pytest.importorskip("rich", reason="the demo's tables need the cli extra")
from tilewise_lab.demo import charts, page, report

CPU = Setting.choose(torch.device("cpu"), quick=True)


def made_up(peaks: dict[str, list[int | None]]) -> Results:
    results = Results(CPU, [Error(dtype, name, 1e-3, 2e-3) for dtype in ("float32", "float16") for name in TENSORS])
    for name, column in peaks.items():
        for length, peak in zip(CPU.lengths, column, strict=True):
            results.runs.append(Run(name, length, peak, None if peak is None else peak / 1e9))
    return results


def test_demo_end_to_end(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["demo", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "15 of 15 errors are at most 2x that of torch's own attention" in said
    text = out.read_text()
    assert "15 of 15" in text
    assert "$" not in text
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    assert sum(len(drawing.findall(".//circle")) for drawing in drawings) == 2 * 3 * len(CPU.lengths) + 15


def test_demo_fails_on_wrong_results(tmp_path, monkeypatch, capsys):
    right = tilewise.attention

    def wrong(q, k, v, *, causal, return_lse=False):
        out, lse = right(q, k, v, causal=causal, return_lse=True)
        return (out, lse + 0.1 * lse.detach()) if return_lse else out

    monkeypatch.setattr(tilewise, "attention", wrong)
    assert cli.main(["demo", "--quick", "--device", "cpu", "--out", str(tmp_path / "page.html")]) == 1
    assert "12 of 15" in capsys.readouterr().out


def test_page_leads_to_documentation_course_and_explorer(tmp_path):
    """By commands; by links too where the documentation was built beside the page."""
    results = made_up({name: [2**20, 2**21, 2**22] for name in CONTENDERS})
    commands = ["tilewise docs --open", "tilewise learn", "tilewise explore"]
    text = page.render(results, tmp_path)
    assert [re.sub("<.*?>", "", one) for one in re.findall("<li>.*?: .*?<code>(.*?)</code>", text)] == commands
    assert "<a href" not in text
    for _, file, *_ in page.NEXT:
        (tmp_path / page.SITE / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page.SITE / file).touch()
    linked = re.findall('<a href="(.*?)">', page.render(results, tmp_path))
    assert len(linked) == 3
    assert all((tmp_path / one).exists() for one in linked)
    assert "at most twice the error of torch's own attention in the same dtype" in text  # as in the README


def test_page_needs_nothing_else():
    text = page.render(made_up({name: [2**20, 2**21, 2**22] for name in CONTENDERS}))
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_out_of_memory_is_said():
    results = made_up({"tilewise": [2**20, 2**21, 2**22], "SDPA": [2**20, 2**21, 2**22], "naive": [2**22, 2**24, None]})
    text = page.render(results)
    assert "✕" in text
    assert "naive, 256 tokens: out of memory" in text
    assert "8× less" in re.sub(r"</?\w+>", " ", text).replace("  ", " ")
    assert report.runs_table(results).row_count == len(CPU.lengths)


@pytest.mark.parametrize(("load", "said"), [(100.0, True), (0.1, False)])
def test_a_busy_machine_is_said(load, said, capsys, tmp_path):
    results = replace(made_up({name: [2**20, 2**21, 2**22] for name in CONTENDERS}), load=load)
    report.show(results, tmp_path / "page.html")
    assert ("of a busy machine" in capsys.readouterr().out) is said
    assert ("of a busy machine" in page.render(results)) is said


def test_it_ends_with_commands_to_try_next(capsys, tmp_path):
    results = made_up({name: [2**20, 2**21, 2**22] for name in CONTENDERS})
    report.show(results, tmp_path / "page.html")
    *_, last = capsys.readouterr().out.partition("What to try next:\n")
    assert [" ".join(line.split("  ")[1].split()[1:]) for line in last.splitlines()] == [*report.NEXT]
    for name, *arguments in map(str.split, report.NEXT):
        if name != "--help":
            parser = ArgumentParser(exit_on_error=False)
            import_module(cli.COMMANDS[name].module).configure(parser)
            parser.parse_args(arguments)


def test_contenders_agree():
    q, k, v = (torch.randn(2, 33, 4, 16, dtype=torch.float64) for _ in range(3))
    ours, sdpa, naive = (attention(q, k, v) for attention in CONTENDERS.values())
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(sdpa, naive)


def test_scores_are_causal_from_the_bottom_right():
    s = measure.scores(torch.randn(1, 2, 4, 8), torch.randn(1, 5, 2, 8))
    assert s.shape == (1, 4, 2, 5)
    assert (s == -math.inf)[0, 0].tolist() == [[False] * 4 + [True], [False] * 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_errors_are_those_of_the_dtype(dtype):
    setting = replace(CPU, check=(1, 40, 50, 4, 2))
    found = measure.errors(setting, dtype)
    assert [error.tensor for error in found] == list(TENSORS)
    for error in found:
        for found_by in (error.naive, error.sdpa):
            if found_by is not None:
                assert 0.01 * torch.finfo(dtype).eps < found_by < 100 * torch.finfo(dtype).eps
    assert [error.tensor for error in found if error.sdpa is None] == ["lse"]


@pytest.mark.parametrize(
    ("ours", "usual", "ok", "ratio"), [(2, 1, True, 2), (2.1, 1, False, 2.1), (0, 0, True, 0), (1, 0, False, math.inf)]
)
def test_budget(ours, usual, ok, ratio):
    error = Error("float32", "out", ours, usual)
    assert error.ok is ok
    assert error.ratio == ratio


def test_peak_counts_what_is_alive_at_once():
    mib = 2**18  # float32s
    cpu = torch.device("cpu")

    def one_after_the_other():
        for _ in range(3):
            torch.empty(mib)

    def together():
        kept = [torch.empty(mib) for _ in range(3)]
        del kept

    assert measure.peak(one_after_the_other, cpu) == 2**20
    assert measure.peak(together, cpu) == 3 * 2**20


def test_memory_of_the_textbook_is_quadratic_and_ours_is_not():
    runs = {(r.contender, r.length): r.peak for length in (512, 2048) for r in measure.runs(CPU, length)}
    scores = CPU.heads * 2048**2 * 4
    assert runs["naive", 2048] > 2 * scores
    assert runs["naive", 2048] > 12 * runs["naive", 512]
    assert runs["tilewise", 2048] < scores / 2


def test_labels_do_not_overlap():
    placed = charts.apart({0: 50.0, 1: 50.0, 2: 51.0}, gap=15)
    ordered = sorted(placed.values())
    assert all(b - a > 14 for a, b in pairwise(ordered))


@pytest.mark.parametrize(("low", "high", "base"), [(1, 1, 2), (3, 5, 10), (1e-5, 90, 10), (2**20, 2**37, 2)])
def test_ticks_enclose_and_stay_few(low, high, base):
    marks = charts.ticks(low, high, base)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 8
