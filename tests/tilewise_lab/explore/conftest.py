"""A server, the page as one file, and visits to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tilewise_lab.explore.export import export
from tilewise_lab.explore.server import serve


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
        view = {"width": width, "height": 900}
        context = browser.new_context(viewport=view, locale="en-US", reduced_motion="reduce", **options)
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
