"""Which language the reader reads: English or Chinese.

>>> with using("zh"):
...     say("right", "对了")
'对了'
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TypeVar

LANGUAGES = ("en", "zh")
BOTH = "both"  # a lesson that is run once for the pages of two languages
OPEN, BETWEEN, CLOSE = "\ue000", "\ue001", "\ue002"  # letters that no text has
INNERMOST = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){BETWEEN}([^{OPEN}{CLOSE}]*){CLOSE}")

Words = TypeVar("Words", str, list[str])


def language() -> str:
    """TILEWISE_LANG (`--lang` sets it), or else what the system is set to; English where that is neither of the two."""
    asked = next(
        filter(None, (os.environ.get(name) for name in ("TILEWISE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"))), ""
    )
    return BOTH if asked == BOTH else "zh" if asked.lower().startswith("zh") else "en"


def use(lang: str) -> None:
    """From here on, in this process and in those that it starts."""
    os.environ["TILEWISE_LANG"] = lang


@contextlib.contextmanager
def using(lang: str) -> Iterator[None]:
    before = os.environ.get("TILEWISE_LANG")
    use(lang)
    try:
        yield
    finally:
        os.environ.pop("TILEWISE_LANG") if before is None else use(before)


def say(en: Words, zh: Words) -> Words:
    """The one of two sentences, or of two lists of words, that the reader reads; or both, for `only` to take apart."""
    if language() != BOTH:
        return zh if language() == "zh" else en
    if isinstance(en, str):
        return f"{OPEN}{en}{BETWEEN}{zh}{CLOSE}"
    return [say(one, other) for one, other in zip(en, zh, strict=True)]


def only(text: str, lang: str) -> str:
    """What one reader reads of a text that was said in both languages.

    >>> with using(BOTH):
    ...     text = say(f"{say('one', '一')} of 3", f"3 之{say('one', '一')}")
    >>> only(text, "en"), only(text, "zh")
    ('one of 3', '3 之一')
    """
    wanted = rf"\{1 + LANGUAGES.index(lang)}"
    while OPEN in text:
        text = INNERMOST.sub(wanted, text)
    return text
