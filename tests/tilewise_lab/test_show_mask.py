"""`tilewise show-mask`, and the pictures in the documents that it drew."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch

from tests.tilewise.mods.test_builtin import BUILTIN
from tilewise import mods
from tilewise_lab import cli, picture


def pixels(file: bytes) -> bytes:
    """Of a PNG that tilewise wrote: the bytes of its only IDAT, unpacked."""
    at = file.index(b"IDAT")
    (size,) = struct.unpack(">I", file[at - 4 : at])
    return file[16:24] + zlib.decompress(file[at + 4 : at + 4 + size])


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_has_an_example_and_its_picture_in_the_docs(name: str, tmp_path) -> None:
    assert ">>>" in getattr(mods, name).__doc__
    docs = Path(__file__).parents[2] / "docs"
    file = f"mod-{name.replace('_', '-')}.png"
    assert f"]({file})" in (docs / "mods.md").read_text()
    assert cli.main(["show-mask", name, "--out", str(tmp_path / file)]) == 0
    assert pixels((tmp_path / file).read_bytes()) == pixels((docs / file).read_bytes())


def test_show_mask(tmp_path, capsys) -> None:
    for suffix in ("png", "html"):
        out = tmp_path / f"mask.{suffix}"
        assert cli.main(["show-mask", "block_diagonal", "128", "--queries", "512", "--out", str(out)]) == 0
        assert out.stat().st_size > 100
    assert "12 empty, 0 partial, 4 full" in capsys.readouterr().out
    assert cli.main(["show-mask", "nothing"]) == 2


def test_show_a_score_mod(tmp_path, capsys) -> None:
    """ALiBi of head 1: 0 on the diagonal, deepest in the corners; a mod of one's own, too."""
    out = tmp_path / "scores.html"
    command = ["show-mask", "alibi", "0.25", "0.5", "--head", "1", "--queries", "64", "--out", str(out)]
    assert cli.main(command) == 0
    assert "of head 1: from -31.5 to 0" in capsys.readouterr().out
    assert "-31.5</span>" in out.read_text()
    image = picture.heat(mods.alibi(torch.tensor([0.5])), 64, 64).image
    assert image.shape == (64, 64, 3)
    assert tuple(image[5, 5].tolist()) == picture.ZERO
    assert tuple(image[0, 63].tolist()) == tuple(image[63, 0].tolist()) == picture.LEAST
    own = tmp_path / "own.py"
    own.write_text(
        "import tilewise\n@tilewise.score_mod\ndef near(score, b, h, q_idx, kv_idx, x):\n"
        "    return score + x * (kv_idx - q_idx)\n"
    )
    assert cli.main(["show-mask", f"{own}:near", "2.0", "--queries", "8", "--out", str(tmp_path / "own.png")]) == 0
    assert "near, a score of 0 at 8 queries x 8 keys of head 0: from -14 to 14" in capsys.readouterr().out


OWN = """
x = 3
def seen(b, h, q_idx, kv_idx): return kv_idx <= q_idx
def shifted(score, b, h, q_idx, kv_idx, by): return score + by
def farther(s, b, h, i, j): return s + i - j
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py:x", "'x' in own.py: found an int; expected a function of (b, h, q_idx, kv_idx, ...)"),
        ("own.py:y", "'y' in own.py: found nothing of that name"),
        ("README.md:x", "mod: found 'README.md'; expected a Python file"),
        ("broken.py:x", "line 1 of broken.py: found SyntaxError: invalid syntax; expected a file that runs"),
        ("raises.py:x", "line 2 of raises.py: found ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_without_the_mod_is_one_sentence(name: str, said: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"own.py": OWN, "README.md": "It's x", "broken.py": "def f(:", "raises.py": "x = 3\n1 / 0"}
    for file, text in files.items():
        Path(file).write_text(text)
    assert cli.main(["show-mask", name, "--out", "mask.png"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_plain_functions_are_drawn_and_nothing_is_left_here(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    assert cli.main(["show-mask", "own.py:seen", "--queries", "256"]) == 0
    summary, file = capsys.readouterr().out.splitlines()
    assert "1 empty, 2 partial, 1 full" in summary
    assert Path(file).read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["show-mask", "own.py:shifted", "2.0", "--queries", "8"]) == 0
    assert cli.main(["show-mask", "own.py:farther", "--queries", "8"]) == 0  # known by the number of its parameters
    assert "farther" in capsys.readouterr().out
    assert [x.name for x in tmp_path.iterdir()] == ["own.py"]
