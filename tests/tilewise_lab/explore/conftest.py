"""A browser, a server, and the page as one file; skipped where there is no browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tilewise_lab.explore.export import export
from tilewise_lab.explore.server import serve

FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def live() -> Iterator[str]:
    with serve(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="session")
def copy(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return export(tmp_path_factory.mktemp("page")).as_uri()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """visit(url, width=..., ...) -> page; afterwards, nothing may have gone wrong in any console."""
    contexts, complaints = [], []

    def go(url: str, **options: Any) -> Any:
        width = options.pop("width", 1280)
        context = browser.new_context(viewport={"width": width, "height": 900}, locale="en-US", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    go.complaints = complaints  # type: ignore[attr-defined]
    yield go
    for context in contexts:
        context.close()
    assert not complaints
