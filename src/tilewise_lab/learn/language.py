"""Which language the reader reads: English or Chinese.

>>> with using("zh"):
...     say("right", "对了")
'对了'
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

LANGUAGES = ("en", "zh")


def language() -> str:
    """TILEWISE_LANG (`--lang` sets it), or else what the system is set to; English where that is neither of the two."""
    asked = next(
        filter(None, (os.environ.get(name) for name in ("TILEWISE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"))), ""
    )
    return "zh" if asked.lower().startswith("zh") else "en"


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


def say(en: str, zh: str) -> str:
    """The one of two sentences that the reader reads."""
    return zh if language() == "zh" else en
