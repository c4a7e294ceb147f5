"""What the browser computes is what the library computes: the rules of the page against those of the traces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tilewise import mods
from tilewise.backends.common.kv.partition import KvTile, Partition
from tilewise.distributed.layout import contiguous, zigzag
from tilewise_lab import trace
from tilewise_lab.costs import cost
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.kv_ranges import ranges
from tilewise_lab.costs.waves import cliffs, matmul_blocks, waves
from tilewise_lab.explore.data import answer
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
    one_block = rules("traffic", {"n": n, "d": 4, "rows": n, "columns": columns})
    assert counted["cached"] == one_block["fa2"]  # K and V are read once
    if not backward:
        assert counted[order] == found["steps"][-1]["loaded"] + found["steps"][-1]["stored"]


def test_chain_rule(rules):
    same(rules("chain", -1.5, 3, 0.5), trace.notes_example(-1.5, 3.0, 0.5))


def masks_of(n: int, size: int, few: bool) -> dict[str, mods.Mod]:
    ends = torch.tensor([0, n * 3 // 8, n * 5 // 8, n], dtype=torch.int32)
    wide, globals_, step = (4, 1, 2) if few else (16, 4, 3)
    near, prefix, block = (size,) * 3 if few else (max(1, size // 4), 2 * size, 2 * size)
    return {
        "causal": mods.window_with_globals(n, 0), "window": mods.window_with_globals(size, 0),
        "globals": mods.window_with_globals(size, globals_), "document": mods.document(cu_seqlens=ends, tokens=n),
        "prefix": mods.prefix_lm(torch.tensor([prefix])), "dilated": mods.dilated_window(size, step),
        "image": mods.neighbourhood_2d(wide, near), "blocks": mods.block_diagonal(block),
        "strided": mods.strided_sparse(size),
    }  # fmt: skip


@pytest.mark.parametrize(("n", "size", "few", "block"), [(32, 8, False, (16, 16)), (7, 2, True, (4, 3))])
@pytest.mark.parametrize("kind", masks_of(32, 8, False))
def test_masks_are_what_attention_sees(rules, kind, n, size, few, block):
    """A picture against the keys that attention itself uses: v is a unit matrix, so out holds the weights."""
    mod, causal = masks_of(n, size, few)[kind], kind == "causal"
    found = rules("mask", {"kind": kind, "n": n, "size": size, "block": block, "few": few})
    q, v = torch.zeros(1, n, 1, 8), torch.eye(n)[None, :, None]
    out = tilewise.attention(q, q, v, mask_mod=mod, causal=causal, backend="reference")[0, :, 0]
    assert torch.equal(torch.tensor(found["rows"]), out > 0)
    for i, line in enumerate(found["tiles"]):
        for j, kind_of_tile in enumerate(line):
            seen = (out > 0)[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            assert kind_of_tile == (2 if seen.all() else int(seen.any()))


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
    small = rules("tokenWaves", 4, 2, 6)
    for n, blocks, many, efficiency in small["steps"]:
        told = waves(2 * -(-n // 4), 6)
        assert (blocks, many, efficiency) == (told.blocks, told.waves, told.efficiency)
    assert [at for at, *_ in small["cliffs"]] == [13]  # 8 blocks on 6 slots
    for n, blocks, many, efficiency in found["steps"]:
        told = waves(matmul_blocks(n, n, (256, 128)), sms)
        assert (blocks, many, efficiency) == (told.blocks, told.waves, told.efficiency)


@pytest.mark.parametrize("lengths", [[100, 7, 0, 33], [5], [64] * 3, [0, 0], [3000, 1, 0, 1, 1, 1700], [90, 80] * 9])
@pytest.mark.parametrize(("heads", "programs", "shortest"), [(1, 8, 16), (2, 8, 16), (2, 40, 64)])
def test_a_cache_is_divided_as_by_the_schedule(rules, lengths, heads, programs, shortest):
    """The work items in their order, the splits of each, and every chunk of keys read once for each head."""
    unit = 16
    asked = {"lengths": lengths, "heads": heads, "programs": programs, "unit": unit, "shortest": shortest}
    found = rules("plan", asked)
    sizes = (found["resident"], found["least"], found["target"], heads, unit, 1, 16, 1, shortest // unit)
    told = ranges(
        Partition(KvTile(16, unit, 4, 2, 2), len(lengths), 1, *sizes), [(1, n, 0) for n in lengths], 4, after=0
    )
    splits = found["splits"]
    assert list(dict.fromkeys(b for b, _, _ in splits)) == [item.b for item in told.items]
    counts = found["each"], len(splits) * heads, found["divided"], found["parts"]
    assert counts == (told.each, told.busy, told.divided, told.parts)
    read = sorted((b, head, chunk) for _, b, head, a, z, _ in found["pieces"] for chunk in range(a, z))
    assert read == [(b, h, c) for b, n in enumerate(lengths) for h in range(heads) for c in range(-(-n // unit))]
    ends: dict[int, int] = {}
    for program, _, _, first, last, start in found["pieces"]:  # a processor does one thing at a time, without a pause
        assert start == ends.get(program, 0)
        ends[program] = start + last - first + found["cost"]
    assert max(ends.values(), default=0) == found["length"]
    assert set(ends) <= set(range(programs))


def test_a_cache_on_an_h200_has_the_sizes_of_the_library(rules):
    lengths, heads, one = [8192, 100, 4096, 700], 8, answer("gpus", {})["H200"]
    sizes = {"unit": one["unit"], "programs": one["programs"], "factor": one["factor"], "quarters": one["quarters"]}
    found = rules("plan", {"lengths": lengths, "heads": heads, **sizes})
    told = tilewise.explain_kv((4, 1, 32, 128), (4, 8192, heads, 128), None, lengths, device="H200", show=False)
    want = told.partition
    assert (found["resident"], found["least"], found["target"]) == (want.resident, want.least, want.wanted_splits)
    dealt = ranges(want, [(1, n, 0) for n in lengths], 4, after=0)
    assert (found["each"], found["divided"], found["parts"]) == (dealt.each, dealt.divided, dealt.parts)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("n", "ranks"), [(8, 4), (11, 3), (1, 2)])
def test_a_ring_holds_the_tokens_of_the_library(rules, layout, n, ranks):
    found = rules("ring", {"n": n, "ranks": ranks, "layout": layout, "causal": True})
    shards = {"contiguous": contiguous, "zigzag": zigzag}[layout]([n], ranks)
    assert found["held"] == [[i for run in shard for i in range(run.start, run.start + run.size)] for shard in shards]
    assert sum(map(sum, found["pairs"])) == n * (n + 1) // 2
    for r, row in enumerate(found["pairs"]):
        assert row[0] == len(found["held"][r]) * (len(found["held"][r]) + 1) // 2
