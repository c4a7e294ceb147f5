"""The command that publishes, in a repository of its own, with ./run and the remote replaced."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release"
# "package" leaves what a build would, named after the newest tag; every call is recorded.
RUN = """#!/bin/sh
echo "$@" >> ../calls
echo "$TILEWISE_URL $TILEWISE_TAG" > ../addresses
[ "$1" = package ] || exit 0
version=$(git describe --tags | sed s/^v//)
touch "$2/tilewise-$version.tar.gz" "$2/tilewise-$version-py3-none-any.whl"
"""
REMOTE = "https://host.invalid/owner/tilewise.git"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "x")
        monkeypatch.setenv(f"{name}_EMAIL", "x@x.invalid")
    monkeypatch.delenv("TILEWISE_URL", raising=False)
    folder = tmp_path / "clone"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / ".ci")
    (folder / "run").write_text(RUN)
    (folder / "run").chmod(0o755)
    (folder / "CHANGELOG.md").write_text("## [0.2.0]\n")
    git(tmp_path, "init", "-q", "--bare", "origin")
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", REMOTE)
    git(folder, "config", "url.../origin.insteadOf", REMOTE)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")
    return folder


def release(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", ".ci/release", *words], cwd=clone, capture_output=True, text=True)


def calls(clone: Path) -> list[str]:
    path = clone.parent / "calls"
    return [line.split(" /")[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_version_is_tagged_built_uploaded_and_pushed(clone):
    done = release(clone, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert calls(clone) == ["package", "python -m twine upload"]
    assert git(clone.parent / "origin", "tag") == "v0.2.0\n"
    assert (clone.parent / "addresses").read_text() == "https://host.invalid/owner/tilewise v0.2.0\n"


@pytest.mark.parametrize(
    "remote", ["git@host.invalid:owner/tilewise.git", "ssh://git@host.invalid/owner/tilewise", REMOTE[:-4]]
)
def test_the_address_is_that_of_the_remote(clone, remote):
    git(clone, "remote", "set-url", "origin", remote)
    assert release(clone, "0.2.0", "--dry-run").returncode == 0
    assert (clone.parent / "addresses").read_text().split()[0] == "https://host.invalid/owner/tilewise"


@pytest.mark.parametrize("remote", ["../origin", "/srv/tilewise", "http://localhost/tilewise", "git@box:tilewise"])
def test_a_remote_without_a_public_address_is_not_published(clone, remote):
    git(clone, "remote", "set-url", "origin", remote)
    done = release(clone, "0.2.0")
    assert done.returncode == 1
    assert f"the remote origin is '{remote}', no public address" in done.stderr
    assert calls(clone) == []


def test_the_address_can_be_another_than_the_remotes(clone, monkeypatch):
    monkeypatch.setenv("TILEWISE_URL", "git@other.invalid:someone/else.git")
    assert release(clone, "0.2.0", "--dry-run").returncode == 0
    assert (clone.parent / "addresses").read_text() == "https://other.invalid/someone/else v0.2.0\n"


def test_a_dry_run_leaves_nothing(clone):
    done = release(clone, "0.2.0", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "release: 0.2.0 is ready\n"), done.stderr
    assert calls(clone) == ["package"]
    assert git(clone, "tag") == git(clone.parent / "origin", "tag") == ""


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("CHANGELOG.md", "## Unreleased\n", "no heading '## [0.2.0]'"),
        ("run", "#!/bin/sh\ntouch $2/tilewise-0.1.tar.gz\n", "the build made tilewise-0.1.tar.gz"),
    ],
)
def test_what_is_not_ready_is_not_published(clone, file, text, reason):
    (clone / file).write_text(text)
    done = release(clone, "0.2.0")
    assert "uncommitted changes" in done.stderr
    git(clone, "commit", "-qam", "a change")
    done = release(clone, "0.2.0")
    assert done.returncode == 1
    assert reason in done.stderr
    assert not any("upload" in call for call in calls(clone))
    assert git(clone, "tag") == ""


def test_metadata_has_addresses_only_if_they_are_given(monkeypatch):
    """The hook of the build, with hatchling's base class replaced: it is not installed here."""
    base = ModuleType("hatchling.metadata.plugin.interface")
    base.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    for parent in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = runpy.run_path(str(ROOT / "hatch_build.py"))
    hook = module["CustomMetadataHook"]()
    hook.root = str(ROOT)
    readme = (ROOT / "README.md").read_text()
    for url in (None, "https://host.invalid/owner/tilewise"):
        monkeypatch.delenv("TILEWISE_URL", raising=False)
        if url:
            monkeypatch.setenv("TILEWISE_URL", url)
        monkeypatch.setenv("TILEWISE_TAG", "v1")
        found: dict[str, Any] = {}
        hook.update(found)
        text = found["readme"]["text"]
        if url is None:
            assert "urls" not in found
            assert text == readme
        else:
            assert all(address.startswith(url) for address in found["urls"].values())
            assert found["urls"].keys() == {"Repository", "Documentation", "Changelog", "Issues"}
            links = re.findall(r'\]\(([^)]*)\)|src(?:set)?="([^"]*)"', text)
            assert len(links) > 20
            paths = {a or b for a, b in links}
            assert all(path.startswith((f"{url}/blob/v1/", f"{url}/raw/v1/", "https://")) for path in paths)
            kept = [path.partition("/v1/")[2].partition("#")[0] for path in paths if path.startswith(url)]
            assert all((ROOT / path).exists() for path in kept)
