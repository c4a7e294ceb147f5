"""What ships is what the sources say: the bundle is there and current, and every word has both its languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewise_lab.explore.server import STATIC, TYPES

SOURCES = Path(__file__).parents[3] / "site" / "src"
STRING = r'"((?:[^"\\]|\\.)*)"'
WORDS = re.findall(rf"^  {STRING}: \[\s*{STRING},\s*{STRING},?\s*\],$", (SOURCES / "words.js").read_text("utf-8"), re.M)


def test_the_built_page_ships():
    assert {name for name in TYPES if (STATIC / name).is_file()} == {"index.html", "app.css", "app.js"}


def test_the_bundle_is_built_from_these_sources():
    bundle = (STATIC / "app.js").read_text(encoding="utf-8")
    assert len(WORDS) > 200
    stale = [key for key, english, chinese in WORDS if english not in bundle or chinese not in bundle]
    assert not stale, "npm run build, in site/"


def test_every_used_word_is_there():
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.js") if path.name != "words.js")
    keys = {key for key, _, _ in WORDS}
    assert len(keys) == len(WORDS)
    used = set(re.findall(r'\bt\("([\w.]+)"', code))
    assert used <= keys, used - keys


@pytest.mark.parametrize(("key", "english", "chinese"), WORDS, ids=[key for key, _, _ in WORDS])
def test_both_languages_fill_in_the_same(key, english, chinese):
    assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", chinese))
    assert set(re.findall(r"</?\w+>", english)) == set(re.findall(r"</?\w+>", chinese))
