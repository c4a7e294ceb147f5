"""The site: Sphinx makes it without a warning, everything is in it in both languages, and no link leads nowhere.

The tests that build it whole are for .ci/nightly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("furo", reason="no Sphinx: pip install 'tilewise[docs]'")

import tilewise
from tilewise.errors import AttentionError
from tilewise_lab.docs import lessons
from tilewise_lab.docs.build import (
    LANGUAGES,
    ROOT,
    build,
    follow,
    is_english_only,
    linked,
    pages,
    sphinx,
    stage,
)
from tilewise_lab.docs.translations import Translations
from tilewise_lab.learn.course import lessons as all_lessons

# One page of every kind: text, formulas, tables, pictures, signatures, lessons, lists made by Sphinx, both languages.
AXE = """
    index.html quickstart.html mods.html serving.html distributed.html benchmark.html compatibility.html faq.html
    how-to/backends.html how-to/sparse.html reference/attention.html reference/models.html explain.html
    course/01.html course/index.html results/index.html hopper-forward.html search.html
    zh/index.html zh/mods.html zh/reference/kv-cache.html zh/course/03.html
""".split()  # noqa: SIM905
# What users type, and the page that should come first.
GUIDE = r"(?:how-to/.*|from-.*|serving|mods|distributed|install|quickstart|faq|compatibility|settings|explain)"
QUESTIONS = {
    "attention": "reference/attention",
    "causal": "how-to/windows",
    "sliding window": "how-to/windows",
    "padding mask": "how-to/masks",
    "document mask": "how-to/masks|reference/attention",
    "packed sequences": "how-to/masks",
    "varlen": "how-to/masks|reference/attention",
    "score_mod": "mods|how-to/score-functions|reference/attention",
    "bias": "how-to/score-functions",
    "alibi": "how-to/score-functions|reference/attention",
    "softcap": "mods|reference/attention",
    "dropout": "how-to/training|reference/attention",
    "GQA": "how-to/heads",
    "paged": "serving|how-to/decoding",
    "paged kv cache": "serving",
    "decoding": "how-to/decoding",
    "int8 cache": "how-to/quantised-cache",
    "fp8": "how-to/fp8",
    "MLA": "from-flashmla",
    "context parallel": "distributed",
    "ring attention": "distributed|reference/attention",
    "vllm": "how-to/engines",
    "hugging face": "from-hugging-face",
    "flash attention": "from-flash-attn",
    "flex_attention": "from-flexattention|reference/models",
    "torch.compile": "how-to/compile-and-graphs",
    "cuda graph": "how-to/compile-and-graphs",
    "warmup": "how-to/compile-and-graphs|reference/attention",
    "deterministic": "how-to/training",
    "install": "install",
}


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
    assert 90 < build(out, explorer=False, outputs=False) <= 110
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


@pytest.mark.nightly
def test_no_link_is_broken(parsed):
    assert broken(parsed) == []
    (first, *_) = parsed
    assert len(broken({first: Links('<a href="nowhere.html"></a><a href="#nothing"></a>')})) == 2


@pytest.mark.nightly
def test_nothing_comes_from_a_network(site, parsed):
    elsewhere = ("//", "http")
    tag = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"([^\"]+)")
    for path in parsed:
        assert not [link for link in tag.findall(path.read_text(encoding="utf-8")) if link.startswith(elsewhere)]
    assert "<math" in (site / "index.html").read_text(encoding="utf-8")  # drawn by the browser itself


@pytest.mark.nightly
@pytest.mark.parametrize(("folder", "other"), [("", "zh/"), ("zh/", "../")])
def test_every_page_leads_to_its_translation(site, parsed, folder, other):
    for _, page, _ in pages("en", site):
        path = Path(page).with_suffix(".html")
        if is_english_only(page):
            assert not (site / "zh" / path).exists()
            assert not [link for link in parsed[(site / path).resolve()].links if f"zh/{path}" in link]
            continue
        found = parsed[(site / folder / path).resolve()]
        assert "../" * page.count("/") + other.removesuffix("../") + ("../" * (other == "../")) + str(path) in [
            link.removeprefix("./") for link in found.links
        ]


def test_no_page_is_without_a_translation(tmp_path):
    """But the notes for developers and the measurements, which exist in English only; a Chinese page is in Chinese."""
    english, chinese = ({page: text for _, page, text in pages(x, tmp_path)} for x in LANGUAGES)
    assert [page for page in english if page not in chinese and not is_english_only(page)] == []
    assert len(chinese) > 40
    for page, whole in chinese.items():
        own = ROOT / "docs" / "zh" / page
        text = own.read_text(encoding="utf-8") if own.is_file() else whole  # without the tables of the original
        assert re.match(r"(?:---.*?---\n)?# .*\n", text, re.S), page
        assert "尚无中文" not in text
        prose = re.sub(r"^(```+).*?^\1$|`[^`]*`|\]\([^)]*\)|<[^>]*>", "", text, flags=re.M | re.S)
        paragraphs = [x for x in prose.split("\n\n") if not x.startswith(("#", "|", "-", "$", "!", ">", "{"))]
        words = [x for x in paragraphs if len(re.findall(r"\b[a-z]{2,}\b", x)) > 12 and not re.search("[一-鿿]", x)]
        assert words == [], page


@pytest.mark.nightly
def test_every_public_name_is_explained_with_its_parameters(site):
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in set(tilewise.__all__) - {"compat", "distributed", "integrations", "mods", "nn", "sparse"}:
        assert f'id="tilewise.{name}"' in reference
    page = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    fields = page.partition('id="tilewise.attention"')[2].partition('id="tilewise.attention_varlen"')[0]
    assert re.search(r"<li><p><strong>softcap</strong> \(.*?float.*?\) (–|--) if given, a score", fields)
    assert "dropout_p" in fields.partition("Exact attention")[0]  # the signature shows every option, not the overloads
    assert re.search(r"<li><p><strong>score_mod</strong> \(.*?href=\"#tilewise.mods.Mod\"", fields)  # linked


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_a_search_finds_guides_and_the_reference_first(site):
    assert len(QUESTIONS) == 30
    command = ["node", str(Path(__file__).with_name("search.js")), str(site), *QUESTIONS]
    hits = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    missed = {
        asked: hit for (asked, page), hit in zip(QUESTIONS.items(), hits, strict=True) if not re.fullmatch(page, hit)
    }
    assert len(missed) <= 2, missed
    assert [hit for hit in hits if not re.fullmatch(rf"{GUIDE}|reference/.*", hit)] == []


@pytest.mark.nightly
def test_the_menu_is_short_and_leads_everywhere(site):
    """At most 30 entries, before one is unfolded; and every page is in it, or in a part that unfolds."""
    for folder in ("", "zh/"):
        page = (site / folder / "index.html").read_text(encoding="utf-8")
        menu = page.partition('<div class="sidebar-tree">')[2].partition("</div>")[0]
        assert 15 < menu.count('<li class="toctree-l1') <= 30
        linked = set(re.findall(r'href="([^"#]+)', menu))
        written = {path.relative_to(site / folder).as_posix() for path in (site / folder).rglob("*.html")}
        mine = {path for path in written if not path.startswith(("zh/", "explore/", "results/report-"))}
        assert mine - linked == {"index.html", "search.html"}


@pytest.mark.nightly
def test_the_home_page_says_how_to_install(site):
    for page in ("index.html", "zh/index.html"):
        text = (site / page).read_text(encoding="utf-8")
        assert "pip install" in re.sub(r"<[^>]+>", "", text.partition("<article")[2])
        assert 'rel="icon"' in text or 'rel="shortcut icon"' in text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "words", "first"),
    [
        ("search.html", "sliding windows", "Causal attention and sliding windows"),
        ("zh/search.html", "因果注意力", "因果注意力与滑动窗口"),
    ],
)
def test_a_search_finds_without_a_network(site, browser, page, words, first):
    context = browser.new_context(viewport={"width": 360, "height": 740})
    tab = context.new_page()
    tab.goto((site / page).as_uri() + "?q=" + words)
    tab.wait_for_selector("#search-results li a", timeout=20_000)
    assert tab.inner_text("#search-results li a") == first
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


@pytest.mark.nightly
def test_the_index_of_the_search_has_the_words_of_the_field(site):
    """The search looks for a word in the index as it is, in lower case."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    words = ("GQA", "MQA", "rope", "float8", "backend", "varlen", "softcap")
    assert {word.lower() for word in words} <= (index["terms"] | index["titleterms"]).keys()


