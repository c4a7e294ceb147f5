"""Clusters that are not here: the simulator agrees with the program's messages, and with what anybody knows."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tilewise import AttentionError
from tilewise.distributed import cluster, execute, plan
from tilewise.distributed.cluster import Exchange
from tilewise.distributed.layout import LAYOUTS
from tilewise.distributed.schedule import Post, schedule
from tilewise.request import Request, Spec
from tilewise_lab.costs.context_parallel import estimate, halo_rows

SHAPE = {"heads": 16, "kv_heads": 4, "dim": 64}


def bytes_of(made, rank: int, backward: bool = False) -> int:
    """What the steps of a rank send, of keys and their gradients."""
    row = 2 * SHAPE["dim"] * SHAPE["kv_heads"] // made.ulysses_size
    moves = [m for step in schedule(made, rank, backward) if isinstance(step, Post) for m in step.sends]
    return sum(m.rows * row * {"kv": 2, "dkv": 4}[m.what] for m in moves if m.what in ("kv", "dkv"))


@pytest.mark.parametrize(
    "words",
    [
        {"causal": True, "strategy": "ring"},
        {"causal": True, "strategy": "allgather"},
        {"window": (700, 0), "strategy": "halo"},
        {"window": (700, 0), "strategy": "ring", "layout": "contiguous"},
        {"strategy": "ring", "layout": "striped"},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_messages(words):
    made = plan(8, seqlen=5003, **words)
    found = made.simulate(**SHAPE)
    assert found.sent.tolist() == [bytes_of(made, r) for r in range(8)]
    assert made.simulate(**SHAPE, backward=True).sent.tolist() == [bytes_of(made, r, True) for r in range(8)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("words", [{"strategy": "ring"}, {"strategy": "allgather"}, {"window": (70, 0)}], ids=str)
def test_what_is_sent_is_what_the_plan_says(words, backward):
    """The bytes of the messages themselves."""
    made = plan(4, seqlen=301, **words)
    q, k, v = (torch.randn(1, 301, n, 64) for n in (16, 4, 4))
    sent = [0] * 4

    def spied(rank, steps):
        """The steps, their messages weighed."""
        try:
            asked = next(steps)
            while True:
                if isinstance(asked, Exchange):
                    sent[rank] += sum(x.numel() * x.element_size() for _, x in asked.sends)
                yield asked
                asked = next(steps)
        except StopIteration as stop:
            return stop.value

    before, after = made.band
    whole = Request(q, k, v, Spec(0.1, before, after))
    ranks = range(4)
    requests = [whole._replace(**{x: made.shard(getattr(whole, x), rank=r) for x in "qkv"}) for r in ranks]
    drive = [spied(r, execute.forward(made, r, requests[r])) for r in ranks]
    saved = [x[2] for x in cluster.rehearse(drive)]
    if backward:
        sent[:] = [0] * 4
        grads = [torch.randn_like(x.out) for x in saved]
        wanted = (False, False)
        drive = [spied(r, execute.backward(made, r, requests[r], saved[r], grads[r], None, wanted)) for r in ranks]
        cluster.rehearse(drive)
    row = 2 * 64 * 4 * 4  # of keys and values, in float32
    moves = [[m for step in schedule(made, r, backward) if isinstance(step, Post) for m in step.sends] for r in ranks]
    assert sent == [sum(m.rows for m in of) * row for of in moves]


def test_faster_links_and_less_work_take_less_time():
    made = plan(16, seqlen=1 << 16, causal=True, strategy="ring")
    slow, fast = (made.simulate(f"8xH200+{net}", **SHAPE) for net in ("100G", "800G"))
    assert slow.time > fast.time
    assert slow.exposed.max() > fast.exposed.max()
    assert 0 < slow.efficiency < fast.efficiency <= 1
    even = plan(16, seqlen=1 << 16, causal=True, strategy="ring").simulate(**SHAPE).time
    assert plan(16, seqlen=1 << 16, causal=True, strategy="ring", layout="contiguous").simulate(**SHAPE).time > even
    assert made.simulate(**SHAPE, backward=True).time > made.simulate(**SHAPE).time


def test_the_ranking_of_strategies():
    """A flat ring holds to some thousand tokens a GPU; then the node's links decide; gathering never pays at scale."""

    def efficiency(s: int, n: int, strategy: str) -> float:
        return plan(n, seqlen=s, causal=True, strategy=strategy).simulate(heads=32, kv_heads=8).efficiency

    assert efficiency(1 << 20, 64, "ring") > 0.85
    assert efficiency(1 << 17, 64, "two-level") > efficiency(1 << 17, 64, "ring") > efficiency(1 << 17, 64, "allgather")
    assert efficiency(1 << 17, 64, "ulysses") < 0.6  # 32 heads


