"""What the browser computes is what the library computes: the rules of the page against those of the traces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tilewise import mods
from tilewise_lab import trace
from tilewise_lab.costs import cost
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.waves import cliffs, matmul_blocks, waves
from tilewise_lab.machine import coalesce, pipeline
from tilewise_lab.machine.layout import Layout

TEXTS = ("3 2 5 1 4 0 6 2", "the animal slept because it was so tired", "我 是 一只猫", "-2, 1.5")


@pytest.fixture(scope="module")
def rules(browser: Any, live: str) -> Any:
    """rules("softmax", [3, 2]) calls the page's function of that name; infinities come back as in the traces."""
    page = browser.new_page()
    page.goto(live)
    words = "(key, x) => x === Infinity ? 'inf' : x === -Infinity ? '-inf' : x"
    yield lambda name, *given: page.evaluate(
        f"([name, given]) => JSON.parse(JSON.stringify(tilewise[name](...given), {words}))", [name, given]
    )
    page.close()


def same(a: Any, b: Any, where: str = "") -> None:
    """Of what both have: equal words and counts, near enough numbers."""
    if isinstance(a, dict):
        for key in a.keys() & b.keys():
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    elif isinstance(a, float) or isinstance(b, float):
        assert a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12), (where, a, b)
    else:
        assert a == b, (where, a, b)


@pytest.mark.parametrize("x", [[3, 2, 5, 1], [1, 2, 3], [100, 101, 99], [-2], [2, 2, 2]])
def test_softmax(rules, x):
    told = trace.softmax(x)
    found = rules("softmax", x)
    assert found.keys() >= {"right", "wrong", "loads"}
    same(found, told)


@pytest.mark.parametrize("text", TEXTS)
def test_numbers_are_the_scores_of_the_last_query(rules, text):
    one = rules("example", text)
    q, k = torch.tensor(one["q"]), torch.tensor(one["k"])
    assert q.shape == (one["n"], 4)
    if "numbers" in one:
        assert (q[-1] @ k.T / 2).tolist() == pytest.approx(one["numbers"])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("order", "rows", "columns", "causal", "backward"),
    [("fa2", 4, 4, False, True), ("fa2", 3, 2, True, True), ("fa1", 4, 4, False, False), ("fa1", 2, 3, True, False)],
)
def test_tiles(rules, text, order, rows, columns, causal, backward):
    one = rules("example", text)
    n = one["n"]
    rows, columns = min(rows, n), min(columns, n)
    asked = {"rows": rows, "columns": columns, "order": order, "after": 0 if causal else None, "backward": backward}
    found = rules("attention", one, asked)
    tensors = [torch.tensor(one[name], dtype=torch.float64) for name in ("q", "k", "v", "do")]
    told = trace.attention(
        n, n, d=4, rows=rows, columns=columns, order=order, causal=causal, backward=backward, itemsize=2,
        tensors=tensors,
    )  # fmt: skip
    assert told["error"] < 1e-12
    kept = {"phase", "i", "j", "loads", "stores", "resident", "sram", "loaded", "stored", "flops"}
    assert all(kept <= step.keys() for step in found["steps"])
    assert {"s", "p", "m", "l", "o", "factor"} <= found["steps"][0].keys() & told["steps"][0].keys()
    same(found, told)
    call = cost.Call(1, n, n, 1, 1, 4, 4, "float16")
    counted = rules("traffic", {"n": n, "d": 4, "rows": rows, "columns": columns, "causal": causal, "backward": False})
    assert counted["naive"] == cost.traffic(call, masked=causal).naive
    if not backward:
        assert counted[order] == found["steps"][-1]["loaded"] + found["steps"][-1]["stored"]


def test_chain_rule(rules):
    same(rules("chain", -1.5, 3, 0.5), trace.notes_example(-1.5, 3.0, 0.5))


