"""The documentation: everything is in it, and no link leads nowhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("markdown_it", reason="no markdown-it: pip install 'tilewise[cli]'")

import tilewise
from tilewise_lab.docs import api
from tilewise_lab.docs.build import ROOT, build, documents


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
    build(out, explorer=False, outputs=False)
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
            if not target.is_file() or (url.fragment and url.fragment not in parsed[target].ids):
                found.append(f"{path.name}: {link}")
    return found


def test_no_link_is_broken(parsed):
    assert broken(parsed) == []


def test_a_broken_link_would_be_found(parsed):
    (first, *_) = parsed
    assert broken({first: Links('<a href="nowhere.html"></a><a href="#nothing"></a>')}) != []


def test_nothing_comes_from_a_network(parsed):
    assert not [
        link for page in parsed.values() for link in page.links if "//" in link and link.endswith((".js", ".css"))
    ]


def test_every_document_and_lesson_has_a_page(site):
    assert all((site / path).is_file() for path in documents().values())
    lessons = {path.name[:2] for path in (ROOT / "course").glob("[0-9][0-9]_*.py")}
    assert {path.stem for path in (site / "learn").glob("[0-9][0-9].html")} == lessons
    assert (site / "index.html").is_file()


def test_every_public_name_is_explained(parsed, site):
    page = parsed[(site / "api" / "tilewise.html").resolve()]
    assert set(api.members(tilewise)) <= set(tilewise.__all__)
    assert {"attention", "attention_varlen", "explain", "merge"} <= set(page.ids)


def test_no_id_is_used_twice_where_links_point(parsed):
    for path, page in parsed.items():
        wanted = {urlsplit(link).fragment for link in page.links if link.startswith("#")}
        assert not [name for name in wanted if page.ids.count(name) > 1], path.name


def test_lessons_show_what_they_print_and_draw(tmp_path, monkeypatch):
    from tilewise_lab.learn import course

    first = course.lessons()[:1]
    monkeypatch.setattr(course, "lessons", lambda: first)
    build(tmp_path, explorer=False)
    page = (tmp_path / "learn" / "01.html").read_text(encoding="utf-8")
    assert '<pre class="output">matrix  shape\nQ       (8, 4)' in page
    assert page.count("<img ") == len(list((tmp_path / "learn").glob("01_*.png"))) >= 1
    assert "(picture:" not in page
    assert 'class="output"' not in (tmp_path / "learn" / "02.html").read_text(encoding="utf-8")


def test_marks_of_generated_parts_do_not_show(site):
    for page in ("index.html", "guide/benchmark.html", "guide/explain.html"):
        assert "bench:" not in (site / page).read_text(encoding="utf-8")
