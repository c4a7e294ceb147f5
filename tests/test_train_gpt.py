"""The example that trains a small GPT, on a still smaller one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
train_gpt = pytest.importorskip("train_gpt")
SIZES = {"dims": 16, "steps": 20, "width": 32, "layers": 1, "length": 16, "batch": 4, "rate": 0.01, "device": "cpu"}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))] + ["--json"]


def test_it_learns_with_either(tmp_path):
    assert train_gpt.main([*TINY, str(tmp_path / "losses.json")])
    (found,) = json.loads((tmp_path / "losses.json").read_text())["results"].values()
    for run in found["runs"].values():
        losses = run["losses"]
        assert len(losses) == SIZES["steps"]
        assert sum(losses[-5:]) < sum(losses[:5]) - 0.5


def test_a_wrong_gradient_is_seen(tmp_path, monkeypatch):
    def wrong(q, k, v):
        return train_gpt.of_torch(q, k, v.detach())

    monkeypatch.setitem(train_gpt.ATTENTIONS, "tilewise", wrong)
    assert not train_gpt.main([*TINY, str(tmp_path / "losses.json")])


def test_the_second_half_repeats_the_first():
    text = train_gpt.batch_of_text(0, 2, 16)
    assert text.shape == (2, 17)
    assert text[:, :8].equal(text[:, 9:])


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    losses, picture = tmp_path / "losses.json", tmp_path / "losses.svg"
    train_gpt.main([*TINY, str(losses)])
    train_gpt.main(["--draw", str(losses), "--picture", str(picture)])
    assert "<svg" in picture.read_text()
