"""Functions of which Python keeps no source: from `python -c`, standard input and `exec`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import tilewise
from tests.tilewise.mods.test_expr import PLACE, S
from tilewise import AttentionError
from tilewise.mods import trace

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


class Owner:
    """With a number, and a method that reads it."""

    gain = 1.0

    def scaled(self, x: Any) -> Any:
        return x * self.gain


def scaled_attention(x: torch.Tensor, gain: float) -> torch.Tensor:
    """Attention of x over itself, written out, with scores times `gain`."""
    scores = torch.einsum("bihd,bjhd->bhij", x, x) * gain / x.shape[-1] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), x)


def exec_(source: str, **space: Any) -> dict[str, Any]:
    exec(source, space)
    return space


MOD = "def mod(score, b, h, q_idx, kv_idx):\n    return "
CHANGES = {  # what a mod without source reads: its source, its globals, and how the number in them changes
    "an element of a list": (
        MOD + "score * gains[0]",
        {"gains": [1.0]},
        lambda space, x: space["gains"].__setitem__(0, x),
    ),
    "a value of a dict": (
        MOD + "score * gains['a']",
        {"gains": {"a": 1.0}},
        lambda space, x: space["gains"].update(a=x),
    ),
    "an attribute of a helper's argument": (
        "def helper(x, owner):\n    return x * owner.gain\n" + MOD + "helper(score, owner)",
        {"owner": Owner()},
        lambda space, x: setattr(space["owner"], "gain", x),
    ),
    "a method's object": (
        MOD + "scaled(score)",
        {"scaled": Owner().scaled},
        lambda space, x: setattr(space["scaled"].__self__, "gain", x),
    ),
    "a keyword-only default": (
        "def helper(x, *, gain=1.0):\n    return x * gain\n" + MOD + "helper(score)",
        {},
        lambda space, x: space["helper"].__kwdefaults__.update(gain=x),
    ),
    "a default": (
        "def helper(x, gain=1.0):\n    return x * gain\n" + MOD + "helper(score)",
        {},
        lambda space, x: setattr(space["helper"], "__defaults__", (x,)),
    ),
    "an element of a default": (
        "def helper(x, gains=[1.0]):\n    return x * gains[0]\n" + MOD + "helper(score)",
        {},
        lambda space, x: space["helper"].__defaults__[0].__setitem__(0, x),
    ),
    "a global": (MOD + "score * gain", {"gain": 1.0}, lambda space, x: space.update(gain=x)),
    "a global of a helper": (
        "def helper(x):\n    return x * gain\n" + MOD + "helper(score)",
        {"gain": 1.0},
        lambda space, x: space.update(gain=x),
    ),
    "a global of a lambda within it": (
        MOD + "(lambda x: x * gain)(score)",
        {"gain": 1.0},
        lambda space, x: space.update(gain=x),
    ),
    "an attribute of a function": (
        "def helper(x):\n    return x * helper.gain\nhelper.gain = 1.0\n" + MOD + "helper(score)",
        {},
        lambda space, x: setattr(space["helper"], "gain", x),
    ),
    "the code of a helper": (
        "def helper(x):\n    return x\n" + MOD + "helper(score)",
        {},
        lambda space, x: setattr(space["helper"], "__code__", exec_(f"def f(x): return x * {x}")["f"].__code__),
    ),
    "a global by its name": (MOD + "score * globals()['gain']", {"gain": 1.0}, lambda space, x: space.update(gain=x)),
    "an attribute of an imported module": (
        MOD.replace("return", "import sys; return") + "score * sys.modules['torch'].gain_of_a_test",
        {},
        lambda space, x: setattr(torch, "gain_of_a_test", x),
    ),
    "the default dtype": (
        MOD + "score * (3.0 if torch.get_default_dtype() == torch.float64 else 1.0)",
        {},
        lambda space, x: torch.set_default_dtype(torch.float64 if x == 3 else torch.float32),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("decorated", [True, False])
def test_a_change_is_seen_of(what: str, decorated: bool) -> None:
    source, space, change = CHANGES[what]
    space = exec_(source, __name__=__name__, torch=torch, **space)
    mod = tilewise.score_mod(space["mod"]) if decorated else None
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    try:
        for gain in (1.0, 3.0, 1.0):
            change(space, gain)
            out = tilewise.attention(x, x, x, score_mod=space["mod"] if mod is None else mod())
            torch.testing.assert_close(out, scaled_attention(x, gain))
    finally:
        torch.set_default_dtype(torch.float32)
        vars(torch).pop("gain_of_a_test", None)


@pytest.mark.parametrize(
    ("body", "times"),
    [
        ("torch.where(q_idx >= kv_idx, score.exp() * gain, -float('inf'))", 1),
        ("helper(score) + T[kv_idx]", 1),
        ("score * gains[0]", 3),
        ("score * owner.gain", 3),
    ],
)
def test_a_program_is_used_again_only_if_all_that_it_reads_is_known(
    body: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    traced = trace.trace
    monkeypatch.setattr(trace, "trace", lambda *args: (found.append(args), traced(*args))[1])
    space = exec_(
        "def helper(x):\n    return x * gain\n" + MOD + body, torch=torch, T=T, gain=2.0, gains=[2.0], owner=Owner()
    )
    for _ in range(3):
        tilewise.score_mod(space["mod"])()
    assert len(found) == times


def test_compiled_if_all_that_it_reads_is_known() -> None:
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    space = exec_(MOD + "score * gain", gain=1.0)
    mod, unknown = (
        tilewise.score_mod(space["mod"]),
        tilewise.score_mod(exec_(MOD + "score * gains[0]", gains=[1.0])["mod"]),
    )

    def attend(x: torch.Tensor, mod: Any) -> torch.Tensor:
        return tilewise.attention(x, x, x, score_mod=mod(), backend="reference")

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for gain in (1.0, 3.0):
        space["gain"] = gain
        torch.testing.assert_close(compiled(x, mod), scaled_attention(x, gain))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="source"):
        compiled(x, unknown)


def test_functions_without_a_module_and_without_builtins() -> None:
    """As made by `exec` with a namespace of its own, or by types.FunctionType."""
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    space = exec_("def helper(x):\n    return abs(x) * 3\n" + MOD + "helper(score) / 3 - abs(score) + 2 * score")
    assert space["helper"].__module__ is None
    torch.testing.assert_close(tilewise.attention(x, x, x, score_mod=space["mod"]), scaled_attention(x, 2.0))
    bare = FunctionType(space["mod"].__code__, {"helper": FunctionType(space["helper"].__code__, {})})
    torch.testing.assert_close(tilewise.attention(x, x, x, score_mod=bare), scaled_attention(x, 2.0))


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
