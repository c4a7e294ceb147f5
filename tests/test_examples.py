"""The examples with Hugging Face's models, a few steps of each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install tilewise[hf]")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import hf_finetune
import hf_generate
import serve_hf


def test_finetuning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_finetune.py", "--steps", "8"])
    hf_finetune.main()
    ours, theirs = map(float, re.findall(r"[\d.]+", capsys.readouterr().out.strip().rpartition("\n")[2]))
    assert abs(ours - theirs) < 1e-3
    assert ours < 4.6


def test_generating(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_generate.py", "--tokens", "4"])
    hf_generate.main()
    assert capsys.readouterr().out.count("the same tokens") == 4


def test_serving(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With so few pages requests wait, and prompts longer than the budget come in pieces."""
    monkeypatch.setattr(sys, "argv", ["serve_hf.py", "--requests", "5", "--pages", "12", "--budget", "40"])
    serve_hf.main()
    *steps, last = capsys.readouterr().out.splitlines()
    assert "the same tokens as generate" in last
    assert any(" 0 waiting" not in line for line in steps)
    assert steps[-1].endswith("12 pages free")
