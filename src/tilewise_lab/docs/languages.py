"""Sphinx, once for each language, side by side; what both need is imported and parsed once, before they part.

python -m tilewise_lab.docs.languages WORK OUT    begins when a line comes in; each line it prints names its language
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from tilewise_lab.docs.build import LANGUAGES, ROOT

EARLY = ("sphinx.cmd.build", "sphinx.builders.html", "sphinx.ext.autodoc", "myst_parser.sphinx_", "furo")


OURS = ("tilewise", "tilewise_lab")


class Named(io.TextIOBase):
    """Lines, each written at once behind the name of the language."""

    def __init__(self, name: str, to: TextIO) -> None:
        self.name, self.to, self.begun = name, to, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.to.write(f"{self.name}|{line}\n")
        return len(text)


def read_sources() -> None:
    """Import and parse what the reference describes; what needs a package that is not here, Sphinx will mock."""
    from sphinx.errors import PycodeError
    from sphinx.pycode import ModuleAnalyzer

    pages = (ROOT / "docs" / "reference").glob("*.md")
    described = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text(encoding="utf-8"))}
    for name in (*EARLY, *sorted(described)):
        if not name.startswith("tilewise.integrations"):
            import_module(name)
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            ModuleAnalyzer.for_module(name).analyze()
        else:  # torch and Python themselves, from which names come: a sixth of the time, for nothing that is described
            ModuleAnalyzer.cache["module", name] = PycodeError(f"{name} is not described here")


def make(work: Path, out: Path, language: str) -> None:
    from sphinx.cmd.build import main

    arguments = ["-W", "--keep-going", "-b", "html", "-D", f"language={language}"]
    arguments += ["-d", str(work / f"{language}.doctrees"), str(work / language), str(out / LANGUAGES[language])]
    said = Named(language, sys.stdout)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    raise SystemExit(code)


def main() -> int:
    work, out = map(Path, sys.argv[1:])
    read_sources()
    if not sys.stdin.readline():  # the parent process has ended
        return 1
    fork = "fork" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    running = [context.Process(target=make, args=(work, out, language)) for language in LANGUAGES]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return int(any(process.exitcode for process in running))


if __name__ == "__main__":
    sys.exit(main())
