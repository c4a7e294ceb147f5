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