def test_a_tree_takes_no_time_for_the_keys_of_others():
    made = plan(8, seqlen=1 << 20, strategy="tree").simulate(heads=32, kv_heads=8)
    assert made.sent.max() < 1e6
    assert made.time < 1e-3


def test_a_thousand_ranks():
    start = time.perf_counter()
    found = plan(1024, seqlen=1 << 20, causal=True).simulate()
    assert found.plan.strategy == "two-level"
    assert found.compute.shape == (128,)
    same = plan(8, seqlen=1 << 20, causal=True, strategy="two-level").simulate("8xH200+400G", ranks=1024)
    assert same.to_dict() == found.to_dict()
    assert time.perf_counter() - start < 10


def test_numbers_for_others():
    found = plan(4, seqlen=4096, causal=True).simulate(**SHAPE)
    told = json.loads(found.to_json(ranks=2))
    assert {bar["station"] for bar in told["bars"]} == {0, 1}
    assert len(told["compute"]) == 2
    assert "8xH200+400G" in str(found)
    assert "every shard of keys is passed on 3 times" in plan(4, seqlen=4096, causal=True).explain()


def test_an_unknown_machine_says_what_is_known():
    made = plan(2, seqlen=64)
    with pytest.raises(AttentionError, match="network"):
        made.simulate("8xH200+fast")
    with pytest.raises(AttentionError, match="device"):
        made.simulate("8xABACUS")


def ends(*lengths: int) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


@pytest.mark.parametrize(
    ("ranks", "words", "taken"),
    [
        (8, {"cu_seqlens": ends(*[4096] * 32)}, "halo"),  # nothing is cut
        (8, {"cu_seqlens": ends(60000, 71072)}, "ring"),
        (64, {"cu_seqlens": ends(1 << 20)}, "two-level"),
        (64, {"cu_seqlens": ends(300_000, 300_000, 400_000)}, "two-level"),
        (64, {"cu_seqlens": ends(*[4000] * 250)}, "halo"),
        (64, {"cu_seqlens": ends(1 << 20), "heads": 4}, "ring"),  # which a node of 8 cannot share
        (64, {"seqlen": 1 << 20}, "two-level"),
        (8, {"seqlen": 1 << 16}, "ring"),
        (64, {"seqlen": 1 << 20, "window": (4095, 0)}, "halo"),
        (64, {"seqlen": 1 << 17, "window": (60_000, 0)}, "two-level"),
    ],
    ids=str,
)
def test_auto_takes_what_is_simulated_to_be_fast(ranks, words, taken):
    """What `./run plan` would advise among the ring, two levels and the halo."""
    words = words if "window" in words else words | {"causal": True}
    found = plan(ranks, **words)
    heads = words.get("heads", 32)
    options = ["ring", "halo"] + ["two-level"] * (ranks > 8 and heads >= 8)
    each = {x: estimate(plan(ranks, **words | {"strategy": x}), heads=heads).time for x in options}
    assert each[found.strategy] <= 1.05 * min(each.values()), (found, each)
    assert found.strategy == taken


@pytest.mark.parametrize("band", [(None, 0), (None, None), (5, None), (None, 7), (3, 2)], ids=str)
def test_rows_of_a_halo_are_counted_as_they_are_sent(band):
    for layout in LAYOUTS:
        made = plan(5, cu_seqlens=ends(31, 0, 7, 58), window=band, strategy="halo", layout=layout)
        sent = [[sum(b - a for a, b in made.rows_sent(g, s)) for s in range(5)] for g in range(5)]
        assert halo_rows(made).tolist() == sent