def some(pages: list[str], one_in: int, request: pytest.FixtureRequest) -> list[str]:
    return pages if request.config.getoption("--all") else pages[::one_in]


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "pages_of"), [("light", AXE), ("dark", AXE[::5])])
def test_axe_finds_nothing_serious_on_any_kind_of_page(site, browser, scheme, pages_of, request):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    serious = {}
    for page in some(pages_of, 6, request):
        tab.goto((site / page).as_uri())
        for one in axe.Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                serious[page, one["id"]] = one["nodes"][0]["html"][:200]
    context.close()
    assert serious == {}


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 360])
def test_no_block_of_code_is_cut_off(site, browser, width, request):
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    for page in some(AXE, 3, request):
        tab.goto((site / page).as_uri())
        blocks = "[...document.querySelectorAll('.highlight pre')]"
        assert tab.evaluate(f"{blocks}.filter((x) => x.scrollWidth > x.clientWidth + 1).length") == 0, page
    context.close()


@pytest.mark.nightly
def test_titles_are_larger_than_headings_and_the_menu_shows_the_page(site, browser):
    context = browser.new_context(viewport={"width": 360, "height": 740})
    tab = context.new_page()
    tab.goto((site / "serving.html").as_uri())
    size = "(name) => parseFloat(getComputedStyle(document.querySelector('article ' + name)).fontSize)"
    assert tab.evaluate(size, "h1") >= tab.evaluate(size, "h2") >= tab.evaluate(size, "p")
    tab.set_viewport_size({"width": 1280, "height": 500})
    tab.goto((site / "benchmark.html").as_uri())  # the last of the menu
    box = "(name) => { const x = document.querySelector(name).getBoundingClientRect(); return [x.top, x.bottom]; }"
    (top, bottom), (first, last) = (
        tab.evaluate(box, ".sidebar-scroll .current-page"),
        tab.evaluate(box, ".sidebar-scroll"),
    )
    assert first <= top < bottom <= last
    context.close()


