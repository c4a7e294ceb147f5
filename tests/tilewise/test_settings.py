"""The environment variables, each read when a call needs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import AttentionError, settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_contents_are_checked_from_the_call_on_after_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot past the cache is no key; TILEWISE_CHECK=1, set after the import, makes it an error."""
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 1, 8)
    slots = torch.tensor([[0, 9]], dtype=torch.int32)
    call = {"lengths": torch.tensor([2], dtype=torch.int32), "token_table": slots}
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("TILEWISE_CHECK", value)
        tilewise.attention_kv(q, cache, cache, **call)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(AttentionError, match=r"token_table\[0, 1\]: found 9"):
        tilewise.attention_kv(q, cache, cache, **call)
    monkeypatch.delenv("TILEWISE_CHECK")
    tilewise.attention_kv(q, cache, cache, **call)


@pytest.mark.parametrize(("name", "value"), [("TILEWISE_KV_TILE", "16x16x4x1x1"), ("TILEWISE_NO_OVERLAP", "1")])
def test_what_changes_kernels_is_part_of_a_signature(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.of_kernels()
    monkeypatch.setenv(name, value)
    assert settings.of_kernels() != before
    monkeypatch.delenv(name)
    assert settings.of_kernels() == before


def test_a_traced_call_reads_them() -> None:
    q = torch.randn(1, 3, 2, 8)
    function = torch.compile(lambda q: tilewise.attention(q, q, q), backend="eager", fullgraph=True)
    assert torch.allclose(function(q), tilewise.attention(q, q, q))


LATE = """
import os, sys
{before}
import torch, tilewise
os.environ["TRITON_INTERPRET"] = "1"
q = torch.randn(1, 3, 1, 16)
try:
    tilewise.attention(q, q, q, backend="triton")
except tilewise.AttentionError as error:
    print(error)
else:
    print("ran")
"""


@pytest.mark.parametrize(("before", "printed"), [("import triton.language", "above all imports"), ("", "ran")])
def test_an_interpreter_that_is_asked_for_too_late(before: str, printed: str) -> None:
    """Triton reads TRITON_INTERPRET when a kernel is defined, its own ones at its import."""
    pytest.importorskip("triton")
    environment = settings.of_child(str(Path(tilewise.__file__).parents[1])) | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    code = LATE.format(before=before)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert printed in found.stdout, found.stderr


def test_every_variable_is_in_the_table() -> None:
    source = Path(settings.__file__).read_text()
    names = {*re.findall(r"\b(?:TILEWISE|TRITON|VLLM)_[A-Z_]+\b", source)}
    assert len(names) >= 5
    assert names == {*re.findall(r"^\| `([A-Z_]+)`", PAGE.read_text(), re.MULTILINE)}
