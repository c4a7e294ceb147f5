"""Rows of COVERAGE.md about what is measured and drawn: what was kept, against what the models say."""

from __future__ import annotations

import pytest
import torch

from tilewise_lab.costs.cost import Call, traffic
from tilewise_lab.learn import lab, picture
from tilewise_lab.learn.course import lessons
from tilewise_lab.machine import budget


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The numbers of the course's folder, also where a GPU could make others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lab.measured.cache_clear()
    yield
    lab.measured.cache_clear()


def test_products_fall_into_bands_by_what_divides_their_size():
    """The less often 2 divides a size, the slower; from 8 on rows of 16 bits start where 16 bytes are read at once."""
    rates = [(budget.alignment(int(n)), rate) for n, rate in lab.measured("alignment").items() if n.isdigit()]
    bands = [[rate for power, rate in rates if low <= power < high] for low, high in ((1, 2), (2, 8), (8, 129))]
    assert all(bands)
    assert max(bands[0]) < min(bands[1])
    assert 2 * max(bands[1]) < min(bands[2])


def test_a_larger_vocabulary_is_faster():
    """50257 words padded to 50304 = 64 · 786 = 128 · 393: Karpathy saw 25 % on a whole model, the layer shows more."""
    wide = budget.pad_to_multiple(50257, 64)
    assert wide == budget.pad_to_multiple(50257, 128) == 50304 == 64 * 786 == 128 * 393
    assert (budget.alignment(50257), budget.alignment(wide)) == (1, 128)
    times = lab.measured("vocabulary")
    assert times[str(wide)] * 1.25 < times["50257"]


def test_zeros_are_multiplied_faster_than_noise(monkeypatch):
    """The same product on both: what was kept, and what the experiment would measure."""
    found = lab.measured("zeros")
    assert 1.05 * found["random"] < found["zeros"]
    seen, make = [], torch.zeros
    monkeypatch.setattr(lab, "_normal", lambda *shape: torch.ones(8))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: make(8))
    monkeypatch.setattr(lab, "_matmul_rate", lambda a, b, budget: seen.append((a, b)) or 1.0)
    lab.zeros()
    assert {bool(a.any()) for a, _ in seen} == {True, False}
    assert all(a is b for a, b in seen)


def test_nine_times_less_traffic_and_milliseconds_of_another_gpu():
    """40.3 -> 4.4 GB is 9.2 times less, and follows from the shape; 41.7 -> 7.3 ms is 5.7 times, and an A100's."""
    gpt2 = Call(batch=64, n_q=1024, n_k=1024, heads=16, kv_heads=16, d=64, dv=64, dtype="float16")
    bill = traffic(gpt2, backward=True, masked=True, dropout=True)
    assert bill.naive / bill.fa1 == pytest.approx(40.3 / 4.4, rel=0.05)
    times = lab.measured("gpt2")
    assert "H200" in times["device"]
    assert times["naive_ms"] < 41.7 / 2
    assert times["tilewise_ms"] < times["naive_ms"] / 4


def test_pictures_are_drawn_here(tmp_path, monkeypatch):
    """The notes' figures are links, and broken: every lesson draws its own, and shows no other."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TILEWISE_PICTURES", str(tmp_path))
    path = picture("line", lambda axes: axes.plot([0, 1], [0, 1]), alt="A line that rises.")
    assert path.read_bytes().startswith(b"\x89PNG")
    text = {one.number: one.path.read_text(encoding="utf-8") for one in lessons()}
    assert all("picture(" in words and "![" not in words for words in text.values())
    for topic in ("shared memory", "warp", "tiles", "FlashAttention"):  # the four pages that were missing
        assert any(topic in words for words in text.values())