def texts(site: Path, pattern: str, tag: str) -> list[str]:
    """The text of every such element of the pages, without its tags."""
    found = [x for path in site.glob(pattern) for x in re.findall(tag, path.read_text(encoding="utf-8"), re.S)]
    return [unescape(re.sub(r"<[^>]+>", "", x)) for x in found]


@pytest.mark.nightly
def test_code_and_signatures_of_the_reference_are_narrow(site):
    """Code has at most 80 columns; of a long signature each parameter has a line."""
    lines = [line for x in texts(site, "reference/*.html", r"<pre>(.*?)</pre>") for line in x.splitlines()]
    assert len(lines) > 200
    assert [line for line in lines if len(line) > 80] == []
    signatures = texts(site, "reference/*.html", r'<dt class="sig[^>]*>(.*?)</dt>')
    assert [x for x in signatures if any(len(line) > 110 for line in x.splitlines())] == []


SOURCES = re.compile(r"\b(?:src|tests)/[\w/.-]+")


@pytest.mark.nightly
def test_no_page_names_a_source_file_by_its_path(site):
    """Readers of the site have no clone; pages link to the file, or name the module."""
    pages = [path for path in site.rglob("*.html") if path.parent.name != "results"]
    assert len(pages) > 80
    named = {}
    for path in pages:
        (article,) = re.findall(r"<article.*?</article>", path.read_text(encoding="utf-8"), re.S) or [""]
        found = SOURCES.findall(re.sub(r"<[^>]+>", "", article))
        named |= {path.relative_to(site).as_posix(): found} if found else {}
    assert named == {}


@pytest.mark.nightly
def test_every_page_has_one_title(parsed):
    """A second one is a comment of code whose block was not closed."""
    for path in parsed:
        if "report-" not in path.name and path.parent.name != "explore":
            assert path.read_text(encoding="utf-8").count("<h1") <= 1, path


@pytest.mark.nightly
def test_formulas_have_a_font_with_tables_for_mathematics(site):
    style = (site / "_static" / "site.css").read_text(encoding="utf-8")
    assert 'math { font-family: "tilewise math"' in style
    assert (site / "_static" / "math.woff").read_bytes()[:4] == b"wOFF"


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
    chinese = linked("[g](../explain.md#a) [h](faq.md)", "docs/zh/x.md", "x.md", {}, tmp_path, english="../")
    assert chinese == "[g](../explain.html#a){.external} [h](faq.md)"
    assert (tmp_path / "files" / "LICENSE").is_file()
    note = "bench/results/2026-11-18-mla.md"  # a text file: browsers show it, and the search leaves it out
    assert linked(f"[n](../{note}#a)", "docs/x.md", "x.md", {}, tmp_path) == f"[n](files/{note}.txt)"
    assert (tmp_path / "files" / f"{note}.txt").is_file()


def test_alt_texts_say_what_a_picture_shows():
    """Some words of them; not nothing, and not the name of a file or of a function."""
    found = []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for alt in re.findall(r"!\[([^\]]*)\]\(", text) + re.findall(r'<img[^>]*?alt="([^"]*)"', text):
            words = len(alt.split()) + len(re.findall(r"[\u4e00-\u9fff]", alt)) // 2
            if words < 5 or re.search(r"\.(?:png|svg)\b", alt):
                found.append(f"{path.relative_to(ROOT)}: {alt!r}")
        found += [f"{path.relative_to(ROOT)}: {tag}" for tag in re.findall(r"<img(?![^>]*alt=)[^>]*>", text)]
    assert found == []


