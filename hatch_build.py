"""Addresses in the package's metadata (Project-URL), all made from one setting: the address of the repository.

TILEWISE_URL: the repository, such as https://HOST/OWNER/tilewise. `.ci/release` sets it to the address of the remote
origin, unless it is set; other builds have no addresses. TILEWISE_TAG: what the README's links point to.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        url, tag = os.environ.get("TILEWISE_URL"), os.environ.get("TILEWISE_TAG", "main")
        if url:
            metadata["urls"] = urls(url, tag)
            text = absolute(text, url, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(url: str, tag: str) -> dict[str, str]:
    return {
        "Repository": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def absolute(text: str, url: str, tag: str) -> str:
    """Markdown with the links and pictures of the repository as addresses, for pages outside of it.

    >>> absolute('[a](docs/a.md#b) [c](https://c) <img src="p.svg">', "https://h/o/r", "v1")
    '[a](https://h/o/r/blob/v1/docs/a.md#b) [c](https://c) <img src="https://h/o/r/raw/v1/p.svg">'
    """
    text = re.sub(r"\]\((?!https?:|#)", f"]({url}/blob/{tag}/", text)
    return re.sub(r'\b(src|srcset)="(?!https?:)', rf'\1="{url}/raw/{tag}/', text)
