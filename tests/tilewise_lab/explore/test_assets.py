"""What ships is what the sources say: the bundle is there and current, and every word has both its languages."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tilewise_lab.explore.server import STATIC, TYPES

SOURCES = Path(__file__).parents[3] / "site" / "src"
STRING = r'"((?:[^"\\]|\\.)*)"'
TABLES = "\n".join(path.read_text("utf-8") for path in sorted((SOURCES / "words").glob("*.js")))
WORDS = re.findall(rf"^  {STRING}: \[\s*{STRING},\s*{STRING},?\s*\],$", TABLES, re.M)


assert len(WORDS) > 300


def code() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in SOURCES.rglob("*.js") if p.parent.name != "words")


def test_the_built_page_ships():
    assert {name for name in TYPES if (STATIC / name).is_file()} == {"index.html", "app.css", "app.js"}


def test_the_bundle_is_built_from_these_sources():
    paths = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*.js")}
    made = hashlib.sha256(b"".join(paths[name].read_bytes() for name in sorted(paths))).hexdigest()
    head = (STATIC / "app.js").read_text(encoding="utf-8").partition("\n")[0]
    assert head == f"// site/src {made}", "npm run build, in site/"


def test_every_word_is_there_once_and_is_used():
    keys = [key for key, _, _ in WORDS]
    assert len(set(keys)) == len(keys)
    text = code()
    used = set(re.findall(r'\bt\("([\w.]+)"', text))
    assert used <= set(keys), used - set(keys)
    made = {f"{head}." for head in re.findall(r'(?:`|names: "|t\(`)([\w.]+?)(?:\.\$\{|")', text)}
    unused = [key for key in keys if f'"{key}"' not in text and not any(key.startswith(head) for head in made)]
    chapters = {"short", "title", "lead", "after"}
    assert [key for key in unused if key.rpartition(".")[2] not in chapters] == []


def test_both_languages_fill_in_the_same():
    for key, english, chinese in WORDS:
        for pattern in (r"\{\w+\}", r"</?\w+>"):
            assert set(re.findall(pattern, english)) == set(re.findall(pattern, chinese)), key
