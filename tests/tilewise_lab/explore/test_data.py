"""The page's answers are the library's, and what it cannot answer it refuses in words."""

from __future__ import annotations

import json

import pytest
import torch

import tilewise
from tilewise import mods
from tilewise.costs.devices import device
from tilewise.spec import AttentionError
from tilewise_lab.explore.data import ENDPOINTS, GRID, MASKS, answer, combinations
from tilewise_lab.explore.export import answers, rounded


def first(name: str) -> dict[str, str]:
    return {key: str(value) for key, value in next(combinations(name)).items()}


@pytest.mark.parametrize("name", [name for name in ENDPOINTS if name != "hopper"])
def test_an_answer_is_json_and_depends_on_nothing_but_the_query(name):
    said = json.dumps(answer(name, first(name)), allow_nan=False)
    assert said == json.dumps(answer(name, first(name)), allow_nan=False)


def test_every_endpoint_is_in_the_copy():
    assert set(GRID) == set(ENDPOINTS)


@pytest.mark.parametrize(
    ("name", "query", "said"),
    [
        ("nothing", {}, "endpoint"),
        ("softmax", {"x": "3,two"}, "numbers, with commas"),
        ("softmax", {"x": ",".join("1" * 17)}, "1 to 16"),
        ("softmax", {"x": ""}, "1 to 16"),
        ("tiles", {"n": "8.5"}, "a number (int)"),
        ("tiles", {"n": "8", "rows": "9"}, "1 to 8"),
        ("tiles", {"mask": "round"}, "'none' or 'causal'"),
        ("tiles", {"size": "8"}, "parameters of tiles"),
        ("roof", {"device": "Z80"}, "H200"),
        ("layout", {"shape": "7", "view": "transpose"}, "two axes"),
        ("mask", {"kind": "hat"}, "'causal'"),
    ],
)
def test_refusals(name, query, said):
    with pytest.raises(AttentionError) as error:
        answer(name, query)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_masks_are_what_attention_sees(kind, causal):
    """A picture against the keys that attention itself uses: v is a unit matrix, so out holds the weights."""
    n, size = 32, 8
    found = answer("mask", {"kind": kind, "n": str(n), "size": str(size), "block": "16", "causal": str(causal)})
    q = torch.zeros(1, n, 1, 8)
    v = torch.eye(n)[None, :, None]
    out = tilewise.attention(
        q, q, v, mask_mod=MASKS[kind](n, size), causal=bool(causal) or kind == "causal", backend="reference"
    )[0, :, 0]  # fmt: skip
    bits = [[bool(int(digit, 16) & bit) for digit in row for bit in (8, 4, 2, 1)] for row in found["rows"]]
    assert torch.equal(torch.tensor(bits), out > 0)
    assert found["pairs"] == int((out > 0).sum())


def test_tiles_of_a_mask_are_those_of_a_block_mask():
    found = answer("mask", {"kind": "window", "n": "128", "size": "16", "block": "32"})
    tiles = mods.block_mask(mods.window_with_globals(16, 0), 128, 128, block=(32, 32)).tiles
    assert found["tiles"] == tiles[0, 0].tolist()


@pytest.mark.parametrize(("shape", "view"), [("2x3", "transpose"), ("2x4x3", "transpose"), ("4x6", "6x4")])
def test_layouts_are_those_of_torch(shape, view):
    x = torch.arange(torch.Size(map(int, shape.split("x"))).numel()).reshape([int(n) for n in shape.split("x")])
    x = x.transpose(-1, -2) if view == "transpose" else x.view([int(n) for n in view.split("x")])
    found = answer("layout", {"shape": shape, "view": view})
    assert (found["shape"], found["strides"]) == (list(x.shape), list(x.stride()))
    assert found["offsets"] == x.flatten().tolist()
    assert found["contiguous"] == x.is_contiguous() == found["torch"]["contiguous"]


def test_measured_calls_are_near_what_the_model_says():
    points = answer("measured", {"device": "H200"})["points"]
    assert len(points) >= 12
    for point in points:
        assert 0.5 < point["predicted"] / point["seconds"] < 2
        assert point["rate"] < device("H200").flops("bfloat16")
    assert answer("measured", {"device": "L4"})["points"] == []


def test_rounding_keeps_what_is_shown():
    assert rounded({"x": [1.23456789012345, 3, "a", (2.0,)]}) == {"x": [1.23456789, 3, "a", [2.0]]}


def test_the_copy_cannot_end_its_own_script(monkeypatch):
    monkeypatch.setattr("tilewise_lab.explore.export.GRID", {"softmax": {"x": ("3,2",)}})
    monkeypatch.setattr("tilewise_lab.explore.export.answer", lambda name, query: {"text": "</script>"})
    assert "</" not in answers()