def test_a_lesson_shows_what_it_prints_and_draws(tmp_path, monkeypatch):
    for name in ("TRITON_INTERPRET", "TILEWISE_PICTURES"):  # which `record` changes
        monkeypatch.setenv(name, "0")
    lessons.record(1, str(tmp_path))
    said = lessons.printed(tmp_path, 1)
    page = lessons.markdown(all_lessons()[0], said)
    assert "````text\n" + next(filter(None, said)).splitlines()[0] in page
    assert "(picture:" not in page
    assert "![Attainable TFLOP/s over FLOPs per byte on an H200" in page
    assert len(re.findall(r"!\[[^\]]{40,}\]\(pictures/01_", page)) == "".join(said).count("(picture:") > 0
    assert "<details><summary>Solutions</summary>" in page
    folded = re.findall(r"<details><summary>Checks</summary>\n\n````python\n(.*?)````", page, re.S)
    assert "".join(folded).count("assert ") == page.count("assert ")
    chinese = lessons.markdown(all_lessons()[0], lessons.printed(tmp_path, 1, "zh"), "zh")
    assert "<details><summary>解法</summary>" in chinese
    assert "![H200 的 roofline" in chinese


@pytest.mark.nightly
def test_chinese_pages_show_docstrings_in_chinese(site):
    """Every paragraph and parameter: `test_a_docstring_without_a_translation_is_found` says what stops the build."""
    page = (site / "zh" / "reference" / "attention.html").read_text(encoding="utf-8")
    assert "右下对齐" in page
    assert "bottom-right alignment" not in page


def test_a_docstring_without_a_translation_is_found(tmp_path):
    file = tmp_path / "reference.po"
    file.write_text('msgid "Adds \\"a\\"."\nmsgstr "加上 a。"\n\nmsgid "Old."\nmsgstr "旧。"\n', encoding="utf-8")
    translations = Translations(file)
    assert translations.translate("f", 'Adds "a".') == "加上 a。"
    assert translations.translate("f", 'Adds "b".') == 'Adds "b".'
    assert translations.translate("a function that no page shows", "Else.") == "Else."
    missing, unused = translations.faults({"f"})
    assert "\n" not in missing  # the build prints only the lines that have a warning
    assert missing.endswith('msgid "Adds \\"b\\"."')
    assert unused.endswith("delete the entry: Old.")


def test_a_translation_has_the_code_of_the_original():
    """Which is run for both; and a change of one that forgets the other is seen."""
    fence = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
    translations = list((ROOT / "docs" / "zh").rglob("*.md"))
    assert {"install.md", "quickstart.md", "faq.md"} <= {path.name for path in translations}
    for path in translations:
        name = path.relative_to(ROOT / "docs" / "zh").as_posix()
        original = ROOT / "docs" / name
        ours, theirs = (
            [block for block in fence.findall(text) if block[0] != "{toctree}"]
            for text in (path.read_text(encoding="utf-8"), original.read_text(encoding="utf-8"))
        )
        assert ours == theirs, path


def test_staging_leaves_nothing_of_the_repository_behind(tmp_path):
    for folder, language in (("en", "en"), ("zh", "zh_CN")):
        stage(tmp_path / folder, language, tmp_path)
        assert "{root}" not in (tmp_path / folder / "course" / "index.md").read_text(encoding="utf-8")
    assert not (tmp_path / "zh" / "results").exists()
    index = (tmp_path / "en" / "results" / "index.md").read_text(encoding="utf-8")
    assert 'href="../results/report-' in index
    assert "](../files/bench/results/2026-11-18-mla.md.txt)" in index
    assert set(LANGUAGES) == {"en", "zh_CN"}


KERNELS = ("portable-kernels.md", "hopper-forward.md", "hopper-backward.md", "hopper-backward-wide.md")


def words(path: Path) -> int:
    """Of the text, without code and tables that are made."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^(```+).*?^\1$", "", text, flags=re.M | re.S)
    return len(re.sub(r"<!-- rows:([\w-]+) -->.*?<!-- /rows:\1 -->", "", text, flags=re.S).split())


def test_guides_are_short_and_diaries_are_elsewhere():
    guides = [*(ROOT / "docs" / "how-to").glob("*.md"), ROOT / "docs" / "serving.md"]
    assert len(guides) > 12
    assert {path.name: words(path) for path in guides if words(path) > 900 or len(path.read_text().split()) < 250} == {}
    assert {name: words(ROOT / "docs" / name) for name in KERNELS if words(ROOT / "docs" / name) > 2500} == {}
