from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tilewise_lab.bench.made_up import cell, grid, results
from tilewise.errors import AttentionError
from tilewise_lab.bench import readme

ROOT = Path(__file__).parents[3]
DOCUMENT = "before\n<!-- bench:{0} -->\nof yesterday\n<!-- /bench:{0} -->\nafter\n"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / readme.RESULTS
    folder.mkdir(parents=True)
    results(*grid(), cell("gqa forward")).save(folder / "2026-11-15-nvidia-h200.json")
    apart = [replace(cell(group), ours="tilewise") for group in ("gpt eager", "overhead", "cold")]
    for one in apart:
        one.entries = {"tilewise": one.entries["tilewise-triton"], "sdpa": one.entries["fa2"]}
    results(*apart).save(folder / "2026-11-15-nvidia-h200-gpt-overhead-cold.json")
    return tmp_path


def test_the_documents_agree_with_the_kept_results():
    """Run `tilewise bench --readme` where this fails."""
    for path, text in readme.expected(ROOT).items():
        assert path.exists(), path
        assert path.read_text(encoding="utf-8") == text, path


def test_kept_results_are_named_after_their_date_and_device():
    for path in readme.kept(ROOT):
        assert path.name == readme.kept_name(readme.load(path))


@pytest.mark.parametrize("name", readme.PARTS)
def test_every_part_fills_its_marker(root, name):
    (root / "README.md").write_text(DOCUMENT.format(name))
    assert root / "README.md" in readme.write(root)
    text = (root / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "of yesterday" not in text
    assert len(text) > len(DOCUMENT)
    assert readme.write(root) == []


def test_numbers_come_from_the_results(root):
    (root / "README.md").write_text(DOCUMENT.format("speed"))
    readme.write(root)
    text = (root / "README.md").read_text()
    assert "| forward | 1k | 2k | 4k |" in text
    assert f"| D 64, full | {cell().flops / 1e12:.3g} (1.50×) |" in text


def test_a_changed_number_is_noticed(root):
    document = root / "README.md"
    document.write_text(DOCUMENT.format("speed"))
    readme.write(root)
    document.write_text(document.read_text().replace("1.50×", "1.60×", 1))
    assert readme.expected(root)[document] != document.read_text()


def test_a_newer_result_replaces_the_older(root):
    results(*grid(triton=[0.5] * 3)).save(root / readme.RESULTS / "2026-12-01-nvidia-h200.json")
    results(*grid(triton=[9.0] * 3), device="Some CPU", kind="cpu").save(
        root / readme.RESULTS / "2026-12-09-some-cpu.json"
    )
    (root / "README.md").write_text(DOCUMENT.format("speed"))
    readme.write(root)
    assert "(3.00×)" in (root / "README.md").read_text()


def test_other_measurements_may_lie_beside_them(root):
    (root / readme.RESULTS / "2026-12-31-sweep.json").write_text('{"tiles": []}')
    names = ["2026-11-15-nvidia-h200-gpt-overhead-cold.json", "2026-11-15-nvidia-h200.json"]
    assert [path.name for path in readme.kept(root)] == names


@pytest.mark.parametrize(("part", "name"), [("plot", "forward"), ("plot", "backward"), ("overview", "overview")])
def test_plots_are_written_and_shown(root, part, name):
    (root / "bench/README.md").write_text(DOCUMENT.format(part))
    changed = readme.write(root)
    text = (root / "bench/README.md").read_text()
    for theme in ("light", "dark"):
        assert root / f"bench/plots/{name}-{theme}.svg" in changed
        assert f'="../bench/plots/{name}-{theme}.svg"' in text


def test_alternative_texts_say_what_is_shown(root):
    (root / "README.md").write_text(DOCUMENT.format("overview") + DOCUMENT.format("plot"))
    readme.write(root)
    overview, forward, _ = re.findall(r'alt="(.*?)"', (root / "README.md").read_text())
    rate = f"{cell(seq=4096, dim=128, causal=True).flops / 1e12:.3g}"
    assert f"Forward at 4k tokens: tilewise (Triton) {rate}, FA2" in overview
    assert "head dims 64, 128, full and causal" in forward
    assert "1.50 to 1.50 times the fastest peer" in forward


def test_unknown_markers_are_an_error(root):
    (root / "README.md").write_text(DOCUMENT.format("speeed"))
    with pytest.raises(AttentionError, match="speeed"):
        readme.write(root)


def test_without_results_the_document_says_so(tmp_path):
    (tmp_path / "README.md").write_text(DOCUMENT.format("speed"))
    readme.write(tmp_path)
    assert "Nothing has been measured yet." in (tmp_path / "README.md").read_text()
