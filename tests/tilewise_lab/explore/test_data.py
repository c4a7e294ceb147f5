"""What the library answers the page, and what it refuses in words."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tilewise.errors import AttentionError
from tilewise_lab.cli import main
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.explain import explain
from tilewise_lab.explore.data import ENDPOINTS, GRID, answer, combinations
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
        ("roof", {"s": "two"}, "a number (int)"),
        ("roof", {"s": ""}, "a number (int)"),
        ("roof", {"device": "Z80"}, "H200"),
        ("roof", {"size": "8"}, "parameters of roof"),
        ("roof", {"d": "0"}, "1 to 512"),
        ("grid", {"heads": "999"}, "1 to 256"),
        ("plans", {"mask": "hat"}, "'causal'"),
        ("plans", {"ranks": "1"}, "2 to 1024"),
    ],
)
def test_refusals(name, query, said):
    with pytest.raises(AttentionError) as error:
        answer(name, query)
    assert said in str(error.value)


@pytest.mark.parametrize("query", ["roof?s=", "roof?device=", "plans?tokens=1X", "plans?machine=", "nothing?"])
def test_the_server_refuses_in_a_sentence(live, query):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{live}data/{query}", timeout=20)
    assert error.value.code == 400
    assert len(json.load(error.value)["error"]) > 10


@pytest.mark.parametrize("port", [99999, -1, "taken"])
def test_a_port_that_cannot_be_is_one_sentence(live, capsys, port):
    wanted = live.rstrip("/").rpartition(":")[2] if port == "taken" else str(port)
    assert main(["explore", "--no-open", "--port", wanted]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("tilewise explore: ")
    assert "\n" not in said
    assert wanted in said


def test_the_roofline_is_what_explain_says():
    shape = (4, 4096, 16, 128)
    told = explain(shape, shape, shape, causal=True, backward=True, device="A100")
    found = answer("roof", {"device": "A100", "causal": "1", "backward": "1"})
    assert (found["naive"], found["tiled"], found["binding"]) == (told.traffic.naive, told.traffic.tiled, told.binding)


def test_measured_calls_are_near_what_the_model_says():
    points = answer("measured", {"device": "H200"})["points"]
    assert len(points) >= 12
    for point in points:
        assert 0.5 < point["predicted"] / point["seconds"] < 2
        assert point["rate"] < device("H200").flops("bfloat16")
    assert answer("measured", {"device": "L4"})["points"] == []


def test_plans_are_those_of_the_command(tmp_path, capsys):
    path = tmp_path / "plans.json"
    assert main(["plan", "--seqlen", "128k", "--ranks", "16", "--window", "4096", "0", "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    found = answer("plans", {"tokens": "128k", "ranks": "16", "mask": "window"})
    assert found["advice"] == told["advice"] == found["strategies"][0]["name"]  # the advised one is the first row
    for one, other in zip(found["strategies"], told["strategies"], strict=True):
        assert [x["time"] for x in one["passes"]] == [x["time"] for x in other["passes"]]
        assert len(one["passes"][0]["bars"]) == len([x for x in other["passes"][0]["bars"] if x["station"] < 8])


def test_rounding_keeps_what_is_shown():
    assert rounded({"x": [1.23456789012345, 3, "a", (2.0,)]}) == {"x": [1.234568, 3, "a", [2.0]]}


def test_the_copy_cannot_end_its_own_script(monkeypatch):
    monkeypatch.setattr("tilewise_lab.explore.export.GRID", {"gpus": {}})
    monkeypatch.setattr("tilewise_lab.explore.export.answer", lambda name, query: {"text": "</script>"})
    assert "</" not in answers()