def masks_of(n: int, size: int) -> dict[str, mods.Mod]:
    ends = torch.tensor([0, n * 3 // 8, n * 5 // 8, n], dtype=torch.int32)
    return {
        "causal": mods.window_with_globals(n, 0), "window": mods.window_with_globals(size, 0),
        "globals": mods.window_with_globals(size, 4), "document": mods.document(cu_seqlens=ends, tokens=n),
        "prefix": mods.prefix_lm(torch.tensor([2 * size])), "dilated": mods.dilated_window(size, 3),
        "image": mods.neighbourhood_2d(16, max(1, size // 4)), "blocks": mods.block_diagonal(2 * size),
        "strided": mods.strided_sparse(size),
    }  # fmt: skip


@pytest.mark.parametrize("kind", masks_of(32, 8))
def test_masks_are_what_attention_sees(rules, kind):
    """A picture against the keys that attention itself uses: v is a unit matrix, so out holds the weights."""
    n, size = 32, 8
    mod, causal = masks_of(n, size)[kind], kind == "causal"
    found = rules("mask", {"kind": kind, "n": n, "size": size, "block": 16})
    q, v = torch.zeros(1, n, 1, 8), torch.eye(n)[None, :, None]
    out = tilewise.attention(q, q, v, mask_mod=mod, causal=causal, backend="reference")[0, :, 0]
    assert torch.equal(torch.tensor(found["rows"]), out > 0)
    tiles = mods.block_mask(mod, n, n, block=(16, 16), causal=causal).tiles[0, 0]
    assert found["tiles"] == tiles.tolist()


def test_layouts_and_lines(rules):
    for view, want in (
        ("same", Layout.row_major([2, 4, 3])),
        ("transpose", Layout.row_major([2, 4, 3]).transpose(1, 2)),
    ):
        found = rules("layout", [2, 4, 3], view)
        assert (found["shape"], found["strides"], found["offsets"]) == (want.shape, want.strides, want.offsets())
        assert found["contiguous"] == want.contiguous
    for pattern, lanes in (("thread", coalesce.row_per_thread), ("warp", coalesce.row_per_warp)):
        for columns, itemsize, instant in ((64, 4, 1), (8, 2, 3), (4096, 4, 0)):
            asked = {"pattern": pattern, "columns": columns, "itemsize": itemsize, "instant": instant}
            told = coalesce.touched(lanes(columns, instant), itemsize)
            same(rules("coalescing", asked), told._asdict() | {"elements": lanes(columns, instant)})


def test_pipelines_and_waves(rules):
    for name, made in (("sequential", pipeline.sequential), ("pipelined", pipeline.pipelined)):
        found, plan = rules(name, 6, 3), made(6, 3)
        assert [tuple(slot) for slot in found["slots"]] == [tuple(slot) for slot in plan]
        told = pipeline.slots(plan), pipeline.utilisation(plan), pipeline.in_flight(plan)
        assert (found["length"], found["utilisation"], found["in_flight"]) == told
    found = rules("forwardBackward", 4, 8)
    assert [slot[:4] for slot in found["slots"]] == [list(slot[:4]) for slot in pipeline.forward_backward(4, 8)]
    assert found["bubble"] == pipeline.bubble(4, 8)
    sms = device("A100").sms
    found = rules("matmulWaves", [256, 128], sms)
    assert [tuple(cliff) for cliff in found["cliffs"]] == [
        tuple(cliff) for cliff in cliffs(range(256, 4097), (256, 128), sms)
    ]
    for n, blocks, many, efficiency in found["steps"]:
        told = waves(matmul_blocks(n, n, (256, 128)), sms)
        assert (blocks, many, efficiency) == (told.blocks, told.waves, told.efficiency)


@pytest.mark.parametrize("lengths", [[100, 7, 0, 33], [5], [64, 64, 64], [0, 0], [3000, 1, 0, 1, 1, 1700]])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_cache_is_dealt_in_equal_ranges(rules, lengths, heads):
    """Every unit of keys to one program, and no program has more than `each`."""
    programs, unit = 8, 16
    found = rules("plan", {"lengths": lengths, "heads": heads, "programs": programs, "unit": unit})
    loads = [0] * programs
    for program, _, _, first, last in found["pieces"]:
        loads[program] += last - first
    assert max(loads) <= found["each"]
    streamed: dict[tuple[int, int], int] = {}
    for _, item, head, first, last in found["pieces"]:
        streamed[item, head] = streamed.get((item, head), 0) + last - first
    want = {(b, h): -(-n // unit) for b, n in enumerate(lengths) for h in range(heads)}
    assert streamed == {at: units for at, units in want.items() if units}
