"""Functions of which Python keeps no source: from `python -c`, standard input and `exec`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tests.tilewise.mods.test_expr import PLACE, S
from tilewise import AttentionError

SRC = Path(tilewise.__file__).parents[1]
T = torch.rand(5, dtype=torch.float64)


def made(body: str, parameters: str = "", **space: Any) -> Any:
    space |= {"torch": torch, "T": T, "TABLE": torch.ones(2, 2)}
    exec(f"def mod(score, b, h, q_idx, kv_idx{parameters}):\n    return {body}", space)
    return tilewise.score_mod(space["mod"])


@pytest.mark.parametrize(
    "body",
    [
        "torch.where((q_idx >= kv_idx) & ~(h > 3), score, -float('inf'))",
        "2 ** score - (1 - score) / 3.5 + abs(-score) ** 2",
        "torch.tanh(score).clamp(min=-0.5, max=0.25) + score.exp()",
        "score + T[kv_idx] * (q_idx - kv_idx).abs()",
        "torch.maximum(score, T[q_idx % 3] * 2) * (7 // (1 + kv_idx))",
    ],
)
def test_it_is_followed(body: str) -> None:
    b, h, i, j = (torch.as_tensor(x) for x in PLACE)
    expected = eval(body, {"torch": torch, "T": T, "score": S, "b": b, "h": h, "q_idx": i, "kv_idx": j})
    torch.testing.assert_close(made(body)()(S, *PLACE), expected)


def test_its_arguments_and_lengths() -> None:
    mod = made("score * t[h] + cap + (kv_len - q_len) * n", ", t, cap, n, *, q_len, kv_len")(torch.ones(2), 0.5, 3)
    assert mod.program.root.deps == {"score", "h", "n_q", "n_k"}
    assert mod.numbers == (0.5,)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("score if q_idx > kv_idx else 0.0", "a choice by a value"),
        ("max(score, 0.5)", "a choice by a value"),
        ("__import__('math').exp(score)", "must be real number"),
        ("score + T", "a row of a tensor"),
        ("score + TABLE", "the tensor 'tensor (2, 2)' whole"),
        ("score + (T * score).sum()", "made of the score"),
        ("score + TABLE[T.int()][0].sum()", "rows chosen by a row"),
        ("score + T[q_idx, 0]", "2 indices"),
        ("torch.fft.fft(score)", "a call of fft_fft"),
        ("score.nothing()", "a call of nothing"),
        ("q_idx % 0 + score", "a division by 0"),
        ("'text'", "a str"),
    ],
)
def test_what_cannot_be_followed_says_so(body: str, found: str) -> None:
    with pytest.raises(AttentionError, match="mod 'mod', followed as it has no source") as caught:
        made(body)()
    assert found in str(caught.value)


SCRIPT = """
import torch, tilewise
@tilewise.mask_mod
def near(b, h, q_idx, kv_idx, reach):
    return (q_idx - kv_idx).abs() <= reach
print(near(1)(0, 0, 2, torch.arange(5)).int().tolist())
"""


@pytest.mark.parametrize("way", ["-c", "-"])
def test_python_without_a_file(way: str) -> None:
    command = [sys.executable, "-c", SCRIPT] if way == "-c" else [sys.executable, "-"]
    stdin = None if way == "-c" else SCRIPT
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}, check=False
    )
    assert done.stdout.strip() == "[0, 1, 1, 1, 0]", done.stderr
