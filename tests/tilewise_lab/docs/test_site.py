"""The site: Sphinx makes it without a warning, everything is in it in both languages, and no link leads nowhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("furo", reason="no Sphinx: pip install 'tilewise[docs]'")

import tilewise
from tilewise.errors import AttentionError
from tilewise_lab.docs import lessons
from tilewise_lab.docs.build import LANGUAGES, ROOT, build, follow, linked, pages, sphinx, stage
from tilewise_lab.learn.course import lessons as all_lessons


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value and not value.startswith("data:"):
                self.links.append(value)
            if name == "id" and value:
                self.ids.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    assert build(out, explorer=False, outputs=False) > 100
    (out / "explore").mkdir()
    (out / "explore" / "index.html").touch()  # another command's, which is tested there
    return out


@pytest.fixture(scope="module")
def parsed(site) -> dict[Path, Links]:
    return {path.resolve(): Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def broken(parsed: dict[Path, Links]) -> list[str]:
    found = []
    for path, page in parsed.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            ids = parsed[target].ids if target in parsed else []
            if not target.is_file() or (url.fragment and unquote(url.fragment) not in ids and not svg(url.fragment)):
                found.append(f"{path.name}: {link}")
    return found


def svg(fragment: str) -> bool:
    """The theme's own icons."""
    return fragment.startswith("svg-")


@pytest.mark.slow
def test_no_link_is_broken(parsed):
    assert broken(parsed) == []
    (first, *_) = parsed
    assert len(broken({first: Links('<a href="nowhere.html"></a><a href="#nothing"></a>')})) == 2


@pytest.mark.slow
def test_nothing_comes_from_a_network(site, parsed):
    elsewhere = ("//", "http")
    tag = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"([^\"]+)")
    for path in parsed:
        assert not [link for link in tag.findall(path.read_text(encoding="utf-8")) if link.startswith(elsewhere)]
    assert "<math" in (site / "index.html").read_text(encoding="utf-8")  # drawn by the browser itself


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "other"), [("", "zh/"), ("zh/", "../")])
def test_every_page_is_there_in_both_languages_and_leads_to_the_other(site, parsed, folder, other):
    for _, page, _ in pages("en", site):
        path = Path(page).with_suffix(".html")
        found = parsed[(site / folder / path).resolve()]
        assert "../" * page.count("/") + other.removesuffix("../") + ("../" * (other == "../")) + str(path) in [
            link.removeprefix("./") for link in found.links
        ]
        whole = (site / folder / path).read_text(encoding="utf-8")
        is_lesson = re.fullmatch(r"course/\d\d\.md", page) is not None
        translated = not folder or is_lesson or (ROOT / "docs" / "zh" / page).is_file()
        assert ("本页尚无中文译文" in whole) is not translated


@pytest.mark.slow
def test_every_public_name_is_explained_with_its_parameters(site):
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in set(tilewise.__all__) - {"compat", "distributed", "integrations", "mods", "sparse"}:
        assert f'id="tilewise.{name}"' in reference
    page = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    fields = page.partition('id="tilewise.attention"')[2].partition('id="tilewise.attention_varlen"')[0]
    assert re.search(r"<li><p><strong>softcap</strong> \(.*?float.*?\) (–|--) if given, a score", fields)
    assert "dropout_p" in fields.partition("Exact attention")[0]  # the signature shows every option, not the overloads
    assert re.search(r"<li><p><strong>score_mod</strong> \(.*?href=\"mods.html#tilewise.mods.Mod\"", fields)  # linked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "words", "first"),
    [("search.html", "sliding windows", "Sliding windows"), ("zh/search.html", "因果注意力", "因果注意力")],
)
def test_a_search_finds_without_a_network(site, browser, page, words, first):
    context = browser.new_context(viewport={"width": 360, "height": 740})
    tab = context.new_page()
    tab.goto((site / page).as_uri() + "?q=" + words)
    tab.wait_for_selector("#search-results li a", timeout=20_000)
    assert tab.inner_text("#search-results li a") == first
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


@pytest.mark.slow
def test_a_warning_of_either_language_fails_and_is_said(tmp_path):
    for language in LANGUAGES:
        (tmp_path / language).mkdir()
        (tmp_path / language / "index.md").write_text("# Title\n\n[to nowhere](nowhere.md)\n", encoding="utf-8")
        (tmp_path / language / "conf.py").write_text('extensions = ["myst_parser"]\n', encoding="utf-8")
    with (
        pytest.raises(AttentionError, match=r"(?s)the pages.*zh_CN.*nowhere"),
        sphinx(tmp_path, tmp_path / "out") as one,
    ):
        follow(one, lambda text, done=None, total=None: None)


def test_links_of_the_repository_become_links_of_the_site(tmp_path):
    text = "[a](../bench/README.md#why) [b](faq.md) [c](../LICENSE) [d](https://x.y/z.md) ![e](mod-alibi.png)"
    places = {"bench/README.md": "benchmark.md", "docs/faq.md": "faq.md"}
    made = linked(text, "docs/x.md", "how-to/x.md", places, tmp_path)
    assert made.split(" ")[:3] == ["[a](../benchmark.md#why)", "[b](../faq.md)", "[c](../files/LICENSE)"]
    assert made.endswith("[d](https://x.y/z.md) ![e](../mod-alibi.png)")
    assert (tmp_path / "files" / "LICENSE").is_file()


def test_a_lesson_shows_what_it_prints_and_draws(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # which `record` changes
    lessons.record(1, str(tmp_path))
    said = lessons.printed(tmp_path, 1)
    page = lessons.markdown(all_lessons()[0], said)
    assert "````text\n" + next(filter(None, said)).splitlines()[0] in page
    assert "(picture:" not in page
    assert page.count("![what the cell draws](pictures/01_") == "".join(said).count("(picture:")
    assert "<details><summary>A solution</summary>" in page
    assert "<details><summary>一种解法</summary>" in lessons.markdown(all_lessons()[0], said, "zh")


def test_a_translation_has_the_code_of_the_original():
    """Which is run for both; and a change of one that forgets the other is seen."""
    fence = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
    translations = list((ROOT / "docs" / "zh").rglob("*.md"))
    assert {"install.md", "quickstart.md", "faq.md"} <= {path.name for path in translations}
    for path in translations:
        original = ROOT / "docs" / path.relative_to(ROOT / "docs" / "zh")
        ours, theirs = (
            [block for block in fence.findall(file.read_text(encoding="utf-8")) if block[0] != "{toctree}"]
            for file in (path, original)
        )
        assert ours == theirs, path


def test_staging_leaves_nothing_of_the_repository_behind(tmp_path):
    stage(tmp_path / "zh", "zh_CN", tmp_path)
    assert "{root}" not in (tmp_path / "zh" / "course" / "index.md").read_text(encoding="utf-8")
    assert 'href="../../results/report-' in (tmp_path / "zh" / "results" / "index.md").read_text(encoding="utf-8")
    assert set(LANGUAGES) == {"en", "zh_CN"}
