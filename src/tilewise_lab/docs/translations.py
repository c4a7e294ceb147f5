"""Docstrings in Chinese: docs/zh/reference.po has an entry for every paragraph and every parameter of the reference.

The file is in gettext's format. Its msgid is the text of the docstring in one line.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from babel.messages.pofile import read_po

FILE = Path("docs", "zh", "reference.po")


class Translations:
    """Translates docstrings, and keeps which texts the docstring of each object has."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            entries = {str(message.id): str(message.string) for message in read_po(file) if message.id}
        self.found = {text: translated for text, translated in entries.items() if translated}
        self.texts: dict[str, list[str]] = {}

    def translate(self, name: str, text: str) -> str:
        """A text of the docstring of the object `name`."""
        self.texts.setdefault(name, []).append(text)
        return self.found.get(text, text)

    def faults(self, shown: Container[str]) -> Iterator[str]:
        """What to change in the file so that it has an entry for every text of the objects shown, and no other."""
        needed = dict.fromkeys(text for name, texts in self.texts.items() if name in shown for text in texts)
        for text in needed.keys() - self.found.keys():
            quoted = text.replace("\\", "\\\\").replace('"', '\\"')
            yield f'{FILE.as_posix()}: add the translation of this text of a docstring: msgid "{quoted}"'
        for text in self.found.keys() - needed.keys():
            yield f"{FILE.as_posix()}: no docstring of the reference has this text; delete the entry: {text}"
